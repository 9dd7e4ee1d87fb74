"""Plain producers (CAI of versions 2 and 3, DLPack) and Numba: their streams and ours wait for each other as the protocols demand.

On a device a kernel that takes a while holds a stream up. In Triton's interpreter every stream is a queue of which only that is run which
something waits for. Either way what is not ordered comes too late or too early, and the same tests with the ordering left out see it.
"""

from __future__ import annotations

import contextlib
import math
from typing import Any

import numpy as np
import pytest
from producers import CudaArray, DLPackArray

import hipgroupgemm as hgg
from hipgroupgemm import dispatch
from hipgroupgemm import runtime as runtimes
from hipgroupgemm.operands import arrays
from hipgroupgemm.operands.device_array import DeviceArray
from hipgroupgemm.operands.views import Device
from hipgroupgemm.runtime.parameters import KernelParameters

KINDS = [
    pytest.param("cuda", marks=pytest.mark.cuda),
    pytest.param("interpreter", marks=pytest.mark.interpreter),
]
SHAPES = {"lhs": (33, 24), "rhs": (3, 24, 40), "group_sizes": (3,), "out": (33, 40)}
SIZES = np.array([9, 0, 21], np.int32)

_HOLD = """
extern "C" __global__ void hold(long long ticks) {
  const long long begin = clock64();
  while (clock64() - begin < ticks) {}
}
"""
_TICKS = 300_000_000  # 0.15 s at 2 GHz


class GPU:
    """A device: work on a stream is held up by a kernel that takes a while."""

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self.runtime = runtimes.get_runtime(kind)
        self.streams: list[int] = []

    def stream(self) -> int:
        self.streams.append(self.runtime.create_stream(0))
        return self.streams[-1]

    def hold(self, stream: int) -> None:
        function = self.runtime.module_from_source(_HOLD, "hold.cu", ("-std=c++17",), 0).get_function("hold")
        parameters = KernelParameters(["i64"])
        parameters.set(_TICKS)
        self.runtime.launch(function, (1, 1, 1), (1, 1, 1), 0, stream, parameters)

    def copy(self, to: int, source: int, nbytes: int, stream: int) -> None:
        self.runtime.memcpy_async(to, source, nbytes, stream)

    def order(self, first: int, second: int) -> None:
        event = self.runtime.create_event(0)
        self.runtime.record_event(event, first)
        self.runtime.wait_event(second, event)
        self.runtime.destroy_event(event)

    def finish(self, *streams: int) -> None:
        for stream in streams:
            self.runtime.synchronize_stream(stream)

    def close(self) -> None:
        self.runtime.synchronize_device(0)
        for stream in self.streams:
            self.runtime.destroy_stream(stream)


class Queues(GPU):
    """The interpreter's device with streams that run nothing of their own accord: what is waited for runs, and what that waits for."""

    def __init__(self, runtime: Any, monkeypatch: Any) -> None:
        super().__init__("cuda")
        self.queues: dict[int, list[Any]] = {}
        self.done: dict[int, int] = {}
        self.events: dict[int, tuple[int, int]] = {}
        for name in ("do", "record_event", "wait_event", "query_event"):
            monkeypatch.setattr(runtime, name, getattr(self, f"_{name}"))
        monkeypatch.setattr(runtime, "synchronize_stream", self._run)
        monkeypatch.setattr(runtime, "synchronize_event", lambda event: self._run(*self.events.get(event, (0, 0))))
        monkeypatch.setattr(runtime, "synchronize_device", lambda _=0: [self._run(stream) for stream in list(self.queues)])
        monkeypatch.setattr(runtime, "free_plain", lambda *_: None)  # what is queued may still use it
        monkeypatch.setattr(runtime, "host_free", lambda *_: None)

    def _do(self, stream: int, work: Any) -> None:
        self.queues.setdefault(stream, []).append(work)

    def _record_event(self, event: int, stream: int = 0) -> None:
        self.events[event] = stream, len(self.queues.get(stream, ()))

    def _wait_event(self, stream: int, event: int) -> None:
        what = self.events[event]
        self._do(stream, lambda: self._run(*what))

    def _query_event(self, event: int) -> bool:
        stream, place = self.events.get(event, (0, 0))  # of a test before this one, whose queues have all been run
        return self.done.get(stream, 0) >= place

    def _run(self, stream: int = 0, place: int | None = None) -> None:
        queue = self.queues.setdefault(stream, [])
        place = len(queue) if place is None else place
        while self.done.get(stream, 0) < place:
            at = self.done.get(stream, 0)
            self.done[stream] = at + 1
            queue[at]()

    def hold(self, stream: int) -> None:
        """Everything is held up."""


@pytest.fixture(params=KINDS)
def machine(request, monkeypatch):
    with contextlib.ExitStack() as stack:
        if request.param == "interpreter":
            from triton_interpreter import interpreted

            made: GPU = Queues(stack.enter_context(interpreted(monkeypatch)), monkeypatch)
        else:
            made = GPU(request.param)
        stack.callback(made.close)
        hgg.clear_plan_cache()
        stack.callback(hgg.clear_plan_cache)
        yield made


