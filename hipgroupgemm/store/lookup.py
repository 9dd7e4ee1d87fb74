"""Which of a config's stored results answers a query, if one does."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Sequence

from hipgroupgemm.backends import backend_names, get_backend, select_backend
from hipgroupgemm.backends.base import MatmulAlgorithm, versions_of
from hipgroupgemm.config import GroupedGemmConfig
from hipgroupgemm.operands.views import Device
from hipgroupgemm.store.identity import device_name
from hipgroupgemm.store.records import SEED, USER, StoredResult

__all__ = ["Query"]


@dataclasses.dataclass
class Query:
    """One look-up: what is wanted, what this process has for it, and why results were passed over.

    Attributes:
        key, device: the config's key and the device that is to run it.
        backend: only algorithms of this one; None for those of all. deterministic: only deterministic ones.
        size_class: the class of group sizes where it is known.
        reasons: why there is no answer. stale: (backend, reason) of results that would have answered and hold no more.
    """

    key: GroupedGemmConfig
    device: Device
    backend: str | None = None
    deterministic: bool = False
    size_class: str | None = None
    reasons: list[str] = dataclasses.field(default_factory=list)
    stale: list[tuple[str, str]] = dataclasses.field(default_factory=list)
    _versions: dict[str, dict[str, str] | None] = dataclasses.field(default_factory=dict)

    def choose(self, results: Sequence[StoredResult]) -> StoredResult | None:
        """The result to go by, with the algorithm to take as its only one; None where there is none.

        Preferred are results of the class that was asked for, then of this device's own product, then of sizes that the user gave, of the
        balanced seed, of synthetic distributions; then those of the versions that are here; then the last. A result is passed over as
        stale when its answer was tuned with other versions, or is no longer found by name and index together. Where no backend is named
        it is passed over, too, when its answer was not compared to the backend that comes first without it.
        """
        ranked = []
        fitting: set[str] = set()
        for position, result in enumerate(results):
            wanted = [one for one in result.algorithms if self.backend in (None, one.backend) and one.deterministic >= self.deterministic]
            fitting.update(one.backend for one in wanted)
            found = next((one for one in wanted if self.versions(one.backend) is not None), None)
            if found is not None:
                origin = {USER: 0, SEED: 1}.get(result.origin, 2)
                rank = (result.size_class != self.size_class, result.device_name != device_name(self.device), origin)
                ranked.append(((*rank, bool(self._change(result, found)), -position), result, found))
        for _, result, found in sorted(ranked, key=lambda entry: entry[0]):
            answer = self._checked(result, found)
            if answer is not None:
                return dataclasses.replace(result, algorithms=(answer,))
        if not fitting:
            of = f" of backend {self.backend}" * bool(self.backend) + " with a deterministic algorithm" * self.deterministic
            self.reasons.append(f"nothing is stored for this config{of}")
        refusing = sorted(name for name in fitting if self.versions(name) is None)
        if refusing:
            self.reasons.append(f"what is stored for this config is of {' and '.join(refusing)}, which can't run it here")
        return None

    def versions(self, backend: str) -> dict[str, str] | None:
        """The versions that a backend's results depend on; None where it is not here or can't run the config."""
        if backend not in self._versions:
            usable = backend in backend_names() and get_backend(backend).can_handle(self.key, self.device) is None
            self._versions[backend] = versions_of(get_backend(backend), self.device) if usable else None
        return self._versions[backend]

    def _change(self, result: StoredResult, found: MatmulAlgorithm) -> str:
        """The versions that differ, in words; "" where none do."""
        then, now = result.versions[found.backend], self.versions(found.backend) or {}
        names = [name for name in {**then, **now} if then.get(name) != now.get(name)]
        return ", ".join(f"{name} is {now.get(name, 'not here')} now and was {then.get(name, 'not known')}" for name in names)

    def _checked(self, result: StoredResult, found: MatmulAlgorithm) -> MatmulAlgorithm | None:
        """The algorithm as it is here, None where the result is passed over."""
        reason = self._change(result, found)
        if not reason:
            first = None
            with contextlib.suppress(NotImplementedError):  # no backend runs it unnamed
                first = select_backend(self.key, self.device).name if self.backend is None else None
            if first not in (None, found.backend, *result.versions):
                alone = f"what is stored for this config is of {found.backend}, and was not compared to {first}, which comes first"
                self.reasons.append(f"{alone}; tune both, or name backend={found.backend!r}")
                return None
            here = get_backend(found.backend).find_algorithm(self.key, self.device, found.name, found.index)
            if here is not None:
                return dataclasses.replace(here, time=found.time, verdict="ok")
            reason = f"there is no algorithm {found.name!r} with index {found.index} now"
        self.stale.append((found.backend, reason))
        self.reasons.append(f"the stored result of backend {found.backend} is stale: {reason}")
        return None
