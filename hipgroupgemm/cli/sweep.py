"""The commands `hipgroupgemm sweep` and `hipgroupgemm report`."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click
from click.core import ParameterSource

from hipgroupgemm.cli.parameters import (
    CLASS_NAMES,
    DTYPE_ALIASES,
    DTYPES,
    BytesType,
    DTypeType,
    ModelType,
    OutputType,
    ScaleType,
    ShapeType,
    check_backends,
    check_outputs,
    listed,
    once,
    require_matplotlib,
    shapes_of,
)

__all__ = ["report", "sweep"]

_PLOTS = (".png", ".svg", ".pdf")


@click.command(short_help="Tune lists of problems: time, verify, keep the winners.")
@click.option(
    "--model",
    "models",
    multiple=True,
    metavar="NAMES",
    callback=listed(ModelType()),
    help="Presets (hipgroupgemm list --models prints them), or all. A list.",
)
@click.option("--shape", "shapes", type=ShapeType(), multiple=True, help="M routed tokens, K embedding, N MLP, E experts. Repeatable.")
@click.option("--suite", type=click.Choice(["table12", "models"]), help="table12: the eleven shapes of the article's micro-benchmark.")
@click.option(
    "--class",
    "classes",
    multiple=True,
    metavar="NAMES",
    callback=listed(click.Choice(CLASS_NAMES)),
    help=f"Of {', '.join(CLASS_NAMES)}. Default: all six. A list.",
)
@click.option(
    "--dtype",
    "dtypes",
    multiple=True,
    metavar="NAMES",
    callback=listed(DTypeType()),
    help=f"Element types: {', '.join(DTYPES)}, or {', '.join(DTYPE_ALIASES)}. Default: float32 on a CPU, bfloat16 on a GPU. A list.",
)
@click.option(
    "--distribution",
    "distributions",
    multiple=True,
    default=("balanced",),
    show_default="balanced",
    metavar="balanced|zipf|dirichlet|FILE",
    callback=listed(),
    help="How tokens fill the groups; the vectors of a FILE are samples of one job. See hipgroupgemm bench --help. A list.",
)
@click.option("--backend", "backends", multiple=True, metavar="NAMES", callback=listed(), help="Default: all that can. A list.")
@click.option(
    "--algorithms",
    multiple=True,
    default=("heuristic",),
    show_default="heuristic",
    metavar="heuristic|all|NAMES",
    callback=listed(),
    help="heuristic: those that each backend ranks first. Names are a list.",
)
@click.option("--max-algorithms", type=click.IntRange(min=1), help="At most so many of each backend. Default: 8 of heuristic, any of all.")
@click.option("--max-workspace", type=BytesType(), help="Only algorithms that need at most so many bytes, such as 32MiB.")
@click.option("--repetitions", type=click.IntRange(min=1), help="Timed calls of each candidate.")
@click.option("--time-limit", type=click.FloatRange(min=0, min_open=True), help="Seconds a job; candidates that it leaves out are untimed.")
@click.option("--seed", type=click.IntRange(min=0), default=0, show_default=True, help="Of operands, order and drawn group sizes.")
@click.option("--scale", type=ScaleType(), metavar="auto|DIVISOR", help="Divide M, K and N, as in hipgroupgemm bench.")
@click.option(
    "--devices",
    multiple=True,
    default=("auto",),
    show_default="auto",
    metavar="0,1,...|cpu|cuda:N|rocm:N|gpu|auto",
    callback=listed(),
    help="A process each. Devices of one kind share the jobs; every other kind runs them all. A list.",
)
@click.option("--resume", type=click.Path(dir_okay=False, path_type=Path), help="Take up this sweep; without --json it is written on.")
@click.option("--csv", "csv_path", type=OutputType(), help="Write a line a candidate here at the end; - is standard output.")
@click.option(
    "--json", "json_path", type=OutputType(), help="The sweep's file, kept up to date job by job; - is standard output, at the end."
)
@click.option("--overwrite", is_flag=True, help="Let --json replace a file that is there already, and lose what is in it.")
@click.option("--plot", "plot_paths", type=OutputType(_PLOTS), multiple=True, help="Plot what the winners reach. Repeatable.")
@click.option("--store/--no-store", default=True, help="Whether winners go to the tuning store (default), from which new plans take them.")
def sweep(**options: Any) -> None:
    """Tune every combination of shapes, classes, element types and group sizes: time and verify the algorithms, keep the winners.

    Options marked as lists take values with commas between them, and may be repeated.

    With --resume, jobs that are done on an equal device with equal versions and settings are kept, the others run:
    hipgroupgemm sweep --resume FILE does all that FILE was ever asked for. With options beside it, those jobs alone are run that the
    file's first request has with these options; they are added to the file, and what it waited for before it waits for still.
    --devices alone runs all of it on these devices; what others have not done waits for them.

    Exit status: 0; 1 when a candidate is wrong, crashed, hung, failed or not deterministic though it claims to be, when a job failed,
    or a backend that was named ran nothing; 2 for arguments that can't be met; 130 after Ctrl-C (finished jobs are kept).
    """
    from hipgroupgemm.sweep.command import Outputs, run
    from hipgroupgemm.sweep.jobs import DistributionError, RequestError, SweepRequest

    context = click.get_current_context()
    check_backends(options["backends"])
    plots = once(options["plot_paths"])
    if plots:
        require_matplotlib()
    check_outputs([path for path in (options["csv_path"], options["json_path"], *plots) if path is not None])
    resume: Path | None = options["resume"]
    if resume is not None:
        OutputType().convert(str(resume), None, context)  # it is written, too
    given = {name for name in options if context.get_parameter_source(name) not in (ParameterSource.DEFAULT, ParameterSource.DEFAULT_MAP)}
    if options["overwrite"] and options["json_path"] is None:
        raise click.UsageError("--overwrite goes with --json FILE, the file that may be overwritten")
    earlier = _earlier_requests(resume)
    if not earlier and not given & {"models", "shapes", "suite"}:
        raise click.UsageError("Which problems? Give --shape M,K,N,E, --model NAME or --model all; hipgroupgemm list --models prints them.")
    values = _request_values(options)
    changed = {field for name in given for field in _FIELDS.get(name, ())}
    if not earlier:
        requests = [SweepRequest(**values)]
    else:
        base = earlier if changed <= {"devices"} else earlier[:1]
        requests = [dataclasses.replace(one, **{field: values[field] for field in changed}) for one in base]
    if "devices" in given or not earlier:
        devices = _devices(options["devices"])
        requests = [dataclasses.replace(one, devices=devices) for one in requests]
    outputs = Outputs(options["json_path"], options["csv_path"], plots, resume, options["store"], options["overwrite"])
    try:
        code = run(requests, outputs)
    except DistributionError as error:
        raise click.BadParameter(str(error), param_hint="--distribution") from error
    except RequestError as error:
        raise click.UsageError(str(error)) from error
    except BrokenPipeError:  # main knows what to do
        raise
    except (ValueError, RuntimeError, OSError) as error:
        raise click.ClickException(str(error)) from error
    context.exit(code)


_FIELDS = {
    "models": ("shapes", "exact_shapes"),
    "shapes": ("shapes", "exact_shapes"),
    "suite": ("shapes", "exact_shapes"),
    "classes": ("classes",),
    "dtypes": ("dtypes",),
    "distributions": ("distributions",),
    "backends": ("backends",),
    "algorithms": ("algorithms",),
    "max_algorithms": ("max_algorithms",),
    "max_workspace": ("max_workspace",),
    "repetitions": ("repetitions",),
    "time_limit": ("time_limit",),
    "seed": ("seed",),
    "scale": ("scale", "shapes", "exact_shapes"),
    "devices": ("devices",),
}
"""Which fields of a request an option sets."""


def _request_values(options: dict[str, Any]) -> dict[str, Any]:
    named, exact = shapes_of(options["models"], options["suite"], options["shapes"])
    if options["scale"] == "auto":
        named, exact = [*named, *exact], []
    algorithms = options["algorithms"]
    if len(algorithms) > 1 and {"heuristic", "all"} & set(algorithms):
        raise click.BadParameter("heuristic and all stand alone; give one of them, or names", param_hint="--algorithms")
    alone = algorithms[0] if algorithms[0] in ("heuristic", "all") else None
    return {
        "shapes": named,
        "exact_shapes": exact,
        "classes": list(options["classes"] or CLASS_NAMES),
        "dtypes": list(options["dtypes"]),
        "distributions": list(options["distributions"]),
        "devices": list(options["devices"]),
        "backends": list(options["backends"]) or None,
        "algorithms": alone or list(algorithms),
        "max_algorithms": options["max_algorithms"],
        "max_workspace": options["max_workspace"],
        "repetitions": options["repetitions"],
        "time_limit": options["time_limit"],
        "scale": None if options["scale"] == "auto" else options["scale"],
        "seed": options["seed"],
    }


def _earlier_requests(resume: Path | None) -> list[Any]:
    """What a sweep that is taken up was asked for; nothing without one."""
    if resume is None or not resume.exists():
        return []
    from hipgroupgemm.sweep.planning import requests_of
    from hipgroupgemm.sweep.record import read_sweep

    try:
        return list(requests_of(read_sweep(resume)))
    except (ValueError, OSError) as error:
        raise click.BadParameter(str(error), param_hint="--resume") from error


def _devices(names: Sequence[str]) -> list[str]:
    """Devices by their full names: a number is that GPU, auto the current GPU where there is one, else the CPU."""
    from hipgroupgemm.operands.views import Device
    from hipgroupgemm.runtime import KINDS, RuntimeUnavailable, get_runtime

    def gpu(index: int | None, reasons: list[str]) -> str | None:
        for kind in KINDS:
            try:
                runtime = get_runtime(kind)
                number = runtime.current_device() if index is None else index
                runtime.check_device(number)
            except RuntimeUnavailable as error:
                reasons.append(str(error))
            except (ValueError, RuntimeError) as error:
                raise click.BadParameter(str(error), param_hint="--devices") from error
            else:
                return str(Device(kind, number))
        return None

    found = []
    for name in names:
        reasons: list[str] = []
        if name in ("auto", "gpu") or name.isdecimal():
            device = gpu(int(name) if name.isdecimal() else None, reasons) or ("cpu" if name == "auto" else None)
            if device is None:
                raise click.BadParameter(f"{name}: there is no GPU here: {' '.join(reasons)}", param_hint="--devices")
        else:
            try:
                device = str(Device.of(name))
            except ValueError as error:
                raise click.BadParameter(f'{error}, a number, "auto" or "gpu"', param_hint="--devices") from error
        found.append(device)
    return list(once(found))


@click.command(short_help="Compare sweeps, of two versions or devices.")
@click.argument("files", nargs=-1, required=True, metavar="FILE...", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.option("--csv", "csv_path", type=OutputType(), help="Write a line a problem here; - is standard output.")
@click.option("--json", "json_path", type=OutputType(), help="Write everything here; - is standard output.")
@click.option(
    "--plot", "plot_paths", type=OutputType(_PLOTS), multiple=True, help="Plot the ratios, or what the one sweep's winners reach."
)
def report(**options: Any) -> None:
    """Compare the files of sweeps, say of two versions or of two devices, with the first of them; of one file, sum it up.

    Problems are the same where class, extents, element type and group sizes are; algorithms where backend and name are. A ratio is the
    time of the first sweep's winner over that of the other's: above 1 the other is faster. New and missing algorithms also follow from
    what the sweeps were asked to try. A file with several kinds of devices counts as that many sweeps.

    Exit status: 0; 1 when an algorithm that was right is wrong, crashed, hung or failed now, or a job that ended does so no more;
    2 for files that can't be read.
    """
    from hipgroupgemm.measure.text import STDOUT, stdout_console
    from hipgroupgemm.sweep import report as reports

    plots = once(options["plot_paths"])
    if plots:
        require_matplotlib()
    outputs = [options["csv_path"], options["json_path"]]
    check_outputs([path for path in (*outputs, *plots) if path is not None])
    console = stdout_console()
    if STDOUT in outputs:
        from rich.console import Console

        console = Console(stderr=True)
    try:
        series = reports.read_series(options["files"], console)
    except (ValueError, OSError) as error:
        raise click.UsageError(str(error)) from error
    comparisons = reports.report(series)
    reports.print_report(console, series, comparisons)
    try:
        if options["csv_path"] is not None:
            reports.write_report_csv(options["csv_path"], series, comparisons)
        if options["json_path"] is not None:
            reports.write_report_json(options["json_path"], series, comparisons)
        for path in plots:
            _plot(path, series, comparisons)
    except BrokenPipeError:
        raise
    except (OSError, ValueError) as error:
        raise click.ClickException(str(error)) from error
    for path in (*outputs, *plots):
        if path is not None and path != STDOUT:
            console.print(f"wrote {path}", markup=False, highlight=False, soft_wrap=True)
    click.get_current_context().exit(reports.exit_code(comparisons))


def _plot(path: Path, series: Sequence[Any], comparisons: Sequence[Any]) -> None:
    from hipgroupgemm.sweep.plots import plot_comparisons, plot_sweep

    if comparisons:
        plot_comparisons(comparisons, path)
    else:
        plot_sweep(list(series[0].records.values()), path)
