"""The JAX door on a GPU: `hipgroupgemm.integrations.jax.ragged_dot` under jit beside `jax.lax.ragged_dot`.

For each shape two times of each way, in one process, the ways taking turns:

* device time: jitted programs of a few and of many ragged dots, each with a left operand of its own, so that XLA merges none; the
  difference of their times over that of their lengths, so that what a program costs beside them drops out. The plan's own likewise, by
  graphs of its executes.
* host time: what a call of the jitted function takes until it returns, the device left behind; the median in microseconds.

    JAX_PLATFORMS=cuda,cpu python bench/jax_door.py [--rounds N] [--csv FILE]
"""

from __future__ import annotations

import argparse
import csv
import platform
import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import hipgroupgemm as hgg
from hipgroupgemm.integrations import jax as door
from hipgroupgemm.integrations.jax import native
from hipgroupgemm.operands.arrays import as_array
from hipgroupgemm.runtime import get_runtime

SHAPES = (  # rows, k, n, groups, type, how many in the two programs
    (256, 256, 256, 8, "bfloat16", (20, 220)),
    (4096, 2048, 1408, 64, "bfloat16", (10, 60)),
    (8192, 4096, 14336, 8, "bfloat16", (2, 8)),
    (4096, 512, 512, 1500, "bfloat16", (10, 60)),
    (4096, 512, 512, 8, "float32", (10, 60)),
)
COLUMNS = ("rows", "k", "n", "groups", "type", "way", "device_us", "host_us", "over_plan", "over_jax_host")


def median_times(ways: dict[str, Callable[[], float]], rounds: int) -> dict[str, float]:
    """The median of each way's microseconds, the ways taking turns."""
    times: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(rounds):
        for name, measure in ways.items():
            times[name].append(measure())
    return {name: statistics.median(taken) for name, taken in times.items()}


def repeated(dot: Any) -> Any:
    """A program of one ragged dot for each of the left operands."""
    return jax.jit(lambda xs, w, s: [dot(x, w, s) for x in xs])


def host_time(function: Any, operands: tuple[Any, ...], calls: int = 50) -> float:
    """Microseconds of a call until it returns."""
    taken = []
    for _ in range(calls):
        began = time.perf_counter_ns()
        out = function(*operands)
        taken.append((time.perf_counter_ns() - began) / 1000)
    out.block_until_ready()
    return statistics.median(taken)


def added_time(program: Any, lefts: list[Any], operands: tuple[Any, ...], lengths: tuple[int, int]) -> float:
    """Microseconds that one ragged dot more adds to a program."""
    taken = []
    for length in lengths:
        began = time.perf_counter_ns()
        jax.block_until_ready(program(lefts[:length], *operands[1:]))
        taken.append((time.perf_counter_ns() - began) / 1000)
    return (taken[1] - taken[0]) / (lengths[1] - lengths[0])


def plan_time(operands: tuple[Any, ...], kind: str, lengths: tuple[int, int]) -> Callable[[], float]:
    """Measures the same of a plan's executes in two graphs, between events: the host is in no time."""
    runtime = get_runtime(kind)
    jax.block_until_ready(operands)
    views = [as_array(x) for x in operands]
    for view in views:
        view.framework, view.stream = "", None  # they are ready, and live as long as this does, whatever stream uses them
    device = views[0].device.index
    stream, first, last = runtime.create_stream(device), *(runtime.create_event(device, timing=True) for _ in range(2))
    zeros = np.zeros((operands[0].shape[0], operands[1].shape[2]), operands[0].dtype)
    memory = hgg.DeviceArray.from_numpy(zeros, f"{kind}:{device}", stream)
    plan = hgg.GroupedMatmulPlan(hgg.config_for_ragged_dot(*views), device=f"{kind}:{device}")
    graphs = []
    with runtime.use_device(device):
        plan.execute(*views, out=memory, stream=stream)
        runtime.synchronize_stream(stream)
        for length in lengths:
            runtime._check("StreamBeginCapture", stream, runtime._capture_modes(1))
            for _ in range(length):
                plan.execute(*views, out=memory, stream=stream)
            graphs.append(runtime._check("GraphInstantiate", runtime._check("StreamEndCapture", stream), 0))

    def measure() -> float:
        taken = []
        with runtime.use_device(device):
            for graph in graphs:
                runtime.record_event(first, stream)
                runtime._check("GraphLaunch", graph, stream)
                runtime.record_event(last, stream)
                runtime.synchronize_event(last)
                taken.append(runtime.elapsed_ms(first, last) * 1000)
        return (taken[1] - taken[0]) / (lengths[1] - lengths[0])

    return measure


