"""The caller's arrays as pointers, shapes, strides, types, devices and streams; and results in the caller's own framework.

NumPy, CuPy, torch, JAX and Numba arrays are taken, and any object with `__cuda_array_interface__` (CAI, version 2 or 3) or DLPack.
No framework is imported that the caller has not imported.
"""

from __future__ import annotations

import dataclasses
import functools
import sys
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from hipgroupgemm.operands import dlpack
from hipgroupgemm.operands.device_array import DeviceArray, set_allocator
from hipgroupgemm.operands.dtypes import DTYPES, dtype_of
from hipgroupgemm.operands.views import CPU, ArrayView, Device, ListView, packed_strides
from hipgroupgemm.runtime import device_of_pointer
from hipgroupgemm.runtime.streams import normalize_stream, protocol_stream

__all__ = [
    "ANYWHERE", "ArraySpec", "ArrayView", "Device", "DeviceArray", "as_array", "common_device", "current_stream", "deliver", "empty",
    "set_allocator", "view_of", "view_or_list_of", "written",
]  # fmt: skip

ANYWHERE = Device("any")
"""The device of an array of no elements whose producer does not say where it is."""

_WANTED = (
    "an array: NumPy, CuPy, torch, JAX, Numba or any object with __cuda_array_interface__ or __dlpack__; "
    "hipgroupgemm.as_array(obj, dtype=...) names a type that the object itself can't"
)


def ArraySpec(shape: Sequence[int], dtype: Any, *, strides: Sequence[int] | None = None, device: Device | str = CPU) -> ArrayView:
    """An array that does not exist: shape, dtype and strides for `config_for_ragged_dot`.

    Args:
        shape: extents.
        dtype: element type, anything `numpy.dtype` takes, "bfloat16" and torch dtypes included.
        strides: bytes; row-major if left out.
        device: where it would lie. It counts as aligned to 16 bytes.

    Example:
        >>> ArraySpec((640, 256), "bfloat16").shape
        (640, 256)
    """
    kind = dtype_of(dtype)
    if any(isinstance(number, bool) for number in (*shape, *(strides or ()))):
        raise TypeError(f"shape={shape!r}, strides={strides!r}: must be ints")
    extents = tuple(int(extent) for extent in shape)
    steps = packed_strides(extents, kind.itemsize) if strides is None else tuple(int(step) for step in strides)
    if any(extent < 0 for extent in extents):
        raise ValueError(f"shape={extents}: extents must not be negative")
    if len(steps) != len(extents):
        raise ValueError(f"strides={steps}: wanted {len(extents)} of them, one for each axis of shape {extents}")
    return ArrayView(0, extents, steps, kind, Device.of(device), "numpy")


def as_array(obj: Any, dtype: Any = None, *, name: str = "obj") -> ArrayView:
    """`obj` as an array that every function of this package takes, its elements read as `dtype`.

    For producers whose interface cannot name a type: CAI says "<V2" for bf16 and "<V1" for every fp8.

    Args:
        obj: any array that the package takes.
        dtype: the element type; must have the item size that the object has. None keeps the object's own.
        name: what errors call it.

    Returns:
        A view that keeps `obj` alive. It shares its memory; nothing is copied.

    Raises:
        TypeError: no array, or an item size other than dtype's.

    Example:
        >>> as_array(np.zeros((2, 3), np.uint16), dtype="bfloat16").dtype.name
        'bfloat16'
    """
    view = obj if isinstance(obj, ArrayView) else _adapter(type(obj))(obj, name, None)  # type: ignore[arg-type]
    if dtype is not None:
        wanted = dtype_of(dtype)
        if wanted.itemsize != view.dtype.itemsize:
            raise TypeError(f"dtype={wanted.name}: has {wanted.itemsize} bytes an element, {name} has {view.dtype.itemsize}")
        view = dataclasses.replace(view, dtype=wanted)
    else:
        _require_type(view, name)
    return view


def _require_type(view: ArrayView, name: str) -> None:
    if view.dtype.kind == "V" and view.dtype.name not in DTYPES:
        raise TypeError(f"{name}: its interface names no element type ({view.dtype.str}); use as_array(obj, dtype=...)")


