"""Every algorithm of the Triton backend in the cells of `peers.py`: what its table of defaults comes from.

Writes a CSV: dist, M, K, N, E, class, algorithm, ms, fraction, error.

    python bench/sweep.py --csv FILE [--dist zipf] [--shape 15360,6144,20480,32] [--only SUBSTRING] [--seconds N]
"""

from __future__ import annotations

import argparse
import csv
import gc
import math
import sys
import time
from pathlib import Path
from typing import Any

import peers

from hipgroupgemm.measure.harness import harness_for
from hipgroupgemm.measure.workloads import CLASSES

COLUMNS = ("dist", "M", "K", "N", "E", "class", "algorithm", "ms", "fraction", "error")


def compile_all(cells: list[Any], only: list[str]) -> None:
    """Compiles every algorithm that a cell may run, on all cores."""
    specs = []
    for _, shape, kind in cells:
        for candidate, spec in peers.specs_for(shape, kind, math.inf):
            if not only or any(part in candidate.name for part in only):
                specs.append(spec)
    peers.compile_ahead(specs)


def sweep_cell(dist: str, shape: Any, kind: str, harness: Any, options: Any) -> list[tuple[Any, ...]]:
    """(algorithm, ms, fraction, error) of all that are right, the quickest first."""
    from peer_calls import Cell

    cell = Cell(harness, dist, shape, CLASSES[kind], peers.sizes_of(dist, shape))
    floor, right = cell.floor_ms(peers.FLOPS, peers.BANDWIDTH), []

    def wanted(name: str) -> bool:
        return name.startswith("tma") and (not options.only or any(part in name for part in options.only))

    for one in cell.ours(wanted=wanted):
        if cell.check(one):
            right.append(one)
        else:
            one.executable.close()
            print(f"WRONG {dist} {shape.extents} {kind} {one.name}: {one.fault}", flush=True)
    cell.time(right, options.budget, 4, 9)
    for one in right:
        one.executable.close()
    cell.close()
    return sorted(((one.name, one.median, floor / one.median, one.error) for one in right), key=lambda row: row[1])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--csv", type=Path, required=True)
    parser.add_argument("--dist", action="append", choices=("balanced", "zipf", "decode"))
    parser.add_argument("--shape", action="append", help="M,K,N,E")
    parser.add_argument("--kind", action="append", help="a class, or the beginning of one")
    parser.add_argument("--only", action="append", default=[], help="part of an algorithm's name")
    parser.add_argument("--budget", type=float, default=6.0, help="ms of device time an algorithm")
    parser.add_argument("--seconds", type=float, default=math.inf, help="begin no cell after so many seconds")
    options = parser.parse_args()
    began = time.monotonic()
    cells = peers.problems(options.dist or [])
    if options.shape:
        wanted = {tuple(map(int, text.split(","))) for text in options.shape}
        cells = [cell for cell in cells if cell[1].extents in wanted]
    if options.kind:
        cells = [cell for cell in cells if cell[2].startswith(tuple(options.kind))]
    compile_all(cells, options.only)

    import torch

    options.csv.parent.mkdir(parents=True, exist_ok=True)
    with harness_for("cuda:0") as harness, options.csv.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(COLUMNS)
        for dist, shape, kind in cells:
            if time.monotonic() - began > options.seconds:
                print(f"# time is up at {dist} {shape.extents} {kind}", flush=True)
                break
            rows = sweep_cell(dist, shape, kind, harness, options)
            for name, ms, fraction, error in rows:
                writer.writerow((dist, *shape.extents, kind, name, f"{ms:.4f}", f"{fraction:.3f}", f"{error:.1e}"))
            file.flush()
            shown = ", ".join(f"{name[4:]} {fraction:.3f}" for name, _, fraction, _ in rows[:3])
            print(f"{dist} {'x'.join(map(str, shape.extents))} {kind}: {shown}", flush=True)
            gc.collect()
            torch.cuda.empty_cache()
    return 0


if __name__ == "__main__":
    sys.exit(main())
