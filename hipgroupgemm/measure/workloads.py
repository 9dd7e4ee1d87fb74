"""Workloads: the ragged dots of mixture-of-experts layers, their shapes, and how routers fill the groups.

Pure data and NumPy: tests, benchmark, tuning and comparisons with other libraries share this module. A workload is an `MoEShape`
(M routed tokens, K embedding, N expert MLP, E experts), one of the six `CLASSES` that a training step of an MoE layer consists of, and
a vector of group sizes.

The presets' shapes are not the ones under which the models were published: they come from AMD's article about grouped GEMM in XLA, which
ran the MoE models of MaxText in configurations of its own (its mixtral-8x7b has 32 experts; Mistral's, of 8, is mixtral-8x7b-published).
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from hipgroupgemm.config import RaggedDotMode
from hipgroupgemm.problem.dimension_numbers import RaggedDotDimensionNumbers

__all__ = [
    "ALIASES",
    "CLASSES",
    "DISTRIBUTIONS",
    "PRESETS",
    "SUITES",
    "MoEPreset",
    "MoEShape",
    "RaggedDotClass",
    "balanced_sizes",
    "check_group_sizes",
    "dirichlet_sizes",
    "group_sizes_of",
    "presets_of",
    "read_group_sizes",
    "scale_group_sizes",
    "zipf_sizes",
]

Sizes = np.ndarray[Any, np.dtype[np.int32]]


_MOST_ROWS = int(np.iinfo(np.int32).max)


@dataclasses.dataclass(frozen=True)
class MoEShape:
    """The extents of an MoE layer's ragged dots.

    Attributes:
        m: routed tokens, batch x sequence x top-k: the ragged dimension.
        k: embedding dimension. n: the expert MLP's dimension. e: experts, the groups.
        label: the model's or the suite's name for it; takes no part in comparisons.
        scale: the divisor that m, k and n were divided by, 1 for the full shape.
    """

    m: int
    k: int
    n: int
    e: int
    label: str = dataclasses.field(default="", compare=False)
    scale: int = 1

    def __post_init__(self) -> None:
        for name in ("m", "k", "n", "e", "scale"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int):
                raise TypeError(f"{name}={value!r}: wanted an int")
            if value < 1:
                raise ValueError(f"{name}={value}: wanted at least 1")
        if self.m > _MOST_ROWS:
            raise ValueError(f"m={self.m}: wanted at most {_MOST_ROWS}, as group sizes are 32-bit here")

    @property
    def extents(self) -> tuple[int, int, int, int]:
        """(M, K, N, E)."""
        return (self.m, self.k, self.n, self.e)

    @property
    def padded_flops(self) -> int:
        """Floating-point operations of the padded dot, in which every group is multiplied with all M rows: 2 E M K N."""
        return 2 * self.e * self.m * self.k * self.n

    def scaled(self, divisor: int) -> MoEShape:
        """This shape with M, K and N divided by `divisor`, none below 1. E stays: it is what sets ragged and padded apart."""
        if isinstance(divisor, bool) or not isinstance(divisor, int) or divisor < 1:
            raise ValueError(f"divisor={divisor!r}: wanted an int of at least 1")
        m, k, n = (max(extent // divisor, 1) for extent in (self.m, self.k, self.n))
        return dataclasses.replace(self, m=m, k=k, n=n, scale=self.scale * divisor)

    def fitting(self, padded_flops: int) -> MoEShape:
        """This shape, scaled by the smallest power of two with which a padded dot takes at most so many operations."""
        shape = self
        while shape.padded_flops > padded_flops and max(shape.m, shape.k, shape.n) > 1:
            shape = self.scaled(2 * shape.scale // self.scale)
        return shape

    @classmethod
    def parse(cls, text: str) -> MoEShape:
        """A shape from "M,K,N,E"; raises ValueError for anything else."""
        parts = text.replace("x", ",").split(",")
        try:
            m, k, n, e = (int(part) for part in parts)
        except ValueError:
            raise ValueError(f"shape {text!r}: wanted four integers M,K,N,E, such as 10240,2048,768,128") from None
        try:
            return cls(m, k, n, e, label=",".join(str(extent) for extent in (m, k, n, e)))
        except ValueError as error:
            raise ValueError(f"shape {text!r}: {error}") from None


@dataclasses.dataclass(frozen=True)
class MoEPreset:
    """A MaxText model of AMD's article about grouped GEMM in XLA: its tables 4 and 5 (MI300, MI350), or its results (published Mixtral).

    Several are cut down or enlarged there: look at `shape` before comparing with a model card.

    Attributes:
        name: unique. emb: K. moe_mlp: N. experts: E. top_k, seq: the routed tokens of one sequence are seq x top_k.
    """

    name: str
    emb: int
    moe_mlp: int
    experts: int
    top_k: int
    seq: int

    @property
    def routed_tokens(self) -> int:
        """M: what the micro-benchmark of the article used for this (K, N, E), else seq x top_k."""
        measured = {(k, n, e): m for m, k, n, e in TABLE12}
        return measured.get((self.emb, self.moe_mlp, self.experts), self.seq * self.top_k)

    @property
    def shape(self) -> MoEShape:
        """The extents of the model's ragged dots."""
        return MoEShape(self.routed_tokens, self.emb, self.moe_mlp, self.experts, label=self.name)


