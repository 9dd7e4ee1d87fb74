"""A prepared algorithm on one stream: its scratch, its launches, and the parameters that a call changes in them."""

from __future__ import annotations

import ctypes
import dataclasses
import functools
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from hipgroupgemm.backends.base import Arguments, Executable, Recipe
from hipgroupgemm.backends.device_kernels import THREADS, scan_blocks
from hipgroupgemm.backends.list_tables import ListTables
from hipgroupgemm.backends.scan_arguments import FAULT_BYTES, SIZE, ScanArguments, fault_from_bytes
from hipgroupgemm.backends.triton.compiler import KernelSpec, compile_kernel
from hipgroupgemm.backends.triton.descriptors import Descriptors
from hipgroupgemm.backends.triton.kernel_config import DeviceProperties, KernelConfig
from hipgroupgemm.backends.triton.kernels.scan import SPECIAL, scan_function, scan_is_loaded
from hipgroupgemm.backends.triton.specs import add_partials_spec, operands_of, room_for_groups, spec_of
from hipgroupgemm.config import GroupedGemmConfig, RaggedDotMode
from hipgroupgemm.operands.views import ArrayView, Device, numpy_view, packed_strides
from hipgroupgemm.problem.groups import GroupFault
from hipgroupgemm.runtime.base import Runtime
from hipgroupgemm.runtime.cuda.tensor_map import TensorMapEncoder
from hipgroupgemm.runtime.forks import new_lock
from hipgroupgemm.runtime.objects import Module, PreparedLaunch
from hipgroupgemm.runtime.parameters import Blob, KernelParameters
from hipgroupgemm.runtime.pinned import PinnedRing
from hipgroupgemm.runtime.replay import Move, Replay, make_replay
from hipgroupgemm.runtime.scratch import Scratch, pack_sections

__all__ = ["TritonExecutable"]

_modules: dict[tuple[str, int, KernelSpec], Module] = {}
_modules_lock = new_lock()
_NOWHERE = 1 << 40  # an address that stands for one that is not known yet


def _module_of(runtime: Runtime, device: int, spec: KernelSpec, code: bytes) -> Module:
    """A kernel's code, loaded once per device; it stays loaded as long as the process lives."""
    key = (runtime.kind, device, spec)
    with _modules_lock:
        found = _modules.get(key)
        if found is None:
            with runtime.relaxed_capture():
                found = _modules[key] = runtime.load_module(code, device)
        return found


class _Place(NamedTuple):
    """Where an operand's address goes: the host address of a pointer's 8 bytes, or of a tensor map and what encodes that."""

    role: str
    address: int
    encoder: TensorMapEncoder | None

    def write(self, address: int) -> None:
        """Writes the operand's address there."""
        if self.encoder is None:
            ctypes.c_uint64.from_address(self.address).value = address
        else:
            self.encoder.replace_address(self.address, address)


class _Kernel:
    """A kernel on one stream, ready to be launched, and its parameters."""

    def __init__(
        self, runtime: Runtime, device: int, stream: int, spec: KernelSpec, config: GroupedGemmConfig | None = None, **options: Any
    ) -> None:
        compiled = compile_kernel(spec)
        self.parameters = KernelParameters(compiled.kinds, compiled.names)
        function = _module_of(runtime, device, spec, compiled.code).get_function(compiled.name, compiled.shared)
        block = (compiled.threads, 1, 1)
        self.launch = runtime.prepare_launch(function, (1, 1, 1), block, compiled.shared, stream, self.parameters, **options)
        self.descriptors = Descriptors(runtime, compiled, self.parameters, config) if config is not None else None
        self._places = {name: place for place, name in enumerate(compiled.names)}
        self.cells = {
            name: self.parameters.blob_address(place)
            for (name, place), kind in zip(self._places.items(), compiled.kinds, strict=True)
            if isinstance(kind, str) and kind.startswith("*")
        }
        """By name of a pointer: where it lies."""

    def set(self, values: Mapping[str, Any]) -> None:
        """Sets those of the parameters that the kernel has."""
        for name, value in values.items():
            place = self._places.get(name)
            if place is not None:
                self.parameters[place] = value


