"""The Triton backend beside other grouped GEMMs on one NVIDIA GPU: balanced, skewed and decode shapes, in one process, interleaved.

Prints floor, time, fraction of the floor, ratio to the best peer and error of every cell; writes a CSV and two plots. The floor of a
cell is max(2 M K N / FLOPS, least bytes / BANDWIDTH), rates measured on one H200 (see NOTES.md). Operands, checks and times are those of
the product's own harness and timer: medians of device time by events around each call, the caches read empty before each; contenders
take turns, so that drift hits all alike. Calls whose host time is longer than that reading are charged for it: JAX, tokamax and the loop.

    python bench/peers.py [--csv FILE] [--plots DIRECTORY] [--seconds N] [--dist balanced] [--peer torch_grouped_mm]
        [--shape M,K,N,E]
"""

from __future__ import annotations

import argparse
import csv
import dataclasses
import datetime
import gc
import importlib.metadata
import math
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

from hipgroupgemm.measure.distributions import group_sizes_of
from hipgroupgemm.measure.harness import harness_for
from hipgroupgemm.measure.timer import leader_of
from hipgroupgemm.measure.workloads import CLASSES, SUITES, MoEShape, config_of, geometric_mean

FLOPS, BANDWIDTH = 788e12, 4.29e12
SKEWED = ((6400, 2048, 512, 512), (10240, 2048, 768, 128), (10240, 2880, 2880, 128), (20480, 4096, 1536, 128), (15360, 6144, 20480, 32))
DECODE = ((256, 2048, 768, 128), (1024, 7168, 2048, 256))
COLUMNS = ("dist", "M", "K", "N", "E", "class", "peer", "ms", "floor_ms", "fraction", "error")
PEERS = ("torch_grouped_mm", "loop_cublas", "bmm_dense", "padded_batch", "jax", "quack", "tokamax")
NO_PEERS = ("bmm_dense", "padded_batch")  # not ragged, so they count as no peer
DEFAULT, BEST = "hipgroupgemm-default", "hipgroupgemm-best"
LOST = 1.01  # a peer has to be more than this much faster
SHORTLIST = 9


def problems(wanted: list[str]) -> list[tuple[str, MoEShape, str]]:
    """(distribution, shape, class) of all cells, cheap ones first."""
    shapes = sorted(SUITES["table12"], key=lambda s: s.m * s.k * s.n)
    cells = [("balanced", shape, name) for shape in shapes for name in CLASSES]
    cells += [("zipf", MoEShape(*extents), name) for extents in SKEWED for name in CLASSES]
    cells += [("decode", MoEShape(*extents), name) for extents in DECODE for name in CLASSES]
    order = {name: i for i, name in enumerate(("decode", "zipf", "balanced"))}
    return sorted((cell for cell in cells if not wanted or cell[0] in wanted), key=lambda cell: order[cell[0]])


def sizes_of(dist: str, shape: MoEShape) -> np.ndarray[Any, Any]:
    """Group sizes; decoding: tokens pick experts at random."""
    if dist == "decode":
        return np.random.default_rng(0).multinomial(shape.m, np.full(shape.e, 1 / shape.e)).astype(np.int32)
    return group_sizes_of(dist, shape)


# ---- compiling ahead, on all cores ---------------------------------------------------------------------------------------------


def specs_for(shape: MoEShape, kind: str, most: float = SHORTLIST) -> list[tuple[Any, Any]]:
    """(algorithm, what it compiles to) of a cell, the best guess first."""
    from hipgroupgemm.backends import get_backend
    from hipgroupgemm.backends.triton.defaults import ordered
    from hipgroupgemm.backends.triton.specs import spec_of
    from hipgroupgemm.operands.views import Device

    properties = get_backend("triton").properties(Device("cuda", 0))
    key = config_of(CLASSES[kind], shape, "bfloat16").key()
    found = [kernel for place, (_, kernel) in enumerate(ordered(key, properties)) if place < most]
    return [(kernel, spec_of(kernel, key, properties)) for kernel in found]


def compile_ahead(specs: list[Any]) -> None:
    """Fills the compile cache on all cores; what is left is compiled, or refused, where it is used."""
    from hipgroupgemm.backends.triton.ahead import compile_ahead as compile_on_all_cores
    from hipgroupgemm.backends.triton.compiler import is_compiled

    specs = list(dict.fromkeys(specs))
    began = time.perf_counter()
    compile_on_all_cores(specs)
    left = sum(not is_compiled(spec) for spec in specs)
    print(f"compiled {len(specs)} kernels in {time.perf_counter() - began:.1f} s, {left} left", flush=True)


