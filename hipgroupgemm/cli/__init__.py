"""The command `hipgroupgemm`. Each command's module is imported when it is called, and nothing but click before."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Sequence
from typing import NoReturn

import click

from hipgroupgemm.version import __version__

__all__ = ["cli", "main"]

INTERRUPTED = 130  # 128 + SIGINT, what shells report of a command that Ctrl-C ended

_COMMANDS = {
    "bench": ("hipgroupgemm.cli.bench:bench", "Time ragged dots against the padded baselines, and check every result."),
    "doctor": ("hipgroupgemm.cli.doctor:doctor", "Show what this machine has, and what to install."),
    "list": ("hipgroupgemm.cli.listing:list_algorithms", "List the algorithms that can run a problem."),
    "report": ("hipgroupgemm.cli.sweep:report", "Compare sweeps, of two versions or devices."),
    "store": ("hipgroupgemm.cli.store:store", "See, move and clean up what tuning has stored."),
    "sweep": ("hipgroupgemm.cli.sweep:sweep", "Tune lists of problems: time, verify, keep the winners."),
}


class _LazyGroup(click.Group):
    """Commands by the names of their functions."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """The commands' names."""
        return list(_COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """The command of that name, imported now."""
        if cmd_name not in _COMMANDS:
            return None
        module, _, function = _COMMANDS[cmd_name][0].partition(":")
        try:
            command: click.Command = getattr(importlib.import_module(module), function)
        except ModuleNotFoundError as error:
            if str(error.name).startswith("hipgroupgemm"):
                raise
            raise click.ClickException(f"{cmd_name} needs {error.name}, which is not installed: pip install {error.name}") from error
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """The list of commands in the help."""
        with formatter.section("Commands"):
            formatter.write_dl([(name, text) for name, (_, text) in _COMMANDS.items()])


@click.group(cls=_LazyGroup, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110})
@click.version_option(__version__, message="hipgroupgemm %(version)s")
def cli() -> None:
    """Grouped GEMM (ragged dot) for mixture-of-experts layers: measure it, tune it, see its algorithms, check this machine."""


def main(arguments: Sequence[str] | None = None) -> NoReturn:
    """The entry point: runs the command and exits. Ctrl-C exits with 130, wherever it comes."""
    _open_streams()
    try:
        code = cli.main(args=None if arguments is None else list(arguments), prog_name="hipgroupgemm", standalone_mode=False)
    except click.ClickException as error:
        error.show()
        code = error.exit_code
    except (click.Abort, KeyboardInterrupt):
        click.echo("stopped", err=True)
        code = INTERRUPTED
    except OSError as error:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # what is left for it is not written at exit either
        code = 141 if isinstance(error, BrokenPipeError) else 1  # the reader of a pipe, such as head, has had enough; or the disk is full
        if code == 1:
            click.echo(f"Error: {error if error.filename else f'standard output: {error.strerror}'}", err=True)
    sys.exit(code if isinstance(code, int) else 0)


def _open_streams() -> None:
    """Standard streams that were closed (`>&-`, some crons) lead to nowhere: else a file that is opened later would get their number."""
    while (descriptor := os.open(os.devnull, os.O_RDWR)) <= 2:
        os.set_inheritable(descriptor, True)
    os.close(descriptor)
    for number, (name, mode) in enumerate((("stdin", "r"), ("stdout", "w"), ("stderr", "w"))):
        setattr(sys, name, getattr(sys, name) or os.fdopen(number, mode, encoding="utf-8"))
