"""What can be said of the tuning store at a glance, and of the problems in it in the words of the command line."""

from __future__ import annotations

import dataclasses

from hipgroupgemm.config import GroupedGemmConfig, RaggedDotMode
from hipgroupgemm.measure.workloads import CLASSES, MoEShape
from hipgroupgemm.store.records import StoredRecord

__all__ = ["StoreState", "moe_problem", "store_state"]

_LAYOUT = (
    "m",
    "n",
    "k",
    "batch_count",
    "group_count",
    "group_total",
    "ragged_mode",
    "sizes_per_batch",
    "trans_a",
    "trans_b",
    "must_swap_operands",
    "lhs_leading_dim_stride",
    "rhs_leading_dim_stride",
    "output_leading_dim_stride",
    "lhs_inner_stride",
    "rhs_inner_stride",
    "output_inner_stride",
    "stride_ragged_dim",
    "stride_group_dim",
    "output_stride_ragged_dim",
)


@dataclasses.dataclass(frozen=True)
class StoreState:
    """The store of this process's environment.

    Attributes:
        directory: where it is, "" where it is off. off: why it is off, else "".
        results: how many it holds, for all devices. trouble: why it can't be read, else "".
    """

    directory: str
    off: str = ""
    results: int = 0
    trouble: str = ""

    def describe(self) -> str:
        """One line for a person."""
        if self.off:
            return f"off ({self.off})"
        count = f"{self.results or 'no'} result{'' if self.results == 1 else 's'}"
        return ": ".join(part for part in (self.directory, self.trouble or count) if part)


def store_state() -> StoreState:
    """Looks at the store. Raises nothing."""
    try:
        from hipgroupgemm.store.store import TuningStore, why_off

        store = TuningStore()
        if store.directory is None:
            return StoreState("", off=why_off())
        if store.directory.exists() and not store.directory.is_dir():
            return StoreState(str(store.directory), trouble="is no directory")
        return StoreState(str(store.directory), results=len(store.records()))
    except Exception as error:  # whoever asks is told, and goes on
        return StoreState("", trouble=f"{type(error).__name__}: {error}")


def moe_problem(record: StoredRecord) -> tuple[str, MoEShape] | None:
    """The class of an MoE layer's ragged dot, and its shape, that a result's config is; None where it is none of them.

    A forward dot, data gradient and weight gradient of the up projection (`fwd_wi`, ...) is one of the down projection (`fwd_wo`, ...)
    with K and N exchanged: the former is named. M is the ragged extent that was tuned, which the config's key has rounded up.
    """
    from hipgroupgemm.measure.workloads import config_of

    c, m = record.config, record.sizes.get("ragged_extent")
    name, k, n = "fwd_wi", c.k, c.n
    if c.ragged_mode is RaggedDotMode.CONTRACTING:
        name, k, n = "wgrad_wi", c.m, c.n
    elif c.trans_b:
        name, k, n = "dgrad_wi", c.n, c.k
    try:
        shape = MoEShape(m if isinstance(m, int) else 0, k, n, c.group_count)
        plain = config_of(CLASSES[name], shape, "float32").key()
    except (TypeError, ValueError):
        return None
    return (name, shape) if _layout(plain) == _layout(c) else None


def _layout(config: GroupedGemmConfig) -> tuple[object, ...]:
    return tuple(getattr(config, name) for name in _LAYOUT)
