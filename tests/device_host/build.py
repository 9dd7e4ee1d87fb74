"""Compiles the kernels for the host and launches them from Python."""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
from pathlib import Path

import numpy as np

from .layout import ARGUMENTS, KERNELS, THREADS

ROOT = Path(__file__).resolve().parents[2]
DEVICE = ROOT / "device"
INCLUDE = ROOT / "include"
DRIVER = Path(__file__).resolve().parent / "driver.cpp"
JUDGE_DRIVER = Path(__file__).resolve().parent / "judge_driver.cpp"


def compiler() -> str:
    """The C++ compiler: $CXX, else g++ or clang++. None at all is an error, never a skipped test."""
    for name in (os.environ.get("CXX"), "g++", "clang++", "c++"):
        if name and shutil.which(name):
            return name
    raise RuntimeError("no C++ compiler: the device kernels' host build needs g++ (Debian: apt-get install g++)")


def compile_host(folder: Path, device: Path = DEVICE, options: tuple[str, ...] = ("-O2",), driver: Path = DRIVER) -> Path:
    """Builds a driver with the kernels of ``device`` into ``folder``; warnings are errors."""
    library = folder / "device_host.so"
    command = [
        compiler(),
        "-std=c++17",
        "-Wall",
        "-Wextra",
        "-Wpedantic",
        "-Werror",
        *options,
        "-shared",
        "-fPIC",
    ]
    command += [f"-I{device}", f"-I{INCLUDE}", str(driver), "-o", str(library)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)}\n{done.stdout}{done.stderr}")
    return library


class HostBuild:
    """The host library; ``run`` takes launches as the GPU drivers in bench do."""

    def __init__(self, library: Path) -> None:
        self.library = ctypes.CDLL(str(library))
        self._run = self.library.hgg_test_run
        self._run.restype = ctypes.c_int
        self._run.argtypes = [ctypes.c_void_p] * 4 + [ctypes.c_int]

    def run(self, arguments: np.ndarray, kernels: np.ndarray, grids: np.ndarray, orders: np.ndarray | None = None) -> None:
        """Runs launch i as kernel ``KERNELS[kernels[i]]`` with ``arguments[i]`` on ``grids[i]`` blocks."""
        count = len(arguments)
        arguments = np.ascontiguousarray(arguments, dtype=ARGUMENTS)
        kernels = np.ascontiguousarray(kernels, dtype=np.int32)
        grids = np.ascontiguousarray(grids, dtype=np.uint32)
        orders = np.zeros(count, np.int32) if orders is None else np.ascontiguousarray(orders, dtype=np.int32)
        pointers = [a.ctypes.data for a in (arguments, kernels, grids, orders)]
        done = self._run(*pointers, count)
        if done != count:
            raise RuntimeError(f"launch {done} of {count} ({KERNELS[kernels[done]]}) was refused")

    def launch(self, kernel: str, arguments: np.ndarray, grid: int, threads: int = THREADS, order: int = 0) -> int:
        """One launch through the entry point that a stand-in runtime uses; its status."""
        blob = np.ascontiguousarray(arguments, dtype=ARGUMENTS)
        call = self.library.hgg_host_launch
        call.argtypes = [ctypes.c_char_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint, ctypes.c_int]
        return int(call(kernel.encode(), blob.ctypes.data, grid, threads, order))
