"""A plan: one config's backend, algorithm and scratch, made once and executed many times."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any

from hipgroupgemm.backends import get_backend, passed_over, select_backend
from hipgroupgemm.backends.base import Backend, Executable, MatmulAlgorithm, as_limits
from hipgroupgemm.backends.ranges import with_ranges
from hipgroupgemm.calls import Operands, gather
from hipgroupgemm.config import GroupedGemmConfig
from hipgroupgemm.operands import arrays
from hipgroupgemm.operands.dtypes import DTYPES
from hipgroupgemm.operands.views import CPU, Device
from hipgroupgemm.plan_operands import match_operands
from hipgroupgemm.problem.bindings import with_scalars
from hipgroupgemm.problem.dimension_numbers import RaggedDotAxes
from hipgroupgemm.repeats import Repeat, Repeats, key_of
from hipgroupgemm.runtime.streams import normalize_stream

if TYPE_CHECKING:
    from hipgroupgemm.store.records import StoredResult
    from hipgroupgemm.tuning.engine import TuningProgress
    from hipgroupgemm.tuning.report import TuningReport

__all__ = ["GroupedMatmulPlan", "MatmulAlgorithm"]

_MEMO = 256


class GroupedMatmulPlan:
    """Runs one grouped GEMM, for every ragged extent up to the config's capacity and every alpha and beta.

    Usable as a context manager. Calls from several threads take turns.

    Args:
        config: the problem. Its alpha and beta are `execute`'s defaults; beta = 0 and beta != 0 are different plans.
        backend: a backend's name ("hipblaslt", "triton", "reference"), which then runs it or refuses; None takes the one that tuning has
            found best and stored, else the first that can.
        device: a Device or "cpu", "cuda:0", "rocm:1"; None is the current GPU where there is one, else the CPU.
        use_store: whether to begin with the algorithm that tuning has found best and stored (of `backend`, where it is named); the store
            is looked at here and not again. HIPGROUPGEMM_TUNING_STORE=off turns that off for all plans.

    Raises:
        ValueError: no backend or device of that name.
        NotImplementedError: no backend, or not the named one, runs this config there; the text carries every reason.
    """

    def __init__(
        self, config: GroupedGemmConfig, backend: str | None = None, device: Device | str | None = None, *, use_store: bool = True
    ) -> None:
        if not isinstance(config, GroupedGemmConfig):
            raise TypeError(f"config: got {type(config).__name__}, wanted a GroupedGemmConfig")
        self.config = config
        self.key = config.key()
        self.device = _default_device() if device is None else Device.of(device)
        self._named, self._use_store = backend, use_store
        self._not_stored = ""  # why the algorithm is none that tuning has stored
        self._stored: StoredResult | None = self._look_up()
        stored = self._stored
        winner = None if stored is None else lambda *_: stored.backend
        self._backend: Backend = select_backend(config, self.device, backend, winner)
        self._algorithm: MatmulAlgorithm | None = None
        if stored is not None and stored.backend == self._backend.name:
            self._algorithm = stored.algorithm
        self._executables: dict[int, Executable] = {}
        self._retired: list[Executable] = []  # dropped, but held by graphs
        self._bindings: dict[Any, tuple[RaggedDotAxes, GroupedGemmConfig]] = {}
        self._repeats = Repeats()
        self._lock = threading.RLock()
        self._closed = False

    # ---- algorithms --------------------------------------------------------------------------------------------------------

    @property
    def backend(self) -> str:
        """The name of the backend that runs this plan."""
        return self._backend.name

    def get_algorithms(self, max_algorithm_count: int | None = None, max_workspace_size: int | None = None) -> list[MatmulAlgorithm]:
        """The algorithms that can run this plan, the best guess first.

        Args:
            max_algorithm_count: at most so many; None for all.
            max_workspace_size: only those that need at most so many bytes of workspace; None for any.
        """
        limits = as_limits(max_algorithm_count, max_workspace_size)
        with self._lock:
            self._require_open()
            return self._backend.algorithms(self.key, self.device, limits)

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
            if number is None:
                raise TypeError("index: got None, wanted the algorithm's index along with its name")
        elif isinstance(algorithm, MatmulAlgorithm):
            name, number, backend = algorithm.name, algorithm.index, algorithm.backend
        else:
            raise TypeError(f"algorithm: got {type(algorithm).__name__}, wanted a MatmulAlgorithm or a name and an index")
        if backend != self.backend:
            raise ValueError(f"algorithm: {name!r} belongs to backend {backend!r}, this plan runs on {self.backend!r}")
        with self._lock:
            self._require_open()
            candidate = self._backend.find_algorithm(self.key, self.device, name, number)
            if candidate is not None:
                if candidate != self._algorithm:
                    self._drop_executables()
                    self._algorithm = candidate
                self._not_stored = "pinned by set_algorithm"
                return
            known = self._backend.algorithms(self.key, self.device, as_limits(None, None))
            same = [str(c.index) for c in known if c.name == name]
            hint = (
                f"that name has index {', '.join(same)} here"
                if same
                else f"it has {', '.join(f'{c.name!r} {c.index}' for c in known[:3])}{', ...' if len(known) > 3 else ''}"
            )
            raise ValueError(
                f"algorithm: {self.backend} has no {name!r} with index {number} for this config ({hint}); see get_algorithms()"
            )

    @property
    def algorithm(self) -> MatmulAlgorithm:
        """The algorithm that `execute` runs: the pinned one, else the one that tuning has stored, else the backend's best guess."""
        with self._lock:
            self._require_open()
            if self._algorithm is None:
                guesses = self._backend.algorithms(self.key, self.device, as_limits(1, None))
                if not guesses:
                    raise NotImplementedError(f"{self.backend} has no algorithm for this config on {self.device}")
                self._algorithm = guesses[0]
            return self._algorithm

    def _look_up(self, *, deterministic: bool = False) -> StoredResult | None:
        """What the tuning store has for this plan."""
        if not self._use_store:
            self._not_stored = "tuning store not used: use_store=False"
            return None
        from hipgroupgemm.store.store import default_store

        why: list[str] = []
        stored = default_store().lookup(self.key, self.device, backend=self._named, deterministic=deterministic, why_not=why.append)
        self._not_stored = "".join(f"tuning store not used: {reason}" for reason in why)
        return stored

    def use_deterministic(self) -> None:
        """Takes the best deterministic algorithm that tuning has stored, else the backend's best guess; NotImplementedError without any.

        A plan whose backend was not named may change to another backend, where tuning has found that one best.
        """
        with self._lock:
            if self.algorithm.deterministic:
                return
            stored = self._look_up(deterministic=True)
            if stored is not None:
                self._drop_executables()
                self._backend, self._algorithm, self._stored = get_backend(stored.backend), stored.algorithm, stored
                return
            for candidate in self.get_algorithms():
                if candidate.deterministic:
                    self._drop_executables()
                    self._algorithm = candidate
                    return
            raise NotImplementedError(f"{self.backend} has no deterministic algorithm for this config on {self.device}")

    def autotune(
        self,
        group_sizes: Any = None,
        *,
        backends: Sequence[str] | str | None = None,
        algorithms: str | Sequence[str] = "all",
        max_algorithms: int | None = None,
        max_workspace_size: int | None = None,
        deterministic: bool = False,
        warmup: int = 2,
        repetitions: int | None = None,
        time_limit: float | None = None,
        seed: int = 0,
        progress: Callable[[TuningProgress], object] | None = None,
        isolate: bool | None = None,
        store: bool = True,
    ) -> TuningReport:
        """Checks and times the candidates for this plan, takes the best, and stores it for later plans and for `ragged_dot`.

        Every candidate is checked on the sizes that are tuned for and on hostile ones, in a child process that it may take down; a wrong,
        crashing or hanging one is in the report with its reason and never taken. See `tuning.tune` for all that is not said here.

        Args:
            group_sizes: integers to tune for, `(group_total,)`: one sample or several of real routing, host or device; None for balanced
                sizes at the config's own ragged extent.
            backends: names; None for the plan's own where it was named, else all that can run this, and the plan may change its backend.
            algorithms, max_algorithms, max_workspace_size, deterministic: which of their algorithms are candidates.
            warmup, repetitions, time_limit: how often each is called, and seconds in all.
            seed: of the operands and the order. progress: called with a `TuningProgress`. isolate: whether in a child process.
            store: whether the tuning store gets the result; HIPGROUPGEMM_TUNING_STORE=off turns that off for all plans. A store that can't
                be written costs one warning. What was tuned for some backends alone answers for calls that name no backend only where the
                one that comes first without it was among them (`backend_names` has their order); for calls that name it, always.

        Returns:
            The report; its `best` is what the plan runs from now on.

        Raises:
            RuntimeError: no candidate is right, so the plan stays as it is; the text names the reasons, the error's `report` has them all.
                Any other error that comes once tuning is done, as the plan was closed meanwhile, has the `report` too.
            TypeError, ValueError, NotImplementedError: as `tuning.tune`.
        """
        from hipgroupgemm.tuning.adopt import tune_plan

        with self._lock:
            self._require_open()
        return tune_plan(
            self,
            group_sizes,
            store=store,
            backends=self._named if backends is None else backends,
            algorithms=algorithms,
            max_algorithms=max_algorithms,
            max_workspace_size=max_workspace_size,
            deterministic=deterministic,
            warmup=warmup,
            repetitions=repetitions,
            time_limit=time_limit,
            seed=seed,
            progress=progress,
            isolate=isolate,
        )

    def _take(self, algorithm: MatmulAlgorithm) -> None:
        """Runs an algorithm of any backend from now on."""
        with self._lock:
            self._require_open()
            if algorithm != self._algorithm or algorithm.backend != self.backend:
                self._drop_executables()
                self._repeats.clear()
            self._backend, self._algorithm, self._stored, self._not_stored = get_backend(algorithm.backend), algorithm, None, ""

    @property
    def workspace_size(self) -> int:
        """Bytes of device memory that the algorithm needs beside the operands."""
        return self.algorithm.workspace_size

    # ---- running -----------------------------------------------------------------------------------------------------------

    def prepare(self, stream: Any = None) -> None:
        """Compiles and allocates ahead what `execute` needs on a stream, and what one graph capture of it needs.

        The first call then costs no more than the others. A capture keeps what it uses until `close`, so each needs a call of this.

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
            bias: (g, n), out's type; needed exactly where the config's epilogue is BIAS.
            alpha, beta: real; None takes the config's. beta must be 0 exactly where the config's is.
            group_offset: the first group computed: a host int or a (1,) integer array on the device.
            tail: "zero" gives uncovered rows beta * c, "undefined" leaves them as they are (NON_CONTRACTING).
            check: "sync" waits and raises a ValueError for wrong sizes on the device.
            stream: a stream object or handle; None is the current stream of lhs's framework.
            workspace: memory for the algorithm, at least `workspace_size` bytes; None lets the plan keep its own.

        Raises:
            TypeError, ValueError: operands that are not this plan's; the text names the argument.
            RuntimeError: the plan is closed, or the device failed.
        """
        key = None
        if stream is None and workspace is None and check == "none" and (offs is None) != (group_sizes is None):
            sizes = group_sizes if offs is None else offs
            key = key_of((lhs, rhs, sizes, out, c, bias), alpha, beta, group_offset, (offs is None, tail))
            repeat = self._repeats.get(key) if key is not None else None
            if repeat is not None:
                return self._run_again(repeat, out)
        alpha = self.config.alpha if alpha is None else alpha
        beta = self.config.beta if beta is None else beta
        operands = gather(
            lhs,
            rhs,
            group_sizes,
            offs=offs,
            out=out,
            c=c,
            bias=bias,
            alpha=alpha,
            beta=beta,
            group_offset=group_offset,
            tail=tail,
            check=check,
            stream=stream,
            workspace=workspace,
        )
        if operands.device != self.device:
            raise ValueError(f"lhs is on {operands.device}, but this plan runs on {self.device}; move it, or make a plan there")
        config = self._bind(operands)
        self._run(operands, config)
        if key is not None:
            self._repeats.remember(key, operands, config, made=out is None, holder=None)
        return arrays.deliver(operands.out_object, operands.lhs, operands.device) if out is None else arrays.written(out, operands.output)

    def _run_again(self, repeat: Repeat, out: Any) -> Any:
        """Makes a call again that was looked at before; out is the caller's, or None where it is made anew."""
        arguments = repeat.arguments
        pointer = arguments.pointers["out"]
        given = out
        if out is None:
            out, pointer = repeat.output()
        elif repeat.like.framework == "torch":
            arrays.tensor_written(out)
        with self._lock:
            executable = self._executables.get(arguments.stream)
            if executable is None:
                executable = self._executable(arguments.stream)
            arguments.pointers["out"] = pointer
            executable.execute(arguments)
        return out if given is None else repeat.written(out)

    def _run(self, operands: Operands, config: GroupedGemmConfig) -> None:
        """Runs operands that are checked and bound. The lock spans all launches of the call."""
        operands.check_capture()
        workspace = operands.workspace
        with self._lock:
            if workspace is not None and workspace.reach < self.workspace_size:
                raise ValueError(f"workspace: has {workspace.reach} bytes, the algorithm needs {self.workspace_size}")
            operands.run(self._executable(operands.stream), config)

    def check(self, stream: Any = None) -> None:
        """Waits for the stream; raises a ValueError naming group, wanted and left if a call on it was given wrong sizes.

        The fault is the first since the last check; it is cleared. None is the default stream.
        """
        with self._lock:
            self._require_open()
            executable = self._executables.get(normalize_stream(self.device.kind, stream))
            fault = executable.check() if executable is not None else None
        if fault is not None:
            fault.throw(self.config.ragged_extent)

    def explain(self) -> str:
        """What this plan runs and why, for a person: backend, algorithm, the operands' layouts, and what keeps other backends from it."""
        with self._lock:
            self._require_open()
            algorithm, c = self.algorithm, self.config
            lines = [
                f"{c.ragged_mode.name}: m={c.m} n={c.n} k={c.k} groups={c.group_count} batch={c.batch_count}, "
                f"{c.type_a} x {c.type_b} -> {c.type_d}",
                f"device {self.device}, backend {self.backend}, algorithm {algorithm.index} {algorithm.name}, "
                f"workspace {algorithm.workspace_size} bytes, {'' if algorithm.deterministic else 'not '}deterministic",
                *self._origin(algorithm),
                f"serves ragged extents up to {c.capacity}",
                f"strides in elements: lhs (batch, m, k) {c.lhs_strides}, rhs (group, batch, k, n) {c.rhs_strides}, "
                f"out (group, batch, m, n) {c.output_strides}; "
                f"aligned to {c.lhs_alignment}, {c.rhs_alignment} and {c.output_alignment} bytes",
                self._executable(normalize_stream(self.device.kind, None)).explain(),
            ]
            lines += [f"passed over: {reason}" for reason in passed_over(self.key, self.device, self.backend)]
            return "\n".join(lines)

    def _origin(self, algorithm: MatmulAlgorithm) -> list[str]:
        """What `explain` says of where the algorithm comes from."""
        if self._stored is not None and self._stored.algorithm == algorithm:
            return [f"from the tuning store: {self._stored.describe()}"]
        if algorithm.time is not None:
            return [f"tuned in this process: {algorithm.verdict}, median {algorithm.time:.3g} ms"]
        return [self._not_stored] if self._not_stored else []

    # ---- life --------------------------------------------------------------------------------------------------------------

    def close(self) -> None:
        """Frees everything the plan holds. Closing twice is fine; every other call raises a RuntimeError from then on."""
        with self._lock:
            if not self._closed:
                self._drop_executables()
                for executable in self._retired:
                    executable.close()
                self._retired.clear()
                self._closed = True

    def __enter__(self) -> GroupedMatmulPlan:
        """The plan itself."""
        self._require_open()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        """Closes the plan."""
        self.close()

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
        if found is None:
            algorithm = self.algorithm
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

    # ---- operands to config ------------------------------------------------------------------------------------------------

    def _bind(self, operands: Operands) -> GroupedGemmConfig:
        """The config of exactly these operands; its key at this plan's capacity is this plan's key, or an error says where it differs."""
        o = operands
        memo = (
            *(None if v is None else v.signature() for v in (o.lhs, o.rhs, o.sizes, o.out, o.c, o.bias)),
            o.group_offset is None,
            bool(o.beta),
        )
        found = self._bindings.get(memo)
        if found is None:
            axes, config = match_operands(self.key, o)
            if len(self._bindings) >= _MEMO:
                self._bindings.clear()
            self._bindings[memo] = found = (axes, config)
        axes, config = found
        o.validate_host_values(axes)
        o.take_output(axes.out_shape, DTYPES[self.key.type_d])
        return with_scalars(config, o.alpha, o.beta)


def _default_device() -> Device:
    """The current GPU where a runtime is there, else the CPU."""
    from hipgroupgemm import runtime

    for kind in runtime.KINDS:
        try:
            return Device(kind, runtime.get_runtime(kind).current_device())
        except runtime.RuntimeUnavailable:
            continue
    return CPU
