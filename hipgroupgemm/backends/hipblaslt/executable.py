"""One algorithm of hipBLASLt for one plan and one stream.

An execute is three launches: hgg_fill scans the sizes and writes one record a group, hgg_zero_uncovered gives uncovered output its
beta * c, hipBLASLt's kernel reads the records. Nothing is read back, and nothing is allocated after the first call.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
from collections.abc import Iterator, Sequence

import numpy as np

from hipgroupgemm import native
from hipgroupgemm.backends.base import Arguments, Device, Executable, MatmulAlgorithm, Recipe
from hipgroupgemm.backends.device_kernels import DeviceKernels
from hipgroupgemm.backends.hipblaslt.problem import HipblasltProblem, patched_record, problem_of
from hipgroupgemm.backends.list_tables import ListTables
from hipgroupgemm.backends.scan_arguments import FAULT_BYTES, LISTED, RECORD_BYTES, SIZE, ScanArguments, fault_from_bytes
from hipgroupgemm.config import FLOAT_BYTES, GroupedGemmConfig, RaggedDotMode
from hipgroupgemm.operands.views import ArrayView, numpy_view, packed_strides
from hipgroupgemm.problem.groups import GroupFault
from hipgroupgemm.runtime import get_runtime
from hipgroupgemm.runtime.forks import new_lock
from hipgroupgemm.runtime.objects import LibraryCall, PreparedLaunch
from hipgroupgemm.runtime.parameters import Blob, KernelParameters
from hipgroupgemm.runtime.pinned import PinnedRing
from hipgroupgemm.runtime.replay import Move
from hipgroupgemm.runtime.scratch import PerCapture, ScratchMemory, pack_sections

__all__ = ["NO_PRODUCT", "HipblasltExecutable", "handles"]

NO_PRODUCT = MatmulAlgorithm(backend="hipblaslt", index=-1, name="no_product", workspace_size=0, deterministic=True)
"""What runs a problem without a product (an extent of 0): the kernels around hipBLASLt's alone."""


_NOWHERE = 1 << 40  # an address that stands for one that is not known yet
_ready: set[int] = set()  # devices that have our kernels: compiling them during a capture would break it


@dataclasses.dataclass
class _Shared:
    handle: native.Handle
    users: int = 0


class Handles:
    """hipBLASLt handles, one per stream and at most `limit`, since each costs about 26 MB; streams past that share one.

    Only stream-K kernels would deadlock with a shared handle, and they are not offered.
    """

    def __init__(self, limit: int) -> None:
        self._limit, self._lock = limit, new_lock()
        self._entries: collections.OrderedDict[tuple[int, int], _Shared] = collections.OrderedDict()

    def acquire(self, device: int, stream: int, *, make: bool = True) -> _Shared:
        """The stream's handle, to be released; without `make` (while a graph is captured) another one of the device, if there is any."""
        with self._lock:
            entry = self._entries.get((device, stream))
            if entry is None:
                others = [entry for (where, _), entry in self._entries.items() if where == device]
                unused = [key for key, entry in self._entries.items() if not entry.users]
                full = len(self._entries) >= self._limit
                if others and (not make or (full and not unused)):
                    entry = min(others, key=lambda other: other.users)
                else:
                    if full and unused:
                        self._entries.pop(unused[0]).handle.close()
                    entry = self._entries[device, stream] = _Shared(native.Handle(device))
            else:
                self._entries.move_to_end((device, stream))
            entry.users += 1
            return entry

    def release(self, entry: _Shared) -> None:
        """Gives back what `acquire` returned."""
        with self._lock:
            entry.users -= 1

    @contextlib.contextmanager
    def lent(self, device: int) -> Iterator[native.Handle]:
        """The handle of a device's default stream, for as long as the block lasts."""
        entry = self.acquire(device, 0)
        try:
            yield entry.handle
        finally:
            self.release(entry)


handles = Handles(limit=8)