def view_of(obj: Any, name: str, stream: int | None = None) -> ArrayView:
    """`obj` as a view, checked: strides are multiples of the item size and none is negative.

    Args:
        obj: the caller's array.
        name: the argument's name, for errors.
        stream: the stream that will read it, where that is known: producers with stream rules order themselves before it.
    """
    view = obj if isinstance(obj, ArrayView) else _adapter(type(obj))(obj, name, stream)  # type: ignore[arg-type]
    _require_type(view, name)
    itemsize = view.dtype.itemsize
    wrong = [axis for axis, stride in enumerate(view.strides) if stride < 0 or stride % itemsize]
    if wrong:
        for axis in wrong:
            if view.shape[axis] > 1 and 0 not in view.shape:
                what = "is negative" if view.strides[axis] < 0 else f"is no multiple of the item size, {itemsize}"
                raise ValueError(f"{name}: the stride of axis {axis} ({view.strides[axis]} bytes) {what}; pass a contiguous copy")
        # along axes of at most one element a stride says nothing
        strides = tuple(0 if axis in wrong else stride for axis, stride in enumerate(view.strides))
        view = dataclasses.replace(view, strides=strides)
    return view


def view_or_list_of(obj: Any, name: str, stream: int | None = None) -> ArrayView:
    """As `view_of`; a list or tuple of arrays of one shape, type, device and strides, one per group, becomes a `ListView`."""
    if not isinstance(obj, (list, tuple)):
        return view_of(obj, name, stream)
    if not obj:
        raise TypeError(f"{name}: got an empty {type(obj).__name__}, which has no shape and no type; pass an array of no groups instead")
    entries = tuple([view_of(entry, f"{name}[{number}]", stream) for number, entry in enumerate(obj)])
    first = entries[0]
    device = next((entry.device for entry in entries if entry.device != ANYWHERE), ANYWHERE)
    steps = [axis for axis, extent in enumerate(first.shape) if extent > 1 and 0 not in first.shape]
    for number, entry in enumerate(entries):
        for what, got, wanted in (("shape", entry.shape, first.shape), ("type", entry.dtype, first.dtype)):
            if got != wanted:
                raise TypeError(f"{name}[{number}]: has {what} {got}, but {name}[0] has {wanted}; all arrays of a list have one")
        if entry.device not in (device, ANYWHERE):
            raise ValueError(f"{name}[{number}] is on {entry.device}, but other arrays of the list are on {device}; move it")
        if any(entry.strides[axis] != first.strides[axis] for axis in steps):
            both = f"{name}[{number}]: has strides {entry.strides} (bytes), but {name}[0] has {first.strides}"
            raise ValueError(f"{both}; all arrays of a list have the same")
    framework = first.framework if all(entry.framework == first.framework for entry in entries) else ""
    shape, strides = (len(entries), *first.shape), (0, *first.strides)
    return ListView(first.pointer, shape, strides, first.dtype, device, framework, entries=entries)


# ---- the frameworks ----------------------------------------------------------------------------------------------------------

_Adapter = Callable[[Any, str, "int | None"], ArrayView]


def _is_subclass(kind: type, framework: str, path: str) -> bool:
    """Whether `kind` is a class of a framework, looked for only where the framework is imported already."""
    found: Any = sys.modules.get(framework)
    for part in path.split("."):
        found = getattr(found, part, None)
    return isinstance(found, type) and issubclass(kind, found)


@functools.lru_cache(256)  # bounded, as a caller may make classes without end
def _adapter(kind: type) -> _Adapter:
    """How to view an object of this type."""
    if issubclass(kind, np.ndarray):
        return _numpy_view
    if _is_subclass(kind, "torch", "Tensor"):
        return _torch_view
    if _is_subclass(kind, "cupy", "ndarray"):
        return _cupy_view
    if _is_subclass(kind, "jax", "core.Tracer"):
        return _refuse_tracer
    if _is_subclass(kind, "jax", "Array") or kind.__module__.partition(".")[0] == "jaxlib":
        return _jax_view
    if getattr(kind, "__module__", "") == "hipgroupgemm.operands.device_array":
        return _own_view
    return _interface_view


def _own_view(obj: Any, name: str, stream: int | None) -> ArrayView:
    del name, stream
    view: ArrayView = obj.view()
    return view


def _interface_view(obj: Any, name: str, stream: int | None) -> ArrayView:
    """Any object with CAI, or else DLPack; a class may have the attribute and an instance refuse it."""
    interface = getattr(obj, "__cuda_array_interface__", None)
    if interface is not None:
        return _cai_view(obj, interface, name)
    if hasattr(obj, "__dlpack__") and hasattr(obj, "__dlpack_device__"):
        return _dlpack_view(obj, name, stream)
    raise TypeError(f"{name}: got {type(obj).__name__}, wanted {_WANTED}")


def _numpy_view(obj: Any, name: str, stream: int | None) -> ArrayView:
    del stream
    if isinstance(obj, np.ma.MaskedArray):
        raise TypeError(f"{name}: got a masked array, whose mask would be lost; pass its .filled(value)")
    return ArrayView(
        obj.ctypes.data if obj.size else 0, obj.shape, obj.strides, obj.dtype, CPU, "numpy", None, not obj.flags.writeable, obj
    )


