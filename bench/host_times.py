"""Host time of one call on a CUDA device, ours beside `torch._grouped_mm`, in one process, interleaved.

Prints the median in microseconds for CuPy arrays and torch tensors, with out= and without, for the very same operands in every call and
for operands at other addresses in every call. The device is left behind: calls are only launched, and waited for now and then.

    python bench/host_times.py [--calls N] [--csv FILE]
"""

from __future__ import annotations

import argparse
import csv
import itertools
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import hipgroupgemm as hgg

M, K, N, E = 256, 256, 256, 8
SETS = 16


def calls(rows: list[tuple[str, str, Callable[[], Any]]], count: int, synchronize: Callable[[], Any]) -> Iterator[tuple[str, str, float]]:
    """(what, operands, microseconds) of each row, the rows taking turns."""
    times: list[list[int]] = [[] for _ in rows]
    for turn in range(count):
        for (_, _, call), taken in zip(rows, times, strict=True):
            for _ in range(8):
                began = time.perf_counter_ns()
                call()
                taken.append(time.perf_counter_ns() - began)
            if turn % 4 == 0:
                synchronize()
    for (what, operands, _), taken in zip(rows, times, strict=True):
        yield what, operands, statistics.median(taken[len(taken) // 8 :]) / 1000


def main() -> None:
    """Measures, prints a table and writes it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--calls", type=int, default=400)
    parser.add_argument("--csv")
    options = parser.parse_args()
    import cupy
    import torch

    rows: list[tuple[str, str, Callable[[], Any]]] = []
    kept = []
    sizes = [M // E] * E

    def make(library: Any, dtype: Any, **where: Any) -> list[tuple[Any, ...]]:
        sets = []
        for _ in range(SETS):
            tokens, weights, out = (library.ones(shape, dtype=dtype, **where) for shape in ((M, K), (E, K, N), (M, N)))
            counts = library.asarray(sizes, dtype=library.int32, **where)
            sets.append((tokens, weights, counts, out))
        return sets

    for name, sets in (("cupy", make(cupy, cupy.float16)), ("torch", make(torch, torch.bfloat16, device="cuda"))):
        plan = hgg.GroupedMatmulPlan(hgg.config_for_ragged_dot(*sets[0][:3]), use_store=False)
        kept.append(plan)
        for operands, chosen in (("same", sets[:1]), ("other", sets)):
            for door, function, given in (
                ("plan.execute(out=)", plan.execute, True),
                ("ragged_dot(out=)", hgg.ragged_dot, True),
                ("ragged_dot", hgg.ragged_dot, False),
            ):
                turns = itertools.cycle(chosen)

                def call(function: Any = function, turns: Any = turns, given: bool = given) -> Any:
                    lhs, rhs, counts, out = next(turns)
                    return function(lhs, rhs, counts, out=out) if given else function(lhs, rhs, counts)

                rows.append((f"{name} {door}", operands, call))
        if name == "torch" and hasattr(torch, "_grouped_mm"):
            offsets = [counts.cumsum(0, dtype=torch.int32) for _, _, counts, _ in sets]
            for operands, chosen in (("same", 1), ("other", SETS)):
                turns = itertools.cycle([(a, b, o) for (a, b, _, _), o in zip(sets[:chosen], offsets[:chosen], strict=True)])

                def theirs(turns: Any = turns) -> Any:
                    lhs, rhs, offs = next(turns)
                    return torch._grouped_mm(lhs, rhs, offs=offs)

                rows.append(("torch._grouped_mm", operands, theirs))
    for _, _, call in rows:
        for _ in range(32):
            call()
    torch.cuda.synchronize()
    measured = list(calls(rows, options.calls, torch.cuda.synchronize))
    print(f"{torch.cuda.get_device_name()}, Python {sys.version.split()[0]}, torch {torch.__version__}, CuPy {cupy.__version__}")
    for what, operands, microseconds in measured:
        print(f"{what:26} {operands:6} {microseconds:7.1f} us")
    if options.csv:
        with open(options.csv, "w", newline="", encoding="utf-8") as file:
            csv.writer(file).writerows([("call", "operands", "median_us"), *measured])


if __name__ == "__main__":
    main()
