"""HIP C++ to machine code with hipRTC, through hip-python. Needs no device."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence

from hipgroupgemm.runtime.compile import Compiler
from hipgroupgemm.runtime.hip.library import load_hiprtc

__all__ = ["compile_hip", "hiprtc_version"]


@functools.lru_cache(1)
def _compiler() -> Compiler:
    hiprtc, version = load_hiprtc()
    return Compiler(hiprtc, "hiprtc", version)


def hiprtc_version() -> str:
    """ "hiprtc 9.0", say.

    Raises:
        RuntimeUnavailable: hipRTC or hip-python is not installed.
    """
    return _compiler().version


def compile_hip(
    source: str, name: str, options: Sequence[str] = (), architecture: str = "gfx942", headers: Mapping[str, str] | None = None
) -> bytes:
    """Compile HIP C++ for one target, with features or without ("gfx942:sramecc+:xnack-"); a code object.

    Arguments and errors as for :meth:`Runtime.compile`; RuntimeUnavailable where hipRTC is not installed.
    """
    if not architecture.startswith("gfx"):
        raise ValueError(f"device_arch: got {architecture!r}; want a name like gfx942")
    return _compiler().compile(source, name, [f"--offload-arch={architecture}", *options], headers, "Code", architecture)
