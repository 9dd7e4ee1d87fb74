"""The contenders of `bench/peers.py` on the operands of a harness: this package's algorithms, and other ways to a grouped GEMM in torch."""

from __future__ import annotations

import dataclasses
import importlib.util
import sys
import types
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import torch

from hipgroupgemm.backends import get_backend
from hipgroupgemm.backends.base import AlgorithmLimits, Arguments, Executable
from hipgroupgemm.measure.base import Harness
from hipgroupgemm.measure.timer import Timed, time_rounds
from hipgroupgemm.measure.verify import SizeSet, Verifier
from hipgroupgemm.measure.workloads import MoEShape, RaggedDotClass, config_of
from hipgroupgemm.operands.dlpack import export_capsule
from hipgroupgemm.operands.views import ArrayView

PADDED_BYTES = 24e9
LOOP_GROUPS = 64
JAX_BYTES = 2e8


class Contender(Timed):
    """Who takes part: an executable, and what its check said."""

    def __init__(self, name: str, executable: Executable, algorithm: str = "") -> None:
        super().__init__()
        self.name, self.executable, self.algorithm, self.error, self.fault = name, executable, algorithm, 0.0, ""


class Call(Executable):
    """A function on torch tensors as an executable, on a harness's stream. In its checked runs the result is copied to out."""

    def __init__(self, cell: Cell, call: Callable[[], Any], convert: Callable[[Any], Any]) -> None:
        self.cell, self.call, self.convert, self.copies = cell, call, convert, True

    def execute(self, arguments: Arguments) -> None:
        """Calls it."""
        with torch.cuda.stream(self.cell.stream):
            result = self.call()
            if self.copies:
                self.cell.out.copy_(self.convert(result))

    def explain(self) -> str:
        """What it is."""
        return "a function on torch tensors"


def tensor(view: ArrayView) -> Any:
    """A torch tensor over a harness's memory."""
    return torch.from_dlpack(export_capsule(view, versioned=False, keep=view.owner))


@dataclasses.dataclass
class Cell:
    """One problem on the device: bf16 operands, group sizes, and how a result is checked.

    Attributes:
        harness: where. dist, shape, kind: the distribution's name, the shape and the ragged-dot class.
        sizes: host group sizes. lhs, rhs, sizes_device, offs, out: tensors on the device; weights: rhs as (E, k, n).
    """

    harness: Harness
    dist: str
    shape: MoEShape
    kind: RaggedDotClass
    sizes: np.ndarray[Any, Any]

    def __post_init__(self) -> None:
        self.config = config_of(self.kind, self.shape, "bfloat16")
        self.verifier = Verifier(self.harness, self.config, [SizeSet(f"{self.dist} sizes", self.sizes)], watch=False)
        self.verifier.use(0, timing=True)
        self.stream = torch.cuda.ExternalStream(self.harness.stream)
        self.slabs, self.transposed = self.kind.name.startswith("wgrad"), self.kind.name.startswith("dgrad")
        lhs, rhs, out = (tensor(self.harness.view(self.verifier.operands, name)) for name in ("lhs", "rhs", "out"))
        if self.slabs:
            self.lhs, self.weights, self.rhs, self.out = lhs[0, 0].t(), None, rhs[0, 0], out[:, 0]
        else:
            self.lhs, self.weights, self.out = lhs[0, 0], rhs[:, 0], out[0, 0]
            self.rhs = self.weights.transpose(1, 2) if self.transposed else self.weights
        self.sizes_device = tensor(self.verifier.sizes)
        self.offs = torch.cumsum(self.sizes_device, 0).to(torch.int32)
        torch.cuda.synchronize()

    def floor_ms(self, flops: float, bandwidth: float) -> float:
        """The least possible time (PEERS: weights of empty groups count in weight gradients only)."""
        m, k, n, e = self.shape.extents
        used = e if self.slabs else int((self.sizes > 0).sum())
        return max(2 * m * k * n / flops, 2 * (m * k + m * n + used * k * n) / bandwidth) * 1e3

    def check(self, contender: Contender) -> bool:
        """Runs a contender on a poisoned out and checks the result; whether it is right."""
        outcome = self.verifier.check(0, lambda: contender.executable)
        contender.error, contender.fault = float("inf") if outcome.error is None else outcome.error, outcome.reason
        if isinstance(contender.executable, Call):
            contender.executable.copies = False
        return not outcome.verdict

    def time(self, contenders: Sequence[Contender], milliseconds: float, least: int, most: int) -> None:
        """Times contenders in the product's rounds, as many as fit about so many milliseconds each."""

        def once(contender: Contender, number: int) -> float | None:
            return self.verifier.time(0, number, lambda: contender.executable).ms

        time_rounds(contenders, once, rounds=(least, most), seconds=milliseconds * len(contenders) / 1e3)

    def ours(self, most: int | None = None, wanted: Callable[[str], bool] = lambda name: True) -> Iterator[Contender]:
        """This package's algorithms that are wanted by name, the best guess first, prepared."""
        backend, key, device = get_backend("triton"), self.config.key(), self.harness.device
        limits = AlgorithmLimits() if most is None else AlgorithmLimits(max_algorithm_count=most)
        for algorithm in backend.algorithms(key, device, limits):
            if wanted(algorithm.name):
                yield Contender(algorithm.name, backend.prepare(key, device, algorithm, self.harness.stream), algorithm.name)

    def close(self) -> None:
        """Frees the operands."""
        self.verifier.close()


def peers_of(cell: Cell, wanted: tuple[str, ...]) -> Iterator[Contender]:
    """The contenders that can run a cell."""
    for name in wanted:
        with torch.cuda.stream(cell.stream):
            made = _MAKERS[name](cell)
        if made is not None:
            yield Contender(name, Call(cell, *made))


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
