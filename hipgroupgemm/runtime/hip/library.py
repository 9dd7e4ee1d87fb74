"""Which HIP runtime this process uses, and making hip-python use the same.

A process must have one HIP runtime: streams and pointers of one mean nothing to another. PyTorch's wheels bring their own, ROCm's wheels
and /opt/rocm have others. So whatever is loaded already decides; only when nothing is loaded is one looked for. hip-python would otherwise
open a library by a name of its own choosing.
"""

from __future__ import annotations

import contextlib
import ctypes
import glob
import importlib.util
import os
from collections.abc import Iterator, Sequence
from typing import Any

from hipgroupgemm.runtime.errors import RuntimeUnavailable
from hipgroupgemm.runtime.process import mapped_libraries

HIP_STEM = "libamdhip64.so"
HIPRTC_STEM = "libhiprtc.so"
# sonames by HIP's major version; the newest first
_HIP_SONAMES = ("libamdhip64.so.7", "libamdhip64.so.6", HIP_STEM)
_HIPRTC_SONAMES = ("libhiprtc.so.7", "libhiprtc.so.6", HIPRTC_STEM)

_NO_DEVICE = 100
NO_DEVICE = (
    "Is there an AMD GPU, is its kernel driver (amdgpu) loaded, and may this user open /dev/kfd and /dev/dri (groups render and video)?"
    " HIP_VISIBLE_DEVICES and ROCR_VISIBLE_DEVICES can hide devices too."
)
INSTALL = (
    "Install ROCm's HIP runtime (6.0 or newer; a distribution's package, AMD's packages in /opt/rocm, or the ROCm wheels; ROCM_PATH names"
    " another place) and hip-python of the same major version (pip install 'hipgroupgemm[rocm]')."
)


def single_hip_runtime() -> str | None:
    """Path of the HIP runtime that this process has loaded, or None; RuntimeUnavailable, with both paths, where it has loaded two."""
    found = mapped_libraries(HIP_STEM)
    if len(found) > 1:
        raise RuntimeUnavailable(
            "rocm",
            f"this process has loaded {len(found)} HIP runtimes, {' and '.join(found)}; memory and streams of one are not valid in another",
            f"Make all packages use one of them: install packages built for one ROCm, or start Python with LD_PRELOAD={found[0]}.",
        )
    return found[0] if found else None


def _search_directories() -> list[str]:
    """Where ROCm's libraries may lie, the most explicit place first."""
    places = [place for place in os.environ.get("LD_LIBRARY_PATH", "").split(os.pathsep) if place]
    for variable in ("ROCM_PATH", "ROCM_HOME", "HIP_PATH"):
        root = os.environ.get(variable)
        if root:
            places += [os.path.join(root, "lib"), os.path.join(root, "lib64")]
    try:
        spec = importlib.util.find_spec("_rocm_sdk_core")  # what the ROCm wheels (rocm-sdk-core) unpack into
    except (ImportError, ValueError):
        spec = None
    places += [os.path.join(root, "lib") for root in (spec.submodule_search_locations or [] if spec is not None else [])]
    return [*places, "/opt/rocm/lib", "/opt/rocm/lib64"]


def _in_directory(directory: str, stem: str) -> str | None:
    """The library ``stem`` of a directory: its plain name, else the highest version."""
    plain = os.path.join(directory, stem)
    if os.path.exists(plain):
        return plain
    return max(glob.glob(glob.escape(plain) + ".*"), key=_version_of, default=None)


def _version_of(path: str) -> tuple[int, ...]:
    numbers = path.rpartition(".so.")[2].split(".")
    return tuple(int(number) if number.isdecimal() else -1 for number in numbers)


def _load_library(stem: str, sonames: Sequence[str], directories: Sequence[str]) -> str:
    """Loads the first library of these directories, then of the system's own path, that can be loaded; its path or name."""
    refusals = []
    candidates = [path for place in directories if (path := _in_directory(place, stem)) is not None]
    for candidate in [*candidates, *sonames]:
        try:
            ctypes.CDLL(candidate)
        except OSError as error:
            if os.sep in candidate:
                refusals.append(str(error))
            continue
        return candidate
    looked = ", ".join([*directories, "the system's library path"])
    found = f"{'; '.join(refusals)} (also looked in {looked})" if refusals else f"no {stem} in {looked}"
    raise RuntimeUnavailable("rocm", found, INSTALL)


