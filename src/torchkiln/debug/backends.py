"""Backends for looking at graphs, and for a bisection by hand: what is captured, what passes make of it."""

from __future__ import annotations

import itertools
import os
import shlex
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.fx

from torchkiln import config
from torchkiln.compiler import compile_fx, functional_kind, rng_state_kept, stage
from torchkiln.debug.torchscript import ts_compile
from torchkiln.errors import UnsupportedError
from torchkiln.frontend.compile_session import compile_session
from torchkiln.graph.fake import outside_tracing
from torchkiln.graph.manager import PassManager
from torchkiln.graph.modes import modes_now
from torchkiln.graph.program_text import constants_as_inputs, file_text
from torchkiln.graph.subgraphs import copy_graph_module
from torchkiln.passes.post_grad import POST_GRAD
from torchkiln.user_files import write_whole

Compiled = Callable[..., Any]


def nop(gm: torch.fx.GraphModule, example_inputs: Sequence[Any], **_: Any) -> Compiled:
    """Run what was captured, as it is."""
    forward: Compiled = gm.forward
    return forward


def kiln_eager(gm: torch.fx.GraphModule, example_inputs: Sequence[Any], **_: Any) -> Compiled:
    """``backend="kiln_eager"``: stop after capture. What fails with it fails before torchkiln."""
    return nop(gm, example_inputs)


def kiln_passes(
    gm: torch.fx.GraphModule,
    example_inputs: Sequence[Any],
    *,
    options: Mapping[str, object] | None = None,
    mode: str | None = None,
) -> Compiled:
    """``backend="kiln_passes"``: all graph passes and the partition, and then the graphs are run node by node.

    What fails with it and not with ``kiln_eager`` fails in a pass; what fails with ``kiln`` alone, in compiled code.
    """
    settings = replace(config.resolve(options), adaptive=False)  # eager is faster than node by node
    return compile_fx(gm, example_inputs, inner_compile=_run_passes, settings=settings, prepares_weights=True)


def _run_passes(
    graph: torch.fx.GraphModule,
    _inputs: Sequence[Any],
    *,
    is_backward: bool = False,
    is_inference: bool = False,
    prepares_weights: bool = False,
    pass_manager: PassManager | None = None,
    **_facts: Any,
) -> Callable[[list[Any]], Any]:
    assert pass_manager is not None
    kind = functional_kind(is_backward=is_backward, is_inference=is_inference, prepares_weights=prepares_weights)
    optimized = copy_graph_module(graph)
    with compile_session(), rng_state_kept(), outside_tracing(), stage("post-grad passes"):
        pass_manager.run(POST_GRAD, optimized, kind=kind)

    def call(arguments: list[Any]) -> Any:
        values = tuple(arguments)
        arguments.clear()
        return torch.fx.Interpreter(optimized).run(*values)

    call._boxed_call = True  # type: ignore[attr-defined]
    return call


def print_compile(gm: torch.fx.GraphModule, example_inputs: Sequence[Any], **_: Any) -> Compiled:
    """Print what was captured, one line for each node, and run it."""
    print(gm.print_readable(print_output=False).rstrip())
    return nop(gm, example_inputs)


def draw_graph_compile(
    gm: torch.fx.GraphModule, example_inputs: Sequence[Any], *, folder: str | os.PathLike[str] = ".", **_: Any
) -> Compiled:
    """Write what was captured as a drawing for Graphviz, ``graph_1.dot`` and so on in ``folder``, and run it.

    Files that are there stay.
    """
    path = _free(Path(folder), "graph_{}.dot")
    write_whole(path, drawing(gm.graph).encode())
    print(f"dot -Tsvg {shlex.quote(str(path))} > {shlex.quote(str(path.with_suffix('.svg')))}")
    return nop(gm, example_inputs)


def _free(folder: Path, name: str) -> Path:
    """The path with the first number that no file or folder has."""
    paths = (folder / name.format(number) for number in itertools.count(1))
    return next(path for path in paths if not path.exists())


def drawing(graph: torch.fx.Graph) -> str:
    """A graph in the language of Graphviz."""
    lines = ["digraph {", "  node [shape=box, fontname=monospace];"]
    for node in graph.nodes:
        value = node.meta.get("example_value", node.meta.get("val"))
        sizes = f"\\n{value.dtype} {list(value.shape)}" if isinstance(value, torch.Tensor) else ""
        called = getattr(node.target, "__name__", str(node.target))
        label = f"{node.name}\\n{called}{sizes}".replace('"', "'")
        lines.append(f'  "{node.name}" [label="{label}"];')
        lines += [f'  "{argument.name}" -> "{node.name}";' for argument in node.all_input_nodes]
    return "\n".join([*lines, "}"]) + "\n"


def debug_compile(
    gm: torch.fx.GraphModule,
    example_inputs: Sequence[Any],
    *,
    folder: str | os.PathLike[str] | None = None,
    **_: Any,
) -> Compiled:
    """Save the graph as a program, print the command that minifies it, and compile it with :func:`ts_compile`.

    ``folder`` gets ``reproduce.py``, which has the graph and sizes, strides and dtypes of its inputs, not their values.
    """
    target = Path(folder) if folder is not None else _free(Path(), "torchkiln_graph_{}")
    try:
        graph, inputs = constants_as_inputs(gm, example_inputs)
        text = file_text(graph, inputs, failure=f"a captured graph of {len(gm.graph.nodes)} nodes", options=modes_now())
        write_whole(target / "reproduce.py", text.encode())
        print(shlex.join(["kiln", "minify", str(target)]))
    except (UnsupportedError, OSError, RuntimeError, ValueError) as error:
        print(f"the graph is not saved: {error}", file=sys.stderr)
    return ts_compile(gm, example_inputs)
