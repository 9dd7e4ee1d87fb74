"""Every form of a ragged dot in torch: the call, fresh operands for it, and the same by a loop of torch's own products."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from hipgroupgemm import RaggedDotDimensionNumbers
from hipgroupgemm.integrations.torch import grouped_mm, ragged_dot, ragged_dot_general

Tensor = torch.Tensor
R, G, K, N = 17, 4, 5, 6  # the ragged extent, groups, and the other extents
SIZES = [5, 0, 3, 7]  # an empty group, and two rows that none covers
BATCH = 2


@dataclasses.dataclass(frozen=True)
class Form:
    """A call of the door.

    Attributes:
        shapes: of lhs, rhs and, where there is one, bias.
        call: takes them and the sizes, a tensor.
        loop: the same by its definition, the sizes a list.
    """

    name: str
    shapes: tuple[tuple[int, ...], ...]
    call: Callable[..., Tensor]
    loop: Callable[..., Tensor]

    def operands(self, seed: int, dtype: torch.dtype = torch.float64, device: str = "cpu", grad: bool = True) -> list[Tensor]:
        generator = torch.Generator().manual_seed(seed)
        made = [torch.randn(shape, generator=generator, dtype=torch.float64).to(device, dtype) for shape in self.shapes]
        return [tensor.requires_grad_() for tensor in made] if grad else made


def rows_of(sizes: Any, offset: int = 0, count: int | None = None) -> list[slice]:
    ends = np.cumsum(np.asarray(sizes))
    slices = [slice(int(end - size), int(end)) for size, end in zip(np.asarray(sizes), ends, strict=True)]
    return slices[offset : None if count is None else offset + count]


def by_rows(lhs: Tensor, rhs: Tensor, bias: Tensor | None, sizes: Any, offset: int = 0) -> Tensor:
    """lhs (m, k), rhs (g, k, n): out (m, n)."""
    rows = rows_of(sizes, offset, len(rhs))
    parts, at = [], 0
    for i, part in enumerate(rows):
        parts.append(torch.zeros(part.start - at, rhs.shape[2], dtype=lhs.dtype, device=lhs.device))
        product = lhs[part] @ rhs[i]
        parts.append(product if bias is None else product + bias[i])
        at = part.stop
    parts.append(torch.zeros(len(lhs) - at, rhs.shape[2], dtype=lhs.dtype, device=lhs.device))
    return torch.cat(parts)


def by_slabs(lhs: Tensor, rhs: Tensor, sizes: Any, offset: int = 0, count: int | None = None) -> Tensor:
    """lhs (R, m), rhs (R, n): out (g, m, n)."""
    return torch.stack([lhs[rows].mT @ rhs[rows] for rows in rows_of(sizes, offset, count)])


CONTRACTED = RaggedDotDimensionNumbers((((0,), (0,)), ((), ())), (0,), ())
BATCHED = RaggedDotDimensionNumbers((((2,), (2,)), ((0,), (1,))), (1,), (0,))
BATCHED_CONTRACTED = RaggedDotDimensionNumbers((((1,), (1,)), ((0,), (0,))), (1,), ())


def ends(sizes: Tensor) -> Tensor:
    return sizes.cumsum(0).int()


FORMS = [
    Form("ragged_dot", ((R, K), (G, K, N)), ragged_dot, lambda a, b, s: by_rows(a, b, None, s)),
    Form("bias", ((R, K), (G, K, N), (G, N)), lambda a, b, c, s: ragged_dot(a, b, s, bias=c), by_rows),
    Form("transposed", ((K, R), (G, N, K)), lambda a, b, s: ragged_dot(a.mT, b.mT, s), lambda a, b, s: by_rows(a.mT, b.mT, None, s)),
    Form(
        "group_offset",
        ((R, K), (2, K, N), (2, N)),
        lambda a, b, c, s: ragged_dot(a, b, s, bias=c, group_offset=1),
        lambda a, b, c, s: by_rows(a, b, c, s, 1),
    ),
    Form(
        "group_offset on the device",
        ((R, K), (2, K, N)),
        lambda a, b, s: ragged_dot(a, b, s, group_offset=torch.tensor([2], device=a.device)),
        lambda a, b, s: by_rows(a, b, None, s, 2),
    ),
    Form("2D x 3D", ((R, K), (G, K, N), (G, N)), lambda a, b, c, s: grouped_mm(a, b, ends(s), c), by_rows),
    Form("3D x 2D", ((G, N, K), (K, R)), lambda a, b, s: grouped_mm(a, b, ends(s)), lambda a, b, s: by_rows(b.mT, a.mT, None, s).mT),
    Form(
        "2D x 2D",
        ((K, R), (R, N), (G, N)),
        lambda a, b, c, s: grouped_mm(a, b, ends(s), c),
        lambda a, b, c, s: by_slabs(a.mT, b, s) + c[:, None],
    ),
    Form("2D x 2D transposed", ((R, K), (N, R)), lambda a, b, s: grouped_mm(a.mT, b.mT, ends(s)), lambda a, b, s: by_slabs(a, b.mT, s)),
    Form("3D x 3D", ((G, R, K), (G, K, N)), lambda a, b, s: grouped_mm(a, b), lambda a, b, s: a @ b),
    Form(
        "3D x 3D bias",
        ((G, K, R), (G, N, K), (G, N)),
        lambda a, b, c, s: grouped_mm(a.mT, b.mT, None, c),
        lambda a, b, c, s: a.mT @ b.mT + c[:, None],
    ),
    Form(
        "contracted, some groups",
        ((R, K), (R, N)),
        lambda a, b, s: ragged_dot_general(a, b, s, CONTRACTED, group_offset=1, group_count=2),
        lambda a, b, s: by_slabs(a, b, s, 1, 2),
    ),
    Form(
        "batch",
        ((BATCH, R, K), (G, BATCH, K, N), (G, N)),
        lambda a, b, c, s: ragged_dot_general(a, b, torch.stack([s, s.flip(0)]), BATCHED, bias=c),
        lambda a, b, c, s: torch.stack([by_rows(a[0], b[:, 0], c, s), by_rows(a[1], b[:, 1], c, s[::-1])]),
    ),
    Form(
        "batch, contracted",
        ((BATCH, R, K), (BATCH, R, N)),
        lambda a, b, s: ragged_dot_general(a, b, s, BATCHED_CONTRACTED),
        lambda a, b, s: torch.stack([by_slabs(a[0], b[0], s), by_slabs(a[1], b[1], s)], 1),
    ),
]
NAMES = [form.name for form in FORMS]


def sizes_on(device: str = "cpu", sizes: list[int] = SIZES) -> Tensor:
    return torch.tensor(sizes, device=device)
