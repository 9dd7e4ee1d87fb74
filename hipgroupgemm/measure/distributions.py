"""Group sizes: how routers fill the groups, drawn from named distributions or read from files of real ones."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from hipgroupgemm.measure.workloads import MoEShape, Sizes

__all__ = [
    "DISTRIBUTIONS", "DistributionError", "balanced_sizes", "dirichlet_sizes", "group_size_vectors", "group_sizes_of", "read_group_sizes",
    "scale_group_sizes", "zipf_sizes",
]  # fmt: skip

_SAVE = "numpy.save(path, numpy.asarray(sizes, numpy.int64))"
_MOST = (1 << 31) - 1


class DistributionError(ValueError):
    """The distribution has no such name, its file can't be read, or what it holds does not fit a shape."""


def balanced_sizes(m: int, e: int) -> Sizes:
    """M // E rows each, one more for the first M mod E groups: the article's micro-benchmark. (E,) int32."""
    return (m // e + (np.arange(e) < m % e)).astype(np.int32)


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

    Large concentrations approach balance; 0.5 leaves many experts near empty, as early in training without a balancing loss.
    """
    rng = np.random.default_rng(seed)
    p = rng.dirichlet(np.full(e, concentration))
    return rng.multinomial(m, p / p.sum()).astype(np.int32)


_DRAWN: dict[str, Callable[[int, int, int], Sizes]] = {
    "balanced": lambda m, e, seed: balanced_sizes(m, e),
    "zipf": zipf_sizes,
    "dirichlet": dirichlet_sizes,
}
DISTRIBUTIONS = tuple(_DRAWN)
"""The distributions that have a name; anything else is a file of real group sizes."""


def group_sizes_of(distribution: str, shape: MoEShape, seed: int = 0) -> Sizes:
    """The group sizes of a named distribution for a shape: (E,) int32 that sum to M. Raises ValueError for another name."""
    if distribution not in _DRAWN:
        raise ValueError(f"distribution {distribution!r}: wanted one of {', '.join(DISTRIBUTIONS)}")
    return _DRAWN[distribution](shape.m, shape.e, seed)


def group_size_vectors(distribution: str, whole: MoEShape, shape: MoEShape, seed: int = 0) -> tuple[str, list[Sizes]]:
    """The group sizes of a named distribution or a file for a shape that was scaled from `whole`: (name, vectors).

    Raises:
        DistributionError: there is neither, or the file's group sizes do not fit.
    """
    if distribution in DISTRIBUTIONS:
        return distribution, [group_sizes_of(distribution, shape, seed)]
    path = Path(distribution)
    try:
        if not path.exists():
            raise ValueError(f"{distribution!r}: wanted {', '.join(DISTRIBUTIONS)} or a file, and there is no such file")
        vectors = read_group_sizes(path, whole.e)
        for index, vector in enumerate(vectors):
            name = path.name if len(vectors) == 1 else f"{path.name}[{index}]"
            label, total = whole.label or "the shape", int(vector.sum())
            if vector.size != whole.e:
                raise ValueError(f"{name}: has {vector.size} sizes, but {label} has E = {whole.e} groups")
            if total > whole.m:
                raise ValueError(f"{name}: the sizes sum to {total}, but {label} has only M = {whole.m} rows")
    except (ValueError, OSError) as error:
        raise DistributionError(str(error)) from error
    name = f"./{path.name}" if path.name in DISTRIBUTIONS else path.name  # real sizes are not to pass for drawn ones
    return name, [scale_group_sizes(one, shape.scale) for one in vectors]


def scale_group_sizes(sizes: np.ndarray[Any, Any], scale: int) -> Sizes:
    """Real sizes for a shape that was scaled down: every group's end is divided by `scale` and rounded down.

    The sum of the scaled sizes is the rounded-down scaled sum, empty groups stay empty, and groups smaller than `scale` may become so.
    """
    ends = np.cumsum(sizes, dtype=np.int64) // scale
    return np.diff(ends, prepend=0).astype(np.int32)


def read_group_sizes(path: str | Path, experts: int | None = None) -> list[np.ndarray[Any, np.dtype[np.int64]]]:
    """The vectors of group sizes in a file, one or several, each (E,) int64.

    By the file's suffix: `.json`: a list of integers, a list of such lists, or an object with either as "group_sizes"; `.npy`: integers,
    (E,) or (vectors, E); anything else is text: integers separated by blanks or commas, one vector a line, `#` starts a comment.

    Args:
        path: the file.
        experts: E, where it is known: text of exactly E lines with one number each is then one vector, a group a line.

    Raises:
        OSError: the file can't be read.
        ValueError: it holds something else; the text says where.
    """
    path = Path(path)
    if path.is_dir():
        raise ValueError(f"{path}: is a folder; name the file of group sizes in it (.json, .npy or text)")
    if path.suffix in (".npy", ".npz"):
        rows = _npy_rows(path)
    else:
        try:
            text = path.read_text(encoding="utf-8")
        except UnicodeDecodeError as error:
            raise ValueError(f"{path}: not text ({error}); wanted .json, .npy or text of integers") from None
        rows = _json_rows(path, text) if path.suffix == ".json" else _text_rows(path, text, experts)
    if not rows:
        raise ValueError(f"{path}: holds no group sizes")
    for index, row in enumerate(rows):
        if not row:
            raise ValueError(f"{path}, vector {index}: is empty, wanted one size a group")
        for group, size in enumerate(row):
            if type(size) is not int or not 0 <= size <= _MOST:
                raise ValueError(f"{path}, vector {index}, group {group}: got {size!r}, wanted an integer from 0 to {_MOST}")
    return [np.asarray(row, np.int64) for row in rows]


def _npy_rows(path: Path) -> list[Any]:
    try:
        data = np.load(path, allow_pickle=False)
    except OSError:
        raise
    except Exception as error:  # a broken header fails as ValueError, EOFError, SyntaxError or tokenize.TokenError
        raise ValueError(f"{path}: can't be read as integers ({error}); write it with {_SAVE}") from None
    if not isinstance(data, np.ndarray):
        data.close()
        raise ValueError(f"{path}: is an archive of arrays; write the sizes alone: {_SAVE}")
    if data.dtype.kind not in "iu" or data.ndim not in (1, 2):
        what = f"holds {data.dtype} of shape {data.shape}, wanted integers of shape (E,) or (vectors, E)"
        raise ValueError(f"{path}: {what}; write it with {_SAVE}")
    return list(np.atleast_2d(data).tolist())


def _json_rows(path: Path, text: str) -> list[Any]:
    try:
        data = json.loads(text)
    except json.JSONDecodeError as error:
        raise ValueError(f"{path}: not JSON ({error})") from None
    if isinstance(data, dict):
        if "group_sizes" not in data:
            raise ValueError(f'{path}: the object has no "group_sizes", only {", ".join(sorted(data)) or "nothing"}')
        data = data["group_sizes"]
    if not isinstance(data, list):
        raise ValueError(f"{path}: holds {type(data).__name__}, wanted a list of integers or a list of such lists")
    return data if all(isinstance(row, list) for row in data) else [data]


def _text_rows(path: Path, text: str, experts: int | None) -> list[list[int]]:
    rows = []
    for number, line in enumerate(text.splitlines(), 1):
        try:
            row = [int(word) for word in line.partition("#")[0].replace(",", " ").split()]
        except ValueError:
            words = f"{line.strip()!r} is not integers separated by blanks or commas; write 3 and not 3.0"
            raise ValueError(f"{path}, line {number}: {words}") from None
        rows += [row] if row else []
    if experts is not None and experts > 1 and rows and all(len(row) == 1 for row in rows):
        if len(rows) != experts:
            raise ValueError(
                f"{path}: has {len(rows)} lines of one number each, but there are E = {experts} groups; "
                "give one line a group, or all sizes of a vector on one line"
            )
        return [[size for row in rows for size in row]]
    return rows
