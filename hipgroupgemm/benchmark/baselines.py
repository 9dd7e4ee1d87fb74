"""What people do without a grouped GEMM, as executables like those of backends. Each is right: it is checked like every backend.

- `padded_dot`: XLA's default lowering. Every group is multiplied with all M rows; rows of other groups are masked to zero and the
  group axis is contracted along with the inner one (or, in a weight gradient, becomes a batch): E times the work, and an operand of
  E times lhs's size.
- `padded_batch`: every group is padded to the size of the largest (the capacity), one batched product does them all, the rows are
  gathered before and scattered after. It has to know the largest size on the host.
- `loop`: one product per group, in a Python loop. It has to know all sizes on the host.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np

from hipgroupgemm.backends.base import Arguments, Executable
from hipgroupgemm.config import GroupedGemmConfig, RaggedDotMode
from hipgroupgemm.measure.base import Harness
from hipgroupgemm.measure.layouts import layouts_of
from hipgroupgemm.operands.dtypes import compute_type_of
from hipgroupgemm.operands.views import ArrayView, Device, numpy_view

__all__ = ["BASELINES", "PADDED", "Baseline", "Problem", "array_of"]

PADDED = "padded_dot"
"""The baseline that speed-ups are measured against."""


def array_of(view: ArrayView, xp: Any) -> Any:
    """A view as an array of NumPy, or of CuPy on a device."""
    if xp is np:
        return numpy_view(view.pointer, view.shape, view.strides, view.dtype)
    memory = xp.cuda.UnownedMemory(view.pointer, max(view.reach, 1), view.owner, view.device.index)
    return xp.ndarray(view.shape, view.dtype, xp.cuda.MemoryPointer(memory, 0), view.strides)


def array_library(device: Device) -> Any:
    """NumPy, or CuPy for a device that it serves; NotImplementedError else."""
    if device.kind == "cpu":
        return np
    try:
        import cupy

        if ("rocm" if cupy.cuda.runtime.is_hip else "cuda") == device.kind:
            return cupy
    except Exception as error:
        raise NotImplementedError(f"the baselines need CuPy on {device} ({error})") from None
    raise NotImplementedError(f"the baselines need CuPy on {device}, and CuPy here is for another kind of device")


@dataclasses.dataclass
class Problem:
    """One problem as arrays of a library: products of `lhs` and `rhs` go to `out`.

    Attributes:
        xp: the library. contracting: whether it is a weight gradient. sizes: (E,), there and on the host.
        lhs, rhs, out: (M, k), (E, k, n), (M, n); in a weight gradient (m, M), (M, n), (E, m, n).
        free_bytes: that can still be allocated.
    """

    xp: Any
    contracting: bool
    lhs: Any
    rhs: Any
    out: Any
    sizes: Any
    host_sizes: np.ndarray[Any, Any]
    free_bytes: Callable[[], int]

    def widen(self, array: Any) -> Any:
        """The array in a type that the library's own product is fast in: NumPy has no fast ones of 16 and 8 bits."""
        return array.astype(compute_type_of(array.dtype, array.dtype), copy=False) if self.xp is np else array

    def require(self, nbytes: int, what: str) -> None:
        """MemoryError where so many bytes are not free."""
        if nbytes > self.free_bytes():
            raise MemoryError(f"{what} takes {nbytes / 2**30:.1f} GiB, {self.free_bytes() / 2**30:.1f} GiB are free")

    def store(self, out: Any, a: Any, b: Any) -> None:
        """Writes a product of widened operands."""
        if a.dtype == out.dtype:
            self.xp.matmul(a, b, out=out)
        else:
            with np.errstate(all="ignore"):
                out[...] = self.xp.matmul(a, b).astype(out.dtype)