@dataclasses.dataclass
class Row:
    """One contender in one cell."""

    dist: str
    shape: MoEShape
    kind: str
    peer: str
    ms: float
    floor_ms: float
    error: float
    algorithm: str = ""
    fault: str = ""

    @property
    def fraction(self) -> float:
        """Of the floor."""
        return self.floor_ms / self.ms

    def cells(self) -> list[str]:
        """As in the CSV."""
        where = [self.dist, *(str(extent) for extent in self.shape.extents), self.kind, self.peer]
        return [*where, f"{self.ms:.4f}", f"{self.floor_ms:.4f}", f"{self.fraction:.3f}", f"{self.error:.1e}"]


def run_cell(dist: str, shape: MoEShape, kind: str, harness: Any, peers: tuple[str, ...]) -> list[Row]:
    """All contenders of a cell."""
    import torch
    from peer_calls import Cell, peers_of

    cell = Cell(harness, dist, shape, CLASSES[kind], sizes_of(dist, shape))
    floor, ours = cell.floor_ms(FLOPS, BANDWIDTH), list(cell.ours(SHORTLIST))
    try:
        right = [contender for contender in ours if cell.check(contender)]
        for contender in ours:
            if contender.fault:
                print(f"WRONG {dist} {shape.extents} {kind} {contender.name}: {contender.fault}", flush=True)
        if not right:
            raise RuntimeError(f"{dist} {shape.extents} {kind}: no algorithm of this package is right")
        cell.time(right, 8.0, 4, 12)
        best = leader_of(right)
        found = [(DEFAULT, right[0]), (BEST, best)]
        for peer in peers_of(cell, peers):
            try:
                cell.check(peer)
                if peer.fault:
                    print(f"# WRONG {peer.name} {dist} {shape.extents} {kind}: {peer.fault}", flush=True)
                found.append((peer.name, peer))
            except Exception as failed:  # a peer's own business
                print(f"# {peer.name} {dist} {shape.extents} {kind}: {type(failed).__name__}: {str(failed)[:120]}", flush=True)
                torch.cuda.empty_cache()
        timed = list(dict.fromkeys(contender for _, contender in found))  # the default may be the best
        for contender in timed:
            contender.times.clear()
        cell.time(timed, 15.0, 5, 30)
        rows = [Row(dist, shape, kind, name, one.median, floor, one.error, one.algorithm, one.fault) for name, one in found]
        if rows[0].ms < rows[1].ms:  # by chance: the default is one of those that best is the best of
            rows[1] = dataclasses.replace(rows[0], peer=BEST)
        return rows
    finally:
        for contender in ours:
            contender.executable.close()
        cell.close()


# ---- what comes out ------------------------------------------------------------------------------------------------------------


def rivals(rows: list[Row]) -> dict[tuple[Any, ...], Row]:
    """The fastest right peer of each cell."""
    best: dict[tuple[Any, ...], Row] = {}
    for row in rows:
        if row.peer not in (DEFAULT, BEST, *NO_PEERS) and not row.fault:
            key = (row.dist, row.shape.extents, row.kind)
            if key not in best or row.ms < best[key].ms:
                best[key] = row
    return best


def summary(rows: list[Row]) -> None:
    """Geometric means by distribution, class and contender, and the cells lost."""
    best = rivals(rows)
    for dist in dict.fromkeys(row.dist for row in rows):
        print(f"\n{dist}: geometric mean of the fraction of the floor (cells)")
        names = list(dict.fromkeys(row.peer for row in rows if row.dist == dist))
        for name in names:
            mine = [row for row in rows if row.dist == dist and row.peer == name]
            parts = [f"{geometric_mean([row.fraction for row in mine]):.3f} ({len(mine)})"]
            for prefix in ("fwd", "dgrad", "wgrad"):
                parts.append(f"{prefix} {geometric_mean([row.fraction for row in mine if row.kind.startswith(prefix)]):.3f}")
            print(f"  {name:22s} {'  '.join(parts)}")
        for name in (DEFAULT, BEST):
            lost = []
            for row in rows:
                rival = best.get((row.dist, row.shape.extents, row.kind))
                if row.dist == dist and row.peer == name and rival is not None and row.ms > LOST * rival.ms:
                    lost.append(f"{row.shape.extents} {row.kind}: {rival.peer} {row.ms / rival.ms:.2f}x")
            print(f"  cells where a peer is more than 1 % faster than {name}: {len(lost)}", *lost, sep="\n    ")


