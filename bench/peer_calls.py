"""The contenders of `bench/peers.py`: this package's default and best algorithm, and other ways to a grouped GEMM, on torch tensors."""

from __future__ import annotations

import dataclasses
import importlib.util
import math
import sys
import types
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch

import hipgroupgemm as hgg
from hipgroupgemm.measure.workloads import MoEShape, RaggedDotClass

PADDED_BYTES = 24e9
LOOP_GROUPS = 64
JAX_BYTES = 2e8


@dataclasses.dataclass
class Cell:
    """One problem on the device: bf16 operands, group sizes, and how to look at a result.

    Attributes:
        dist, shape, kind: the distribution's name, the shape and the ragged-dot class.
        sizes: host group sizes. lhs, rhs, sizes_device, offs, out: on the device.
    """

    dist: str
    shape: MoEShape
    kind: RaggedDotClass
    sizes: np.ndarray[Any, Any]

    def __post_init__(self) -> None:
        shapes = self.kind.shapes(self.shape)
        # weights scaled so that results stay near 1, whatever is summed
        self.lhs, self.rhs = (torch.randn(shape, device="cuda", dtype=torch.bfloat16) for shape in shapes[:2])
        self.out = torch.empty(shapes[2], device="cuda", dtype=torch.bfloat16)
        self.sizes_device = torch.tensor(self.sizes, device="cuda")
        self.offs = torch.cumsum(self.sizes_device, 0).to(torch.int32)
        self.slabs = self.kind.name.startswith("wgrad")
        self.transposed = self.kind.name.startswith("dgrad")

    @property
    def weights(self) -> Any:
        """rhs as (E, k, n), a view."""
        return self.rhs.transpose(1, 2) if self.transposed else self.rhs

    def error(self, result: Any) -> float:
        """Relative Frobenius error against float32 products of the largest, first and last non-empty group; NaN counts as infinite."""
        ends = np.cumsum(self.sizes)
        used = np.flatnonzero(self.sizes)
        if not used.size:
            return 0.0
        worst = 0.0
        for group in {int(np.argmax(self.sizes)), int(used[0]), int(used[-1])}:
            rows = slice(int(ends[group] - self.sizes[group]), int(ends[group]))
            if self.slabs:
                exact, got = self.lhs[rows].float().t() @ self.rhs[rows].float(), result[group]
            else:
                exact, got = self.lhs[rows].float() @ self.weights[group].float(), result[rows]
            error = float((got.float() - exact).norm() / exact.norm())
            worst = max(worst, float("inf") if math.isnan(error) else error)
        empty = np.flatnonzero(self.sizes == 0)
        if self.slabs and empty.size and bool((result[int(empty[0])] != 0).any()):
            return float("inf")
        return worst

    def floor_ms(self, flops: float, bandwidth: float) -> float:
        """The least possible time (PEERS: weights of empty groups count in weight gradients only)."""
        m, k, n, e = self.shape.extents
        used = e if self.slabs else int((self.sizes > 0).sum())
        return max(2 * m * k * n / flops, 2 * (m * k + m * n + used * k * n) / bandwidth) * 1e3


class Ours:
    """This package's plan for a cell; `call` launches one algorithm."""

    def __init__(self, cell: Cell) -> None:
        self.cell = cell
        self._config = hgg.config_for_ragged_dot(cell.lhs, cell.rhs, cell.sizes_device, cell.kind.dimension_numbers, out=cell.out)
        self._plans: list[hgg.GroupedMatmulPlan] = []
        self.algorithms = self._plan().get_algorithms()

    def _plan(self) -> hgg.GroupedMatmulPlan:
        self._plans.append(hgg.GroupedMatmulPlan(self._config, "triton", "cuda:0", use_store=False))
        return self._plans[-1]

    def call(self, algorithm: Any) -> Callable[[], Any]:
        """A call of one algorithm; earlier ones stay valid."""
        plan, cell = self._plan(), self.cell
        plan.set_algorithm(algorithm)
        return lambda: plan.execute(cell.lhs, cell.rhs, cell.sizes_device, out=cell.out)

    def close(self) -> None:
        """Frees what the calls hold."""
        for plan in self._plans:
            plan.close()


def peers_of(cell: Cell, wanted: tuple[str, ...]) -> Iterator[tuple[str, Callable[[], Any], Callable[[Any], Any]]]:
    """(name, call, result as ours) of the contenders that can run a cell."""
    for name in wanted:
        maker = _MAKERS.get(name)
        made = maker(cell) if maker is not None else None
        if made is not None:
            yield (name, *made)


def _same(result: Any) -> Any:
    return result


def _torch_grouped(cell: Cell) -> Any:
    if cell.slabs:
        return (lambda: torch._grouped_mm(cell.lhs.t(), cell.rhs, offs=cell.offs)), _same
    weights = cell.weights
    return (lambda: torch._grouped_mm(cell.lhs, weights, offs=cell.offs)), _same


def _loop(cell: Cell) -> Any:
    if cell.shape.e > LOOP_GROUPS:
        return None
    sizes = cell.sizes.tolist()
    if cell.slabs:
        return (lambda: [x.t() @ y for x, y in zip(cell.lhs.split(sizes), cell.rhs.split(sizes), strict=True)]), torch.stack
    weights = cell.weights
    return (lambda: [x @ weights[i] for i, x in enumerate(cell.lhs.split(sizes))]), torch.cat


