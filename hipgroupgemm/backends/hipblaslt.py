"""The hipBLASLt backend (ROCm): `hipblaslt_ext::GroupedGemm`, run from records that a kernel of ours writes on the device.

An execute is three launches on one stream: hgg_fill scans the sizes and writes one record a group, hgg_finish gives uncovered output its
beta * c, hipBLASLt's kernel reads the records. Nothing is read back, and nothing is allocated after the first call.
"""

from __future__ import annotations

import collections
import dataclasses
import threading
from typing import Any

from hipgroupgemm import native
from hipgroupgemm.backends.base import AlgorithmLimits, Arguments, Backend, Device, Executable, MatmulAlgorithm
from hipgroupgemm.backends.device_kernels import DeviceKernels
from hipgroupgemm.backends.hipblaslt_terms import COMPUTE, TYPES, Refused, Terms, patch_record, terms_of
from hipgroupgemm.backends.scan_arguments import FAULT_BYTES, RAGGED_N, RECORD_BYTES, ScanArguments, fault_from_bytes
from hipgroupgemm.config import FLOAT_BYTES, GroupedGemmConfig, RaggedDotMode
from hipgroupgemm.operands.views import ArrayView, numpy_view, packed_strides
from hipgroupgemm.problem.groups import GroupFault
from hipgroupgemm.runtime import RuntimeUnavailable, get_runtime
from hipgroupgemm.runtime.pinned import PinnedRing
from hipgroupgemm.runtime.scratch import ScratchMemory, pack_sections

__all__ = ["HipblasltBackend"]

_RANKED = 16  # algorithms asked of hipBLASLt's own ranking

NO_PRODUCT = MatmulAlgorithm(backend="hipblaslt", index=-1, name="no_product", workspace_size=0, deterministic=True)
"""What runs a problem without a product (an extent of 0): the kernels around hipBLASLt's alone."""


class _Handles:
    """hipBLASLt handles, one a stream, since stream-K kernels deadlock when one handle serves several; each costs about 26 MB."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._lock = threading.Lock()
        self._entries: collections.OrderedDict[tuple[int, int], list[Any]] = collections.OrderedDict()  # [handle, users]

    def acquire(self, device: int, stream: int) -> native.Handle:
        key = (device, stream)
        with self._lock:
            entry = self._entries.get(key)
            if entry is None:
                entry = self._entries[key] = [native.Handle(device, stream), 0]
            self._entries.move_to_end(key)
            entry[1] += 1
            unused = [k for k, (_, users) in self._entries.items() if users == 0]
            for k in unused[: max(0, len(self._entries) - self._limit)]:
                self._entries.pop(k)[0].close()
            handle: native.Handle = entry[0]
            return handle

    def release(self, device: int, stream: int) -> None:
        with self._lock:
            entry = self._entries.get((device, stream))
            if entry is not None:
                entry[1] -= 1


_handles = _Handles(limit=8)


def _grouped_gemm(handle: native.Handle, config: GroupedGemmConfig, terms: Terms) -> native.GroupedGemm:
    """A GroupedGemm with the problem set at the config's capacity."""
    kinds = native.DataType
    a, d = kinds(TYPES[config.type_a]), kinds(TYPES[config.type_d])
    gemm = native.GroupedGemm(
        handle,
        a,
        a,
        d,
        d,
        compute=native.ComputeType(COMPUTE[config.compute_type]),
        trans_a=terms.trans_a,
        trans_b=terms.trans_b,
        epilogue=native.Epilogue.BIAS if config.epilogue.bias else native.Epilogue.DEFAULT,
        bias_type=d,
    )
    sizes = terms.problem_sizes()
    if terms.fixed:
        ragged = native.Ragged.FIXED
    else:
        ragged = native.Ragged.N if terms.ragged == RAGGED_N else native.Ragged.K
    try:
        gemm.set_problem(
            sizes["m"],
            sizes["n"],
            sizes["k"],
            sizes["batch"],
            ragged=ragged,
            lda=terms.a.leading,
            ldb=terms.b.leading,
            ldc=terms.c.leading,
            ldd=terms.d.leading,
            stride_a=terms.a.batch if terms.batch > 1 else None,
            stride_b=terms.b.batch if terms.batch > 1 else None,
            stride_c=terms.c.batch if terms.batch > 1 else None,
            stride_d=terms.d.batch if terms.batch > 1 else None,
            # neither 1: a kernel made for one value must not be offered, since records bring any
            alpha=2.0,
            beta=2.0 if config.beta else 0.0,
        )
    except BaseException:
        gemm.close()
        raise
    return gemm


