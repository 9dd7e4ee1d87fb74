"""The commands `hipgroupgemm store ...`: see, move and clean up what tuning has stored."""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import itertools
import json
import os
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from hipgroupgemm.backends import backend_names
from hipgroupgemm.cli.parameters import OutputType, Parsed, list_option, options_of, usage_errors
from hipgroupgemm.cli.tables import print_table
from hipgroupgemm.measure.text import STDOUT, console_for, write_text
from hipgroupgemm.measure.workloads import CLASSES, MoEShape, config_of
from hipgroupgemm.store.identity import device_of
from hipgroupgemm.store.records import SEED, USER, StoredResult
from hipgroupgemm.store.store import VARIABLE, Query, TuningStore, why_off

__all__ = ["store"]

_AGE = re.compile(r"(\d{1,6})\s*(h|d|w|m|y)?")
_HOURS = {"h": 1, "d": 24, "w": 7 * 24, "m": 30 * 24, "y": 365 * 24}


def _age(text: str) -> datetime.timedelta:
    match = _AGE.fullmatch(text.strip().lower())
    if match is None:
        raise ValueError(f"{text!r}: wanted an age, such as 90d, 12h, 6w, 3m or 1y")
    return datetime.timedelta(hours=int(match[1]) * _HOURS[match[2] or "d"])


def _open(context: click.Context, parameter: click.Parameter, directory: Path | None) -> TuningStore:
    opened = TuningStore(directory)
    if opened.directory is None:
        raise click.UsageError(f"The tuning store is off ({why_off()}); name one with --directory.")
    if os.path.exists(opened.directory) and not os.path.isdir(opened.directory):
        raise click.UsageError(f"{opened.directory}: is no directory; name another with --directory, or in {VARIABLE}.")
    return opened


_store = click.option(
    "--directory",
    "opened",
    type=click.Path(file_okay=False, path_type=Path),
    callback=_open,
    metavar="DIR",
    help="The store's directory. Default: HIPGROUPGEMM_TUNING_STORE, else the user's cache directory.",
)
_filters = options_of(
    list_option("--device", "devices", metavar="TEXTS", help="Of devices whose kind or name has this in it. A list."),
    list_option("--backend", "backends", help="Of these backends. A list."),
    list_option("--config", "configs", metavar="IDS", help="Of the configs with these ids (store ls shows them). A list."),
    list_option("--origin", "origins", help="Tuned on sizes from there: user, seed, zipf, ... A list."),
)


def _shown(opened: TuningStore) -> str:
    return click.format_filename(opened.directory or "")  # bytes that are no text can't be printed as they are


def _wanted(opened: TuningStore, options: dict[str, Any]) -> Callable[[StoredResult], bool]:
    """Whether a result passes the filters; those that are given must all be met."""
    known = dict.fromkeys([*backend_names(), *(result.backend for result in opened.results())])
    for backend in options["backends"]:
        if backend not in known:
            raise click.BadParameter(f"{backend!r}: no such backend; there are {', '.join(known)}", param_hint="--backend")

    def wanted(result: StoredResult) -> bool:
        kind = result.device
        about = f"{kind} | {result.device_name} | {kind.kind}-{kind.target}-{kind.compute_units}".lower()
        met = {
            "devices": lambda text: text.lower() in about,
            "backends": lambda text: text == result.backend,
            "configs": lambda text: result.id.startswith(text.lower()),
            "origins": lambda text: text == result.origin,
        }
        return all(not options[name] or any(map(test, options[name])) for name, test in met.items())

    return wanted


@click.group()
def store() -> None:
    """See, move and clean up what tuning has stored. Plans and ragged_dot take their algorithms from it.

    One file holds the results of one kind of device. HIPGROUPGEMM_TUNING_STORE names another directory, or turns the store off ("off").
    """


@store.command()
@_store
def path(opened: TuningStore) -> None:
    """Print the store's directory, which need not exist yet."""
    click.echo(os.fsencode(str(opened.directory)))


