"""A backend for tests of tuning: its algorithms are right, slow, wrong in many ways, crash, hang, raise, or differ from run to run.

It lives in a module of its own so that the worker process can import and unpickle it. It computes as the reference does.
"""

from __future__ import annotations

import ctypes
import dataclasses
import faulthandler
import os
import pathlib
import resource
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from hipgroupgemm.backends.base import AlgorithmLimits, Arguments, Device, Executable, MatmulAlgorithm
from hipgroupgemm.backends.reference import ReferenceBackend, numpy_view, run_config
from hipgroupgemm.config import GroupedGemmConfig, RaggedDotMode
from hipgroupgemm.measure.harness import HostHarness
from hipgroupgemm.operands.dtypes import DTYPES
from hipgroupgemm.problem.groups import GroupFault, scan


class _Executable(Executable):
    """One algorithm by its name; `state` is what the backend remembers of it in this process."""

    def __init__(self, backend: FakeBackend, config: GroupedGemmConfig, name: str) -> None:
        self.backend, self.config, self.name, self.marks = backend, config, name, backend.marks
        self.state = backend.states.setdefault(name, {})
        self.closed, self.calls = False, 0

    def in_graph(self) -> bool:
        return self.name in self.backend.captured

    def close(self) -> None:
        assert not self.closed, "closed twice"
        self.closed = True
        if self.name.startswith("close_raises"):
            raise ValueError("close is broken")
        if self.name.startswith("close_hangs"):
            time.sleep(1e6)

    def execute(self, arguments: Arguments) -> None:
        assert not self.closed, "executed after it was closed"
        if self.backend.watch is not None:
            sizes = self.sizes(arguments)
            counts = np.diff(sizes, prepend=0) if arguments.ends else sizes
            self.backend.watch(counts, arguments.config.ragged_extent)
        self.state["runs"] = self.state.get("runs", 0) + 1
        self.calls += 1
        _mark(self.marks, f"{os.getpid()} {self.name}")
        action, _, parameter = self.name.partition(":")
        getattr(self, f"run_{action}")(arguments, parameter)

    def check(self) -> GroupFault | None:
        return GroupFault("group_sizes", 0, 0, 9, 8) if self.name == "cries_wolf" else None

    def explain(self) -> str:
        return self.name

    # ---- views ---------------------------------------------------------------------------------------------------------------

    def out(self, arguments: Arguments) -> np.ndarray[Any, Any]:
        c = arguments.config
        dtype = DTYPES[c.type_d]
        slabs = c.group_count if c.ragged_mode is RaggedDotMode.CONTRACTING else 1
        strides = tuple(s * dtype.itemsize for s in c.output_strides)
        return numpy_view(arguments.pointers["out"], (slabs, c.batch_count, c.m, c.n), strides, dtype)

    def sizes(self, arguments: Arguments) -> np.ndarray[Any, Any]:
        view = arguments.group_sizes
        given = numpy_view(view.pointer, view.shape, view.strides, view.dtype)
        return np.diff(given, axis=-1, prepend=0) if arguments.ends else given

    # ---- what is right -------------------------------------------------------------------------------------------------------

    def run_good(self, arguments: Arguments, parameter: str) -> None:
        """Right, after as many milliseconds as its name says."""
        time.sleep(float(parameter or 0) / 1e3)
        run_config(arguments.config, arguments)

    run_close_raises = run_close_hangs = run_good

    def run_cold(self, arguments: Arguments, parameter: str) -> None:
        """Right, and slow in the first call of what was prepared."""
        time.sleep((float(parameter) if self.calls == 1 else 1.0) / 1e3)
        run_config(arguments.config, arguments)

    # ---- what is wrong -------------------------------------------------------------------------------------------------------

    def run_wrong(self, arguments: Arguments, _: str) -> None:
        """A good deal too large, and fast."""
        self.out(arguments)[...] = 1.0

    def run_wrong_element(self, arguments: Arguments, _: str) -> None:
        """One element is off by one part in a hundred."""
        run_config(arguments.config, arguments)
        out = self.out(arguments)
        where = np.argmax(np.abs(out.astype(np.float64)).reshape(-1))
        at = np.unravel_index(where, out.shape)
        out[at] = float(out[at]) * 1.01

    def run_wrong_for(self, arguments: Arguments, kind: str) -> None:
        """Right but where one group takes all, no group has rows, the tail is uncovered, or most groups are empty."""
        run_config(arguments.config, arguments)
        sizes, rows = self.sizes(arguments), arguments.config.ragged_extent
        met = {
            "one_group": int(sizes.max()) == rows and np.count_nonzero(sizes) == 1,
            "all_empty": not sizes.any(),
            "tail": 0 < int(sizes.sum()) < rows,
            "many_empty": 0 < np.count_nonzero(sizes) * 2 <= sizes.size and int(sizes.max()) < rows,
        }[kind]
        if met:
            self.out(arguments)[0, 0, 0, 0] = 77.0

    def run_wrong_alpha(self, arguments: Arguments, _: str) -> None:
        """Takes alpha for 1."""
        run_config(dataclasses.replace(arguments.config, alpha=1.0), arguments)

    def run_wrong_beta(self, arguments: Arguments, _: str) -> None:
        """Applies beta twice."""
        run_config(dataclasses.replace(arguments.config, beta=2 * arguments.config.beta), arguments)

    def run_wrong_in_place(self, arguments: Arguments, _: str) -> None:
        """Clears out before it reads c."""
        if arguments.pointers["c"] == arguments.pointers["out"]:
            self.out(arguments)[...] = 0
        run_config(arguments.config, arguments)

    def run_wrong_offset(self, arguments: Arguments, _: str) -> None:
        """Begins with group 0 whatever it is told."""
        run_config(arguments.config, dataclasses.replace(arguments, group_offset=0))

    def run_leaves_nan(self, arguments: Arguments, _: str) -> None:
        """Leaves the last covered row unwritten."""
        out = self.out(arguments)
        sizes = self.sizes(arguments)
        last = int(sizes.sum()) - 1
        before = out[0, 0, last].copy()
        run_config(arguments.config, arguments)
        if last >= 0:
            out[0, 0, last] = before

    def run_touches_uncovered(self, arguments: Arguments, _: str) -> None:
        """Writes a product into the first row that no group covers."""
        run_config(arguments.config, arguments)
        covered = int(self.sizes(arguments).sum())
        if covered < arguments.config.m:
            self.out(arguments)[0, 0, covered] = 1.0

    def run_touches_gaps(self, arguments: Arguments, _: str) -> None:
        """Writes behind the end of the last row."""
        run_config(arguments.config, arguments)
        out = self.out(arguments)
        ctypes.memset(int(out.ctypes.data) + out.nbytes, 0, 4)

    def run_multiplies_by_zero(self, arguments: Arguments, _: str) -> None:
        """Adds every other group's product times zero, as a masked dense product does: NaN in an empty group's weights comes through."""
        run_config(arguments.config, arguments)
        c = arguments.config
        dtype = DTYPES[c.type_b]
        strides = tuple(s * dtype.itemsize for s in c.rhs_strides)
        rhs = numpy_view(arguments.pointers["rhs"], (c.group_count, c.batch_count, c.k, c.n), strides, dtype)
        with np.errstate(all="ignore"):
            none = 0 * rhs.astype(np.float32).sum((0, 2))
            ends = scan(self.sizes(arguments), c.m).ends
            self.out(arguments)[0, :, : int(ends[-1])] += none[:, None].astype(DTYPES[c.type_d])

    def run_cries_wolf(self, arguments: Arguments, _: str) -> None:
        """Right, but says that the sizes are not."""
        run_config(arguments.config, arguments)

    def run_wrong_after(self, arguments: Arguments, count: str) -> None:
        """Right until it has run so many times."""
        run_config(arguments.config, arguments)
        if self.state["runs"] > int(count):
            self.out(arguments)[0, 0, 0, 0] = 77.0

    # ---- what differs --------------------------------------------------------------------------------------------------------

    def run_flips_bits(self, arguments: Arguments, _: str) -> None:
        """Right within rounding, but the last bit of an element is another every second run."""
        run_config(arguments.config, arguments)
        out = self.out(arguments)
        if self.state["runs"] % 2 and int(self.sizes(arguments).sum()):
            bits = out.view(f"u{out.dtype.itemsize}")
            bits[0, 0, 0, 0] ^= 1

    # ---- what ends -----------------------------------------------------------------------------------------------------------

    def run_aborts(self, arguments: Arguments, _: str) -> None:
        print("about to abort", file=sys.stderr, flush=True)
        os.abort()

    def run_segfaults(self, arguments: Arguments, _: str) -> None:
        os.kill(os.getpid(), signal.SIGSEGV)
        time.sleep(60)

    def run_exits(self, arguments: Arguments, code: str) -> None:
        os._exit(int(code))

    def run_dies_after(self, arguments: Arguments, count: str) -> None:
        """Right until it has run so many times."""
        run_config(arguments.config, arguments)
        if self.state["runs"] > int(count):
            os.kill(os.getpid(), signal.SIGKILL)

    def run_leaves(self, arguments: Arguments, _: str) -> None:
        sys.exit("it has had enough")

    def run_raises(self, arguments: Arguments, _: str) -> None:
        raise RuntimeError("no kernel image is available for this device")

    def run_breaks_the_device(self, arguments: Arguments, _: str) -> None:
        """Leaves a device on which every call fails from now on in this process, as an illegal access does."""

        def synchronize(bench: HostHarness) -> None:
            raise RuntimeError("an illegal memory access was encountered")

        HostHarness.synchronize = synchronize  # type: ignore[method-assign]

    def run_aborts_later(self, arguments: Arguments, milliseconds: str) -> None:
        """Right, and ends its process behind its own back."""
        run_config(arguments.config, arguments)
        threading.Timer(float(milliseconds) / 1e3, os.abort).start()

    def run_dies_in_company(self, arguments: Arguments, _: str) -> None:
        """Right where no other algorithm was prepared in this process."""
        run_config(arguments.config, arguments)
        if len(self.backend.states) > 1:
            os.abort()

    def run_limits_memory(self, arguments: Arguments, _: str) -> None:
        """Raises, in a process that has no memory left for anybody."""
        resource.setrlimit(resource.RLIMIT_AS, (1 << 20, resource.RLIM_INFINITY))
        raise RuntimeError("out of memory")

    def run_takes_the_memory(self, arguments: Arguments, _: str) -> None:
        """Right, but the device has no room for operands from then on."""
        run_config(arguments.config, arguments)
        HostHarness.free_bytes = lambda bench: 0  # type: ignore[method-assign]

    def run_says_nothing(self, arguments: Arguments, _: str) -> None:
        """Raises what cannot be told."""
        raise _Unspeakable

    def run_forks(self, arguments: Arguments, _: str) -> None:
        """Right, and there are two of it afterwards."""
        faulthandler.cancel_dump_traceback_later()
        run_config(arguments.config, arguments)
        os.fork()

    def run_prints(self, arguments: Arguments, _: str) -> None:
        """Right, and noisy on both streams: none of it may get among the replies."""
        print("a" * 3000, flush=True)
        os.write(1, b"b" * 3000)
        os.write(2, b"c" * 100_000)
        run_config(arguments.config, arguments)

    # ---- what never ends -----------------------------------------------------------------------------------------------------

    def run_hangs(self, arguments: Arguments, _: str) -> None:
        time.sleep(1e6)

    def run_hangs_on(self, arguments: Arguments, _: str) -> None:
        """Ignores the signals that can be ignored, and has a child of its own."""
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            signal.signal(number, signal.SIG_IGN)
        started = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(1e6)"])
        _mark(self.marks, f"{started.pid} grandchild")
        while True:
            time.sleep(1e6)

    def run_holds_the_lock(self, arguments: Arguments, _: str) -> None:
        """Hangs in C with the interpreter's lock held: no thread of this process runs any more."""
        ctypes.PyDLL(None).sleep(1_000_000)


