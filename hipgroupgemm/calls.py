"""One call's operands, checked: what `ragged_dot` and `GroupedMatmulPlan.execute` have in common before and after a backend runs."""

from __future__ import annotations

import dataclasses
import math
import numbers
from typing import Any

import numpy as np

from hipgroupgemm.backends.base import Arguments, Executable
from hipgroupgemm.config import FLOAT32_MAX, GroupedGemmConfig, RaggedDotMode
from hipgroupgemm.operands import arrays
from hipgroupgemm.operands.dtypes import compute_type_of, float_dtype
from hipgroupgemm.operands.views import ArrayView, Device, packed_strides
from hipgroupgemm.problem.dimension_numbers import RaggedDotAxes
from hipgroupgemm.problem.groups import GroupFault, scan
from hipgroupgemm.runtime.streams import normalize_stream, stream_handle

__all__ = ["Operands", "gather", "host_array"]


@dataclasses.dataclass(slots=True)
class Operands:
    """The views of one call's arguments and its settings; `out` is None until it is made."""

    lhs: ArrayView
    rhs: ArrayView
    sizes: ArrayView
    ends: bool
    out: ArrayView | None
    out_object: Any
    c: ArrayView | None
    bias: ArrayView | None
    group_offset: int | ArrayView | None
    alpha: float
    beta: float
    tail: str
    check: str
    device: Device
    stream: int
    workspace: ArrayView | None

    @property
    def sizes_name(self) -> str:
        """What the sizes are called in the caller's arguments."""
        return "offs" if self.ends else "group_sizes"

    @property
    def output(self) -> ArrayView:
        """out's view, once `take_output` has seen to it."""
        if self.out is None:
            raise RuntimeError("out: is not there yet")
        return self.out

    def expected_output(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> ArrayView:
        """The caller's out, checked against shape and dtype, or a stand-in for the packed one that will be made; c is checked too."""
        if self.c is not None:
            _expect("c", self.c, shape, dtype)
        if self.out is None:
            return ArrayView(0, shape, packed_strides(shape, dtype.itemsize), dtype, self.device, self.lhs.framework)
        _expect("out", self.out, shape, dtype)
        return self.out

    def require_memory(self) -> None:
        """Refuses operands that have elements but no address, such as an `ArraySpec`."""
        for name, view in (
            ("lhs", self.lhs),
            ("rhs", self.rhs),
            (self.sizes_name, self.sizes),
            ("out", self.out),
            ("c", self.c if self.beta else None),
            ("bias", self.bias),
            ("group_offset", self.group_offset if isinstance(self.group_offset, ArrayView) else None),
        ):
            if view is not None and view.pointer == 0 and view.size:
                raise ValueError(f"{name}: has shape {view.shape} but no memory (an ArraySpec?); pass an array to compute with")

    def take_output(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> None:
        """Makes out where the caller gave none; refuses one, and a workspace, that overlaps an operand."""
        operands = [
            (name, view)
            for name, view in (
                ("lhs", self.lhs),
                ("rhs", self.rhs),
                (self.sizes_name, self.sizes),
                ("group_offset", self.group_offset if isinstance(self.group_offset, ArrayView) else None),
                ("c", self.c),
                ("bias", self.bias),
            )
            if view is not None
        ]
        if self.out is None:
            self.out_object, self.out = arrays.empty(shape, dtype, self.lhs, self.device, self.stream)
        else:
            for name, view in operands:
                if _overlap(self.out, view) and not (name == "c" and _same_elements(self.out, view)):
                    exactly = " without being exactly c" if name == "c" else ""
                    raise ValueError(f"out: shares memory with {name}{exactly}; give it memory of its own")
        if self.workspace is not None:
            for name, view in [*operands, ("out", self.out)]:
                if _overlap(self.workspace, view):
                    raise ValueError(f"workspace: shares memory with {name}; give it memory of its own")

    def validate_host_values(self, axes: RaggedDotAxes) -> None:
        """Refuses wrong sizes and a wrong group offset where they lie on the host; on the device they are clamped and flagged."""
        self.require_memory()
        if self.sizes.device.kind == "cpu" and axes.mode is not RaggedDotMode.BATCH:
            fault = scan(host_array(self.sizes), axes.ragged_extent, ends=self.ends).fault
            if fault is not None:
                fault.throw(axes.ragged_extent)
        largest = axes.group_total - axes.group_count
        if isinstance(self.group_offset, int) and not 0 <= self.group_offset <= largest:
            GroupFault("group_offset", 0, 0, self.group_offset, largest).throw(axes.ragged_extent)

    def check_capture(self) -> None:
        """Refuses what a graph capture cannot hold: host values that would be baked in, and waiting."""
        if self.device.kind == "cpu" or (self.sizes.device.kind != "cpu" and self.check == "none"):
            return
        from hipgroupgemm.runtime import get_runtime

        runtime = get_runtime(self.device.kind)
        with runtime.use_device(self.device.index):
            capturing = runtime.is_capturing(self.stream)
        if capturing:
            if self.check == "sync":
                raise RuntimeError(
                    'check="sync": a stream under graph capture cannot be waited for; capture with "none", then plan.check()'
                )
            raise RuntimeError(
                f"{self.sizes_name}: lies on the host while the stream is under graph capture; its values would be frozen into the "
                "graph, so pass it on the device"
            )

    def arguments(self, config: GroupedGemmConfig) -> Arguments:
        """What the backend gets."""
        offset = 0 if self.group_offset is None else self.group_offset
        return Arguments(
            config=config,
            pointers={
                "lhs": self.lhs.pointer,
                "rhs": self.rhs.pointer,
                "out": self.output.pointer,
                "c": self.c.pointer if self.c is not None and config.beta else 0,
                "bias": self.bias.pointer if self.bias is not None else 0,
            },
            group_sizes=_sizes_of(config, self.sizes),
            ends=self.ends,
            group_offset=offset,
            tail=self.tail,
            check=self.check,
            stream=self.stream,
            workspace=self.workspace,
        )

    def run(self, executable: Executable, config: GroupedGemmConfig) -> None:
        """Orders the streams, launches, and checks where asked to.

        Where out has no elements there is nothing to launch, unless sizes on a device may be wrong.
        """
        if 0 in self.output.shape and self.sizes.device.kind == "cpu":
            return
        self._order_streams(before=True)
        executable.execute(self.arguments(config))
        self._order_streams(before=False)
        if self.check == "sync":
            fault = executable.check()
            if fault is not None:
                fault.throw(config.ragged_extent)

    def _order_streams(self, *, before: bool) -> None:
        """Before: this stream waits for the operands' producers. After: out's producer waits for this stream."""
        if self.device.kind == "cpu":
            return
        views = (self.lhs, self.rhs, self.sizes, self.c, self.bias, self.out) if before else (self.out,)
        producers = {arrays.producer_stream(view) for view in views if view is not None}
        if producers - {None, self.stream}:
            from hipgroupgemm.operands.device_array import order_streams

            for stream in producers:
                if stream is None or stream == self.stream:
                    continue
                first, second = (stream, self.stream) if before else (self.stream, stream)
                order_streams(self.device, first, second)


def _sizes_of(config: GroupedGemmConfig, sizes: ArrayView) -> ArrayView:
    """The sizes with the axes that backends expect: (group_total,), or (batch, group_total) where they differ by batch entry.

    The caller's may have more: batch axes that merge into one, axes of length 1.
    """
    if sizes.ndim == 1:
        return sizes
    shape: tuple[int, ...] = (config.group_total,)
    strides = sizes.strides[-1:]
    if config.sizes_per_batch:
        steps = [stride for extent, stride in zip(sizes.shape[:-1], sizes.strides[:-1], strict=True) if extent != 1]
        shape, strides = (config.batch_count, *shape), (steps[-1], *strides)
    return dataclasses.replace(sizes, shape=shape, strides=strides)


def host_array(view: ArrayView) -> np.ndarray[Any, Any]:
    """A view of host memory as a NumPy array."""
    from hipgroupgemm.backends.reference import numpy_view

    return numpy_view(view.pointer, view.shape, view.strides, view.dtype)


def gather(
    lhs: Any,
    rhs: Any,
    group_sizes: Any,
    *,
    offs: Any,
    out: Any,
    c: Any,
    bias: Any,
    alpha: Any,
    beta: Any,
    group_offset: Any,
    tail: str,
    check: str,
    stream: Any,
    workspace: Any,
) -> Operands:
    """Views of all arguments, with types, devices and settings checked; shapes are not looked at yet.

    Raises:
        TypeError: an argument that is no array, or of a wrong kind of type; out immutable.
        ValueError: a setting that is no choice, devices that differ, beta without c.
        NotImplementedError: operands that are not floating.
    """
    if tail not in ("zero", "undefined"):
        raise ValueError(f'tail={tail!r}: must be "zero" or "undefined"')
    if check not in ("none", "sync"):
        raise ValueError(f'check={check!r}: must be "none" or "sync"')
    a, b = _real("alpha", alpha), _real("beta", beta)
    if b != 0 and c is None:
        raise ValueError(f"beta={b}: there is no c to scale; pass c, or leave beta at 0")
    if (group_sizes is None) == (offs is None):
        got = "neither" if offs is None else "both"
        raise TypeError(f"group_sizes and offs: got {got}, wanted exactly one of them")
    asked = None if stream is None else stream_handle(stream)
    lhs_view = arrays.view_of(lhs, "lhs", asked)
    if lhs_view.device.kind in ("cpu", "any"):
        handle = asked or 0
    else:
        own = arrays.current_stream(lhs_view.framework, lhs_view.device) if asked is None else asked
        handle = normalize_stream(lhs_view.device.kind, own)
    rhs_view = arrays.view_of(rhs, "rhs", handle)
    float_dtype(lhs_view.dtype, "lhs")
    float_dtype(rhs_view.dtype, "rhs")
    if max(abs(a), abs(b)) > FLOAT32_MAX and compute_type_of(lhs_view.dtype, rhs_view.dtype) != "float64":
        name, value = ("alpha", a) if abs(a) > FLOAT32_MAX else ("beta", b)
        raise ValueError(f"{name}={value}: is infinite in float32, in which these operands are accumulated; scale an operand as well")
    sizes_name = "group_sizes" if offs is None else "offs"
    sizes = _integers(group_sizes if offs is None else offs, sizes_name, handle)
    out_view = _output(out, handle) if out is not None else None
    c_view = arrays.view_of(c, "c", handle) if c is not None else None
    bias_view = arrays.view_of(bias, "bias", handle) if bias is not None else None
    offset = _offset(group_offset, handle) if group_offset is not None else None
    workspace_view = arrays.view_of(workspace, "workspace", handle) if workspace is not None else None
    named = [("lhs", lhs_view), ("rhs", rhs_view)]
    named += [
        (name, view)
        for name, view in (("out", out_view), ("c", c_view), ("bias", bias_view), ("workspace", workspace_view))
        if view is not None
    ]
    device = arrays.common_device(named)
    if workspace_view is not None and workspace_view.readonly:
        raise TypeError("workspace: is read-only; pass a writable array")
    for name, view in ((sizes_name, sizes), ("group_offset", offset)):
        if isinstance(view, ArrayView) and view.device.kind != "cpu":
            arrays.common_device([("lhs", lhs_view), ("rhs", rhs_view), (name, view)])
            if device.kind == "cpu":
                raise ValueError(f"{name} is on {view.device}, but lhs is on {device}; move one of them")
    return Operands(
        lhs_view,
        rhs_view,
        sizes,
        offs is not None,
        out_view,
        out,
        c_view,
        bias_view,
        offset,
        a,
        b,
        tail,
        check,
        device,
        handle,
        workspace_view,
    )


def _real(name: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, (numbers.Real, np.floating, np.integer)):
        if isinstance(value, numbers.Complex) and not isinstance(value, bool):
            raise NotImplementedError(f"{name}={value!r}: must be real")
        raise TypeError(f"{name}: got {type(value).__name__}, wanted a real number on the host")
    try:
        result = float(value)
    except OverflowError:
        result = math.inf
    if not math.isfinite(result):
        raise ValueError(f"{name}={result}: must be finite")
    return result


def _integers(value: Any, name: str, stream: int) -> ArrayView:
    if isinstance(value, (list, tuple)):
        try:
            value = np.asarray(value)
        except ValueError as error:  # nested lists of different lengths
            raise TypeError(f"{name}: got a {type(value).__name__} that is no array ({error}); wanted integers") from None
        if value.size == 0:  # no element says what type they would have
            value = value.astype(np.int64)
    view = arrays.view_of(value, name, stream)
    if view.dtype.kind not in "iu":
        raise TypeError(f"{name}: got {view.dtype!s}, wanted an integer type")
    if not view.dtype.isnative:
        raise TypeError(f"{name}: got {view.dtype!s} of foreign byte order; convert it to the native one")
    return view


def _offset(value: Any, stream: int) -> int | ArrayView:
    """group_offset as a host int, or as a view where it lies on a device."""
    if isinstance(value, (int, np.integer)) and not isinstance(value, bool):
        return int(value)
    if isinstance(value, (numbers.Number, np.generic, str)):
        raise TypeError(f"group_offset: got {type(value).__name__}, wanted an int or an integer array of shape (1,)")
    view = _integers(value, "group_offset", stream)
    if view.shape not in ((), (1,)):
        raise TypeError(f"group_offset: got shape {view.shape}, wanted an int or shape (1,)")
    if view.pointer == 0 and view.device.kind == "cpu":
        raise ValueError("group_offset: has no memory (an ArraySpec?); pass its value")
    return int(host_array(view).reshape(())) if view.device.kind == "cpu" else view


def _output(out: Any, stream: int) -> ArrayView:
    view = arrays.view_of(out, "out", stream)
    if view.framework == "jax":
        raise TypeError("out: JAX arrays are immutable; leave out away and use the result")
    if view.readonly:
        raise TypeError("out: is read-only; pass a writable array")
    reach = view.dtype.itemsize
    steps = zip(view.strides, view.shape, strict=True)
    for stride, extent in sorted(step for step in steps if step[1] > 1) if view.size else ():
        if stride < reach:
            raise ValueError(
                f"out: its elements overlap in memory, it has strides {view.strides} (bytes) for shape {view.shape}; "
                "pass an array of its own, not a broadcast or sliding view"
            )
        reach += stride * (extent - 1)
    return view


def _expect(name: str, view: ArrayView, shape: tuple[int, ...], dtype: np.dtype[Any]) -> None:
    if view.shape != shape:
        raise TypeError(f"{name}: got shape {view.shape}, wanted {shape}")
    if view.dtype != dtype:
        raise TypeError(
            f"{name}: got {view.dtype!s}, wanted {dtype.name}"
            + ("; preferred_element_type sets out's type" if name == "out" else ", out's type")
        )


class _Addresses:
    """Lets NumPy reason about addresses without touching the memory there."""

    def __init__(self, view: ArrayView) -> None:
        self.__array_interface__ = {
            "version": 3,
            "data": (view.pointer, True),
            "shape": view.shape,
            "strides": view.strides,
            "typestr": f"|V{view.dtype.itemsize}",
        }


def _overlap(first: ArrayView, second: ArrayView) -> bool:
    """Whether two views share an element's byte; undecided after a bounded search counts as yes."""
    if first.device != second.device:
        return False
    if not (first.pointer < second.pointer + second.reach and second.pointer < first.pointer + first.reach):
        return False
    shares_memory: Any = np.shares_memory  # its stubs know no bound of work
    try:
        return bool(shares_memory(np.asarray(_Addresses(first)), np.asarray(_Addresses(second)), max_work=100_000))
    except RuntimeError:  # TooHardError is one
        return True


def _same_elements(first: ArrayView, second: ArrayView) -> bool:
    strides = zip(first.shape, first.strides, second.strides, strict=True)
    return (
        first.pointer == second.pointer
        and first.shape == second.shape
        and first.dtype == second.dtype
        and all(extent <= 1 or a == b for extent, a, b in strides)
    )
