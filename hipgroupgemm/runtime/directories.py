"""Where this package keeps files of its own: compiled code and tuning results."""

from __future__ import annotations

import os
import sys
from pathlib import Path

__all__ = ["CACHE_VARIABLE", "cache_directory"]

CACHE_VARIABLE = "HIPGROUPGEMM_CACHE_DIR"


def cache_directory() -> Path | None:
    """HIPGROUPGEMM_CACHE_DIR, or a place in the user's cache directory; None when there is no home."""
    named = os.environ.get(CACHE_VARIABLE)
    if named:
        try:
            return Path(named).expanduser()
        except RuntimeError:
            return None  # "~" of somebody who has no home directory
    if not sys.platform.startswith("linux"):  # on Linux the rule is short, and the import is not free
        try:
            from platformdirs import user_cache_path
        except ImportError:
            pass
        else:
            return user_cache_path("hipgroupgemm")
    base = os.environ.get("XDG_CACHE_HOME", "").strip()
    try:
        return (Path(base) if base else Path.home() / ".cache") / "hipgroupgemm"
    except RuntimeError:
        return None  # no home directory
