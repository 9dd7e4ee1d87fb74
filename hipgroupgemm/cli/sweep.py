"""The commands `hipgroupgemm sweep` and `hipgroupgemm report`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from hipgroupgemm.cli import parameters
from hipgroupgemm.cli.parameters import BYTES, OutputType
from hipgroupgemm.sweep.jobs import RequestError, SweepRequest
from hipgroupgemm.sweep.report import report as compare
from hipgroupgemm.sweep.running import Outputs, resume, run_sweep

__all__ = ["report", "sweep"]

_NAMES = "heuristic: those that each backend ranks first. Names are a list."
_FILE = "The sweep's file, JSON Lines: a line a job, as it ends"
_SETTINGS = ("dtypes", "distributions", "backends", "max_algorithms", "max_workspace", "repetitions", "time_limit", "seed")


@click.command()
@parameters.problem_options
@parameters.run_options
@parameters.list_option("--algorithms", metavar="heuristic|all|NAMES", show_default="heuristic", help=_NAMES)
@click.option("--max-algorithms", type=click.IntRange(min=1), help="At most so many of each backend. Default: 8 of heuristic, any of all.")
@click.option("--max-workspace", type=BYTES, help="Only algorithms that need at most so many bytes, such as 32MiB.")
@click.option("--time-limit", type=click.FloatRange(min=0, min_open=True), help="Seconds a job; candidates that it leaves out are untimed.")
@click.option("--resume", "resumed", type=click.Path(dir_okay=False, path_type=Path), help="Go on with this sweep's file, or begin it.")
@click.option("--overwrite", is_flag=True, help="Let --json replace a file that is there already, and lose what is in it.")
@parameters.output_options("a line a candidate, at the end,", _FILE, "what the winners reach")
@click.option("--store/--no-store", default=True, help="Whether winners go to the tuning store (default), from which new plans take them.")
def sweep(resumed: Path | None, **options: Any) -> None:
    """Tune every combination of shapes, classes, element types and group sizes: time and verify the algorithms, keep the winners.

    Options marked as lists take values with commas between them, and may be repeated. Each device gets a process; devices of one kind
    share the jobs, every other kind runs them all. The vectors of a FILE of group sizes are samples of one job.

    hipgroupgemm sweep --resume FILE runs what FILE was asked for and has no result of. Options beside it have to be those that FILE was
    begun with, but for --devices: other devices of the same kinds do as well. A file that is not there yet is begun.

    Exit status: 0; 1 when a candidate is wrong, crashed, timed out, failed or not deterministic though it claims to be, when a job failed,
    or a backend or algorithm that was named ran nothing; 2 for arguments that can't be met; 130 after Ctrl-C (finished jobs are kept).
    """
    parameters.check_outputs(options)
    if resumed is not None:
        if options["json"] is not None:
            raise click.UsageError("--resume FILE goes on in FILE; --json is for a new sweep")
        OutputType().convert(str(resumed), None, click.get_current_context())  # it is written, too
    if options["overwrite"] and options["json"] is None:
        raise click.UsageError("--overwrite goes with --json FILE, the file that may be overwritten")
    old = resumed if resumed is not None and resumed.is_file() and resumed.stat().st_size > 0 else None
    named = any(options[name] for name in ("models", "shapes", "suite"))
    if old is None and not named:
        raise click.UsageError("Which problems? Give --shape M,K,N,E, --model NAME or --model all; hipgroupgemm list --models prints them.")
    given = {name: options[name] for name in _SETTINGS if options[name] not in (None, ())}
    if algorithms := options["algorithms"]:
        if len(algorithms) > 1 and {"heuristic", "all"} & set(algorithms):
            raise click.BadParameter("heuristic and all stand alone; give one of them, or names", param_hint="--algorithms")
        given["algorithms"] = algorithms[0] if algorithms[0] in ("heuristic", "all") else algorithms
    if options["classes"]:
        given["classes"] = parameters.classes_of(options["classes"])
    if options["devices"] or old is None:
        given["devices"] = tuple(map(str, parameters.devices_of(options["devices"])))
    scaled, shapes = options["scale"] is not None, parameters.shapes_of(options)
    given |= shapes if named else {"scale": shapes["scale"]} if scaled else {}
    outputs = Outputs(options["json"] or resumed, *(options[name] for name in ("csv", "plots", "store", "overwrite")))
    with parameters.usage_errors(RequestError, *(() if old is None else (ValueError,))):
        code = run_sweep(SweepRequest(**given), outputs) if old is None else resume(old, outputs, given)
    click.get_current_context().exit(code)


@click.command()
@click.argument("files", nargs=-1, required=True, metavar="FILE...", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@parameters.output_options("a line a problem", "Write everything here as JSON", "the ratios, or what the one sweep's winners reach")
def report(files: tuple[Path, ...], **options: Any) -> None:
    """Compare the files of sweeps, say of two versions or of two devices, with the first of them; of one file, sum it up.

    Problems are the same where class, extents, element type and group sizes are; algorithms where backend and name are. A ratio is the
    time of the first sweep's winner over that of the other's: above 1 the other is faster. New and missing algorithms also follow from
    what the sweeps were asked to try. A file with several kinds of devices counts as that many sweeps.

    Exit status: 0; 1 when an algorithm that was right is wrong, crashed, timed out or failed now, or a job that ended does so no more;
    2 for files that can't be read.
    """
    parameters.check_outputs(options)
    with parameters.usage_errors(ValueError):
        code = compare(files, **options)
    click.get_current_context().exit(code)
