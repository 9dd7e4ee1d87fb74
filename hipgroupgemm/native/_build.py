"""Compiles the native part; used by setup.py, which loads this file and `_rocm.py` by their paths.

Standard library only, and importing nothing of the package.
"""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import ModuleType
from typing import Any

SHIM = "libhipgroupgemm.so"


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
    """What was found, or why there is no native part.

    Args:
        rocm: the module `_rocm`.
        source: the checkout's or source distribution's folder.
    """

    def __init__(self, rocm: ModuleType, source: Path) -> None:
        self.rocm = rocm
        self.source = source
        self.wish = os.environ.get("HIPGROUPGEMM_BUILD_NATIVE", "")
        self.reason = ""
        self.root: Any = None
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
            print(f"hipgroupgemm: built without the hipblaslt backend's native part: {self.reason}", flush=True)
            if self.wish == "1":
                raise SystemExit("hipgroupgemm: HIPGROUPGEMM_BUILD_NATIVE is 1, so this is an error")
            return False
        version = self.rocm.header_version(self.root.include)
        print(
            f"hipgroupgemm: built the native part for hipBLASLt {'.'.join(map(str, version or ('?',)))} in {self.root.path} "
            f"({self.root.origin}) with {self.compiler[0]}",
            flush=True,
        )
        return True

    def _compile(self, folder: Path) -> None:
        native = self.source / "hipgroupgemm" / "native"
        flags = ["-std=c++17", "-O2", "-fPIC", "-fvisibility=hidden", "-Wall", "-Wextra", "-D__HIP_PLATFORM_AMD__"]
        flags += [f"-I{self.source / 'include'}"]
        if self.root.path != "/usr":  # where the loader looks for the library that these headers belong to
            flags += [f'-DHGG_ROCM_FOLDERS="{":".join(self.root.library_folders)}"']
        if os.path.realpath(self.root.include) != "/usr/include":  # there already, and to name it would reorder it
            flags += ["-isystem", self.root.include]
        flags += shlex.split(os.environ.get("CXXFLAGS", ""))
        # No -l: the shim takes its names from the hipBLASLt and HIP runtime that the process has (native/_loader.py).
        link = ["-shared", f"-Wl,-soname,{SHIM}", f"-Wl,--version-script={native / 'hgg.map'}", "-pthread"]
        if os.path.basename(self.compiler[0]).startswith("hipcc"):
            link += ["-no-hip-rt"]
        link += shlex.split(os.environ.get("LDFLAGS", ""))
        with tempfile.TemporaryDirectory() as work:
            commands, objects = [], []
            for source in sorted(native.glob("*.cpp")):
                objects.append(os.path.join(work, source.stem + ".o"))
                commands.append([*self.compiler, *flags, "-c", str(source), "-o", objects[-1]])
            shared = os.path.join(work, SHIM)
            with ThreadPoolExecutor(max(1, min(4, (os.cpu_count() or 1)))) as pool:
                failures = [failure for failure in pool.map(self._run, commands) if failure]
            failure = failures[0] if failures else self._run([*self.compiler, *objects, *link, "-o", shared])
            if failure:
                self.reason = failure
                return
            folder.mkdir(parents=True, exist_ok=True)
            # Renamed into place: a process that has the old one mapped keeps it.
            fresh = folder / (SHIM + ".new")
            shutil.copyfile(shared, fresh)
            os.chmod(fresh, 0o755)
            os.replace(fresh, folder / SHIM)

    @staticmethod
    def _run(command: list[str]) -> str:
        """Run a compiler; what went wrong, "" if nothing did."""
        try:
            result = subprocess.run(command, capture_output=True, text=True, check=False)
        except OSError as error:
            return f"{command[0]} cannot be run: {error}"
        if not result.returncode:
            return ""
        sys.stderr.write(f"{shlex.join(command)}\n{result.stdout}{result.stderr}")
        errors = [line for line in result.stderr.splitlines() if "error" in line]
        return f"the compiler failed: {errors[0].strip() if errors else f'status {result.returncode}'}"
