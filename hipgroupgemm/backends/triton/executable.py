"""A prepared algorithm on one stream: its scratch, its two launches, and the parameters that a call changes in them."""

from __future__ import annotations

import ctypes
import threading
from typing import Any

from hipgroupgemm.backends.base import Arguments, Executable
from hipgroupgemm.backends.device_kernels import THREADS, scan_blocks
from hipgroupgemm.backends.scan_arguments import FAULT_BYTES, RAGGED_K, RAGGED_N, SIZE, ScanArguments, fault_from_bytes
from hipgroupgemm.backends.triton.candidates import Candidate, Machine
from hipgroupgemm.backends.triton.compiler import CompiledKernel, KernelSpec, compile_kernel
from hipgroupgemm.backends.triton.descriptors import Descriptors
from hipgroupgemm.backends.triton.host_sizes import HostSizes
from hipgroupgemm.backends.triton.scan import SPECIAL, scan_function
from hipgroupgemm.backends.triton.specs import parts_spec, room_for_groups, spec_of
from hipgroupgemm.config import GroupedGemmConfig, RaggedDotMode
from hipgroupgemm.operands.views import Device
from hipgroupgemm.problem.groups import GroupFault
from hipgroupgemm.runtime.base import Runtime
from hipgroupgemm.runtime.objects import Module, PreparedLaunch
from hipgroupgemm.runtime.parameters import Blob, KernelParameters
from hipgroupgemm.runtime.scratch import Scratch, pack_sections

__all__ = ["TritonExecutable", "parts_bytes"]

_ROWS_SIDE_BY_SIDE = 2048
"""Of a group in NON_CONTRACTING: its weights are read once for so many. More would not stay in the L2 cache."""

_modules: dict[tuple[str, int, KernelSpec], Module] = {}
_modules_lock = threading.Lock()


def _module_of(runtime: Runtime, device: int, spec: KernelSpec, kernel: CompiledKernel) -> Module:
    """A kernel's code, loaded once a device; it stays loaded as long as the process lives."""
    key = (runtime.kind, device, spec)
    with _modules_lock:
        found = _modules.get(key)
        if found is None:
            found = _modules[key] = runtime.load_module(kernel.code, device)
        return found


def parts_bytes(candidate: Candidate, config: GroupedGemmConfig) -> int:
    """Bytes of workspace: the float32 sums of a split candidate's shares."""
    if candidate.split == 1:
        return 0
    return 4 * candidate.split * config.group_count * max(config.batch_count, 1) * config.m * config.n


class _Product:
    """The kernel that multiplies, ready to be launched: its parameters, where they stand by name, and its descriptors."""

    def __init__(
        self, runtime: Runtime, device: int, stream: int, key: GroupedGemmConfig, candidate: Candidate, spec: KernelSpec, *, early: bool
    ) -> None:
        kernel = compile_kernel(spec)
        self.parameters = KernelParameters(kernel.kinds, kernel.names)
        self.launch = _launch_of(runtime, device, stream, spec, kernel, self.parameters, early=early)
        self.index = {name: i for i, name in enumerate(kernel.names)}
        self.descriptors = Descriptors(runtime, kernel, self.parameters, key) if candidate.kernel == "hopper" else None


def _launch_of(
    runtime: Runtime, device: int, stream: int, spec: KernelSpec, kernel: CompiledKernel, parameters: KernelParameters, *, early: bool
) -> PreparedLaunch:
    function = _module_of(runtime, device, spec, kernel).get_function(kernel.name, kernel.shared)
    block = (kernel.threads, 1, 1)
    if early:
        return runtime.prepare_launch(function, (1, 1, 1), block, kernel.shared, stream, parameters, programmatic=True)
    return runtime.prepare_launch(function, (1, 1, 1), block, kernel.shared, stream, parameters)


