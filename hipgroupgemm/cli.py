"""The command `hipgroupgemm`: bench, list, doctor. NumPy and everything above it are imported by the commands, not for --help."""

from __future__ import annotations

import json
import os
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import click

if TYPE_CHECKING:
    from hipgroupgemm.workloads import MoEShape, RaggedDotClass

    _ParamType = click.ParamType[Any]  # generic for type checkers only: older releases of click can't be subscripted
else:
    _ParamType = click.ParamType

__all__ = ["cli", "main"]

INTERRUPTED = 130  # 128 + SIGINT, what shells report of a command that Ctrl-C ended
_DTYPE_ALIASES = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32", "fp64": "float64"}
_DTYPES = ("bfloat16", "float16", "float32", "float64", "float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz")
_CLASSES = ("fwd_wi", "fwd_wo", "dgrad_wi", "dgrad_wo", "wgrad_wi", "wgrad_wo")
_BASELINES = ("padded_dot", "padded_batch", "loop")
_UNITS = {"": 1, "b": 1, "k": 1 << 10, "kib": 1 << 10, "m": 1 << 20, "mib": 1 << 20, "g": 1 << 30, "gib": 1 << 30}


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
    """Grouped GEMM (ragged dot) for mixture-of-experts layers: measure it, see its algorithms, check this machine."""


# ---- parameters ----------------------------------------------------------------------------------------------------------------


class _Shape(_ParamType):
    name = "M,K,N,E"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        from hipgroupgemm.workloads import MoEShape

        try:
            return MoEShape.parse(str(value))
        except ValueError as error:
            self.fail(str(error), param, ctx)


class _Model(_ParamType):
    name = "NAME"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        from hipgroupgemm.workloads import SUITES, presets_of

        if value == "all":
            return SUITES["models"]
        try:
            return tuple(preset.shape for preset in presets_of(str(value)))
        except ValueError as error:
            self.fail(str(error), param, ctx)


class _Scale(_ParamType):
    name = "auto|DIVISOR"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if value in (None, "auto") or isinstance(value, int):
            return value
        if not str(value).isdecimal() or int(value) < 1:
            self.fail(f"{value!r}: wanted auto or a divisor of at least 1 for M, K and N, such as 8", param, ctx)
        return int(value)


class _DType(_ParamType):
    name = "NAME"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        name = _DTYPE_ALIASES.get(str(value), str(value))
        if name not in _DTYPES:
            aliases = ", ".join(f"{short} for {name}" for short, name in _DTYPE_ALIASES.items())
            self.fail(f"{value!r}: no such element type; there are {', '.join(_DTYPES)}; {aliases}", param, ctx)
        return name


class _DeviceName(_ParamType):
    """A device's name, in the form that `Device` has it, or auto or gpu."""

    name = "cpu|gpu|cuda[:N]|rocm[:N]|auto"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if value in ("auto", "gpu", "cpu"):
            return value
        from hipgroupgemm.views import Device

        try:
            return str(Device.of(str(value)))
        except ValueError as error:
            self.fail(f'{error}, "auto" or "gpu"', param, ctx)


class _Bytes(_ParamType):
    name = "BYTES"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        text = str(value).strip().lower()
        number = text.rstrip("bgikm ")
        unit = text[len(number) :].strip()
        if not number.isdecimal() or unit not in _UNITS:
            self.fail(f"{value!r}: wanted a number of bytes, such as 33554432 or 32MiB", param, ctx)
        return int(number) * _UNITS[unit]


class _Output(click.Path):
    """A file to write, checked before the long work and not after it."""

    def __init__(self, suffixes: tuple[str, ...] = ()) -> None:
        super().__init__(dir_okay=False, writable=True, path_type=Path)
        self.suffixes = suffixes

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        path = Path(str(super().convert(value, param, ctx)))
        if str(value) == "-" and not self.suffixes:
            return path  # standard output
        if str(path) == "-":  # ./- is a file
            path = path.absolute()
        target = Path(os.path.realpath(path)) if path.is_symlink() else path
        folder = target.parent
        if not folder.is_dir():
            self.fail(f"{path}: there is no directory {folder}; make it first", param, ctx)
        if target.is_file() or not target.exists():  # files are made anew beside the old one
            try:
                with tempfile.TemporaryFile(dir=folder):
                    pass
            except OSError as error:
                self.fail(f"{path}: no file can be made in {folder} ({error.strerror})", param, ctx)
        if self.suffixes and path.suffix.lower() not in self.suffixes:
            self.fail(f"{path}: wanted a name that ends in {', '.join(self.suffixes)}", param, ctx)
        return path


