"""The commands `hipgroupgemm sweep` and `hipgroupgemm report`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click
from click.core import ParameterSource

from hipgroupgemm.cli import parameters
from hipgroupgemm.cli.parameters import BYTES, PLOTS, SCALE, OutputType
from hipgroupgemm.measure.workloads import CLASSES
from hipgroupgemm.sweep.jobs import RequestError, SweepRequest
from hipgroupgemm.sweep.report import report as compare
from hipgroupgemm.sweep.running import Outputs, resume, run_sweep

__all__ = ["report", "sweep"]

_NAMES = "heuristic: those that each backend ranks first. Names are a list."
_FILE = "The sweep's file, JSON Lines: a line a job, as it ends; - is standard output."
_PLOT = "Plot what the winners reach (needs hipgroupgemm[bench]). Repeatable."
_SHAPES = ("shapes", "exact_shapes")
_FIELDS = {"models": _SHAPES, "shapes": _SHAPES, "suite": _SHAPES, "scale": ("scale", *_SHAPES)}
"""The fields of a request that an option sets, where that is not the one of its name."""


@click.command()
@parameters.problem_options
@parameters.distribution_option
@parameters.list_option("--algorithms", metavar="heuristic|all|NAMES", default=("heuristic",), show_default="heuristic", help=_NAMES)
@click.option("--max-algorithms", type=click.IntRange(min=1), help="At most so many of each backend. Default: 8 of heuristic, any of all.")
@click.option("--max-workspace", type=BYTES, help="Only algorithms that need at most so many bytes, such as 32MiB.")
@click.option("--repetitions", type=click.IntRange(min=1), help="Timed calls of each candidate.")
@click.option("--time-limit", type=click.FloatRange(min=0, min_open=True), help="Seconds a job; candidates that it leaves out are untimed.")
@click.option("--seed", type=click.IntRange(min=0), default=0, show_default=True, help="Of operands, order and drawn group sizes.")
@click.option("--scale", type=SCALE, metavar="auto|DIVISOR", help="Divide M, K and N, as in hipgroupgemm bench.")
@click.option("--resume", "resumed", type=click.Path(dir_okay=False, path_type=Path), help="Go on with this sweep's file, or begin it.")
@click.option("--csv", "csv_path", type=OutputType(), help="Write a line a candidate here at the end; - is standard output.")
@click.option("--json", "json_path", type=OutputType(), help=_FILE)
@click.option("--overwrite", is_flag=True, help="Let --json replace a file that is there already, and lose what is in it.")
@click.option("--plot", "plot_paths", type=OutputType(PLOTS), multiple=True, help=_PLOT)
@click.option("--store/--no-store", default=True, help="Whether winners go to the tuning store (default), from which new plans take them.")
def sweep(resumed: Path | None, **options: Any) -> None:
    """Tune every combination of shapes, classes, element types and group sizes: time and verify the algorithms, keep the winners.

    Options marked as lists take values with commas between them, and may be repeated. Each device gets a process; devices of one kind
    share the jobs, every other kind runs them all. The vectors of a FILE of group sizes are samples of one job.

    hipgroupgemm sweep --resume FILE runs what FILE was asked for and has no result of. Options beside it have to be those that FILE was
    begun with, but for --devices: other devices of the same kinds do as well. A file that is not there yet is begun.

    Exit status: 0; 1 when a candidate is wrong, crashed, timed out, failed or not deterministic though it claims to be, when a job failed,
    or a backend that was named ran nothing; 2 for arguments that can't be met; 130 after Ctrl-C (finished jobs are kept).
    """
    context = click.get_current_context()
    plots = parameters.once(options["plot_paths"])
    parameters.check_outputs([options["csv_path"], options["json_path"]], plots)
    if resumed is not None:
        if options["json_path"] is not None:
            raise click.UsageError("--resume FILE goes on in FILE; --json is for a new sweep")
        OutputType().convert(str(resumed), None, context)  # it is written, too
    given = {name for name in options if context.get_parameter_source(name) not in (ParameterSource.DEFAULT, ParameterSource.DEFAULT_MAP)}
    if options["overwrite"] and options["json_path"] is None:
        raise click.UsageError("--overwrite goes with --json FILE, the file that may be overwritten")
    old = resumed if resumed is not None and resumed.is_file() and resumed.stat().st_size > 0 else None
    if old is None and not given & {"models", "shapes", "suite"}:
        raise click.UsageError("Which problems? Give --shape M,K,N,E, --model NAME or --model all; hipgroupgemm list --models prints them.")
    values = _request_values(options)
    if "devices" in given or old is None:
        values["devices"] = tuple(map(str, parameters.devices_of(options["devices"])))
    outputs = Outputs(options["json_path"] or resumed, options["csv_path"], plots, options["store"], options["overwrite"])
    with parameters.usage_errors(RequestError, *(() if old is None else (ValueError,))):
        if old is not None:
            fields = [field for name in given for field in _FIELDS.get(name, (name,)) if field in values]
            code = resume(old, outputs, {field: values[field] for field in fields})
        else:
            code = run_sweep(SweepRequest(**values), outputs)
    context.exit(code)


def _request_values(options: dict[str, Any]) -> dict[str, Any]:
    named, exact = parameters.shapes_of(options["models"], options["suite"], options["shapes"])
    if options["scale"] == "auto":
        named, exact = [*named, *exact], []
    algorithms = options["algorithms"]
    if len(algorithms) > 1 and {"heuristic", "all"} & set(algorithms):
        raise click.BadParameter("heuristic and all stand alone; give one of them, or names", param_hint="--algorithms")
    as_they_are = ("dtypes", "distributions", "devices", "max_algorithms", "max_workspace", "repetitions", "time_limit", "seed")
    return {
        **{name: options[name] for name in as_they_are},
        "shapes": tuple(named),
        "exact_shapes": tuple(exact),
        "classes": options["classes"] or tuple(CLASSES),
        "backends": options["backends"] or None,
        "algorithms": algorithms[0] if algorithms[0] in ("heuristic", "all") else algorithms,
        "scale": None if options["scale"] == "auto" else options["scale"],
    }


@click.command()
@click.argument("files", nargs=-1, required=True, metavar="FILE...", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.option("--csv", "csv_path", type=OutputType(), help="Write a line a problem here; - is standard output.")
@click.option("--json", "json_path", type=OutputType(), help="Write everything here; - is standard output.")
@click.option("--plot", "plot_paths", type=OutputType(PLOTS), multiple=True, help="Plot the ratios, or what the one sweep's winners reach.")
def report(files: tuple[Path, ...], csv_path: Path | None, json_path: Path | None, plot_paths: tuple[Path, ...]) -> None:
    """Compare the files of sweeps, say of two versions or of two devices, with the first of them; of one file, sum it up.

    Problems are the same where class, extents, element type and group sizes are; algorithms where backend and name are. A ratio is the
    time of the first sweep's winner over that of the other's: above 1 the other is faster. New and missing algorithms also follow from
    what the sweeps were asked to try. A file with several kinds of devices counts as that many sweeps.

    Exit status: 0; 1 when an algorithm that was right is wrong, crashed, timed out or failed now, or a job that ended does so no more;
    2 for files that can't be read.
    """
    plots = parameters.once(plot_paths)
    parameters.check_outputs([csv_path, json_path], plots)
    with parameters.usage_errors(ValueError):
        code = compare(files, csv_path=csv_path, json_path=json_path, plots=plots)
    click.get_current_context().exit(code)