def padded_dot(p: Problem) -> None:
    """XLA's default lowering, see above."""
    xp, groups = p.xp, p.host_sizes.size
    lhs = p.widen(p.lhs.T if p.contracting else p.lhs)
    rows, inner = lhs.shape
    p.require(groups * rows * inner * lhs.dtype.itemsize, "the masked operand")
    group_of_row = xp.searchsorted(xp.cumsum(p.sizes), xp.arange(rows), side="right")  # E for uncovered rows
    mask = group_of_row[:, None] == xp.arange(groups)
    expanded = xp.where(mask[:, :, None], lhs[:, None, :], lhs.dtype.type(0)).reshape(rows, groups * inner)
    if p.contracting:
        p.store(p.out.reshape(groups * inner, -1), expanded.T, p.widen(p.rhs))
    else:
        p.store(p.out, expanded, p.widen(p.rhs).reshape(groups * inner, -1))


def padded_batch(p: Problem) -> None:
    """A batched product of capacity max(sizes), see above."""
    xp, groups, capacity = p.xp, p.host_sizes.size, int(p.host_sizes.max())
    lhs = p.widen(p.lhs.T if p.contracting else p.lhs)
    slot, starts = xp.arange(capacity), xp.cumsum(p.sizes) - p.sizes
    used = slot[None, :] < p.sizes[:, None]
    row = xp.minimum(starts[:, None] + slot[None, :], lhs.shape[0] - 1)

    def gather(array: Any) -> Any:
        p.require(groups * capacity * array.shape[1] * array.dtype.itemsize, "the padded operand")
        return xp.where(used[:, :, None], array[row], array.dtype.type(0))

    if p.contracting:
        p.store(p.out, gather(lhs).transpose(0, 2, 1), gather(p.widen(p.rhs)))
        return
    product = xp.matmul(gather(lhs), p.widen(p.rhs))
    p.out[...] = 0
    p.out[row[used]] = product[used].astype(p.out.dtype, copy=False)


def loop(p: Problem) -> None:
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


BASELINES: dict[str, tuple[str, Callable[[Problem], None]]] = {
    PADDED: ("all rows, masked", padded_dot),
    "padded_batch": ("capacity max(sizes)", padded_batch),
    "loop": ("a product per group", loop),
}
"""Name to (what it does, the function)."""


class Baseline(Executable):
    """A function on arrays as an executable. Problems have no batch axes."""

    def __init__(self, harness: Harness, config: GroupedGemmConfig, host_sizes: Any, function: Callable[[Problem], object]) -> None:
        self._harness, self._config, self._function = harness, config, function
        self._xp, self._sizes = array_library(harness.device), np.asarray(host_sizes)
        self._problem: tuple[Any, Problem] | None = None

    def problem(self, arguments: Arguments) -> Problem:
        """The operands as arrays."""
        key = (tuple(arguments.pointers.items()), arguments.group_sizes.pointer)
        if self._problem is None or self._problem[0] != key:
            contracting = self._config.ragged_mode is RaggedDotMode.CONTRACTING
            layouts, device, arrays = layouts_of(self._config), self._harness.device, {}
            for name in ("lhs", "rhs", "out"):
                layout = layouts[name]
                view = ArrayView(arguments.pointers[name], layout.shape, layout.byte_strides, layout.dtype, device, "")
                arrays[name] = array_of(view, self._xp)[:, 0]
            if not contracting:
                arrays["lhs"], arrays["out"] = arrays["lhs"][0], arrays["out"][0]
            else:
                arrays["lhs"], arrays["rhs"] = arrays["lhs"][0], arrays["rhs"][0]
            sizes = array_of(arguments.group_sizes, self._xp)
            self._problem = (
                key,
                Problem(self._xp, contracting, **arrays, sizes=sizes, host_sizes=self._sizes, free_bytes=self._harness.free_bytes),
            )
        return self._problem[1]

    def execute(self, arguments: Arguments) -> None:
        """Calls the function, on a device on the harness's stream."""
        if self._xp is np:
            self._function(self.problem(arguments))
            return
        with self._xp.cuda.Device(self._harness.device.index), self._xp.cuda.ExternalStream(arguments.stream, self._harness.device.index):
            self._function(self.problem(arguments))

    def explain(self) -> str:
        """Its name."""
        return getattr(self._function, "__name__", "a function")
