"""CUDA C++ to machine code with NVRTC. Needs no device and no driver."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from typing import Any

from .errors import CompileError, DeviceError, RuntimeUnavailable

INSTALL = "Install NVRTC: pip install cuda-core 'cuda-toolkit[nvrtc]', or a CUDA toolkit."

_lock = threading.Lock()
_loaded: tuple[Any, str, tuple[int, ...]] | None = None


def _load() -> tuple[Any, str, tuple[int, ...]]:
    """(bindings, version text, architectures that it compiles for), found once."""
    global _loaded
    with _lock:
        if _loaded is None:
            try:
                from cuda.bindings import nvrtc
            except ImportError as error:
                raise RuntimeUnavailable("cuda", f"cuda.bindings.nvrtc is missing ({error})", INSTALL) from None
            try:
                status, major, minor = nvrtc.nvrtcVersion()
            except Exception as error:  # the bindings raise what their loader raises, which differs between versions
                raise RuntimeUnavailable("cuda", f"no NVRTC library ({error})", INSTALL) from None
            more_status, architectures = nvrtc.nvrtcGetSupportedArchs()
            for call, number in (("nvrtcVersion", status), ("nvrtcGetSupportedArchs", more_status)):
                if int(number):
                    raise DeviceError(call, int(number), _name(nvrtc, number))
            _loaded = nvrtc, f"nvrtc {major}.{minor}", tuple(sorted(int(a) for a in architectures))
        return _loaded


def _name(nvrtc: Any, status: int) -> str:
    try:
        return str(nvrtc.nvrtcResult(int(status)).name)
    except ValueError:
        return "unknown"


def nvrtc_version() -> str:
    """ "nvrtc 13.0", say.

    Raises:
        RuntimeUnavailable: NVRTC is not installed.
    """
    return _load()[1]


def target_options(architecture: str, supported: Sequence[int]) -> tuple[str, bool]:
    """(NVRTC's architecture option, whether it gives machine code).

    A device newer than the compiler gets PTX of the newest architecture known, which the driver translates.

    Raises:
        ValueError: not an architecture, or one that this NVRTC no longer compiles for.
    """
    digits = architecture.removeprefix("sm_").rstrip("af")
    if not architecture.startswith("sm_") or not digits.isdecimal():
        raise ValueError(f"device_arch: got {architecture!r}; want a name like sm_90")
    number = int(digits)
    if number in supported:
        return f"--gpu-architecture={architecture}", True
    older = [a for a in supported if a < number]
    if not older:
        raise ValueError(f"device_arch: got {architecture}; this NVRTC compiles for sm_{min(supported)} and later. Install an older NVRTC")
    return f"--gpu-architecture=compute_{max(older)}", False


def compile_cuda(
    source: str,
    name: str,
    options: Sequence[str] = (),
    architecture: str = "sm_90",
    headers: Mapping[str, str] | None = None,
) -> bytes:
    """Compile CUDA C++ for one architecture; a cubin, or PTX for a device newer than the compiler.

    Args:
        source: the text.
        name: what messages call it.
        options: NVRTC options, the architecture excluded.
        architecture: "sm_90", "sm_90a".
        headers: text of each header that the source may include, by the name in its ``#include``.

    Raises:
        CompileError: with the compiler's log.
        RuntimeUnavailable: NVRTC is not installed.
    """
    nvrtc, _, supported = _load()
    target, machine_code = target_options(architecture, supported)
    headers = headers or {}

    def call(function: str, *arguments: Any) -> Any:
        result = getattr(nvrtc, function)(*arguments)
        if int(result[0]):
            raise DeviceError(function, int(result[0]), _name(nvrtc, result[0]))
        return result[1] if len(result) > 1 else None

    program = call(
        "nvrtcCreateProgram",
        source.encode(),
        name.encode(),
        len(headers),
        [text.encode() for text in headers.values()],
        [key.encode() for key in headers],
    )
    try:
        flags = [target, *options]
        status = int(nvrtc.nvrtcCompileProgram(program, len(flags), [flag.encode() for flag in flags])[0])
        if status:
            log = bytearray(call("nvrtcGetProgramLogSize", program))
            call("nvrtcGetProgramLog", program, log)
            text = bytes(log).rstrip(b"\0\n").decode(errors="replace")
            raise CompileError(
                "nvrtcCompileProgram",
                status,
                _name(nvrtc, status),
                f"{name} for {architecture}, {flags}",
                text,
            )
        what = "CUBIN" if machine_code else "PTX"
        code = bytearray(call(f"nvrtcGet{what}Size", program))
        call(f"nvrtcGet{what}", program, code)
        return bytes(code) if machine_code else bytes(code).rstrip(b"\0")
    finally:
        nvrtc.nvrtcDestroyProgram(program)
