"""The Triton backend: what it can run, its algorithms, and prepared ones."""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Sequence

from hipgroupgemm.backends.base import AlgorithmLimits, Backend, Device, Executable, MatmulAlgorithm
from hipgroupgemm.backends.triton import kernel_config
from hipgroupgemm.backends.triton.ahead import compile_ahead
from hipgroupgemm.backends.triton.compiler import KERNELS, KernelSpec, target_of, triton_version, unavailable_reason
from hipgroupgemm.backends.triton.defaults import ordered
from hipgroupgemm.backends.triton.executable import TritonExecutable
from hipgroupgemm.backends.triton.kernel_config import DeviceProperties, KernelConfig, hopper_refusal, kernel_configs
from hipgroupgemm.backends.triton.specs import add_partials_spec, spec_of
from hipgroupgemm.config import GroupedGemmConfig, RaggedDotMode
from hipgroupgemm.runtime import get_runtime

__all__ = ["TritonBackend"]

_INT32 = 1 << 31
_SMALLEST_TILE = 16


@functools.lru_cache(1)
def _kernels_digest() -> str:
    """Tells revisions of the kernels apart that have one version of the package."""
    digest = hashlib.sha256()
    for path in sorted(KERNELS.glob("*.py")):
        digest.update(path.read_bytes())
    return digest.hexdigest()[:12]


class TritonBackend(Backend):
    """Grouped GEMM in Triton kernels on CUDA and ROCm."""

    name = "triton"
    types, features, layouts = kernel_config.TYPES, kernel_config.FEATURES, kernel_config.LAYOUTS

    settings = frozenset(("batch_invariant", "max_multiprocessors"))

    def __init__(self, max_multiprocessors: int | None = None) -> None:
        self._most = max_multiprocessors
        self._properties: dict[Device, DeviceProperties] = {}

    def limited(self, max_multiprocessors: int) -> TritonBackend:
        """Grids of so many blocks at the most, each on a multiprocessor of its own."""
        return TritonBackend(max_multiprocessors)

    def properties(self, device: Device) -> DeviceProperties:
        """What the choice of an algorithm depends on; raises RuntimeError or ValueError where the device cannot be asked."""
        found = self._properties.get(device)
        if found is None:
            info = get_runtime(device.kind).device_info(device.index)
            limited = self._most is not None and self._most < info.multiprocessors
            count = self._most if limited and self._most is not None else info.multiprocessors
            found = DeviceProperties(target_of(info.architecture), count, info.shared_memory_optin, limited)
            self._properties[device] = found
        return found

    def refusal(self, config: GroupedGemmConfig, device: Device) -> str | None:
        """None when it can run the config on the device, else why not."""
        c = config
        if device.kind not in ("cuda", "rocm"):
            return f"runs on GPUs, not on {device}"
        for name in ("n", "k", "m") if c.ragged_mode is not RaggedDotMode.NON_CONTRACTING else ("n", "k"):
            if getattr(c, name) >= _INT32 - 1024:
                return f"{name}={getattr(c, name)} is 2^31 or more"
        row_tiles, column_tiles = -(-c.m // _SMALLEST_TILE), -(-c.n // _SMALLEST_TILE)
        contracting = c.ragged_mode is RaggedDotMode.CONTRACTING
        tiles = c.batch_count * (c.group_count * row_tiles if contracting else row_tiles + c.group_count) * column_tiles
        if tiles >= _INT32:
            return f"{tiles} tiles are too many for 32 bits"
        if c.ragged_extent >= 1 << 40:
            return f"a ragged extent of {c.ragged_extent} rows is too long"
        try:
            self.properties(device)
        except (RuntimeError, ValueError) as error:  # no driver, no bindings, no such device
            return unavailable_reason() or str(error)
        return unavailable_reason()

    def versions(self, device: Device) -> dict[str, str]:
        """Triton's version, and a digest of this package's kernels."""
        del device
        return {"triton": triton_version() or "none", "triton_kernels": _kernels_digest()}

    def algorithms(self, config: GroupedGemmConfig, device: Device, limits: AlgorithmLimits) -> list[MatmulAlgorithm]:
        """Those that can run the config within the limits, the best guess first.

        In NON_CONTRACTING all are batch-invariant: a row's sum goes along k in steps of the tile, whatever tile and place it is in.
        """
        invariant = config.ragged_mode is RaggedDotMode.NON_CONTRACTING
        found = [
            MatmulAlgorithm(self.name, index, kernel.name, kernel.split_k_bytes(config), True, invariant and kernel.split == 1)
            for index, kernel in ordered(config, self.properties(device))
            if kernel.split_k_bytes(config) <= limits.max_workspace_size
        ]
        return found[: limits.max_algorithm_count]

    def _kernel_of(self, config: GroupedGemmConfig, device: Device, algorithm: MatmulAlgorithm) -> KernelConfig | None:
        kernels = kernel_configs(config.ragged_mode, self.properties(device).target)
        found = kernels[algorithm.index] if algorithm.index < len(kernels) else None
        return found if found is not None and found.name == algorithm.name else None

    def compile_ahead(
        self, config: GroupedGemmConfig, device: Device, algorithms: Sequence[MatmulAlgorithm], seconds: float | None = None
    ) -> int:
        """Compiles many algorithms' kernels at once, each core a few, into the cache on disk; how many kernels that were."""
        properties = self.properties(device)
        specs: list[KernelSpec] = []
        for algorithm in algorithms:
            kernel = self._kernel_of(config, device, algorithm)
            if kernel is not None:
                specs.append(spec_of(kernel, config, properties))
                if kernel.split > 1:
                    specs.append(add_partials_spec(kernel, config, properties))
        return compile_ahead(specs, seconds)

    def prepare(self, config: GroupedGemmConfig, device: Device, algorithm: MatmulAlgorithm, stream: int) -> Executable:
        """Compiles (or finds) the kernel, loads it, and allocates scratch."""
        properties, kernel = self.properties(device), self._kernel_of(config, device, algorithm)
        if kernel is None:
            raise ValueError(f"algorithm: triton has no {algorithm.name!r} with index {algorithm.index} on {device}")
        why = None  # on an NVIDIA device: what kept the sm_90 kernels away
        if kernel.kernel != "tma" and properties.target.backend == "cuda":
            why = hopper_refusal(config, properties.target)
        return TritonExecutable(get_runtime(device.kind), device, config, kernel, properties, stream, why)
