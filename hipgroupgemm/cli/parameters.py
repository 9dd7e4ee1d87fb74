"""What the commands' options have in common: parameter types, groups of options, and checks that come before the long work."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

# ruff: noqa: D102 - what convert does stands in click

if TYPE_CHECKING:
    from hipgroupgemm.measure.workloads import MoEShape, RaggedDotClass

    ParamType = click.ParamType[Any]  # generic for type checkers only: older releases of click can't be subscripted
else:
    ParamType = click.ParamType

__all__ = [
    "CLASS_NAMES",
    "DEVICE_HELP",
    "DTYPES",
    "DTYPE_ALIASES",
    "BytesType",
    "DTypeType",
    "DeviceType",
    "ModelType",
    "OutputType",
    "ScaleType",
    "ShapeType",
    "check_backends",
    "check_gpu",
    "check_outputs",
    "classes_of",
    "listed",
    "once",
    "problem_options",
    "require_matplotlib",
    "shapes_of",
]

DTYPE_ALIASES = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32", "fp64": "float64"}
DTYPES = ("bfloat16", "float16", "float32", "float64", "float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz")
CLASS_NAMES = ("fwd_wi", "fwd_wo", "dgrad_wi", "dgrad_wo", "wgrad_wi", "wgrad_wo")
_UNITS = {"": 1, "b": 1, "k": 1 << 10, "kib": 1 << 10, "m": 1 << 20, "mib": 1 << 20, "g": 1 << 30, "gib": 1 << 30}


def listed(kind: click.ParamType[Any] | None = None) -> Callable[[click.Context, click.Parameter, Sequence[str]], tuple[Any, ...]]:
    """A callback for options that are given several times, or once with commas, or both; each part is converted by `kind`."""

    def convert(context: click.Context, parameter: click.Parameter, values: Sequence[str]) -> tuple[Any, ...]:
        parts = [part.strip() for value in values for part in value.split(",")]
        if not all(parts):
            raise click.BadParameter(f"{','.join(values)!r}: there is nothing between two commas, or at an end", context, parameter)
        return once([kind.convert(part, parameter, context) if kind is not None else part for part in parts])

    return convert


class ShapeType(ParamType):
    """ "M,K,N,E" to an `MoEShape`."""

    name = "M,K,N,E"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        from hipgroupgemm.measure.workloads import MoEShape

        try:
            return MoEShape.parse(str(value))
        except ValueError as error:
            self.fail(str(error), param, ctx)


class ModelType(ParamType):
    """A preset's name, or all, to a tuple of `MoEShape`."""

    name = "NAME"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        from hipgroupgemm.measure.workloads import SUITES, presets_of

        if value == "all":
            return SUITES["models"]
        try:
            return tuple(preset.shape for preset in presets_of(str(value)))
        except ValueError as error:
            self.fail(str(error), param, ctx)


class ScaleType(ParamType):
    """ "auto" or a divisor."""

    name = "auto|DIVISOR"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if value in (None, "auto") or isinstance(value, int):
            return value
        if not str(value).isdecimal() or int(value) < 1:
            self.fail(f"{value!r}: wanted auto or a divisor of at least 1 for M, K and N, such as 8", param, ctx)
        return int(value)


class DTypeType(ParamType):
    """An element type by its name or its short one."""

    name = "NAME"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        name = DTYPE_ALIASES.get(str(value), str(value))
        if name not in DTYPES:
            aliases = ", ".join(f"{short} for {name}" for short, name in DTYPE_ALIASES.items())
            self.fail(f"{value!r}: no such element type; there are {', '.join(DTYPES)}; {aliases}", param, ctx)
        return name


class DeviceType(ParamType):
    """A device's name, in the form that `Device` has it, or auto or gpu."""

    name = "cpu|gpu|cuda[:N]|rocm[:N]|auto"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if value in ("auto", "gpu", "cpu"):
            return value
        from hipgroupgemm.operands.views import Device

        try:
            return str(Device.of(str(value)))
        except ValueError as error:
            self.fail(f'{error}, "auto" or "gpu"', param, ctx)


