"""The commands `hipgroupgemm store ...`: see, move and clean up what tuning has stored."""

from __future__ import annotations

import datetime
import json
import os
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from hipgroupgemm.cli.parameters import OutputType

if TYPE_CHECKING:
    from hipgroupgemm.store.records import StoredRecord
    from hipgroupgemm.store.store import TuningStore

    _ParamType = click.ParamType[Any]  # generic for type checkers only: older releases of click can't be subscripted
else:
    _ParamType = click.ParamType

__all__ = ["store"]

_WIDE = 128  # columns of a terminal from which all columns are printed
_AGE = re.compile(r"(\d+)\s*(h|d|w|m|y)?")
_HOURS = {"h": 1, "d": 24, "w": 7 * 24, "m": 30 * 24, "y": 365 * 24}


class _AgeType(_ParamType):
    """ "90d" to a timedelta."""

    name = "AGE"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """A number of days, or of hours, weeks, months of 30 days or years with the unit's first letter."""
        match = _AGE.fullmatch(str(value).strip().lower())
        if match is None or len(match[1]) > 6:
            self.fail(f"{value!r}: wanted an age, such as 90d, 12h, 6w, 3m or 1y", param, ctx)
        return datetime.timedelta(hours=int(match[1]) * _HOURS[match[2] or "d"])


def _options(command: Callable[..., Any]) -> Callable[..., Any]:
    """The store that a command works on."""
    return click.option(
        "--directory",
        type=click.Path(file_okay=False, path_type=Path),
        metavar="DIR",
        help="The store's directory. Default: HIPGROUPGEMM_TUNING_STORE, else the user's cache directory.",
    )(command)


def _filters(command: Callable[..., Any]) -> Callable[..., Any]:
    """The results that a command is about."""
    options = (
        click.option(
            "--device", "devices", metavar="TEXT", multiple=True, help="Of devices whose kind or name has this in it. Repeatable."
        ),
        click.option("--backend", "backends", metavar="NAME", multiple=True, help="Of this backend. Repeatable."),
        click.option(
            "--config", "configs", metavar="ID", multiple=True, help="Of the config with this id (store ls shows it). Repeatable."
        ),
        click.option(
            "--origin", "origins", metavar="NAME", multiple=True, help="Tuned on sizes from there: user, seed, zipf, ... Repeatable."
        ),
    )
    for option in reversed(options):
        command = option(command)
    return command


def _wanted(options: dict[str, Any]) -> Callable[[StoredRecord], bool]:
    """Whether a record passes the filters; those that are given must all be met."""
    from hipgroupgemm.store.records import config_id

    devices = [text.lower() for text in options["devices"]]
    backends, origins, configs = options["backends"], options["origins"], [text.lower() for text in options["configs"]]

    def wanted(record: StoredRecord) -> bool:
        about = (
            f"{record.device} | {record.device_name} | {record.device.kind}-{record.device.target}-{record.device.compute_units}".lower()
        )
        return (
            (not devices or any(text in about for text in devices))
            and (not backends or record.backend in backends)
            and (not origins or record.origin in origins)
            and (not configs or any(config_id(record.config).startswith(text) for text in configs))
        )

    return wanted


def _open(directory: Path | None) -> TuningStore:
    from hipgroupgemm.store.store import VARIABLE, TuningStore, why_off

    opened = TuningStore(directory)
    if opened.directory is None:
        raise click.UsageError(f"The tuning store is off ({why_off()}); name one with --directory.")
    if os.path.exists(opened.directory) and not os.path.isdir(opened.directory):
        raise click.UsageError(f"{opened.directory}: is no directory; name another with --directory, or in {VARIABLE}.")
    return opened


def _shown(path: Path | None) -> str:
    """A path for a message: one whose bytes are no text can't be printed as it is."""
    return click.format_filename(path) if path is not None else ""


@click.group()
def store() -> None:
    """See, move and clean up what tuning has stored. Plans and ragged_dot take their algorithms from it.

    One file holds the results of one kind of device. HIPGROUPGEMM_TUNING_STORE names another directory, or turns the store off ("off").
    """


@store.command()
@_options
def path(directory: Path | None) -> None:
    """Print the store's directory, which need not exist yet."""
    click.echo(os.fsencode(str(_open(directory).directory)))


# ---- ls ------------------------------------------------------------------------------------------------------------------------


