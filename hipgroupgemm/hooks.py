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
    "TuningReport": "hipgroupgemm.tuning.report:TuningReport",
    "stored_lookup": "hipgroupgemm.store.store:lookup_for_plan",
}


@functools.cache
def resolve(name: str) -> Any:
    """What stands under that name: "autotune", "stored_lookup" or "TuningReport"."""
    module, _, function = _NAMES[name].partition(":")
    return getattr(importlib.import_module(module), function)
