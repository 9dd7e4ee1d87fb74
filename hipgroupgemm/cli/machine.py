"""The machine as the doctor sees it: files, environment, packages and libraries. Tests simulate one."""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import importlib.metadata
import importlib.util
import os
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

__all__ = ["Machine"]

_IMPORT_SECONDS = 120.0


def _distributions() -> dict[str, str]:
    found: dict[str, str] = {}
    for one in importlib.metadata.distributions():
        with contextlib.suppress(Exception):  # a broken installation of something else is none of ours
            found.setdefault(one.metadata["Name"].lower().replace("_", "-"), one.version)
    return found


def _find_module(name: str) -> str | None:
    try:
        spec = importlib.util.find_spec(name)
    except (ImportError, ValueError, AttributeError):
        return None
    locations = list(spec.submodule_search_locations or ()) if spec is not None else []
    return spec.origin if spec is not None and spec.origin else os.path.join(locations[0], "__init__.py") if locations else None


def _load(name: str) -> Any:
    with contextlib.suppress(OSError):
        return ctypes.CDLL(name)
    return None


def _import_error(module: str) -> str:
    command = [sys.executable, "-c", f"import {module}"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, errors="replace", timeout=_IMPORT_SECONDS, check=False)
    except subprocess.TimeoutExpired:
        return f"its import has not ended in {_IMPORT_SECONDS:.0f} s"
    words = done.stderr.strip().splitlines() or [f"exit status {done.returncode}"]
    return words[-1].strip() if done.returncode else ""


@dataclasses.dataclass
class Machine:
    """Where files, environment variables, packages and libraries are looked up.

    Attributes:
        root: the file system's root. environ: the environment. distributions: those installed, name (lower case) to version.
        find_module: module name to its file, or None; no top-level module is imported. load: path or soname to a ctypes library, or None.
        import_error: module name to why it can't be imported in a process of its own, "" where it can.
    """

    root: Path = Path("/")
    environ: Mapping[str, str] = dataclasses.field(default_factory=lambda: os.environ)
    distributions: Mapping[str, str] = dataclasses.field(default_factory=_distributions)
    find_module: Callable[[str], str | None] = _find_module
    load: Callable[[str], Any] = _load
    import_error: Callable[[str], str] = _import_error

    def path(self, absolute: str | Path) -> Path:
        """A path below the root; one that lies there already is taken as it is."""
        path = Path(absolute)
        return path if path.is_relative_to(self.root) else self.root / path.relative_to(path.anchor)

    def glob(self, directory: Path | str, pattern: str) -> list[Path]:
        """Files of a directory below the root, sorted; none where it can't be read."""
        with contextlib.suppress(OSError):
            return sorted(self.path(directory).glob(pattern))
        return []

    def read(self, path: Path | str) -> str:
        """A small file's text, "" where it can't be read."""
        with contextlib.suppress(OSError):
            return self.path(path).read_text(encoding="latin-1")
        return ""

    def package_dirs(self, module: str) -> list[Path]:
        """The directory of an installed package, not imported."""
        file = self.find_module(module)
        return [Path(file).parent] if file else []

    def version(self, library: Path | str, function: str) -> int:
        """What a library's C function writes through its only argument; 0 where that can't be had."""
        loaded, value = self.load(str(library)), ctypes.c_int()
        with contextlib.suppress(AttributeError, OSError):
            if loaded is not None and getattr(loaded, function)(ctypes.byref(value)) == 0:
                return value.value
        return 0
