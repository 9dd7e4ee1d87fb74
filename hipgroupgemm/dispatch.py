"""The front door: parse -> canonicalize -> plan -> execute, each entered once, with the caches of calls and plans in between.

A call is looked at once. What came of it is kept in a `CallCache` under the layouts of its operands (shapes, strides, types, alignments,
device, stream) and its settings; the same call with other arrays finds it there and costs reading addresses. Every check that depends on
more than the key (sizes on the host, overlap with out) is made again. NumPy, CuPy and torch arrays are read here directly; calls with any
other, or with a stream, a workspace or a check of their own, are parsed each time and only their canonical form is remembered.
"""

from __future__ import annotations

import functools
import operator
import os
import sys
from collections.abc import Callable, Hashable
from typing import Any

import numpy as np

from hipgroupgemm.backends import selection
from hipgroupgemm.backends.base import Arguments, Multiprocessors
from hipgroupgemm.caches import CallCache, Plan
from hipgroupgemm.operands import arrays
from hipgroupgemm.operands.device_array import order_streams
from hipgroupgemm.operands.dtypes import DTYPES
from hipgroupgemm.operands.exchange import exchange_reader
from hipgroupgemm.operands.views import ArrayView, ListView, numpy_view, packed_strides
from hipgroupgemm.problem.canonicalize import GroupCount, Problem, check_host_values
from hipgroupgemm.problem.dimension_numbers import RaggedDotDimensionNumbers
from hipgroupgemm.problem.parse import ARRAYS, ROLES, Call, parse
from hipgroupgemm.runtime import get_runtime

__all__ = ["PreparedCall", "run", "take_output"]

_MOST_READERS = 256
CHECK_VARIABLE = "HIPGROUPGEMM_CHECK"
_SYNC = str(b"sync", "ascii")  # an object of its own: the environment's word, not the caller's
# no int and no float: 1 and 1.0 would be found under True, which is no int anywhere
_PLAIN = set(
    (str, bool, type, type(None), GroupCount, Multiprocessors, RaggedDotDimensionNumbers, *(type(dtype) for dtype in DTYPES.values()))
)
_SCALARS = (float, int, type(None))


