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


def _problem_options(command: Callable[..., Any]) -> Callable[..., Any]:
    options = (
        click.option("--model", "models", type=_Model(), multiple=True, help="A model preset, or all. May be repeated."),
        click.option(
            "--shape", "shapes", type=_Shape(), multiple=True, help="M routed tokens, K embedding, N MLP, E experts. May be repeated."
        ),
        click.option("--class", "classes", type=click.Choice(_CLASSES), multiple=True, help="Default: all six. May be repeated."),
        click.option("--dtype", type=click.Choice(_DTYPES), help="Element type. Default: float32 on a CPU, bfloat16 on a GPU."),
        click.option("--backend", "backends", metavar="NAME", multiple=True, help="Default: all that can. May be repeated."),
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

    return [CLASSES[name] for name in names or _CLASSES]


def _shapes(models: Sequence[tuple[MoEShape, ...]], suite: str | None, shapes: Sequence[MoEShape]) -> list[MoEShape]:
    from hipgroupgemm.workloads import SUITES

    wanted = [shape for group in models for shape in group]
    wanted += list(SUITES[suite]) if suite else []
    wanted += list(shapes)
    return list({(shape.label, shape.extents): shape for shape in wanted or SUITES["models"]}.values())


# ---- bench ---------------------------------------------------------------------------------------------------------------------


@cli.command()
@_problem_options
@click.option("--suite", type=click.Choice(["table12", "models"]), help="table12: the eleven shapes of the article's micro-benchmark.")
@click.option(
    "--distribution",
    default="balanced",
    show_default=True,
    metavar="balanced|zipf|dirichlet|FILE",
    help="How tokens fill the groups. FILE: real group sizes (JSON, .npy or text, one vector or several).",
)
@click.option("--seed", type=click.IntRange(min=0), default=0, show_default=True, help="Of operands and drawn group sizes.")
@click.option(
    "--baseline", "baselines", type=click.Choice([*_BASELINES, "none"]), multiple=True, help="Default: all three. May be repeated."
)
@click.option(
    "--scale",
    type=_Scale(),
    default="auto",
    show_default=True,
    help="Divide M, K and N. auto: nothing on a GPU; on a CPU the power of two that keeps the padded dot short.",
)
@click.option("--repetitions", type=click.IntRange(min=1), help="Timed calls of each row. Default: 3 to 15, as time allows.")
@click.option("--device", type=click.Choice(["auto", "cpu", "gpu"]), default="auto", show_default=True, help="gpu: CuPy's current device.")
@click.option("--csv", "csv_path", type=_Output(), help="Write the rows here as CSV.")
@click.option("--json", "json_path", type=_Output(), help="Write the rows here as JSON.")
@click.option(
    "--plot", "plot_path", type=_Output((".png", ".svg", ".pdf")), help="Plot speed-up and fraction of the floor (needs matplotlib)."
)
def bench(**options: Any) -> None:
    """Time ragged dots against the padded baselines, and check every result.

    Without --model, --shape and --suite all model presets are run. Exit status: 0; 1 when a result is wrong, a call failed or a backend
    that was named ran nothing; 130 after Ctrl-C (finished rows are printed and written).
    """
    from hipgroupgemm.benchmark.command import Request, run

    _check_backends(options["backends"])
    if options["plot_path"] is not None:
        _require_matplotlib()
    baselines = options["baselines"] or _BASELINES
    if "none" in baselines and len(baselines) > 1:
        raise click.BadParameter("none was given along with others; give none, or those wanted", param_hint="--baseline")
    request = Request(
        shapes=_shapes(options["models"], options["suite"], options["shapes"]),
        classes=_classes(options["classes"]),
        dtype=options["dtype"],
        distribution=options["distribution"],
        seed=options["seed"],
        backends=options["backends"] or None,
        baselines=() if "none" in baselines else baselines,
        scale=None if options["scale"] == "auto" else options["scale"],
        repetitions=options["repetitions"],
        device=options["device"],
        csv=options["csv_path"],
        json=options["json_path"],
        plot=options["plot_path"],
    )
    try:
        code = run(request)
    except (ValueError, RuntimeError, OSError) as error:
        raise click.ClickException(str(error)) from error
    click.get_current_context().exit(code)


def _require_matplotlib() -> None:
    from importlib.util import find_spec

    if find_spec("matplotlib") is None:
        raise click.UsageError("--plot needs matplotlib, which is not installed: pip install 'hipgroupgemm[bench]'")


# ---- list ----------------------------------------------------------------------------------------------------------------------


@cli.command(name="list")
@_problem_options
@click.option("--device", default=None, metavar="cpu|cuda[:N]|rocm[:N]", help="Default: the GPU where there is one, else the CPU.")
@click.option("--max-workspace", type=_Bytes(), help="Only algorithms that need at most so many bytes, such as 32MiB.")
@click.option("--max-algorithms", type=click.IntRange(min=1), help="At most so many of each backend.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def list_algorithms(**options: Any) -> None:
    """List the algorithms that can run a problem, and why each other backend refuses. Allocates nothing.

    Exit status: 0, or 1 when a problem has no algorithm at all.
    """
    from hipgroupgemm.benchmark.algorithms import algorithms_of, default_device, print_listings

    _check_backends(options["backends"])
    if not (options["models"] or options["shapes"]):
        raise click.UsageError("Which problem? Give --shape M,K,N,E or --model NAME.")
    from hipgroupgemm.views import Device

    try:
        device = default_device() if options["device"] is None else Device.of(options["device"])
    except ValueError as error:
        raise click.BadParameter(str(error), param_hint="--device") from error
    dtype = options["dtype"] or ("float32" if device.kind == "cpu" else "bfloat16")
    listings = [
        algorithms_of(kind, shape, dtype, device, options["backends"], options["max_algorithms"], options["max_workspace"])
        for shape in _shapes(options["models"], None, options["shapes"])
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
