"""A backend for tests of tuning on a GPU: it computes as another backend does, and then does harm on the device.

It lives in a module of its own so that the worker process can import and unpickle it.
"""

from __future__ import annotations

from hipgroupgemm.backends import get_backend
from hipgroupgemm.backends.base import AlgorithmLimits, Arguments, Backend, Device, Executable, MatmulAlgorithm
from hipgroupgemm.config import GroupedGemmConfig
from hipgroupgemm.problem.groups import GroupFault
from hipgroupgemm.runtime import get_runtime
from hipgroupgemm.runtime.parameters import KernelParameters

HARM = ("right", "zeroes", "illegal", "spins", "drifts")
"""right; writes zeros over the first elements; writes to an address that is nobody's; a kernel that never ends; flips the last
bit of a float32 in out every second run, which is within rounding."""

SOURCE = """
extern "C" __global__ void poke(volatile unsigned long long *p) { *p = 1; }
extern "C" __global__ void spin(volatile int *flag) { while (*flag == 0) { } }
extern "C" __global__ void drift(unsigned int *out, unsigned int *count) { *count += 1; *out ^= *count & 1; }
"""


class _Executable(Executable):
    def __init__(self, inner: Executable, device: Device, stream: int, harm: str) -> None:
        self.inner, self.device, self.stream, self.harm = inner, device, stream, harm
        self.runtime = get_runtime(device.kind)
        self.memory = self.runtime.malloc_plain(256, device.index)
        with self.runtime.use_device(device.index):
            self.runtime.memset_async(self.memory, 0, 256, stream)
            self.runtime.synchronize_stream(stream)
        self.module = self.runtime.module_from_source(SOURCE, "harm.cpp", ("-std=c++17",), device.index)

    def execute(self, arguments: Arguments) -> None:
        self.inner.execute(arguments)
        with self.runtime.use_device(self.device.index):
            if self.harm == "zeroes":
                self.runtime.memset_async(arguments.pointers["out"], 0, 32, self.stream)
            elif self.harm == "illegal":
                self._launch("poke", 0x123456789000)
            elif self.harm == "spins":
                self._launch("spin", self.memory)
            elif self.harm == "drifts":
                self._launch("drift", arguments.pointers["out"], self.memory)

    def _launch(self, name: str, *pointers: int) -> None:
        parameters = KernelParameters(["ptr"] * len(pointers))
        for index, pointer in enumerate(pointers):
            parameters[index] = pointer
        self.runtime.launch(self.module.get_function(name), (1, 1, 1), (1, 1, 1), 0, self.stream, parameters)

    def check(self) -> GroupFault | None:
        return self.inner.check()

    def explain(self) -> str:
        return f"{self.inner.explain()}; then {self.harm}"

    def close(self) -> None:
        self.inner.close()
        self.runtime.free_plain(self.memory, self.device.index)


class HarmfulBackend(Backend):
    """The first algorithm of another backend, once for each kind of harm.

    Args:
        behind: the other backend's name. kinds: names from `HARM`, the best guess first.
    """

    name = "harmful"

    def __init__(self, behind: str, kinds: tuple[str, ...] = HARM) -> None:
        self.behind, self.kinds = behind, kinds

    def can_handle(self, config: GroupedGemmConfig, device: Device) -> str | None:
        return get_backend(self.behind).can_handle(config, device)

    def algorithms(self, config: GroupedGemmConfig, device: Device, limits: AlgorithmLimits) -> list[MatmulAlgorithm]:
        workspace = self._inner(config, device).workspace_size
        return [MatmulAlgorithm(self.name, i, kind, workspace, True) for i, kind in enumerate(self.kinds)][: limits.max_algorithm_count]

    def prepare(self, config: GroupedGemmConfig, device: Device, algorithm: MatmulAlgorithm, stream: int) -> Executable:
        inner = get_backend(self.behind).prepare(config, device, self._inner(config, device), stream)
        return _Executable(inner, device, stream, algorithm.name)

    def _inner(self, config: GroupedGemmConfig, device: Device) -> MatmulAlgorithm:
        return get_backend(self.behind).algorithms(config, device, AlgorithmLimits(max_algorithm_count=1))[0]