class HipblasltBackend(Backend):
    """hipBLASLt's grouped GEMM on ROCm devices. What it cannot express, or has no kernels for, it refuses with the reason."""

    name = "hipblaslt"
    types = frozenset(TYPES)
    features = frozenset(("alpha", "bias", "c", "group_offset", "narrow_output", "sizes_per_batch", "tf32", "wide_output"))
    layouts = frozenset(("column_major_output",))

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._algorithms: dict[tuple[GroupedGemmConfig, int, bool], list[MatmulAlgorithm]] = {}
        self._version = ""

    def refusal(self, config: GroupedGemmConfig, device: Device) -> str | None:
        """None when hipBLASLt has at least one algorithm for the config on this device, else the reason why not."""
        if device.kind != "rocm":
            return f"it serves ROCm devices, the operands are on {device}"
        reason = native.unavailable_reason()
        if reason is not None:
            return reason
        try:
            found = self._list(config.key(), device)
        except Refused as error:
            return str(error)
        except (native.NativeError, RuntimeUnavailable, NotImplementedError) as error:
            return str(error)
        if not found:
            info = get_runtime("rocm").device_info(device.index)
            return (
                f"hipBLASLt has no grouped kernel for {config.type_a} -> {config.type_d} with these extents and layouts on "
                f"{info.architecture}; a newer hipBLASLt may, and so does the triton backend"
            )
        return None

    def versions(self, device: Device) -> dict[str, str]:
        """hipBLASLt's version with its git revision: "1.2.0+3f2b1c" (some distributions build it without one)."""
        if not self._version:
            handle = _handles.acquire(device.index, 0)
            try:
                info = handle.info()
            finally:
                _handles.release(device.index, 0)
            self._version = ".".join(str(part) for part in info.loaded) + (f"+{info.revision}" if info.revision else "")
        return {"hipblaslt": self._version}

    def find_algorithm(self, config: GroupedGemmConfig, device: Device, name: str, index: int) -> MatmulAlgorithm | None:
        """The algorithm of that name and index, asked of hipBLASLt by its index: listing all may take seconds."""
        key = config.key()
        for found in self._list(key, device):
            if (found.name, found.index) == (name, index):
                return found
        terms = terms_of(key)
        if terms.empty or index < 0:
            return None
        handle = _handles.acquire(device.index, 0)
        try:
            with self._lock, _grouped_gemm(handle, key, terms) as gemm:
                one = gemm.find_algorithm(name, index)
        except native.NativeValueError:
            return None
        finally:
            _handles.release(device.index, 0)
        if not (one.supported and one.verified):
            return None
        return MatmulAlgorithm(self.name, one.index, one.name, one.workspace_size, deterministic=True)

    def algorithms(self, config: GroupedGemmConfig, device: Device, limits: AlgorithmLimits) -> list[MatmulAlgorithm]:
        """hipBLASLt's supported algorithms with their true workspaces, its own ranking first. Split-k ones are left out.

        A split or stream-K algorithm reads its work from the host's sizes, not from device records, so it is not offered.
        """
        for every in (False, True):
            found = [a for a in self._list(config.key(), device, every=every) if a.workspace_size <= limits.max_workspace_size]
            if len(found) >= limits.max_algorithm_count:
                break
        return found[: limits.max_algorithm_count]

    def _list(self, key: GroupedGemmConfig, device: Device, *, every: bool = False) -> list[MatmulAlgorithm]:
        """The ranked algorithms, or behind them all others: checking each of hundreds takes seconds where there are thousands of groups."""
        with self._lock:
            cached = self._algorithms.get((key, device.index, every))
            if cached is not None:
                return cached
            terms = terms_of(key)
            found = [NO_PRODUCT]
            if not terms.empty:
                handle = _handles.acquire(device.index, 0)
                try:
                    with _grouped_gemm(handle, key, terms) as gemm:
                        listed = gemm.heuristic(max_count=_RANKED)
                        if every or not any(algorithm.verified for algorithm in listed):
                            listed += gemm.all_algorithms()
                finally:
                    _handles.release(device.index, 0)
                best = {algorithm.index: algorithm for algorithm in listed if algorithm.verified}
                found = [MatmulAlgorithm(self.name, a.index, a.name, a.workspace_size, deterministic=True) for a in best.values()]
            if len(self._algorithms) >= 256:
                self._algorithms.clear()
            self._algorithms[key, device.index, every] = found
            return found

    def prepare(self, config: GroupedGemmConfig, device: Device, algorithm: MatmulAlgorithm, stream: int) -> Executable:
        """Kernels compiled and loaded, a GroupedGemm initialised with its workspace, scratch allocated."""
        return _HipblasltExecutable(config, device, algorithm, stream)


