"""What tuning found, kept on disk and looked up when a plan is made."""

from hipgroupgemm.store.store import TuningStore, default_store, lookup_for_plan

__all__ = ["TuningStore", "default_store", "lookup_for_plan"]
