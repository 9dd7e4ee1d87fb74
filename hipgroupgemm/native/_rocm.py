"""Where ROCm's headers and libraries may lie, and what an ELF library says of itself.

Standard library only, and importing nothing of the package: setup.py loads this file by its path.
"""

from __future__ import annotations

import glob
import os
import re
import struct
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
    """A place where ROCm may be installed.

    Attributes:
        path: the folder.
        origin: how it was come by ("ROCM_PATH", "ROCm wheel", ...).
    """

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
    numbers = []
    for part in ("MAJOR", "MINOR", "PATCH"):
        match = re.search(rf"define\s+HIPBLASLT_VERSION_{part}\s+(\d+)", text)
        if match is None:
            return None
        numbers.append(int(match.group(1)))
    return numbers[0], numbers[1], numbers[2]


def file_version(path: str) -> tuple[int, int] | None:
    """Major and minor from a library's real file name (libhipblaslt.so.1.1); None if it has not both."""
    match = re.search(r"\.so\.(\d+)\.(\d+)(?:\.|$)", os.path.basename(os.path.realpath(path)))
    return (int(match.group(1)), int(match.group(2))) if match else None


@dataclass(frozen=True)
class ElfNames:
    """What a shared library's dynamic section says: its own name, those it needs, where it looks for them."""

    soname: str
    needed: tuple[str, ...]
    runpath: tuple[str, ...]


def elf_names(path: str) -> ElfNames | None:
    """Read a 64-bit little-endian ELF library's dynamic section; None if the file is something else.

    The layout is that of the System V ABI, chapters 4 and 5.
    """
    try:
        with open(path, "rb") as file:
            head = file.read(64)
            if len(head) < 64 or head[:6] != b"\x7fELF\x02\x01":
                return None
            table, entry_size, entries = (
                struct.unpack_from("<Q", head, 32)[0],
                struct.unpack_from("<H", head, 54)[0],
                struct.unpack_from("<H", head, 56)[0],
            )
            file.seek(table)
            headers = file.read(entry_size * entries)
            segments: list[tuple[int, int, int]] = []  # address, offset, bytes of what is loaded
            dynamic = b""
            for i in range(entries):
                kind, _, offset, address, _, size = struct.unpack_from("<IIQQQQ", headers, i * entry_size)
                if kind == 1:  # PT_LOAD
                    segments.append((address, offset, size))
                elif kind == 2:  # PT_DYNAMIC
                    file.seek(offset)
                    dynamic = file.read(size)
            tags = [struct.unpack_from("<qQ", dynamic, i) for i in range(0, len(dynamic) - 15, 16)]
            single = dict(tags)
            if 5 not in single or 10 not in single:  # DT_STRTAB, DT_STRSZ
                return None
            for address, offset, size in segments:
                if address <= single[5] < address + size:
                    file.seek(offset + single[5] - address)
                    break
            else:
                return None
            strings = file.read(single[10])
    except (OSError, struct.error):
        return None

    def text(at: int) -> str:
        return strings[at : strings.index(b"\0", at)].decode("utf-8", "surrogateescape")

    try:
        needed = tuple(text(value) for tag, value in tags if tag == 1)
        soname = next((text(value) for tag, value in tags if tag == 14), "")
        runpath = next((text(value) for tag, value in tags if tag in (15, 29)), "")
    except ValueError:  # no final zero
        return None
    origin = os.path.dirname(os.path.realpath(path))
    folders = [part.replace("$ORIGIN", origin).replace("${ORIGIN}", origin) for part in runpath.split(":") if part]
    return ElfNames(soname, needed, tuple(folders))


def mapped(prefix: str) -> list[str]:
    """Real paths of the files in this process's memory whose name starts with ``prefix`` (Linux), without
    doubles.

    Two names of one file count once; a file that was replaced on disk since it was loaded still counts.
    """
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