class PreparedCall:
    """What a call came to, for all calls with operands of the same layouts: everything but addresses.

    Attributes:
        plan: what runs it; None where the operands do not collapse to a config. problem: in canonical form.
        version: `selection.version` when the plan was chosen.
    """

    __slots__ = (
        *("_c_like_out", "_call", "_drops_c", "_last", "_like", "_listed", "_out_reach", "_reaches", "_sizes"),
        *("plan", "problem", "version"),
    )

    def __init__(self, plan: Plan | None, problem: Problem, call: Call) -> None:
        self.plan, self.problem, self.version = plan, problem, selection.version
        sizes = call.sizes
        self._sizes = (problem.sizes_shape, problem.sizes_strides, sizes.dtype, sizes.device, sizes.framework)
        self._like = ArrayView(0, (), (), call.lhs.dtype, call.lhs.device, call.lhs.framework)  # keeps no array alive
        self._call = Call({}, call.ends, call.group_offset, call.alpha, call.beta, call.tail, "none", call.device, call.stream)
        self._reaches = tuple((role, view.reach) for role, view in call.views.items() if role != "out")
        c, out = call.views.get("c"), call.views.get("out")
        self._out_reach = 0 if out is None else out.reach
        self._c_like_out = c is not None and out is not None and (c.shape, c.strides) == (out.shape, out.strides)  # may be exactly out
        self._drops_c = c is not None and problem.config is not None and not problem.config.beta
        self._listed = tuple(role for role, view in call.views.items() if isinstance(view, ListView))
        self._last: Arguments | None = None

    def may_overlap(self, pointers: dict[str, Any]) -> bool:
        """Whether the caller's out may share memory with another operand, so that the call has to be parsed."""
        if self._listed:
            return self._lists_may_overlap(pointers)
        start = pointers.get("out", 0)
        end = start + self._out_reach
        if start == end:
            return False
        found = [role for role, reach in self._reaches if start < pointers[role] + reach and pointers[role] < end]
        return found != [] and not (found == ["c"] and self._c_like_out and pointers["c"] == start)

    def _lists_may_overlap(self, pointers: dict[str, Any]) -> bool:
        """As `may_overlap`, where operands are lists: no array of out may meet any other array."""
        if "out" not in pointers:
            return False
        reaches = dict(self._reaches)
        if self._c_like_out and pointers.get("c") == pointers["out"]:
            del reaches["c"]
        spans = []
        for role, reach in (*reaches.items(), ("out", self._out_reach)):
            starts = pointers[role] if role in self._listed else (pointers[role],)
            spans += [(start, start + reach, role == "out") for start in starts]
        end = end_of_out = 0
        for start, stop, is_out in sorted(spans):
            if start < end_of_out or (is_out and start < end):
                return True
            if is_out:
                end_of_out = stop
            else:
                end = max(end, stop)
        return False

    def again(self, pointers: dict[str, Any], lhs: Any, out: Any) -> Any:
        """Makes the call with operands at these addresses; `_CLOSED` where the plan has been closed meanwhile. A new out is like lhs."""
        call, result, lists = self._call, out, None
        if self._listed:
            lists = {role: pointers[role] for role in self._listed if role != "c" or not self._drops_c}
            pointers.update({role: pointers[role][0] for role in self._listed})
        if out is None:
            problem, like = self.problem, self._like
            result, pointers["out"] = arrays.empty(problem.axes.out_shape, problem.out_dtype, like, call.device, call.stream, lhs)
        arguments = self._last  # nothing but addresses differs from the call before
        if arguments is None:
            arguments = self._arguments(pointers, lists, call)
        elif self._drops_c:
            pointers["c"] = 0
        if arguments is not None and self.plan is not None and not self.plan.launch(arguments, pointers, lists):
            return _CLOSED
        return arrays.deliver(result, self._like, call.device) if out is None else arrays.written(out)

    def run(self, call: Call) -> bool:
        """Makes a call that was parsed: operands of any producer, each in the order of its own stream. False where the plan is closed."""
        _check_capture(call)
        pointers = {role: view.pointer for role, view in call.views.items() if role not in ("workspace", "group_offset")}
        lists = {
            role: view.pointers for role, view in call.views.items() if isinstance(view, ListView) and (role != "c" or not self._drops_c)
        }
        arguments = self._arguments(pointers, lists, call)
        if arguments is None or self.plan is None:
            return True
        others = _other_streams(call)
        for other in others:
            order_streams(call.device, other, call.stream)
        if not self.plan.launch(arguments):
            return False
        for other in others:
            order_streams(call.device, call.stream, other)
        _keep_alive(call)
        return True

    def _arguments(self, pointers: dict[str, int], lists: dict[str, tuple[int, ...]] | None, call: Call) -> Arguments | None:
        """What the backend gets, host values checked; None where there is nothing to launch."""
        shape, strides, dtype, device, framework = self._sizes
        sizes = ArrayView(pointers["group_sizes"], shape, strides, dtype, device, framework)
        on_host = device.kind == "cpu"
        host = numpy_view(sizes.pointer, shape, strides, dtype) if on_host else None
        bounds = check_host_values(self.problem.axes, host, call.ends, call.group_offset)
        config = self.problem.config
        if config is None or (0 in self.problem.axes.out_shape and (on_host or 0 in shape)):
            return None
        if not config.beta:
            pointers["c"] = 0
        offset = call.views.get("group_offset", call.group_offset or 0)
        arguments = Arguments(
            config, pointers, sizes, call.ends, offset, call.tail, call.check, call.stream, call.views.get("workspace"), bounds, lists or {}
        )
        if not on_host and call is self._call:
            self._last = arguments
        return arguments


_CLOSED = object()


_Run = Callable[..., Any]


