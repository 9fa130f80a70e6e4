"""The command ``kiln``: what this machine can compile, a first look, figures, the cache, and packages."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
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


def _console(width: int = 120) -> Console:
    """Tables keep their columns when output goes to a file or a pipe, where rich would assume 80 characters."""
    return Console(width=None if sys.stdout.isatty() else width)


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


@app.command()
def bench(
    models: Annotated[str, typer.Option(help="Entries or groups (models, small, functions), with commas.")] = "",
    backends: Annotated[str, typer.Option(help="Backends, with commas.")] = "eager,inductor,kiln",
    jobs: Annotated[str, typer.Option(help="inference, training or both.")] = "inference,training",
    dtypes: Annotated[str, typer.Option(help="float32, bfloat16, int8; with commas.")] = "float32",
    shapes: Annotated[str, typer.Option(help="static, dynamic or both.")] = "static",
    quick: Annotated[bool, typer.Option("--quick", help="Fewer and shorter rounds.")] = False,
    resume: Annotated[bool, typer.Option(help="Use what is on record for these sources and versions.")] = False,
    threads: Annotated[int, typer.Option(help="Threads of torch; all cores without it.")] = 0,
    output: Annotated[Path, typer.Option(help="Where the figures are kept.")] = Path("results/bench/bench.jsonl"),
    measure: Annotated[bool, typer.Option(help="Measure, or only show what is on record.")] = True,
    plot: Annotated[bool, typer.Option(help="Draw the results, as PNG and HTML beside the figures.")] = True,
    page: Annotated[Path | None, typer.Option(help="Write the results to this file as Markdown.")] = None,
    profile: Annotated[str, typer.Option(help="Say where the time of these entries goes, and compare nothing.")] = "",
) -> None:
    """Compare compilers on models and functions; exit code 1 when ours did not get through one of them."""
    from torchkiln.bench import command
    from torchkiln.errors import OptionError

    try:
        asked = command.request(profile or models, backends, jobs, dtypes, shapes, quick=quick, threads=threads)
    except OptionError as error:
        raise typer.BadParameter(str(error)) from error
    console = _console(160)
    if profile:
        raise typer.Exit(0 if command.show_profiles(asked, console) else 1)
    if measure:
        typed = f"kiln {shlex.join(sys.argv[1:])}"
        records = command.run(asked, output, resume=resume, console=console, command=typed)
    else:
        records = command.recorded(asked, output)
    command.show(records, console)
    command.write(records, console, plots=output if plot else None, page_path=page)
    failed = command.failures(records)
    for line in failed:
        console.print(f"failed: {line}", style="red", markup=False)
    raise typer.Exit(1 if failed else 0)


_OWN_ARGUMENTS = {"ignore_unknown_options": True, "allow_interspersed_args": False}


@app.command(context_settings=_OWN_ARGUMENTS)
def bisect(
    script: Path,
    arguments: Annotated[list[str] | None, typer.Argument()] = None,
    timeout: Annotated[float, typer.Option(help="Seconds after which a run counts as failed.")] = 600.0,
) -> None:
    """Find the pass, rewrite, fusion or operator that makes a script fail: an assertion, an exit code or a crash.

    Exit code 1 when the script passes, or when no part of the compiler is to blame.
    """
    from torchkiln.debug.bisect import bisect_script

    with _errors_in_one_line():
        report = bisect_script(script, arguments or [], say=typer.echo, timeout=timeout)
    typer.echo(str(report))
    raise typer.Exit(0 if report.action is not None else 1)


@app.command()
def minify(
    path: Annotated[Path, typer.Argument(help="A file that torchkiln wrote, or a folder of debug_compile.")],
    output: Annotated[Path, typer.Option(help="The file to write.")] = Path("reproduction.py"),
    seconds: Annotated[float, typer.Option(help="Time after which the best so far is written.")] = 300.0,
    slower: Annotated[float | None, typer.Option(help="Times eager's time that count as a failure.")] = None,
    imports: Annotated[list[str] | None, typer.Option("--import", help="Modules to import first.")] = None,
) -> None:
    """Make the smallest program that fails in the same way, as one Python file; Ctrl-C keeps the best so far.

    Exit code 1 where nothing fails, or where the file does not fail in a process of its own.
    """
    from torchkiln.debug.command import minify_file

    with _errors_in_one_line():
        report = minify_file(path, output=output, seconds=seconds, slower=slower, imports=imports or [], say=typer.echo)
    typer.echo(str(report))
    raise typer.Exit(0 if report.verified else 1)


@app.command(context_settings={"ignore_unknown_options": True})
def explain(
    script: Path,
    arguments: Annotated[list[str] | None, typer.Argument()] = None,
    html: Annotated[Path | None, typer.Option(help="Write the report to this file.")] = None,
    json: Annotated[Path | None, typer.Option(help="Write the recording to this file.")] = None,
    folder: Annotated[Path | None, typer.Option(help="Write it to this folder, as files to read.")] = None,
    dynamic: Annotated[
        bool | None, typer.Option("--dynamic/--static", help="Symbolic sizes, or none, where the script does not say.")
    ] = None,
) -> None:
    """Run a script, and say what became of all that it compiles: stages, passes, kernels, calls, memory.

    Arguments that are no options of this command are the script's; after --, all are. The exit code is the script's,
    1 when it raised something.
    """
    from torchkiln.debug.recording.command import explain_script

    with _errors_in_one_line():
        code = explain_script(
            script, arguments or [], _console(160), html=html, json=json, folder=folder, dynamic=dynamic
        )
    raise typer.Exit(code)


@app.command()
def replay(
    path: Annotated[Path, typer.Argument(help="A folder that KILN_TRACE wrote, or one in it.")],
    html: Annotated[Path | None, typer.Option(help="Write the report of the last one to this file.")] = None,
) -> None:
    """Compile traced graphs again, with inputs of the same kind, and compare them with eager; exit code 1 if one fails.

    This runs the file reproduce.py of each folder.
    """
    from torchkiln.debug.children import import_compiler
    from torchkiln.debug.recording.command import require_writable, written
    from torchkiln.debug.recording.replay import folders_in, replay_apart

    with _errors_in_one_line():
        replayed = []
        folders = folders_in(path)
        require_writable(html)
        import_compiler()
        for folder in folders:
            replayed.append(replay_apart(folder))
            typer.echo(str(replayed[-1]))
        recordings = [one.after for one in replayed if one.after is not None]
        if html is not None and recordings:
            with written(html):
                recordings[-1].html(html)
    raise typer.Exit(1 if any(one.failure for one in replayed) else 0)


cache_app = typer.Typer(help="Look at what is kept from one process to the next.", no_args_is_help=True)
app.add_typer(cache_app, name="cache")

_Key = Annotated[str, typer.Argument(help="A key, or how it begins.")]


@contextmanager
def _errors_in_one_line() -> Iterator[None]:
    from torchkiln.errors import KilnError

    try:
        yield
    except KilnError as error:
        typer.echo(str(error), err=True)
        raise typer.Exit(1) from error


@cache_app.command("list")
def cache_list() -> None:
    """All entries: kind, key, size, when they were made and last used."""
    from torchkiln.cache import command

    with _errors_in_one_line():
        command.show_list(command.opened(), _console())


@cache_app.command("show")
def cache_show(key: _Key) -> None:
    """The fields of the key of one entry, and whether it can be verified."""
    from torchkiln.cache import command

    with _errors_in_one_line():
        command.show_entry(command.opened(), key, _console())


@cache_app.command("explain")
def cache_explain(first: _Key, second: _Key) -> None:
    """The fields in which two keys differ."""
    from torchkiln.cache import command

    with _errors_in_one_line():
        command.show_differences(command.opened(), first, second, _console())


@cache_app.command("clear")
def cache_clear() -> None:
    """Remove all entries."""
    from torchkiln.cache import command

    with _errors_in_one_line():
        command.clear(command.opened(), _console())


@cache_app.command("verify")
def cache_verify() -> None:
    """Read every entry and remove damaged ones; exit code 1 when there were some."""
    from torchkiln.cache import command

    with _errors_in_one_line():
        raise typer.Exit(0 if command.verify(command.opened(), _console()) else 1)


@cache_app.command("export")
def cache_export(file: Path) -> None:
    """Write all entries to one file."""
    from torchkiln.cache import command

    with _errors_in_one_line():
        command.export_to(command.opened(), file, _console())


@cache_app.command("import")
def cache_import(file: Path) -> None:
    """Store the entries of such a file; exit code 1 when some were refused."""
    from torchkiln.cache import command

    with _errors_in_one_line():
        raise typer.Exit(0 if command.import_from(command.opened(), file, _console()) else 1)


@cache_app.command("why-missed", context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False})
def cache_why_missed(script: Path, arguments: Annotated[list[str] | None, typer.Argument()] = None) -> None:
    """Run a script; name, for each lookup that missed, the fields in which the nearest stored key differs.

    Exit code 1 when the script raised something.
    """
    from torchkiln.cache import command

    with _errors_in_one_line():
        raise typer.Exit(0 if command.show_misses(script, arguments or [], _console()) else 1)


package_app = typer.Typer(help="Look at models compiled ahead of time.", no_args_is_help=True)
app.add_typer(package_app, name="package")

_File = Annotated[Path, typer.Argument(help="A package that torchkiln.aot_compile wrote.")]


@package_app.command("show")
def package_show(file: _File) -> None:
    """Say what a package takes and returns, which machines it is for, and what it was compiled with."""
    from torchkiln.aot import command

    with _errors_in_one_line():
        _console().print(command.described(file))


@package_app.command("verify")
def package_verify(file: _File) -> None:
    """Compare all that a package holds, weights too, with its checksums; exit code 1 when something differs."""
    from torchkiln.aot import command

    with _errors_in_one_line():
        command.verify(file)
    typer.echo(f"{file} is whole.")


def main() -> None:
    """Entry point of the command."""
    app()