@store.command(name="ls")
@_store
@_filters
@click.option("--json", "as_json", is_flag=True, help="Print JSON, versions included.")
def list_results(opened: TuningStore, as_json: bool, **options: Any) -> None:
    """List the stored results.

    A problem that is one of an MoE layer has its class and M,K,N,E, as --class and --shape take them; M is what was tuned, and results
    serve M up to the capacity that M is rounded up to. A class of the up projection stands for that of the down projection too: fwd_wi
    with K and N exchanged is fwd_wo, dgrad_wi dgrad_wo, and wgrad_wi wgrad_wo.

    The sizes are the user's, the balanced seed, or of the distribution that is named. The last column says whether a plan can use a
    result here: "yes"; "other versions" of what it depends on; "stale", where its algorithm is no longer found by name and index together;
    or "?", where this machine has not its device, or not its backend.
    """
    results = sorted(
        filter(_wanted(opened, options), opened.results()),
        key=lambda result: (str(result.device), result.device_name, result.config.to_json(), result.size_class, result.origin),
    )
    if as_json:
        click.echo(json.dumps([_as_dict(result) for result in results], indent=1))
        return
    if results:
        _print_results(results)
        click.echo(f"{len(results)} results in {_shown(opened)}")
    else:
        click.echo(f"{_shown(opened)}: no results{' that fit' if any(options.values()) else ''}")
    if opened.ignored():
        click.echo(f"Ignored, of an earlier version of hipgroupgemm: {', '.join(opened.ignored())}; tune again, then remove them.")


def _usable(result: StoredResult) -> str:
    """Whether a plan that names the result's backend would take it: what a lookup says."""
    try:
        device = device_of(result.device)
        if device is None:
            return "?"
        query = Query(result.config, device, result.backend, result.settings)
        if query.choose([result]) is not None:
            return "yes"
        here = query.versions(result.backend)
    except Exception:  # the device, or the backend's library, is missing or fails
        return "?"
    return "?" if here is None else "stale" if here == result.versions[result.backend] else "other versions"


def _as_dict(result: StoredResult) -> dict[str, Any]:
    name, shape = _moe_problem(result)
    return {
        "id": result.id,
        "class": name,
        "shape": None if shape is None else list(shape.extents),
        **dataclasses.asdict(result),
        "config": json.loads(result.config.to_json()),
        "tuned": result.tuned.isoformat(),
        "backend": result.backend,
        "usable": _usable(result),
    }


def _moe_problem(result: StoredResult) -> tuple[str | None, MoEShape | None]:
    """The class of an MoE layer's ragged dot, and its shape, that a result's config is; None where it is none of them.

    Those of the down projection (`fwd_wo`, ...) are those of the up projection with K and N exchanged: the latter are named. M is the
    ragged extent that was tuned, which the config's key has rounded up.
    """
    c, m = result.config, result.sizes.get("ragged_extent")
    for name, k, n in (("fwd_wi", c.k, c.n), ("dgrad_wi", c.n, c.k), ("wgrad_wi", c.m, c.n)):
        with contextlib.suppress(TypeError, ValueError, NotImplementedError):  # no extents or types of a layer
            shape = MoEShape(m, k, n, c.group_count)  # type: ignore[arg-type]
            if config_of(CLASSES[name], shape, c.type_a).key() == dataclasses.replace(c, beta=0.0):
                return name, shape
    return None, None


def _problem(result: StoredResult) -> str:
    """The problem in the command line's words where it has some, else by the config's extents; its types."""
    c, (name, shape) = result.config, _moe_problem(result)
    batch = f" batch={c.batch_count}" if c.batch_count != 1 else ""
    about = f"{c.ragged_mode.name} m={c.m} n={c.n} k={c.k} groups={c.group_count}{batch}"
    if shape is not None:
        about = f"{name} M,K,N,E={','.join(map(str, shape.extents))}"
    return f"{about} {c.type_a}->{c.type_d}{' +c' if c.beta else ''}"


_COLUMNS: dict[str, Callable[[StoredResult], str]] = {
    "id": lambda result: result.id[:8],
    "problem": _problem,
    "sizes": lambda result: {SEED: "balanced seed", USER: f"{result.size_class} user's"}.get(
        result.origin, f"{result.size_class} {result.origin}"
    ),
    "algorithm": lambda result: f"{result.backend} {result.algorithm.index} {result.algorithm.name}",
    "ms": lambda result: f"{result.median_ms:.4g}",
    "of floor": lambda result: "-" if result.fraction is None else f"{result.fraction:.2g}",
    "tuned": lambda result: f"{result.tuned:%Y-%m-%d}",
    "usable": _usable,
}


