"""What a tuning result holds for: the kind of device, and the versions that decide what an algorithm is."""

from __future__ import annotations

import dataclasses
import functools
import logging
import platform
import re
from typing import Any

from hipgroupgemm import runtime
from hipgroupgemm.backends import backend_kinds, get_backend
from hipgroupgemm.backends.base import versions_of
from hipgroupgemm.operands.views import CPU, Device
from hipgroupgemm.runtime.process import available_cores, cpu_model

__all__ = ["DeviceKind", "device_kind", "device_name", "device_of", "identity"]

_log = logging.getLogger("hipgroupgemm.tuning")
_TARGET = re.compile(r"[ -~]{1,64}")


@dataclasses.dataclass(frozen=True)
class DeviceKind:
    """Devices that are alike for a tuning result: it holds on all that have one target and as many compute units.

    Attributes:
        kind: "cuda", "rocm" or "cpu". target: "sm_90", "gfx942", or the CPU's architecture as "x86_64".
        compute_units: SMs, CUs (a partition of an accelerator has fewer), or the cores that this process may use.

    Raises ValueError for what no device has: files are named by these.
    """

    kind: str
    target: str
    compute_units: int

    def __post_init__(self) -> None:
        named = self.kind in ("cuda", "rocm", "cpu") and isinstance(self.target, str) and _TARGET.fullmatch(self.target)
        if not named or type(self.compute_units) is not int or not 0 < self.compute_units <= 1 << 20:
            got = f"device={dataclasses.astuple(self)!r:.200}"
            raise ValueError(f"{got}: must be cuda, rocm or cpu, a target such as gfx942, a number of units")

    def __str__(self) -> str:
        unit = {"cuda": "SMs", "rocm": "CUs"}.get(self.kind, "cores")
        return f"{self.kind} {self.target}, {self.compute_units} {unit}"


@functools.lru_cache(64)
def device_kind(device: Device) -> DeviceKind:
    """The kind of a device, asked once. Raises RuntimeError or ValueError where a GPU can't be asked or is not there."""
    if device.kind == "cpu":
        return DeviceKind("cpu", platform.machine() or "unknown", available_cores())
    info = runtime.get_runtime(device.kind).device_info(device.index)
    return DeviceKind(device.kind, info.architecture, info.multiprocessors)


@functools.lru_cache(64)
def device_name(device: Device) -> str:
    """The product's name, such as "NVIDIA H200", asked once. Raises as `device_kind`."""
    return cpu_model() if device.kind == "cpu" else runtime.get_runtime(device.kind).device_info(device.index).name


def device_of(kind: DeviceKind) -> Device | None:
    """A device of that kind, if this machine has one."""
    found = [CPU, *(Device(*one) for one in runtime.find_devices())]
    return next((device for device in found if device.kind == kind.kind and device_kind(device) == kind), None)


def identity(device: Device) -> dict[str, Any]:
    """What results on `device` hold for, as plain data that JSON can carry.

    "kind", "target", "compute_units": see `DeviceKind`. "name": the product's. "versions": of this package and of what its backends for
    that kind of device run on, by name. "backends": for each of these, the names of the versions that decide its algorithms: a new Triton
    says nothing about a hipBLASLt kernel. The device is asked once, the versions are read anew. Raises as `device_kind`.
    """
    versions: dict[str, str] = {}
    backends: dict[str, list[str]] = {}
    for name, kinds in backend_kinds().items():
        if device.kind not in kinds:
            continue
        try:
            own = versions_of(get_backend(name), device)
        except Exception as error:  # a backend that lacks its library, or was unregistered just now, has no results either
            _log.debug("versions of backend %s on %s: %s", name, device, error)
            continue
        versions.update(own)
        backends[name] = list(own)
    return {**dataclasses.asdict(device_kind(device)), "name": device_name(device), "versions": versions, "backends": backends}