class _Unspeakable(Exception):
    def __str__(self) -> str:
        raise ValueError("there are no words for it")


class FakeBackend(ReferenceBackend):
    """A backend with one algorithm a name. A name is a method of `_Executable` without its "run_", and a parameter behind a colon.

    Args:
        names: of the algorithms, the best guess first.
        name: the backend's. workspaces: bytes by name. nondeterministic: names of those that do not claim equal bits.
        captured: names of those that a graph holds. watch: called with the rows of each group and of
            all in each run in this process.
        marks: a folder, where each run leaves a line "<pid> <name>" in a file; "" for nowhere.
        broken: names whose preparation raises.
    """

    def __init__(
        self,
        names: list[str],
        *,
        name: str = "double",
        workspaces: dict[str, int] | None = None,
        nondeterministic: tuple[str, ...] = (),
        marks: str = "",
        broken: tuple[str, ...] = (),
    ) -> None:
        self.name, self.marks, self.broken = name, marks, broken
        self.found = [
            MatmulAlgorithm(name, index, n, (workspaces or {}).get(n, 0), n not in nondeterministic) for index, n in enumerate(names)
        ]
        self.states: dict[str, dict[str, int]] = {}
        self.executables: list[_Executable] = []
        self.captured: set[str] = set()
        self.watch: Callable[[np.ndarray[Any, Any], int], object] | None = None

    def can_handle(self, config: GroupedGemmConfig, device: Device) -> str | None:
        return None if device.kind == "cpu" else "it is a double on the CPU"

    def algorithms(self, config: GroupedGemmConfig, device: Device, limits: AlgorithmLimits) -> list[MatmulAlgorithm]:
        return [a for a in self.found if a.workspace_size <= limits.max_workspace_size][: limits.max_algorithm_count]

    def prepare(self, config: GroupedGemmConfig, device: Device, algorithm: MatmulAlgorithm, stream: int) -> Executable:
        if algorithm.name in self.broken:
            raise ValueError(f"{algorithm.name} cannot be prepared")
        made = _Executable(self, config, algorithm.name)
        self.executables.append(made)
        return made

    def __getstate__(self) -> dict[str, Any]:
        """What a worker gets: the settings, without what is in use here."""
        return {**self.__dict__, "executables": [], "states": {}, "watch": None}


