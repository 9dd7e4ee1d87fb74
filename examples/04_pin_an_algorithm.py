"""An algorithm pinned in production: chosen and written down once, then demanded by name and index, and never replaced in silence."""

import json
import sys
import tempfile
from pathlib import Path

import numpy as np

import hipgroupgemm as hgg

try:
    import cupy as xp

    xp.zeros(1)
except Exception:
    xp = np
    print("no CuPy with a GPU: this runs on the CPU, with NumPy arrays")

M, K, N, E = 2048, 512, 256, 16
device = "cpu" if xp is np else None
config = hgg.config_for_ragged_dot(hgg.ArraySpec((M, K), "float16"), hgg.ArraySpec((E, K, N), "float16"), hgg.ArraySpec((E,), "int32"))
pin_file = Path(sys.argv[1]) if len(sys.argv) > 1 else Path(tempfile.mkdtemp()) / "pin.json"

if not pin_file.exists():  # once, on the machine that production runs on
    with hgg.GroupedMatmulPlan(config, device=device) as plan:
        plan.autotune(time_limit=60, store=False)  # raises where no algorithm is right
        a = plan.algorithm
        pin_file.write_text(json.dumps({"config": config.to_json(), "backend": a.backend, "name": a.name, "index": a.index}))

pin = json.loads(pin_file.read_text())  # in production
config = hgg.GroupedGemmConfig.from_json(pin["config"])
with hgg.GroupedMatmulPlan(config, pin["backend"], device, use_store=False) as plan:
    plan.set_algorithm(pin["name"], pin["index"])  # a ValueError where this library numbers its kernels differently: tune again
    tokens, weights = xp.ones((M, K), "float16"), xp.full((E, K, N), 2**-10, "float16")
    out = plan.execute(tokens, weights, xp.full(E, M // E, "int32"))
    print(f"pinned: {plan.backend} {plan.algorithm.index} {plan.algorithm.name}")
    if not bool((out == K * 2**-10).all()):
        raise SystemExit("the result is wrong")
