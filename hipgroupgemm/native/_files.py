"""Where the headers and the device sources lie: inside an installed package, or beside it in a checkout."""

from __future__ import annotations

import os

_PACKAGE = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))


def _folder(installed: str, checkout: str, witness: str) -> str:
    """The folder with the file ``witness``: ``_include`` in the package, or ``include`` beside it."""
    candidates = [os.path.join(_PACKAGE, installed), os.path.join(os.path.dirname(_PACKAGE), checkout)]
    for folder in candidates:
        if os.path.isfile(os.path.join(folder, witness)):
            return folder
    raise RuntimeError(
        f"hipgroupgemm: {witness} is in neither {candidates[0]} nor {candidates[1]}; the installation is "
        "incomplete. "
        "Install the package again"
    )


def include_folder() -> str:
    """Folder of ``hipgroupgemm.h`` and ``user_arguments.h``."""
    return _folder("_include", "include", "hipgroupgemm.h")


def device_folder() -> str:
    """Folder of the kernels' sources."""
    return _folder("_device", "device", "scan.h")


def abi_declarations() -> str:
    """The part of ``hipgroupgemm.h`` that is C without the preprocessor, for cffi's ``cdef``."""
    path = os.path.join(include_folder(), "hipgroupgemm.h")
    with open(path, encoding="utf-8") as file:
        text = file.read()
    begin, end = text.find("/* cffi: begin */"), text.find("/* cffi: end */")
    if begin < 0 or end < begin:
        raise RuntimeError(f"hipgroupgemm: {path} lacks its cffi marks; install the package again")
    return text[begin:end]
