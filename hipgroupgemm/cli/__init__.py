"""The command `hipgroupgemm`: bench, list, doctor, and those of other modules. NumPy and all above it are imported in them."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from typing import Any, NoReturn

import click

from hipgroupgemm.cli.parameters import (
    BytesType,
    OutputType,
    ScaleType,
    check_backends,
    check_gpu,
    check_outputs,
    classes_of,
    listed,
    once,
    problem_options,
    require_matplotlib,
    shapes_of,
)
from hipgroupgemm.cli.store import store
from hipgroupgemm.cli.sweep import report, sweep

__all__ = ["cli", "main"]

INTERRUPTED = 130  # 128 + SIGINT, what shells report of a command that Ctrl-C ended
_BASELINES = ("padded_dot", "padded_batch", "loop")


def main(arguments: Sequence[str] | None = None) -> NoReturn:
    """The entry point: runs the command and exits. Ctrl-C exits with 130, wherever it comes."""
    try:
        code = cli.main(args=None if arguments is None else list(arguments), prog_name="hipgroupgemm", standalone_mode=False)
    except click.ClickException as error:
        error.show()
        sys.exit(error.exit_code)
    except (click.Abort, KeyboardInterrupt):
        click.echo("stopped", err=True)
        sys.exit(INTERRUPTED)
    except BrokenPipeError:  # the reader of a pipe, such as head, has had enough
        sys.stderr.close()
        sys.exit(141)
    sys.exit(code if isinstance(code, int) else 0)


def _version(context: click.Context, _: click.Parameter, value: bool) -> None:
    if value and not context.resilient_parsing:
        from hipgroupgemm import __version__

        click.echo(f"hipgroupgemm {__version__}")
        context.exit()


@click.group(context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110})
@click.option("--version", is_flag=True, is_eager=True, expose_value=False, callback=_version, help="Show the version and exit.")
def cli() -> None:
    """Grouped GEMM (ragged dot) for mixture-of-experts layers: measure it, tune it, see its algorithms, check this machine."""


# ---- bench ---------------------------------------------------------------------------------------------------------------------


@cli.command()
@problem_options
@click.option("--suite", type=click.Choice(["table12", "models"]), help="table12: the eleven shapes of the article's micro-benchmark.")
@click.option(
    "--distribution",
    "distributions",
    multiple=True,
    callback=listed(),
    metavar="balanced|zipf|dirichlet|FILE",
    help="How tokens fill the groups: evenly (the default); drawn with expert ranks weighted rank^-0.8, shuffled; drawn from a symmetric "
    "Dirichlet(0.5); or real group sizes from a FILE, see above. A list: with commas, or repeated.",
)
@click.option("--seed", type=click.IntRange(min=0), default=0, show_default=True, help="Of operands and drawn group sizes.")
@click.option("--baseline", "baselines", type=click.Choice([*_BASELINES, "none"]), multiple=True, help="Default: all three. Repeatable.")
@click.option(
    "--scale",
    type=ScaleType(),
    metavar="auto|DIVISOR",
    help="Divide M, K and N; 1 for nothing. auto: nothing on a GPU; on a CPU the power of two that keeps the padded dot short. "
    "Default: auto for models and suites; a --shape is run as given.",
)
@click.option("--repetitions", type=click.IntRange(min=1), help="Timed calls of each row. Default: 1 to 15, as time allows.")
@click.option("--csv", "csv_path", type=OutputType(), help="Write the rows here as CSV; - is standard output.")
@click.option("--json", "json_path", type=OutputType(), help="Write the rows and all group sizes here as JSON; - is standard output.")
@click.option(
    "--plot",
    "plot_paths",
    type=OutputType((".png", ".svg", ".pdf")),
    multiple=True,
    help="Plot speed-up and fraction of the floor, by the name's ending (needs matplotlib). Repeatable.",
)
def bench(**options: Any) -> None:
    """Time ragged dots against the padded baselines, and check every result.

    Each backend runs its own best guess: what tuning has stored is left out of account.

    Without --model, --shape and --suite all model presets are run. Their shapes are not the models' published ones: they come from AMD's
    article about grouped GEMM in XLA, whose MaxText configurations differ (its mixtral-8x7b has 32 experts). M is sequence x top-k, or
    what the article's micro-benchmark used.

    A FILE of group sizes is JSON (a list of E integers, a list of such lists, or an object with either as "group_sizes"), .npy (integers,
    (E,) or (vectors, E)), or text: several numbers a line, a vector a line; or E lines of one number each, one vector. Sizes fit the full
    shape and are scaled with it.

    Exit status: 0; 1 when a result is wrong, a call failed or a backend that was named ran nothing; 2 for arguments that can't be met;
    130 after Ctrl-C (finished rows are printed and written).
    """
    from hipgroupgemm.benchmark.command import Request, run
    from hipgroupgemm.measure.distributions import DistributionError

    check_backends(options["backends"])
    plots = once(options["plot_paths"])
    if plots:
        require_matplotlib()
    check_outputs([path for path in (options["csv_path"], options["json_path"], *plots) if path is not None])
    baselines = once(options["baselines"]) or _BASELINES
    if "none" in baselines and len(baselines) > 1:
        raise click.BadParameter("none was given along with others; give none, or those wanted", param_hint="--baseline")
    check_gpu(options["device"])
    named, exact = shapes_of(options["models"], options["suite"], options["shapes"])
    if options["scale"] == "auto":
        named, exact = [*named, *exact], []
    request = Request(
        shapes=named,
        exact_shapes=exact,
        classes=classes_of(options["classes"]),
        dtype=options["dtype"],
        distributions=options["distributions"] or ("balanced",),
        seed=options["seed"],
        backends=once(options["backends"]) or None,
        baselines=() if "none" in baselines else baselines,
        scale=None if options["scale"] == "auto" else options["scale"],
        repetitions=options["repetitions"],
        device=options["device"],
        csv=options["csv_path"],
        json=options["json_path"],
        plots=plots,
    )
    try:
        code = run(request)
    except DistributionError as error:
        raise click.BadParameter(str(error), param_hint="--distribution") from error
    except BrokenPipeError:  # main knows what to do
        raise
    except (ValueError, RuntimeError, OSError) as error:
        raise click.ClickException(str(error)) from error
    click.get_current_context().exit(code)


# ---- list ----------------------------------------------------------------------------------------------------------------------


@cli.command(name="list")
@problem_options
@click.option("--max-workspace", type=BytesType(), help="Only algorithms that need at most so many bytes, such as 32MiB.")
@click.option("--max-algorithms", type=click.IntRange(min=1), help="At most so many of each backend.")
@click.option("--models", "list_models", is_flag=True, help="Print the model presets and their shapes instead.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def list_algorithms(**options: Any) -> None:
    """List the algorithms that can run a problem, and why each other backend refuses. Allocates nothing.

    With a named device, such as rocm:0, that need not be here. Exit status: 0, or 1 when a problem has no algorithm at all.
    """
    from hipgroupgemm.cli.algorithms import algorithms_of, models_as_dicts, print_listings, print_models

    if options["list_models"]:
        if options["as_json"]:
            click.echo(json.dumps(models_as_dicts(), indent=1))
        else:
            print_models()
        return
    check_backends(options["backends"])
    if not (options["models"] or options["shapes"]):
        raise click.UsageError("Which problem? Give --shape M,K,N,E or --model NAME; --models prints the names.")
    from hipgroupgemm.measure.environment import device_named
    from hipgroupgemm.operands.views import Device

    if options["device"] == "gpu":
        check_gpu("gpu")
    device = device_named(options["device"]) if options["device"] in ("auto", "gpu") else Device.of(options["device"])
    dtype = options["dtype"] or ("float32" if device.kind == "cpu" else "bfloat16")
    named, exact = shapes_of(options["models"], None, options["shapes"])
    listings = [
        algorithms_of(kind, shape, dtype, device, once(options["backends"]), options["max_algorithms"], options["max_workspace"])
        for shape in (*named, *exact)
        for kind in classes_of(options["classes"])
    ]
    if options["as_json"]:
        click.echo(json.dumps([listing.as_dict() for listing in listings], indent=1))
    else:
        print_listings(listings)
    click.get_current_context().exit(0 if all(listing.algorithms for listing in listings) else 1)


# ---- doctor --------------------------------------------------------------------------------------------------------------------


@cli.command()
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def doctor(as_json: bool) -> None:
    """Show what this machine has for grouped GEMM, and what to install where something lacks. Imports no framework."""
    from hipgroupgemm.cli.doctor import examine, print_report

    report = examine()
    if as_json:
        click.echo(json.dumps(report.as_dict(), indent=1))
    else:
        print_report(report)


cli.add_command(sweep)
cli.add_command(report)
cli.add_command(store)


if __name__ == "__main__":
    main()
