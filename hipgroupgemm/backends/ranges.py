"""Executables whose launches a profiler shows as one named range."""

from __future__ import annotations

from hipgroupgemm.backends.base import Arguments, Executable
from hipgroupgemm.config import GroupedGemmConfig
from hipgroupgemm.problem.groups import GroupFault
from hipgroupgemm.runtime.ranges import RangeFunctions, range_functions

__all__ = ["with_ranges"]


def with_ranges(executable: Executable, config: GroupedGemmConfig, kind: str, what: str) -> Executable:
    """The executable, in ranges where a profiler looks on; as it is otherwise.

    Args:
        executable: what runs. config: the plan's. kind: the device's, "cuda" or "rocm". what: backend and algorithm.
    """
    functions = range_functions(kind)
    if functions is None:
        return executable
    c = config
    return _Ranged(executable, functions, f"hipgroupgemm {c.ragged_mode.name} m={c.m} n={c.n} k={c.k} groups={c.group_count}: {what}")


class _Ranged(Executable):
    def __init__(self, executable: Executable, functions: RangeFunctions, text: str) -> None:
        self._executable, (self._push, self._pop), self._text = executable, functions, text

    def execute(self, arguments: Arguments) -> None:
        self._push(self._text)
        try:
            self._executable.execute(arguments)
        finally:
            self._pop()

    def explain(self) -> str:
        return self._executable.explain()

    def prepare(self) -> None:
        self._executable.prepare()

    def check(self) -> GroupFault | None:
        return self._executable.check()

    def in_graph(self) -> bool:
        return self._executable.in_graph()

    def close(self) -> None:
        self._executable.close()
