"""What the commands' options have in common: parameter types, groups of options, and checks that come before the long work."""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import os
import re
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import click

from hipgroupgemm.backends import backend_names
from hipgroupgemm.measure.distributions import DistributionError
from hipgroupgemm.measure.environment import device_named
from hipgroupgemm.measure.workloads import CLASSES, SUITES, MoEShape, presets_of
from hipgroupgemm.operands.dtypes import ALIASES, DTYPES, dtype_of
from hipgroupgemm.operands.views import Device

# ruff: noqa: D102 - what convert does stands in click

__all__ = [
    "BYTES", "OutputType", "Parsed", "check_outputs", "classes_of", "devices_of", "list_option", "options_of", "output_options",
    "problem_options", "run_options", "shapes_of", "usage_errors",
]  # fmt: skip


class Parsed(click.ParamType):  # type: ignore[type-arg]  # older releases of click can't be subscripted
    """What a function makes of a text; its ValueError is the usage error."""

    def __init__(self, name: str, parse: Callable[[str], Any]) -> None:
        self.name, self.parse = name, parse

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        try:
            return self.parse(value)
        except ValueError as error:
            self.fail(str(error), param, ctx)


def _models(name: str) -> tuple[MoEShape, ...]:
    return SUITES["models"] if name == "all" else presets_of(name)


def _dtype(name: str) -> str:
    with contextlib.suppress(TypeError):
        if (found := str(dtype_of(name).name)) in DTYPES:
            return found
    short = ", ".join(f"{alias} for {full}" for alias, full in ALIASES.items())
    raise ValueError(f"{name!r}: no such element type; there are {', '.join(DTYPES)}; {short}")


def _device(name: str) -> str:
    """A device's full name, or what `devices_of` understands."""
    if name in ("auto", "gpu", "cpu") or name.isdecimal():
        return name
    try:
        return str(Device.of(name))
    except ValueError as error:
        raise ValueError(f'{error}, a number, "auto" or "gpu"') from None


def _backend(name: str) -> str:
    if name not in backend_names():
        raise ValueError(f"{name!r}: no such backend; there are {', '.join(backend_names())}")
    return name


def _scale(text: str) -> str | int:
    if text != "auto" and not (text.isdecimal() and int(text) > 0):
        raise ValueError(f"{text!r}: wanted auto or a divisor of at least 1 for M, K and N, such as 8")
    return text if text == "auto" else int(text)


def _bytes(text: str) -> int:
    match = re.fullmatch(r"(\d+)\s*(?:([kmg])(?:ib)?|b)?", text.strip().lower(), re.ASCII)
    if match is None:
        raise ValueError(f"{text!r}: wanted a number of bytes, such as 33554432 or 32MiB")
    return int(match[1]) << 10 * " kmg".index(match[2] or " ")


BYTES = Parsed("BYTES", _bytes)
"""Converts a number of bytes, with or without a unit, to an int."""


class OutputType(click.Path):
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
        target = Path(os.path.realpath(path))
        if not target.parent.is_dir():
            self.fail(f"{path}: there is no directory {target.parent if path.is_symlink() else path.parent}; make it first", param, ctx)
        if target.is_file() or not target.exists():  # files are made anew beside the old one
            try:
                tempfile.TemporaryFile(dir=target.parent).close()
            except OSError as error:
                self.fail(f"{path}: no file can be made in {target.parent} ({error.strerror})", param, ctx)
        if self.suffixes and path.suffix.lower() not in self.suffixes:
            self.fail(f"{path}: wanted a name that ends in {', '.join(self.suffixes)}", param, ctx)
        return path


# ---- groups of options ---------------------------------------------------------------------------------------------------------


def list_option(*names: str, kind: click.ParamType[Any] | None = None, **settings: Any) -> Callable[[Any], Any]:
    """An option whose values are a list: with commas between them, or repeated, or both; each part is converted by `kind`.

    What is given twice counts once. () where the option is not given.
    """

    def convert(context: click.Context, parameter: click.Parameter, values: Sequence[str]) -> tuple[Any, ...]:
        parts = [part.strip() for value in values for part in value.split(",")]
        if not all(parts):
            raise click.BadParameter(f"{','.join(values)!r}: there is nothing between two commas, or at an end", context, parameter)
        return tuple(dict.fromkeys(kind.convert(part, parameter, context) if kind is not None else part for part in parts))

    return click.option(*names, multiple=True, callback=convert, **{"metavar": "NAMES", **settings})


