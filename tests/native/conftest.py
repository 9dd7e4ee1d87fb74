"""Tests against the real hipBLASLt on the stand-in HIP runtime; tools/check_hipblaslt.sh runs them."""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Iterator

import pytest

sys.path.insert(0, os.path.dirname(__file__))

# Elsewhere there is neither the library nor the stand-in: only what says so is collected, and nothing skipped.
collect_ignore_glob = [] if os.environ.get("HIPGROUPGEMM_STANDIN") else ["test_[!n]*.py", "test_native_[!m]*.py"]
if not os.environ.get("STANDIN_KERNELS"):
    collect_ignore_glob.append("test_fill_*.py")
if importlib.util.find_spec("rocm") is None:  # hip-python 10, which check_hipblaslt.sh says is missing
    collect_ignore_glob.append("test_hip_python.py")

if os.environ.get("HIPGROUPGEMM_STANDIN"):
    from standin_device import Device

    from hipgroupgemm.native import Handle

    @pytest.fixture(scope="session")
    def device() -> Device:
        return Device()

    @pytest.fixture
    def handle(device: Device) -> Iterator[Handle]:
        with Handle() as handle:
            yield handle

    @pytest.fixture(autouse=True)
    def no_fault_is_left(device: Device) -> Iterator[None]:
        """A fault in a kernel fails the test in which it happened, unless the test took it."""
        device.take_fault()
        yield
        assert device.take_fault() == 0, "a kernel left a fault; see the stand-in's messages on stderr"
