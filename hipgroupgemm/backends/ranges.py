"""Executables whose launches a profiler shows as one named range."""

from __future__ import annotations

from hipgroupgemm.backends.base import Arguments, Executable
from hipgroupgemm.config import GroupedGemmConfig
from hipgroupgemm.runtime.ranges import range_functions

__all__ = ["with_ranges"]


def with_ranges(executable: Executable, config: GroupedGemmConfig, kind: str, what: str) -> Executable:
    """The executable; where a profiler looks on, each of its executes is a range.

    Args:
        executable: what runs. config: the plan's. kind: the device's, "cuda" or "rocm". what: backend and algorithm.
    """
    functions = range_functions(kind)
    if functions is not None:
        (push, pop), plain, c = functions, executable.execute, config
        text = f"hipgroupgemm {c.ragged_mode.name} m={c.m} n={c.n} k={c.k} groups={c.group_count}: {what}"

        def execute(arguments: Arguments) -> None:
            push(text)
            try:
                plain(arguments)
            finally:
                pop()

        executable.execute = execute  # type: ignore[method-assign]
    return executable
