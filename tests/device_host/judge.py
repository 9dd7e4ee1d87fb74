"""Runs drawn cases through a host library, in a process of its own: wrong kernels may crash or hang.

python judge.py DRAWN.pickle LIBRARY      exits 0 when all is right, 1 when something differs
"""

from __future__ import annotations

import pickle
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from device_host.build import HostBuild
from device_host.check import differences, launches


def main(drawn_path: str, library: str) -> int:
    """Compares one library's results with the expected ones."""
    with open(drawn_path, "rb") as file:
        drawn = pickle.load(file)
    got = drawn.before.copy()
    HostBuild(Path(library)).run(*launches(drawn, got.ctypes.data))
    said = differences(drawn, got)
    print("\n".join(said))
    return 1 if said else 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
