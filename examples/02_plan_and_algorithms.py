"""A plan: made once from shapes and types, executed many times. It shows its algorithms and lets one be chosen."""

import numpy as np

import hipgroupgemm as hgg

try:
    import cupy as xp

    xp.zeros(1)
except Exception:
    xp = np
    print("no CuPy with a GPU: this runs on the CPU, with NumPy arrays")

M, K, N, E = 2048, 512, 256, 16
rng = np.random.default_rng(0)
tokens = xp.asarray(rng.standard_normal((M, K), dtype=np.float32).astype(np.float16))
weights = xp.asarray(rng.standard_normal((E, K, N), dtype=np.float32).astype(np.float16))
sizes = xp.full(E, M // E, dtype=np.int32)
out = xp.empty((M, N), np.float16)

config = hgg.config_for_ragged_dot(tokens, weights, sizes)  # hgg.ArraySpec(shape, dtype) stands for arrays that are not there yet
print(f"{config.flops([M // E] * E) / 1e9:.1f} GFLOP, at least {config.min_bytes([M // E] * E) / 1e6:.0f} MB to move")
with hgg.GroupedMatmulPlan(config, device="cpu" if xp is np else None) as plan:
    print(plan.explain())  # what runs, and why that
    wanted = plan.execute(tokens, weights, sizes).astype("f4")
    for algorithm in plan.get_algorithms(max_algorithm_count=4, max_workspace_size=1 << 25):  # the best guess first
        plan.set_algorithm(algorithm)
        plan.execute(tokens, weights, sizes, out=out)
        error = float(xp.linalg.norm(out.astype("f4") - wanted) / xp.linalg.norm(wanted))
        print(f"{algorithm.index:6} {algorithm.name}: workspace {algorithm.workspace_size} bytes, differs by {error:.1e}")
        if not error < 1e-3:
            raise SystemExit("two algorithms disagree")
    half = plan.execute(tokens[: M // 2], weights, sizes // 2)  # fewer rows need no new plan
    print(f"{half.shape[0]} rows with the plan for {M}")
