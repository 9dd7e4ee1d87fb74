"""Builds the package: Python files, headers and device sources, and the native part where ROCm is found.

The native part (a plain shared library, ``hipgroupgemm/native/libhipgroupgemm.so``) needs hipBLASLt's headers
and a C++17 compiler. Without them the package is pure Python, and its hipblaslt backend says so. Set in the
environment: HIPGROUPGEMM_BUILD_NATIVE to 0 (never) or 1 (fail if it cannot be built), CXX, CXXFLAGS, LDFLAGS,
ROCM_PATH.

Everything that is plain metadata stands in pyproject.toml.
"""

from __future__ import annotations

import functools
import importlib.util
import shutil
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

from setuptools import Command, Distribution, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_py import build_py
from setuptools.command.sdist import sdist

HERE = Path(__file__).resolve().parent
NATIVE = HERE / "hipgroupgemm" / "native"
SHIM = "libhipgroupgemm.so"
# Needed at run time: cffi reads one header, hipRTC compiles the kernels with the others.
DATA = {
    "_include": (HERE / "include", ("*.h",)),
    "_device": (HERE / "device", ("*.h", "*.hip", "*.cpp", "*.cu")),
}


def _module(name: str) -> ModuleType:
    """A file of the native package, loaded by its path: the package may not be importable here."""
    known = f"_hipgroupgemm_setup{name}"
    if known not in sys.modules:
        spec = importlib.util.spec_from_file_location(known, NATIVE / f"{name}.py")
        if spec is None or spec.loader is None:
            raise RuntimeError(f"{NATIVE / name}.py cannot be loaded")
        sys.modules[known] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules[known])
    return sys.modules[known]


@functools.cache
def native_build() -> Any:
    """One search for ROCm and a compiler for each run."""
    return _module("_build").NativeBuild(_module("_rocm"), HERE)


class BuildPackage(build_py):
    """Adds the native part, and the files that it and the kernels need at run time."""

    def run(self) -> None:
        """Build; an editable installation gets the native part in the checkout, and finds the rest there."""
        super().run()
        if getattr(self, "editable_mode", False):
            native_build().run(NATIVE)
            return
        package = Path(self.build_lib) / "hipgroupgemm"
        stale = package / "native" / SHIM  # of an in-place build, or of an earlier one for another ROCm
        stale.unlink(missing_ok=True)
        native_build().run(package / "native")
        for name, (folder, patterns) in DATA.items():
            target = package / name
            shutil.rmtree(target, ignore_errors=True)
            for pattern in patterns:
                for source in sorted(folder.rglob(pattern)):
                    copy = target / source.relative_to(folder)
                    copy.parent.mkdir(parents=True, exist_ok=True)
                    shutil.copyfile(source, copy)


class BuildNative(Command):
    """``python setup.py build_native``: the native part alone, into this checkout or into --folder."""

    description = "build the native part into the checkout"
    user_options = [("folder=", None, "where to put it (default: hipgroupgemm/native)")]  # noqa: RUF012

    def initialize_options(self) -> None:
        """Defaults."""
        self.folder: str | None = None

    def finalize_options(self) -> None:
        """Nothing depends on other commands."""

    def run(self) -> None:
        """Build; without ROCm or a compiler this says why not and fails."""
        if not native_build().run(Path(self.folder) if self.folder else NATIVE):
            raise SystemExit(1)


class SourceDistribution(sdist):
    """Adds what is built from: C++ sources, headers, device sources."""

    def make_distribution(self) -> None:
        """Everything below include/ and device/, and the native part's sources."""
        wanted = [*NATIVE.glob("*.cpp"), *NATIVE.glob("*.hpp"), *NATIVE.glob("*.map")]
        for folder, patterns in DATA.values():
            for pattern in patterns:
                wanted += folder.rglob(pattern)
        self.filelist.extend(sorted(str(path.relative_to(HERE)) for path in wanted))
        super().make_distribution()


class Wheel(bdist_wheel):
    """A wheel with the native part is for one platform, but for every Python."""

    def get_tag(self) -> tuple[str, str, str]:
        """py3-none-PLATFORM with the native part, py3-none-any without."""
        tag = super().get_tag()
        return ("py3", "none", tag[2] if native_build().possible else "any")


class NativeDistribution(Distribution):
    """Tells setuptools that there is native code, if there is."""

    def has_ext_modules(self) -> bool:
        """Whether the native part is going to be built."""
        return bool(native_build().possible)


if __name__ == "__main__":
    setup(
        cmdclass={
            "build_native": BuildNative,
            "build_py": BuildPackage,
            "sdist": SourceDistribution,
            "bdist_wheel": Wheel,
        },
        distclass=NativeDistribution,
    )
