"""Prints the package's extras that fit this machine, for `pip install -e ".[...]"`: the ones asked for, and rocm or cuda with a GPU.

usage: python tools/extras.py test bench
"""

from __future__ import annotations

import os
import sys


def gpu_extras() -> list[str]:
    """The extra of the GPU whose driver is there: AMD's makes /dev/kfd, NVIDIA's /proc/driver/nvidia/version."""
    if os.path.exists("/dev/kfd"):
        return ["rocm"]
    if os.path.exists("/proc/driver/nvidia/version"):
        return ["cuda"]
    return []


if __name__ == "__main__":
    print(",".join([*sys.argv[1:], *gpu_extras()]))
