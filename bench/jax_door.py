"""The JAX door on a GPU: `hipgroupgemm.integrations.jax.ragged_dot` under jit beside `jax.lax.ragged_dot`.

For each shape two times of each way, in one process, the ways taking turns:

* device time: one jitted program of CHAIN ragged dots, one behind the other on the same operands, over CHAIN; and the plan's own time,
  CHAIN launches on a stream between two events, both as the median over rounds. All data are in the L2 cache or not, as the shape has it.
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
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import hipgroupgemm as hgg
from hipgroupgemm.integrations import jax as door
from hipgroupgemm.integrations.jax import native
from hipgroupgemm.operands.arrays import as_array
from hipgroupgemm.runtime import get_runtime

CHAIN = 20
SHAPES = (  # rows, k, n, groups, type
    (256, 256, 256, 8, "bfloat16"),
    (4096, 2048, 1408, 64, "bfloat16"),
    (8192, 4096, 14336, 8, "bfloat16"),
    (4096, 2048, 1408, 1500, "bfloat16"),
    (4096, 512, 512, 8, "float32"),
)
COLUMNS = ("rows", "k", "n", "groups", "type", "way", "device_us", "host_us", "over_plan", "over_jax_host")


def median_times(ways: dict[str, Callable[[], float]], rounds: int) -> dict[str, float]:
    """The median of each way's microseconds, the ways taking turns."""
    times: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(rounds):
        for name, measure in ways.items():
            times[name].append(measure())
    return {name: statistics.median(taken) for name, taken in times.items()}


def chained(dot: Any) -> Any:
    """A program of CHAIN ragged dots that XLA can neither merge nor reorder: each one's left operand waits for the result before it."""

    def program(x: Any, w: Any, s: Any) -> Any:
        out = dot(x, w, s)
        for _ in range(CHAIN - 1):
            x, out = jax.lax.optimization_barrier((x, out))
            out = dot(x, w, s)
        return out

    return jax.jit(program)


def host_time(function: Any, operands: tuple[Any, ...], calls: int = 50) -> float:
    """Microseconds of a call until it returns."""
    taken = []
    for _ in range(calls):
        began = time.perf_counter_ns()
        out = function(*operands)
        taken.append((time.perf_counter_ns() - began) / 1000)
    out.block_until_ready()
    return statistics.median(taken)


def chain_time(program: Any, operands: tuple[Any, ...]) -> float:
    """Microseconds of one ragged dot of a chain: of a chain's time from call to end, host included, which a device longer busy hides."""
    began = time.perf_counter_ns()
    program(*operands).block_until_ready()
    return (time.perf_counter_ns() - began) / 1000 / CHAIN


def plan_time(operands: tuple[Any, ...], kind: str) -> Callable[[], float]:
    """The same of a plan's executes on a stream of its own, between two events; and what holds them."""
    runtime = get_runtime(kind)
    views = [as_array(x) for x in operands]
    device = views[0].device.index
    out_array = jnp.zeros((operands[0].shape[0], operands[1].shape[2]), operands[0].dtype)
    out_array.block_until_ready()
    out = as_array(out_array)
    out.readonly, out.framework = False, ""  # ours alone, and not read by JAX
    plan = hgg.GroupedMatmulPlan(hgg.config_for_ragged_dot(*views))
    stream, first, last = runtime.create_stream(device), *(runtime.create_event(device, timing=True) for _ in range(2))
    kept = out_array, plan

    def measure() -> float:
        assert kept
        with runtime.use_device(device):
            runtime.record_event(first, stream)
            for _ in range(CHAIN):
                plan.execute(*views, out=out, stream=stream)
            runtime.record_event(last, stream)
            runtime.synchronize_event(last)
        return runtime.elapsed_ms(first, last) * 1000 / CHAIN

    return measure


def closed_door(function: Any) -> Any:
    """The function, lowered as where the native handler cannot be had."""

    def fail() -> Any:
        raise native.NativeDoorError("closed by the benchmark")

    real, native.load = native.load, fail
    try:
        return function()
    finally:
        native.load = real


def measure_shape(shape: tuple[Any, ...], rounds: int) -> list[tuple[Any, ...]]:
    """The rows of one shape."""
    m, k, n, groups, dtype = shape
    rng = np.random.default_rng()
    kind = jax.default_backend().replace("gpu", "cuda")
    operands = (
        jnp.asarray(rng.standard_normal((m, k), np.float32), dtype),
        jnp.asarray(rng.standard_normal((groups, k, n), np.float32), dtype),
        jnp.asarray(rng.multinomial(m, np.ones(groups) / groups), jnp.int32),
    )
    dots = {"native": door.ragged_dot, "buffer_callback": lambda *x: door.ragged_dot(*x), "jax.lax": jax.lax.ragged_dot}
    singles = {name: jax.jit(dot) for name, dot in dots.items()}
    chains = {name: chained(dot) for name, dot in dots.items()}
    for name in dots:

        def warm(name: str = name) -> None:
            for program in (singles[name], chains[name]):
                for _ in range(3):
                    program(*operands).block_until_ready()

        closed_door(warm) if name == "buffer_callback" else warm()
    ours, theirs = (np.asarray(singles[name](*operands), np.float32) for name in ("native", "jax.lax"))
    worst = float(np.abs(ours - theirs).max() / np.abs(theirs).max())
    if worst > 0.02:
        raise SystemExit(f"{shape}: ours and JAX's differ by {worst:.3g} of the largest value")
    ways: dict[str, Callable[[], float]] = {name: lambda name=name: chain_time(chains[name], operands) for name in dots}  # type: ignore[misc]
    ways["plan"] = plan_time(operands, kind)
    ways["plan"]()
    device = median_times(ways, rounds)
    host = median_times({name: lambda name=name: host_time(singles[name], operands) for name in dots}, max(3, rounds // 4))  # type: ignore[misc]
    rows = []
    for name in ("plan", *dots):
        over_jax = host[name] / host["jax.lax"] if name in host else float("nan")
        rows.append((*shape, name, device[name], host.get(name, float("nan")), device[name] / device["plan"], over_jax))
    return rows


def main() -> None:
    """Measures, prints a table and writes it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--csv")
    options = parser.parse_args()
    print(f"{jax.devices()[0].device_kind}, Python {platform.python_version()}, JAX {jax.__version__}, chains of {CHAIN}")
    print(f"{'shape':34} {'way':16} {'device us':>10} {'host us':>8} {'/ plan':>7} {'/ jax host':>10}")
    table = []
    for shape in SHAPES:
        for row in measure_shape(shape, options.rounds):
            m, k, n, groups, dtype, name, device, host, over_plan, over_jax = row
            print(
                f"{f'{m}x{k}x{n} g{groups} {dtype}':34} {name:16} {device:10.1f} {host:8.1f} {over_plan:7.2f} {over_jax:10.2f}", flush=True
            )
            table.append(row)
    print(f"the native handler ran {native.load().hgg_call_count()} times; what command buffers replay is not counted")
    if options.csv:
        with open(options.csv, "w", newline="", encoding="utf-8") as file:
            csv.writer(file).writerows([COLUMNS, *table])


if __name__ == "__main__":
    main()
