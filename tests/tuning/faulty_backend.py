"""A backend for tests of tuning whose algorithms are right on most calls and wrong where a user would meet it: they change their inputs,
remember what they have read, or heed only a part of a call. It computes on host memory, also where that stands for a GPU's.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import numpy as np
from fake_backend import FakeBackend, _Executable

from hipgroupgemm.backends.base import Arguments, Device, Executable, MatmulAlgorithm
from hipgroupgemm.backends.reference import numpy_view, run_config
from hipgroupgemm.config import GroupedGemmConfig, RaggedDotMode
from hipgroupgemm.measure.layouts import layouts_of
from hipgroupgemm.operands.views import ArrayView
from hipgroupgemm.problem.groups import GroupFault, scan

CHANGES = ("zeroes_lhs", "bumps_lhs", "spoils_lhs", "spoils_rhs", "zeroes_sizes", "writes_around")
"""They change their inputs, before or after they compute."""
WRONG = (
    *CHANGES,
    "mixes_groups",
    "remembers_lhs",
    "remembers_rhs",
    "remembers_sizes",
    "ignores_tail",
    "ignores_ends",
    "takes_int32",
    "ignores_strides",
    "wants_nan",
    "wants_numbers",
)


class _Sly(_Executable):
    def __init__(self, backend: FakeBackend, config: GroupedGemmConfig, name: str) -> None:
        super().__init__(backend, config, name)
        self.memory: dict[int, Any] = {}
        self.fault: GroupFault | None = None

    def elements(self, arguments: Arguments, name: str) -> np.ndarray[Any, Any]:
        layout = layouts_of(arguments.config)[name]
        return numpy_view(arguments.pointers[name], layout.shape, layout.byte_strides, layout.dtype)

    def execute(self, arguments: Arguments) -> None:
        offset = arguments.group_offset
        if isinstance(offset, ArrayView):
            on_device = int(numpy_view(offset.pointer, offset.shape, offset.strides, offset.dtype)[0])
            arguments = dataclasses.replace(arguments, group_offset=0 if self.name == "ignores_device_offset" else on_device)
        super().execute(arguments)
        if arguments.config.ragged_mode is not RaggedDotMode.BATCH:
            self.fault = scan(self.sizes(arguments), arguments.config.ragged_extent).fault

    def check(self) -> GroupFault | None:
        fault, self.fault = self.fault, None
        return None if self.name == "hides_faults" else fault

    def rows_of(self, arguments: Arguments) -> list[slice]:
        bounds = scan(self.sizes(arguments), arguments.config.ragged_extent)
        return [slice(int(a), int(b)) for a, b in zip(bounds.starts, bounds.ends, strict=True)]

    # ---- inputs that change --------------------------------------------------------------------------------------------------

    def run_zeroes_lhs(self, arguments: Arguments, _: str) -> None:
        self.elements(arguments, "lhs")[...] = 0
        run_config(arguments.config, arguments)

    def run_bumps_lhs(self, arguments: Arguments, _: str) -> None:
        self.elements(arguments, "lhs")[0, 0, 0, 0] = 3
        run_config(arguments.config, arguments)

    def run_spoils_lhs(self, arguments: Arguments, _: str) -> None:
        run_config(arguments.config, arguments)
        self.elements(arguments, "lhs")[0, 0, 0] = np.nan

    def run_spoils_rhs(self, arguments: Arguments, _: str) -> None:
        run_config(arguments.config, arguments)
        self.elements(arguments, "rhs")[0, 0, -1, -1] = np.nan

    def run_spoils_c(self, arguments: Arguments, _: str) -> None:
        run_config(arguments.config, arguments)
        if arguments.pointers["c"] != arguments.pointers["out"]:
            self.elements(arguments, "c")[0, 0, -1, -1] += 1

    def run_spoils_bias(self, arguments: Arguments, _: str) -> None:
        run_config(arguments.config, arguments)
        self.elements(arguments, "bias")[-1, 0, 0, -1] += 1

    def run_zeroes_sizes(self, arguments: Arguments, _: str) -> None:
        run_config(arguments.config, arguments)
        view = arguments.group_sizes
        numpy_view(view.pointer, view.shape, view.strides, view.dtype)[...] = 0

    def run_writes_around(self, arguments: Arguments, _: str) -> None:
        """Writes the four bytes behind rhs."""
        run_config(arguments.config, arguments)
        layout = layouts_of(arguments.config)["rhs"]
        numpy_view(arguments.pointers["rhs"] + layout.reach, (4,), (1,), np.dtype(np.uint8))[...] = 1

    def run_spoils_late(self, arguments: Arguments, count: str) -> None:
        """Leaves its inputs alone until it has run so many times."""
        run_config(arguments.config, arguments)
        if self.state["runs"] > int(count):
            self.elements(arguments, "lhs")[...] = np.nan

    def run_spoils_and_raises(self, arguments: Arguments, _: str) -> None:
        self.elements(arguments, "lhs")[...] = np.nan
        self.elements(arguments, "rhs")[...] = np.nan
        raise RuntimeError("it did not work")

    # ---- what other groups hold ----------------------------------------------------------------------------------------------

    def run_mixes_groups(self, arguments: Arguments, _: str) -> None:
        """Adds the weights of the other groups that have rows, or their rows, times zero."""
        run_config(arguments.config, arguments)
        lhs, rhs, out, rows = self.elements(arguments, "lhs"), self.elements(arguments, "rhs"), self.out(arguments), self.rows_of(arguments)
        forward = arguments.config.ragged_mode is RaggedDotMode.NON_CONTRACTING
        chosen = rows[arguments.host_group_offset() :][: arguments.config.group_count]
        for g, mine in enumerate(chosen):
            for h, its in enumerate(chosen):
                if g == h or mine.start >= mine.stop or its.start >= its.stop:
                    continue
                if forward:
                    out[0, 0, mine] += (0 * rhs[h, 0].astype(np.float32).sum(0)).astype(out.dtype)
                else:
                    out[g, 0] += (0 * lhs[0, 0][:, its].astype(np.float32).sum(1)[:, None]).astype(out.dtype)

    # ---- what is remembered --------------------------------------------------------------------------------------------------

    def run_remembers_lhs(self, arguments: Arguments, _: str) -> None:
        held = self.memory.setdefault(arguments.pointers["lhs"], self.copy(arguments, "lhs"))
        run_config(arguments.config, dataclasses.replace(arguments, pointers={**arguments.pointers, "lhs": held.ctypes.data}))

    def run_remembers_rhs(self, arguments: Arguments, _: str) -> None:
        held = self.memory.setdefault(arguments.pointers["rhs"], self.copy(arguments, "rhs"))
        run_config(arguments.config, dataclasses.replace(arguments, pointers={**arguments.pointers, "rhs": held.ctypes.data}))

    def copy(self, arguments: Arguments, name: str) -> np.ndarray[Any, Any]:
        """All bytes of an operand, so that they can be used with its strides."""
        reach = layouts_of(arguments.config)[name].reach
        return numpy_view(arguments.pointers[name], (reach,), (1,), np.dtype(np.uint8)).copy()

    def run_remembers_sizes(self, arguments: Arguments, _: str) -> None:
        view = arguments.group_sizes
        sizes = numpy_view(view.pointer, view.shape, view.strides, view.dtype).copy()
        held = self.memory.setdefault(view.pointer, (sizes, arguments.ends))
        again = dataclasses.replace(view, pointer=held[0].ctypes.data, strides=held[0].strides, dtype=held[0].dtype)
        run_config(arguments.config, dataclasses.replace(arguments, group_sizes=again, ends=held[1]))

    # ---- what of a call is not heeded ----------------------------------------------------------------------------------------

    def run_wants_extent(self, arguments: Arguments, extent: str) -> None:
        """Right where the ragged extent is that number alone."""
        run_config(arguments.config, arguments)
        if arguments.config.ragged_extent != int(extent):
            self.out(arguments)[...] = 7

    def run_ignores_tail(self, arguments: Arguments, _: str) -> None:
        run_config(arguments.config, dataclasses.replace(arguments, tail="zero"))

    def run_ignores_ends(self, arguments: Arguments, _: str) -> None:
        run_config(arguments.config, dataclasses.replace(arguments, ends=False))

    def run_takes_int32(self, arguments: Arguments, _: str) -> None:
        """Reads 4 bytes a size, one after the other."""
        view = arguments.group_sizes
        narrow = dataclasses.replace(view, dtype=np.dtype(np.int32), strides=tuple(s * 4 // view.dtype.itemsize for s in view.strides))
        run_config(arguments.config, dataclasses.replace(arguments, group_sizes=narrow))

    def run_ignores_strides(self, arguments: Arguments, _: str) -> None:
        view = arguments.group_sizes
        packed = tuple(view.dtype.itemsize * math.prod(view.shape[i + 1 :]) for i in range(len(view.shape)))
        run_config(arguments.config, dataclasses.replace(arguments, group_sizes=dataclasses.replace(view, strides=packed)))

    def run_wants_nan(self, arguments: Arguments, _: str) -> None:
        """Right on an out that holds NaN."""
        fresh = np.isnan(self.out(arguments).astype(np.float64)).any()
        run_config(arguments.config, arguments)
        if not fresh:
            self.out(arguments)[...] = 77

    def run_wants_numbers(self, arguments: Arguments, _: str) -> None:
        """Right on an out that holds none: it adds its own times zero."""
        before = 0 * self.out(arguments).astype(np.float32)
        run_config(arguments.config, arguments)
        with np.errstate(all="ignore"):
            self.out(arguments)[...] += before.astype(self.out(arguments).dtype)

    def run_ignores_device_offset(self, arguments: Arguments, _: str) -> None:
        run_config(arguments.config, arguments)

    def run_hides_faults(self, arguments: Arguments, _: str) -> None:
        run_config(arguments.config, arguments)

    def run_trusts_sizes(self, arguments: Arguments, _: str) -> None:
        """Takes a negative size for what it is: the groups behind it begin too early."""
        view = arguments.group_sizes
        sizes = numpy_view(view.pointer, view.shape, view.strides, view.dtype)
        ends = np.asarray(sizes if arguments.ends else np.cumsum(sizes, axis=-1), np.int64).copy()
        moved = dataclasses.replace(view, pointer=ends.ctypes.data, strides=ends.strides, dtype=ends.dtype)
        run_config(arguments.config, dataclasses.replace(arguments, group_sizes=moved, ends=True))


class FaultyBackend(FakeBackend):
    """`FakeBackend` with these algorithms as well; it serves GPUs that are none, too."""

    def can_handle(self, config: GroupedGemmConfig, device: Device) -> str | None:
        return None

    def prepare(self, config: GroupedGemmConfig, device: Device, algorithm: MatmulAlgorithm, stream: int) -> Executable:
        made = _Sly(self, config, algorithm.name)
        self.executables.append(made)
        return made
