"""The machine as the doctor sees it: files, environment, packages and libraries. Tests simulate one."""

from __future__ import annotations

import contextlib
import ctypes
import functools
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


class Machine:
    """Where files, environment variables, packages and libraries are looked up.

    Args:
        root: the file system's root. environ: the environment.
        distributions: installed distributions, name (lower case) to version; None asks importlib.metadata.
        find_module: module name to its file, or None; None asks importlib, which does not import top-level modules.
        load: path or soname to a ctypes library, or None; None loads for real.
        import_error: module name to why it can't be imported, "" where it can; None imports it in a process of its own.
    """

    def __init__(
        self,
        root: Path | str = "/",
        environ: Mapping[str, str] | None = None,
        distributions: Mapping[str, str] | None = None,
        find_module: Callable[[str], str | None] | None = None,
        load: Callable[[str], Any] | None = None,
        import_error: Callable[[str], str] | None = None,
    ) -> None:
        self.root = Path(root)
        self.environ = os.environ if environ is None else environ
        self._distributions = distributions
        self.find_module = find_module or _find_module
        self.load = load or _load
        self.import_error = import_error or _import_error

    @functools.cached_property
    def distributions(self) -> Mapping[str, str]:
        """Installed distributions, name in lower case to version."""
        if self._distributions is not None:
            return self._distributions
        found: dict[str, str] = {}
        for one in importlib.metadata.distributions():
            with contextlib.suppress(Exception):  # a broken installation of something else is none of ours
                found.setdefault(one.metadata["Name"].lower().replace("_", "-"), one.version)
        return found

    def path(self, absolute: str) -> Path:
        """A path below the root; what the environment names is taken as it is where it lies below it already."""
        path = Path(absolute)
        if self.root == Path("/") or path.is_relative_to(self.root):
            return path
        return self.root / path.relative_to(path.anchor)

    def glob(self, directory: Path | str, pattern: str) -> list[Path]:
        """Files of a directory below the root, sorted; none where it can't be read."""
        with contextlib.suppress(OSError):
            return sorted(self.path(str(directory)).glob(pattern))
        return []

    def read(self, path: Path | str) -> str:
        """A small file's text, "" where it can't be read."""
        with contextlib.suppress(OSError):
            return self.path(str(path)).read_text(encoding="latin-1")
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


def _find_module(name: str) -> str | None:
    try:
        spec = importlib.util.find_spec(name)
    except (ImportError, ValueError, AttributeError):
        return None
    if spec is None or spec.origin:
        return spec.origin if spec is not None else None
    locations = list(spec.submodule_search_locations or ())
    return os.path.join(locations[0], "__init__.py") if locations else None


def _load(name: str) -> Any:
    try:
        return ctypes.CDLL(name)
    except OSError:
        return None


def _import_error(module: str) -> str:
    try:
        done = subprocess.run(
            [sys.executable, "-c", f"import {module}"],
            capture_output=True,
            text=True,
            errors="replace",
            timeout=_IMPORT_SECONDS,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return f"its import has not ended in {_IMPORT_SECONDS:.0f} s"
    last = [line for line in done.stderr.splitlines() if line.strip()][-1:] or [f"exit status {done.returncode}"]
    return last[0].strip() if done.returncode else ""