class TritonExecutable(Executable):
    """Scans the sizes in one launch and multiplies in the next, or does both in one (`scanning`), where the kernel can and may."""

    def __init__(
        self, runtime: Runtime, device: Device, key: GroupedGemmConfig, candidate: Candidate, machine: Machine, stream: int, why: str
    ) -> None:
        self._runtime, self._device, self._stream = runtime, device.index, stream
        self._key, self._candidate, self._machine, self._why = key, candidate, machine, why
        self._closed = False
        self._mode = key.ragged_mode
        self._slabs = self._mode is RaggedDotMode.CONTRACTING
        self._scans = key.batch_count if key.sizes_per_batch else 1
        self._has_scan = self._mode is not RaggedDotMode.BATCH
        self._sections(key)
        self._can_scan = room_for_groups(candidate, key, machine) > 0
        self._scanning = self._can_scan
        with runtime.use_device(self._device):
            spec = spec_of(candidate, key, machine, scanning=self._scanning)
            if runtime.capture_id(stream) and (runtime.kind, self._device, spec) not in _modules:
                raise RuntimeError(
                    f"stream {stream:#x} is under graph capture, and nothing was prepared for it; call plan.prepare(stream), or run once "
                    "on any stream of this device, before the capture"
                )
            self._prepare()
        self._host = HostSizes(runtime, self._device, stream, self._scans * key.group_total)
        self._bound: GroupedGemmConfig | None = None
        self._last: tuple[Any, ...] = ()
        self._scratch_at = 0
        self._runs = False
        self._again: Arguments | None = None  # the call that all parameters are those of, but for out
        self._again_out = 0
        with runtime.use_device(self._device):
            self._scratch.reserve()  # ahead, so that the first call costs no more than the others

    # ---- preparation -------------------------------------------------------------------------------------------------------

    def _sections(self, key: GroupedGemmConfig) -> None:
        """How the scratch is laid out: fault, cover, starts, ends, tile count, tiles, copied host sizes, parts."""
        groups, total = key.group_count, key.group_total
        self._tile_capacity = 0
        if self._mode is RaggedDotMode.NON_CONTRACTING:
            self._tile_capacity = self._scans * (key.ragged_extent // self._candidate.bm + groups)
        bounds = 8 * self._scans * groups if self._has_scan else 0
        sizes = [FAULT_BYTES, 16 * self._scans, bounds, bounds, 4, 16 * self._tile_capacity, 8 * self._scans * total]
        sizes.append(parts_bytes(self._candidate, key))
        self._offsets, self._scratch_bytes = pack_sections(sizes)
        self._fault, self._cover, self._starts, self._ends, self._tile_count, self._tiles, self._sizes, self._parts = self._offsets

    def _prepare(self) -> None:
        runtime, candidate = self._runtime, self._candidate
        self._scratch = Scratch(runtime, self._device, self._stream, self._scratch_bytes)
        self._scan_arguments = ScanArguments()
        if self._has_scan:
            self._scan_parameters = KernelParameters([Blob(SIZE, 8)])
            self._scan_launches: dict[tuple[str, bool] | None, PreparedLaunch] = {}
            self._scan = self._scan_of(None)
            if self._scans == 1 and not self._scanning:
                self._scan_of(("int32", False))
        self._products: dict[bool, _Product] = {}
        self._use(self._scanning)
        self._adder: PreparedLaunch | None = None
        if candidate.split > 1:
            spec = parts_spec(candidate, self._key, self._machine)
            adder = compile_kernel(spec)
            self._adder_parameters = KernelParameters(adder.kinds, adder.names)
            self._adder_index = {name: i for i, name in enumerate(adder.names)}
            self._adder = _launch_of(runtime, self._device, self._stream, spec, adder, self._adder_parameters, early=False)

    def _use(self, scanning: bool) -> None:
        """Takes the kernel that scans by itself, or the one behind a scan; a call that it cannot be used for has it made then."""
        found = self._products.get(scanning)
        if found is None:
            spec = spec_of(self._candidate, self._key, self._machine, scanning=scanning)
            early = self._candidate.kernel == "hopper" and self._has_scan and not scanning
            found = _Product(self._runtime, self._device, self._stream, self._key, self._candidate, spec, early=early)
            self._products[scanning] = found
        self._main, self._parameters, self._index, self._descriptors = found.launch, found.parameters, found.index, found.descriptors
        self._in_use, self._bound = scanning, None

    def _scan_of(self, special: tuple[str, bool] | None) -> PreparedLaunch:
        found = self._scan_launches.get(special)
        if found is None:
            blocks = scan_blocks(self._scans * self._key.group_total, self._tile_capacity)
            function = scan_function(self._runtime, self._device, special)
            found = self._runtime.prepare_launch(function, (blocks, 1, 1), (THREADS, 1, 1), 0, self._stream, self._scan_parameters)
            self._scan_launches[special] = found
        return found

    # ---- a call ------------------------------------------------------------------------------------------------------------

    def execute(self, arguments: Arguments) -> None:
        """Launches the scan and the product on the stream."""
        a = arguments
        runtime = self._runtime
        with runtime.use_device(self._device):
            capture = runtime.capture_id(self._stream)
            base = self._scratch.pointer(capture)
            if a is not self._again or base != self._scratch_at:
                self._look_at(a, base, capture)
            elif a.pointers["out"] != self._again_out:
                self._bind_out(a.pointers["out"])
            if self._has_scan and not self._scanning:
                self._scan.run()
            if self._runs:
                self._main.run()
                if self._adder is not None:
                    self._adder.run()

    def _look_at(self, a: Arguments, base: int, capture: int) -> None:
        """Finds out what this call changes, and changes it."""
        sizes = a.group_sizes
        pointer = sizes.pointer
        on_host = self._has_scan and sizes.device.kind == "cpu"
        if on_host:
            pointer = self._host.copy(sizes, base + self._sizes)
        offset = a.group_offset if isinstance(a.group_offset, int) else a.group_offset.pointer
        workspace = 0 if a.workspace is None else a.workspace.pointer
        call = (*a.pointers.values(), pointer, sizes.strides, sizes.dtype, a.ends, offset, a.tail, base, workspace)
        if a.config is not self._bound or call != self._last:
            self._bind(a, call, base, pointer, capture)
        self._again, self._again_out = (None, 0) if on_host else (a, a.pointers["out"])

    def _bind_out(self, out: int) -> None:
        """The same call as before, but for out."""
        self._last = ()
        if self._runs:
            if self._descriptors is not None:
                self._descriptors.move("out", out)
                if "out_pointer" in self._index:
                    self._parameters[self._index["out_pointer"]] = out
            else:
                self._parameters[self._index["out"]] = out
            if self._adder is not None:
                self._adder_parameters[self._adder_index["out"]] = out
        self._again_out = out

    def _bind(self, a: Arguments, call: tuple[Any, ...], base: int, sizes: int, capture: int) -> None:
        """Brings all parameters up to date."""
        self._last, self._again = (), None
        scanning = self._can_scan and self._may_scan(a, sizes)
        if scanning is not self._in_use and self._multiplies(a.config):
            self._use(scanning)
        self._scanning = scanning
        same_config = a.config is self._bound
        if not same_config:
            self._bind_config(a.config)
        if base != self._scratch_at or not same_config:
            self._scratch_at = base
        if self._scanning:
            self._bind_sizes(a, base, sizes)
        elif self._has_scan:
            self._bind_scan(a, base, sizes, capture)
        if self._runs:
            self._bind_operands(a, base)
        self._bound, self._last = a.config, call

    def _multiplies(self, c: GroupedGemmConfig) -> bool:
        """Whether there is anything to multiply or to write; sizes are looked at in any case."""
        return 0 not in (c.m, c.n, c.batch_count, c.group_count if self._slabs else 1)

    def _may_scan(self, a: Arguments, sizes: int) -> bool:
        """Whether the multiplying kernel can read the sizes as they lie, and runs at all."""
        view = a.group_sizes
        if not self._multiplies(a.config) or not isinstance(a.group_offset, int) or a.group_offset:
            return False
        if view.device.kind == "cpu":
            return True  # they come as int64
        return view.dtype.name in ("int32", "int64") and sizes % 4 == 0 and view.strides[-1] % 4 == 0

    def _bind_config(self, config: GroupedGemmConfig) -> None:
        """Extents, strides and scalars."""
        c, k = config, self._candidate
        self._bound = None
        self._runs = self._multiplies(config)
        put: dict[str, Any] = {"columns": c.n, "groups": c.group_count, "batches": c.batch_count, "scans": self._scans, "alpha": c.alpha}
        row_tiles = -(-c.m // k.bm)
        column_tiles = -(-c.n // k.bn)
        if self._slabs:
            put.update(extent=c.k, rows=c.m, active=int(c.alpha != 0), window=max(1, min(8, row_tiles)))
            tiles = c.group_count * c.batch_count * row_tiles * column_tiles * k.split
        else:
            average = c.m if not self._has_scan else c.m / max(c.group_count, 1)
            window = max(1, min(16, round(average / k.bm)))
            if k.kernel == "hopper":
                window = max(1, _ROWS_SIDE_BY_SIDE // k.bm)
            put.update(rows_total=c.m, depth=c.k if c.alpha else 0, window=window, zero_tail=0)
            tiles = c.batch_count * (row_tiles + (c.group_count if self._has_scan else 0)) * column_tiles
        put["beta"] = c.beta
        put.update(self._strides(c))
        index = self._index
        for name, value in put.items():
            at = index.get(name)
            if at is not None:
                self._parameters[at] = value
        if self._adder is not None:
            for name, value in put.items():
                at = self._adder_index.get(name)
                if at is not None:
                    self._adder_parameters[at] = value
            self._adder.set_grid((max(1, min(self._machine.multiprocessors * 8, tiles)), 1, 1))
        self._main.set_grid((max(1, min(self._machine.multiprocessors * k.blocks, tiles)), 1, 1))

    @staticmethod
    def _strides(c: GroupedGemmConfig) -> dict[str, int]:
        names: dict[str, int] = {}
        names.update(zip(("lhs_b", "lhs_m", "lhs_k"), c.lhs_strides, strict=True))
        names.update(zip(("rhs_g", "rhs_b", "rhs_k", "rhs_n"), c.rhs_strides, strict=True))
        names.update(zip(("out_g", "out_b", "out_m", "out_n"), c.output_strides, strict=True))
        names.update(zip(("c_g", "c_b", "c_m", "c_n"), c.c_strides, strict=True))
        names.update(bias_g=c.bias_group_stride, bias_n=c.bias_inner_stride)
        return names

    def _bind_scan(self, a: Arguments, base: int, sizes: int, capture: int) -> None:
        scan = self._scan_arguments
        on_host = a.group_sizes.device.kind == "cpu"
        special = ("int64" if on_host else a.group_sizes.dtype.name, a.ends)
        if self._scans > 1 or special not in SPECIAL or (capture and special not in self._scan_launches):
            self._scan = self._scan_of(None)
        else:
            self._scan = self._scan_of(special)
        scan.set_scan(
            a.config,
            a if not on_host else self._host.described(a),
            sizes,
            mode=RAGGED_K if self._slabs else RAGGED_N,
            starts=base + self._starts,
            ends=base + self._ends,
            cover=base + self._cover,
            fault=base + self._fault,
        )
        tiles = base + self._tiles if self._tile_capacity else 0
        scan.set_tiles(self._candidate.bm, tiles, base + self._tile_count, self._tile_capacity)
        self._scan_parameters[0] = scan.bytes

    def _bind_sizes(self, a: Arguments, base: int, sizes: int) -> None:
        """For the kernel that scans: where the sizes lie and how, and where a fault is noted."""
        view = a.group_sizes
        size, step = (8, 8) if view.device.kind == "cpu" else (view.dtype.itemsize, view.strides[-1] if view.shape[-1] > 1 else 8)
        values = {"sizes": sizes, "sizes_step": step // 4, "wide": int(size == 8), "offsets": int(a.ends), "fault": base + self._fault}
        for name, value in values.items():
            self._parameters[self._index[name]] = value

    def _bind_operands(self, a: Arguments, base: int) -> None:
        parameters, index, at = self._parameters, self._index, a.pointers
        if self._descriptors is not None:
            self._descriptors.point(a.config, {"lhs": at["lhs"] or base, "rhs": at["rhs"] or base, "out": at["out"]})
        parts = base + self._parts if a.workspace is None else a.workspace.pointer
        addresses = {**at, "out_pointer": at["out"], "parts": parts}
        addresses.update(starts=base + self._starts, ends=base + self._ends)
        if not self._slabs:
            addresses.update(tiles=base + self._tiles, tile_count=base + self._tile_count, cover=base + self._cover)
            parameters[index["zero_tail"]] = int(a.tail == "zero" and self._has_scan)
        for name, value in addresses.items():
            if name in index and not (self._descriptors is not None and name in ("lhs", "rhs", "out")):
                parameters[index[name]] = value
            if self._adder is not None and name in self._adder_index:
                self._adder_parameters[self._adder_index[name]] = value

    # ---- faults, words, life -----------------------------------------------------------------------------------------------

    def check(self) -> GroupFault | None:
        """Waits for the stream; the first fault since the last check, which is cleared."""
        runtime, found = self._runtime, None
        with runtime.use_device(self._device):
            runtime.synchronize_stream(self._stream)
            for address in [base + self._fault for base in self._scratch.addresses()]:
                raw = (ctypes.c_char * FAULT_BYTES)()
                runtime.memcpy_async(ctypes.addressof(raw), address, FAULT_BYTES, self._stream)
                runtime.synchronize_stream(self._stream)
                fault = fault_from_bytes(raw.raw)
                if fault is not None:
                    found = found or fault
                    runtime.memset_async(address, 0, FAULT_BYTES, self._stream)
        return found

    def explain(self) -> str:
        """The tile and the schedule, and what kept the copy engine's kernels away."""
        k = self._candidate
        what = "copy-engine kernels with warp specialisation" if k.kernel == "hopper" else "pointer kernels"
        text = (
            f"triton {what}: tiles {k.bm}x{k.bn}, k in steps of {k.bk}, {k.stages} stages, {k.warps} warps, {k.blocks} blocks an SM or CU"
        )
        if k.kernel == "hopper" and self._has_scan:
            text += ", sizes scanned by every block" if self._scanning else ", behind a scan of the sizes"
        if k.swap:
            text += ", operands swapped"
        if k.split > 1:
            text += f", k split in {k.split}"
        return text + (f"; no copy engine: {self._why}" if self._why else "")

    def in_graph(self) -> bool:
        """Whether captures hold scratch of their own."""
        return self._scratch.in_graph()

    def close(self) -> None:
        """Frees the scratch, in the stream's order."""
        if not self._closed:
            self._closed = True
            self._scratch.close()
            self._host.close()
