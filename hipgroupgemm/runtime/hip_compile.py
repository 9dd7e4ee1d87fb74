"""HIP C++ to machine code with hipRTC, through hip-python. Needs no device."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from typing import Any

from .errors import CompileError, DeviceError

_lock = threading.Lock()
_loaded: tuple[Any, tuple[int, int]] | None = None


def _load() -> tuple[Any, tuple[int, int]]:
    global _loaded
    with _lock:
        if _loaded is None:
            from .hip_library import load_hiprtc

            _loaded = load_hiprtc()
        return _loaded


def hiprtc_version() -> str:
    """ "hiprtc 9.0", say.

    Raises:
        RuntimeUnavailable: hipRTC or hip-python is not installed.
    """
    major, minor = _load()[1]
    return f"hiprtc {major}.{minor}"


def compile_hip(
    source: str,
    name: str,
    options: Sequence[str] = (),
    architecture: str = "gfx942",
    headers: Mapping[str, str] | None = None,
) -> bytes:
    """Compile HIP C++ for one target; a code object.

    Args:
        source: the text.
        name: what messages call it.
        options: hipRTC options, the target excluded.
        architecture: "gfx942", with features or without ("gfx942:sramecc+:xnack-").
        headers: text of each header that the source may include, by the name in its ``#include``.

    Raises:
        CompileError: with the compiler's log.
        RuntimeUnavailable: hipRTC or hip-python is not installed.
        ValueError: not a target name.
    """
    if not architecture.startswith("gfx"):
        raise ValueError(f"device_arch: got {architecture!r}; want a name like gfx942")
    hiprtc, _ = _load()
    headers = headers or {}

    def call(function: str, *arguments: Any) -> Any:
        result = getattr(hiprtc, function)(*arguments)
        status = int(result[0])
        if status:
            raise DeviceError(function, status, hiprtc.hiprtcResult(status).name)
        return result[1] if len(result) > 1 else None

    program = call(
        "hiprtcCreateProgram",
        source.encode(),
        name.encode(),
        len(headers),
        [text.encode() for text in headers.values()] or None,
        [key.encode() for key in headers] or None,
    )
    try:
        flags = [f"--offload-arch={architecture}", *options]
        status = int(hiprtc.hiprtcCompileProgram(program, len(flags), [flag.encode() for flag in flags])[0])
        if status:
            log = bytearray(call("hiprtcGetProgramLogSize", program) or 1)
            call("hiprtcGetProgramLog", program, log)
            text = bytes(log).rstrip(b"\0\n").decode(errors="replace")
            summary = f"{name} for {architecture}, {flags}"
            raise CompileError("hiprtcCompileProgram", status, hiprtc.hiprtcResult(status).name, summary, text)
        code = bytearray(call("hiprtcGetCodeSize", program))
        call("hiprtcGetCode", program, code)
        return bytes(code)
    finally:
        hiprtc.hiprtcDestroyProgram(program.createRef())
