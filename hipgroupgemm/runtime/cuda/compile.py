"""CUDA C++ to machine code with NVRTC. Needs no device and no driver."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence

from hipgroupgemm.runtime.compile import Compiler
from hipgroupgemm.runtime.errors import DeviceError, RuntimeUnavailable

__all__ = ["compile_cuda", "nvrtc_version", "target_options"]

INSTALL = "Install NVRTC: pip install cuda-core 'cuda-toolkit[nvrtc]', or a CUDA toolkit."


@functools.lru_cache(1)
def _compiler() -> tuple[Compiler, tuple[int, ...]]:
    """NVRTC, and the architectures that it compiles for."""
    try:
        from cuda.bindings import nvrtc
    except ImportError as error:
        raise RuntimeUnavailable("cuda", f"cuda.bindings.nvrtc is missing ({error})", INSTALL) from None
    try:
        status, major, minor = nvrtc.nvrtcVersion()
    except Exception as error:  # the bindings raise what their loader raises, which differs between versions
        raise RuntimeUnavailable("cuda", f"no NVRTC library ({error})", INSTALL) from None
    if int(status):
        raise DeviceError("nvrtcVersion", int(status), str(status))
    compiler = Compiler(nvrtc, "nvrtc", (major, minor))
    return compiler, tuple(sorted(int(a) for a in compiler.check("GetSupportedArchs")))


def nvrtc_version() -> str:
    """ "nvrtc 13.0", say.

    Raises:
        RuntimeUnavailable: NVRTC is not installed.
    """
    return _compiler()[0].version


def target_options(architecture: str, supported: Sequence[int]) -> tuple[str, bool]:
    """(NVRTC's architecture option, whether it gives machine code).

    A device newer than the compiler gets PTX of the newest architecture known, which the driver translates.

    Raises:
        ValueError: not an architecture, or one that this NVRTC no longer compiles for.
    """
    digits = architecture.removeprefix("sm_").rstrip("af")
    if not architecture.startswith("sm_") or not digits.isdecimal():
        raise ValueError(f"device_arch: got {architecture!r}; want a name like sm_90")
    if int(digits) in supported:
        return f"--gpu-architecture={architecture}", True
    older = [a for a in supported if a < int(digits)]
    if not older:
        raise ValueError(f"device_arch: got {architecture}; this NVRTC compiles for sm_{min(supported)} and later. Install an older NVRTC")
    return f"--gpu-architecture=compute_{max(older)}", False


def compile_cuda(
    source: str, name: str, options: Sequence[str] = (), architecture: str = "sm_90", headers: Mapping[str, str] | None = None
) -> bytes:
    """Compile CUDA C++ for one architecture ("sm_90", "sm_90a"); a cubin, or PTX for a device newer than the compiler.

    Arguments and errors as for :meth:`Runtime.compile`; RuntimeUnavailable where NVRTC is not installed.
    """
    compiler, supported = _compiler()
    target, machine_code = target_options(architecture, supported)
    code = compiler.compile(source, name, [target, *options], headers, "CUBIN" if machine_code else "PTX", architecture)
    return code if machine_code else code.rstrip(b"\0")