def _padded(cell: Cell, *, dense: bool) -> Any:
    """One batched product over groups padded to the largest; dense: of operands that lie padded already."""
    height, e = int(cell.sizes.max()), cell.shape.e
    widths = (cell.lhs.shape[1], *((cell.rhs.shape[1],) if cell.slabs else ()))
    if 2.0 * e * height * sum((*widths, cell.out.shape[-1])) > PADDED_BYTES:
        return None
    rows = torch.arange(height, device="cuda")
    starts = (cell.offs - cell.sizes_device)[:, None]
    inside = rows[None, :] < cell.sizes_device[:, None]
    index = torch.where(inside, starts + rows[None, :], 0).to(torch.int64)
    back = torch.nonzero(inside.flatten()).flatten()
    mask = inside[:, :, None]

    def pad(x: Any) -> Any:
        return torch.where(mask, x[index], torch.zeros((), device="cuda", dtype=x.dtype))

    if cell.slabs:
        a, b = pad(cell.lhs), pad(cell.rhs)
        if dense:
            return (lambda: torch.bmm(a.transpose(1, 2), b)), _same
        return (lambda: torch.bmm(pad(cell.lhs).transpose(1, 2), pad(cell.rhs))), _same
    weights = cell.weights
    if dense:
        a = pad(cell.lhs)
        return (lambda: torch.bmm(a, weights)), lambda result: result.flatten(0, 1)[back]
    return (lambda: torch.bmm(pad(cell.lhs), weights).flatten(0, 1)[back]), _same


def _bmm_dense(cell: Cell) -> Any:
    return _padded(cell, dense=True) if cell.dist == "balanced" else None


def _padded_batch(cell: Cell) -> Any:
    return _padded(cell, dense=False)


def _waiting(call: Callable[[], Any]) -> Callable[[], Any]:
    """A call on streams of JAX's own. It begins when torch's stream has come so far, else it would run beside what empties the cache."""

    def run() -> Any:
        torch.cuda.current_stream().synchronize()
        return call()

    return run


def _jax(cell: Cell) -> Any:
    if importlib.util.find_spec("jax") is None:
        return None
    m, k, n, e = cell.shape.extents
    if 2.0 * e * m * max(k, n) > JAX_BYTES:
        return None  # its default lowering expands the operands by group: a thirtieth of the floor, and seconds a cell
    import jax
    from jax import lax

    numbers = cell.kind.dimension_numbers
    theirs = lax.RaggedDotDimensionNumbers(
        numbers.dot_dimension_numbers, numbers.lhs_ragged_dimensions, numbers.rhs_group_dimensions
    )  # fmt: skip
    a, b, sizes = (jax.dlpack.from_dlpack(x) for x in (cell.lhs, cell.rhs, cell.sizes_device))
    jitted = jax.jit(lambda x, y, z: lax.ragged_dot_general(x, y, z, theirs, preferred_element_type=x.dtype))
    return _waiting(lambda: jitted(a, b, sizes).block_until_ready()), torch.from_dlpack


def _quack(cell: Cell) -> Any:
    if importlib.util.find_spec("quack") is None:
        return None
    gemm = importlib.import_module("quack.gemm_interface").gemm
    ends = torch.cat([torch.zeros(1, device="cuda", dtype=torch.int32), cell.offs])
    if cell.slabs:
        return (lambda: gemm(cell.lhs.t(), cell.rhs, cu_seqlens_k=ends, tuned=False)), _same
    weights = cell.weights
    return (lambda: gemm(cell.lhs, weights, cu_seqlens_m=ends, tuned=False)), _same


def _tokamax(cell: Cell) -> Any:
    if importlib.util.find_spec("tokamax") is None or 2.0 * cell.shape.e * cell.shape.k * cell.shape.n > 8e9:
        return None
    for name in ("xprof", "xprof.cli", "xprof.cli.tools", "xprof.cli.tools.get_kernel_stats_tool", "tensorboardX"):
        sys.modules.setdefault(name, types.ModuleType(name))  # its profiler, which nothing here uses
    tools: Any = sys.modules["xprof.cli.tools"]
    tools.get_kernel_stats_tool = sys.modules["xprof.cli.tools.get_kernel_stats_tool"]
    import jax

    tokamax = importlib.import_module("tokamax")
    numbers = cell.kind.dimension_numbers
    theirs = jax.lax.RaggedDotDimensionNumbers(
        numbers.dot_dimension_numbers, numbers.lhs_ragged_dimensions, numbers.rhs_group_dimensions
    )  # fmt: skip
    a, b, sizes = (jax.dlpack.from_dlpack(x) for x in (cell.lhs, cell.rhs, cell.sizes_device))
    jitted = jax.jit(
        lambda x, y, z: tokamax.ragged_dot_general(
            x, y, group_sizes=z, ragged_dot_dimension_numbers=theirs, preferred_element_type=x.dtype, implementation="mosaic"
        )
    )
    return _waiting(lambda: jitted(a, b, sizes).block_until_ready()), torch.from_dlpack


_MAKERS: dict[str, Callable[[Cell], Any]] = {
    "torch_grouped_mm": _torch_grouped,
    "loop_cublas": _loop,
    "bmm_dense": _bmm_dense,
    "padded_batch": _padded_batch,
    "jax": _jax,
    "quack": _quack,
    "tokamax": _tokamax,
}
