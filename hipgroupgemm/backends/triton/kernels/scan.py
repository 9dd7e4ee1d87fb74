"""The group scan for Triton's kernels: the shared device routine, with a trigger that lets the next kernel start early on CUDA."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hipgroupgemm.backends.device_kernels import kernel_headers

if TYPE_CHECKING:
    from hipgroupgemm.runtime.base import Runtime
    from hipgroupgemm.runtime.objects import Function

__all__ = ["SPECIAL", "scan_function", "scan_is_loaded"]

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


SPECIAL = {("int32", False): (2, 1), ("int64", False): (3, 1), ("int32", True): (2, 2), ("int64", True): (3, 2)}
"""(type of sizes, whether they are end offsets) that have kernels of their own for one scanned batch: `device/arguments.h`'s codes."""


_loaded: set[tuple[str, int, tuple[str, bool] | None]] = set()


def scan_is_loaded(runtime: Runtime, device: int, special: tuple[str, bool]) -> bool:
    """Whether `scan_function` has it at hand."""
    return (runtime.kind, device, special) in _loaded


def scan_function(runtime: Runtime, device: int, special: tuple[str, bool] | None = None) -> Function:
    """The loaded scan kernel of a device: for any sizes, or for one of SPECIAL."""
    options: tuple[str, ...] = ("-std=c++17",)
    if special is not None:
        options += tuple(f"-DHGG_FIXED_{name}={value}" for name, value in zip(("TYPE", "KIND"), SPECIAL[special], strict=True))
    module = runtime.module_from_source(_EARLY, "hgg_scan_early", options, device, kernel_headers())
    _loaded.add((runtime.kind, device, special))
    return module.get_function("hgg_scan_early")