_DEVICE_HELP = "auto: the GPU where CuPy finds one, else the CPU. gpu: CuPy's current device."


def _problem_options(command: Callable[..., Any]) -> Callable[..., Any]:
    options = (
        click.option(
            "--model", "models", type=_Model(), multiple=True, help="A preset (hipgroupgemm list --models prints them), or all. Repeatable."
        ),
        click.option("--shape", "shapes", type=_Shape(), multiple=True, help="M routed tokens, K embedding, N MLP, E experts. Repeatable."),
        click.option("--class", "classes", type=click.Choice(_CLASSES), multiple=True, help="Default: all six. Repeatable."),
        click.option(
            "--dtype",
            type=_DType(),
            help=f"Element type: {', '.join(_DTYPES)}, or {', '.join(_DTYPE_ALIASES)}. Default: float32 on a CPU, bfloat16 on a GPU.",
        ),
        click.option(
            "--backend",
            "backends",
            metavar="NAME",
            multiple=True,
            help="Default: all that can. hipgroupgemm doctor shows which there are and where they run. Repeatable.",
        ),
        click.option("--device", type=_DeviceName(), metavar=_DeviceName.name, default="auto", show_default=True, help=_DEVICE_HELP),
    )
    for option in reversed(options):
        command = option(command)
    return command


def _check_backends(names: Sequence[str]) -> None:
    from hipgroupgemm.backends import backend_names

    for name in names:
        if name not in backend_names():
            raise click.BadParameter(f"{name!r}: no such backend; there are {', '.join(backend_names())}", param_hint="--backend")


def _classes(names: Sequence[str]) -> list[RaggedDotClass]:
    from hipgroupgemm.workloads import CLASSES

    return [CLASSES[name] for name in _once(names) or _CLASSES]


def _once(values: Sequence[Any]) -> tuple[Any, ...]:
    """What was given twice counts once, in the order of first mention."""
    return tuple(dict.fromkeys(values))


def _shapes(models: Sequence[tuple[MoEShape, ...]], suite: str | None, exact: Sequence[MoEShape]) -> tuple[list[MoEShape], list[MoEShape]]:
    """The named shapes and those given as numbers, none twice; a shape of a suite that is given as numbers too is one of the latter."""
    from hipgroupgemm.workloads import SUITES

    named = [shape for group in models for shape in group]
    named += list(SUITES[suite]) if suite else []
    if not named and not exact:
        named = list(SUITES["models"])
    given = {(shape.label, shape.extents): shape for shape in exact}
    rest = {(shape.label, shape.extents): shape for shape in named if (shape.label, shape.extents) not in given}
    return list(rest.values()), list(given.values())


# ---- bench ---------------------------------------------------------------------------------------------------------------------