TABLE12: tuple[tuple[int, int, int, int], ...] = (
    (3840, 2048, 1408, 64),
    (1920, 5120, 1536, 160),
    (5120, 512, 512, 256),
    (10240, 2816, 704, 128),
    (10240, 2880, 2880, 128),
    (1280, 5120, 8192, 16),
    (15360, 6144, 20480, 32),
    (40960, 8192, 28672, 64),
    (20480, 4096, 1536, 128),
    (10240, 2048, 768, 128),
    (6400, 2048, 512, 512),
)
"""(M, K, N, E) of the article's micro-benchmark."""

PRESETS: Mapping[str, MoEPreset] = {
    preset.name: preset
    for preset in (
        MoEPreset("mixtral-8x7b", 6144, 20480, 32, 4, 3072),
        MoEPreset("mixtral-8x7b-large", 8192, 28672, 64, 8, 4096),
        MoEPreset("mixtral-8x7b-published", 4096, 14336, 8, 2, 3072),
        MoEPreset("deepseek2-16b", 2048, 1408, 64, 6, 512),
        MoEPreset("deepseek3-test-mi300", 512, 512, 32, 8, 512),
        MoEPreset("deepseek3-test-mi350", 512, 512, 256, 8, 512),
        MoEPreset("deepseek3-671b-reduced", 7168, 2048, 32, 8, 512),
        MoEPreset("gemma4-26b", 2816, 704, 128, 8, 1024),
        MoEPreset("qwen3-30b-a3b", 2048, 768, 128, 8, 1024),
        MoEPreset("qwen3-235b-a22b", 4096, 1536, 128, 8, 2048),
        MoEPreset("llama4-17b-16e", 5120, 8192, 16, 1, 1024),
    )
}
"""Models by name, with the article's extents, not the models' published ones.

deepseek3-test has 32 experts in the MI300 table and 256 in the MI350 one.
"""

ALIASES: Mapping[str, tuple[str, ...]] = {"deepseek3-test": ("deepseek3-test-mi300", "deepseek3-test-mi350")}
"""Names that stand for several presets."""


def presets_of(name: str) -> tuple[MoEPreset, ...]:
    """The presets that a name stands for; raises ValueError, listing the names there are, for any other."""
    names = ALIASES.get(name, (name,))
    if any(one not in PRESETS for one in names):
        raise ValueError(f"model {name!r}: no such preset; there are {', '.join((*PRESETS, *ALIASES))}")
    return tuple(PRESETS[one] for one in names)


SUITES: Mapping[str, tuple[MoEShape, ...]] = {
    "table12": tuple(MoEShape(m, k, n, e, label=f"{m},{k},{n},{e}") for m, k, n, e in TABLE12),
    "models": tuple(preset.shape for preset in PRESETS.values()),
}
"""Named lists of shapes: the article's micro-benchmark, and all presets."""


