"""The plans that `ragged_dot` keeps between calls."""

from __future__ import annotations

import collections
import threading
from typing import Any

from hipgroupgemm.backends import registry_version
from hipgroupgemm.config import GroupedGemmConfig
from hipgroupgemm.operands.views import Device
from hipgroupgemm.plan import GroupedMatmulPlan

__all__ = ["PlanCache"]


class _Lease:
    """Holds a cached plan open for one call."""

    __slots__ = ("_cache", "entry")

    def __init__(self, cache: PlanCache, entry: list[Any]) -> None:
        self._cache, self.entry = cache, entry

    def __enter__(self) -> GroupedMatmulPlan:
        plan: GroupedMatmulPlan = self.entry[0]
        return plan

    def __exit__(self, *_: object) -> None:
        self._cache._release(self.entry)


class PlanCache:
    """Plans by (key, device, backend, deterministic, use_store): bounded, the least recently used goes first and is closed once unused."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._lock = threading.RLock()
        self._version = registry_version()
        self._entries: collections.OrderedDict[Any, list[Any]] = collections.OrderedDict()  # [plan, users, evicted, key]

    def lease(self, config: GroupedGemmConfig, device: Device, backend: str | None, deterministic: bool, use_store: bool = True) -> _Lease:
        """The plan for a config, made where there is none yet, held open until the lease's `with` block ends."""
        key = (config.key(), device, backend, deterministic, use_store)
        with self._lock:
            if self._version != registry_version():
                self._version = registry_version()
                self.clear()  # backends came or went, or tuning has stored something: each plan has to be made by what is there now
            entry = self._entries.get(key)
            if entry is not None:
                self._entries.move_to_end(key)
                entry[1] += 1
                return _Lease(self, entry)
            version = self._version
        plan = GroupedMatmulPlan(config, backend, device, use_store=use_store)
        try:
            if deterministic:
                plan.use_deterministic()
        except BaseException:
            plan.close()
            raise
        with self._lock:
            if key in self._entries or version != registry_version():  # another thread was faster, or the choice may be another now
                plan.close()
                return self.lease(config, device, backend, deterministic, use_store)
            entry = self._entries[key] = [plan, 1, False, key]
            while len(self._entries) > self._limit:
                _, oldest = self._entries.popitem(last=False)
                oldest[2] = True
                if oldest[1] == 0:
                    oldest[0].close()
            return _Lease(self, entry)

    def lease_again(self, entry: list[Any]) -> _Lease | None:
        """The plan that an earlier lease was for, unless it has been evicted since."""
        with self._lock:
            if entry[2] or self._version != registry_version():
                return None
            self._entries.move_to_end(entry[3])
            entry[1] += 1
            return _Lease(self, entry)

    def _release(self, entry: list[Any]) -> None:
        with self._lock:
            entry[1] -= 1
            if entry[2] and entry[1] == 0:
                entry[0].close()

    def clear(self) -> None:
        """Forgets all plans; each is closed once no call uses it."""
        with self._lock:
            for entry in self._entries.values():
                entry[2] = True
                if entry[1] == 0:
                    entry[0].close()
            self._entries.clear()