@cli.command()
@_problem_options
@click.option("--suite", type=click.Choice(["table12", "models"]), help="table12: the eleven shapes of the article's micro-benchmark.")
@click.option(
    "--distribution",
    default="balanced",
    show_default=True,
    metavar="balanced|zipf|dirichlet|FILE",
    help="How tokens fill the groups: evenly; drawn with expert ranks weighted rank^-0.8, shuffled; drawn from a symmetric Dirichlet(0.5); "
    "or real group sizes from a FILE, see above.",
)
@click.option("--seed", type=click.IntRange(min=0), default=0, show_default=True, help="Of operands and drawn group sizes.")
@click.option("--baseline", "baselines", type=click.Choice([*_BASELINES, "none"]), multiple=True, help="Default: all three. Repeatable.")
@click.option(
    "--scale",
    type=_Scale(),
    metavar="auto|DIVISOR",
    help="Divide M, K and N; 1 for nothing. auto: nothing on a GPU; on a CPU the power of two that keeps the padded dot short. "
    "Default: auto for models and suites; a --shape is run as given.",
)
@click.option("--repetitions", type=click.IntRange(min=1), help="Timed calls of each row. Default: 1 to 15, as time allows.")
@click.option("--csv", "csv_path", type=_Output(), help="Write the rows here as CSV; - is standard output.")
@click.option("--json", "json_path", type=_Output(), help="Write the rows and all group sizes here as JSON; - is standard output.")
@click.option(
    "--plot",
    "plot_paths",
    type=_Output((".png", ".svg", ".pdf")),
    multiple=True,
    help="Plot speed-up and fraction of the floor, by the name's ending (needs matplotlib). Repeatable.",
)
def bench(**options: Any) -> None:
    """Time ragged dots against the padded baselines, and check every result.

    Without --model, --shape and --suite all model presets are run. Their shapes are not the models' published ones: they come from AMD's
    article about grouped GEMM in XLA, whose MaxText configurations differ (its mixtral-8x7b has 32 experts). M is sequence x top-k, or
    what the article's micro-benchmark used.

    A FILE of group sizes is JSON (a list of E integers, a list of such lists, or an object with either as "group_sizes"), .npy (integers,
    (E,) or (vectors, E)), or text: several numbers a line, a vector a line; or E lines of one number each, one vector. Sizes fit the full
    shape and are scaled with it.

    Exit status: 0; 1 when a result is wrong, a call failed or a backend that was named ran nothing; 2 for arguments that can't be met;
    130 after Ctrl-C (finished rows are printed and written).
    """
    from hipgroupgemm.benchmark.command import DistributionError, Request, run

    _check_backends(options["backends"])
    plots = _once(options["plot_paths"])
    if plots:
        _require_matplotlib()
    _check_outputs([path for path in (options["csv_path"], options["json_path"], *plots) if path is not None])
    baselines = _once(options["baselines"]) or _BASELINES
    if "none" in baselines and len(baselines) > 1:
        raise click.BadParameter("none was given along with others; give none, or those wanted", param_hint="--baseline")
    _check_gpu(options["device"])
    named, exact = _shapes(options["models"], options["suite"], options["shapes"])
    if options["scale"] == "auto":
        named, exact = [*named, *exact], []
    request = Request(
        shapes=named,
        exact_shapes=exact,
        classes=_classes(options["classes"]),
        dtype=options["dtype"],
        distribution=options["distribution"],
        seed=options["seed"],
        backends=_once(options["backends"]) or None,
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


def _check_outputs(paths: Sequence[Path]) -> None:
    for index, path in enumerate(paths):
        if path in paths[:index] and str(path) != os.devnull:
            raise click.UsageError(f"{'standard output' if str(path) == '-' else path} was given for two outputs; give each its own")


def _check_gpu(device: str) -> None:
    """A GPU that was asked for and that CuPy can't serve is a usage error; auto falls back to the CPU."""
    if device in ("auto", "cpu"):
        return
    from hipgroupgemm.benchmark.labs import gpu_refusal

    reason = gpu_refusal(device)
    if reason:
        raise click.BadParameter(reason, param_hint="--device")


def _require_matplotlib() -> None:
    from importlib.util import find_spec

    if find_spec("matplotlib") is None:
        raise click.UsageError("--plot needs matplotlib, which is not installed: pip install 'hipgroupgemm[bench]'")


# ---- list ----------------------------------------------------------------------------------------------------------------------


@cli.command(name="list")
@_problem_options
@click.option("--max-workspace", type=_Bytes(), help="Only algorithms that need at most so many bytes, such as 32MiB.")
@click.option("--max-algorithms", type=click.IntRange(min=1), help="At most so many of each backend.")
@click.option("--models", "list_models", is_flag=True, help="Print the model presets and their shapes instead.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def list_algorithms(**options: Any) -> None:
    """List the algorithms that can run a problem, and why each other backend refuses. Allocates nothing.

    With a named device, such as rocm:0, that need not be here. Exit status: 0, or 1 when a problem has no algorithm at all.
    """
    from hipgroupgemm.benchmark.algorithms import algorithms_of, default_device, models_as_dicts, print_listings, print_models

    if options["list_models"]:
        if options["as_json"]:
            click.echo(json.dumps(models_as_dicts(), indent=1))
        else:
            print_models()
        return
    _check_backends(options["backends"])
    if not (options["models"] or options["shapes"]):
        raise click.UsageError("Which problem? Give --shape M,K,N,E or --model NAME; --models prints the names.")
    from hipgroupgemm.views import Device

    if options["device"] == "gpu":
        _check_gpu("gpu")
    device = default_device() if options["device"] in ("auto", "gpu") else Device.of(options["device"])
    dtype = options["dtype"] or ("float32" if device.kind == "cpu" else "bfloat16")
    named, exact = _shapes(options["models"], None, options["shapes"])
    listings = [
        algorithms_of(kind, shape, dtype, device, _once(options["backends"]), options["max_algorithms"], options["max_workspace"])
        for shape in (*named, *exact)
        for kind in _classes(options["classes"])
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
    from hipgroupgemm.doctor import examine, print_report

    report = examine()
    if as_json:
        click.echo(json.dumps(report.as_dict(), indent=1))
    else:
        print_report(report)


if __name__ == "__main__":
    main()
