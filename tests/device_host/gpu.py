"""The same kernels compiled at run time for a GPU and launched there: CUDA by CuPy, HIP by hip-python.

Both have ``run`` as ``build.HostBuild`` has it, over an arena on the device. Used by the tests marked cuda
and hip, and by bench/device_kernels.py.
"""

from __future__ import annotations

import ctypes
import re
from pathlib import Path
from typing import Any

import numpy as np

from .build import DEVICE, INCLUDE
from .layout import ARGUMENTS, KERNELS, THREADS


def inlined(path: Path = DEVICE / "kernels.cpp", seen: set[str] | None = None) -> str:
    """The kernels as one source text, for run-time compilers."""
    seen = set() if seen is None else seen
    if path.name in seen:
        return ""
    seen.add(path.name)
    lines = []
    for line in path.read_text(encoding="utf-8").splitlines():
        found = re.match(r'#include "(.+)"', line)
        if found:
            inner = next(folder / found[1] for folder in (path.parent, DEVICE, INCLUDE) if (folder / found[1]).exists())
            lines.append(inlined(inner, seen))
        else:
            lines.append(line)
    return "\n".join(lines) + "\n"


class CudaBuild:
    """NVRTC through CuPy; launches through the driver, so that a launch costs microseconds of host time."""

    def __init__(self, options: tuple[str, ...] = (), source: str | None = None, names: tuple[str, ...] = KERNELS) -> None:
        import cupy

        self.cupy = cupy
        self.module = cupy.RawModule(code=source or inlined(), options=("-std=c++17", *options), backend="nvrtc")
        self.kernels = {name: self.module.get_function(name) for name in names}
        self.functions = {name: ctypes.c_void_p(kernel.kernel.ptr) for name, kernel in self.kernels.items()}
        self.driver = ctypes.CDLL("libcuda.so.1")
        self.driver.cuLaunchKernel.argtypes = [ctypes.c_void_p, *[ctypes.c_uint] * 7, *[ctypes.c_void_p] * 3]

    def launch(self, name: str, arguments: np.ndarray | None, grid: int, threads: int = THREADS) -> None:
        """One launch on CuPy's current stream; ``arguments`` None for a kernel without any."""
        stream = self.cupy.cuda.get_current_stream().ptr
        params = None if arguments is None else (ctypes.c_void_p * 1)(arguments.ctypes.data)
        status = self.driver.cuLaunchKernel(self.functions[name], grid, 1, 1, threads, 1, 1, 0, stream, params, None)
        if status:
            raise RuntimeError(f"cuLaunchKernel({name}) returned {status}")

    def arena(self, content: np.ndarray) -> Any:
        """A copy on the device, 512-byte aligned, with ``.data.ptr``."""
        return self.cupy.asarray(content)

    def run(self, arguments: np.ndarray, kernels: np.ndarray, grids: np.ndarray, orders: np.ndarray | None = None) -> None:
        arguments = np.ascontiguousarray(arguments, dtype=ARGUMENTS)
        for i, (kernel, grid) in enumerate(zip(kernels.tolist(), grids.tolist(), strict=True)):
            self.launch(KERNELS[kernel], arguments[i : i + 1], grid)
        self.cupy.cuda.get_current_stream().synchronize()

    def read(self, arena: Any) -> np.ndarray:
        return np.asarray(self.cupy.asnumpy(arena))

    @staticmethod
    def address(arena: Any) -> int:
        return int(arena.data.ptr)


class _Arguments(ctypes.Structure):
    """The kernels' struct as a by-value argument: its size and alignment are all that hip-python needs."""

    _fields_ = (("words", ctypes.c_uint64 * (ARGUMENTS.itemsize // 8)),)


class HipBuild:
    """hipRTC through hip-python, for the target of the current device."""

    def __init__(self) -> None:
        from hip import hip, hiprtc

        self.hip, self.hiprtc = hip, hiprtc
        name = self.properties().gcnArchName
        self.target = name if isinstance(name, str) else name.decode()
        self.code = self.compile(self.target)
        self.module = self.check(hip.hipModuleLoadData(self.code))
        self.functions = {name: self.check(hip.hipModuleGetFunction(self.module, name.encode())) for name in KERNELS}

    def properties(self) -> Any:
        try:
            return self.check(self.hip.hipGetDeviceProperties(0))
        except TypeError:  # hip-python 6 and 7 fill a struct that they are given
            properties = self.hip.hipDeviceProp_t()
            self.check(self.hip.hipGetDeviceProperties(properties, 0))
            return properties

    def check(self, result: Any) -> Any:
        status, *rest = result if isinstance(result, tuple) else (result,)
        if int(status):
            raise RuntimeError(f"{status!r}")
        return rest[0] if len(rest) == 1 else rest

    def compile(self, target: str) -> bytearray:
        rtc = self.hiprtc
        program = self.check(rtc.hiprtcCreateProgram(inlined().encode(), b"kernels.cpp", 0, None, None))
        options = [b"--offload-arch=" + target.encode(), b"-std=c++17", b"-O3"]
        (status,) = rtc.hiprtcCompileProgram(program, len(options), options)
        if int(status):
            log = bytearray(self.check(rtc.hiprtcGetProgramLogSize(program)))
            self.check(rtc.hiprtcGetProgramLog(program, log))
            raise RuntimeError(f"{status!r}: {log.decode()}")
        code = bytearray(self.check(rtc.hiprtcGetCodeSize(program)))
        self.check(rtc.hiprtcGetCode(program, code))
        return code

    def arena(self, content: np.ndarray) -> Any:
        memory = self.check(self.hip.hipMalloc(content.nbytes))
        kind = self.hip.hipMemcpyKind.hipMemcpyHostToDevice
        self.check(self.hip.hipMemcpy(memory, np.ascontiguousarray(content), content.nbytes, kind))
        return memory, content.nbytes

    def run(self, arguments: np.ndarray, kernels: np.ndarray, grids: np.ndarray, orders: np.ndarray | None = None) -> None:
        arguments = np.ascontiguousarray(arguments, dtype=ARGUMENTS)
        for i, (kernel, grid) in enumerate(zip(kernels.tolist(), grids.tolist(), strict=True)):
            by_value = _Arguments.from_buffer_copy(arguments[i : i + 1].tobytes())
            self.check(
                self.hip.hipModuleLaunchKernel(self.functions[KERNELS[kernel]], grid, 1, 1, THREADS, 1, 1, 0, None, None, (by_value,))
            )
        self.check(self.hip.hipDeviceSynchronize())

    def read(self, arena: Any) -> np.ndarray:
        memory, count = arena
        content = np.empty(count, np.uint8)
        self.check(self.hip.hipMemcpy(content, memory, count, self.hip.hipMemcpyKind.hipMemcpyDeviceToHost))
        self.check(self.hip.hipFree(memory))
        return content

    @staticmethod
    def address(arena: Any) -> int:
        return int(arena[0])