class TritonExecutable(Executable):
    """Scans the sizes in one launch and multiplies in the next, or does both in one, where the kernel can and may."""

    def __init__(
        self, runtime: Runtime, device: Device, key: GroupedGemmConfig, kernel: KernelConfig, properties: DeviceProperties, stream: int,
        why: str | None,
    ) -> None:  # fmt: skip
        self._runtime, self._device, self._stream = runtime, device.index, stream
        self._key, self._kernel, self._properties, self._why = key, kernel, properties, why
        self._contracting = key.ragged_mode is RaggedDotMode.CONTRACTING
        self._has_scan = key.ragged_mode is not RaggedDotMode.BATCH
        self._scans = key.batch_count if key.sizes_per_batch else 1
        self._can_scan = room_for_groups(kernel, key, properties) > 0
        self._tile_capacity = 0
        if key.ragged_mode is RaggedDotMode.NON_CONTRACTING:
            self._tile_capacity = self._scans * (key.ragged_extent // kernel.tile_m + key.group_count)
        bounds = 8 * self._scans * key.group_count if self._has_scan else 0
        sections = {"fault": FAULT_BYTES, "covered_range": 16 * self._scans, "group_starts": bounds, "group_ends": bounds, "tile_count": 4}
        sections.update(tiles=16 * self._tile_capacity, sizes=8 * self._scans * key.group_total, partials=kernel.split_k_bytes(key))
        tables = ListTables(runtime, self._device, stream, key, maps=kernel.kernel == "tma")
        sections["tables"] = tables.nbytes
        offsets, nbytes = pack_sections(list(sections.values()))
        self._offsets = dict(zip(sections, offsets, strict=True))
        self._tables = tables
        self._scratch = Scratch(runtime, self._device, stream, nbytes)
        self._ring = PinnedRing(runtime, self._device, max(sections["sizes"], FAULT_BYTES))
        self._products: dict[bool, _Kernel] = {}
        self._scan_launches: dict[tuple[str, bool] | None, PreparedLaunch] = {}
        self._scan_arguments, self._scan_parameters = ScanArguments(), KernelParameters([Blob(SIZE, 8)])
        # the one call that is remembered: all parameters are those of this config and layout, but for the addresses that changed
        self._config: GroupedGemmConfig | None = None
        self._call: tuple[Any, ...] = ()
        self._sizes = 0
        self._addresses: dict[str, int] = {}
        self._places: list[_Place] = []
        self._kernels: list[_Kernel] = []
        self._launches: list[PreparedLaunch] = []
        self._bound: Arguments | None = None  # of a plain call with sizes on the device; nothing but its addresses changes
        self._replay: Replay | None = None
        self._addresses_of: Callable[[Mapping[str, int]], tuple[int, ...]] = operator.itemgetter("group_sizes", "out")
        with runtime.use_device(self._device):
            self._prepare()

    # ---- preparation -------------------------------------------------------------------------------------------------------

    def _prepare(self) -> None:
        runtime, key = self._runtime, self._key
        loaded = (runtime.kind, self._device, spec_of(self._kernel, key, self._properties)) in _modules
        if not loaded and runtime.capture_id(self._stream):
            raise RuntimeError(
                f"stream {self._stream:#x} is under graph capture, and nothing was prepared for it; call plan.prepare(stream), or run once "
                "on any stream of this device, before the capture"
            )
        if self._has_scan:
            self._scan_of(None)
            if self._scans == 1 and not self._can_scan:
                self._scan_of(("int32", False))
        self._adders = []
        if self._kernel.split > 1:
            self._adders.append(_Kernel(runtime, self._device, self._stream, add_partials_spec(self._kernel, key, self._properties)))
        self._product_of(self._can_scan)

    def prepare(self) -> None:
        """Allocates what plain calls need; a capture makes its own."""
        self._scratch.reserve()

    def _product_of(self, scanning: bool) -> _Kernel:
        """The kernel that scans by itself, or the one behind a scan; a call that needs the other one has it made then."""
        found = self._products.get(scanning)
        if found is None:
            spec = spec_of(self._kernel, self._key, self._properties, scanning=scanning)
            hopper = self._kernel.kernel == "tma"
            early = (
                hopper and self._has_scan and not scanning and not self._properties.limited
            )  # beside the scan there would be more blocks
            options = {"programmatic": True} if early else {}
            config = self._key if hopper else None
            found = self._products[scanning] = _Kernel(self._runtime, self._device, self._stream, spec, config, **options)
        return found

    def _scan_of(self, special: tuple[str, bool] | None) -> PreparedLaunch:
        found = self._scan_launches.get(special)
        if found is None:
            blocks = scan_blocks(self._scans * self._key.group_total, self._tile_capacity)
            if self._properties.limited:
                blocks = min(blocks, self._properties.multiprocessors)
            function = scan_function(self._runtime, self._device, special)
            found = self._runtime.prepare_launch(function, (blocks, 1, 1), (THREADS, 1, 1), 0, self._stream, self._scan_parameters)
            self._scan_launches[special] = found
        return found

    # ---- a call ------------------------------------------------------------------------------------------------------------

    def execute(self, arguments: Arguments) -> None:
        """Launches the scan and the product on the stream. With the config and layout of the call before, only addresses are written."""
        a, runtime = arguments, self._runtime
        replay = self._replay
        if a is self._bound and (not a.lists or a.lists == self._tables.held):
            if replay is None:
                replay = self._replay = self._make_replay(a)
            if replay is not None and replay.run(self._addresses_of(a.pointers)):
                return
        self._replay = self._bound = None  # it does not learn what is written here
        with runtime.use_device(self._device):
            capture = runtime.capture_id(self._stream)
            base = self._scratch.pointer(capture)
            view, offset, workspace = a.group_sizes, a.group_offset, a.workspace
            sizes = a.pointers["group_sizes"]
            on_host = self._has_scan and view.device.kind == "cpu"
            if on_host:  # they become int64, for which the scan has a kernel of its own; validated already, so nothing is cut
                values = numpy_view(sizes, view.shape, view.strides, view.dtype).astype(np.int64)
                sizes = base + self._offsets["sizes"]
                self._ring.put(values, sizes, self._stream)
            partials = base + self._offsets["partials"] if workspace is None else workspace.pointer
            at = offset if isinstance(offset, int) else (offset.pointer, offset.dtype)
            if a.lists:
                self._tables.write(a.lists, base + self._offsets["tables"], capture, functools.partial(self._write_maps, a.config))
            call = base, partials, on_host, sizes & 3, view.strides, view.dtype, a.ends, a.tail, at
            if a.config is not self._config or call != self._call:
                self._bind(a, call, sizes, capture)
            else:
                if sizes != self._sizes:
                    self._move_sizes(a, base, sizes)
                known, addresses = self._addresses, {role: a.pointers.get(role) or base for role in self._addresses}
                for place in self._places:
                    role = place.role
                    if addresses[role] != known[role] or replay is not None:
                        self._addresses = {**self._addresses, role: -1}  # until all is written
                        place.write(addresses[role])
                self._addresses = addresses
            if not capture and not on_host:
                self._bound = a
            for launch in self._launches:
                launch.run()

    def _make_replay(self, a: Arguments) -> Replay | None:
        """The launches of the bound call, made from C with other addresses."""
        held = {"group_sizes": self._sizes, **{role: address for role, address in self._addresses.items() if a.pointers.get(role)}}
        slots = {role: slot for slot, role in enumerate(held)}
        moves = [Move(at.address, slots[at.role], at.encoder is not None) for at in self._places if at.role in slots]
        if self._has_scan:
            cell = self._products[True].cells["sizes"] if self._scans_itself else self._scan_parameters.blob_address(0)
            moves.append(Move(cell, slots["group_sizes"]))
        self._addresses_of = operator.itemgetter(*held)
        return make_replay(self._runtime, self._device, self._stream, moves, list(held.values()), self._launches)

    def _bind(self, a: Arguments, call: tuple[Any, ...], sizes: int, capture: int) -> None:
        """Brings all parameters up to date."""
        self._config = None
        c, k, base, partials = a.config, self._kernel, call[0], call[1]
        # sizes are looked at even where nothing is multiplied or written
        multiplies = 0 not in (c.m, c.n, c.batch_count, c.group_count if self._contracting else 1)
        self._scans_itself = self._can_scan and multiplies and self._can_read(a, sizes)
        self._launches, self._kernels, self._places = [], [], []
        if self._has_scan and not self._scans_itself:
            scan = self._scan_of(self._special(a, capture))
            self._launches.append(scan)
        if multiplies:
            product = self._product_of(self._scans_itself)
            kernels = self._kernels = [product, *self._adders]
            view, on_host = a.group_sizes, call[2]
            size = 8 if on_host else view.dtype.itemsize
            step = view.strides[-1] if not on_host and view.shape[-1] > 1 else size
            values: dict[str, Any] = {name: base + offset for name, offset in self._offsets.items()}
            values.update(partials=partials, sizes=sizes, sizes_step=step // 4, sizes_are_wide=int(size == 8), sizes_are_ends=int(a.ends))
            values.update(M=c.m, N=c.n, K=c.k if c.alpha or self._contracting else 0, groups=c.group_count, batches=c.batch_count)
            values.update(scans=self._scans, swizzle=k.swizzle, active=int(c.alpha != 0), alpha=c.alpha, beta=c.beta)
            values["zero_uncovered"] = int(a.tail == "zero" and self._has_scan)
            operands = operands_of(c)
            for operand in operands.values():
                values.update(operand.strides)
            row_tiles = -(-c.m // k.tile_m)
            tiles = c.batch_count * -(-c.n // k.tile_n)
            tiles *= c.group_count * row_tiles * k.split if self._contracting else row_tiles + self._has_scan * c.group_count
            for kernel, blocks in zip(kernels, (k.blocks, 8), strict=False):
                kernel.set(values)
                most = self._properties.multiprocessors * self._properties.resident(blocks)
                kernel.launch.set_grid((max(1, min(most, tiles)), 1, 1))
                self._launches.append(kernel.launch)
            self._point(kernels, {role: a.pointers.get(role) or base for role in operands}, a.config, base + self._offsets["tables"])
        self._sizes = -1
        self._move_sizes(a, base, sizes)
        self._config, self._call = c, call

    def _write_maps(self, config: GroupedGemmConfig, addresses: Sequence[int], into: int) -> None:
        """Tensor maps of a list's arrays."""
        described = next(iter(self._products.values())).descriptors
        if described is not None:
            described.write_maps(config, self._tables.maps.removesuffix("_maps"), addresses, into)

    def _point(self, kernels: list[_Kernel], addresses: dict[str, int], config: GroupedGemmConfig, tables: int) -> None:
        """Writes the operands' addresses, and notes what has to be written when one changes; of lists their tables' addresses."""
        described = kernels[0].descriptors
        if described is not None:
            described.describe(config, addresses)
        for name, offset in self._tables.offsets.items():
            for cell in [kernel.cells[n] for kernel in kernels for n in (name, f"{name}_pointer") if n in kernel.cells]:
                _Place(name, cell, None).write(tables + offset)
        self._places = []
        addresses = {role: address for role, address in addresses.items() if role not in self._tables.offsets}
        for role, address in addresses.items():
            names = (role, f"{role}_pointer")
            places = [_Place(role, kernel.cells[name], None) for kernel in kernels for name in names if name in kernel.cells]
            for place in places:
                place.write(address)
            if described is not None and role in described.maps:
                places.append(_Place(role, described.maps[role], described.encoders[role]))
            self._places += places
        self._addresses = addresses

    def _can_read(self, a: Arguments, sizes: int) -> bool:
        """Whether the multiplying kernel can read the sizes as they lie."""
        view = a.group_sizes
        if not isinstance(a.group_offset, int) or a.group_offset:
            return False
        if view.device.kind == "cpu":
            return True
        return view.dtype.name in ("int32", "int64") and sizes % 4 == 0 and view.strides[-1] % 4 == 0

    def _special(self, a: Arguments, capture: int) -> tuple[str, bool] | None:
        """Which scan kernel: one for this type of sizes, or None for any. A capture has none compiled."""
        special = ("int64" if a.group_sizes.device.kind == "cpu" else a.group_sizes.dtype.name, a.ends)
        if self._scans > 1 or special not in SPECIAL or (capture and not scan_is_loaded(self._runtime, self._device, special)):
            return None
        return special

    def _move_sizes(self, a: Arguments, base: int, sizes: int) -> None:
        """Points the kernel that scans at the sizes."""
        if self._scans_itself:
            _Place("group_sizes", self._products[True].cells["sizes"], None).write(sizes)
        elif self._has_scan:
            self._set_scan(a, base, sizes)
        self._sizes = sizes

    def _set_scan(self, a: Arguments, base: int, sizes: int) -> None:
        at, view = self._offsets, a.group_sizes
        if view.device.kind == "cpu":  # as `execute` has copied them
            packed = packed_strides(view.shape, 8)
            a = dataclasses.replace(a, group_sizes=ArrayView(0, view.shape, packed, np.dtype(np.int64), view.device, view.framework))
        results = {name.removeprefix("group_"): base + at[name] for name in ("group_starts", "group_ends", "covered_range", "fault")}
        self._scan_arguments.set_scan(a.config, a, sizes, **results)
        tiles = base + at["tiles"] if self._tile_capacity else 0
        self._scan_arguments.set_tiles(self._kernel.tile_m, tiles, base + at["tile_count"], self._tile_capacity)
        self._scan_parameters[0] = self._scan_arguments.bytes

    # ---- the launches for somebody else ------------------------------------------------------------------------------------

    def recipe(self, arguments: Arguments, slots: Sequence[str], fault: int) -> Recipe | None:
        """The launches of a call with sizes on the device; see :meth:`.Executable.recipe`."""
        if self._tables.offsets:
            return None  # the tables of lists are written from here
        slot = {name: place for place, name in enumerate(slots)}
        pointers = {name: _NOWHERE + (place << 32) for name, place in slot.items()}
        base = pointers["scratch"]
        a = dataclasses.replace(arguments, pointers=pointers)
        at: Any = a.group_offset
        if isinstance(a.group_offset, ArrayView):
            a.group_offset = dataclasses.replace(a.group_offset, pointer=pointers["group_offset"])
            at = a.group_offset.pointer, a.group_offset.dtype
        call = base, base + self._offsets["partials"], False, 0, a.group_sizes.strides, a.group_sizes.dtype, a.ends, a.tail, at
        with self._runtime.use_device(self._device):
            self._bind(a, call, pointers["group_sizes"], 0)
        moves = [Move(place.address, slot.get(place.role, slot["scratch"]), place.encoder is not None) for place in self._places]
        cells = [cell for kernel in self._kernels for cell in kernel.cells.items()]
        if self._has_scan and not self._scans_itself:
            blob = self._scan_parameters.blob_address(0)
            absent = {"tiles"} if not self._tile_capacity else set()
            absent |= {"group_offset"} if isinstance(a.group_offset, int) else set()
            cells += [(name, blob + at) for name, at in ScanArguments.CELLS.items() if name not in absent]
        for name, cell in cells:
            if name == "fault":
                ctypes.c_uint64.from_address(cell).value = fault
            elif name == "sizes":
                moves.append(Move(cell, slot["group_sizes"]))
            elif name == "group_offset":
                moves.append(Move(cell, slot[name]))
            elif name in self._offsets:
                moves.append(Move(cell, slot["scratch"], offset=self._offsets[name]))
        return Recipe(tuple(self._launches), tuple(moves), self._scratch.nbytes)

    # ---- faults, words, life -----------------------------------------------------------------------------------------------

    def check(self) -> GroupFault | None:
        """Waits for the stream; the first fault since the last check, which is cleared."""
        runtime, found = self._runtime, None
        with runtime.use_device(self._device):
            runtime.synchronize_stream(self._stream)
            for base in self._scratch.addresses():
                fault = fault_from_bytes(self._ring.read(base + self._offsets["fault"], FAULT_BYTES, self._stream))
                if fault is not None:
                    found = found or fault
                    runtime.memset_async(base + self._offsets["fault"], 0, FAULT_BYTES, self._stream)
        return found

    def explain(self) -> str:
        """The tile and the schedule, and what kept the sm_90 kernels away."""
        k = self._kernel
        what = "sm_90 kernels with copy engine and warp specialisation" if k.kernel == "tma" else "portable kernels"
        text = (
            f"triton {what}: tiles {k.tile_m}x{k.tile_n}, k in steps of {k.tile_k}, {k.stages} stages, {k.warps} warps, {k.blocks} blocks "
            f"per SM or CU, {k.swizzle} row tiles side by side"
        )
        if self._properties.limited:
            text += f", on {self._properties.multiprocessors} SMs or CUs at the most, one block each"
        if k.kernel == "tma" and self._has_scan:
            text += ", sizes scanned by every block" if self._can_scan else ", behind a scan of the sizes"
        if k.swap:
            text += ", operands swapped"
        if k.split > 1:
            text += f", k split in {k.split}"
        return text + (f"; no sm_90 kernels: {self._why}" if self._why else "")

    def in_graph(self) -> bool:
        """Whether captures hold scratch of their own."""
        return self._scratch.in_graph()

    def close(self) -> None:
        """Frees the scratch, in the stream's order."""
        self._config = None
        self._scratch.close()
        self._ring.close()
        self._tables.close()
