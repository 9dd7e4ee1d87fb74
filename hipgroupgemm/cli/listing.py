"""The command `hipgroupgemm list`: which algorithms can run a problem. Only configs are made, nothing is allocated."""

from __future__ import annotations

import itertools
import json
from collections.abc import Sequence
from typing import Any

import click

from hipgroupgemm.backends import backend_names, get_backend
from hipgroupgemm.backends.base import AlgorithmLimits, as_limits
from hipgroupgemm.cli.parameters import BYTES, classes_of, devices_of, problem_options, shapes_of
from hipgroupgemm.cli.tables import print_table
from hipgroupgemm.config import GroupedGemmConfig
from hipgroupgemm.measure.text import bytes_text, console_for, say
from hipgroupgemm.measure.workloads import ALIASES, CLASSES, PRESETS, config_of
from hipgroupgemm.operands.views import Device

__all__ = ["list_algorithms"]


@click.command(name="list")
@problem_options
@click.option("--max-workspace", type=BYTES, help="Only algorithms that need at most so many bytes, such as 32MiB.")
@click.option("--max-algorithms", type=click.IntRange(min=1), help="At most so many of each backend.")
@click.option("--models", "list_models", is_flag=True, help="Print the model presets and their shapes instead.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def list_algorithms(list_models: bool, as_json: bool, **options: Any) -> None:
    """List the algorithms that can run a problem, and why each other backend refuses. Allocates nothing.

    A GPU that is named in full, such as rocm:0, is taken as it is named: where it is not here, its backends say so.

    Exit status: 0, or 1 when a problem has no algorithm at all.
    """
    if list_models:
        _print_models(as_json)
        return
    if not (options["models"] or options["shapes"] or options["suite"]):
        raise click.UsageError("Which problem? Give --shape M,K,N,E or --model NAME; --models prints the names.")
    shapes, limits = shapes_of(options), as_limits(options["max_algorithms"], options["max_workspace"])
    listings = []
    for device in devices_of(options["devices"], here=False):
        dtypes = options["dtypes"] or ("float32" if device.kind == "cpu" else "bfloat16",)
        problems = itertools.product(dtypes, (*shapes["shapes"], *shapes["exact_shapes"]), classes_of(options["classes"]))
        for dtype, shape, name in problems:
            config = config_of(CLASSES[name], shape, dtype)
            problem = {"class": name, "model": shape.label, **dict(zip("MKNE", shape.extents, strict=True)), "dtype": config.type_a}
            listings.append(problem | _listing(config, device, options["backends"] or backend_names(), limits))
            if not as_json:
                _print_listing(listings[-1], config)
    if as_json:
        click.echo(json.dumps(listings, indent=1))
    click.get_current_context().exit(0 if all(listing["algorithms"] for listing in listings) else 1)


_FIELDS = ("backend", "index", "name", "workspace_size", "deterministic", "batch_invariant")


def _listing(config: GroupedGemmConfig, device: Device, backends: Sequence[str], limits: AlgorithmLimits) -> dict[str, Any]:
    """The algorithms of backends, in the order in which backends are asked, and why the others refuse."""
    algorithms, refusals = [], {}
    for name in backends:
        reason = get_backend(name).can_handle(config, device)
        # a backend that does not look at the limits itself must not get past them
        listed = [] if reason else get_backend(name).algorithms(config.key(), device, limits)
        found = [one for one in listed if one.workspace_size <= limits.max_workspace_size][: limits.max_algorithm_count]
        if not found:
            refusals[name] = reason or f"it has no algorithm within {bytes_text(limits.max_workspace_size)} of workspace"
        algorithms += [{field: getattr(one, field) for field in _FIELDS} for one in found]
    return {"device": str(device), "algorithms": algorithms, "refusals": refusals}


def _print_listing(listing: dict[str, Any], c: GroupedGemmConfig) -> None:
    """A table, and under it the refusals."""
    console = console_for()
    label = "" if listing["model"].count(",") == 3 else f"{listing['model']}  "
    extents = " ".join(f"{name}={listing[name]}" for name in "MKNE")
    title = f"{listing['class']}  {label}{extents}, {c.type_a} -> {c.type_d}, {c.ragged_mode.name} on {listing['device']}"
    rows = [
        [one["backend"], str(one["index"]), one["name"], bytes_text(one["workspace_size"]), "yes" if one["deterministic"] else "no"]
        for one in listing["algorithms"]
    ]
    if rows:
        columns = ("backend", "index", "algorithm", "workspace", "deterministic")
        print_table(console, title, columns, rows, name="algorithm", right=("index", "workspace"))
    else:
        say(f"{title}: no algorithm", "bold", console)
    for name, reason in listing["refusals"].items():
        say(f"{name} refuses: {reason}", console=console)


def _print_models(as_json: bool) -> None:
    """The model presets: name, M, K, N, E and the other names that stand for them."""
    models: list[dict[str, Any]] = [
        {
            "model": name,
            **dict(zip("MKNE", shape.extents, strict=True)),
            "aliases": [alias for alias, names in ALIASES.items() if name in names],
        }
        for name, shape in PRESETS.items()
    ]
    if as_json:
        click.echo(json.dumps(models, indent=1))
        return
    rows = [[model["model"], *(str(model[name]) for name in "MKNE"), ", ".join(model["aliases"])] for model in models]
    print_table(console_for(), "", ("model", *"MKNE", "also"), rows, right="MKNE")
    click.echo(
        "M: routed tokens, K: embedding, N: expert MLP, E: experts. From AMD's article about grouped GEMM in XLA (MaxText's models),\n"
        "not the models' published shapes. A name in the last column stands for all presets beside which it is; all for the whole table."
    )
