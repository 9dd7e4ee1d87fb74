"""What people do without a grouped GEMM. Each baseline is right: the runner checks it like every backend.

- `padded_dot`: XLA's default lowering. Every group is multiplied with all M rows; rows of other groups are masked to zero and the
  group axis is contracted along with the inner one (or, in a weight gradient, becomes a batch): E times the work, and an operand of
  E times lhs's size.
- `padded_batch`: every group is padded to the size of the largest (the capacity), one batched product does them all, the rows are
  gathered before and scattered after. It has to know the largest size on the host.
- `loop`: one product a group, in a Python loop. It has to know all sizes on the host.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np

from hipgroupgemm.benchmark.labs import Lab
from hipgroupgemm.config import RaggedDotMode
from hipgroupgemm.measure.workloads import MoEShape, RaggedDotClass, Sizes

__all__ = ["BASELINES", "PADDED", "Operands"]

PADDED = "padded_dot"
"""The baseline that speed-ups are measured against."""


@dataclasses.dataclass
class Operands:
    """The operands of one problem on the lab's device: lhs, rhs and out as `RaggedDotClass.shapes` says, sizes (E,) int32."""

    kind: RaggedDotClass
    shape: MoEShape
    lhs: Any
    rhs: Any
    sizes: Any
    host_sizes: Sizes
    out: Any

    @property
    def contracting(self) -> bool:
        """Whether the ragged axis is contracted (a weight gradient)."""
        return self.kind.mode is RaggedDotMode.CONTRACTING

    @property
    def weights(self) -> Any:
        """rhs as (E, contracted, columns), a view; not for weight gradients."""
        return self.rhs if self.kind.rhs_contracting == 1 else self.rhs.transpose(0, 2, 1)


def _require_memory(lab: Lab, nbytes: int, what: str) -> None:
    free = lab.free_bytes()
    if nbytes > free:
        raise MemoryError(f"{what} takes {nbytes / 2**30:.1f} GiB, {free / 2**30:.1f} GiB are free")


def padded_dot(lab: Lab, operands: Operands) -> None:
    """XLA's default lowering, see above; writes operands.out."""
    xp, shape = lab.xp, operands.shape
    lhs = lab.widen(operands.lhs)
    rows, inner = lhs.shape
    _require_memory(lab, shape.e * rows * inner * lhs.dtype.itemsize, "the masked operand")
    group_of_row = xp.searchsorted(xp.cumsum(operands.sizes), xp.arange(rows), side="right")  # E for uncovered rows
    mask = group_of_row[:, None] == xp.arange(shape.e)
    expanded = xp.where(mask[:, :, None], lhs[:, None, :], lhs.dtype.type(0)).reshape(rows, shape.e * inner)
    if operands.contracting:
        _store(operands.out.reshape(shape.e * inner, -1), xp, expanded.T, lab.widen(operands.rhs))
    else:
        weights = lab.widen(operands.weights)
        _store(operands.out, xp, expanded, weights.reshape(shape.e * inner, -1))


def padded_batch(lab: Lab, operands: Operands) -> None:
    """A batched product of capacity max(sizes), see above; writes operands.out."""
    xp, shape = lab.xp, operands.shape
    capacity = int(operands.host_sizes.max())
    lhs = lab.widen(operands.lhs)
    starts = xp.cumsum(operands.sizes) - operands.sizes
    slot = xp.arange(capacity)
    used = slot[None, :] < operands.sizes[:, None]
    row = xp.minimum(starts[:, None] + slot[None, :], shape.m - 1)

    def gather(array: Any) -> Any:
        _require_memory(lab, shape.e * capacity * array.shape[1] * array.dtype.itemsize, "the padded operand")
        return xp.where(used[:, :, None], array[row], array.dtype.type(0))

    if operands.contracting:
        _store(operands.out, xp, gather(lhs).transpose(0, 2, 1), gather(lab.widen(operands.rhs)))
        return
    product = xp.matmul(gather(lhs), lab.widen(operands.weights))
    operands.out.fill(0)
    operands.out[row[used]] = product[used].astype(operands.out.dtype, copy=False)


def loop(lab: Lab, operands: Operands) -> None:
    """One product a group, see above; writes operands.out."""
    xp, out, end = lab.xp, operands.out, 0
    weights: Any = None if operands.contracting else operands.weights
    for group, size in enumerate(operands.host_sizes.tolist()):
        rows = slice(end, end + size)
        end += size
        if operands.contracting:
            if size:
                _store(out[group], xp, lab.widen(operands.lhs[rows]).T, lab.widen(operands.rhs[rows]))
            else:
                out[group].fill(0)
        elif size:
            _store(out[rows], xp, lab.widen(operands.lhs[rows]), lab.widen(weights[group]))
    if not operands.contracting:
        out[end:].fill(0)


def _store(out: Any, xp: Any, a: Any, b: Any) -> None:
    if a.dtype == out.dtype:
        xp.matmul(a, b, out=out)
    else:
        with np.errstate(all="ignore"):
            out[...] = xp.matmul(a, b).astype(out.dtype)


BASELINES: dict[str, tuple[str, Callable[[Lab, Operands], None]]] = {
    PADDED: ("all rows, masked", padded_dot),
    "padded_batch": ("capacity max(sizes)", padded_batch),
    "loop": ("a product a group", loop),
}
"""Name to (what it does, the function)."""
