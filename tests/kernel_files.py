"""hipBLASLt's kernel library with files missing."""

from __future__ import annotations

import os
from pathlib import Path

from hipgroupgemm.native import load


def remove_kernel_files(folder: Path, pattern: str) -> list[Path]:
    """Links the library's files into a folder, for HIPBLASLT_TENSILE_LIBPATH, but not those whose name matches `*pattern`; returns them."""
    beside = os.path.join(os.path.dirname(os.path.realpath(load().hipblaslt)), "hipblaslt", "library")
    library = Path(os.environ.get("HIPBLASLT_TENSILE_LIBPATH") or beside)
    gone = sorted(library.glob("*" + pattern))
    assert gone, f"{library} has no {pattern}"
    for file in library.iterdir():
        if file not in gone:
            (folder / file.name).symlink_to(file)
    return [folder / file.name for file in gone]
