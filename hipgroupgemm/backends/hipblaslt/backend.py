"""Which algorithms hipBLASLt has for a config, and which of them really run."""

from __future__ import annotations

import contextlib
import logging
from typing import ClassVar

import numpy as np

from hipgroupgemm import native
from hipgroupgemm.backends.base import AlgorithmLimits, Backend, Device, Executable, MatmulAlgorithm
from hipgroupgemm.backends.hipblaslt.executable import NO_PRODUCT, HipblasltExecutable, handles
from hipgroupgemm.backends.hipblaslt.problem import Refused, problem_of
from hipgroupgemm.backends.scan_arguments import RECORD_BYTES
from hipgroupgemm.config import GroupedGemmConfig
from hipgroupgemm.runtime import RuntimeUnavailable, get_runtime
from hipgroupgemm.runtime.forks import new_rlock
from hipgroupgemm.runtime.scratch import ScratchMemory, pack_sections

__all__ = ["HipblasltBackend"]

_RANKED = 16  # algorithms asked of hipBLASLt's own ranking
_LISTS = 256  # configs whose algorithms are remembered
_log = logging.getLogger(__name__)


class HipblasltBackend(Backend):
    """hipBLASLt's grouped GEMM on ROCm devices. What it cannot express, or has no kernels for, it refuses with the reason."""

    name = "hipblaslt"
    types = frozenset(("bfloat16", "float16", "float32", "float64"))
    features = frozenset(
        ("alpha", "bias", "c", "group_offset", "narrow_output", "out_listed", "rhs_listed", "sizes_per_batch", "tf32", "wide_output")
    )
    layouts = frozenset(("column_major_output",))
    lacking: ClassVar[dict[str, str]] = {
        "batch_invariant": "its kernels may begin k at a place that depends on the tile (StaggerU), and do not say whether they do",
        "max_multiprocessors": "nothing in its GroupedGemm limits the CUs; a stream with a CU mask does (hipExtStreamCreateWithCUMask)",
    }

    def __init__(self) -> None:
        self._lock = new_rlock()
        self._lists: dict[tuple[GroupedGemmConfig, int, bool], list[MatmulAlgorithm]] = {}
        self._tried: dict[tuple[int, int], str | None] = {}  # by device and index: why it does not run
        self._version = ""

    def refusal(self, config: GroupedGemmConfig, device: Device) -> str | None:
        """None when hipBLASLt has at least one algorithm for the config on this device that runs, else the reason why not."""
        if device.kind != "rocm":
            return f"it serves ROCm devices, the operands are on {device}"
        reason = native.unavailable_reason()
        if reason is not None:
            return reason
        try:
            found = self.algorithms(config, device, AlgorithmLimits(1))
            if found:
                return None
            g, broken = problem_of(config.key()).gemm, self._broken(config.key(), device)
            architecture = get_runtime("rocm").device_info(device.index).architecture
        except (Refused, native.NativeError, RuntimeUnavailable, NotImplementedError) as error:
            return str(error)
        if broken:
            return f"none of the {len(broken)} algorithms that hipBLASLt lists for this runs; {broken[0]}"
        few = f", its m, which is {g.m} here; most of its kernels want 8 or more" if g.m < 8 else ""
        return (
            f"hipBLASLt has no grouped kernel for {config.type_a} -> {config.type_d} with m={g.m} n={g.n} k={g.k} "
            f"({'T' if g.trans_a else 'N'}{'T' if g.trans_b else 'N'}, column-major) on {architecture}{few}; "
            "a newer hipBLASLt may, and so does the triton backend"
        )

    def versions(self, device: Device) -> dict[str, str]:
        """hipBLASLt's version with its git revision: "1.2.0+3f2b1c" (some distributions build it without one)."""
        if not self._version:
            with handles.lent(device.index) as handle:
                info = handle.info()
            self._version = ".".join(str(part) for part in info.loaded) + (f"+{info.revision}" if info.revision else "")
        return {"hipblaslt": self._version}

    def algorithms(self, config: GroupedGemmConfig, device: Device, limits: AlgorithmLimits) -> list[MatmulAlgorithm]:
        """hipBLASLt's supported algorithms with their true workspaces, its own ranking first; the first has been seen to run.

        A split or stream-K algorithm takes its work from the host's sizes, not from device records, so it is not offered.
        """
        key, found = config.key(), []
        for every in (False, True):
            listed = self._list(key, device, every=every)
            found = [a for a in listed if a.workspace_size <= limits.max_workspace_size and not self._tried.get((device.index, a.index))]
            while found and not self._runs(key, device, found[0]):
                found.pop(0)
            if len(found) >= limits.max_algorithm_count:
                break
        return found[: limits.max_algorithm_count]

    def find_algorithm(self, config: GroupedGemmConfig, device: Device, name: str, index: int) -> MatmulAlgorithm | None:
        """The algorithm of that name and index, if it runs, asked of hipBLASLt by its index: listing all may take seconds."""
        key = config.key()
        found = next((a for a in self._list(key, device) if (a.name, a.index) == (name, index)), None)
        problem = problem_of(key)
        if found is None and not problem.empty and index >= 0:
            with contextlib.suppress(native.NativeValueError), handles.lent(device.index) as handle:
                with native.GroupedGemm(handle, problem.gemm) as gemm:
                    one = gemm.algorithm(index)
                if one.name == name and one.supported and one.verified:
                    found = _algorithm(one)
        return found if found is not None and self._runs(key, device, found) else None

    def prepare(self, config: GroupedGemmConfig, device: Device, algorithm: MatmulAlgorithm, stream: int) -> Executable:
        """Kernels compiled and loaded. Raises NativeError, which names the algorithm, where hipBLASLt lists one that does not run."""
        if not self._runs(config.key(), device, algorithm):
            raise native.NativeError("hgg_run", "HGG_LIBRARY_ERROR", -1, str(self._tried[device.index, algorithm.index]))
        return HipblasltExecutable(config, device, algorithm, stream)

    def _list(self, key: GroupedGemmConfig, device: Device, *, every: bool = False) -> list[MatmulAlgorithm]:
        """The ranked algorithms, or behind them all others: checking each of hundreds takes seconds where there are thousands of groups."""
        with self._lock:
            found = self._lists.get((key, device.index, every))
            if found is None:
                problem = problem_of(key)
                found = [NO_PRODUCT]
                if not problem.empty:
                    with handles.lent(device.index) as handle, native.GroupedGemm(handle, problem.gemm) as gemm:
                        listed = gemm.algorithms(_RANKED)
                        if every or not any(algorithm.verified for algorithm in listed):
                            listed += gemm.algorithms()
                    found = [_algorithm(a) for a in {a.index: a for a in listed if a.verified}.values()]
                if len(self._lists) >= _LISTS:
                    self._lists.clear()
                self._lists[key, device.index, every] = found
            return found

    def _broken(self, key: GroupedGemmConfig, device: Device) -> list[str]:
        """What is wrong with the listed algorithms that do not run."""
        reasons = [self._tried.get((device.index, algorithm.index)) for algorithm in self._list(key, device, every=True)]
        return [reason for reason in reasons if reason]

    def _runs(self, key: GroupedGemmConfig, device: Device, algorithm: MatmulAlgorithm) -> bool:
        """Whether an algorithm can be launched, tried once a process with records of no extent. One that cannot is struck out.

        hipBLASLt lists kernels whose files may be missing, and tells at the launch. It also loads their files there, which a graph's
        capture must not have to do.
        """
        if algorithm.index == NO_PRODUCT.index:
            return True
        with self._lock:
            if (device.index, algorithm.index) not in self._tried:
                reason = self._tried[device.index, algorithm.index] = self._try(key, device, algorithm)
                if reason:
                    _log.warning("hipblaslt: an algorithm is struck out for this process: %s", reason)
            return not self._tried[device.index, algorithm.index]

    def _try(self, key: GroupedGemmConfig, device: Device, algorithm: MatmulAlgorithm) -> str | None:
        runtime, problem = get_runtime("rocm"), problem_of(key).gemm
        (records, workspace), size = pack_sections([RECORD_BYTES * problem.count, algorithm.workspace_size])
        with runtime.use_device(device.index), runtime.relaxed_capture(), handles.lent(device.index) as handle:
            stream = runtime.create_stream(device.index)  # a capture on another one may forbid work on the default stream
            memory = ScratchMemory(runtime, device.index, stream, size)
            try:
                with native.GroupedGemm(handle, problem) as gemm:
                    index, needed = algorithm.index, algorithm.workspace_size
                    record = bytearray(gemm.initialize(index, memory.address + workspace, needed, stream))
                    record[4:8] = bytes(4)  # n = 0
                    host = np.frombuffer(record * problem.count, np.uint8)
                    runtime.memcpy_async(memory.address + records, host.ctypes.data, host.nbytes, stream)
                    gemm.run(memory.address + records, stream)
                    runtime.synchronize_stream(stream)
            except native.NativeError as error:
                if error.status in ("HGG_LIBRARY_ERROR", "HGG_UNVERIFIED"):
                    return error.text
                raise
            finally:
                memory.close()
                runtime.destroy_stream(stream)
        return None


def _algorithm(found: native.NativeAlgorithm) -> MatmulAlgorithm:
    return MatmulAlgorithm("hipblaslt", found.index, found.name, found.workspace_size, deterministic=True)