@store.command(name="ls")
@_options
@_filters
@click.option("--json", "as_json", is_flag=True, help="Print JSON, runner-ups and versions included.")
def list_results(directory: Path | None, as_json: bool, **options: Any) -> None:
    """List the stored results.

    A problem that is one of an MoE layer has its class and M,K,N,E, as --class and --shape take them; M is what was tuned, and results
    serve M up to the capacity that M is rounded up to. A class of the up projection stands for that of the down projection too: fwd_wi
    with K and N exchanged is fwd_wo, dgrad_wi dgrad_wo, and wgrad_wi wgrad_wo.

    The sizes are the user's, the balanced seed, or of the distribution that is named. The last column says whether a result can be used
    here: "yes"; "other versions" of what it depends on; or "?", where this machine has not its device, or not its backend.
    """
    wanted = _wanted(options)
    opened = _open(directory)
    records = sorted(
        (record for record in opened.records() if wanted(record)),
        key=lambda record: (
            str(record.device),
            record.device_name,
            record.config.to_json(),
            record.size_class,
            record.origin,
            record.backend,
        ),
    )
    states = _States()
    if as_json:
        click.echo(json.dumps([_as_dict(record, states) for record in records], indent=1))
        return
    if not records:
        click.echo(f"{_shown(opened.directory)}: no results{' that fit' if any(options.values()) else ''}")
        return
    _print_table(records, states)
    click.echo(f"{len(records)} results in {_shown(opened.directory)}")


class _States:
    """Whether records can be used here; each backend's versions are asked once."""

    def __init__(self) -> None:
        self._versions: dict[Any, Any] = {}

    def of(self, record: StoredRecord) -> str:
        from hipgroupgemm.store.identity import versions_here

        key = (record.device, record.backend)
        if key not in self._versions:
            self._versions[key] = versions_here(*key)
        here = self._versions[key]
        return "?" if here is None else "yes" if here == record.versions else "other versions"


def _as_dict(record: StoredRecord, states: _States) -> dict[str, Any]:
    import dataclasses

    from hipgroupgemm.store.records import config_id
    from hipgroupgemm.store.state import moe_problem

    problem = moe_problem(record)
    return {
        "id": config_id(record.config),
        "class": None if problem is None else problem[0],
        "shape": None if problem is None else list(problem[1].extents),
        "config": json.loads(record.config.to_json()),
        "device": dataclasses.asdict(record.device),
        **record.to_dict(),
        "usable": states.of(record),
    }


def _problem(record: StoredRecord, wide: bool) -> str:
    """Two lines: the problem in the command line's words where it has some, else by the config's extents; its mode and types.

    Narrow: without the mode where the class says it.
    """
    from hipgroupgemm.store.state import moe_problem

    c, problem = record.config, moe_problem(record)
    if problem is None:
        batch = f" batch={c.batch_count}" if c.batch_count != 1 else ""
        about = f"m={c.m} n={c.n} k={c.k} groups={c.group_count}{batch}"
    else:
        about = f"{problem[0]} M,K,N,E={','.join(map(str, problem[1].extents))}"
    mode = f"{c.ragged_mode.name} " if wide or problem is None else ""
    return f"{about}\n{mode}{c.type_a}->{c.type_d}{' +c' if c.beta else ''}"


def _sizes(record: StoredRecord) -> str:
    if record.seeded:
        return "balanced seed"
    return f"{record.size_class} user's" if record.origin == "user" else f"{record.size_class} {record.origin}"


def _print_table(records: list[StoredRecord], states: _States) -> None:
    import itertools

    from rich.box import SIMPLE_HEAD
    from rich.table import Table
    from rich.text import Text

    from hipgroupgemm.measure.text import stdout_console
    from hipgroupgemm.store.records import config_id
    from hipgroupgemm.tuning.report import printable

    console = stdout_console()
    wide = ("of floor", "tuned") if console.width >= _WIDE else ()
    for (device, name), group in itertools.groupby(records, lambda record: (record.device, record.device_name)):
        title = Text(printable(f"{device}: {name}"))
        table = Table(box=SIMPLE_HEAD, title=title, title_justify="left", title_style="bold", pad_edge=False, padding=(0, 1, 0, 0))
        for column in ("id", "problem", "sizes", "backend", "algorithm", "ms", *wide, "usable"):
            table.add_column(
                column,
                justify="right" if column in ("ms", "of floor") else "left",
                overflow="fold",
                no_wrap=column in ("id", "problem", "ms", "of floor", "tuned"),
                min_width={"sizes": 8, "backend": 9}.get(column),
            )
        for record in group:
            cells = [
                config_id(record.config)[:8],
                _problem(record, bool(wide)),
                _sizes(record),
                record.backend,
                f"{record.algorithm.index} {record.algorithm.name}",
                f"{record.median_ms:.4g}",
                *(("-" if record.fraction is None else f"{record.fraction:.2g}", f"{record.date:%Y-%m-%d}") if wide else ()),
                states.of(record),
            ]
            table.add_row(*(Text(printable(cell)) for cell in cells))
        console.print(table)


# ---- export, import ------------------------------------------------------------------------------------------------------------


