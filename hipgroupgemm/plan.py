"""A plan: one config's backend, algorithm and scratch, made once and executed many times."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any, NoReturn

from hipgroupgemm import hooks
from hipgroupgemm.backends import check_settings, get_backend, passed_over, select_backend
from hipgroupgemm.backends.base import Arguments, Backend, Executable, MatmulAlgorithm, as_limits
from hipgroupgemm.backends.choice import best_guess, find_pinned, list_algorithms, settings_on
from hipgroupgemm.backends.ranges import with_ranges
from hipgroupgemm.caches import CallCache, ticks
from hipgroupgemm.config import GroupedGemmConfig
from hipgroupgemm.dispatch import PreparedCall, run
from hipgroupgemm.operands.views import CPU, Device
from hipgroupgemm.problem.canonicalize import Problem, canonicalize_for_plan
from hipgroupgemm.problem.parse import Call
from hipgroupgemm.runtime import default_device, get_runtime
from hipgroupgemm.runtime.forks import new_rlock
from hipgroupgemm.runtime.streams import normalize_stream

if TYPE_CHECKING:
    from hipgroupgemm.tuning.engine import TuningProgress
    from hipgroupgemm.tuning.report import TuningReport

__all__ = ["GroupedMatmulPlan", "MatmulAlgorithm"]

_MOST_STREAMS = 64


class GroupedMatmulPlan:
    """Runs one grouped GEMM, for every ragged extent up to the config's capacity and every alpha and beta.

    Usable as a context manager. Calls from several threads take turns.

    Args:
        config: the problem. Its alpha and beta are `execute`'s defaults; beta = 0 and beta != 0 are different plans.
        backend: a backend's name ("hipblaslt", "triton", "reference"), which then runs it or refuses; None takes the one that tuning has
            found best and stored, else the first that can.
        device: a Device or "cpu", "cuda:0", "rocm:1"; None is the current GPU where there is one, else the CPU.
        deterministic: only algorithms that give equal bits for equal inputs.
        batch_invariant: only algorithms with which a row of out has the same bits whatever m, its place and the other rows are
            (NON_CONTRACTING), and the same one for every m: the stored winner of `autotune(batch_invariant=True)`, else a guess.
        max_multiprocessors: the most CUs or SMs that a call occupies at a time, so that others, such as communication, run beside it; None
            for all, and so is a number that the device does not have. Without effect on a CPU.
        use_store: whether to begin with the algorithm that tuning has found best and stored (of `backend`, where it is named); the store
            is looked at here and not again. HIPGROUPGEMM_TUNING_STORE=off turns that off for all plans.

    Raises:
        TypeError: an argument of a wrong type.
        ValueError: no backend or device of that name, or max_multiprocessors below 1.
        NotImplementedError: no backend, or not the named one, runs this config there; the text carries every reason.

    Example:
        >>> import numpy as np
        >>> from hipgroupgemm import ArraySpec, config_for_ragged_dot
        >>> lhs, rhs, sizes = ArraySpec((6, 4), "float32"), ArraySpec((2, 4, 3), "float32"), ArraySpec((2,), "int32")
        >>> with GroupedMatmulPlan(config_for_ragged_dot(lhs, rhs, sizes), device="cpu") as plan:
        ...     plan.execute(np.ones((6, 4), np.float32), np.ones((2, 4, 3), np.float32), np.array([4, 2])).sum()
        np.float32(72.0)
    """

    def __init__(
        self,
        config: GroupedGemmConfig,
        backend: str | None = None,
        device: Device | str | None = None,
        *,
        deterministic: bool = False,
        batch_invariant: bool = False,
        max_multiprocessors: int | None = None,
        use_store: bool = True,
    ) -> None:
        if not isinstance(config, GroupedGemmConfig):
            raise TypeError(f"config: got {type(config).__name__}, wanted a GroupedGemmConfig")
        check_settings(backend, deterministic=deterministic, batch_invariant=batch_invariant, use_store=use_store)
        self.config = config
        self.key = config.key()
        self.device = _default_device() if device is None else Device.of(device)
        self.settings, self._remark = settings_on(self.device, deterministic, batch_invariant, max_multiprocessors)
        self.last_use = 0
        self._named, self._use_store = backend, use_store
        self._lock = new_rlock()
        self._executables: dict[int, Executable] = {}
        self._retired: list[Executable] = []  # dropped, but held by graphs
        self._calls = CallCache()
        self._closed = self._retiring = self._launching = False
        self._algorithm, self._origin = self._look_up()
        stored = self._algorithm
        winner = None if stored is None else lambda *_: stored.backend
        self._backend: Backend = select_backend(config, self.device, backend, winner, self.settings)
        if stored is not None and stored.backend != self._backend.name:
            self._algorithm = None
        if deterministic or batch_invariant:
            self._algorithm = self.algorithm  # refused here, where there is none

    # ---- algorithms --------------------------------------------------------------------------------------------------------

    @property
    def backend(self) -> str:
        """The name of the backend that runs this plan."""
        return self._backend.name

    @property
    def has_alpha(self) -> bool:
        """Whether the backend takes an alpha other than 1, which is no part of a plan's key."""
        return "alpha" in self._backend.features

    def get_algorithms(self, max_algorithm_count: int | None = None, max_workspace_size: int | None = None) -> list[MatmulAlgorithm]:
        """The algorithms that can run this plan, the best guess first.

        Args:
            max_algorithm_count: at most so many, at least 1; None for all.
            max_workspace_size: only those that need at most so many bytes of workspace; None for any.
        """
        limits = as_limits(max_algorithm_count, max_workspace_size)
        with self._lock:
            self._require_open()
            return list_algorithms(self._backend, self.key, self.device, self.settings, limits)

    def set_algorithm(self, algorithm: MatmulAlgorithm | str, index: int | None = None) -> None:
        """Pins the algorithm that `execute` runs.

        Args:
            algorithm: one that `get_algorithms` gave, in this process or another, or an algorithm's name.
            index: with a name: its index.

        Raises:
            ValueError: this backend has no algorithm of that name and index together for this config. Another process may have
                numbered the kernels differently; nothing is guessed.
        """
        if isinstance(algorithm, str):
            name, number, backend = algorithm, index, self.backend
            if number is None or isinstance(number, bool) or not hasattr(number, "__index__"):
                raise TypeError(f"index: got {number!r}, wanted the algorithm's index along with its name")
        elif isinstance(algorithm, MatmulAlgorithm):
            name, number, backend = algorithm.name, algorithm.index, algorithm.backend
        else:
            raise TypeError(f"algorithm: got {type(algorithm).__name__}, wanted a MatmulAlgorithm or a name and an index")
        if backend != self.backend:
            raise ValueError(f"algorithm: {name!r} belongs to backend {backend!r}, this plan runs on {self.backend!r}")
        with self._lock:
            self._require_open()
            found = find_pinned(self._backend, self.key, self.device, self.settings, name, number)
            self._take(found, "pinned by set_algorithm")

    @property
    def algorithm(self) -> MatmulAlgorithm:
        """The algorithm that `execute` runs: the pinned one, else the one that tuning has stored, else the backend's best guess."""
        with self._lock:
            self._require_open()
            if self._algorithm is None:
                self._algorithm = best_guess(self._backend, self.key, self.device, self.settings)
            return self._algorithm

    def _look_up(self) -> tuple[MatmulAlgorithm | None, str]:
        """The algorithm that the tuning store has for this plan, or None; and what `explain` says of it."""
        if not self._use_store:
            return None, "tuning store not used: use_store=False"
        stored, text = hooks.resolve("stored_lookup")(self.key, self.device, self._named, self.settings)
        if stored is None:
            return None, f"tuning store not used: {text}" if text else ""
        return stored, f"from the tuning store: {text}"

    def use_deterministic(self) -> None:
        """Takes the best deterministic algorithm that tuning has stored, else the backend's best guess; NotImplementedError without any.

        A plan whose backend was not named may change to another backend, where tuning has found that one best.
        """
        with self._lock:
            if self.algorithm.deterministic:
                return
            self.settings = dataclasses.replace(self.settings, deterministic=True)
            stored, origin = self._look_up()
            self._take(best_guess(self._backend, self.key, self.device, self.settings) if stored is None else stored, origin)

    def autotune(
        self,
        group_sizes: Any = None,
        *,
        backends: Sequence[str] | str | None = None,
        algorithms: str | Sequence[str] = "all",
        max_algorithms: int | None = None,
        max_workspace_size: int | None = None,
        deterministic: bool = False,
        batch_invariant: bool = False,
        warmup: int = 2,
        repetitions: int | None = None,
        time_limit: float | None = None,
        seed: int = 0,
        progress: Callable[[TuningProgress], object] | None = None,
        isolate: bool | None = None,
        store: bool = True,
    ) -> TuningReport:
        """Checks and times the candidates for this plan, takes the best, and stores it for later plans and for `ragged_dot`.

        Every candidate is checked on the sizes that are tuned for and on adversarial ones, in a child process that it may take down; a
        wrong, crashing or hanging one is in the report with its reason and never taken. The right ones are timed in rounds; those far
        behind the leader of their rounds are pruned, and the winner is confirmed against the runner-up.

        Args:
            group_sizes: integers to tune for, `(group_total,)`: one sample or several of real routing, host or device; None for balanced
                sizes at the config's own ragged extent.
            backends: names; None for the plan's own where it was named, else all that can run this, and the plan may change its backend.
            algorithms: "all", "heuristic" (each backend's best guesses, `max_algorithms` or 8 of them), or names.
            max_algorithms: at most so many per backend, the best guesses; None for all.
            max_workspace_size: only those that need at most so many bytes of workspace; None for any.
            deterministic: only those that claim equal bits for equal inputs. batch_invariant: only those that are; the winner is stored
                for every m at once, for plans and calls with batch_invariant=True. Both are true where the plan has them.
            warmup: untimed calls ahead of a candidate's first timed one.
            repetitions: timed calls per candidate and sample; None for 5 to 20, as many as take about a second.
            time_limit: seconds for all of it, about; None for no limit. What there was no time for is "untimed" in the report.
            seed: of operands, order and samples.
            progress: called with a `TuningProgress` now and then, in this thread.
            isolate: whether candidates run in a worker process; None for all but the reference's, as far as their backends can be pickled.
            store: whether the tuning store gets the result; HIPGROUPGEMM_TUNING_STORE=off turns that off for all plans. A store that can't
                be written costs one warning. What was tuned for some backends alone answers for calls that name no backend only where the
                one that comes first without it was among them (`backend_names` has their order); for calls that name it, always.

        Returns:
            The report; its `best` is what the plan runs from now on.

        Raises:
            RuntimeError: no candidate is right, so the plan stays as it is; the text names the reasons, the error's `report` has them all.
                Any other error that comes once tuning is done, as the plan was closed meanwhile, has the `report` too.
            TypeError, ValueError: arguments and group sizes that make no sense; the text says which.
            NotImplementedError: no backend, or not each of the named ones, can run this.
        """
        settings = locals()
        check_settings(deterministic=deterministic, batch_invariant=batch_invariant, store=store)
        plan, sizes = settings.pop("self"), settings.pop("group_sizes")
        settings["deterministic"] |= self.settings.deterministic
        settings["batch_invariant"] |= self.settings.batch_invariant
        settings["max_multiprocessors"] = self.settings.max_multiprocessors
        with self._lock:
            self._require_open()
        if backends is None:
            settings["backends"] = self._named
        report: TuningReport = hooks.resolve("autotune")(plan, sizes, **settings)
        return report

    def _take(self, algorithm: MatmulAlgorithm, origin: str = "") -> None:
        """Runs an algorithm of any backend from now on; `origin` is what `explain` says of it."""
        with self._lock:
            self._require_open()
            if algorithm != self._algorithm:
                self._drop_executables()
                self._calls.clear()
            self._backend = get_backend(algorithm.backend, self.settings.max_multiprocessors)
            self._algorithm, self._origin = algorithm, origin

    @property
    def workspace_size(self) -> int:
        """Bytes of device memory that the algorithm needs beside the operands."""
        return self.algorithm.workspace_size

    # ---- running -----------------------------------------------------------------------------------------------------------

    def prepare(self, stream: Any = None) -> None:
        """Compiles and allocates ahead what `execute` needs, so that the first call costs no more than the others.

        Once prepared on any stream of the device, or run there, the plan can be captured in graphs on every stream of it.

        Args:
            stream: a stream object or handle on the plan's device; None is the default stream.
        """
        with self._lock:
            self._executable(normalize_stream(self.device.kind, stream)).prepare()

    def execute(
        self,
        lhs: Any,
        rhs: Any,
        group_sizes: Any = None,
        *,
        offs: Any = None,
        out: Any = None,
        c: Any = None,
        bias: Any = None,
        alpha: float | None = None,
        beta: float | None = None,
        group_offset: Any = None,
        tail: str = "zero",
        check: str = "none",
        stream: Any = None,
        workspace: Any = None,
    ) -> Any:
        """Computes out = alpha * P + beta * c, then bias, on the stream, and returns out.

        The operands have the shapes that `GroupedGemmConfig` lists, with or without a batch axis of length 1. lhs and rhs may come
        with their axes in another order, as long as their strides are the config's: a weight gradient's lhs, say, as (k, m).

        Args:
            lhs, rhs: the operands, on the plan's device.
            group_sizes, offs: exactly one: sizes (group_total,) or (batch, group_total), or end offsets of that shape. On the
                device they are never read back; on the host they are checked at once.
            out: where to write; None makes an array of lhs's framework.
            c: like out; may be exactly out; needed where beta is not 0.
            bias: (g, n), out's type; needed exactly where the config's epilogue has one.
            alpha, beta: real; None takes the config's. beta must be 0 exactly where the config's is, and given where c is and the config's
                is 0.
            group_offset: the first group computed: a host int or a (1,) integer array on the device.
            tail: "zero" gives uncovered rows beta * c, "undefined" leaves them as they are (NON_CONTRACTING).
            check: "sync" waits and raises a ValueError for wrong sizes on the device.
            stream: a stream object or handle; None is the current stream of lhs's framework.
            workspace: memory for the algorithm, at least `workspace_size` bytes; None lets the plan keep its own.

        Raises:
            TypeError, ValueError: operands that are not this plan's; the text names the argument.
            RuntimeError: the plan is closed, or the device failed.
        """
        arguments = locals()
        del arguments["self"]
        if alpha is None:
            arguments["alpha"] = self.config.alpha
        if beta is None and (c is None or self.config.beta):  # else it is missed, as in ragged_dot
            arguments["beta"] = self.config.beta
        return run(arguments, self._calls, None, self._prepare_call, _no_config)

    def _prepare_call(self, call: Call, arguments: dict[str, Any]) -> PreparedCall:
        """Looks at a call's operands: they are this plan's, or an error says where they differ."""
        del arguments
        with self._lock:
            self._require_open()
        if call.device != self.device:
            raise ValueError(f"lhs is on {call.device}, but this plan runs on {self.device}; move it, or make a plan there")
        return self.prepared(canonicalize_for_plan(call, self.key), call)

    def prepared(self, problem: Problem, call: Call) -> PreparedCall:
        """A call of this plan whose problem is known. alpha is no part of a key, so it is refused here where the backend has none."""
        if call.alpha != 1 and not self.has_alpha:
            raise NotImplementedError(f"backend {self.backend!r} refuses: it does not have alpha")
        return PreparedCall(self, problem, call)

    def launch(self, arguments: Arguments, pointers: dict[str, int] | None = None, lists: dict[str, tuple[int, ...]] | None = None) -> bool:
        """Runs arguments that are checked, on their stream; false where the plan is closed. The lock spans all launches of the call.

        With `pointers` (and `lists`) the operands lie there, and the arguments, which the caller has used before, are otherwise the same.
        """
        try:
            with self._lock:
                if self._closed:
                    return False
                if pointers is not None:
                    arguments.pointers, arguments.lists = pointers, lists or {}
                outer, self._launching = self._launching, True
                try:
                    self._launch(arguments)
                finally:
                    self._launching = outer
        finally:
            if self._retiring and not self._launching:
                self.retire()
        return True

    def _launch(self, arguments: Arguments) -> None:
        self.last_use = next(ticks)
        executable = self._executables.get(arguments.stream)
        if executable is None:
            executable = self._executable(arguments.stream)
        if arguments.workspace is not None and arguments.workspace.reach < self.workspace_size:
            raise ValueError(f"workspace: has {arguments.workspace.reach} bytes, the algorithm needs {self.workspace_size}")
        executable.execute(arguments)
        if arguments.check == "sync":
            self._raise_fault(executable)

    def check(self, stream: Any = None) -> None:
        """Waits for the stream; raises a ValueError naming group, wanted and left if a call on it was given wrong sizes.

        The fault is the first since the last check; it is cleared. None is the default stream.
        """
        with self._lock:
            self._require_open()
            executable = self._executables.get(normalize_stream(self.device.kind, stream))
            if executable is not None:
                self._raise_fault(executable)

    def _raise_fault(self, executable: Executable) -> None:
        fault = executable.check()
        if fault is not None:
            fault.throw(self.config.ragged_extent)

    def explain(self) -> str:
        """What this plan runs and why, for a person: backend, algorithm, the operands' layouts, and what keeps other backends from it."""
        with self._lock:
            self._require_open()
            algorithm, c, asked = self.algorithm, self.config, str(self.settings)
            lines = [
                f"{c.ragged_mode.name}: m={c.m} n={c.n} k={c.k} groups={c.group_count} batch={c.batch_count}, "
                f"{c.type_a} x {c.type_b} -> {c.type_d}; "
                f"alpha={c.alpha:g}, {f'beta={c.beta:g} with c' if c.beta else 'no c (beta=0)'}, {'a' if c.epilogue.bias else 'no'} bias",
                f"device {self.device}, backend {self.backend}, algorithm {algorithm.index} {algorithm.name}, "
                f"workspace {algorithm.workspace_size} bytes, {'' if algorithm.deterministic else 'not '}deterministic"
                f"{', batch-invariant' if algorithm.batch_invariant else ''}",
                self._origin,
                f"asked for: {asked}" if asked else "",
                self._remark,
                f"serves ragged extents up to {c.capacity}",
                f"strides (elements): lhs (batch, m, k) {c.lhs_strides}, rhs{' list' * c.rhs_listed} (group, batch, k, n) {c.rhs_strides}, "
                f"out{' list' * c.out_listed} (group, batch, m, n) {c.output_strides}{f', c {c.c_strides}' if c.beta else ''}"
                f"{f', bias (group, n) {(c.bias_group_stride, c.bias_inner_stride)}' if c.epilogue.bias else ''}; "
                f"aligned to {c.lhs_alignment}, {c.rhs_alignment} and {c.output_alignment} bytes",
                self._executable(normalize_stream(self.device.kind, None)).explain(),
            ]
            lines += [f"passed over: {reason}" for reason in passed_over(self.key, self.device, self.backend, self.settings)]
            return "\n".join(line for line in lines if line)

    # ---- life --------------------------------------------------------------------------------------------------------------

    @property
    def captured(self) -> bool:
        """Whether a graph capture used this plan: its scratch then stays until `close`, and no cache evicts it."""
        return bool(self._retired) or any(executable.in_graph() for executable in list(self._executables.values()))

    def close(self) -> None:
        """Frees everything the plan holds. Closing twice is fine; every other call raises a RuntimeError from then on.

        Graphs that were captured with it must not be launched any more.
        """
        with self._lock:
            if not self._closed:
                self._closed = True
                self._calls.clear()
                for executable in (*self._executables.values(), *self._retired):
                    executable.close()
                self._executables.clear()
                self._retired.clear()

    def retire(self) -> None:
        """Closes the plan as soon as no call uses it, without waiting: for caches."""
        self._retiring = True
        if self._lock.acquire(blocking=False):  # else the call that holds it closes the plan when it is done
            try:
                if not self._launching:  # a call of this very thread that came back here goes on first
                    self.close()
            finally:
                self._lock.release()

    def __enter__(self) -> GroupedMatmulPlan:
        """The plan itself."""
        self._require_open()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        """Closes the plan."""
        self.close()

    def __reduce__(self) -> NoReturn:
        raise TypeError("a plan holds device memory: it can be neither copied nor pickled; make another from plan.config")

    def __repr__(self) -> str:
        c = self.config
        state = "closed" if self._closed else f"{self.backend} on {self.device}"
        return f"<GroupedMatmulPlan {c.ragged_mode.name} m={c.m} n={c.n} k={c.k} groups={c.group_count}, {state}>"

    def _require_open(self) -> None:
        if self._closed:
            raise RuntimeError("this plan is closed; make a new GroupedMatmulPlan")

    def _executable(self, stream: int) -> Executable:
        self._require_open()
        found = self._executables.get(stream)
        if found is not None:
            return found
        if self.device.kind != "cpu" and not self._executables:
            runtime = get_runtime(self.device.kind)
            with runtime.use_device(self.device.index):
                if runtime.is_capturing(stream):
                    raise RuntimeError(
                        "this plan has not run yet, and what it needs cannot be made during a graph capture; call it once before, on any "
                        "stream of the device, or plan.prepare()"
                    )
        algorithm = self.algorithm
        if len(self._executables) >= _MOST_STREAMS:
            self._drop_executables()
        made = self._backend.prepare(self.key, self.device, algorithm, stream)
        found = self._executables[stream] = with_ranges(made, self.key, self.device.kind, f"{self.backend} {algorithm.name}")
        return found

    def _drop_executables(self) -> None:
        """Closes what is prepared, but for what graphs hold: they may be launched until the plan is closed."""
        for executable in self._executables.values():
            if executable.in_graph():
                self._retired.append(executable)
            else:
                executable.close()
        self._executables.clear()


def _default_device() -> Device:
    """The current GPU where a runtime is there, else the CPU."""
    found = default_device()
    return CPU if found is None else Device(*found)


def _no_config(call: Call, arguments: dict[str, Any], problem: Problem) -> NoReturn:
    raise RuntimeError(f"the operands do not collapse to a config: {problem.reason}")