_torch_dtypes: dict[Any, np.dtype[Any]] = {}
_of_torch: dict[np.dtype[Any], Any] = {}


def _torch_dtype(dtype: Any, name: str) -> np.dtype[Any]:
    if dtype not in _torch_dtypes:
        text = str(dtype).removeprefix("torch.")
        try:
            _torch_dtypes[dtype] = DTYPES[text] if text in DTYPES else np.dtype(text)
        except TypeError:
            raise NotImplementedError(f"{name}: got {dtype}, wanted a floating type, one of {', '.join(DTYPES)}") from None
    return _torch_dtypes[dtype]


def torch_transforming() -> bool:
    """Whether torch is tracing, or transforms what runs now: then no tensor may be read by its address."""
    interpreters, modes, tracing, forward, tangents = _torch_states()
    return interpreters() is not None or modes() != 0 or tracing() is not None or (forward._current_level >= 0 and tangents())


@functools.cache
def _torch_states() -> tuple[Callable[[], Any], Callable[[], int], Callable[[], Any], Any, Callable[[], bool]]:
    torch: Any = sys.modules["torch"]
    c = torch._C
    return (
        c._functorch.peek_interpreter_stack,
        c._len_torch_dispatch_stack,
        c._get_tracing_state,
        torch.autograd.forward_ad,
        c._is_fwd_grad_enabled,
    )


def _refuse_transformed(tensor: Any, name: str) -> None:
    """Refuses by name a tensor that has no storage, carries a tangent or is being traced: its values are not at its address."""
    torch: Any = sys.modules["torch"]
    c, what = torch._C, ""
    if tensor.is_nested:
        what = "is a nested tensor; pass its values and offsets (offs=) instead"
    elif type(tensor).__name__ == "FakeTensor":
        what = f"is a {type(tensor).__name__} on {tensor.device} without data (torch.compile, torch.export or make_fx)"
    elif torch_transforming():
        if c._get_tracing_state() is not None:
            what = "is being traced by torch.jit.trace, whose graph would miss this call"
        elif _traced(c):
            what = "is being traced (make_fx, torch.export or a fake mode), and the graph would miss this call"
        elif c._functorch.peek_interpreter_stack() is not None:
            what = "is inside a torch.func transformation (vmap, grad, vjp, jvp or linearize), which cannot see through this call"
        elif torch.autograd.forward_ad.unpack_dual(tensor).tangent is not None:
            what = "carries a forward-mode tangent, which would be lost"
    if not what and c._functorch.is_functorch_wrapped_tensor(tensor):
        what = "is left over from a torch.func transformation (vmap, grad, jvp or functionalize) that has ended"
    if not what and type(tensor) not in (torch.Tensor, torch.nn.Parameter) and not _has_storage(tensor):
        what = f"is a {type(tensor).__name__} without storage of its own"
    if what:
        raise NotImplementedError(f"{name}: {what}; pass plain tensors outside of such a transformation")


def _traced(c: Any) -> bool:
    """Whether one of torch's dispatch modes records what runs now."""
    modes = [str(type(c._get_dispatch_stack_at(i))) for i in range(c._len_torch_dispatch_stack())]
    return any(
        word in mode for mode in modes for word in ("ProxyTorchDispatchMode", "FakeTensorMode", "FunctionalTensorMode", "PreDispatch")
    )


def _has_storage(tensor: Any) -> bool:
    try:
        return bool(tensor.numel() == 0 or tensor.data_ptr() != 0)
    except (RuntimeError, NotImplementedError):
        return False


def _torch_view(obj: Any, name: str, stream: int | None) -> ArrayView:
    del stream
    torch: Any = sys.modules["torch"]
    if obj.layout is not torch.strided:
        raise TypeError(f"{name}: got a tensor of layout {obj.layout}, wanted torch.strided; pass its .to_dense()")
    if obj.is_neg() or obj.is_conj():
        raise TypeError(f"{name}: the tensor has a pending negation or conjugation; pass its .resolve_neg().resolve_conj()")
    _refuse_transformed(obj, name)
    if obj.requires_grad and torch.is_grad_enabled():
        raise NotImplementedError(
            f"{name}: requires grad, but no gradient is recorded through this call; pass {name}.detach() or use torch.no_grad()"
        )
    kind = obj.device.type
    if kind == "cpu":
        device = CPU
    elif kind == "cuda":
        device = Device("rocm" if torch.version.hip else "cuda", obj.device.index)
    else:
        raise NotImplementedError(f"{name}: lies on torch device {obj.device}; wanted cpu or cuda (ROCm's devices are cuda in torch)")
    dtype = _torch_dtype(obj.dtype, name)
    size = dtype.itemsize
    strides = tuple([stride * size for stride in obj.stride()])
    return ArrayView(obj.data_ptr(), tuple(obj.shape), strides, dtype, device, "torch", None, False, obj)


