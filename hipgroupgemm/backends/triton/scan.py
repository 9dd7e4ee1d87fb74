"""The group scan for Triton's kernels: the shared device routine, with a trigger that lets the next kernel start early on CUDA."""

from __future__ import annotations

import functools
import os
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from hipgroupgemm.runtime.base import Runtime
    from hipgroupgemm.runtime.objects import Function

__all__ = ["THREADS", "scan_blocks", "scan_function", "scan_source"]

THREADS = 256

# NVRTC 13.0 has no __builtin_offsetof, 13.5 has it. The layout that the headers assert with it is asserted by every other build.
_OLD_NVRTC = """
#include "offsets.h"
"""
_OFFSETS = """
#if defined(__CUDACC_RTC__) && __CUDACC_VER_MAJOR__ * 100 + __CUDACC_VER_MINOR__ < 1305
#define __builtin_offsetof(type, field) ((unsigned long long)&((type*)0)->field)
#undef HGG_STATIC_ASSERT
#define HGG_STATIC_ASSERT(condition, text)
#endif
"""

# hgg_scan with one instruction more: a kernel launched programmatically behind it may be set up while it runs. It must wait
# (griddepcontrol.wait) before it reads what this one writes.
_EARLY = """
#include "tiles.h"
HGG_KERNEL hgg_scan_early(HGG_BY_VALUE hgg_arguments arguments) {
  HGG_SHARED hgg::TileShared shared;
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;");
#endif
#if defined(HGG_FIXED_TYPE)
  // constants fold away the code for other sizes, which is most of it; a kernel that runs on a cold cache pays for every line of code
  hgg_arguments fixed = arguments;
  fixed.sizes_type = HGG_FIXED_TYPE;
  fixed.sizes_kind = HGG_FIXED_KIND;
  fixed.batch_count = 1;
  hgg::scan_block(fixed, shared);
#else
  hgg::scan_block(arguments, shared);
#endif
}
"""


@functools.lru_cache(1)
def scan_source() -> tuple[str, dict[str, str]]:
    """(source, headers by name) of the scan kernel."""
    from hipgroupgemm.native._files import device_folder, include_folder

    headers = {}
    for folder in (device_folder(), include_folder()):
        for name in sorted(os.listdir(folder)):
            if name.endswith((".h", ".cpp")):
                headers[name] = Path(folder, name).read_text(encoding="utf-8")
    headers["offsets.h"] = _OFFSETS
    # behind the definition of HGG_STATIC_ASSERT, before its first use
    headers["user_arguments.h"] = headers["user_arguments.h"].replace("#define HGG_RECORD_BYTES", _OLD_NVRTC + "#define HGG_RECORD_BYTES")
    return _EARLY, headers


SPECIAL = {("int32", False): (2, 1), ("int64", False): (3, 1), ("int32", True): (2, 2), ("int64", True): (3, 2)}
"""(type of sizes, whether they are end offsets) that have kernels of their own for one scanned batch: `device/arguments.h`'s codes."""


def scan_function(runtime: Runtime, device: int, special: tuple[str, bool] | None = None) -> Function:
    """The loaded scan kernel of a device: for any sizes, or for one of SPECIAL."""
    source, headers = scan_source()
    options: tuple[str, ...] = ("-std=c++17",)
    if special is not None:
        options += tuple(f"-DHGG_FIXED_{name}={value}" for name, value in zip(("TYPE", "KIND"), SPECIAL[special], strict=True))
    module = runtime.module_from_source(source, "hgg_scan_early", options, device, headers)
    return module.get_function("hgg_scan_early")


def scan_blocks(places: int, tile_capacity: int) -> int:
    """Blocks of the scan's grid, as `device/arguments.h` advises: `places` sizes, `tile_capacity` table entries (0: no table)."""
    if tile_capacity:
        return min(max(1, -(-tile_capacity // 1024)), 32)
    return min(max(1, -(-places // 32)), 256)
