"""Host time of one call through the door into torch, beside the plain function and `torch._grouped_mm`, in one process, interleaved.

Prints the median in microseconds: forward without gradients, forward that is recorded, and forward with backward. The device is left
behind: calls are only launched, and waited for now and then. Every call has operands at other addresses.

    python bench/torch_door.py [--calls N] [--csv FILE]
"""

from __future__ import annotations

import argparse
import csv
import itertools
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from host_times import SETS, E, K, M, N, calls

import hipgroupgemm as hgg
from hipgroupgemm.integrations.torch import grouped_mm, ragged_dot


def _each(function: Callable[..., Any], sets: list[tuple[Any, ...]]) -> Callable[[], Any]:
    """A call of the function with the next operands each time."""
    turns = itertools.cycle(sets)
    return lambda: function(*next(turns))


def main() -> None:
    """Measures, prints a table and writes it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--calls", type=int, default=400)
    parser.add_argument("--csv", default=str(Path(os.environ.get("OUT", ".")) / "torch_door.csv"))
    options = parser.parse_args()
    where: dict[str, Any] = {"device": "cuda", "dtype": torch.bfloat16}
    plain, recorded = [], []
    for _ in range(SETS):
        sizes = torch.full((E,), M // E, device="cuda", dtype=torch.int32)
        operands = torch.ones(M, K, **where), torch.ones(E, K, N, **where), sizes, sizes.cumsum(0, dtype=torch.int32)
        plain.append(operands)
        recorded.append((*(tensor.clone().requires_grad_() for tensor in operands[:2]), *operands[2:]))
    gradient = torch.ones(M, N, **where)
    op = torch.ops.hipgroupgemm.ragged_dot.default
    doors: list[tuple[str, Callable[..., Any], bool]] = [
        ("torch._grouped_mm", lambda a, b, _, ends: torch._grouped_mm(a, b, offs=ends), True),
        ("hipgroupgemm.ragged_dot", lambda a, b, sizes, _: hgg.ragged_dot(a, b, sizes), False),
        ("door's ragged_dot", lambda a, b, sizes, _: ragged_dot(a, b, sizes), True),
        ("door's grouped_mm", lambda a, b, _, ends: grouped_mm(a, b, ends), True),
        ("torch.ops.hipgroupgemm", lambda a, b, sizes, _: op(a, b, sizes), True),
    ]
    rows: list[tuple[str, str, Callable[[], Any]]] = []
    for name, function, differentiable in doors:
        rows.append((name, "forward", _each(function, plain)))
        if differentiable:
            rows.append((name, "recorded", _each(function, recorded)))

            def both(a: Any, b: Any, *sizes: Any, function: Callable[..., Any] = function) -> Any:
                return torch.autograd.grad(function(a, b, *sizes), (a, b), gradient)

            rows.append((name, "forward + backward", _each(both, recorded)))
    for _, _, call in rows:
        for _ in range(32):
            call()
    torch.cuda.synchronize()
    measured = list(calls(rows, options.calls, torch.cuda.synchronize))
    theirs = {what: microseconds for name, what, microseconds in measured if name == "torch._grouped_mm"}
    print(f"{torch.cuda.get_device_name()}, Python {sys.version.split()[0]}, torch {torch.__version__}, hipgroupgemm {hgg.__version__}")
    table = [(name, what, microseconds, microseconds / theirs[what]) for name, what, microseconds in measured]
    for name, what, microseconds, ratio in table:
        print(f"{name:24} {what:20} {microseconds:7.1f} us  {ratio:5.2f} x torch._grouped_mm")
    with open(options.csv, "w", newline="", encoding="utf-8") as file:
        csv.writer(file).writerows([("call", "what", "median_us", "ratio"), *table])


if __name__ == "__main__":
    main()
