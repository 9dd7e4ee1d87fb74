"""Tuning: every algorithm of every backend is checked and timed; the plan takes the winner, and so does every later plan like it."""

import numpy as np

import hipgroupgemm as hgg

try:
    import cupy as xp

    xp.zeros(1)
except Exception:
    xp = np
    print("no CuPy with a GPU: this runs on the CPU, where the reference has one algorithm to tune")

M, K, N, E = 2048, 512, 256, 16
dtype = np.float16
specs = hgg.ArraySpec((M, K), dtype), hgg.ArraySpec((E, K, N), dtype), hgg.ArraySpec((E,), "int32")  # tuning makes its own operands
config = hgg.config_for_ragged_dot(*specs)
routing = np.random.default_rng(0).multinomial(
    M, np.random.default_rng(1).dirichlet(np.full(E, 2.0)), size=3
)  # sizes as your router makes them

with hgg.GroupedMatmulPlan(config, device="cpu" if xp is np else None) as plan:
    report = plan.autotune(routing, time_limit=60)  # None instead of sizes: evenly filled groups
    for row in report.rows[:5]:
        time = "not timed" if row.median_ms is None else f"{row.median_ms:.3f} ms, {row.tflops:.2f} TFLOP/s"
        print(f"{row.algorithm.backend:10} {row.algorithm.name:40} {row.verdict}: {time}")
    print(f"the plan runs {plan.algorithm.name} of {plan.backend} now")
    if plan.algorithm.name != report.best.algorithm.name:
        raise SystemExit("the plan has not taken the winner")

# a new plan, here or in a process of tomorrow, finds the winner in the tuning store; HIPGROUPGEMM_TUNING_STORE=off turns that off
with hgg.GroupedMatmulPlan(config, device="cpu" if xp is np else None) as again:
    print(f"a new plan starts with {again.algorithm.name} of {again.backend}")
    if again.algorithm.name != report.best.algorithm.name:
        raise SystemExit("the store was not asked")