class DLPackOnDevice(DLPackArray):
    """Device memory behind DLPack, produced on a stream: whoever asks for it says on which stream, and that one waits."""

    def __init__(self, machine: GPU, memory: DeviceArray, stream: int) -> None:
        super().__init__(np.zeros(memory.shape, memory.dtype), device=(2, 0))
        self.managed.dl_tensor.data = memory.ptr
        self.machine, self.stream, self.memory = machine, stream, memory

    def __dlpack__(self, **arguments: Any) -> Any:
        asked = arguments.get("stream")
        assert asked is None or asked >= -1
        if asked != -1:
            self.machine.order(self.stream, 0 if asked in (None, 1) else asked)
        return super().__dlpack__(**arguments)


def exported(form: str, machine: GPU, memory: DeviceArray, stream: int) -> Any:
    if form == "DLPack":
        return DLPackOnDevice(machine, memory, stream)
    named = {"stream": stream} if form == "CAI 3" else {"version": 2}
    return CudaArray(memory.shape, memory.dtype.str, memory.ptr, **named)


def nbytes_of(memory: DeviceArray) -> int:
    return math.prod(memory.shape) * memory.dtype.itemsize


class Problem:
    """Operands on a device, each with what it should hold beside it; the product on the host."""

    def __init__(self, machine: GPU, rng: np.random.Generator) -> None:
        device = Device(machine.kind, 0)
        self.machine = machine
        self.right = {role: rng.standard_normal(SHAPES[role]).astype(np.float16) for role in ("lhs", "rhs")} | {"group_sizes": SIZES}
        self.wrong = {role: np.full(SHAPES[role], np.nan, np.float16) for role in ("lhs", "rhs")}
        self.wrong["group_sizes"] = np.zeros_like(SIZES)
        self.wanted = hgg.ragged_dot_reference(*self.right.values(), preferred_element_type="float32")
        self.memory = {role: DeviceArray.from_numpy(self.right[role], device) for role in self.right}
        self.memory["out"] = DeviceArray.from_numpy(np.full(SHAPES["out"], np.nan, np.float16), device)
        self.masters = {role: DeviceArray.from_numpy(self.right[role], device) for role in self.right}
        self.spoilers = {role: DeviceArray.from_numpy(self.wrong[role], device) for role in self.right}

    def write(self, role: str, source: dict[str, DeviceArray], stream: int) -> None:
        self.machine.copy(self.memory[role].ptr, source[role].ptr, nbytes_of(source[role]), stream)

    def call(self, forms: dict[str, Any], stream: int | None = None) -> None:
        hgg.ragged_dot(*(forms[role] for role in SHAPES if role != "out"), out=forms["out"], stream=stream)

    def is_right(self) -> bool:
        got = self.memory["out"].to_numpy().astype(np.float32)
        return bool((np.abs(got - self.wanted) <= 0.02 * np.abs(self.wanted).max()).all())


def left_out(monkeypatch: Any, form: str) -> None:
    """Leaves the ordering out: ours of streams that are named, or the producer's, which is asked for no waiting."""
    monkeypatch.setattr(dispatch, "order_streams", lambda *_: None)
    if form == "DLPack":
        monkeypatch.setattr(arrays, "protocol_stream", lambda *_: -1)


ORDERED = pytest.mark.parametrize("ordered", [True, False], ids=["ordered", "left out"])


@ORDERED
@pytest.mark.parametrize("own", [False, True], ids=["default stream", "stream="])
@pytest.mark.parametrize("role", ["lhs", "rhs", "group_sizes"])
@pytest.mark.parametrize("form", ["CAI 3", "DLPack"])
def test_an_operand_that_is_being_written_is_waited_for(machine, form, role, own, ordered, rng, monkeypatch):
    problem, ours = Problem(machine, rng), machine.stream() if own else 0
    producing = machine.stream()
    forms = {other: exported(form, machine, held, producing) for other, held in problem.memory.items()}
    if form == "DLPack":  # out may not be waited for either: it has not been written
        forms["out"] = exported("CAI 3", machine, problem.memory["out"], ours or 1)
    problem.call(forms, ours)  # compiled and loaded, which may wait for the device
    machine.finish(producing, ours)
    assert problem.is_right()
    problem.write(role, problem.spoilers, producing)
    machine.copy(problem.memory["out"].ptr, problem.spoilers["lhs"].ptr, 16, producing)
    machine.finish(producing)
    if not ordered:
        left_out(monkeypatch, form)
    machine.hold(producing)
    problem.write(role, problem.masters, producing)
    problem.call(forms, ours)
    machine.finish(ours)
    assert problem.is_right() is ordered


@ORDERED
@pytest.mark.parametrize("role", ["lhs", "rhs", "group_sizes"])
def test_a_producer_that_writes_on_waits_for_the_call(machine, role, ordered, rng, monkeypatch):
    """Version 3 demands it of whoever works on a stream of its own: nothing runs on the named one before that has ended."""
    problem, ours, producing = Problem(machine, rng), machine.stream(), machine.stream()
    forms = {other: exported("CAI 3", machine, held, producing) for other, held in problem.memory.items()}
    forms["out"] = exported("CAI 3", machine, problem.memory["out"], ours)  # so that nothing else makes the producer wait
    problem.call(forms, ours)
    machine.finish(ours, producing)
    if not ordered:
        left_out(monkeypatch, "CAI 3")
    machine.hold(ours)
    problem.call(forms, ours)
    problem.write(role, problem.spoilers, producing)
    machine.finish(producing)
    machine.finish(ours)
    assert problem.is_right() is ordered


