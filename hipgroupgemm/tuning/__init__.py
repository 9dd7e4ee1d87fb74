"""Tuning: every candidate timed fairly, every timed candidate verified, what was found reported and stored.

`GroupedMatmulPlan.autotune` is the way in. What it returns is a `TuningReport`, `hipgroupgemm.TuningReport` for short: `report.best` is
the winner, a `TuningRow`, and `report.rows` are all candidates; `print(report)` and `rich.print(report)` show it, `to_json`, `to_csv` and
`plot` write it, `TuningReport.from_json` reads it again.

`tune` does the same for a config without a plan, and stores nothing; `progress=` hands it a function of a `TuningProgress`.
`close_workers` ends the processes in which candidates ran, which otherwise live until the interpreter ends.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from hipgroupgemm.processes import close_workers
    from hipgroupgemm.tuning.engine import TuningProgress, tune
    from hipgroupgemm.tuning.report import TuningReport, TuningRow

__all__ = ["TuningProgress", "TuningReport", "TuningRow", "close_workers", "tune"]

_MODULES = {
    "TuningReport": "tuning.report",
    "TuningRow": "tuning.report",
    "TuningProgress": "tuning.engine",
    "tune": "tuning.engine",
    "close_workers": "processes",
}


def __getattr__(name: str) -> object:
    if name in _MODULES:  # loaded on first use: a plan looks at the store, and needs nothing of what fills it
        return getattr(importlib.import_module(f"hipgroupgemm.{_MODULES[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})  # so that help() finds what is loaded on first use