@dataclasses.dataclass
class _Slot:
    """Scratch and a GroupedGemm that use each other: one for plain executes, one for every graph capture."""

    gemm: native.GroupedGemm | None
    scratch: ScratchMemory
    base: int
    template: bytes
    workspace: int
    capture: int = 0


class _HipblasltExecutable(Executable):
    def __init__(self, key: GroupedGemmConfig, device: Device, algorithm: MatmulAlgorithm, stream: int) -> None:
        self.key, self.device, self.algorithm, self.stream = key, device, algorithm, stream
        self.runtime = get_runtime("rocm")
        self.terms = terms_of(key)
        self.kernels = DeviceKernels(self.runtime, device.index)
        scans = key.batch_count if key.sizes_per_batch else 1
        groups = scans * key.group_count
        self.offsets, self.scratch_size = pack_sections(
            [
                FAULT_BYTES,
                16 * max(1, scans),  # cover
                8 * max(1, groups),  # starts
                8 * max(1, groups),  # ends
                8 * max(1, scans * key.group_total),  # host sizes
                RECORD_BYTES * self.terms.records,
                algorithm.workspace_size,
            ]
        )
        self.staging = PinnedRing(self.runtime, device.index, 8 * max(1, scans * key.group_total))
        self.packed = ScanArguments()
        self._spare: list[_Slot] = []  # ready for captures to come
        self._captured: list[_Slot] = []
        with self.runtime.use_device(device.index):
            self._slot = self._make_slot(graph=False)

    # ---- slots -------------------------------------------------------------------------------------------------------------

    def _make_slot(self, *, graph: bool) -> _Slot:
        scratch = ScratchMemory(self.runtime, self.device.index, self.stream, self.scratch_size, graph=graph)
        base = scratch.address
        gemm, template, workspace = None, bytes(RECORD_BYTES), base + self.offsets[6]
        if self.algorithm.index != NO_PRODUCT.index:
            handle = _handles.acquire(self.device.index, self.stream)
            try:
                gemm = _grouped_gemm(handle, self.key, self.terms)
                gemm.initialize(gemm.find_algorithm(self.algorithm.name, self.algorithm.index), workspace, self.algorithm.workspace_size)
                template = gemm.template().data
            except BaseException:
                if gemm is not None:
                    gemm.close()
                _handles.release(self.device.index, self.stream)
                scratch.close()
                raise
        return _Slot(gemm, scratch, base, template, workspace)

    def prepare(self) -> None:
        """Also readies one graph capture: what a capture uses cannot be made while it runs."""
        if not self._spare:
            with self.runtime.use_device(self.device.index):
                self._spare.append(self._make_slot(graph=True))

    def _slot_for(self, capture: int) -> _Slot:
        if not capture:
            return self._slot
        for slot in self._captured:
            if slot.capture == capture:
                return slot
        if not self._spare:
            raise RuntimeError(
                "the stream is under graph capture, but the plan is not prepared for it; call plan.prepare(stream) before the capture, "
                "once for each capture"
            )
        slot = self._spare.pop()
        slot.capture = capture
        self._captured.append(slot)
        return slot

    # ---- running -----------------------------------------------------------------------------------------------------------

    def execute(self, arguments: Arguments) -> None:
        runtime, stream = self.runtime, arguments.stream
        with runtime.use_device(self.device.index):
            slot = self._slot_for(runtime.capture_id(stream))
            config = arguments.config
            product = config.alpha != 0 and config.k != 0
            terms = self._pack(slot, arguments, product)
            fill_groups = self.terms.records - self.terms.groups + max(1, self.terms.totals) * config.group_total
            self.kernels.fill(self.packed.bytes, fill_groups, stream)
            contracting = config.ragged_mode is RaggedDotMode.CONTRACTING
            if contracting and config.alpha == 0:
                self._empty_all_groups(slot)
                self.kernels.fill(self.packed.bytes, fill_groups, stream)
            if 0 in (config.m, config.n, config.batch_count):
                return
            if contracting or (config.ragged_mode is RaggedDotMode.NON_CONTRACTING and arguments.tail == "zero"):
                self.kernels.finish(self.packed.bytes, stream)
            if terms.empty or slot.gemm is None or (contracting and config.alpha == 0):
                return
            self._use_workspace(slot, arguments)
            slot.gemm.run(slot.base + self.offsets[5], RECORD_BYTES * self.terms.records, stream)

    def _pack(self, slot: _Slot, arguments: Arguments, product: bool) -> Terms:
        """Fills in the kernels' argument; returns the call's terms."""
        config, packed, at = arguments.config, self.packed, self.offsets
        base = slot.base
        arguments, sizes = self._with_device_sizes(slot, arguments)
        terms = terms_of(config)
        packed.set_scan(
            config,
            arguments,
            sizes,
            mode=terms.ragged,
            starts=base + at[2],
            ends=base + at[3],
            cover=base + at[1],
            fault=base + at[0],
        )
        packed.set_records(0 if slot.gemm is None else base + at[5], self.terms.records)
        packed.set_scalars(config.alpha, config.beta, double=config.compute_type == "float64")
        a_size, b_size, d_size = FLOAT_BYTES[config.type_a], FLOAT_BYTES[config.type_b], FLOAT_BYTES[config.type_d]
        at_role = arguments.pointers
        lhs, rhs, out = at_role["lhs"], at_role["rhs"], at_role["out"]
        a, b = (rhs, lhs) if terms.swapped else (lhs, rhs)
        c = at_role["c"] if config.beta else out
        operands = (("a", a, terms.a, a_size), ("b", b, terms.b, b_size), ("c", c, terms.c, d_size), ("d", out, terms.d, d_size))
        for name, address, matrix, size in operands:
            packed.set_operand(name, address, matrix.row * size, matrix.group * size, matrix.batch * size if self.terms.totals > 1 else 0)
        packed.set_operand("bias", at_role.get("bias", 0), 0, config.bias_group_stride * d_size, 0)
        packed.set_finish(config, out, c)
        packed.set_record(patch_record(slot.template, terms, product=product))
        return terms

    def _with_device_sizes(self, slot: _Slot, arguments: Arguments) -> tuple[Arguments, int]:
        """The call with its sizes on the device, and their address; those on the host go through pinned memory, packed."""
        view, address = arguments.group_sizes, slot.base + self.offsets[4]
        if arguments.config.ragged_mode is RaggedDotMode.BATCH:
            return arguments, address
        if view.device.kind != "cpu":
            return arguments, view.pointer
        self.staging.put(numpy_view(view.pointer, view.shape, view.strides, view.dtype), address, arguments.stream)
        there = ArrayView(address, view.shape, packed_strides(view.shape, view.dtype.itemsize), view.dtype, self.device, view.framework)
        return dataclasses.replace(arguments, group_sizes=there), address

    def _empty_all_groups(self, slot: _Slot) -> None:
        """For alpha = 0 in CONTRACTING: every slab is beta * c, so every group is made empty once the sizes have been checked."""
        zero = slot.base + self.offsets[4]
        self.runtime.memset_async(zero, 0, 8, self.stream)
        self.packed.make_all_groups_empty(zero)

    def _use_workspace(self, slot: _Slot, arguments: Arguments) -> None:
        """Initialises anew where the caller's workspace is not the one in use."""
        wanted = arguments.workspace.pointer if arguments.workspace is not None else slot.base + self.offsets[6]
        if wanted != slot.workspace and slot.gemm is not None:
            if slot.capture:
                raise RuntimeError("workspace: cannot be changed while the stream is under graph capture; leave it out")
            slot.gemm.initialize(self.algorithm.index, wanted, self.algorithm.workspace_size)
            slot.workspace = wanted

    def check(self) -> GroupFault | None:
        first: GroupFault | None = None
        with self.runtime.use_device(self.device.index):
            for slot in (self._slot, *self._captured):
                raw = self.staging.read(slot.base + self.offsets[0], FAULT_BYTES, self.stream)
                fault = fault_from_bytes(raw)
                if fault is not None:
                    self.runtime.memset_async(slot.base + self.offsets[0], 0, FAULT_BYTES, self.stream)
                    first = first or fault
            self.runtime.synchronize_stream(self.stream)
        return first

    def explain(self) -> str:
        t = self.terms
        if self.algorithm.index == NO_PRODUCT.index:
            return "an extent is 0: there is no product, only beta * c to write"
        order = "A is rhs and B is lhs, since out is row-major" if t.swapped else "A is lhs and B is rhs, since out is column-major"
        ragged = "n" if t.ragged == RAGGED_N else "k"
        layouts = f"{'T' if t.trans_a else 'N'}{'T' if t.trans_b else 'N'}"
        return (
            f"hipBLASLt solution {self.algorithm.index}: m={t.m} n={t.n} k={t.k} batch={t.batch} at capacity, {layouts}, ragged {ragged}; "
            f"{order}; {t.records} records of {RECORD_BYTES} bytes written on the device"
        )

    def in_graph(self) -> bool:
        return bool(self._captured)

    def close(self) -> None:
        for slot in (self._slot, *self._spare, *self._captured):
            if slot.gemm is not None:
                slot.gemm.close()
                _handles.release(self.device.index, self.stream)
            slot.scratch.close()
        self._spare.clear()
        self._captured.clear()
        self.staging.close()
