"""What ``hipgroupgemm doctor`` says about the device runtimes."""

from __future__ import annotations

from dataclasses import dataclass

from . import get_runtime
from .errors import RuntimeUnavailable
from .objects import DeviceInfo


@dataclass(frozen=True)
class RuntimeReport:
    """One runtime's state.

    Attributes:
        kind: "cuda" or "rocm".
        available: whether it can be used now.
        version: the driver's or HIP runtime's, in words; "" when unavailable.
        library: path of the driver library; "" when unavailable.
        compiler: NVRTC's or hipRTC's version, or why there is none.
        devices: what was found.
        problem: what is missing, "" when nothing is.
        install: what to install, "" when nothing.
    """

    kind: str
    available: bool
    version: str = ""
    library: str = ""
    compiler: str = ""
    devices: tuple[DeviceInfo, ...] = ()
    problem: str = ""
    install: str = ""


def version_text(kind: str, version: int) -> str:
    """A version number in words: 13000 is "13.0" in CUDA's coding, 60443484 is "6.4.43484" in HIP's."""
    if kind == "cuda":
        return f"{version // 1000}.{version % 1000 // 10}"
    return f"{version // 10_000_000}.{version // 100_000 % 100}.{version % 100_000}"


def report_runtime(kind: str) -> RuntimeReport:
    """Look at one runtime, initialising it if it can be."""
    try:
        runtime = get_runtime(kind)
    except RuntimeUnavailable as error:
        return RuntimeReport(kind, False, problem=error.looked_for, install=error.install)
    except RuntimeError as error:
        return RuntimeReport(kind, False, problem=str(error))
    try:
        compiler = runtime.compiler_version()
    except RuntimeError as error:
        compiler = str(error)
    devices = tuple(runtime.device_info(i) for i in range(runtime.device_count()))
    return RuntimeReport(kind, True, version_text(kind, runtime.version), runtime.library, compiler, devices)
