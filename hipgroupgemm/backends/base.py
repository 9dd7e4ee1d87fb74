"""What a backend is, and what passes between a plan and its backend."""

from __future__ import annotations

import abc
import dataclasses
import sys
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

from hipgroupgemm.config import GroupedGemmConfig, RaggedDotMode
from hipgroupgemm.operands.views import ArrayView, Device
from hipgroupgemm.problem.groups import GroupBounds, GroupFault
from hipgroupgemm.version import __version__

if TYPE_CHECKING:
    from hipgroupgemm.runtime.objects import LibraryCall, PreparedLaunch
    from hipgroupgemm.runtime.replay import Move

__all__ = [
    "NO_SETTINGS", "AlgorithmLimits", "Arguments", "Backend", "Device", "Executable", "MatmulAlgorithm", "Multiprocessors", "PlanSettings",
    "Recipe", "versions_of",
]  # fmt: skip


@dataclasses.dataclass(frozen=True)
class MatmulAlgorithm:
    """One way to compute a grouped GEMM.

    Attributes:
        backend: the backend's name.
        index: the backend's own number for it. Two processes may number the same kernels differently, so a pinned algorithm is
            found again by name and index together.
        name: the backend's name for the kernel or the setting.
        workspace_size: bytes of device memory that it needs beside the operands.
        deterministic: whether two runs on equal inputs give equal bits.
        batch_invariant: whether the bits of a row of out depend on that row of lhs and its group's weights alone: not on m, on the row's
            place, or on other rows and groups. False in modes other than NON_CONTRACTING, and where it is not known.
        time: median device time in milliseconds, once it was timed.
        verdict: "ok" or what was wrong, once it was checked.
    """

    backend: str
    index: int
    name: str
    workspace_size: int
    deterministic: bool
    batch_invariant: bool = False
    time: float | None = dataclasses.field(default=None, compare=False)
    verdict: str | None = dataclasses.field(default=None, compare=False)

    @property
    def key(self) -> tuple[str, int, str]:
        """What tells it apart from every other algorithm of a config: backend, index and name."""
        return self.backend, self.index, self.name


class Multiprocessors(int):
    """A max_multiprocessors that was looked at. Its type tells call caches apart what equals it, such as True."""

    @classmethod
    def of(cls, value: Any) -> Multiprocessors | None:
        """`value`, which may be None; raises TypeError for what is no int, ValueError below 1."""
        if value is None:
            return None
        if isinstance(value, bool) or not hasattr(value, "__index__"):
            raise TypeError(f"max_multiprocessors={value!r}: must be an int or None")
        if value.__index__() < 1:
            raise ValueError(f"max_multiprocessors={value}: wanted at least 1, or None for all")
        return cls(value.__index__())


@dataclasses.dataclass(frozen=True)
class PlanSettings:
    """What a plan asks for beside its config: part of the keys of the plan cache and of the tuning store.

    Attributes:
        deterministic, batch_invariant: only algorithms that claim this, see `MatmulAlgorithm`.
        max_multiprocessors: the most CUs or SMs that a call may occupy at a time; None for all.
    """

    deterministic: bool = False
    batch_invariant: bool = False
    max_multiprocessors: int | None = None

    def admit(self, algorithm: MatmulAlgorithm) -> bool:
        """Whether an algorithm claims what is asked for."""
        return algorithm.deterministic >= self.deterministic and algorithm.batch_invariant >= self.batch_invariant

    def __str__(self) -> str:
        """What is asked for, in words; "" where nothing is."""
        most = self.max_multiprocessors
        words = ("deterministic" * self.deterministic, "batch-invariant" * self.batch_invariant, f"max_multiprocessors={most}" * bool(most))
        return ", ".join(filter(None, words))


NO_SETTINGS = PlanSettings()


@dataclasses.dataclass(frozen=True)
class AlgorithmLimits:
    """How many algorithms are wanted at the most, how many bytes of workspace one may need, and whether only batch-invariant ones are asked
    for: a backend may have some that nobody else wants."""

    max_algorithm_count: int = sys.maxsize
    max_workspace_size: int = sys.maxsize
    batch_invariant: bool = False