def with_closed_door(function: Callable[[], None]) -> None:
    """Runs it, with programs lowered as where the native handler cannot be had."""

    def fail() -> Any:
        raise native.NativeDoorError("closed by the benchmark")

    real, native.load = native.load, fail
    try:
        function()
    finally:
        native.load = real


def measure_shape(shape: tuple[Any, ...], rounds: int) -> list[tuple[Any, ...]]:
    """The rows of one shape."""
    m, k, n, groups, dtype, lengths = shape
    rng, keys = np.random.default_rng(), jax.random.split(jax.random.key(time.time_ns() % 2**32), 2)
    kind = jax.default_backend().replace("gpu", "cuda")
    operands = (
        jax.random.normal(keys[0], (m, k), dtype),
        jax.random.normal(keys[1], (groups, k, n), dtype),
        jnp.asarray(rng.multinomial(m, np.ones(groups) / groups), jnp.int32),
    )

    def by_callback(x: Any, w: Any, s: Any) -> Any:  # another function, so that it has programs of its own
        return door.ragged_dot(x, w, s)

    dots = {"native": door.ragged_dot, "buffer_callback": by_callback, "jax.lax": jax.lax.ragged_dot}
    singles = {name: jax.jit(dot) for name, dot in dots.items()}
    programs = {name: repeated(dot) for name, dot in dots.items()}
    lefts = [operands[0] + 0 for _ in range(lengths[1])]
    for name in dots:

        def warm(name: str = name) -> None:
            for _ in range(3):
                singles[name](*operands).block_until_ready()
                added_time(programs[name], lefts, operands, lengths)

        with_closed_door(warm) if name == "buffer_callback" else warm()
    ours, theirs = (np.asarray(singles[name](*operands), np.float32) for name in ("native", "jax.lax"))
    worst = float(np.abs(ours - theirs).max() / np.abs(theirs).max())
    if not worst <= 0.02:
        raise SystemExit(f"{shape}: ours and JAX's differ by {worst:.3g} of the largest value")
    ways: dict[str, Callable[[], float]] = {name: partial(added_time, programs[name], lefts, operands, lengths) for name in dots}
    ways["plan"] = plan_time(operands, kind, lengths)
    ways["plan"]()
    device = median_times(ways, rounds)
    host = median_times({name: partial(host_time, singles[name], operands) for name in dots}, 5)
    rows = []
    for name in ("plan", *dots):
        over_jax = host[name] / host["jax.lax"] if name in host else float("nan")
        rows.append((*shape[:5], name, device[name], host.get(name, float("nan")), device[name] / device["plan"], over_jax))
    return rows


def main() -> None:
    """Measures, prints a table and writes it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--csv")
    options = parser.parse_args()
    print(f"{jax.devices()[0].device_kind}, Python {platform.python_version()}, JAX {jax.__version__}")
    print(f"{'shape':34} {'way':16} {'device us':>10} {'host us':>8} {'/ plan':>7} {'/ jax host':>10}")
    table = []
    for shape in SHAPES:
        for row in measure_shape(shape, options.rounds):
            m, k, n, groups, dtype, name, device, host, over_plan, over_jax = row
            what = f"{m}x{k}x{n} g{groups} {dtype}"
            print(f"{what:34} {name:16} {device:10.1f} {host:8.1f} {over_plan:7.2f} {over_jax:10.2f}", flush=True)
            table.append(row)
    print(f"the native handler ran {native.load().hgg_call_count()} times; what command buffers replay is not counted")
    if options.csv:
        with open(options.csv, "w", newline="", encoding="utf-8") as file:
            csv.writer(file).writerows([COLUMNS, *table])


if __name__ == "__main__":
    main()
