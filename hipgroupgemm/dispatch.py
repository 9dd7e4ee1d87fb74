"""The front door: parse -> canonicalize -> plan -> execute, each entered once, and the two caches between them.

A call is looked at once. What came of it is kept in a `CallCache` under the layouts of its operands (shapes, strides, types, alignments,
device, stream) and its settings; the same call with other arrays finds it there and costs reading addresses. Every check that depends on
more than the key (sizes on the host, overlap with out) is made again. NumPy, CuPy and torch arrays are read here directly; calls with any
other, or with a stream, a workspace or a check of their own, are parsed each time and only their canonical form is remembered.
"""

from __future__ import annotations

import functools
import itertools
import operator
import os
import sys
import weakref
from collections.abc import Callable, Hashable
from typing import Any, Generic, Protocol, TypeVar

import numpy as np

from hipgroupgemm.backends import selection
from hipgroupgemm.backends.base import Arguments, Multiprocessors
from hipgroupgemm.operands import arrays
from hipgroupgemm.operands.device_array import order_streams
from hipgroupgemm.operands.dtypes import DTYPES
from hipgroupgemm.operands.exchange import exchange_reader
from hipgroupgemm.operands.views import ArrayView, numpy_view, packed_strides
from hipgroupgemm.problem.canonicalize import GroupCount, Problem, check_host_values
from hipgroupgemm.problem.dimension_numbers import RaggedDotDimensionNumbers
from hipgroupgemm.problem.parse import ARRAYS, Call, parse
from hipgroupgemm.runtime import get_runtime
from hipgroupgemm.runtime.forks import new_rlock

__all__ = ["CallCache", "Plan", "PlanCache", "PreparedCall", "run", "take_output"]

_MOST_CALLS = 512
_MOST_READERS = 256
CHECK_VARIABLE = "HIPGROUPGEMM_CHECK"
_SYNC = str(b"sync", "ascii")  # an object of its own: the environment's word, not the caller's
ticks = itertools.count(1)
# no int and no float: 1 and 1.0 would be found under True, which is no int anywhere
_PLAIN = set(
    (str, bool, type, type(None), GroupCount, Multiprocessors, RaggedDotDimensionNumbers, *(type(dtype) for dtype in DTYPES.values()))
)
_SCALARS = (float, int, type(None))


class Plan(Protocol):
    """What a call needs of a plan: `GroupedMatmulPlan` is one."""

    def launch(self, arguments: Arguments, pointers: dict[str, int] | None = None) -> bool:
        """Runs arguments that are checked, with operands at `pointers` where they are given; false where the plan is closed."""

    def retire(self) -> None:
        """Closes it as soon as no call uses it; does not wait."""

    @property
    def captured(self) -> bool:
        """Whether a graph capture used it."""

    last_use: int
    """`ticks` at the latest use."""


class PreparedCall:
    """What a call came to, for all calls with operands of the same layouts: everything but addresses.

    Attributes:
        plan: what runs it; None where the operands do not collapse to a config. problem: in canonical form.
        version: `selection.version` when the plan was chosen.
    """

    __slots__ = ("_c_like_out", "_call", "_drops_c", "_last", "_like", "_out_reach", "_reaches", "_sizes", "plan", "problem", "version")

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
        self._last: Arguments | None = None

    def may_overlap(self, pointers: dict[str, int]) -> bool:
        """Whether the caller's out may share memory with another operand, so that the call has to be parsed."""
        start = pointers.get("out", 0)
        end = start + self._out_reach
        if start == end:
            return False
        found = [role for role, reach in self._reaches if start < pointers[role] + reach and pointers[role] < end]
        return found != [] and not (found == ["c"] and self._c_like_out and pointers["c"] == start)

    def again(self, pointers: dict[str, int], lhs: Any, out: Any) -> Any:
        """Makes the call with operands at these addresses; `_CLOSED` where the plan has been closed meanwhile. A new out is like lhs."""
        call, result = self._call, out
        if out is None:
            problem, like = self.problem, self._like
            result, pointers["out"] = arrays.empty(problem.axes.out_shape, problem.out_dtype, like, call.device, call.stream, lhs)
        arguments = self._last  # nothing but addresses differs from the call before
        if arguments is None:
            arguments = self._arguments(pointers, call)
        elif self._drops_c:
            pointers["c"] = 0
        if arguments is not None and self.plan is not None and not self.plan.launch(arguments, pointers):
            return _CLOSED
        return arrays.deliver(result, self._like, call.device) if out is None else arrays.written(out)

    def run(self, call: Call) -> bool:
        """Makes a call that was parsed: operands of any producer, each in the order of its own stream. False where the plan is closed."""
        _check_capture(call)
        pointers = {role: view.pointer for role, view in call.views.items() if role not in ("workspace", "group_offset")}
        arguments = self._arguments(pointers, call)
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

    def _arguments(self, pointers: dict[str, int], call: Call) -> Arguments | None:
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
            config, pointers, sizes, call.ends, offset, call.tail, call.check, call.stream, call.views.get("workspace"), bounds
        )
        if not on_host and call is self._call:
            self._last = arguments
        return arguments


_CLOSED = object()


