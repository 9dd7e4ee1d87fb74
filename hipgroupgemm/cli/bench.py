"""The command `hipgroupgemm bench`."""

from __future__ import annotations

from typing import Any

import click

from hipgroupgemm.benchmark.baselines import BASELINES
from hipgroupgemm.benchmark.command import Request, run
from hipgroupgemm.cli import parameters
from hipgroupgemm.measure.workloads import CLASSES

__all__ = ["bench"]

_BASELINES = f"Of {', '.join(BASELINES)}, or none. Default: all."


@click.command()
@parameters.problem_options
@parameters.list_option("--baseline", "baselines", kind=click.Choice([*BASELINES, "none"]), help=_BASELINES)
@parameters.run_options
@parameters.output_options("the rows", "Write the rows and all group sizes here as JSON", "speed-up and fraction of the floor")
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
    parameters.check_outputs(options)
    baselines, devices, dtypes = (options.pop(name) for name in ("baselines", "devices", "dtypes"))
    if "none" in baselines and len(baselines) > 1:
        raise click.BadParameter("none was given along with others; give none, or those wanted", param_hint="--baseline")
    for option, values in (("--device", devices), ("--dtype", dtypes)):
        if len(values) > 1:
            raise click.BadParameter(f"got {', '.join(values)}; bench takes one, hipgroupgemm sweep several", param_hint=option)
    request = Request(
        classes=[CLASSES[name] for name in parameters.classes_of(options.pop("classes"))],
        dtype=next(iter(dtypes), None),
        baselines=() if "none" in baselines else baselines or tuple(BASELINES),
        device=str(parameters.devices_of(devices)[0]),
        **parameters.shapes_of(options),
        **{name: value for name, value in options.items() if value not in (None, ())},
    )
    with parameters.usage_errors():
        code = run(request)
    click.get_current_context().exit(code)