def find_hip_library() -> str:
    """Path of the HIP runtime to use: the one that is loaded, else the first found; it is loaded then. RuntimeUnavailable without any."""
    loaded = single_hip_runtime()
    if loaded is None:
        found = _load_library(HIP_STEM, _HIP_SONAMES, _search_directories())
        loaded = single_hip_runtime() or found
    return loaded


def find_hiprtc_library(hip_library: str) -> str:
    """The hipRTC that goes with a HIP runtime: loaded already, or beside it, or the system's; it is loaded then."""
    loaded = mapped_libraries(HIPRTC_STEM)
    beside = [os.path.dirname(hip_library), *_search_directories()]
    return loaded[0] if loaded else _load_library(HIPRTC_STEM, _HIPRTC_SONAMES, beside)


def import_bindings() -> tuple[Any, Any]:
    """(hip, hiprtc) modules of hip-python: ``rocm.bindings`` from version 10 on, ``hip`` before."""
    try:
        from rocm.bindings import hip, hiprtc
    except ImportError as newer:
        try:
            from hip import hip, hiprtc
        except ImportError as older:
            raise RuntimeUnavailable("rocm", f"the Python package hip-python is missing ({older}; {newer})", INSTALL) from None
    return hip, hiprtc


@contextlib.contextmanager
def _bound_to(hip_module: Any, shortname: str, path: str) -> Iterator[None]:
    """While this is entered, hip-python opens ``path`` for the library ``shortname``."""
    if hip_module.__name__.startswith("rocm."):
        # version 10 asks this function at its first call of each library, and remembers the answer
        from rocm.bindings.util import paths as resolver

        original = resolver.get_library_path

        def resolve(name: str, *arguments: Any, **options: Any) -> bytes:
            return os.fsencode(path) if name == shortname else bytes(original(name, *arguments, **options))

        resolver.get_library_path = resolve
        try:
            yield
        finally:
            resolver.get_library_path = original
    else:
        # versions 6 and 7 open what the variable DLL of their C layers names, at the first call of each
        from hip import chip, chiprtc

        (chip if shortname == "amdhip64" else chiprtc).DLL = os.fsencode(path)
        yield


def load_hip() -> tuple[Any, str]:
    """hip-python's hip module, bound to this process's HIP runtime and initialised; and the runtime's path. Or RuntimeUnavailable."""
    path = find_hip_library()  # before hip-python is imported: where there is no runtime, that would only cost time
    hip, _ = import_bindings()
    with _bound_to(hip, "amdhip64", path):
        try:
            status = int(hip.hipInit(0)[0])
        except (RuntimeError, ValueError) as error:  # no library or symbol; a status without a name
            raise RuntimeUnavailable("rocm", f"hipInit of {path} failed ({error})", INSTALL) from None
    path = single_hip_runtime() or path  # hip-python may have been in use before us, with a library of its own choice
    if status:
        name = getattr(hip.hipError_t(status), "name", "unknown")
        advice = NO_DEVICE if status == _NO_DEVICE else INSTALL
        raise RuntimeUnavailable("rocm", f"hipInit of {path} returned status {status} ({name})", advice)
    return hip, path


def load_hiprtc() -> tuple[Any, tuple[int, int]]:
    """hip-python's hiprtc module, bound to this process's hipRTC; and its version, (9, 0) through many releases. Or RuntimeUnavailable."""
    library = find_hiprtc_library(find_hip_library())
    hip, hiprtc = import_bindings()
    with _bound_to(hip, "hiprtc", library):
        try:
            status, major, minor = hiprtc.hiprtcVersion()
        except (RuntimeError, ValueError) as error:
            raise RuntimeUnavailable("rocm", f"hiprtcVersion of {library} failed ({error})", INSTALL) from None
    if int(status):
        raise RuntimeUnavailable("rocm", f"hiprtcVersion of {library} returned status {int(status)}", INSTALL)
    return hiprtc, (int(major), int(minor))
