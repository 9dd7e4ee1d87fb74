"""Counts what a warm call costs in Python: calls, files and switches between files, from the public function to the backend's execute.

Warm means the same shapes with new arrays at other addresses in every call. For NumPy anywhere; for CuPy and torch on a GPU.

    python tools/count_calls.py [--framework numpy cupy torch] [--list]
"""

from __future__ import annotations

import argparse
import itertools
import sys
from collections.abc import Callable
from typing import Any

import numpy as np

import hipgroupgemm as hgg

MOST_CALLS, MOST_FILES = 60, 8


def count(call: Callable[[], Any]) -> tuple[list[tuple[str, str]], int]:
    """(file, function) of every Python call on the way to the backend's execute and back, in order; and how many are within it."""
    calls: list[tuple[str, str]] = []
    within: list[Any] = []
    inside = 0

    def profile(frame: Any, event: str, _: Any) -> None:
        nonlocal inside
        name, file = frame.f_code.co_name, frame.f_code.co_filename
        if event == "return" and within and frame is within[0]:
            within.clear()
        elif event == "call" and within:
            inside += 1
        elif event == "call":
            if name == "execute" and "backends" in file:
                within.append(frame)
            calls.append((file, name))

    sys.setprofile(profile)
    try:
        call()
    finally:
        sys.setprofile(None)
    return calls[1:], inside  # but the function that is handed in


def operands(framework: str) -> Callable[[], tuple[Any, Any, Any, Any]]:
    """A maker of fresh (lhs, rhs, sizes, out) of a framework, all kept, so that every set lies elsewhere."""
    kept = []
    sizes = [40, 0, 50, 10]
    if framework == "torch":
        torch = __import__("torch")
        device = "cuda" if torch.cuda.is_available() else "cpu"

        def make() -> tuple[Any, Any, Any, Any]:
            shapes = ((100, 64), (4, 64, 96), (100, 96))
            lhs, rhs, out = (torch.ones(shape, dtype=torch.bfloat16, device=device) for shape in shapes)
            kept.append((lhs, rhs, torch.tensor(sizes, dtype=torch.int32, device=device), out))
            return kept[-1]

        return make
    library = np if framework == "numpy" else __import__(framework)

    def make() -> tuple[Any, Any, Any, Any]:
        lhs, rhs, out = (library.ones(shape, np.float16) for shape in ((100, 64), (4, 64, 96), (100, 96)))
        kept.append((lhs, rhs, library.asarray(sizes, np.int32), out))
        return kept[-1]

    return make


def main() -> int:
    """Prints a line per framework and door; status 1 where one is past the limits."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--framework", nargs="+", default=["numpy"], choices=["numpy", "cupy", "torch"])
    parser.add_argument("--list", action="store_true", help="print every call")
    options = parser.parse_args()
    over = 0
    for framework in options.framework:
        make = operands(framework)
        lhs, rhs, sizes, _ = make()
        with hgg.GroupedMatmulPlan(hgg.config_for_ragged_dot(lhs, rhs, sizes), use_store=False) as plan:
            doors = {"ragged_dot": hgg.ragged_dot, "ragged_dot(out=)": hgg.ragged_dot, "plan.execute(out=)": plan.execute}
            for door, function in doors.items():
                for _ in range(3):
                    lhs, rhs, sizes, out = make()
                    named = {"out": out} if "out" in door else {}
                    function(lhs, rhs, sizes, **named)
                lhs, rhs, sizes, out = make()
                named = {"out": out} if "out" in door else {}
                calls, inside = count(lambda f=function, a=(lhs, rhs, sizes), n=named: f(*a, **n))
                files = [file for file, _ in calls if file != "<string>"]  # a dataclass's own
                switches = sum(a != b for a, b in itertools.pairwise(files))
                over += len(calls) > MOST_CALLS or len(set(files)) > MOST_FILES
                told = f"{len(calls):3} calls, {len(set(files)):2} files, {switches:2} switches between files"
                print(f"{framework:6} {door:18} {told}; {inside} calls within execute")
                for file, name in calls if options.list else ():
                    print(f"    {file.rpartition('site-packages/')[2].rpartition('hipgroupgemm/')[2]:50} {name}")
    return 1 if over else 0


if __name__ == "__main__":
    sys.exit(main())
