"""What people do without a grouped GEMM, as executables like those of backends. Each is right: it is checked like every backend.

- `padded_dot`: XLA's default lowering. Every group is multiplied with all M rows; rows of other groups are masked to zero and the
  group axis is contracted along with the inner one (or, in a weight gradient, becomes a batch): E times the work, and an operand of
  E times lhs's size.
- `padded_batch`: every group is padded to the size of the largest (the capacity), one batched product does them all, the rows are
  gathered before and scattered after. It has to know the largest size on the host.
- `loop`: one product per group, in a Python loop. It has to know all sizes on the host.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from hipgroupgemm.backends.base import Arguments, Executable
from hipgroupgemm.config import RaggedDotMode
from hipgroupgemm.measure.device_harness import cupy_stream
from hipgroupgemm.measure.verify import Verifier
from hipgroupgemm.operands.dtypes import compute_type_of
from hipgroupgemm.operands.views import ArrayView, Device, numpy_view

__all__ = ["BASELINES", "PADDED", "Baseline"]

PADDED = "padded_dot"
"""The baseline that speed-ups are measured against."""


class Baseline(Executable):
    """A function of a verifier's first problem, which has no batch axes, on arrays of NumPy or CuPy.

    Attributes:
        xp: the library. contracting: whether it is a weight gradient. sizes, host_sizes: (E,), on the device and on the host.
        lhs, rhs, out: (M, k), (E, k, n), (M, n); in a weight gradient (m, M), (M, n), (E, m, n).

    Raises:
        NotImplementedError: there is no CuPy for the device.
    """

    def __init__(self, function: Callable[[Baseline], None], verifier: Verifier) -> None:
        self._function, self._harness = function, verifier.harness
        self.xp = array_library(self._harness.device)
        self.contracting = verifier.config.ragged_mode is RaggedDotMode.CONTRACTING
        self.host_sizes = verifier.sets[0].sizes
        self.sizes = self._array(verifier.sizes)
        lhs, rhs, out = (self._array(self._harness.view(verifier.operands, name))[:, 0] for name in ("lhs", "rhs", "out"))
        self.lhs, self.rhs, self.out = (lhs[0], rhs[0], out) if self.contracting else (lhs[0], rhs, out[0])

    def _array(self, view: ArrayView) -> Any:
        if self.xp is np:
            return numpy_view(view.pointer, view.shape, view.strides, view.dtype)
        memory = self.xp.cuda.UnownedMemory(view.pointer, max(view.reach, 1), view.owner, view.device.index)
        return self.xp.ndarray(view.shape, view.dtype, self.xp.cuda.MemoryPointer(memory, 0), view.strides)

    def execute(self, arguments: Arguments) -> None:
        """Calls the function, on a device on the harness's stream."""
        if self.xp is np:
            return self._function(self)
        index = self._harness.device.index
        with self.xp.cuda.Device(index), cupy_stream(self.xp, arguments.stream, index):
            self._function(self)

    def explain(self) -> str:
        """Its name."""
        return self._function.__name__

    # ---- what the functions share ------------------------------------------------------------------------------------------

    def widen(self, array: Any) -> Any:
        """The array in a type that the library's own product is fast in: NumPy has no fast ones of 16 and 8 bits."""
        return array.astype(compute_type_of(array.dtype, array.dtype), copy=False) if self.xp is np else array

    def padded(self, array: Any, rows: Any, used: Any) -> Any:
        """`array[rows]`, a row for each of `used`, zeros where that is false; MemoryError where it takes more than is free."""
        nbytes, free = used.size * array.shape[1] * array.dtype.itemsize, self._harness.free_bytes()
        if nbytes > free:
            raise MemoryError(f"the padded operand takes {nbytes / 2**30:.1f} GiB, {free / 2**30:.1f} GiB are free")
        return self.xp.where(used[:, :, None], array[rows], array.dtype.type(0))

    def store(self, out: Any, a: Any, b: Any) -> None:
        """Writes a product of widened operands."""
        if a.dtype == out.dtype:
            self.xp.matmul(a, b, out=out)
        else:
            with np.errstate(all="ignore"):
                out[...] = self.xp.matmul(a, b).astype(out.dtype)


def array_library(device: Device) -> Any:
    """NumPy, or CuPy for a device that it serves; NotImplementedError else."""
    if device.kind == "cpu":
        return np
    try:
        import cupy

        served = "rocm" if cupy.cuda.runtime.is_hip else "cuda"
    except Exception as error:
        raise NotImplementedError(f"the baselines need CuPy on {device} ({error})") from None
    if served != device.kind:
        raise NotImplementedError(f"the baselines need CuPy on {device}, and CuPy here is for another kind of device")
    return cupy


def padded_dot(p: Baseline) -> None:
    """XLA's default lowering, see above."""
    xp, groups, lhs, rhs = p.xp, p.host_sizes.size, p.widen(p.lhs.T if p.contracting else p.lhs), p.widen(p.rhs)
    rows, inner = lhs.shape
    group_of_row = xp.searchsorted(xp.cumsum(p.sizes), xp.arange(rows), side="right")  # E for uncovered rows
    mask = group_of_row[:, None] == xp.arange(groups)
    expanded = p.padded(lhs, (slice(None), None), mask).reshape(rows, groups * inner)
    if p.contracting:
        p.store(p.out.reshape(groups * inner, -1), expanded.T, rhs)
    else:
        p.store(p.out, expanded, rhs.reshape(groups * inner, -1))


def padded_batch(p: Baseline) -> None:
    """A batched product of capacity max(sizes), see above."""
    xp, lhs, rhs = p.xp, p.widen(p.lhs.T if p.contracting else p.lhs), p.widen(p.rhs)
    slot, starts = xp.arange(int(p.host_sizes.max())), xp.cumsum(p.sizes) - p.sizes
    used = slot < p.sizes[:, None]
    row = xp.minimum(starts[:, None] + slot, lhs.shape[0] - 1)
    lhs = p.padded(lhs, row, used)
    if p.contracting:
        p.store(p.out, lhs.transpose(0, 2, 1), p.padded(rhs, row, used))
        return
    product = xp.matmul(lhs, rhs)
    p.out[...] = 0
    p.out[row[used]] = product[used].astype(p.out.dtype, copy=False)


def loop(p: Baseline) -> None:
    """One product per group, see above."""
    end = 0
    for group, size in enumerate(p.host_sizes.tolist()):
        rows, end = slice(end, end + size), end + size
        if p.contracting and size:
            p.store(p.out[group], p.widen(p.lhs[:, rows]), p.widen(p.rhs[rows]))
        elif p.contracting:
            p.out[group] = 0
        elif size:
            p.store(p.out[rows], p.widen(p.lhs[rows]), p.widen(p.rhs[group]))
    if not p.contracting:
        p.out[end:] = 0


BASELINES: dict[str, tuple[str, Callable[[Baseline], None]]] = {
    PADDED: ("all rows, masked", padded_dot),
    "padded_batch": ("capacity max(sizes)", padded_batch),
    "loop": ("a product per group", loop),
}
"""Name to (what it does, the function)."""
