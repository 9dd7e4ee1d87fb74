"""A backend for tests: it computes as the reference does, records what it is asked, and can be told to refuse, to fail and to wait."""

from __future__ import annotations

import threading
from typing import Any

from hipgroupgemm.backends.base import AlgorithmLimits, Arguments, Device, Executable, MatmulAlgorithm
from hipgroupgemm.backends.reference import ReferenceBackend, run_config
from hipgroupgemm.config import GroupedGemmConfig
from hipgroupgemm.problem.groups import GroupFault


class DoubleExecutable(Executable):
    """Runs on the reference; `calls` keeps the arguments it got."""

    def __init__(self, backend: DoubleBackend, config: GroupedGemmConfig, algorithm: MatmulAlgorithm, stream: int) -> None:
        self.backend, self.config, self.algorithm, self.stream = backend, config, algorithm, stream
        self.calls: list[Arguments] = []
        self.closed = False

    def execute(self, arguments: Arguments) -> None:
        assert not self.closed, "executed after it was closed"
        self.calls.append(arguments)
        if self.backend.error is not None:
            raise self.backend.error
        if self.backend.entered is not None:
            self.backend.entered.set()
            assert self.backend.go_on.wait(60), "nobody let it go on"
            assert not self.closed, "closed while it was executing"
        run_config(arguments.config, arguments)

    def explain(self) -> str:
        return f"a double on stream {self.stream}"

    def check(self) -> GroupFault | None:
        fault, self.backend.fault = self.backend.fault, None
        return fault

    def close(self) -> None:
        assert not self.closed, "closed twice"
        self.closed = True


class DoubleBackend(ReferenceBackend):
    """Serves everything that `reason` does not refuse, with three algorithms of growing workspace, the middle one deterministic."""

    def __init__(self, name: str = "double", reason: str | None = None) -> None:
        self.name, self.reason = name, reason
        self.found = [MatmulAlgorithm(name, index, f"kernel_{index}", 1000 * index, index == 1) for index in range(3)]
        self.executables: list[DoubleExecutable] = []
        self.error: BaseException | None = None
        self.fault: GroupFault | None = None
        self.entered: threading.Event | None = None
        self.go_on = threading.Event()
        self.asked: list[GroupedGemmConfig] = []

    def can_handle(self, config: GroupedGemmConfig, device: Device) -> str | None:
        return self.reason

    def algorithms(self, config: GroupedGemmConfig, device: Device, limits: AlgorithmLimits) -> list[MatmulAlgorithm]:
        self.asked.append(config)
        fitting = [algorithm for algorithm in self.found if algorithm.workspace_size <= limits.max_workspace_size]
        return fitting[: limits.max_algorithm_count]

    def prepare(self, config: GroupedGemmConfig, device: Device, algorithm: MatmulAlgorithm, stream: int) -> Executable:
        self.executables.append(DoubleExecutable(self, config, algorithm, stream))
        return self.executables[-1]

    @property
    def calls(self) -> list[Any]:
        """The arguments of all calls."""
        return [call for executable in self.executables for call in executable.calls]