# ---- the six classes -----------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class RaggedDotClass:
    """One of the ragged dots of an MoE layer's training step (the article's table 7).

    Attributes:
        name, role: what it is called and what it computes.
        lhs, rhs, out: the operands' axes, letters of M, K, N, E. M is always lhs's ragged axis 0.
        lhs_contracting, rhs_contracting: the contracted axis of each.
    """

    name: str
    role: str
    lhs: str
    rhs: str
    out: str
    lhs_contracting: int
    rhs_contracting: int

    @property
    def mode(self) -> RaggedDotMode:
        """CONTRACTING for weight gradients, else NON_CONTRACTING."""
        return RaggedDotMode.NON_CONTRACTING if self.rhs[0] == "E" else RaggedDotMode.CONTRACTING

    @property
    def dimension_numbers(self) -> RaggedDotDimensionNumbers:
        """What `ragged_dot_general` takes for this class."""
        group = (0,) if self.mode is RaggedDotMode.NON_CONTRACTING else ()
        return RaggedDotDimensionNumbers((((self.lhs_contracting,), (self.rhs_contracting,)), ((), ())), (0,), group)

    def shapes(self, shape: MoEShape) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]:
        """The shapes of lhs, rhs and out."""
        extents = {"M": shape.m, "K": shape.k, "N": shape.n, "E": shape.e}
        lhs, rhs, out = (tuple(extents[axis] for axis in axes) for axes in (self.lhs, self.rhs, self.out))
        return lhs, rhs, out

    def contraction_length(self, shape: MoEShape, sizes: Sequence[int] | Sizes) -> int:
        """How many products an element of out sums at the most: the contracted extent, or the largest group where M is contracted."""
        if self.mode is RaggedDotMode.CONTRACTING:
            return max((int(size) for size in sizes), default=0)
        return self.shapes(shape)[0][self.lhs_contracting]


CLASSES: Mapping[str, RaggedDotClass] = {
    entry.name: entry
    for entry in (
        RaggedDotClass("fwd_wi", "forward, gate and up projection", "MK", "EKN", "MN", 1, 1),
        RaggedDotClass("fwd_wo", "forward, down projection", "MN", "ENK", "MK", 1, 1),
        RaggedDotClass("dgrad_wi", "data gradient of gate and up", "MN", "EKN", "MK", 1, 2),
        RaggedDotClass("dgrad_wo", "data gradient of down", "MK", "ENK", "MN", 1, 2),
        RaggedDotClass("wgrad_wi", "weight gradient of gate and up", "MK", "MN", "EKN", 0, 0),
        RaggedDotClass("wgrad_wo", "weight gradient of down", "MN", "MK", "ENK", 0, 0),
    )
}
"""The six classes by name."""


# ---- group sizes ---------------------------------------------------------------------------------------------------------------


