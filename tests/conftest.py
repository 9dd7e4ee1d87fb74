"""What all tests share: fresh random numbers a test, and JAX on the CPU."""

from __future__ import annotations

import os

import numpy as np
import pytest

os.environ.setdefault("JAX_PLATFORMS", "cpu")


@pytest.fixture
def rng() -> np.random.Generator:
    """Fresh random numbers in every run; the seed is printed where the test fails."""
    seed = int(np.random.SeedSequence().generate_state(1)[0])
    print(f"rng seed {seed}")
    return np.random.default_rng(seed)
