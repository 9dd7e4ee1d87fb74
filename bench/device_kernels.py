"""Checks and times the device kernels on an NVIDIA GPU.

    python bench/device_kernels.py                     check 10,000 random cases, then time
    python bench/device_kernels.py --check 10000 --processes 8 --out DIR
    compute-sanitizer --tool memcheck python bench/device_kernels.py --check 200 --no-time

The check is the host build's (tests/device_host): the same random cases, the same independent model, every
byte of the arena compared. Times are device times: a CUDA graph of equal launches, one behind the other, is
replayed between two events; a launch's time is the replay's over the number of launches, its median over
replays, and next to it stands what it takes beyond an empty kernel measured in the same way. All data are in
the L2 cache, as they are behind a router. Writes device_kernels.csv.
"""

from __future__ import annotations

import argparse
import csv
import multiprocessing
import platform
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tests"))

from device_host import layout as L  # noqa: E402
from device_host.build import DEVICE  # noqa: E402
from device_host.check import Drawn, differences, draw, launches  # noqa: E402
from device_host.gpu import CudaBuild, inlined  # noqa: E402

DRAW = 500
LAUNCHES = 100  # in one graph
REPLAYS = 30
GROUPS = (8, 128, 512, 2048)
COLUMNS = ("kernel", "variant", "groups", "blocks", "us", "beyond_empty_us", "GB/s")
EMPTY = """
extern "C" __global__ void empty_kernel() {}
extern "C" __global__ void empty_with_arguments(const __grid_constant__ hgg_arguments arguments) {}
"""