class Unpicklable(FakeBackend):
    """One that cannot be sent to a worker."""

    def __init__(self, *arguments: Any, **settings: Any) -> None:
        super().__init__(*arguments, **settings)
        self.holds = lambda: None


class Unaskable(FakeBackend):
    """One that raises when it is asked; its name says which question."""

    def can_handle(self, config: GroupedGemmConfig, device: Device) -> str | None:
        if self.name == "can_handle":
            raise OSError("the library is not there")
        return super().can_handle(config, device)

    def algorithms(self, config: GroupedGemmConfig, device: Device, limits: AlgorithmLimits) -> list[MatmulAlgorithm]:
        if self.name == "algorithms":
            raise OSError("the library is not there")
        return super().algorithms(config, device, limits)

    def compile_ahead(self, *_: Any) -> None:
        raise OSError("the compiler is not there")


class Wordless(FakeBackend):
    """One that cannot be sent to a worker, nor say why."""

    def __getstate__(self) -> dict[str, Any]:
        raise _Unspeakable


class Unloadable(FakeBackend):
    """One that can be sent, but not be taken over."""

    def __reduce__(self) -> Any:
        return _refuse, ()


def _refuse() -> None:
    raise ImportError("this module is not there")


def _mark(folder: str, line: str) -> None:
    if folder:
        with (pathlib.Path(folder) / "marks").open("a") as file:
            file.write(line + "\n")
