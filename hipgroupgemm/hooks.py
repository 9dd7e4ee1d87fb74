"""What lies above the plan and is reached from it, by dotted name, resolved on first use.

The only place in which a file names what lies on a floor above its own; the test of imports knows it.
"""

from __future__ import annotations

import functools
import importlib
from typing import Any

__all__ = ["resolve"]

_NAMES = {
    "autotune": "hipgroupgemm.tuning.keep:tune_plan",
    "stored_lookup": "hipgroupgemm.store.store:lookup_for_plan",
}


@functools.cache
def resolve(name: str) -> Any:
    """The function of that name: "autotune" or "stored_lookup"."""
    module, _, function = _NAMES[name].partition(":")
    return getattr(importlib.import_module(module), function)
