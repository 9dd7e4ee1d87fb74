"""Builds the package: Python files, headers and device sources, and the native part where ROCm is found.

The native part (a plain shared library, ``hipgroupgemm/native/libhipgroupgemm.so``) needs hipBLASLt's headers
and a C++17 compiler. Without them the package is pure Python, and its hipblaslt backend says so. Set in the
environment: HIPGROUPGEMM_BUILD_NATIVE to 0 (never) or 1 (fail if it cannot be built), CXX, CXXFLAGS,
ROCM_PATH.

Everything that is plain metadata stands in pyproject.toml.
"""

from __future__ import annotations

import importlib.util
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from types import ModuleType

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


def _rocm() -> ModuleType:
    """The package's own search for ROCm; loaded by path, since the package may not be importable here."""
    name = "_hipgroupgemm_rocm"
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, NATIVE / "_rocm.py")
        if spec is None or spec.loader is None:
            raise RuntimeError(f"{NATIVE / '_rocm.py'} cannot be loaded")
        module = importlib.util.module_from_spec(spec)
        sys.modules[name] = module
        spec.loader.exec_module(module)
    return sys.modules[name]


def _compiler(root: str) -> list[str] | None:
    """CXX, or the first C++ compiler that there is; ROCm's own last."""
    if os.environ.get("CXX"):
        return shlex.split(os.environ["CXX"])
    for name in ("c++", "g++", "clang++", os.path.join(root, "bin", "hipcc")):
        found = shutil.which(name)
        if found:
            return [found]
    return None


class NativeBuild:
    """What was found, or why there is no native part."""

    def __init__(self) -> None:
        rocm = _rocm()
        self.wish = os.environ.get("HIPGROUPGEMM_BUILD_NATIVE", "")
        self.reason = ""
        self.root = None
        self.compiler: list[str] = []
        if self.wish == "0":
            self.reason = "HIPGROUPGEMM_BUILD_NATIVE is 0"
            return
        if not sys.platform.startswith("linux"):
            self.reason = f"hipBLASLt is used on Linux only, this is {sys.platform}"
            return
        self.root = rocm.find_headers()
        if self.root is None:
            places = ", ".join(f"{root.path} ({root.origin})" for root in rocm.roots())
            self.reason = f"no include/{rocm.HEADER} in {places}. {rocm.ADVICE}"
            return
        self.compiler = _compiler(self.root.path) or []
        if not self.compiler:
            self.reason = "no C++ compiler (c++, g++, clang++ or hipcc; or set CXX)"

    @property
    def possible(self) -> bool:
        """Whether headers and a compiler are there."""
        return not self.reason

    def run(self, folder: Path) -> bool:
        """Compile into a folder and print one line on what became of it. True if the library is there."""
        if self.possible:
            self._compile(folder)
        if self.reason:
            print(
                f"hipgroupgemm: built without the hipblaslt backend's native part: {self.reason}", flush=True
            )
            if self.wish == "1":
                raise SystemExit("hipgroupgemm: HIPGROUPGEMM_BUILD_NATIVE is 1, so this is an error")
            return False
        version = _rocm().header_version(self.root.include)
        print(
            f"hipgroupgemm: built the native part for hipBLASLt {'.'.join(map(str, version or ('?',)))} in "
            f"{self.root.path} "
            f"({self.root.origin}) with {self.compiler[0]}",
            flush=True,
        )
        return True

    def _compile(self, folder: Path) -> None:
        flags = [
            "-std=c++17",
            "-O2",
            "-fPIC",
            "-fvisibility=hidden",
            "-Wall",
            "-Wextra",
            "-D__HIP_PLATFORM_AMD__",
        ]
        flags += [f"-I{HERE / 'include'}"]
        if (
            os.path.realpath(self.root.include) != "/usr/include"
        ):  # there already, and to name it would reorder it
            flags += ["-isystem", self.root.include]
        flags += shlex.split(os.environ.get("CXXFLAGS", ""))
        # No -l: the shim takes its names from the hipBLASLt and HIP runtime that the process has
        # (native/_loader.py).
        link = ["-shared", f"-Wl,-soname,{SHIM}", f"-Wl,--version-script={NATIVE / 'hgg.map'}", "-pthread"]
        if self.root.path != "/usr":  # where the loader looks for the library that these headers belong to
            link += [f"-Wl,-rpath,{folder}" for folder in self.root.library_folders]
        if os.path.basename(self.compiler[0]).startswith("hipcc"):
            link += ["-no-hip-rt"]
        with tempfile.TemporaryDirectory() as work:
            commands, objects = [], []
            for source in sorted(NATIVE.glob("*.cpp")):
                objects.append(os.path.join(work, source.stem + ".o"))
                commands.append([*self.compiler, *flags, "-c", str(source), "-o", objects[-1]])
            shared = os.path.join(work, SHIM)
            commands.append([*self.compiler, *objects, *link, "-o", shared])
            for command in commands:
                try:
                    result = subprocess.run(command, capture_output=True, text=True, check=False)
                except OSError as error:
                    self.reason = f"{command[0]} cannot be run: {error}"
                    return
                if result.returncode:
                    sys.stderr.write(f"{shlex.join(command)}\n{result.stdout}{result.stderr}")
                    errors = [line for line in result.stderr.splitlines() if "error" in line]
                    first = errors[0].strip() if errors else f"status {result.returncode}"
                    self.reason = f"the compiler failed: {first}"
                    return
            folder.mkdir(parents=True, exist_ok=True)
            # Renamed into place: a process that has the old one mapped keeps it.
            fresh = folder / (SHIM + ".new")
            shutil.copyfile(shared, fresh)
            os.chmod(fresh, 0o755)
            os.replace(fresh, folder / SHIM)


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

    def add_defaults(self) -> None:
        """Everything below include/ and device/, and the native part's sources."""
        super().add_defaults()
        wanted = [*NATIVE.glob("*.cpp"), *NATIVE.glob("*.hpp"), *NATIVE.glob("*.map")]
        for folder, patterns in DATA.values():
            for pattern in patterns:
                wanted += folder.rglob(pattern)
        self.filelist.extend(sorted(str(path.relative_to(HERE)) for path in wanted))


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
        return native_build().possible


_build: NativeBuild | None = None


def native_build() -> NativeBuild:
    """One search for each run."""
    global _build
    if _build is None:
        _build = NativeBuild()
    return _build


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