def _as_the_environment_says(run: _Run) -> _Run:
    """`run`, with check="sync" in every call where HIPGROUPGEMM_CHECK is that; every call raises ValueError for a word that is none."""
    said = os.environ.get(CHECK_VARIABLE, "").strip()
    if said in ("", "none"):
        return run

    def checking(arguments: dict[str, Any], *others: Any) -> Any:
        if said != "sync":
            raise ValueError(f'{CHECK_VARIABLE}={said}: must be "sync" or "none"; it is read when hipgroupgemm is imported')
        if arguments["check"] == "none":
            arguments = {**arguments, "check": _SYNC}
        return run(arguments, *others)

    return checking


@_as_the_environment_says
def run(
    arguments: dict[str, Any],
    cache: CallCache,
    settings: Callable[[dict[str, Any]], tuple[Any, ...]] | None,
    prepare: Callable[[Call, dict[str, Any]], PreparedCall],
    uncollapsed: Callable[[Call, dict[str, Any], Problem], None],
) -> Any:
    """Makes a call of a public function, and returns its out.

    Args:
        arguments: the function's, by name.
        cache: where it is remembered. settings: reads those of the arguments that are no operands; None without any.
        prepare: looks at a parsed call that is not remembered.
        uncollapsed: runs a call whose operands do not collapse to a config.
    """
    values = settings(arguments) if settings is not None else ()
    remembered = _PLAIN.issuperset(map(type, values))
    read = _read(arguments, values) if remembered else None
    if read is not None:
        key, pointers = read
        prepared = cache.calls.get(key)  # not get(): this is the path whose host time counts
        if prepared is not None and prepared.version == selection.version and not prepared.may_overlap(pointers):
            result = prepared.again(pointers, arguments["lhs"], arguments["out"])
            if result is not _CLOSED:
                return result
            cache.clear()
    while True:
        call = parse(arguments)
        parsed_key = (call.layout_key(), call.stream, values)
        found = cache.get(parsed_key) if remembered else None
        if found is None and "out" in call.views:
            call.refuse_overlap()
        prepared = prepare(call, arguments) if found is None else found
        if remembered and found is None:
            cache.put(parsed_key, prepared)
        call.require_memory()
        out = take_output(call, arguments["out"], prepared.problem)
        if prepared.run(call):
            if prepared.plan is None:
                uncollapsed(call, arguments, prepared.problem)
            elif read is not None:
                cache.put(read[0], prepared)
            return arrays.deliver(out, call.lhs, call.device) if arguments["out"] is None else arrays.written(out)
        cache.clear()  # its plans were evicted and closed


def take_output(call: Call, out: Any, problem: Problem) -> Any:
    """The caller's out, or a new one where there is none; refuses one, and a workspace, that overlaps an operand."""
    if out is None:
        shape, dtype = problem.axes.out_shape, problem.out_dtype
        out, pointer = arrays.empty(shape, dtype, call.lhs, call.device, call.stream, call.lhs.owner)
        call.views["out"] = ArrayView(
            pointer, shape, packed_strides(shape, dtype.itemsize), dtype, call.device, call.lhs.framework, owner=out
        )
    call.refuse_overlap()
    return out


def _check_capture(call: Call) -> None:
    """Refuses what a graph capture cannot hold: host values that would be frozen into it, and waiting."""
    on_host = call.sizes.device.kind == "cpu"
    if call.device.kind == "cpu" or (not on_host and call.check == "none"):
        return
    if not _capturing(call):
        return
    if call.check is _SYNC:
        call.check = "none"
    if call.check == "sync":
        raise RuntimeError('check="sync": a stream under graph capture cannot be waited for; capture with "none", then plan.check()')
    if on_host:
        raise RuntimeError(
            f"{call.sizes_name}: lies on the host while the stream is under graph capture; its values would be frozen into the "
            "graph, so pass it on the device"
        )


