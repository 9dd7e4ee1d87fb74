"""Device time of operands as lists, one array per group in any order in memory, beside the stacked array: the six classes of an MoE layer.

Prints medians in milliseconds, cold and in turns, of one algorithm where both have it, on the same numbers, and the ratio, which is wanted
within 3 %. The listed call's result is checked. With `--move` each later listed call finds its arrays elsewhere, so that its tables are
written every time.

    python bench/lists.py [--tokens M ...] [--groups E] [--extents K N] [--repetitions R] [--move] [--csv FILE]
"""

from __future__ import annotations

import argparse
import contextlib
import csv
import dataclasses
import os
import statistics
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np

import hipgroupgemm as hgg
from hipgroupgemm.backends.base import Arguments
from hipgroupgemm.backends.triton import kernel_config
from hipgroupgemm.config import GroupedGemmConfig, RaggedDotMode
from hipgroupgemm.measure.harness import harness_for
from hipgroupgemm.measure.workloads import CLASSES, MoEShape, config_of

HEAD = ("class", "m", "stacked_algorithm", "listed_algorithm", "stacked_ms", "listed_ms", "ratio", "check")


def listed(config: GroupedGemmConfig) -> GroupedGemmConfig:
    """The same problem with a list."""
    name = "out_listed" if config.ragged_mode is RaggedDotMode.CONTRACTING else "rhs_listed"
    return dataclasses.replace(config, **{name: True})


def main() -> int:
    """Measures, prints and writes the table; status 1 where a ratio is past 1.03 or a result is wrong."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda:0")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--tokens", type=int, nargs="+", default=[10240, 65536, 262144])
    parser.add_argument("--groups", type=int, default=128)
    parser.add_argument("--extents", type=int, nargs=2, default=[2048, 768])
    parser.add_argument("--repetitions", type=int, default=31)
    parser.add_argument("--move", action="store_true")
    parser.add_argument("--maps", action="store_true", help="let the sm_90 kernels take lists, by tables of tensor maps")
    parser.add_argument("--csv", default=str(Path(os.environ.get("OUT", ".")) / "lists.csv"))
    options = parser.parse_args()
    if options.maps:
        kernel_config.HOPPER_FEATURES |= {"rhs_listed", "out_listed"}
    rng, rows = np.random.default_rng(0), []
    print(f"{options.device}, Python {sys.version.split()[0]}, hipgroupgemm {hgg.__version__}, {options.groups} groups, {options.dtype}")
    for tokens in options.tokens:
        for kind in CLASSES.values():
            config = config_of(kind, MoEShape(tokens, *options.extents, options.groups), options.dtype)
            sizes = rng.multinomial(tokens, np.ones(options.groups) / options.groups)
            with harness_for(options.device) as harness, contextlib.ExitStack() as stack:
                held, calls, kept, names = harness.sizes(sizes.astype(np.int32)), [], [], []
                for one in (config, listed(config)):
                    operands = harness.operands(one, seed=1)
                    kept.append(operands)  # its memory goes with it
                    plan = stack.enter_context(hgg.GroupedMatmulPlan(one, device=options.device, use_store=False))
                    same = [found for found in plan.get_algorithms() if names and found.name == names[0]]
                    plan.set_algorithm(same[0] if same else plan.algorithm)
                    names.append(plan.algorithm.name)
                    plan.prepare(harness.stream)
                    arguments = harness.arguments(operands, held)
                    calls.append(call_of(plan, arguments, options.move))
                    plan.launch(arguments)
                    harness.synchronize()
                    result = harness.check(operands, sizes)
                # from here on in another order, as an allocator would place them
                order = rng.permutation(options.groups)
                arguments.lists = {role: tuple(addresses[at] for at in order) for role, addresses in arguments.lists.items()}
                times: list[list[float]] = [[], []]
                for _ in range(options.repetitions):
                    for call, own in zip(calls, times, strict=True):
                        harness.flush()
                        own.append(harness.time(call))
            stacked, listed_time = (statistics.median(own[1:]) for own in times)
            ratio, verdict = listed_time / stacked, result.verdict or "ok"
            rows.append((kind.name, tokens, *names, stacked, listed_time, ratio, verdict))
            used = " ".join(dict.fromkeys(names))
            where = f"{kind.name:9} M={tokens:7}"
            print(f"{where} {stacked:8.4f} ms stacked {listed_time:8.4f} ms listed {ratio:6.3f}  {verdict}  {used}")
    with open(options.csv, "w", newline="", encoding="utf-8") as file:
        csv.writer(file).writerows([HEAD, *rows])
    return int(any(row[6] > 1.03 or row[7] != "ok" for row in rows))


def call_of(plan: hgg.GroupedMatmulPlan, arguments: Arguments, move: bool) -> Callable[[], object]:
    """Makes the call; with `move` the list's arrays trade places each time."""

    def call() -> None:
        lists = arguments.lists
        if move:
            lists = {role: addresses[1:] + addresses[:1] for role, addresses in lists.items()}
        plan.launch(arguments, arguments.pointers, lists)

    return call


if __name__ == "__main__":
    sys.exit(main())