def options_of(*options: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Several options as one decorator, in the order of the help."""
    return lambda command: functools.reduce(lambda decorated, option: option(decorated), reversed(options), command)


_SHAPE = "M routed tokens, K embedding, N MLP, E experts. Repeatable."
_CLASSES = f"Of {', '.join(CLASSES)}, or all. Default: all six. A list."
_DTYPES = f"{', '.join(DTYPES)}, or {', '.join(ALIASES)}. Default: float32 on a CPU, bfloat16 on a GPU."
_BACKEND = "Default: all that can. hipgroupgemm doctor shows which there are and where they run. A list."
_DEVICE = "auto: the current GPU where there is one, else the CPU. gpu: that one. N: that GPU. A list."
_SIZES = (
    "How tokens fill the groups: evenly; drawn with expert ranks weighted rank^-0.8, shuffled; drawn from a symmetric Dirichlet(0.5); "
    "or real group sizes from a FILE (the text of `hipgroupgemm bench --help` says its form). A list."
)
_SCALE = (
    "Divide M, K and N; 1 for nothing. auto: nothing on a GPU; on a CPU the power of two that keeps the padded dot short. "
    "Default: auto for models and suites; a --shape is run as given."
)

problem_options = options_of(
    list_option("--model", "models", kind=Parsed("NAME", _models), help="Presets (list --models prints them), or all. A list."),
    click.option("--shape", "shapes", type=Parsed("M,K,N,E", MoEShape.parse), multiple=True, help=_SHAPE),
    click.option("--suite", type=click.Choice(["table12", "models"]), help="table12: the eleven shapes of the article's micro-benchmark."),
    list_option("--class", "classes", kind=click.Choice([*CLASSES, "all"]), help=_CLASSES),
    list_option("--dtype", "dtypes", kind=Parsed("NAME", _dtype), help=f"Element types: {_DTYPES} A list."),
    list_option("--backend", "backends", kind=Parsed("NAME", _backend), help=_BACKEND),
    list_option(
        *("--device", "--devices", "devices"),
        kind=Parsed("NAME", _device),
        help=_DEVICE,
        metavar="auto|gpu|cpu|N|cuda[:N]|rocm[:N]",
        show_default="auto",
    ),
)
"""The options of every command that name problems and where they run."""

run_options = options_of(
    list_option("--distribution", "distributions", help=_SIZES, metavar="balanced|zipf|dirichlet|FILE", show_default="balanced"),
    click.option("--seed", type=click.IntRange(min=0), show_default="0", help="Of operands, order and drawn group sizes."),
    click.option("--scale", type=Parsed("auto|DIVISOR", _scale), metavar="auto|DIVISOR", help=_SCALE),
    click.option("--repetitions", type=click.IntRange(min=1), help="Timed calls of each candidate. Default: as many as time allows."),
)
"""The options of the commands that run problems."""


def output_options(csv: str, json: str, plot: str) -> Callable[[Any], Any]:
    """Options of files to write; texts say what."""
    plot_type = OutputType((".png", ".svg", ".pdf"))
    return options_of(
        click.option("--csv", type=OutputType(), help=f"Write {csv} here as CSV; - is standard output."),
        click.option("--json", type=OutputType(), help=f"{json}; - is standard output."),
        click.option("--plot", "plots", type=plot_type, multiple=True, help=f"Plot {plot} (needs matplotlib). Repeatable."),
    )


# ---- what options mean ---------------------------------------------------------------------------------------------------------


def classes_of(names: Sequence[str]) -> tuple[str, ...]:
    """The classes by their names: all (also for none) are the six."""
    return tuple(CLASSES) if not names or "all" in names else tuple(names)


def devices_of(names: Sequence[str], *, here: bool = True) -> list[Device]:
    """Devices by their names: auto (also for none) is the current GPU where there is one, else the CPU. What is not here is a usage error.

    With `here` false a GPU that is named in full need not be here.
    """
    found = []
    for name in names or ("auto",):
        try:
            full = f"{device_named('gpu').kind}:{name}" if name.isdecimal() else name
            found.append(device_named(full) if here or full in ("auto", "gpu") or full != name else Device.of(full))
        except (ValueError, RuntimeError) as error:
            raise click.BadParameter(f"{name}: {error}", param_hint="--device") from error
    return list(dict.fromkeys(found))


def shapes_of(options: dict[str, Any]) -> dict[str, Any]:
    """What the options say of shapes, which are taken out of them: `shapes` by name, `exact_shapes` by numbers, none twice, and `scale`.

    A shape of a suite that is given as numbers too is one of the latter; with --scale auto all are of the former.
    """
    models, suite, exact, scale = (options.pop(name, None) for name in ("models", "suite", "shapes", "scale"))
    named = [*(shape for group in models for shape in group), *(SUITES[suite] if suite else ())]
    given = {(shape.label, shape.extents): shape for shape in exact}
    rest = {(shape.label, shape.extents): shape for shape in named or ([] if exact else SUITES["models"])}
    named = [shape for key, shape in rest.items() if key not in given]
    if scale == "auto":
        return {"shapes": (*named, *given.values()), "exact_shapes": (), "scale": None}
    return {"shapes": tuple(named), "exact_shapes": tuple(given.values()), "scale": scale}


def check_outputs(options: dict[str, Any]) -> None:
    """Two outputs that would go to one place, and pictures without matplotlib, are usage errors; a picture that is given twice is one."""
    options["plots"] = tuple(dict.fromkeys(options["plots"]))
    if options["plots"] and importlib.util.find_spec("matplotlib") is None:
        raise click.UsageError("--plot needs matplotlib, which is not installed: pip install matplotlib")
    given = [path for path in (options["csv"], options["json"], *options["plots"]) if path is not None]
    for index, path in enumerate(given):
        if path in given[:index] and str(path) != os.devnull:
            raise click.UsageError(f"{'standard output' if str(path) == '-' else path} was given for two outputs; give each its own")


@contextlib.contextmanager
def usage_errors(*usage: type[Exception]) -> Iterator[None]:
    """What functions below raise, as the commands' errors: exit status 2 for a distribution and for `usage`, else 1."""
    try:
        yield
    except DistributionError as error:
        raise click.BadParameter(str(error), param_hint="--distribution") from error
    except (ValueError, RuntimeError, OSError) as error:
        if isinstance(error, BrokenPipeError) or (isinstance(error, OSError) and error.filename is None):  # standard output: `main`'s
            raise
        raise (click.UsageError if isinstance(error, usage) else click.ClickException)(str(error)) from error