@ORDERED
def test_a_consumer_on_the_stream_of_out_waits_for_the_call(machine, ordered, rng, monkeypatch):
    problem, ours, theirs = Problem(machine, rng), machine.stream(), machine.stream()
    forms = {role: exported("CAI 3", machine, held, ours) for role, held in problem.memory.items()}
    forms["out"] = exported("CAI 3", machine, problem.memory["out"], theirs)
    problem.call(forms, ours)
    machine.finish(ours, theirs)
    seen = DeviceArray.from_numpy(np.full(SHAPES["out"], np.nan, np.float16), Device(machine.kind, 0))
    machine.copy(problem.memory["out"].ptr, seen.ptr, nbytes_of(seen), ours)
    machine.finish(ours)
    if not ordered:
        left_out(monkeypatch, "CAI 3")
    machine.hold(ours)
    problem.call(forms, ours)
    machine.copy(seen.ptr, problem.memory["out"].ptr, nbytes_of(seen), theirs)
    machine.finish(theirs)
    machine.finish(ours)
    problem.memory["out"] = seen
    assert problem.is_right() is ordered


@pytest.mark.parametrize("own", [False, True], ids=["default stream", "stream="])
def test_a_view_that_was_made_before_is_ordered_from_where_it_was_made(machine, own, rng):
    """`as_array` asks a DLPack producer on the default stream; a call on another one waits for that."""
    problem, ours, producing = Problem(machine, rng), machine.stream() if own else 0, machine.stream()
    forms = {role: exported("CAI 3", machine, held, ours or 1) for role, held in problem.memory.items()}
    problem.call(forms, ours)
    machine.finish(ours, 0)
    problem.write("lhs", problem.spoilers, producing)
    machine.finish(producing)
    machine.hold(producing)
    problem.write("lhs", problem.masters, producing)
    view = hgg.as_array(exported("DLPack", machine, problem.memory["lhs"], producing))
    problem.call({**forms, "lhs": view}, ours)
    machine.finish(ours)
    assert problem.is_right()


def test_without_a_stream_nothing_waits(machine, rng, monkeypatch):
    """Version 2 knows no streams, and None says that there is nothing to wait for."""
    problem, ordered = Problem(machine, rng), []
    monkeypatch.setattr(dispatch, "order_streams", lambda *streams: ordered.append(streams))
    for named in ({"version": 2}, {"version": 2, "stream": 5}, {"stream": None}, {}, {"stream": 1}):
        forms = {role: CudaArray(held.shape, held.dtype.str, held.ptr, **named) for role, held in problem.memory.items()}
        problem.call(forms)
        assert ordered == []
    machine.finish(0)
    assert problem.is_right()


@pytest.mark.cuda
@ORDERED
@pytest.mark.filterwarnings("ignore")  # Numba's own, at its import
def test_numba_arrays_of_a_stream(ordered, rng, monkeypatch):
    cuda = pytest.importorskip("numba.cuda", exc_type=ImportError)
    machine = GPU("cuda")
    problem, ours, stream = Problem(machine, rng), machine.stream(), cuda.stream()  # ours: Numba's streams wait for the default one
    arrays_of = {role: cuda.device_array(held.shape, held.dtype, stream=stream) for role, held in problem.memory.items()}
    for role, values in (problem.right | {"out": np.full(SHAPES["out"], np.nan, np.float16)}).items():
        arrays_of[role].copy_to_device(values, stream=stream)
    stream.synchronize()
    handle = int(arrays_of["lhs"].__cuda_array_interface__["stream"])
    problem.call(arrays_of, ours)
    machine.finish(ours, handle)
    arrays_of["lhs"].copy_to_device(problem.wrong["lhs"], stream=stream)
    stream.synchronize()
    if not ordered:
        left_out(monkeypatch, "CAI 3")
    machine.hold(handle)
    pointer = arrays_of["lhs"].__cuda_array_interface__["data"][0]
    machine.copy(pointer, problem.masters["lhs"].ptr, nbytes_of(problem.masters["lhs"]), handle)
    problem.call(arrays_of, ours)
    machine.finish(ours)
    got = arrays_of["out"].copy_to_host(stream=stream)
    stream.synchronize()
    close = bool((np.abs(got.astype(np.float32) - problem.wanted) <= 0.02 * np.abs(problem.wanted).max()).all())
    assert close is ordered
    machine.finish(handle)
    if ordered:
        made = hgg.ragged_dot(arrays_of["lhs"], arrays_of["rhs"], arrays_of["group_sizes"])
        assert type(made).__module__.startswith("numba")
        np.testing.assert_array_equal(made.copy_to_host(), got)
    machine.close()