def balanced_sizes(m: int, e: int) -> Sizes:
    """M // E rows each, one more for the first M mod E groups: the article's micro-benchmark. (E,) int32."""
    sizes = np.full(e, m // e, np.int32)
    sizes[: m % e] += 1
    return sizes


def zipf_sizes(m: int, e: int, seed: int = 0, exponent: float = 0.8) -> Sizes:
    """Skewed sizes that sum to M: expert ranks weighted rank ** -exponent, shuffled over the experts, M tokens drawn. (E,) int32.

    With seed 0 and the default exponent these are the sizes of the published comparison with other libraries.
    """
    rng = np.random.default_rng(seed)
    p = np.arange(1, e + 1) ** -exponent
    rng.shuffle(p)
    p /= p.sum()
    return rng.multinomial(m, p).astype(np.int32)


def dirichlet_sizes(m: int, e: int, seed: int = 0, concentration: float = 0.5) -> Sizes:
    """Sizes that sum to M, M tokens drawn from expert probabilities that a symmetric Dirichlet distribution gave. (E,) int32.

    Args:
        concentration: every expert's Dirichlet parameter: large values approach balance, 1 draws evenly from all mixtures, and the
            default 0.5 leaves many experts near empty, as early in training without a balancing loss.
    """
    rng = np.random.default_rng(seed)
    p = rng.dirichlet(np.full(e, concentration))
    return rng.multinomial(m, p / p.sum()).astype(np.int32)


DISTRIBUTIONS = ("balanced", "zipf", "dirichlet")
"""The distributions that have a name; anything else is a file of real group sizes."""


def group_sizes_of(distribution: str, shape: MoEShape, seed: int = 0) -> Sizes:
    """The group sizes of a named distribution for a shape: (E,) int32 that sum to M. Raises ValueError for another name."""
    if distribution == "balanced":
        return balanced_sizes(shape.m, shape.e)
    if distribution == "zipf":
        return zipf_sizes(shape.m, shape.e, seed)
    if distribution == "dirichlet":
        return dirichlet_sizes(shape.m, shape.e, seed)
    raise ValueError(f"distribution {distribution!r}: wanted one of {', '.join(DISTRIBUTIONS)}")


def check_group_sizes(sizes: Any, shape: MoEShape, name: str = "group_sizes") -> Sizes:
    """`sizes` as (E,) int32 if they fit the shape; raises ValueError naming what does not."""
    array = np.asarray(sizes)
    if array.ndim != 1 or array.dtype.kind not in "iu":
        advice = "; the numbers are whole: convert them with .astype(numpy.int64)" if _is_whole(array) else ""
        raise ValueError(f"{name}: got {array.dtype} of shape {array.shape}, wanted a vector of integers{advice}")
    if array.size != shape.e:
        raise ValueError(f"{name}: has {array.size} sizes, but {shape.label or 'the shape'} has E = {shape.e} groups")
    if array.size and int(array.min()) < 0:
        group = int(array.argmin())
        raise ValueError(f"{name}: group {group} has size {int(array[group])}, wanted at least 0")
    total = sum(int(size) for size in array)
    if total > shape.m:
        raise ValueError(f"{name}: the sizes sum to {total}, but {shape.label or 'the shape'} has only M = {shape.m} rows")
    return array.astype(np.int32)


def scale_group_sizes(sizes: Sizes, scale: int) -> Sizes:
    """Real sizes for a shape that was scaled down: every group's end is divided by `scale` and rounded down.

    The sum of the scaled sizes is the rounded-down scaled sum, empty groups stay empty, and groups smaller than `scale` may become so.
    """
    ends = np.cumsum(sizes, dtype=np.int64) // scale
    return np.diff(ends, prepend=0).astype(np.int32)


def _is_whole(array: np.ndarray[Any, Any]) -> bool:
    return array.dtype.kind == "f" and bool(np.isfinite(array).all() and (array == np.floor(array)).all())


def read_group_sizes(path: str | Path, experts: int | None = None) -> list[np.ndarray[Any, np.dtype[np.int64]]]:
    """The vectors of group sizes in a file, one or several, each (E,) int64.

    By the file's suffix: `.json`: a list of integers, a list of such lists, or an object with either as "group_sizes"; `.npy`: integers,
    (E,) or (vectors, E); anything else is text: integers separated by blanks or commas, one vector a line, `#` starts a comment.

    Args:
        path: the file.
        experts: E, where it is known: text of exactly E lines with one number each is then one vector, a group a line.

    Raises:
        OSError: the file can't be read.
        ValueError: it holds something else; the text says where, and what to do.
    """
    path = Path(path)
    if path.is_dir():
        raise ValueError(f"{path}: is a folder; name the file of group sizes in it (.json, .npy or text)")
    if path.suffix == ".npz":
        raise ValueError(
            f"{path}: is an archive of arrays; save the one with the sizes alone: numpy.save('sizes.npy', archive['its name'])"
        )
    if path.suffix == ".npy":
        rows = _npy_rows(path)
    elif path.suffix == ".json":
        rows = _json_rows(path)
    else:
        rows = list(_text_rows(path))
        if experts is not None and experts > 1 and rows and all(len(row) == 1 for row in rows):
            if len(rows) != experts:
                raise ValueError(
                    f"{path}: has {len(rows)} lines of one number each, but there are E = {experts} groups; "
                    "give one line a group, or all sizes of a vector on one line"
                )
            rows = [[size for row in rows for size in row]]
    vectors = [_vector(path, index, row) for index, row in enumerate(rows)]
    if not vectors:
        raise ValueError(f"{path}: holds no group sizes")
    return vectors


def _npy_rows(path: Path) -> list[Any]:
    save = "numpy.save(path, numpy.asarray(sizes, numpy.int64))"
    with path.open("rb") as file:
        magic = file.read(6)
    if magic[:4] == b"PK\x03\x04":
        raise ValueError(f"{path}: is an archive of arrays (.npz) by another name; write the sizes alone: {save}")
    if magic != b"\x93NUMPY":
        raise ValueError(f"{path}: is not a .npy file (a pickle, or something else); write it with {save}")
    try:
        data = np.load(path, allow_pickle=False)
    except OSError:
        raise
    except Exception as error:  # a broken header fails as ValueError, EOFError, SyntaxError or tokenize.TokenError
        reason = "it holds Python objects, which are not loaded" if "allow_pickle" in str(error) else str(error)
        raise ValueError(f"{path}: can't be read as integers ({reason}); write it with {save}") from None
    if data.dtype.kind not in "iu" or data.ndim not in (1, 2):
        advice = f"; the numbers are whole: {save}" if _is_whole(data) else ""
        raise ValueError(f"{path}: holds {data.dtype} of shape {data.shape}, wanted integers of shape (E,) or (vectors, E){advice}")
    return list(data.reshape(-1, data.shape[-1]).tolist())


def _json_rows(path: Path) -> list[Any]:
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{path}: not JSON ({error})") from None
    if isinstance(data, dict):
        if "group_sizes" not in data:
            raise ValueError(f'{path}: the object has no "group_sizes", only {", ".join(sorted(map(str, data))) or "nothing"}')
        data = data["group_sizes"]
    if not isinstance(data, list):
        raise ValueError(f"{path}: holds {type(data).__name__}, wanted a list of integers or a list of such lists")
    return data if data and all(isinstance(row, list) for row in data) else [data] if data else []


def _text_rows(path: Path) -> Iterator[list[int]]:
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except UnicodeDecodeError as error:
        raise ValueError(f"{path}: not text ({error}); wanted .json, .npy or text of integers") from None
    for number, line in enumerate(lines, 1):
        words = line.partition("#")[0].replace(",", " ").split()
        try:
            row = [int(word) for word in words]
        except ValueError:
            advice = "; write whole numbers without a point, 3 and not 3.0" if _are_numbers(words) else ""
            raise ValueError(f"{path}, line {number}: {line.strip()!r} is not integers separated by blanks or commas{advice}") from None
        if row:
            yield row


def _are_numbers(words: Sequence[str]) -> bool:
    try:
        return all(float(word).is_integer() for word in words)
    except (ValueError, OverflowError):
        return False


def _vector(path: Path, index: int, row: Any) -> np.ndarray[Any, np.dtype[np.int64]]:
    for group, size in enumerate(row):
        if isinstance(size, bool) or not isinstance(size, int) or not 0 <= size < 1 << 31:
            advice = f": write {int(size)}" if isinstance(size, float) and size.is_integer() else ""
            raise ValueError(f"{path}, vector {index}, group {group}: got {size!r}, wanted an integer from 0 to {(1 << 31) - 1}{advice}")
    if not row:
        raise ValueError(f"{path}, vector {index}: is empty, wanted one size a group")
    return np.asarray(row, np.int64)


def geometric_mean(values: Sequence[float]) -> float:
    """The geometric mean of positive numbers, the mean that ratios have; NaN for none."""
    return math.exp(sum(math.log(value) for value in values) / len(values)) if values else math.nan
