"""The command ``kiln``: what this machine can compile (``doctor``), and a first look at it (``demo``)."""

from __future__ import annotations

import sys
from typing import Annotated

import typer
from rich.console import Console

import torchkiln

app = typer.Typer(
    name="kiln",
    help="torchkiln, a compiler backend for PyTorch: torch.compile(model, backend='kiln').",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)


def _console() -> Console:
    """Tables keep their columns when output goes to a file or a pipe, where rich would assume 80 characters."""
    return Console(width=None if sys.stdout.isatty() else 120)


def _print_version(wanted: bool) -> None:
    if wanted:
        print(torchkiln.__version__)
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and stop.")
    ] = False,
) -> None:
    """Options of the command itself; the callback of ``--version`` does its work."""


@app.command()
def doctor() -> None:
    """Say what torchkiln finds on this machine; exit code 1 when something stops it from compiling."""
    # The commands import what they need: importing torch takes seconds that --help should not.
    from torchkiln.doctor import examine, render

    report = examine()
    _console().print(render(report))
    raise typer.Exit(1 if report.problems else 0)


@app.command()
def demo(
    rounds: Annotated[int, typer.Option(min=1, help="Timed steps of each network; the table shows medians.")] = 20,
) -> None:
    """Compile two small networks, check them against eager and compare times; exit code 1 when a check fails."""
    from torchkiln.demo import run_demo

    raise typer.Exit(0 if run_demo(_console(), rounds) else 1)


def main() -> None:
    """Entry point of the command."""
    app()
