"""The command `hipgroupgemm bench`."""

from __future__ import annotations

from typing import Any

import click

from hipgroupgemm.benchmark.baselines import BASELINES
from hipgroupgemm.benchmark.command import Request, run
from hipgroupgemm.cli.parameters import (
    PLOTS,
    SCALE,
    OutputType,
    check_outputs,
    devices_of,
    distribution_option,
    list_option,
    once,
    problem_options,
    shapes_of,
    usage_errors,
)
from hipgroupgemm.measure.workloads import CLASSES

__all__ = ["bench"]


@click.command()
@problem_options
@distribution_option
@click.option("--seed", type=click.IntRange(min=0), default=0, show_default=True, help="Of operands and drawn group sizes.")
@list_option("--baseline", "baselines", kind=click.Choice([*BASELINES, "none"]), help=f"Of {', '.join(BASELINES)}, or none. Default: all.")
@click.option(
    "--scale",
    type=SCALE,
    metavar="auto|DIVISOR",
    help="Divide M, K and N; 1 for nothing. auto: nothing on a GPU; on a CPU the power of two that keeps the padded dot short. "
    "Default: auto for models and suites; a --shape is run as given.",
)
@click.option("--repetitions", type=click.IntRange(min=1), help="Timed calls of each row. Default: 1 to 15, as time allows.")
@click.option("--csv", type=OutputType(), help="Write the rows here as CSV; - is standard output.")
@click.option("--json", type=OutputType(), help="Write the rows and all group sizes here as JSON; - is standard output.")
@click.option(
    "--plot",
    "plots",
    type=OutputType(PLOTS),
    multiple=True,
    help="Plot speed-up and fraction of the floor, by the name's ending (needs hipgroupgemm[bench]). Repeatable.",
)
def bench(**options: Any) -> None:
    """Time ragged dots against the padded baselines, and check every result.

    Each backend runs its own best guess: what tuning has stored is left out of account. One device and one element type at a time;
    hipgroupgemm sweep takes several.

    Without --model, --shape and --suite all model presets are run. Their shapes are not the models' published ones: they come from AMD's
    article about grouped GEMM in XLA, whose MaxText configurations differ (its mixtral-8x7b has 32 experts). M is sequence x top-k, or
    what the article's micro-benchmark used.

    A FILE of group sizes is JSON (a list of E integers, a list of such lists, or an object with either as "group_sizes"), .npy (integers,
    (E,) or (vectors, E)), or text: several numbers a line, a vector a line; or E lines of one number each, one vector. Sizes fit the full
    shape and are scaled with it.

    Exit status: 0; 1 when a result is wrong, a call failed or a backend that was named ran nothing; 2 for arguments that can't be met;
    130 after Ctrl-C (finished rows are printed and written).
    """
    baselines, plots = options.pop("baselines") or tuple(BASELINES), once(options.pop("plots"))
    check_outputs([options["csv"], options["json"]], plots)
    if "none" in baselines and len(baselines) > 1:
        raise click.BadParameter("none was given along with others; give none, or those wanted", param_hint="--baseline")
    devices, dtypes, scale = options.pop("devices"), options.pop("dtypes"), options.pop("scale")
    for option, values in (("--device", devices), ("--dtype", dtypes)):
        if len(values) > 1:
            raise click.BadParameter(f"got {', '.join(values)}; bench takes one, hipgroupgemm sweep several", param_hint=option)
    named, exact = shapes_of(options.pop("models"), options.pop("suite"), options.pop("shapes"))
    request = Request(
        shapes=[*named, *exact] if scale == "auto" else named,
        exact_shapes=[] if scale == "auto" else exact,
        classes=[CLASSES[name] for name in options.pop("classes") or CLASSES],
        dtype=next(iter(dtypes), None),
        backends=options.pop("backends") or None,
        baselines=() if "none" in baselines else baselines,
        scale=None if scale == "auto" else scale,
        device=str(devices_of(devices)[0]),
        plots=plots,
        **options,
    )
    with usage_errors():
        code = run(request)
    click.get_current_context().exit(code)
