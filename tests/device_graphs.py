"""Graph captures through a device runtime, for tests: the package records none itself, it only runs inside of others' captures.

A runtime of a test's own (Triton's interpreter) has methods of these names, which are then used.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

THREAD_LOCAL = 1  # the mode of a capture


def begin_capture(runtime: Any, stream: int) -> None:
    """Records what this thread gives to the stream from now on, instead of running it."""
    if hasattr(runtime, "begin_capture"):
        runtime.begin_capture(stream)
    else:
        runtime._check("StreamBeginCapture", stream, runtime._capture_modes(THREAD_LOCAL))


def end_capture(runtime: Any, stream: int) -> int:
    """Ends the recording; the executable graph's handle."""
    if hasattr(runtime, "end_capture"):
        return runtime.end_capture(stream)
    graph = runtime._check("StreamEndCapture", stream)
    try:
        return int(runtime._check("GraphInstantiate", graph, 0))
    finally:
        runtime._check("GraphDestroy", graph)


def abort_capture(runtime: Any, stream: int) -> None:
    """Ends a recording and drops it, also one that an error has invalidated."""
    if hasattr(runtime, "abort_capture"):
        runtime.abort_capture(stream)
        return
    status, graph = runtime._call("StreamEndCapture", stream)
    if status:
        runtime._forget_error()
    elif graph is not None and int(graph):
        runtime._check("GraphDestroy", graph)


@contextmanager
def capture(runtime: Any, stream: int) -> Iterator[list[int]]:
    """`with capture(runtime, s) as graph:` records; afterwards `graph[0]` is the graph's handle."""
    graph: list[int] = []
    begin_capture(runtime, stream)
    try:
        yield graph
    except BaseException:
        abort_capture(runtime, stream)
        raise
    graph.append(end_capture(runtime, stream))


def launch_graph(runtime: Any, graph: int, stream: int) -> None:
    """Runs an executable graph in stream order."""
    if hasattr(runtime, "launch_graph"):
        runtime.launch_graph(graph, stream)
    else:
        runtime._check("GraphLaunch", graph, stream)


def destroy_graph(runtime: Any, graph: int) -> None:
    """Destroys an executable graph; a run under way ends first."""
    if hasattr(runtime, "destroy_graph"):
        runtime.destroy_graph(graph)
    else:
        runtime._check("GraphExecDestroy", graph)