@dataclasses.dataclass(slots=True)
class Arguments:
    """One call of a plan: the config of exactly this problem (its true ragged extent, strides, alpha, beta) and where its operands lie.

    Attributes:
        config: the problem; its key at the plan's capacity is the plan's key.
        pointers: by role ("lhs", "rhs", "out", "group_sizes", "c", "bias"), the address of its first element; c is 0 when beta is 0, and an
            operand that the config does not have is 0 or not there.
        lists: by role, the addresses of the arrays of an operand that is a list, one per group; `pointers` has the first of them.
        group_sizes: the layout of the sizes, or of the end offsets where `ends` is true, on the device or, already validated, on the host;
            `pointers` says where they lie. Its shape is
            (group_total,), or (batch, group_total) where the config's sizes_per_batch is true, with any strides, 0 included.
        ends: whether `group_sizes` holds end offsets.
        group_offset: the first group computed, a host int or a one-element integer view on the device.
        tail: "zero" or "undefined".
        check: "none" or "sync".
        stream: device handle of the stream.
        workspace: the caller's own workspace, or None.
        bounds: of all groups, where the sizes are on the host and have been scanned already.
    """

    config: GroupedGemmConfig
    pointers: dict[str, int]
    group_sizes: ArrayView
    ends: bool
    group_offset: int | ArrayView
    tail: str
    check: str
    stream: int
    workspace: ArrayView | None = None
    bounds: GroupBounds | None = None
    lists: dict[str, tuple[int, ...]] = dataclasses.field(default_factory=dict)

    def host_group_offset(self) -> int:
        """The group offset where it is known on the host; raises RuntimeError where it lies on a device."""
        if isinstance(self.group_offset, int):
            return self.group_offset
        raise RuntimeError("group_offset: lies on a device, but this backend reads it on the host")


class Recipe(NamedTuple):
    """The launches of one call as data, for a host program of its own that makes them with other addresses (`include/launches.h`).

    Attributes:
        launches: in order. moves: where addresses go, and of which operand.
        scratch_size: bytes that the call needs beside the operands; what they hold before does not matter.
        ordered: it has memory of its own as well, so each call has to come behind the one before in one stream, and no graph may hold it.
    """

    launches: tuple[PreparedLaunch | LibraryCall, ...]
    moves: tuple[Move, ...]
    scratch_size: int
    ordered: bool = False


class Executable(abc.ABC):
    """A prepared algorithm for one plan and one stream. Its scratch belongs to that pair alone."""

    @abc.abstractmethod
    def execute(self, arguments: Arguments) -> None:
        """Launches the grouped GEMM on the stream and returns; reads nothing back from a device."""

    @abc.abstractmethod
    def explain(self) -> str:
        """What runs, and why that: one line or more for a person."""

    def prepare(self) -> None:  # noqa: B027 - most have nothing more to prepare
        """Makes ready what the first execute, and one graph capture, would otherwise have to make."""

    def recipe(self, arguments: Arguments, slots: Sequence[str], fault: int) -> Recipe | None:
        """The launches of a call, whose operands' addresses are not known yet; None where they are no list of kernels.

        The executable then serves this one call: it must neither execute another nor be closed as long as the recipe is used.

        Args:
            arguments: the call; its pointers are not looked at. slots: what the addresses will be of, in order: roles, and "scratch".
            fault: device address of the 32 zeroed bytes that keep the first fault.
        """
        del arguments, slots, fault
        return None

    def check(self) -> GroupFault | None:
        """Waits for the stream, returns the first fault since the last check, and clears it. Host sizes never leave one."""
        return None

    def in_graph(self) -> bool:
        """Whether a graph was captured that uses what this holds; it then has to be kept until the plan is closed."""
        return False

    def close(self) -> None:  # noqa: B027 - most have nothing to free
        """Frees what it holds, in the stream's order."""


