"""Device memory, in one place for callers: allocators, buffers and the scratch of plans."""

from .allocator import (
    ALIGNMENT,
    Allocation,
    Allocator,
    Buffer,
    PinnedBuffer,
    StreamAllocator,
    allocate,
    default_allocator,
    get_allocator,
    set_allocator,
)
from .scratch import PerCapture, Scratch, ScratchMemory, pack_sections

__all__ = [
    "ALIGNMENT",
    "Allocation",
    "Allocator",
    "Buffer",
    "PerCapture",
    "PinnedBuffer",
    "Scratch",
    "ScratchMemory",
    "StreamAllocator",
    "allocate",
    "default_allocator",
    "get_allocator",
    "pack_sections",
    "set_allocator",
]
