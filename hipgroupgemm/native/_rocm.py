"""Where ROCm's headers and libraries may lie, and which are in this process.

Standard library only, and importing nothing of the package: setup.py loads this file by its path.
"""

from __future__ import annotations

import glob
import os
import re
import sys
import sysconfig
from dataclasses import dataclass

HEADER = os.path.join("hipblaslt", "hipblaslt-ext.hpp")

ADVICE = (
    "Debian or Ubuntu: apt install libhipblaslt-dev libhipblas-common-dev libamdhip64-dev. "
    "AMD's packages: apt install hipblaslt-dev hip-dev, or dnf install hipblaslt-devel hip-devel. "
    "ROCm's wheels: pip install 'rocm[libraries,devel]'. "
    "Elsewhere: set ROCM_PATH to the folder that has include/hipblaslt."
)


@dataclass(frozen=True)
class Root:
    """A place where ROCm may be installed: the folder, and how it was come by ("ROCM_PATH", "ROCm wheel", ...)."""

    path: str
    origin: str

    @property
    def include(self) -> str:
        """Folder of the headers."""
        return os.path.join(self.path, "include")

    @property
    def library_folders(self) -> list[str]:
        """Folders of the libraries that exist, most specific first."""
        multiarch = sysconfig.get_config_var("MULTIARCH")
        names = [os.path.join("lib", multiarch)] if isinstance(multiarch, str) and multiarch else []
        names += ["lib", "lib64"]
        folders = [os.path.join(self.path, name) for name in names]
        return [folder for folder in folders if os.path.isdir(folder)]


def roots() -> list[Root]:
    """Every place to look in, in order: ROCM_PATH, ROCm's wheels, /opt/rocm, the distribution's /usr."""
    found: list[Root] = []
    for variable in ("ROCM_PATH", "ROCM_HOME"):
        value = os.environ.get(variable)
        if value:
            found.append(Root(value, variable))
    site = {sysconfig.get_path("purelib"), sysconfig.get_path("platlib"), *sys.path}
    for folder in sorted(folder for folder in site if folder and os.path.isdir(folder)):
        for path in sorted(glob.glob(os.path.join(glob.escape(folder), "_rocm_sdk_*"))):
            found.append(Root(path, "ROCm wheel"))
    found.append(Root("/opt/rocm", "AMD's packages"))
    found += [Root(path, "AMD's packages") for path in sorted(glob.glob("/opt/rocm-*"), reverse=True)]
    found.append(Root("/usr", "the distribution"))
    unique: dict[str, Root] = {}
    for root in found:
        unique.setdefault(os.path.realpath(root.path), root)
    return list(unique.values())


def find_headers() -> Root | None:
    """The first place with hipBLASLt's C++ header; None if there is none."""
    return next((root for root in roots() if os.path.isfile(os.path.join(root.include, HEADER))), None)


def header_version(include: str) -> tuple[int, int, int] | None:
    """hipBLASLt's version by the headers in a folder; None if they do not say."""
    try:
        with open(os.path.join(include, "hipblaslt", "hipblaslt-version.h"), encoding="utf-8", errors="replace") as file:
            text = file.read()
    except OSError:
        return None
    numbers = [re.search(rf"define\s+HIPBLASLT_VERSION_{part}\s+(\d+)", text) for part in ("MAJOR", "MINOR", "PATCH")]
    found = tuple(int(number.group(1)) for number in numbers if number)
    return (found[0], found[1], found[2]) if len(found) == 3 else None


def file_version(path: str) -> tuple[int, int] | None:
    """Major and minor from a library's real file name (libhipblaslt.so.1.1); None if it has not both."""
    match = re.search(r"\.so\.(\d+)\.(\d+)(?:\.|$)", os.path.basename(os.path.realpath(path)))
    return (int(match.group(1)), int(match.group(2))) if match else None


def mapped(prefix: str) -> list[str]:
    """Real paths of the files in this process's memory whose name starts with `prefix` (Linux); two names of one file count once."""
    found: dict[tuple[str, str], str] = {}
    try:
        with open("/proc/self/maps", encoding="utf-8", errors="surrogateescape") as maps:
            for line in maps:
                fields = line.rstrip("\n").split(None, 5)  # address permissions offset device inode path
                if len(fields) == 6 and os.path.basename(fields[5]).startswith(prefix):
                    found.setdefault((fields[3], fields[4]), fields[5])
    except OSError:
        return []
    return list(found.values())