def plot(rows: list[Row], dist: str, path: Path, note: str) -> None:
    """Fractions of the floor by cell: ours and the best peer."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    best = rivals(rows)
    mine = [row for row in rows if row.dist == dist and row.peer == BEST]
    default = {(row.shape.extents, row.kind): row.fraction for row in rows if row.dist == dist and row.peer == DEFAULT}
    figure, axes = plt.subplots(3, 1, figsize=(12, 10), sharey=True, layout="constrained")
    for axis, prefix in zip(axes, ("fwd", "dgrad", "wgrad"), strict=True):
        part = [row for row in mine if row.kind.startswith(prefix)]
        at = np.arange(len(part))
        axis.bar(at - 0.27, [default[row.shape.extents, row.kind] for row in part], 0.27, label="default")
        axis.bar(at, [row.fraction for row in part], 0.27, label="best candidate")
        peers = [best.get((dist, row.shape.extents, row.kind)) for row in part]
        axis.bar(at + 0.27, [peer.fraction if peer else 0 for peer in peers], 0.27, label="best peer")
        axis.set_xticks(at, [f"{'x'.join(map(str, row.shape.extents))}\n{row.kind}" for row in part], rotation=60, ha="right", fontsize=6)
        axis.set_ylabel("fraction of the floor")
        axis.axhline(1, color="grey", lw=0.5)
    handles, labels = axes[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside upper center", ncols=3, frameon=False)  # over no bar
    axes[0].set_title(f"{dist} group sizes, bf16. {note}", fontsize=9)
    figure.savefig(path, dpi=120)
    plt.close(figure)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    results = Path(__file__).resolve().parent / "results"
    parser.add_argument("--csv", type=Path, default=results / "h200_peers.csv")
    parser.add_argument("--plots", type=Path, help="directory of the plots (default: the CSV's)")
    parser.add_argument("--seconds", type=float, default=math.inf, help="begin no cell after so many seconds")
    parser.add_argument("--dist", action="append", choices=("balanced", "zipf", "decode"))
    parser.add_argument("--peer", action="append", choices=PEERS)
    parser.add_argument("--shape", action="append", help="M,K,N,E: these shapes only")
    options = parser.parse_args()
    began = time.monotonic()
    cells = problems(options.dist or [])
    if options.shape:
        wanted = {tuple(map(int, text.split(","))) for text in options.shape}
        cells = [cell for cell in cells if cell[1].extents in wanted]
    compile_ahead([spec for _, shape, kind in cells for _, spec in specs_for(shape, kind)])

    import torch

    names = ("torch", "triton", "jax", "quack-kernels", "tokamax")
    versions = [f"{name} {importlib.metadata.version(name)}" for name in names if _installed(name)]
    note = f"{torch.cuda.get_device_name()}, {datetime.date.today()}, {', '.join(versions)}"
    print(note, flush=True)
    options.csv.parent.mkdir(parents=True, exist_ok=True)
    rows: list[Row] = []
    with harness_for("cuda:0") as harness, options.csv.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(COLUMNS)
        for dist, shape, kind in cells:
            if time.monotonic() - began > options.seconds:
                print(f"# time is up at {dist} {shape.extents} {kind}", flush=True)
                break
            found = run_cell(dist, shape, kind, harness, tuple(options.peer or PEERS))
            writer.writerows(row.cells() for row in found)
            file.flush()
            rows += found
            rival = rivals(found).get((dist, shape.extents, kind))
            ratio = f"{rival.ms / found[1].ms:.2f}x of {rival.peer}" if rival else "no peer"
            print(
                f"{dist} {'x'.join(map(str, shape.extents))} {kind}: floor {found[0].floor_ms:.4f} ms, default {found[0].fraction:.3f}, "
                f"best {found[1].fraction:.3f} ({found[1].algorithm}), {ratio}, error {max(row.error for row in found[:2]):.1e}",
                flush=True,
            )
            gc.collect()
            torch.cuda.empty_cache()
    summary(rows)
    if _installed("matplotlib"):
        folder = options.plots or options.csv.parent
        for dist in ("balanced", "zipf"):
            if any(row.dist == dist for row in rows):
                plot(rows, dist, folder / f"h200_{dist}.png", note)
    return 0


def _installed(name: str) -> bool:
    try:
        importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return False
    return True


if __name__ == "__main__":
    sys.exit(main())
