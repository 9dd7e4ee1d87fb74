"""Labs: what a benchmark needs of an array library and its device. NumPy on the CPU, CuPy on CUDA and ROCm."""

# ruff: noqa: D102 - what the methods do stands in Lab, once

from __future__ import annotations

import abc
import contextlib
import os
import time
import tracemalloc
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from hipgroupgemm.operands.dtypes import compute_type_of
from hipgroupgemm.operands.views import CPU, Device
from hipgroupgemm.runtime.process import available_cores

__all__ = ["CuPyLab", "Lab", "NumPyLab", "lab_for"]

_MEBI = 1 << 20


class Lab(abc.ABC):
    """One array library on one device.

    Attributes:
        xp: the library's NumPy-like module.
        device: where its arrays lie.
        default_dtype: the element type that people use there.
        scales: whether the published shapes are too large for the device, so that a benchmark scales them by default.
    """

    xp: Any
    device: Device
    default_dtype: str
    scales: bool

    @abc.abstractmethod
    def normal(self, shape: tuple[int, ...], dtype: np.dtype[Any], rng: np.random.Generator, std: float = 1.0) -> Any:
        """A fresh array of random normal numbers, rounded to `dtype`."""

    @abc.abstractmethod
    def from_host(self, array: np.ndarray[Any, Any]) -> Any:
        """A NumPy array's copy on the device."""

    @abc.abstractmethod
    def to_host(self, array: Any) -> np.ndarray[Any, Any]:
        """An array as a NumPy array, once all work on it is done."""

    @abc.abstractmethod
    def widen(self, array: Any) -> Any:
        """The array in a type that the library's own product is fast in; itself where that is so already."""

    @abc.abstractmethod
    def time(self, call: Callable[[], object]) -> float:
        """Runs `call` once and waits for it; milliseconds of the device's time, or of the host's on a CPU."""

    @abc.abstractmethod
    def peak_extra(self, call: Callable[[], object]) -> int:
        """Runs `call` once and waits for it; the most bytes that it held beyond what was allocated before."""

    @abc.abstractmethod
    def flush(self) -> None:
        """Drives the operands out of the caches, so that every timed call starts as cold as the others."""

    @abc.abstractmethod
    def free_bytes(self) -> int:
        """Memory that can still be allocated, bytes."""

    @abc.abstractmethod
    def copy_rate(self, nbytes: int) -> float:
        """Bytes read plus bytes written a second, by the best of a few copies of `nbytes`."""

    def empty_nan(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Any:
        """A new array filled with NaN."""
        array = self.xp.empty(shape, dtype)
        self.fill_nan(array)
        return array

    def fill_nan(self, array: Any) -> None:
        """Poisons an output, so that an element that nobody writes shows."""
        array.fill(float("nan"))

    def product_dtype(self, dtype: np.dtype[Any]) -> np.dtype[Any]:
        """The type that `widen` gives for `dtype`."""
        return dtype

    def close(self) -> None:  # noqa: B027 - most have nothing to free
        """Frees what the lab holds."""


class NumPyLab(Lab):
    """NumPy on the CPU. Products of 16- and 8-bit types are computed in float32: NumPy has no fast ones of their own."""

    xp = np
    device = CPU
    default_dtype = "float32"
    scales = True

    def __init__(self) -> None:
        # larger than the last-level cache, so that writing it through evicts everything else
        self._trash = np.zeros(min(max(3 * _cache_bytes() // 2, 8 * _MEBI), 96 * _MEBI) // 4, np.float32)

    def normal(self, shape: tuple[int, ...], dtype: np.dtype[Any], rng: np.random.Generator, std: float = 1.0) -> Any:
        wide = rng.standard_normal(shape, dtype=np.float64 if dtype == np.float64 else np.float32)
        if std != 1.0:
            wide *= wide.dtype.type(std)
        return wide.astype(dtype, copy=False)

    def from_host(self, array: np.ndarray[Any, Any]) -> Any:
        return array.copy()

    def to_host(self, array: Any) -> np.ndarray[Any, Any]:
        host: np.ndarray[Any, Any] = array
        return host

    def product_dtype(self, dtype: np.dtype[Any]) -> np.dtype[Any]:
        return np.dtype(compute_type_of(dtype, dtype))

    def widen(self, array: Any) -> Any:
        return array.astype(self.product_dtype(array.dtype), copy=False)

    def time(self, call: Callable[[], object]) -> float:
        start = time.perf_counter_ns()
        call()
        return (time.perf_counter_ns() - start) / 1e6

    def peak_extra(self, call: Callable[[], object]) -> int:
        """NumPy reports its buffers to tracemalloc; what BLAS packs its panels into is not seen."""
        running = tracemalloc.is_tracing()
        if not running:
            tracemalloc.start()
        try:
            tracemalloc.reset_peak()
            before, _ = tracemalloc.get_traced_memory()
            call()
            _, peak = tracemalloc.get_traced_memory()
        finally:
            if not running:
                tracemalloc.stop()
        return max(peak - before, 0)

    def flush(self) -> None:
        np.add(self._trash, 1, out=self._trash)

    def free_bytes(self) -> int:
        with contextlib.suppress(OSError, ValueError, IndexError):
            for line in Path("/proc/meminfo").read_text(encoding="ascii").splitlines():
                if line.startswith("MemAvailable:"):
                    return int(line.split()[1]) * 1024
        with contextlib.suppress(OSError, ValueError, AttributeError):
            return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2
        return 1 << 62

    def copy_rate(self, nbytes: int) -> float:
        """One thread a core copies its part: one alone does not fill the memory's bandwidth. NumPy's copy releases the GIL."""
        from concurrent.futures import ThreadPoolExecutor

        threads = available_cores()
        source = np.ones(nbytes // 8 // threads * threads, np.float64)
        target = np.zeros_like(source)
        parts = [(t, s) for t, s in zip(np.split(target, threads), np.split(source, threads), strict=True)]
        best = float("inf")
        with ThreadPoolExecutor(threads) as pool:
            for _ in range(6):
                start = time.perf_counter()
                list(pool.map(lambda part: np.copyto(*part), parts))
                best = min(best, time.perf_counter() - start)
        return 2 * source.nbytes / best


class CuPyLab(Lab):
    """CuPy on the current CUDA or ROCm device; times are CUDA's or HIP's events."""

    default_dtype = "bfloat16"
    scales = False

    def __init__(self) -> None:
        import cupy

        self.xp = cupy
        runtime = cupy.cuda.runtime
        self.device = Device("rocm" if runtime.is_hip else "cuda", int(cupy.cuda.Device().id))
        cache = int(cupy.cuda.Device().attributes.get("L2CacheSize", 0))
        # AMD's Infinity Cache (256 MiB on MI300X) lies behind L2 and is in no attribute
        self._trash = cupy.zeros(max(2 * cache, 512 * _MEBI if runtime.is_hip else 128 * _MEBI) // 4, np.float32)
        self._start, self._end = cupy.cuda.Event(), cupy.cuda.Event()

    def normal(self, shape: tuple[int, ...], dtype: np.dtype[Any], rng: np.random.Generator, std: float = 1.0) -> Any:
        state = self.xp.random.RandomState(int(rng.integers(1 << 31)))
        wide = state.standard_normal(shape, dtype=np.float64 if dtype == np.float64 else np.float32)
        if std != 1.0:
            wide *= wide.dtype.type(std)
        return wide.astype(dtype, copy=False)

    def from_host(self, array: np.ndarray[Any, Any]) -> Any:
        return self.xp.asarray(array)

    def to_host(self, array: Any) -> np.ndarray[Any, Any]:
        host: np.ndarray[Any, Any] = self.xp.asnumpy(array)
        return host

    def widen(self, array: Any) -> Any:
        return array

    def time(self, call: Callable[[], object]) -> float:
        self._start.record()
        call()
        self._end.record()
        self._end.synchronize()
        return float(self.xp.cuda.get_elapsed_time(self._start, self._end))

    def peak_extra(self, call: Callable[[], object]) -> int:
        """What goes through CuPy's memory pool, the backends' scratch included: it comes from the caller's allocator."""
        hook = _pool_hook(self.xp)
        with hook:
            call()
            self.xp.cuda.get_current_stream().synchronize()
        return int(hook.peak)

    def flush(self) -> None:
        self._trash += 1

    def free_bytes(self) -> int:
        free, _ = self.xp.cuda.runtime.memGetInfo()
        return int(free) + int(self.xp.get_default_memory_pool().free_bytes())

    def copy_rate(self, nbytes: int) -> float:
        source = self.xp.ones(nbytes // 4, np.float32)
        target = self.xp.zeros_like(source)
        best = min(self.time(lambda: self.xp.copyto(target, source)) for _ in range(8))
        return float(2 * source.nbytes / best * 1e3)

    def close(self) -> None:
        self._trash = None
        self.xp.get_default_memory_pool().free_all_blocks()


def _pool_hook(cupy: Any) -> Any:
    class Peak(cupy.cuda.MemoryHook):  # type: ignore[misc]
        name = "hipgroupgemm_peak"

        def __init__(self) -> None:
            self.live = self.peak = 0
            self._sizes: dict[int, int] = {}

        def malloc_postprocess(self, **info: Any) -> None:
            self._sizes[info["pmem_id"]] = info["mem_size"]
            self.live += info["mem_size"]
            self.peak = max(self.peak, self.live)

        def free_postprocess(self, **info: Any) -> None:
            self.live -= self._sizes.pop(info["pmem_id"], 0)  # blocks from before the hook are not ours

    return Peak()


def _cache_bytes() -> int:
    largest = 32 * _MEBI
    for path in Path("/sys/devices/system/cpu/cpu0/cache").glob("index*/size"):
        with contextlib.suppress(OSError, ValueError):
            text = path.read_text(encoding="ascii").strip()
            unit = {"K": 1 << 10, "M": _MEBI, "G": 1 << 30}.get(text[-1:], 1)
            largest = max(largest, int(text.rstrip("KMG")) * unit)
    return largest


@contextlib.contextmanager
def lab_for(device: str) -> Iterator[Lab]:
    """A lab on a device.

    Args:
        device: "cpu"; "gpu", CuPy's current device; "auto", that where there is one, else the CPU; or "cuda", "cuda:1", "rocm:0".

    Raises:
        RuntimeError: CuPy or such a device of its is missing; the text says which.
        ValueError: no device is called so.
    """
    if device == "cpu" or (device == "auto" and gpu_refusal()):
        yield NumPyLab()
        return
    reason = gpu_refusal(device)
    if reason:
        raise RuntimeError(reason)
    with contextlib.ExitStack() as stack:
        if device not in ("auto", "gpu"):
            import cupy

            stack.enter_context(cupy.cuda.Device(Device.of(device).index))
        lab = CuPyLab()
        stack.callback(lab.close)
        yield lab


def gpu_refusal(device: str = "gpu") -> str:
    """Why CuPy can't serve "gpu", "auto" or a named GPU such as "cuda:1" here, or "" where it can."""
    wanted = None if device in ("auto", "gpu") else Device.of(device)
    try:
        import cupy

        count = int(cupy.cuda.runtime.getDeviceCount())
        kind = "rocm" if cupy.cuda.runtime.is_hip else "cuda"
    except ImportError as error:
        return f"CuPy is not usable ({error}); pip install 'hipgroupgemm[rocm]' or 'hipgroupgemm[cuda]'"
    except Exception as error:  # CuPy's own error types are not importable without it
        return f"CuPy finds no device ({error}); see hipgroupgemm doctor"
    if not count:
        return "CuPy finds no device; see hipgroupgemm doctor"
    if wanted is not None and (wanted.kind != kind or wanted.index >= count):
        return f"CuPy has no {wanted} here, only {', '.join(f'{kind}:{index}' for index in range(count))}"
    return ""
