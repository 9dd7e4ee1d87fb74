"""What comes of a tuning for the plan that asked for it: the best algorithm is taken and stored."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

from hipgroupgemm.tuning.engine import tune
from hipgroupgemm.tuning.keep import keep
from hipgroupgemm.tuning.report import TuningReport

if TYPE_CHECKING:
    from hipgroupgemm.plan import GroupedMatmulPlan

__all__ = ["NoRightCandidate", "tune_plan"]

_SHOWN = 8


class NoRightCandidate(RuntimeError):
    """Tuning found no algorithm that is right. `report` says what is wrong with each."""

    def __init__(self, text: str, report: TuningReport) -> None:
        super().__init__(text)
        self.report = report

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (str(self), self.report)


def tune_plan(plan: GroupedMatmulPlan, group_sizes: Any, *, store: bool, **settings: Any) -> TuningReport:
    """Tunes a plan's config, stores the report, and makes the plan run the best; see `GroupedMatmulPlan.autotune`.

    What is wrong is stored as well: a result of an earlier tuning that is found wrong now is struck from the store.

    An error that comes once tuning is done has the report, which may have taken hours, as its attribute `report`. A report that cannot be
    stored is acted upon nonetheless.
    """
    report = tune(plan.config, plan.device, group_sizes, **settings)
    try:
        try:
            if store:
                keep(report)
        finally:
            _apply_best(plan, report)
    except BaseException as error:
        with contextlib.suppress(AttributeError):  # an error with slots
            error.report = report  # type: ignore[attr-defined]
        raise
    return report


def _apply_best(plan: GroupedMatmulPlan, report: TuningReport) -> None:
    best = report.best
    if best is None:
        words = [f"{row.algorithm.backend} {row.algorithm.name!r} {row.verdict}: {row.reason.splitlines()[0]}" for row in report.rows]
        more = f"; and {len(words) - _SHOWN} more" if len(words) > _SHOWN else ""
        raise NoRightCandidate(f"no candidate is right on {plan.device}: {'; '.join(words[:_SHOWN])}{more}; see the error's report", report)
    plan._take(best.algorithm)
