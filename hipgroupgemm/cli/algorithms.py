"""Which algorithms can run a workload: behind `hipgroupgemm list`. Only configs are made, nothing is allocated."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.table import Table

from hipgroupgemm.backends import backend_names, get_backend, select_backend
from hipgroupgemm.backends.base import MatmulAlgorithm, as_limits
from hipgroupgemm.config import GroupedGemmConfig
from hipgroupgemm.measure.text import bytes_text, stdout_console
from hipgroupgemm.measure.workloads import ALIASES, PRESETS, MoEShape, RaggedDotClass, config_of
from hipgroupgemm.operands.views import Device

__all__ = ["Listing", "algorithms_of", "models_as_dicts", "print_listings", "print_models"]


@dataclasses.dataclass
class Listing:
    """One problem's algorithms, and the backends that refuse it with their reasons."""

    kind: RaggedDotClass
    shape: MoEShape
    config: GroupedGemmConfig
    device: Device
    algorithms: list[MatmulAlgorithm]
    refusals: dict[str, str]

    def as_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        m, k, n, e = self.shape.extents
        problem = {"class": self.kind.name, "model": self.shape.label, "M": m, "K": k, "N": n, "E": e, "dtype": self.config.type_a}
        found = [
            {name: getattr(algorithm, name) for name in ("backend", "index", "name", "workspace_size", "deterministic")}
            for algorithm in self.algorithms
        ]
        return {**problem, "device": str(self.device), "algorithms": found, "refusals": self.refusals}


def algorithms_of(
    kind: RaggedDotClass,
    shape: MoEShape,
    dtype: str,
    device: Device,
    backends: Sequence[str] = (),
    max_algorithm_count: int | None = None,
    max_workspace_size: int | None = None,
) -> Listing:
    """The algorithms of the named backends, or of all, in the order in which backends are asked."""
    config = config_of(kind, shape, dtype)
    limits = as_limits(max_algorithm_count, max_workspace_size)
    listing = Listing(kind, shape, config, device, [], {})
    for name in backends or backend_names():
        try:
            select_backend(config, device, name)
        except NotImplementedError as error:
            listing.refusals[name] = str(error).partition("refuses: ")[2] or str(error)
            continue
        found = get_backend(name).algorithms(config.key(), device, limits)
        # a backend that does not look at the limits itself must not get past them
        found = [algorithm for algorithm in found if algorithm.workspace_size <= limits.max_workspace_size]
        if not found:
            listing.refusals[name] = f"it has no algorithm within {bytes_text(max_workspace_size)} of workspace"
        listing.algorithms += found[: limits.max_algorithm_count]
    return listing


def print_listings(listings: Sequence[Listing]) -> None:
    """A table a problem, and under it the refusals."""
    console = stdout_console()
    for _, group in itertools.groupby(listings, lambda listing: listing.shape):
        for listing in group:
            c, (m, k, n, e) = listing.config, listing.shape.extents
            label = "" if listing.shape.label.count(",") == 3 else f"{listing.shape.label}  "
            title = (
                f"{listing.kind.name}  {label}M={m} K={k} N={n} E={e}, {c.type_a} -> {c.type_d}, {c.ragged_mode.name} on {listing.device}"
            )
            if listing.algorithms:
                table = Table(box=SIMPLE_HEAD, title=title, title_justify="left", title_style="bold", pad_edge=False)
                for name in ("backend", "index", "algorithm", "workspace", "deterministic"):
                    table.add_column(name, justify="right" if name in ("index", "workspace") else "left", overflow="fold")
                for one in listing.algorithms:
                    deterministic = "yes" if one.deterministic else "no"
                    table.add_row(one.backend, str(one.index), one.name, bytes_text(one.workspace_size), deterministic)
                console.print(table)
            else:
                console.print(f"{title}: no algorithm", style="bold", highlight=False, soft_wrap=True)
            for name, reason in listing.refusals.items():
                console.print(f"{name} refuses: {reason}", markup=False, highlight=False, soft_wrap=True)


def models_as_dicts() -> list[dict[str, Any]]:
    """The model presets as plain values: name, M, K, N, E and the other names that stand for them."""
    return [
        {
            "model": preset.name,
            **dict(zip("MKNE", preset.shape.extents, strict=True)),
            "aliases": [alias for alias, names in ALIASES.items() if preset.name in names],
        }
        for preset in PRESETS.values()
    ]


def print_models() -> None:
    """A table of the model presets."""
    console = stdout_console()
    table = Table(box=SIMPLE_HEAD, pad_edge=False)
    for name in ("model", *"MKNE", "also"):
        table.add_column(name, justify="right" if name in "MKNE" else "left", no_wrap=True)
    for one in models_as_dicts():
        table.add_row(one["model"], *(str(one[name]) for name in "MKNE"), ", ".join(one["aliases"]))
    console.print(table)
    console.print(
        "M: routed tokens, K: embedding, N: expert MLP, E: experts. From AMD's article about grouped GEMM in XLA (MaxText's models),\n"
        "not the models' published shapes. A name in the last column stands for all presets beside which it is; all for the whole table.",
        highlight=False,
        soft_wrap=True,
    )