def _print_results(results: list[StoredResult]) -> None:
    for (device, name), group in itertools.groupby(results, lambda result: (result.device, result.device_name)):
        rows = [[cell(result) for cell in _COLUMNS.values()] for result in group]
        print_table(console_for(), f"{device}: {name}", list(_COLUMNS), rows, name="algorithm", right=("ms", "of floor"))


@store.command(name="export")
@_store
@_filters
@click.argument("file", type=OutputType(), default="-")
def export_results(opened: TuningStore, file: Path, **options: Any) -> None:
    """Write the results to FILE as JSON, for `store import` on another machine; - (the default) is standard output.

    Exit status: 0; 1 when FILE can't be written; 2 for arguments that can't be met, filters that no result passes among them.
    """
    wanted = _wanted(opened, options)
    count = sum(map(wanted, opened.results()))
    if any(options.values()) and not count:
        raise click.UsageError("No result has all that is asked for; `hipgroupgemm store ls` shows what there is.")
    with usage_errors():
        write_text(file, opened.export(wanted).decode())
    if file != STDOUT:
        click.echo(f"{count} results written to {file}")


@store.command(name="import")
@_store
@click.option("--dry-run", is_flag=True, help="Say what would become of the results, and change nothing.")
@click.argument("files", type=click.Path(exists=True, dir_okay=False, allow_dash=True, path_type=Path), nargs=-1, required=True)
def import_results(opened: TuningStore, dry_run: bool, files: tuple[Path, ...]) -> None:
    """Merge the results of FILES into the store: exports, or files of another store; - is standard input.

    Where both have a result for one thing (device, config, class and origin of the sizes, backends and versions) the one that was tuned
    later stays.

    Exit status: 0; 1 when a file is no export, or the store can't be written; 2 for arguments that can't be met. Files that come before
    one that is refused have been merged.
    """
    for file in files:
        with usage_errors():
            data = sys.stdin.buffer.read() if file == STDOUT else file.read_bytes()
            try:
                taken, left = opened.merge(data, dry_run=dry_run)
            except ValueError as error:
                raise ValueError(f"{file}: {error}; wanted what `hipgroupgemm store export` wrote") from error
        others = f", {left} not (not later than what is here, or not understood)" if left else ""
        click.echo(f"{file}: {taken} results taken{others}{' (dry run: nothing was changed)' if dry_run else ''}")


@store.command()
@_store
@_filters
@click.option("--older-than", type=Parsed("AGE", _age), help="Tuned longer ago than this: 90d, 12h, 6w, 3m (of 30 days), 1y.")
@click.option("--other-versions", is_flag=True, help="Tuned with other versions than this machine has; where it can't say it keeps them.")
@click.option("--all", "everything", is_flag=True, help="All results.")
@click.option("--dry-run", is_flag=True, help="List what would be removed, and remove nothing.")
def prune(
    opened: TuningStore, older_than: datetime.timedelta | None, other_versions: bool, everything: bool, dry_run: bool, **options: Any
) -> None:
    """Remove results. Those go that meet all conditions given; at least one is needed.

    Exit status: 0, also when nothing is removed; 1 when the store can't be written; 2 for arguments that can't be met.
    """
    if any((older_than is not None, other_versions, any(options.values()))) == everything:
        raise click.UsageError("Which? Give --all alone, or --older-than, --other-versions, --device, --backend, --config, --origin.")
    wanted = _wanted(opened, options)
    now = datetime.datetime.now(datetime.timezone.utc)

    def unwanted(result: StoredResult) -> bool:
        old = older_than is None or now - result.tuned > older_than
        return wanted(result) and old and (not other_versions or _usable(result) == "other versions")

    with usage_errors():
        removed = opened.remove(unwanted, dry_run=dry_run)
    if removed and dry_run:
        _print_results(removed)
    click.echo(f"{len(removed)} results {'would be removed' if dry_run else 'removed'} from {_shown(opened)}")
    unknown = sum(wanted(result) and _usable(result) == "?" for result in opened.results()) if other_versions else 0
    if unknown:
        click.echo(f"{unknown} are of devices or backends that are not on this machine, and were kept")
