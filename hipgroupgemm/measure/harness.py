"""The harness of a device: see `base.Harness`."""

from __future__ import annotations

from hipgroupgemm.measure.base import Harness, OperandSet
from hipgroupgemm.measure.check import CheckResult
from hipgroupgemm.measure.device_harness import DeviceHarness
from hipgroupgemm.measure.host_harness import HostHarness
from hipgroupgemm.measure.layouts import layouts_of
from hipgroupgemm.operands.views import Device

__all__ = ["CheckResult", "Harness", "OperandSet", "harness_for", "layouts_of"]


def harness_for(device: Device | str) -> Harness:
    """The harness of a device.

    Raises:
        RuntimeError: no driver or no such runtime; the text says what to install.
        ValueError: no such device.
    """
    where = Device.of(device)
    return HostHarness() if where.kind == "cpu" else DeviceHarness(where)
