"""Device source to machine code with NVRTC or hipRTC, whose calls differ in their prefix. Needs no device and no driver.

cuda.core's Program is not used: it takes no headers from memory.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any

from hipgroupgemm.runtime.errors import CompileError, DeviceError, RuntimeUnavailable
from hipgroupgemm.runtime.hip.library import load_hiprtc

__all__ = ["compile_cuda", "compile_hip", "hiprtc_version", "nvrtc_version", "target_options"]

INSTALL = "Install NVRTC: pip install cuda-core 'cuda-toolkit[nvrtc]', or a CUDA toolkit."


class _Compiler:
    """One compiler library through its bindings, whose calls begin with "nvrtc" or "hiprtc"."""

    def __init__(self, bindings: Any, prefix: str, version: tuple[int, int]) -> None:
        self._bindings, self._prefix = bindings, prefix
        self.version = f"{prefix} {version[0]}.{version[1]}"

    def check(self, call: str, *arguments: Any) -> Any:
        """Make a call; its value."""
        result = getattr(self._bindings, self._prefix + call)(*arguments)
        if int(result[0]):
            raise DeviceError(self._prefix + call, int(result[0]), self._status_name(int(result[0])))
        return result[1] if len(result) > 1 else None

    def _status_name(self, status: int) -> str:
        try:
            return str(getattr(self._bindings, self._prefix + "Result")(status).name)
        except ValueError:
            return "unknown"

    def compile(self, source: str, name: str, flags: Sequence[str], headers: Mapping[str, str] | None, code: str, target: str) -> bytes:
        """Compile one source; ``flags`` include the target, ``code`` is what to get ("CUBIN", "PTX", "Code"), ``target`` for messages."""
        texts, names = [text.encode() for text in (headers or {}).values()], [key.encode() for key in headers or {}]
        program = self.check("CreateProgram", source.encode(), name.encode(), len(names), texts or None, names or None)
        try:
            call = self._prefix + "CompileProgram"
            status = int(getattr(self._bindings, call)(program, len(flags), [flag.encode() for flag in flags])[0])
            if status:
                log = bytearray(self.check("GetProgramLogSize", program) or 1)
                self.check("GetProgramLog", program, log)
                text = bytes(log).rstrip(b"\0\n").decode(errors="replace")
                raise CompileError(call, status, self._status_name(status), f"{name} for {target}, {list(flags)}", text)
            found = bytearray(self.check(f"Get{code}Size", program))
            self.check(f"Get{code}", program, found)
            return bytes(found)
        finally:
            # hipRTC's binding wants a pointer to the program, NVRTC's the program
            getattr(self._bindings, self._prefix + "DestroyProgram")(program.createRef() if hasattr(program, "createRef") else program)


@functools.lru_cache(1)
def _nvrtc() -> tuple[_Compiler, tuple[int, ...]]:
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
    compiler = _Compiler(nvrtc, "nvrtc", (major, minor))
    return compiler, tuple(sorted(int(a) for a in compiler.check("GetSupportedArchs")))


def nvrtc_version() -> str:
    """ "nvrtc 13.0", say; RuntimeUnavailable where it is not installed."""
    return _nvrtc()[0].version


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
    compiler, supported = _nvrtc()
    target, machine_code = target_options(architecture, supported)
    code = compiler.compile(source, name, [target, *options], headers, "CUBIN" if machine_code else "PTX", architecture)
    return code if machine_code else code.rstrip(b"\0")


@functools.lru_cache(1)
def _hiprtc() -> _Compiler:
    hiprtc, version = load_hiprtc()
    return _Compiler(hiprtc, "hiprtc", version)


def hiprtc_version() -> str:
    """ "hiprtc 9.0", say; RuntimeUnavailable where it or hip-python is not installed."""
    return _hiprtc().version


def compile_hip(
    source: str, name: str, options: Sequence[str] = (), architecture: str = "gfx942", headers: Mapping[str, str] | None = None
) -> bytes:
    """Compile HIP C++ for one target, with features or without ("gfx942:sramecc+:xnack-"); a code object.

    Arguments and errors as for :meth:`Runtime.compile`; RuntimeUnavailable where hipRTC is not installed.
    """
    if not architecture.startswith("gfx"):
        raise ValueError(f"device_arch: got {architecture!r}; want a name like gfx942")
    return _hiprtc().compile(source, name, [f"--offload-arch={architecture}", *options], headers, "Code", architecture)