class CallCache:
    """Calls by key, bounded: all are forgotten when there are too many."""

    def __init__(self) -> None:
        self.calls: dict[Hashable, PreparedCall] = {}
        _caches.add(self)

    def __len__(self) -> int:
        return len(self.calls)

    def get(self, key: Hashable) -> PreparedCall | None:
        """The call of that key, unless backends or stored results have changed since."""
        found = self.calls.get(key)
        return None if found is None or found.version != selection.version else found

    def put(self, key: Hashable, prepared: PreparedCall) -> None:
        """Keeps a call."""
        if len(self.calls) >= _MOST_CALLS:
            self.calls.clear()
        self.calls[key] = prepared

    def clear(self) -> None:
        """Forgets all."""
        self.calls.clear()


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
    others = {stream for stream in map(arrays.producer_stream, call.views.values()) if stream not in (None, call.stream)}
    if not others or _capturing(call):  # a graph cannot wait for streams that it does not have: its owner orders it
        return set()
    return others


def _keep_alive(call: Call) -> None:
    """Keeps the operands until the device has passed the call, but for those whose allocator waits for this stream by itself.

    That is so for memory whose own stream is this one, or is out's, which has just been made to wait.
    """
    if call.device.kind == "cpu":
        return
    waiting = {call.stream, arrays.producer_stream(call.views["out"])} - {None}
    kept = [
        view.owner
        for view in call.views.values()
        if view.owner is not None and not (view.framework in ("cupy", "torch") and arrays.producer_stream(view) in waiting)
    ]
    if kept and not _capturing(call):  # a graph's owner keeps what the graph uses
        get_runtime(call.device.kind).keep_alive(call.device.index, call.stream, kept)


def _capturing(call: Call) -> bool:
    runtime = get_runtime(call.device.kind)
    with runtime.use_device(call.device.index):
        return runtime.is_capturing(call.stream)


# ---- reading arrays directly -------------------------------------------------------------------------------------------------

_Read = tuple["Hashable", "dict[str, int]", int]
_Reader = Callable[["dict[str, Any]", Any], "_Read | None"]


def _read(arguments: dict[str, Any], settings: tuple[Any, ...]) -> tuple[tuple[Hashable, ...], dict[str, int]] | None:
    """A call's key and the operands' addresses, or None for a call that has to be parsed."""
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
        else:
            return None
    return tuple(layouts), pointers, 0


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
        else:
            return None
    return tuple(layouts), pointers, arrays.current_cupy_stream(arguments["lhs"].data.device_id)


def _torch_reader(types: tuple[type, ...]) -> _Reader:
    """Reads plain tensors and parameters, where no transformation and no recording of gradients may miss the call."""
    torch: Any = sys.modules["torch"]
    recording, read = torch.is_grad_enabled, exchange_reader(types, _ROLES) or functools.partial(_read_tensors, types)
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
            else:
                return None
        index = tensors[0].get_device()
    except RuntimeError:  # a sparse or nested tensor has no address or no strides
        return None
    return tuple(layouts), pointers, 0 if index < 0 else arrays.current_torch_stream(index)


_ROLES = tuple("group_sizes" if name == "offs" else name for name in ARRAYS)
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


_P = TypeVar("_P", bound=Plan)

# ---- plans -------------------------------------------------------------------------------------------------------------------


class PlanCache(Generic[_P]):
    """The plans that functions keep, by key: bounded, the least recently used goes first and is closed.

    A plan that a graph capture used is never evicted: the graph writes through its scratch memory.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._lock = new_rlock()
        self._version = selection.version
        self._plans: dict[Hashable, _P] = {}
        _caches.add(self)

    def __len__(self) -> int:
        return len(self._plans)

    def get(self, key: Hashable, make: Callable[[], _P]) -> _P:
        """The plan of that key, made where there is none yet."""
        with self._lock:
            if self._version != selection.version:  # each plan has to be made by the backends and stored results that are there now
                self._version = selection.version
                dropped = self._drop(list(self._plans))
            else:
                dropped = []
            found, version = self._plans.get(key), self._version
        for plan in dropped:
            plan.retire()
        if found is not None:
            found.last_use = next(ticks)
            return found
        plan = make()
        plan.last_use = next(ticks)
        with self._lock:
            if key in self._plans or version != selection.version:  # another thread was faster, or the choice may be another now
                again = True
            else:
                again, self._plans[key] = False, plan
                unused = sorted((k for k in self._plans if k != key), key=lambda k: self._plans[k].last_use)
                dropped = self._drop(unused[: max(0, len(self._plans) - self._limit)])
        if again:
            plan.retire()
            return self.get(key, make)
        for old in dropped:
            old.retire()
        return plan

    def _drop(self, keys: list[Hashable]) -> list[_P]:
        """Forgets plans, but for those that graphs use; whoever holds them closes them, without the lock."""
        return [self._plans.pop(key) for key in keys if not self._plans[key].captured]

    def clear(self) -> int:
        """Forgets and closes all plans but those that a graph capture used; how many those are."""
        with self._lock:
            dropped, kept = self._drop(list(self._plans)), len(self._plans)
        for plan in dropped:
            plan.retire()
        return kept

    def forget(self) -> None:
        """Drops everything without touching a device: for a forked child, which has none."""
        self._plans = {}


_caches: weakref.WeakSet[CallCache | PlanCache[Any]] = weakref.WeakSet()


def _after_fork() -> None:
    for cache in list(_caches):
        if isinstance(cache, PlanCache):
            cache.forget()
        else:
            cache.clear()


os.register_at_fork(after_in_child=_after_fork)
