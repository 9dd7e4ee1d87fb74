"""What importing the package costs, and what it must not import."""

from __future__ import annotations

import os
import subprocess
import sys

import hipgroupgemm

ROOT = os.path.dirname(os.path.dirname(hipgroupgemm.__file__))
FRAMEWORKS = (
    "torch",
    "jax",
    "jaxlib",
    "cupy",
    "numba",
    "triton",
    "hip",
    "cuda",
    "matplotlib",
    "click",
    "rich",
    "cffi",
    "platformdirs",
    "filelock",
)

CHECK = """
import sys
import numpy as np
import hipgroupgemm as hgg
loaded = sorted({name.partition(".")[0] for name in sys.modules} & set(%r))
assert not loaded, f"import loads {loaded}"
lhs, rhs = np.ones((4, 3), np.float32), np.ones((2, 3, 5), np.float32)
hgg.ragged_dot(lhs, rhs, [1, 2])
config = hgg.config_for_ragged_dot(lhs, rhs, [1, 2])
with hgg.GroupedMatmulPlan(config, device="cpu") as plan:
    plan.execute(lhs, rhs, [1, 2])
    plan.explain()
hgg.GroupedGemmConfig.from_json(config.to_json())
hgg.ragged_dot_reference(lhs, rhs, [1, 2])
loaded = sorted({name.partition(".")[0] for name in sys.modules} & set(%r))
assert not loaded, f"a call loads {loaded}"
"""

BLOCK = """
import sys
for name in %r:
    sys.modules[name] = None  # importing it raises ImportError
"""


def run(code):
    environment = {**os.environ, "PYTHONPATH": ROOT, "PYTHONWARNINGS": "error"}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_no_framework_is_imported_that_the_caller_has_not():
    run(CHECK % (FRAMEWORKS, FRAMEWORKS))


def test_the_cpu_path_works_where_everything_but_numpy_and_ml_dtypes_is_missing():
    run(BLOCK % (FRAMEWORKS,) + CHECK.replace("%r", "[]"))


def test_every_public_name_exists():
    missing = [name for name in hipgroupgemm.__all__ if name not in ("DeviceArray", "set_allocator") and not hasattr(hipgroupgemm, name)]
    assert not missing
