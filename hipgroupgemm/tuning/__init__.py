"""Tuning: every candidate timed fairly, every timed candidate verified, what was found reported and stored."""

from __future__ import annotations

from hipgroupgemm.tuning.report import TuningReport, TuningRow

__all__ = ["TuningReport", "TuningRow"]