def _cupy_view(obj: Any, name: str, stream: int | None) -> ArrayView:
    del name, stream
    data = obj.data
    return ArrayView(data.ptr, obj.shape, obj.strides, obj.dtype, Device(_cupy_kind(), data.device_id), "cupy", None, False, obj)


@functools.cache
def _cupy_kind() -> str:
    return "rocm" if sys.modules["cupy"].cuda.runtime.is_hip else "cuda"


def _refuse_tracer(obj: Any, name: str, stream: int | None) -> ArrayView:
    del stream
    raise TypeError(
        f"{name}: got a JAX tracer ({type(obj).__name__}), which has no data; call this outside jax.jit and other transformations, "
        "or through jax.pure_callback"
    )


def _jax_view(obj: Any, name: str, stream: int | None) -> ArrayView:
    if _is_subclass(type(obj), "jax", "core.Tracer"):
        return _refuse_tracer(obj, name, stream)
    devices = list(obj.devices())
    if all(device.platform == "cpu" for device in devices):
        host = np.asarray(obj)
        return ArrayView(host.ctypes.data if host.size else 0, host.shape, host.strides, host.dtype, CPU, "jax", None, True, (obj, host))
    if len(devices) > 1:
        raise NotImplementedError(f"{name}: is spread over {len(devices)} devices; wanted an array on one of them")
    view = _dlpack_view(obj, name, stream)
    view.framework, view.readonly, view.owner = "jax", True, (obj, view.owner)
    return view


def _cai_view(obj: Any, interface: Any, name: str) -> ArrayView:
    """Protocol: https://numba.readthedocs.io/en/stable/cuda/cuda_array_interface.html (versions 0 to 3)."""
    try:
        shape, (pointer, readonly) = tuple(int(n) for n in interface["shape"]), interface["data"]
        dtype = np.dtype(interface["typestr"])
        version, pointer = int(interface["version"]), int(pointer or 0)
        given = interface.get("strides")
        strides = packed_strides(shape, dtype.itemsize) if given is None else tuple(int(step) for step in given)
        if len(strides) != len(shape) or min(shape, default=0) < 0:
            raise ValueError(f"shape {shape} with strides {strides}")
    except (KeyError, TypeError, ValueError) as error:
        raise TypeError(f"{name}: its __cuda_array_interface__ is malformed ({type(error).__name__}: {error})") from None
    if version > 3:
        raise NotImplementedError(f"{name}: __cuda_array_interface__ version {version}; wanted up to 3")
    if interface.get("mask") is not None:
        raise NotImplementedError(f"{name}: is masked, and its mask would be lost; pass it unmasked")
    produced_on = interface.get("stream") if version >= 3 else None
    if produced_on == 0:
        raise ValueError(f"{name}: __cuda_array_interface__ stream 0 is ambiguous; the producer should say 1 (legacy) or 2 (per thread)")
    if pointer:
        device = Device(*device_of_pointer(pointer))
    elif 0 in shape:
        device = ANYWHERE
    else:
        raise ValueError(f"{name}: its pointer is 0, though it has elements, shape {shape}")
    framework = "numba" if type(obj).__module__.partition(".")[0] == "numba" else ""
    return ArrayView(pointer, shape, strides, dtype, device, framework, produced_on, bool(readonly), obj)


def _dlpack_view(obj: Any, name: str, stream: int | None) -> ArrayView:
    device = dlpack.device_of(obj, name)
    arguments: dict[str, Any] = {}
    if device.kind != "cpu":
        arguments["stream"] = protocol_stream(device.kind, stream or 0)
    try:
        capsule = obj.__dlpack__(max_version=(1, 0), **arguments)
    except TypeError:  # a producer from before DLPack 1.0
        capsule = obj.__dlpack__(**arguments)
    view = dlpack.import_capsule(capsule, name)
    view.owner = (obj, capsule)
    if device.kind != "cpu":
        view.stream = stream or 0  # which the producer has made wait; whoever uses the view on another one has that wait for this one
    return view


# ---- devices and streams -----------------------------------------------------------------------------------------------------


