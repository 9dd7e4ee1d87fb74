"""The Triton backend: what it can run, its algorithms, and prepared ones."""

from __future__ import annotations

import functools
import hashlib
import threading
from collections.abc import Sequence
from pathlib import Path

from hipgroupgemm.backends.base import AlgorithmLimits, Backend, Device, Executable, MatmulAlgorithm
from hipgroupgemm.backends.triton.candidates import Machine, all_candidates, copies_reason, ordered
from hipgroupgemm.backends.triton.compiler import target_of, triton_version, unavailable_reason
from hipgroupgemm.config import GroupedGemmConfig, RaggedDotMode

__all__ = ["TritonBackend"]

_TYPES = ("bfloat16", "float16", "float32")
_INT32 = 1 << 31
_SMALLEST_TILE = 16
_KERNELS = ("hopper_common", "hopper_rows", "hopper_slabs", "portable", "scan")


@functools.lru_cache(1)
def _kernels_digest() -> str:
    """Tells revisions of the kernels apart that have one version of the package."""
    digest = hashlib.sha256()
    for name in _KERNELS:
        digest.update(Path(__file__).with_name(f"{name}.py").read_bytes())
    return digest.hexdigest()[:12]


class TritonBackend(Backend):
    """Grouped GEMM in Triton kernels on CUDA and ROCm.."""

    name = "triton"
    types = frozenset(_TYPES)
    features = frozenset(("alpha", "bias", "c", "group_offset", "mixed_types", "narrow_output", "sizes_per_batch", "tf32", "wide_output"))
    layouts = frozenset(
        ("bias_inner_stride", "c_inner_stride", "column_major_output", "lhs_inner_stride", "output_inner_stride", "rhs_inner_stride")
    )

    def __init__(self) -> None:
        self._machines: dict[Device, Machine] = {}
        self._lock = threading.Lock()

    def _machine(self, device: Device) -> Machine:
        found = self._machines.get(device)
        if found is None:
            from hipgroupgemm.runtime import get_runtime

            info = get_runtime(device.kind).device_info(device.index)
            machine = Machine(target_of(info.architecture), info.multiprocessors, info.shared_memory_optin)
            with self._lock:
                found = self._machines.setdefault(device, machine)
        return found

    def refusal(self, config: GroupedGemmConfig, device: Device) -> str | None:
        """None when it can run the config on the device, else why not."""
        if device.kind not in ("cuda", "rocm"):
            return f"runs on GPUs, not on {device}"
        for name in ("n", "k", "m") if config.ragged_mode is not RaggedDotMode.NON_CONTRACTING else ("n", "k"):
            if getattr(config, name) >= _INT32 - 1024:
                return f"{name}={getattr(config, name)} is 2^31 or more"
        tiles = config.batch_count * config.group_count * -(-config.m // _SMALLEST_TILE) * -(-config.n // _SMALLEST_TILE)
        if config.ragged_mode is not RaggedDotMode.CONTRACTING:
            tiles = config.batch_count * (-(-config.m // _SMALLEST_TILE) + config.group_count) * -(-config.n // _SMALLEST_TILE)
        if tiles >= _INT32:
            return f"{tiles} tiles are too many for 32 bits"
        if config.ragged_extent >= 1 << 40:
            return f"a ragged extent of {config.ragged_extent} rows is too long"
        return unavailable_reason() or self._device_reason(device)

    def _device_reason(self, device: Device) -> str | None:
        """Why the device cannot be asked, or None."""
        try:
            self._machine(device)
        except (RuntimeError, ValueError) as error:  # no driver, no bindings, no such device
            return str(error)
        return None

    def versions(self, device: Device) -> dict[str, str]:
        """Triton's version, and a digest of this package's kernels."""
        del device
        return {"triton": triton_version() or "none", "triton_kernels": _kernels_digest()}

    def algorithms(self, config: GroupedGemmConfig, device: Device, limits: AlgorithmLimits) -> list[MatmulAlgorithm]:
        """The candidates that can run the config within the limits, the best guess first."""
        from hipgroupgemm.backends.triton.executable import parts_bytes

        found = []
        for index, candidate in ordered(config, self._machine(device)):
            workspace = parts_bytes(candidate, config)
            if workspace <= limits.max_workspace_size:
                found.append(MatmulAlgorithm(self.name, index, candidate.name, workspace, deterministic=True))
            if len(found) >= limits.max_algorithm_count:
                break
        return found

    def compile_ahead(
        self, config: GroupedGemmConfig, device: Device, algorithms: Sequence[MatmulAlgorithm], seconds: float | None = None
    ) -> int:
        """Compiles many candidates' kernels at once, each core a few, into the cache on disk; how many kernels that were."""
        from hipgroupgemm.backends.triton.ahead import compile_ahead
        from hipgroupgemm.backends.triton.specs import parts_spec, spec_of

        machine = self._machine(device)
        candidates = all_candidates(config.ragged_mode, machine.target)
        specs = []
        for algorithm in algorithms:
            if algorithm.index < len(candidates) and candidates[algorithm.index].name == algorithm.name:
                candidate = candidates[algorithm.index]
                specs.append(spec_of(candidate, config, machine))
                if candidate.split > 1:
                    specs.append(parts_spec(candidate, config, machine))
        return compile_ahead(specs, seconds)

    def prepare(self, config: GroupedGemmConfig, device: Device, algorithm: MatmulAlgorithm, stream: int) -> Executable:
        """Compiles (or finds) the kernel, loads it, and allocates scratch."""
        from hipgroupgemm.backends.triton.executable import TritonExecutable
        from hipgroupgemm.runtime import get_runtime

        machine = self._machine(device)
        candidates = all_candidates(config.ragged_mode, machine.target)
        if algorithm.index >= len(candidates) or candidates[algorithm.index].name != algorithm.name:
            raise ValueError(f"algorithm: triton has no {algorithm.name!r} with index {algorithm.index} on {device}")
        candidate = candidates[algorithm.index]
        why = "" if candidate.kernel == "hopper" else (copies_reason(config, machine.target) or "")
        return TritonExecutable(get_runtime(device.kind), device, config, candidate, machine, stream, why)