class _Slot:
    """Scratch, and a GroupedGemm with its workspace there: one for plain executes, one for every graph capture."""

    def __init__(self, executable: HipblasltExecutable, capture: int) -> None:
        e, self.capture = executable, capture
        self.gemm: native.GroupedGemm | None = None
        self.template = bytes(RECORD_BYTES)
        self._handle: _Shared | None = None
        with e.runtime.relaxed_capture() if capture else contextlib.nullcontext():
            self._scratch = ScratchMemory(e.runtime, e.device.index, e.stream, e.scratch_size, graph=bool(capture))
            self.at = {name: self._scratch.address + offset for name, offset in e.offsets.items()}
            if e.algorithm.index == NO_PRODUCT.index:
                return
            try:
                self._handle = handles.acquire(e.device.index, e.stream, make=not capture)
                self.gemm = native.GroupedGemm(self._handle.handle, e.problem.gemm)
                self.use_workspace(e, self.at["workspace"])
            except BaseException:
                self.close()
                raise

    def use_workspace(self, executable: HipblasltExecutable, address: int) -> None:
        """Readies the GroupedGemm with a workspace there."""
        if self.gemm is not None:
            algorithm = executable.algorithm
            self.template = self.gemm.initialize(algorithm.index, address, algorithm.workspace_size, executable.stream)
            self.workspace = address

    def close(self) -> None:
        """Gives all of it back."""
        if self.gemm is not None:
            self.gemm.close()
        if self._handle is not None:
            handles.release(self._handle)
        self._scratch.close()