def _other_streams(call: Call) -> set[int]:
    """The operands' streams that wait for this one and it for them: a producer may still write, and then write on what is being read."""
    if call.device.kind == "cpu":
        return set()
    parts = [part for view in call.views.values() for _, part in view.parts("")]
    others = {stream for stream in map(arrays.producer_stream, parts) if stream not in (None, call.stream)}
    if not others or _capturing(call):  # a graph cannot wait for streams that it does not have: its owner orders it
        return set()
    return others


def _keep_alive(call: Call) -> None:
    """Keeps the operands until the device has passed the call, but for those whose allocator waits for this stream by itself.

    That is so for memory whose own stream is this one, or is out's, which has just been made to wait.
    """
    if call.device.kind == "cpu":
        return
    waiting = {call.stream, *(arrays.producer_stream(view) for _, view in call.views["out"].parts("out"))} - {None}
    kept = [
        view.owner
        for whole in call.views.values()
        for _, view in whole.parts("")
        if view.owner is not None and not (view.framework in ("cupy", "torch") and arrays.producer_stream(view) in waiting)
    ]
    if kept and not _capturing(call):  # a graph's owner keeps what the graph uses
        get_runtime(call.device.kind).keep_alive(call.device.index, call.stream, kept)


def _capturing(call: Call) -> bool:
    runtime = get_runtime(call.device.kind)
    with runtime.use_device(call.device.index):
        return runtime.is_capturing(call.stream)


# ---- reading arrays directly -------------------------------------------------------------------------------------------------

_Read = tuple["Hashable", "dict[str, Any]", int]
_Reader = Callable[["dict[str, Any]", Any], "_Read | None"]


def _read(arguments: dict[str, Any], settings: tuple[Any, ...]) -> tuple[tuple[Hashable, ...], dict[str, Any]] | None:
    """A call's key and the operands' addresses (of a list a tuple of them), or None for a call that has to be parsed."""
    if arguments["stream"] is not None or arguments["workspace"] is not None:
        return None
    if type(arguments["check"]) is not str or arguments["check"] != "none" or type(arguments["tail"]) is not str:
        return None
    scalars = (arguments["alpha"], arguments["beta"], arguments["group_offset"])
    if not (type(scalars[0]) in _SCALARS and type(scalars[1]) in _SCALARS and type(scalars[2]) in (int, type(None))):
        return None
    if (arguments["offs"] is None) == (arguments["group_sizes"] is None):
        return None
    kind: Any = type(arguments["lhs"])
    reader = _readers[kind] if kind in _readers else _choose_reader(kind)
    found = None if reader is None else reader(arguments, kind)
    if found is None or 0 in found[1].values():  # without memory: a freed storage (or no elements); parsed, and refused by name
        return None
    layouts, pointers, stream = found
    return (kind, layouts, stream, scalars, arguments["tail"], settings), pointers


def _read_numpy(arguments: dict[str, Any], kind: Any) -> _Read | None:
    layouts: list[Hashable] = []
    pointers = {}
    for name, role in _ROLES_OF_ARRAYS:
        array = arguments[name]
        if array is None:
            layouts.append(None)
        elif type(array) is kind:
            pointer = array.__array_interface__["data"][0]
            pointers[role] = pointer
            layouts += (pointer & 15, array.shape, array.strides, array.dtype, name != "out" or array.flags.writeable)
        elif not _read_list(array, (kind,), _numpy_array, role, layouts, pointers):
            return None
    return tuple(layouts), pointers, 0


def _read_list(
    entries: Any,
    kinds: tuple[type, ...],
    read: Callable[[Any], tuple[Any, ...]],
    role: str,
    layouts: list[Hashable],
    pointers: dict[str, Any],
) -> bool:
    """Adds a list of arrays of one layout, all with memory: `read` gives one's address and layout. False for what is no such list."""
    if type(entries) not in (list, tuple) or not entries or not ROLES[role].listed:
        return False
    first = read(entries[0])[1:] if type(entries[0]) in kinds else ()
    found = [read(entry) if type(entry) in kinds else (0,) for entry in entries]
    if any(entry[0] == 0 or entry[1:] != first for entry in found):
        return False
    pointers[role] = tuple([entry[0] for entry in found])
    layouts += (len(found), functools.reduce(operator.or_, pointers[role]) & 15, *first)
    return True