def drawn_cases(count: int, processes: int) -> list[Drawn]:
    """Random cases in arenas; drawn by several processes, which must be started before CUDA is."""
    seeds = [(seed, min(DRAW, count - seed * DRAW)) for seed in range(-(-count // DRAW))]
    if processes < 2 or len(seeds) < 2:
        return [draw(*seed) for seed in seeds]
    with multiprocessing.get_context("fork").Pool(processes) as pool:
        return pool.starmap(draw, seeds, chunksize=1)


def check(gpu: CudaBuild, drawn: list[Drawn]) -> tuple[int, int, list[str]]:
    """Cases, launches and what is wrong."""
    cases, launched, wrong = 0, 0, []
    for one in drawn:
        arena = gpu.arena(one.before)
        work = launches(one, gpu.address(arena))
        gpu.run(*work)
        wrong += differences(one, gpu.read(arena))
        cases += len(one.cases)
        launched += len(work[0])
    return cases, launched, wrong


class Timer:
    """Median device time of one launch among many equal ones in a graph."""

    def __init__(self, gpu: CudaBuild) -> None:
        self.cupy = gpu.cupy
        self.stream = self.cupy.cuda.Stream(non_blocking=True)

    def __call__(self, launch: Callable[[], None], count: int = LAUNCHES, replays: int = REPLAYS) -> float:
        """Microseconds."""
        cuda = self.cupy.cuda
        cuda.Device().synchronize()
        with self.stream:
            launch()
            self.stream.synchronize()
            self.stream.begin_capture()
            for _ in range(count):
                launch()
            graph = self.stream.end_capture()
            for _ in range(3):
                graph.launch(self.stream)
            times = []
            for _ in range(replays):
                first, last = cuda.Event(), cuda.Event()
                first.record(self.stream)
                graph.launch(self.stream)
                last.record(self.stream)
                last.synchronize()
                times.append(1000 * cuda.get_elapsed_time(first, last) / count)
        return float(np.median(times))


def arguments_for(cupy: Any, groups: int, rows: int, block_rows: int, keep: list[Any]) -> np.ndarray:
    """NON_CONTRACTING records for int32 sizes that sum to ``rows``, with every output of fill and scan."""
    rng = np.random.default_rng(groups)
    cuts = np.sort(rng.integers(0, rows + 1, groups - 1))
    sizes = cupy.asarray(np.diff(np.concatenate([[0], cuts, [rows]])).astype(np.int32))
    a = np.zeros(1, L.ARGUMENTS)
    capacity = rows // block_rows + groups
    outputs = {"starts": 8 * groups, "ends": 8 * groups, "covered_range": 16, "fault": 32, "records": 196 * groups}
    outputs |= {"tiles": 16 * capacity, "tile_count": 4}
    a["sizes"], a["sizes_stride"], a["sizes_type"] = sizes.data.ptr, 4, L.INTEGERS["i4"]
    a["sizes_kind"], a["ragged_extent"], a["batch_count"] = L.SIZES_COUNTS, rows, 1
    a["group_count"] = a["group_total"] = a["record_count"] = groups
    a["block_rows"], a["tile_capacity"], a["flags"] = block_rows, capacity, L.OVERRIDE_ALPHA | L.OVERRIDE_BETA
    keep.append(sizes)
    for name, count in outputs.items():
        memory = cupy.zeros(count, cupy.uint8)
        keep.append(memory)
        a[name] = memory.data.ptr
    for name in ("a", "b", "c", "d"):
        a[name] = (1 << 40, 8192, 1 << 26, 0)
    return a


Row = dict[str, Any]


def row(kernel: str, variant: str, groups: int | None, blocks: int, took: float, empty: float) -> Row:
    named = {
        "kernel": kernel,
        "variant": variant,
        "groups": "" if groups is None else groups,
        "blocks": blocks,
    }
    return named | {"us": took, "beyond_empty_us": took - empty}


def fill_grid(places: int, share: int = 32) -> int:
    return min(max(1, -(-places // share)), 256)


def tile_grid(capacity: int) -> int:
    return min(max(1, -(-capacity // 1024)), 32)


def time_fill(gpu: CudaBuild, timer: Timer, empty: float, label: str, share: int = 32, threads: int = 256) -> list[Row]:
    rows = []
    for groups in GROUPS:
        keep: list[Any] = []
        a = arguments_for(gpu.cupy, groups, 8192, 64, keep)
        grid = fill_grid(groups, share)
        took = timer(partial(gpu.launch, "hgg_fill", a, grid, threads))
        rows.append(row("hgg_fill", label, groups, grid, took, empty))
    return rows


def time_scan(gpu: CudaBuild, timer: Timer, empty: float) -> list[Row]:
    rows = []
    for groups in GROUPS:
        keep: list[Any] = []
        tiled = arguments_for(gpu.cupy, groups, 65536, 64, keep)
        plain = tiled.copy()
        plain["tiles"] = plain["tile_count"] = 0
        grids = (fill_grid(groups), tile_grid(int(tiled["tile_capacity"][0])))
        for label, a, grid in zip(("rows", "rows and tiles"), (plain, tiled), grids, strict=True):
            took = timer(partial(gpu.launch, "hgg_scan", a, grid))
            rows.append(row("hgg_scan", label, groups, grid, took, empty))
    return rows


def time_zero_uncovered(gpu: CudaBuild, timer: Timer, empty: float) -> list[Row]:
    """Nothing to do; then 1 GiB of bf16 rows that nothing covers, written as zeros and as beta * c."""
    cupy = gpu.cupy
    rows, columns = 131072, 4096
    out, c = cupy.zeros((2, rows, columns), cupy.uint16)
    c[...] = cupy.arange(columns, dtype=cupy.uint16) + 0x3F00  # bf16 numbers between 0.5 and 2^32
    covered_range = cupy.zeros(2, cupy.int64)
    a = np.zeros(1, L.ARGUMENTS)
    a["covered_range"], a["ragged_extent"], a["batch_count"], a["out_batch_count"] = covered_range.data.ptr, rows, 1, 1
    a["out_columns"], a["out_type"], a["c_type"] = columns, L.FLOATS["bfloat16"], L.FLOATS["bfloat16"]
    a["out"] = (out.data.ptr, 2 * columns, 2, 0, 0)
    a["c_matrix"] = (c.data.ptr, 2 * columns, 2, 0, 0)
    result = []
    for label, covered, beta, count in (
        ("nothing to do", rows, 0.0, LAUNCHES),
        ("1 GiB of zeros", 0, 0.0, 5),
        ("1 GiB of beta * c", 0, 0.5, 5),
    ):
        covered_range[1] = covered
        a["beta"] = np.void(np.float32(beta).tobytes().ljust(16, b"\0"))
        for grid in (multiprocessors(gpu), 2 * multiprocessors(gpu), 8 * multiprocessors(gpu)):
            took = timer(partial(gpu.launch, "hgg_zero_uncovered", a, grid), count, 10)
            moved = 2 * (rows - covered) * columns * (2 if beta else 1)
            result.append(row("hgg_zero_uncovered", label, None, grid, took, empty) | {"GB/s": moved / took / 1000})
    return result


def time_slabs(gpu: CudaBuild, timer: Timer, empty: float) -> list[Row]:
    """CONTRACTING without an empty group: hgg_zero_uncovered looks at every group and returns."""
    result = []
    cupy = gpu.cupy
    grid = 2 * multiprocessors(gpu)
    for groups in GROUPS:
        starts, ends = cupy.arange(groups, dtype=cupy.int64), cupy.arange(1, groups + 1, dtype=cupy.int64)
        a = np.zeros(1, L.ARGUMENTS)
        a["mode"], a["group_count"], a["group_total"], a["batch_count"] = L.RAGGED_K, groups, groups, 1
        a["starts"], a["ends"] = starts.data.ptr, ends.data.ptr
        a["out_batch_count"], a["out_rows"], a["out_columns"] = 1, 64, 64
        took = timer(partial(gpu.launch, "hgg_zero_uncovered", a, grid))
        result.append(row("hgg_zero_uncovered", "no empty slab", groups, grid, took, empty))
    return result


def multiprocessors(gpu: CudaBuild) -> int:
    return int(gpu.cupy.cuda.runtime.getDeviceProperties(0)["multiProcessorCount"])


def show(rows: list[Row]) -> None:
    widths = dict(zip(COLUMNS, (10, 26, 6, 6, 9, 15, 6), strict=True))
    print("  ".join(f"{name:>{width}}" for name, width in widths.items()))
    for one in rows:
        cells = {k: f"{v:.2f}" if isinstance(v, float) else str(v) for k, v in one.items()}
        print("  ".join(f"{cells.get(name, ''):>{width}}" for name, width in widths.items()))


def time_all(gpu: CudaBuild, sweep: bool) -> list[Row]:
    timer = Timer(gpu)
    source = inlined(DEVICE / "arguments.h") + EMPTY
    nothing = CudaBuild(source=source, names=("empty_kernel", "empty_with_arguments"))
    empty_launch = partial(nothing.launch, "empty_kernel", None, 1, 32)
    empty = timer(empty_launch)
    a = np.zeros(1, L.ARGUMENTS)
    rows = [row("empty", "32 threads, no argument", None, 1, empty, empty)]
    for grid in (1, 16, 64):
        took = timer(partial(nothing.launch, "empty_with_arguments", a, grid))
        rows.append(row("empty", "256 threads, 648 bytes", None, grid, took, empty))
    rows += time_fill(gpu, timer, empty, "as shipped")
    rows += time_scan(gpu, timer, empty)
    rows += time_zero_uncovered(gpu, timer, empty)
    rows += time_slabs(gpu, timer, empty)
    if sweep:
        for threads, items in ((128, 8), (256, 8), (512, 4)):
            other = CudaBuild((f"-DHGG_THREADS={threads}", f"-DHGG_ITEMS={items}"))
            for share in (8, 16, 32, 64, 128):
                rows += time_fill(other, timer, empty, f"{threads} threads, {share} a block", share, threads)
    rows.append(row("empty", "the first again", None, 1, timer(empty_launch), empty))
    return rows


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", type=int, default=10_000, help="random cases to check (0: none)")
    parser.add_argument("--processes", type=int, default=1, help="processes that draw the cases")
    parser.add_argument("--no-time", action="store_true", help="only check")
    parser.add_argument("--sweep", action="store_true", help="also time other block sizes and shares")
    parser.add_argument("--out", type=Path, default=ROOT / "bench" / "out", help="folder of device_kernels.csv")
    options = parser.parse_args()

    begun = time.perf_counter()
    drawn = drawn_cases(options.check, options.processes)
    print(f"drew {sum(len(d.cases) for d in drawn)} cases in {time.perf_counter() - begun:.1f} s", flush=True)
    begun = time.perf_counter()
    gpu = CudaBuild()
    cupy = gpu.cupy
    properties = cupy.cuda.runtime.getDeviceProperties(0)
    versions = (
        f"{properties['name'].decode()}, driver {cupy.cuda.runtime.driverGetVersion()}, runtime "
        f"{cupy.cuda.runtime.runtimeGetVersion()}, NVRTC {'.'.join(map(str, cupy.cuda.nvrtc.getVersion()))}, "
        f"CuPy {cupy.__version__}, NumPy {np.__version__}, Python {platform.python_version()}"
    )
    print(f"{versions}; compiled in {time.perf_counter() - begun:.1f} s", flush=True)
    cases, launched, wrong = check(gpu, drawn)
    print("\n".join(wrong) if wrong else f"{cases} cases, {launched} launches: all right", flush=True)
    if options.no_time:
        return 1 if wrong else 0
    rows = time_all(gpu, options.sweep)
    show(rows)
    options.out.mkdir(parents=True, exist_ok=True)
    with open(options.out / "device_kernels.csv", "w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, COLUMNS)
        file.write(f"# {versions}; {cases} cases checked, {len(wrong)} wrong\n")
        writer.writeheader()
        writer.writerows(rows)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