class HipblasltExecutable(Executable):
    """See :class:`.Executable`. `key` is the plan's config at its capacity."""

    def __init__(self, key: GroupedGemmConfig, device: Device, algorithm: MatmulAlgorithm, stream: int) -> None:
        self.device, self.algorithm, self.stream = device, algorithm, stream
        self.runtime = get_runtime("rocm")
        self.problem = problem_of(key)
        with self.runtime.use_device(device.index):
            if device.index not in _ready and self.runtime.capture_id(stream):
                raise RuntimeError(
                    f"stream {stream:#x} is under graph capture, and nothing was prepared for it; call plan.prepare(stream), or run once "
                    "on any stream of this device, before the capture"
                )
        self.kernels = DeviceKernels(self.runtime, device.index)
        _ready.add(device.index)
        self.tables = ListTables(self.runtime, device.index, stream, key)
        scans, groups = self.problem.scans, self.problem.groups
        sections = {
            "fault": FAULT_BYTES,
            "covered_range": 16 * max(1, scans),
            "starts": 8 * max(1, groups),
            "ends": 8 * max(1, groups),
            "sizes": 8 * max(1, scans * key.group_total),  # those that come from the host
            "records": RECORD_BYTES * self.problem.gemm.count,
            "tables": self.tables.nbytes,
            "workspace": algorithm.workspace_size,
        }
        offsets, self.scratch_size = pack_sections(list(sections.values()))
        self.offsets = dict(zip(sections, offsets, strict=True))
        self.staging = PinnedRing(self.runtime, device.index, max(sections["sizes"], FAULT_BYTES))
        self.packed = ScanArguments()
        self._last: tuple[GroupedGemmConfig, HipblasltProblem] = key, self.problem  # a call's config, and its problem
        self._slots = PerCapture(lambda capture: _Slot(self, capture))

    def prepare(self) -> None:
        """What plain calls need; a capture makes its own."""
        with self.runtime.use_device(self.device.index):
            if not self.runtime.capture_id(self.stream):
                self._slots.get(0)

    def execute(self, arguments: Arguments) -> None:
        """Three launches, or fewer where there is nothing to write or no product."""
        runtime, stream, config = self.runtime, self.stream, arguments.config
        contracting = config.ragged_mode is RaggedDotMode.CONTRACTING
        with runtime.use_device(self.device.index):
            slot = self._slots.get(runtime.capture_id(stream))
            problem = self._pack(slot, arguments)
            places = self._places(config)
            self.kernels.fill(self.packed.bytes, places, stream)
            product = not (problem.empty or (contracting and config.alpha == 0))
            if contracting and config.alpha == 0:
                # every slab is beta * c, so every group is made empty once the sizes have been checked
                runtime.memset_async(slot.at["sizes"], 0, 8, stream)
                self.packed.make_all_groups_empty(slot.at["sizes"])
                self.kernels.fill(self.packed.bytes, places, stream)
            if 0 in (config.m, config.n, config.batch_count):
                return
            if contracting or (config.ragged_mode is RaggedDotMode.NON_CONTRACTING and arguments.tail == "zero"):
                self.kernels.zero_uncovered(self.packed.bytes, stream)
            if product and slot.gemm is not None:
                workspace = slot.at["workspace"] if arguments.workspace is None else arguments.workspace.pointer
                if workspace != slot.workspace:
                    if slot.capture:
                        raise RuntimeError("workspace: cannot be changed while the stream is under graph capture; leave it out")
                    slot.use_workspace(self, workspace)
                slot.gemm.run(slot.at["records"], stream)

    def recipe(self, arguments: Arguments, slots: Sequence[str], fault: int) -> Recipe | None:
        """The launches of a call with sizes on the device; see :meth:`.Executable.recipe`. Its scratch is this executable's own."""
        config, kernel_parameters = arguments.config, KernelParameters([Blob(SIZE)])
        contracting = config.ragged_mode is RaggedDotMode.CONTRACTING
        if self.tables.offsets or (contracting and config.alpha == 0):
            return None  # the tables of lists are written from here; alpha = 0 takes a memset between two scans
        slot = {name: place for place, name in enumerate(slots)}
        nowhere = {name: _NOWHERE + (place << 32) for name, place in slot.items()}
        a = dataclasses.replace(arguments, pointers=nowhere)
        if isinstance(a.group_offset, ArrayView):
            a.group_offset = dataclasses.replace(a.group_offset, pointer=nowhere["group_offset"])
        with self.runtime.use_device(self.device.index):
            own = self._slots.get(0)
            own.at["fault"] = fault
            problem = self._pack(own, a)
            kernel_parameters[0] = self.packed.bytes
            fill, uncovered = self.kernels.prepare(kernel_parameters, self._places(config))
        launches: list[PreparedLaunch | LibraryCall] = [fill]
        if 0 not in (config.m, config.n, config.batch_count):
            if config.ragged_mode is not RaggedDotMode.BATCH:
                launches.append(uncovered)
            if not problem.empty and own.gemm is not None:
                function, instance = own.gemm.prepared_run()
                numbers = KernelParameters(["u64", "u64"])
                numbers.set(instance, own.at["records"])
                launches.append(LibraryCall(function, numbers))
        roles = {letter: matrix.role for letter, matrix in problem.matrices.items()} | {
            "out": "out",
            "c of out": "c" if config.beta else "out",
        }
        roles |= {"bias": "bias"} if config.epilogue.bias else {}
        cells = {ScanArguments.OPERAND_CELLS[name]: role for name, role in roles.items()}
        cells |= {ScanArguments.CELLS["sizes"]: "group_sizes"} if config.ragged_mode is not RaggedDotMode.BATCH else {}
        cells |= {ScanArguments.CELLS["group_offset"]: "group_offset"} if isinstance(a.group_offset, ArrayView) else {}
        blob = kernel_parameters.blob_address(0)
        return Recipe(tuple(launches), tuple(Move(blob + at, slot[role]) for at, role in cells.items()), 0, ordered=True)

    def _places(self, config: GroupedGemmConfig) -> int:
        """Groups and surplus records that hgg_fill goes over."""
        return self.problem.gemm.count - self.problem.groups + max(1, self.problem.scans) * config.group_total

    def _pack(self, slot: _Slot, arguments: Arguments) -> HipblasltProblem:
        """Fills in the kernels' argument; returns the call's problem."""
        config, packed, at, pointers = arguments.config, self.packed, slot.at, arguments.pointers
        if config is not self._last[0]:
            self._last = config, problem_of(config)
        problem = self._last[1]
        arguments, sizes = self._sizes_on_device(arguments, at["sizes"])
        places = {name: at[name] for name in ("starts", "ends", "covered_range", "fault")}
        packed.set_scan(config, arguments, sizes, **places)
        packed.set_records(0 if slot.gemm is None else at["records"], self.problem.gemm.count)
        packed.set_scalars(config.alpha, config.beta, double=config.compute_type == "float64")
        if arguments.lists:
            self.tables.write(arguments.lists, at["tables"], slot.capture)
        bases = pointers | {role: at["tables"] + offset for role, offset in self.tables.offsets.items()}
        for letter, matrix in problem.matrices.items():
            batch, group = matrix.batch if problem.scans > 1 else 0, LISTED if matrix.role in self.tables.offsets else matrix.group
            packed.set_operand(letter, bases[matrix.role], matrix.row, group, batch)
        packed.set_operand("bias", pointers.get("bias", 0), 0, config.bias_group_stride * FLOAT_BYTES[config.type_d], 0)
        packed.set_uncovered(config, bases["out"], bases["c"] if config.beta else bases["out"])
        packed.set_record(patched_record(slot.template, problem, product=config.alpha != 0 and config.k != 0))
        return problem

    def _sizes_on_device(self, arguments: Arguments, address: int) -> tuple[Arguments, int]:
        """The call, and where its sizes are: those on the host are copied to `address`, packed as int64, and described there."""
        view = arguments.group_sizes
        if arguments.config.ragged_mode is RaggedDotMode.BATCH or view.device.kind != "cpu":
            return arguments, arguments.pointers.get("group_sizes", 0)
        values = numpy_view(arguments.pointers["group_sizes"], view.shape, view.strides, view.dtype).astype(
            np.int64
        )  # validated: nothing is cut
        self.staging.put(values, address, self.stream)
        there = ArrayView(address, view.shape, packed_strides(view.shape, 8), values.dtype, self.device, "")
        return dataclasses.replace(arguments, group_sizes=there), address

    def check(self) -> GroupFault | None:
        """The first fault of all slots."""
        first: GroupFault | None = None
        with self.runtime.use_device(self.device.index):
            for slot in self._slots.all():
                fault = fault_from_bytes(self.staging.read(slot.at["fault"], FAULT_BYTES, self.stream))
                if fault is not None:
                    self.runtime.memset_async(slot.at["fault"], 0, FAULT_BYTES, self.stream)
                    first = first or fault
            self.runtime.synchronize_stream(self.stream)
        return first

    def explain(self) -> str:
        """The solution, the problem that it was set up for, and which operand is which."""
        g = self.problem.gemm
        if self.algorithm.index == NO_PRODUCT.index:
            return "an extent is 0: there is no product, only beta * c to write"
        swapped = "A is rhs and B is lhs, since out is row-major"
        ragged = f"{g.ragged} is ragged, up to {getattr(g, g.ragged)} in all groups" if g.ragged else "nothing is ragged"
        return (
            f"hipBLASLt solution {self.algorithm.index} for {g.count} problems of m={g.m} n={g.n} k={g.k} batch={g.batch}; {ragged}; "
            f"{swapped if self.problem.swapped else 'A is lhs and B is rhs, since out is column-major'}; "
            f"A is {'transposed' if g.trans_a else 'not transposed'}, B is {'transposed' if g.trans_b else 'not transposed'}; "
            f"the records ({RECORD_BYTES} bytes each) are written on the device"
        )

    def in_graph(self) -> bool:
        """Whether a capture has a slot."""
        return self._slots.in_graph()

    def close(self) -> None:
        """Gives everything back; graphs that were captured must not be launched any more."""
        self._slots.close()
        self.staging.close()
        self.tables.close()
