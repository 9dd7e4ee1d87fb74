"""Compiles the device kernels with hipRTC, as the package does at run time, for the targets named.

Needs no GPU: hipRTC only compiles.
"""

from __future__ import annotations

import ctypes
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
KERNELS = {
    "kernels.cpp": (b"hgg_fill", b"hgg_scan", b"hgg_zero_uncovered"),
    "judge.cpp": (b"hgg_judge", b"hgg_inspect", b"hgg_scatter", b"hgg_same", b"hgg_gaps", b"hgg_touch", b"hgg_digest"),
}


def compile_for(rtc: ctypes.CDLL, name: str, target: str) -> bytes:
    """Code object of one source for one target; SystemExit with the compiler's log if it fails or warns."""
    headers = sorted([*(ROOT / "device").glob("*.h"), *(ROOT / "include").glob("*.h")])
    texts = (ctypes.c_char_p * len(headers))(*[path.read_bytes() for path in headers])
    names = (ctypes.c_char_p * len(headers))(*[path.name.encode() for path in headers])
    source = (ROOT / "device" / name).read_bytes()
    program = ctypes.c_void_p()
    error = rtc.hiprtcCreateProgram(ctypes.byref(program), source, name.encode(), len(headers), texts, names)
    options = [f"--offload-arch={target}", "-std=c++17", "-O3", "-Wall", "-Werror"]
    array = (ctypes.c_char_p * len(options))(*[option.encode() for option in options])
    error = error or rtc.hiprtcCompileProgram(program, len(options), array)
    size = ctypes.c_size_t()
    rtc.hiprtcGetProgramLogSize(program, ctypes.byref(size))
    log = ctypes.create_string_buffer(size.value + 1)
    rtc.hiprtcGetProgramLog(program, log)
    if error:
        raise SystemExit(f"hipRTC, {name}, {target}: error {error}\n{log.value.decode()}")
    rtc.hiprtcGetCodeSize(program, ctypes.byref(size))
    code = ctypes.create_string_buffer(size.value)
    rtc.hiprtcGetCode(program, code)
    return code.raw


def main() -> None:
    """Compile for every target on the command line."""
    rtc = ctypes.CDLL("libhiprtc.so.6")
    for target in sys.argv[1:]:
        for source, kernels in KERNELS.items():
            code = compile_for(rtc, source, target)
            missing = [name.decode() for name in kernels if name + b".kd" not in code]
            if missing:
                raise SystemExit(f"hipRTC, {source}, {target}: {', '.join(missing)} is not in the code object")
            print(f"hipRTC, {source}, {target}: {len(code)} bytes")


if __name__ == "__main__":
    main()