def common_device(views: Sequence[tuple[str, ArrayView]]) -> Device:
    """The one device of all views; raises ValueError naming both where two differ."""
    found: tuple[str, Device] | None = None
    for name, view in views:
        if view.device == ANYWHERE:
            continue
        if found is None:
            found = (name, view.device)
        elif view.device != found[1]:
            raise ValueError(f"{name} is on {view.device}, but {found[0]} is on {found[1]}; move one of them")
    return found[1] if found else CPU


def current_stream(framework: str, device: Device) -> int:
    """The stream (device handle) on which the framework's next operation would run; 0, the default, where it has no such notion."""
    if device.kind == "cpu" or framework not in ("cupy", "torch"):
        return 0
    return current_cupy_stream(device.index) if framework == "cupy" else current_torch_stream(device.index)


def current_cupy_stream(index: int) -> int:
    """CuPy's current stream (a handle) of a device: streams are current per device."""
    cuda = sys.modules["cupy"].cuda
    if cuda.runtime.getDevice() == index:
        return int(cuda.get_current_stream().ptr)
    with cuda.Device(index):
        return int(cuda.get_current_stream().ptr)


def current_torch_stream(index: int) -> int:
    """torch's current stream (a handle) of a device."""
    torch: Any = sys.modules["torch"]
    raw = getattr(torch._C, "_cuda_getCurrentRawStream", None)  # what torch's own compiler calls: no Stream object is made
    return int(torch.cuda.current_stream(index).cuda_stream if raw is None else raw(index))


def producer_stream(view: ArrayView) -> int | None:
    """The stream on which a view's contents are produced, or for which its producer has ordered itself; None where nothing need wait."""
    if view.device.kind not in ("cuda", "rocm"):
        return None
    stream = current_stream(view.framework, view.device) if view.framework in ("cupy", "torch") else view.stream
    return None if stream is None else normalize_stream(view.device.kind, stream)


# ---- results -----------------------------------------------------------------------------------------------------------------


def empty(
    shape: tuple[int, ...], dtype: np.dtype[Any], like: ArrayView, device: Device, stream: int, source: Any = None
) -> tuple[Any, int]:
    """An uninitialised array of the framework of `like`, on `device`, and its address; `source` may be an array of that kind there.

    The memory is the framework's own (NumPy, CuPy, torch); JAX on a GPU, Numba and unknown producers get a `DeviceArray` here,
    which `deliver` turns into what they use.
    """
    if like.framework == "torch":
        torch: Any = sys.modules["torch"]
        kind = _of_torch.get(dtype) or _of_torch.setdefault(dtype, getattr(torch, dtype.name))
        if type(source) is torch.Tensor:  # half the time of torch.empty
            tensor = source.new_empty(shape) if source.dtype is kind else source.new_empty(shape, dtype=kind)
        else:
            tensor = torch.empty(shape, dtype=kind, device="cpu" if device.kind == "cpu" else f"cuda:{device.index}")
        return tensor, tensor.data_ptr()
    if device.kind == "cpu":
        host = np.empty(shape, dtype)
        return host, host.__array_interface__["data"][0]
    if like.framework == "cupy":
        cupy: Any = sys.modules["cupy"]
        if cupy.cuda.runtime.getDevice() == device.index:
            array = cupy.empty(shape, dtype)
        else:
            with cupy.cuda.Device(device.index):
                array = cupy.empty(shape, dtype)
        return array, int(array.data.ptr)
    made = DeviceArray.empty(shape, dtype, device, stream)
    return made, made.ptr


def written(out: Any) -> Any:
    """The caller's out, once it has been written: torch is told, so that autograd refuses a backward that needed what was there."""
    if isinstance(out, (list, tuple)):
        for one in out:
            written(one)
        return out
    owner = out.owner if type(out) is ArrayView else out
    torch: Any = sys.modules.get("torch")
    if torch is not None and isinstance(owner, torch.Tensor) and not owner.is_inference():
        increment_version = getattr(torch.autograd.graph, "increment_version", None)  # torch 2.1 and newer
        if increment_version is not None:
            increment_version(owner)
    return out


def deliver(result: Any, like: ArrayView, device: Device) -> Any:
    """What `empty` made, as the caller gets it."""
    if like.framework == "jax":
        jax: Any = sys.modules["jax"]
        if device.kind == "cpu":
            return jax.device_put(result, next(iter(like.owner[0].devices())))
        return jax.dlpack.from_dlpack(result)
    if like.framework == "numba" and device.kind != "cpu":
        # on the default stream, which Numba launches on, nothing has to wait: else Numba would have the host wait
        return sys.modules["numba"].cuda.as_cuda_array(result, sync=bool(result.stream))
    return result