@store.command(name="export")
@_options
@_filters
@click.argument("file", type=OutputType(), default="-")
def export_results(directory: Path | None, file: Path, **options: Any) -> None:
    """Write the results to FILE as JSON, for `store import` on another machine; - (the default) is standard output.

    Exit status: 0; 1 when FILE can't be written; 2 for arguments that can't be met, filters that no result passes among them.
    """
    from hipgroupgemm.measure.text import STDOUT, write_text

    data = _open(directory).export(_wanted(options))
    if any(options.values()) and not data["documents"]:
        raise click.UsageError("No result has all that is asked for; `hipgroupgemm store ls` shows what there is.")
    try:
        write_text(file, json.dumps(data, indent=1) + "\n")
    except BrokenPipeError:  # main knows what to do
        raise
    except OSError as error:
        raise click.ClickException(f"{file}: can't be written ({error.strerror})") from error
    if file != STDOUT:
        count = sum(len(entry["results"]) for document in data["documents"] for entry in document["configs"].values())
        click.echo(f"{count} results written to {file}")


@store.command(name="import")
@_options
@click.option("--dry-run", is_flag=True, help="Say what would become of the results, and change nothing.")
@click.argument("files", type=click.Path(exists=True, dir_okay=False, allow_dash=True, path_type=Path), nargs=-1, required=True)
def import_results(directory: Path | None, dry_run: bool, files: tuple[Path, ...]) -> None:
    """Merge the results of FILES into the store: exports, or files of another store; - is standard input.

    Where both have a result for one thing (device, config, class and origin of the sizes, backend and versions): tuned on the same sizes,
    the later measurement of each algorithm counts and the fastest wins; on other sizes the later result wins, of equally old ones the
    faster.

    Exit status: 0; 1 when a file is no export, or the store can't be written; 2 for arguments that can't be met. Files that come before
    one that is refused have been merged.
    """
    from hipgroupgemm.store.store import StoreWriteError

    opened = _open(directory)
    for file in files:
        try:
            data = json.loads(_read(file))
        except (ValueError, RecursionError) as error:
            raise click.ClickException(f"{file}: is not JSON ({error}); wanted what `hipgroupgemm store export` wrote") from error
        try:
            counts = opened.merge(data, dry_run=dry_run)
        except ValueError as error:
            raise click.ClickException(f"{file}: {str(error).removeprefix('source: ')}") from error
        except StoreWriteError as error:
            raise click.ClickException(str(error)) from error
        skipped = f", {counts.skipped} not understood" if counts.skipped else ""
        conflicts = f"; for {counts.conflicts} the two named different best algorithms" if counts.conflicts else ""
        click.echo(
            f"{file}: {counts.added} added, {counts.updated} updated, {counts.kept} unchanged{skipped}{conflicts}"
            f"{' (dry run: nothing was changed)' if dry_run else ''}"
        )


def _read(file: Path) -> str:
    try:
        return sys.stdin.read() if str(file) == "-" else file.read_text("utf-8")
    except OSError as error:
        raise click.ClickException(f"{file}: can't be read ({error.strerror})") from error


# ---- prune ---------------------------------------------------------------------------------------------------------------------


@store.command()
@_options
@_filters
@click.option("--older-than", type=_AgeType(), metavar="AGE", help="Tuned longer ago than this: 90d, 12h, 6w, 3m (of 30 days), 1y.")
@click.option("--other-versions", is_flag=True, help="Tuned with other versions than this machine has; where it can't say it keeps them.")
@click.option("--all", "everything", is_flag=True, help="All results.")
@click.option("--dry-run", is_flag=True, help="List what would be removed, and remove nothing.")
def prune(
    directory: Path | None, older_than: datetime.timedelta | None, other_versions: bool, everything: bool, dry_run: bool, **options: Any
) -> None:
    """Remove results. Those go that meet all conditions given; at least one is needed.

    Exit status: 0, also when nothing is removed; 1 when the store can't be written; 2 for arguments that can't be met.
    """
    from hipgroupgemm.store.store import StoreWriteError

    given = any((older_than is not None, other_versions, any(options.values())))
    if given == everything:
        raise click.UsageError("Which? Give --all alone, or --older-than, --other-versions, --device, --backend, --config, --origin.")
    wanted, states = _wanted(options), _States()
    now = datetime.datetime.now(datetime.timezone.utc)

    def unwanted(record: StoredRecord) -> bool:
        return (
            wanted(record)
            and (older_than is None or now - record.date > older_than)
            and (not other_versions or states.of(record) == "other versions")
        )

    opened = _open(directory)
    try:
        removed = opened.remove(unwanted, dry_run=dry_run)
    except StoreWriteError as error:
        raise click.ClickException(str(error)) from error
    if removed and dry_run:
        _print_table(removed, states)
    click.echo(f"{len(removed)} results {'would be removed' if dry_run else 'removed'} from {_shown(opened.directory)}")
    unknown = [record for record in opened.records() if wanted(record) and states.of(record) == "?"] if other_versions else []
    if unknown:
        click.echo(f"{len(unknown)} are of devices or backends that are not on this machine, and were kept")
