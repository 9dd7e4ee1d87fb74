"""Arrays of other producers: results in the caller's framework, interfaces that an object has or lacks, malformed ones."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

import hipgroupgemm as hgg


def operands():
    rng = np.random.default_rng(5)
    return rng.standard_normal((8, 4), np.float32), rng.standard_normal((2, 4, 3), np.float32), np.array([3, 5])


def test_plan_gives_results_in_the_framework_of_lhs():
    lhs, rhs, sizes = operands()
    with hgg.GroupedMatmulPlan(hgg.config_for_ragged_dot(lhs, rhs, sizes), device="cpu") as plan:
        result = plan.execute(jnp.asarray(lhs), jnp.asarray(rhs), sizes)
        assert isinstance(result, jax.Array)
        np.testing.assert_array_equal(np.asarray(result), plan.execute(lhs, rhs, sizes))
