"""The commands `hipgroupgemm sweep` and `hipgroupgemm report`."""

from __future__ import annotations

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
@click.option("--resume", type=click.Path(dir_okay=False, path_type=Path), help="Go on with this sweep's file, or begin it.")
@click.option("--csv", "csv_path", type=OutputType(), help="Write a line a candidate here at the end; - is standard output.")
@click.option(
    "--json", "json_path", type=OutputType(), help="The sweep's file, JSON Lines: a line a job, as it ends; - is standard output."
)
@click.option("--overwrite", is_flag=True, help="Let --json replace a file that is there already, and lose what is in it.")
@click.option("--plot", "plot_paths", type=OutputType(_PLOTS), multiple=True, help="Plot what the winners reach. Repeatable.")
@click.option("--store/--no-store", default=True, help="Whether winners go to the tuning store (default), from which new plans take them.")
def sweep(**options: Any) -> None:
    """Tune every combination of shapes, classes, element types and group sizes: time and verify the algorithms, keep the winners.

    Options marked as lists take values with commas between them, and may be repeated.

    hipgroupgemm sweep --resume FILE runs what FILE was asked for and has no result of. Options beside it have to be those that FILE was
    begun with, but for --devices: other devices of the same kinds do as well. A file that is not there yet is begun.

    Exit status: 0; 1 when a candidate is wrong, crashed, timed out, failed or not deterministic though it claims to be, when a job failed,
    or a backend that was named ran nothing; 2 for arguments that can't be met; 130 after Ctrl-C (finished jobs are kept).
    """
    from hipgroupgemm.sweep import jobs, running

    context = click.get_current_context()
    check_backends(options["backends"])
    plots = once(options["plot_paths"])
    if plots:
        require_matplotlib()
    check_outputs([path for path in (options["csv_path"], options["json_path"], *plots) if path is not None])
    resumed: Path | None = options["resume"]
    if resumed is not None:
        if options["json_path"] is not None:
            raise click.UsageError("--resume FILE goes on in FILE; --json is for a new sweep")
        OutputType().convert(str(resumed), None, context)  # it is written, too
    given = {name for name in options if context.get_parameter_source(name) not in (ParameterSource.DEFAULT, ParameterSource.DEFAULT_MAP)}
    if options["overwrite"] and options["json_path"] is None:
        raise click.UsageError("--overwrite goes with --json FILE, the file that may be overwritten")
    goes_on = resumed is not None and resumed.is_file() and resumed.stat().st_size > 0
    if not goes_on and not given & {"models", "shapes", "suite"}:
        raise click.UsageError("Which problems? Give --shape M,K,N,E, --model NAME or --model all; hipgroupgemm list --models prints them.")
    values = _request_values(options)
    if "devices" in given or not goes_on:
        values["devices"] = tuple(_devices(options["devices"]))
    outputs = running.Outputs(options["json_path"] or resumed, options["csv_path"], plots, options["store"], options["overwrite"])
    try:
        if resumed is not None and goes_on:
            code = running.resume(resumed, outputs, {field: values[field] for name in given for field in _FIELDS.get(name, ())})
        else:
            code = running.run_sweep(jobs.SweepRequest(**values), outputs)
    except jobs.DistributionError as error:
        raise click.BadParameter(str(error), param_hint="--distribution") from error
    except jobs.RequestError as error:
        raise click.UsageError(str(error)) from error
    except BrokenPipeError:  # main knows what to do
        raise
    except (ValueError, RuntimeError, OSError) as error:
        raise (
            click.BadParameter(str(error), param_hint="--resume") if isinstance(error, ValueError) else click.ClickException(str(error))
        ) from error
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
        "shapes": tuple(named),
        "exact_shapes": tuple(exact),
        "classes": tuple(options["classes"] or CLASS_NAMES),
        "dtypes": tuple(options["dtypes"]),
        "distributions": tuple(options["distributions"]),
        "devices": tuple(options["devices"]),
        "backends": tuple(options["backends"]) or None,
        "algorithms": alone or tuple(algorithms),
        "max_algorithms": options["max_algorithms"],
        "max_workspace": options["max_workspace"],
        "repetitions": options["repetitions"],
        "time_limit": options["time_limit"],
        "scale": None if options["scale"] == "auto" else options["scale"],
        "seed": options["seed"],
    }


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

    Exit status: 0; 1 when an algorithm that was right is wrong, crashed, timed out or failed now, or a job that ended does so no more;
    2 for files that can't be read.
    """
    from hipgroupgemm.sweep.report import report as compare

    plots = once(options["plot_paths"])
    if plots:
        require_matplotlib()
    check_outputs([path for path in (options["csv_path"], options["json_path"], *plots) if path is not None])
    try:
        code = compare(options["files"], csv_path=options["csv_path"], json_path=options["json_path"], plots=plots)
    except BrokenPipeError:
        raise
    except ValueError as error:
        raise click.UsageError(str(error)) from error
    except OSError as error:
        raise click.ClickException(str(error)) from error
    click.get_current_context().exit(code)