def _numpy_array(array: Any) -> tuple[Any, ...]:
    return array.__array_interface__["data"][0], array.shape, array.strides, array.dtype, array.flags.writeable


def _read_cupy(arguments: dict[str, Any], kind: Any) -> _Read | None:
    layouts: list[Hashable] = []
    pointers = {}
    for name, role in _ROLES_OF_ARRAYS:
        array = arguments[name]
        if array is None:
            layouts.append(None)
        elif type(array) is kind:
            data = array.data
            pointer = pointers[role] = data.ptr
            layouts += (pointer & 15, array.shape, array.strides, array.dtype.num, data.device_id)
        elif not _read_list(array, (kind,), _cupy_array, role, layouts, pointers):
            return None
    return tuple(layouts), pointers, arrays.current_cupy_stream(arguments["lhs"].data.device_id)


def _cupy_array(array: Any) -> tuple[Any, ...]:
    return array.data.ptr, array.shape, array.strides, array.dtype.num, array.data.device_id


def _torch_reader(types: tuple[type, ...]) -> _Reader:
    """Reads plain tensors and parameters, where no transformation and no recording of gradients may miss the call."""
    torch: Any = sys.modules["torch"]
    recording, read = torch.is_grad_enabled, exchange_reader(types, _ROLES, _LISTS) or functools.partial(_read_tensors, types)
    transforming = arrays.torch_transforming
    return lambda arguments, _: None if transforming() else read(_operands_of(arguments), recording())


def _read_tensors(types: tuple[type, ...], tensors: tuple[Any, ...], recording: bool) -> _Read | None:
    """What `exchange_reader` reads, from Python."""
    layouts: list[Hashable] = []
    pointers = {}
    try:
        for role, tensor in zip(_ROLES, tensors, strict=True):
            if tensor is None:
                layouts.append(None)
            elif type(tensor) in types and not (recording and tensor.requires_grad) and not tensor.is_neg():
                pointer = pointers[role] = tensor.data_ptr()
                layouts += (pointer & 15, tensor.shape, tensor.stride(), tensor.dtype, tensor.device)
            elif not _read_list(tensor, types, functools.partial(_tensor, recording), role, layouts, pointers):
                return None
        index = tensors[0].get_device()
    except RuntimeError:  # a sparse or nested tensor has no address or no strides
        return None
    return tuple(layouts), pointers, 0 if index < 0 else arrays.current_torch_stream(index)


def _tensor(recording: bool, tensor: Any) -> tuple[Any, ...]:
    if (recording and tensor.requires_grad) or tensor.is_neg():
        return (0,)
    return tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype, tensor.device


_ROLES = tuple("group_sizes" if name == "offs" else name for name in ARRAYS)
_LISTS = tuple(role for role in _ROLES if ROLES[role].listed)
_ROLES_OF_ARRAYS = tuple(zip(ARRAYS, _ROLES, strict=True))
_operands_of: Callable[[dict[str, Any]], tuple[Any, ...]] = operator.itemgetter(*ARRAYS)
_readers: dict[type, _Reader | None] = {}


def _torch_types() -> tuple[type, ...]:
    torch: Any = sys.modules.get("torch")
    return () if not hasattr(torch, "nn") else (torch.Tensor, torch.nn.Parameter)


def _choose_reader(kind: type) -> _Reader | None:
    found: _Reader | None = _read_numpy if kind is np.ndarray else None
    if kind is getattr(sys.modules.get("cupy"), "ndarray", None):
        found = _read_cupy
    elif kind in (types := _torch_types()):
        found = _torch_reader(types)
        _PLAIN.add(sys.modules["torch"].dtype)
    if len(_readers) >= _MOST_READERS:  # a caller that makes classes without end
        _readers.clear()
    _readers[kind] = found
    return found
