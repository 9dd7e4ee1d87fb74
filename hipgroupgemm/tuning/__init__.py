"""Tuning: every candidate timed fairly, every timed candidate verified, what was found reported and stored.

`GroupedMatmulPlan.autotune` is the way in. What it returns is a `TuningReport`, `hipgroupgemm.TuningReport` for short: `report.best` is
the winner, a `TuningRow`, and `report.rows` are all candidates; `print(report)` and `rich.print(report)` show it, `to_json`, `to_csv` and
`plot` write it, `TuningReport.from_json` reads it again.

`tune` does the same for a config without a plan, and stores nothing; `progress=` hands it a function of a `TuningProgress`.
`close_workers` ends the processes in which candidates ran, which otherwise live until the interpreter ends.
"""

from __future__ import annotations

from hipgroupgemm.processes import close_workers
from hipgroupgemm.tuning.engine import TuningProgress, tune
from hipgroupgemm.tuning.report import TuningReport, TuningRow

__all__ = ["TuningProgress", "TuningReport", "TuningRow", "close_workers", "tune"]