class BytesType(ParamType):
    """A number of bytes, with or without a unit, to an int."""

    name = "BYTES"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        text = str(value).strip().lower()
        number = text.rstrip("bgikm ")
        unit = text[len(number) :].strip()
        if not number.isdecimal() or unit not in _UNITS:
            self.fail(f"{value!r}: wanted a number of bytes, such as 33554432 or 32MiB", param, ctx)
        return int(number) * _UNITS[unit]


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


DEVICE_HELP = "auto: the current GPU where there is one, else the CPU. gpu: that GPU."


def problem_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """The options that name problems: --model, --shape, --class, --dtype, --backend, --device."""
    options = (
        click.option(
            "--model",
            "models",
            multiple=True,
            metavar="NAMES",
            callback=listed(ModelType()),
            help="Presets (hipgroupgemm list --models prints them), or all. A list: with commas, or repeated.",
        ),
        click.option(
            "--shape", "shapes", type=ShapeType(), multiple=True, help="M routed tokens, K embedding, N MLP, E experts. Repeatable."
        ),
        click.option(
            "--class",
            "classes",
            multiple=True,
            metavar="NAMES",
            callback=listed(click.Choice(CLASS_NAMES)),
            help=f"Of {', '.join(CLASS_NAMES)}. Default: all six. A list.",
        ),
        click.option(
            "--dtype",
            type=DTypeType(),
            help=f"Element type: {', '.join(DTYPES)}, or {', '.join(DTYPE_ALIASES)}. Default: float32 on a CPU, bfloat16 on a GPU.",
        ),
        click.option(
            "--backend",
            "backends",
            metavar="NAMES",
            multiple=True,
            callback=listed(),
            help="Default: all that can. hipgroupgemm doctor shows which there are and where they run. A list.",
        ),
        click.option("--device", type=DeviceType(), metavar=DeviceType.name, default="auto", show_default=True, help=DEVICE_HELP),
    )
    for option in reversed(options):
        command = option(command)
    return command


def check_backends(names: Sequence[str]) -> None:
    """A name that no backend has is a usage error that lists those there are."""
    from hipgroupgemm.backends import backend_names

    for name in names:
        if name not in backend_names():
            raise click.BadParameter(f"{name!r}: no such backend; there are {', '.join(backend_names())}", param_hint="--backend")


def classes_of(names: Sequence[str]) -> list[RaggedDotClass]:
    """The classes of these names, all six without any."""
    from hipgroupgemm.measure.workloads import CLASSES

    return [CLASSES[name] for name in once(names) or CLASS_NAMES]


def once(values: Sequence[Any]) -> tuple[Any, ...]:
    """What was given twice counts once, in the order of first mention."""
    return tuple(dict.fromkeys(values))


def shapes_of(
    models: Sequence[tuple[MoEShape, ...]], suite: str | None, exact: Sequence[MoEShape]
) -> tuple[list[MoEShape], list[MoEShape]]:
    """The named shapes and those given as numbers, none twice; a shape of a suite that is given as numbers too is one of the latter."""
    from hipgroupgemm.measure.workloads import SUITES

    named = [shape for group in models for shape in group]
    named += list(SUITES[suite]) if suite else []
    if not named and not exact:
        named = list(SUITES["models"])
    given = {(shape.label, shape.extents): shape for shape in exact}
    rest = {(shape.label, shape.extents): shape for shape in named if (shape.label, shape.extents) not in given}
    return list(rest.values()), list(given.values())


def check_outputs(paths: Sequence[Path]) -> None:
    """Two outputs that would go to one place are a usage error."""
    for index, path in enumerate(paths):
        if path in paths[:index] and str(path) != os.devnull:
            raise click.UsageError(f"{'standard output' if str(path) == '-' else path} was given for two outputs; give each its own")


def check_gpu(device: str) -> None:
    """A GPU that was asked for and is not here is a usage error; auto falls back to the CPU."""
    from hipgroupgemm.measure.environment import device_named

    try:
        device_named(device)
    except RuntimeError as error:
        raise click.BadParameter(str(error), param_hint="--device") from None


def require_matplotlib() -> None:
    """--plot without matplotlib is a usage error, before the long work."""
    from importlib.util import find_spec

    if find_spec("matplotlib") is None:
        raise click.UsageError("--plot needs matplotlib, which is not installed: pip install 'hipgroupgemm[bench]'")
