"""Random grouped GEMMs in hipBLASLt's own terms, records written by NumPy alone, and a float64 judge.

Nothing here uses the project's kernels or its arithmetic: the record's layout was measured on hipBLASLt
itself (a packed struct of 196 bytes), the reference is NumPy's.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
from standin_device import Device

from hipgroupgemm.native import GemmProblem, GroupedGemm, Handle

Array = npt.NDArray[Any]

RECORD = np.dtype(
    {
        "names": [
            *("m", "n", "batch", "k", "d", "c", "a", "b"),
            *("strideD1", "strideD2", "strideC1", "strideC2", "strideA1", "strideA2", "strideB1", "strideB2"),
            *("alpha", "beta", "scaleA", "scaleB", "scaleC", "scaleD", "scaleAlphaVec", "bias"),
            *("biasType", "reserved", "e", "strideE1", "strideE2", "act0", "act1", "activationType"),
        ],
        "formats": [
            *("<u4",) * 4,
            *("<u8",) * 4,
            *("<u4",) * 8,
            *("<f4",) * 2,  # the first of 16 raw bytes each
            *("<u8",) * 6,
            *("<i4", "<i4", "<u8", "<u4", "<u4", "<f4", "<f4", "<i4"),
        ],
        "offsets": [
            *(0, 4, 8, 12, 16, 24, 32, 40),
            *(48, 52, 56, 60, 64, 68, 72, 76),
            *(80, 96, 112, 120, 128, 136, 144, 152),
            *(160, 164, 168, 176, 180, 184, 188, 192),
        ],
        "itemsize": 196,
    }
)

BIAS_FLOAT32 = 0


def gemm_problem(m: int, n: int, k: int, count: int = 2, *, trans_a: bool = False, trans_b: bool = False, **changes: Any) -> GemmProblem:
    """Packed float16 matrices without a batch, n ragged, unless said otherwise."""
    leading = {"lda": k if trans_a else m, "ldb": n if trans_b else k, "ldc": m, "ldd": m}
    types = dict.fromkeys(("type_a", "type_b", "type_c", "type_d"), "float16")
    return GemmProblem(count=count, m=m, n=n, k=k, trans_a=trans_a, trans_b=trans_b, **(types | leading | changes))


@dataclass
class Matrix:
    """A strided batch of column-major matrices on the device, with gaps, and its values on the host.

    Elements are at ``offset + row + column * leading + batch * stride`` behind ``address``.
    """

    device: Device
    values: Array  # (batch, rows, columns)
    dtype: np.dtype[Any]
    extra_rows: int = 0
    gap: int = 0
    address: int = 0
    leading: int = 0
    stride: int = 0

    def __post_init__(self) -> None:
        _, rows, columns = self.values.shape
        self.leading = max(rows, 1) + self.extra_rows
        self.stride = self.leading * max(columns, 1) + self.gap
        self.address = self.device.upload(self._flat(self.values))

    @property
    def count(self) -> int:
        """Elements, gaps included."""
        return self.values.shape[0] * self.stride

    def _flat(self, values: Array) -> Array:
        batch, rows, columns = values.shape
        flat = np.full(self.count, np.nan, self.dtype)  # NaN in the gaps: nobody may read them
        for b in range(batch):
            for j in range(columns):
                start = b * self.stride + j * self.leading
                flat[start : start + rows] = values[b, :, j].astype(self.dtype)
        return flat

    def poison(self) -> None:
        """NaN everywhere: what is not written shows."""
        self.device.write(self.address, np.full(self.count, np.nan, self.dtype))

    def download(self) -> tuple[Array, Array]:
        """Values (batch, rows, columns) as float64, and the elements in the gaps."""
        batch, rows, columns = self.values.shape
        flat = self.device.read(self.address, self.count, self.dtype)
        inside = np.zeros(self.count, bool)
        values = np.empty((batch, rows, columns))
        for b in range(batch):
            for j in range(columns):
                start = b * self.stride + j * self.leading
                values[b, :, j] = flat[start : start + rows]
                inside[start : start + rows] = True
        return values, flat[~inside]


@dataclass
class Grouped:
    """A grouped GEMM with data: D = alpha op(A) op(B) + beta C + bias, group by group."""

    device: Device
    rng: np.random.Generator
    m: list[int]
    n: list[int]
    k: list[int]
    batch: list[int]
    trans_a: bool = False
    trans_b: bool = False
    output: str = "float16"
    alpha: float = 0.75
    beta: float = -0.5
    bias: bool = False
    a: list[Matrix] = field(default_factory=list)
    b: list[Matrix] = field(default_factory=list)
    c: list[Matrix] = field(default_factory=list)
    d: list[Matrix] = field(default_factory=list)
    bias_values: list[Array] = field(default_factory=list)
    bias_addresses: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        half, out = np.dtype(np.float16), np.dtype(self.output)
        for m, n, k, batch in zip(self.m, self.n, self.k, self.batch, strict=True):
            self.a.append(self._random((batch, k, m) if self.trans_a else (batch, m, k), half))
            self.b.append(self._random((batch, n, k) if self.trans_b else (batch, k, n), half))
            self.c.append(self._random((batch, m, n), out))
            self.d.append(self._random((batch, m, n), out))
            self.bias_values.append(self.rng.standard_normal(m).astype(np.float32))
            self.bias_addresses.append(self.device.upload(self.bias_values[-1]))

    def _random(self, shape: tuple[int, int, int], dtype: np.dtype[Any]) -> Matrix:
        values = self.rng.standard_normal(shape).astype(dtype).astype(np.float64)
        extra, gap = (int(x) for x in self.rng.integers(0, 9, 2))
        return Matrix(self.device, values, dtype, extra, gap)

    def free(self) -> None:
        for matrix in [*self.a, *self.b, *self.c, *self.d]:
            self.device.free(matrix.address)
        for address in self.bias_addresses:
            self.device.free(address)

    def instance(self, handle: Handle, capacity: int | None = None) -> GroupedGemm:
        """A grouped GEMM for this problem. `capacity` is the ragged size's: n, but k with a transposed B.

        (The real library has no kernel with a transposed B that takes n = 1.)
        """
        ragged = "k" if self.trans_b else "n"
        sizes = {"m": max(self.m), "n": max(self.n), "k": max(self.k)}
        sizes[ragged] = sum(getattr(self, ragged)) if capacity is None else capacity
        strides = dict.fromkeys(("stride_a", "stride_b", "stride_c", "stride_d"), 1 << 20)
        problem = gemm_problem(
            **sizes,
            count=len(self.m),
            ragged=ragged,
            trans_a=self.trans_a,
            trans_b=self.trans_b,
            type_c=self.output,
            type_d=self.output,
            bias_type="float32" if self.bias else None,
            batch=max(self.batch),
            alpha=self.alpha,
            beta=self.beta,
            **strides,
        )
        return GroupedGemm(handle, problem)

    def records(self) -> Array:
        """One record a group, from the layout alone."""
        records = np.zeros(len(self.m), RECORD)
        for name in ("m", "n", "k", "batch"):
            records[name] = getattr(self, name)
        for letter in "abcd":
            matrices: list[Matrix] = getattr(self, letter)
            records[letter] = [matrix.address for matrix in matrices]
            records[f"stride{letter.upper()}1"] = [matrix.leading for matrix in matrices]
            records[f"stride{letter.upper()}2"] = [matrix.stride for matrix in matrices]
        records["alpha"] = self.alpha
        records["beta"] = self.beta
        if self.bias:
            records["bias"] = self.bias_addresses
            records["biasType"] = BIAS_FLOAT32
        return records

    def run(self, gemm: GroupedGemm, records: Array | None = None, stream: int = 0) -> None:
        """Poison the output, upload the records, run, and wait."""
        for matrix in self.d:
            matrix.poison()
        data = self.records() if records is None else records
        address = self.device.upload(data)
        try:
            gemm.run(address, stream)
        finally:
            self.device.free(address)

    def reference(self, group: int) -> tuple[Array, Array]:
        """The exact result and a bound of its error, both (batch, m, n).

        The bound: a float32 sum of k products is off by at most (k + 2) eps32 times the sum of the magnitudes
        (Higham, Accuracy and Stability, 3.1); then the result is rounded to the output's type.
        """
        a, b = self.a[group].values, self.b[group].values
        a = a.transpose(0, 2, 1) if self.trans_a else a
        b = b.transpose(0, 2, 1) if self.trans_b else b
        exact = self.alpha * (a @ b)
        magnitude = abs(self.alpha) * (np.abs(a) @ np.abs(b))
        if self.beta:
            exact = exact + self.beta * self.c[group].values
            magnitude = magnitude + np.abs(self.beta * self.c[group].values)
        if self.bias:
            column = self.bias_values[group].astype(np.float64)[None, :, None]
            exact, magnitude = exact + column, magnitude + np.abs(column)
        out = np.finfo(np.dtype(self.output))
        accumulation = (self.k[group] + 4) * np.finfo(np.float32).eps * magnitude
        rounding = float(out.eps) / 2 * (np.abs(exact) + accumulation) + float(out.smallest_subnormal)
        return exact, accumulation + rounding

    def errors(self) -> list[str]:
        """What is wrong with the output; empty if nothing is. Gaps must still hold their poison."""
        found = []
        for group, matrix in enumerate(self.d):
            values, gaps = matrix.download()
            exact, bound = self.reference(group)
            wrong = ~(np.abs(values - exact) <= bound)  # NaN is wrong too
            if wrong.any():
                where = tuple(int(i[0]) for i in np.nonzero(wrong))
                found.append(
                    f"group {group}: {int(wrong.sum())} of {wrong.size} wrong, first at {where}: "
                    f"{values[where]}, "
                    f"wanted {exact[where]} within {bound[where]}"
                )
            if not np.isnan(gaps).all():
                found.append(f"group {group}: written between columns")
        return found
