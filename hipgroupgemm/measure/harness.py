"""The harness of a device, and that of a CPU: NumPy arrays, the host's clock, products in float64 by BLAS."""

from __future__ import annotations

import contextlib
import ctypes
import time
import tracemalloc
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

from hipgroupgemm.measure.base import Array, Harness, Memory, OperandSet
from hipgroupgemm.measure.check import CheckCounts, Products, Sample, check_arrays, differing, digest_of, touched_bytes
from hipgroupgemm.measure.device_harness import DeviceHarness
from hipgroupgemm.measure.environment import ONE_THREAD, blas_threads, busy_note, load_average
from hipgroupgemm.measure.layouts import Layout
from hipgroupgemm.measure.roofline import Roofline
from hipgroupgemm.operands.dtypes import compute_type_of, dtype_of
from hipgroupgemm.operands.views import CPU, Device, numpy_view
from hipgroupgemm.runtime.process import available_cores

__all__ = ["HostHarness", "harness_for"]

_MEBI = 1 << 20
_PRODUCT, _COPY = 1536, 128 * _MEBI  # extents and bytes of what the roofline is measured by


def harness_for(device: Device | str) -> Harness:
    """The harness of a device.

    Raises:
        RuntimeError: no driver or no such runtime; the text says what to install.
        ValueError: no such device.
    """
    where = Device.of(device)
    return HostHarness() if where.kind == "cpu" else DeviceHarness(where)


class HostHarness(Harness):
    """NumPy on the CPU; see `Harness`. Where other work keeps the cores busy, BLAS has one thread until the harness is closed."""

    device = CPU
    budget = 2e9
    table = 4_194_301

    def __init__(self) -> None:
        super().__init__()
        # larger than the last-level cache, so that writing it through evicts everything else
        self._trash = np.zeros(min(max(3 * _cache_bytes() // 2, 8 * _MEBI), 96 * _MEBI) // 4, np.float32)
        self.note = busy_note(load_average(), available_cores())
        self._settings = contextlib.ExitStack()
        if self.note and self._settings.enter_context(blas_threads(1)):
            self.note += f" {ONE_THREAD} for that reason."

    def _allocate(self, nbytes: int) -> Memory:
        held = [np.empty(nbytes + 16, np.uint8)]
        start = held[0].ctypes.data
        return Memory(start + -start % 16, nbytes, held.clear)

    def set_bytes(self, address: int, value: int, nbytes: int) -> None:
        """A memset."""
        ctypes.memset(address, value, nbytes)

    def copy_bytes(self, target: int, source: int, nbytes: int) -> None:
        """A memmove."""
        ctypes.memmove(target, source, nbytes)

    def _scatter(self, layout: Layout, address: int, numbers: Array) -> None:
        _elements(layout, address)[...] = np.resize(numbers, layout.shape)

    def _digest(self, address: int, nbytes: int) -> int:
        return digest_of(_bytes(address, nbytes))

    def _differing(self, layout: Layout, address: int, other: int) -> int:
        return differing(_elements(layout, address), _elements(layout, other))

    def _check(self, operands: OperandSet, products: Products, sample: Sample, tail: str, fill: int) -> CheckCounts:
        parts = {name: _elements(layout, operands.pointers[name]) for name, layout in operands.layouts.items()}
        seen, memory = check_arrays(products, sample, parts, tail, fill), operands.memory["out"]
        seen.touched = touched_bytes(_bytes(memory.ptr, memory.nbytes), operands.layouts["out"], fill)
        return seen

    def time(self, call: Callable[[], object]) -> float:
        """Milliseconds of the host's clock."""
        start = time.perf_counter_ns()
        call()
        return (time.perf_counter_ns() - start) / 1e6

    def flush(self) -> None:
        """Writes more than the last-level cache holds."""
        np.add(self._trash, 1, out=self._trash)

    def free_bytes(self) -> int:
        """Memory that the system says is available."""
        with contextlib.suppress(OSError):
            for line in Path("/proc/meminfo").read_text(encoding="ascii").splitlines():
                if line.startswith("MemAvailable:"):
                    return int(line.split()[1]) * 1024
        return 1 << 62  # nobody knows

    def peak_bytes(self, call: Callable[[], object]) -> int:
        """NumPy reports its buffers to tracemalloc; what BLAS packs its panels into is not seen."""
        tracemalloc.start()
        try:
            before, _ = tracemalloc.get_traced_memory()
            call()
            return max(tracemalloc.get_traced_memory()[1] - before, 0)
        finally:
            tracemalloc.stop()

    def roofline(self, dtype: Any) -> Roofline:
        """The best of a few runs each. 16- and 8-bit products are computed in float32, so that it is float32's product that bounds them."""
        kind = np.dtype(compute_type_of(dtype_of(dtype), dtype_of(dtype)))
        a, b = np.random.default_rng(0).standard_normal((2, _PRODUCT, _PRODUCT)).astype(kind)
        out = np.matmul(a, b)
        best = min(self.time(lambda: np.matmul(a, b, out=out)) for _ in range(5))
        # one thread per core takes its part: one alone does not fill the memory's bandwidth, and NumPy's loops release the GIL
        threads = available_cores()
        source = np.ones((threads, _COPY // 8 // threads))
        target = np.zeros_like(source)
        with ThreadPoolExecutor(threads) as pool:
            copy = min(self.time(lambda: list(pool.map(np.copyto, target, source))) for _ in range(6))
            read = min(self.time(lambda: list(pool.map(np.max, source))) for _ in range(6))
        return Roofline.of(_PRODUCT, kind.name, best, source.nbytes, copy, read)

    def close(self) -> None:
        """Forgets the arrays, and gives BLAS its threads back."""
        super().close()
        self._settings.close()


def _bytes(address: int, nbytes: int) -> Array:
    return numpy_view(address, (nbytes,), (1,), np.dtype(np.uint8))


def _elements(layout: Layout, address: int) -> Array:
    return numpy_view(address, layout.shape, layout.byte_strides, layout.dtype)


def _cache_bytes() -> int:
    largest = 32 * _MEBI
    for path in Path("/sys/devices/system/cpu/cpu0/cache").glob("index*/size"):
        with contextlib.suppress(OSError, ValueError, KeyError):
            text = path.read_text(encoding="ascii").strip()
            largest = max(largest, int(text[:-1]) * {"K": 1 << 10, "M": _MEBI, "G": 1 << 30}[text[-1]])
    return largest
