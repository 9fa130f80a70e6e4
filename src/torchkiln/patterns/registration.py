"""Registering rewrites: from two functions, or from two functions and a pattern that was traced beforehand."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cache, partial
from importlib.resources import files
from typing import Any

import torch

from torchkiln.patterns import text
from torchkiln.patterns.expressions import Call, Outputs
from torchkiln.patterns.index import Through
from torchkiln.patterns.match import Match
from torchkiln.patterns.rewrites import RewriteSet, TracedRewrite
from torchkiln.patterns.tracing import Tracer

ExampleInputs = Sequence[Any] | Iterable[Any] | Callable[[], Iterable[Any]]

# Rewrites with a pattern in a file, for the command that writes the files.
_from_files: dict[str, TracedRewrite] = {}


def register_replacement(
    search_fn: Callable[..., Any],
    replace_fn: Callable[..., Any],
    example_inputs: ExampleInputs,
    trace_fn: Tracer,
    pass_dicts: RewriteSet | Sequence[RewriteSet],
    *,
    extra_check: Callable[[Match], bool] | None = None,
    scalar_workaround: Mapping[str, float | int] | None = None,
    exclusive_arg_names: Sequence[str] = (),
    search_fn_pattern: Call | Outputs | None = None,
    name: str | None = None,
    priority: int = 0,
    through: Through | None = None,
) -> TracedRewrite:
    """Replace what computes ``search_fn`` by ``replace_fn`` of the same arguments, in the sets given.

    Both are traced by ``trace_fn`` (``fwd_only`` or ``joint_fwd_bwd``), the search function at ``example_inputs``: one
    tensor for each argument that is not in ``scalar_workaround``, asking for gradients where training does. An
    argument that is a number is given there with a value that appears nowhere else, so that it is found in the trace;
    in a match it may have any value. ``extra_check`` has the last word on a match. Arguments in ``exclusive_arg_names``
    are read by nobody else. ``search_fn_pattern`` takes the place of the first trace.
    """
    rewrite = TracedRewrite(
        name or search_fn.__name__,
        search_fn,
        replace_fn,
        _once(example_inputs),
        trace_fn,
        when=extra_check,
        priority=priority,
        scalars=scalar_workaround or {},
        exclusive=exclusive_arg_names,
        through=through,
        expression=None if search_fn_pattern is None else lambda: search_fn_pattern,
    )
    for target in [pass_dicts] if isinstance(pass_dicts, RewriteSet) else pass_dicts:
        target.add(rewrite)
    return rewrite


def gen_register_replacement(
    unique_name: str, search_fn: Callable[..., Any], *arguments: Any, early_check: bool = False, **options: Any
) -> TracedRewrite:
    """As :func:`register_replacement`, with the pattern from the file of that name, so that nothing is traced.

    ``python -m torchkiln.passes.stored_patterns`` writes the files. A version of torch they were not written for
    traces the function when a graph first asks for the pattern. ``early_check`` says that ``extra_check`` reads
    captures alone: it is then asked before the search function is traced at what was found, and once more after.
    """
    rewrite = register_replacement(search_fn, *arguments, name=unique_name, **options)
    rewrite.any_rank = False
    rewrite.early_check = early_check
    stored = stored_patterns().get(unique_name)
    if stored is not None:
        rewrite.expression = partial(text.read, stored)
        rewrite.needs = text.needed(stored)
    _from_files[unique_name] = rewrite
    return rewrite


def rewrites_from_files() -> Mapping[str, TracedRewrite]:
    """Every rewrite registered with a pattern in a file, by name."""
    return _from_files


@cache
def stored_patterns() -> Mapping[str, str]:
    """The patterns in the package by name; none for a version of torch that they were not traced with."""
    found: dict[str, str] = {}
    for entry in files("torchkiln.patterns").joinpath("stored").iterdir():
        if entry.name.endswith(".txt"):
            found.update(of_this_release(entry.read_text(encoding="utf-8")))
    return found


def of_this_release(content: str) -> dict[str, str]:
    """The patterns of a file that the trace of this torch gives, by name."""
    return {name: body for name, body, releases in sections(content) if torch_release() in releases}


def torch_release() -> str:
    """The release of torch as the files of patterns name it: ``2.13``."""
    return ".".join(torch.__version__.split(".")[:2])


def sections(content: str) -> Iterator[tuple[str, str, list[str]]]:
    """The parts of a file: name, pattern and releases of torch; a line ``== name: releases`` stands before each."""
    for part in content.split("== ")[1:]:
        head, _, body = part.partition("\n")
        name, _, releases = head.partition(": ")
        yield name, body.rstrip("\n") + "\n", releases.split()


def _once(example_inputs: ExampleInputs) -> Callable[[], Sequence[Any]]:
    """The example inputs as a function; made at its first call, and never twice: a generator would be empty then."""

    @cache
    def made() -> Sequence[Any]:
        return tuple(example_inputs() if callable(example_inputs) else example_inputs)

    return made