class Backend(abc.ABC):
    """A way to run configs. A backend is one module (or folder) with one such class, and never imports the plan.

    It declares what it has, and `can_handle` refuses whatever is not declared: a feature, type or layout that nobody thought of when the
    backend was written is refused, never computed as something else.

    Attributes:
        name: what callers say in `backend=`.
        types: the names of the element types that operands may have. output_types: those of out; None for the same.
        features: as `GroupedGemmConfig.features` names them. layouts: as `GroupedGemmConfig.layouts` does.
        modes: the ragged dot's.
        settings: the names of `PlanSettings` beside deterministic that it has. lacking: why it does not have others.
    """

    name: str
    types: frozenset[str]
    output_types: frozenset[str] | None = None
    features: frozenset[str] = frozenset()
    layouts: frozenset[str] = frozenset()
    modes: frozenset[RaggedDotMode] = frozenset(RaggedDotMode)
    settings: frozenset[str] = frozenset()
    lacking: ClassVar[Mapping[str, str]] = {}

    def can_handle(self, config: GroupedGemmConfig, device: Device) -> str | None:
        """None when it can run the config on the device, else the reason why not, to be read after "<name>: "."""
        if config.ragged_mode not in self.modes:
            return f"{config.ragged_mode.name} is not offered"
        outputs = self.types if self.output_types is None else self.output_types
        for role, held, offered in (
            ("lhs", config.type_a, self.types),
            ("rhs", config.type_b, self.types),
            ("out", config.type_d, outputs),
        ):
            if held not in offered:
                return f"{role} of type {held}: not offered; it has {', '.join(sorted(offered))}"
        missing = config.features() - self.features
        if missing:
            return f"it does not have {', '.join(sorted(missing))}"
        missing = config.layouts() - self.layouts
        if missing:
            return f"it does not take the layout {', '.join(f'{m} = {getattr(config, m, True)}' for m in sorted(missing))}"
        return self.refusal(config, device)

    def refusal(self, config: GroupedGemmConfig, device: Device) -> str | None:
        """Reasons that depend on values or on the device: None, or why a config, all of whose needs are declared, is not run."""
        del config, device
        return None

    def lacks(self, config: GroupedGemmConfig, settings: PlanSettings) -> str | None:
        """None when it has a plan's settings, else the reason why not."""
        for name in ("batch_invariant", "max_multiprocessors"):
            if getattr(settings, name) and name not in self.settings:
                return f"it does not have {name}" + (f": {self.lacking[name]}" if name in self.lacking else "")
        if settings.batch_invariant and config.ragged_mode is not RaggedDotMode.NON_CONTRACTING:
            return f"batch_invariant is said of rows of out that are ragged (NON_CONTRACTING), this is {config.ragged_mode.name}"
        return None

    def limited(self, max_multiprocessors: int) -> Backend:
        """This backend, with algorithms that occupy so many CUs or SMs at the most; only where `settings` has max_multiprocessors."""
        raise NotImplementedError(f"{self.name} does not have max_multiprocessors={max_multiprocessors}")

    @abc.abstractmethod
    def algorithms(self, config: GroupedGemmConfig, device: Device, limits: AlgorithmLimits) -> list[MatmulAlgorithm]:
        """The algorithms that can run the config within the limits, the best guess first."""

    @abc.abstractmethod
    def prepare(self, config: GroupedGemmConfig, device: Device, algorithm: MatmulAlgorithm, stream: int) -> Executable:
        """Compiles, loads and allocates what `algorithm` needs to run `config` on `stream`."""

    def versions(self, device: Device) -> dict[str, str]:
        """The versions, beside this package's own, that decide what its algorithms are and how fast: stored results hold for these."""
        del device
        return {}

    def find_algorithm(self, config: GroupedGemmConfig, device: Device, name: str, index: int) -> MatmulAlgorithm | None:
        """The algorithm that has this name and this index together, or None: another process may have numbered the kernels differently."""
        found = (one for only in (False, True) for one in self.algorithms(config, device, AlgorithmLimits(batch_invariant=only)))
        return next((algorithm for algorithm in found if algorithm.name == name and algorithm.index == index), None)

    def compile_ahead(
        self, config: GroupedGemmConfig, device: Device, algorithms: list[MatmulAlgorithm], seconds: float | None = None
    ) -> int:
        """Compiles for many algorithms at once, into a cache that other processes find; how many kernels that were."""
        del config, device, algorithms, seconds
        return 0


def versions_of(backend: Backend, device: Device) -> dict[str, str]:
    """What a backend's tuning results on a device depend on, by name: this package's version and those that the backend tells."""
    return {"hipgroupgemm": __version__, **backend.versions(device)}


def as_limits(max_algorithm_count: Any, max_workspace_size: Any) -> AlgorithmLimits:
    """Limits from a caller's arguments, None meaning no limit; raises TypeError or ValueError for anything but natural numbers, the count
    at least 1."""
    values: list[int] = []
    for name, value, least in (("max_algorithm_count", max_algorithm_count, 1), ("max_workspace_size", max_workspace_size, 0)):
        if value is None:
            values.append(sys.maxsize)
            continue
        if isinstance(value, bool) or not hasattr(value, "__index__"):
            raise TypeError(f"{name}={value!r}: must be an int or None")
        if value.__index__() < least:
            raise ValueError(f"{name}={value}: wanted at least {least}")
        values.append(int(value.__index__()))
    return AlgorithmLimits(values[0], values[1])
