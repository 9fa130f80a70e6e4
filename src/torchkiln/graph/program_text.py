"""A graph as a Python function, and inputs as Python expressions: what a file needs to run it on its own."""

from __future__ import annotations

import builtins
import re
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.fx
from torch import Tensor

from torchkiln.errors import UnsupportedError
from torchkiln.graph.fake import SYMBOLIC, attribute_of
from torchkiln.graph.shared_memory import shared_memory
from torchkiln.graph.subgraphs import copy_graph_module
from torchkiln.graph.weights import is_static

_LONGEST_LITERAL = 64
_LINE = re.compile(r"[^A-Za-z0-9_]+")


def program_text(graph_module: torch.fx.GraphModule, name: str = "program") -> tuple[list[str], str]:
    """The imports and the text of a function of the graph's inputs.

    Raises UnsupportedError for a graph that has bodies or constants of its own, or calls what no import gives.
    """
    copy = copy_graph_module(graph_module)
    _rename_inputs(copy.graph)
    for node in copy.graph.nodes:
        node.type = None
        if node.op in ("get_attr", "call_module"):
            raise UnsupportedError(f"a graph with {node.target}, which is no input of it, as a file")
    code = copy.graph.python_code("self")
    body = code.src.partition("\ndef ")[2]
    named = {name: value for name, value in code.globals.items() if re.search(rf"\b{name}\b", body)}
    imports = ["import torch", *(_import(name, value) for name, value in named.items() if name != "torch")]
    lines = [re.sub(r";  (?:\w+ = )+None$", "", line) for line in body.splitlines()]
    lines[0] = re.sub(r"^forward\(self(?:, )?", f"def {name}(", lines[0])
    return sorted({line for line in imports if line}), "\n".join(line.rstrip() for line in lines).strip()


def _rename_inputs(graph: torch.fx.Graph) -> None:
    """Short names for inputs, which Dynamo names after where they come from."""
    for position, node in enumerate(graph.find_nodes(op="placeholder")):
        node.name = node.target = f"x{position}"
        node.args = ()


def _import(name: str, value: Any) -> str:
    if name in ("inf", "nan"):
        return f"from math import {name}"
    if value is builtins or getattr(builtins, name, None) is value:
        return ""
    if isinstance(value, type(torch)):
        return f"import {value.__name__}" if name == value.__name__ else f"import {value.__name__} as {name}"
    owner, own = getattr(value, "__module__", None), getattr(value, "__qualname__", "")
    if not owner or not own or "." in own or "<" in own or owner == "__main__":
        raise UnsupportedError(f"a graph that calls {name}, which no import gives, as a file")
    return f"from {owner} import {own}" if own == name else f"from {owner} import {own} as {name}"


def input_text(
    value: Any,
    *,
    values: bool = False,
    dynamic: Sequence[int] = (),
    static: bool = False,
    of: tuple[str, int] | None = None,
) -> str:
    """An expression for one input: random numbers of its dtype, sizes and strides, or its very ``values``.

    Sizes of the dimensions ``dynamic`` are to be symbolic. A ``static`` one stays the same from call to call, as
    parameters do. With ``of`` it is a view of the memory of that name, from that element on.
    """
    if not isinstance(value, Tensor):
        return repr(_hint(value))
    if value.layout is not torch.strided or value.device.type != "cpu":
        raise UnsupportedError(f"a tensor of layout {value.layout} on {value.device} as a file")
    given = [str([_hint(n) for n in value.shape]), str([_hint(n) for n in value.stride()]), str(value.dtype)]
    given += ["requires_grad=True"] if value.requires_grad else []
    given += [f"values={values_text(value)}"] if values and of is None else []
    given += [f"dynamic={list(dynamic)}"] if dynamic else []
    given += ["static=True"] if static else []
    if of is not None:
        return f"view({', '.join([of[0], str(of[1]), *given])})"
    return f"tensor({', '.join(given)})"


def _hint(value: Any) -> Any:
    """A size as a number: its example where it is symbolic."""
    return value.node.hint if isinstance(value, SYMBOLIC) else value


def values_text(value: Tensor) -> str:
    """The elements of a tensor: one number where all are the same, a list, or hexadecimal bytes of a long one.

    Those of complex numbers are bytes. Same means the same bits: 0.0 is not -0.0.
    """
    flat = value.detach().cpu().resolve_conj().resolve_neg().contiguous().reshape(-1)
    content = flat.view(torch.uint8).reshape(flat.numel(), flat.element_size())
    if flat.numel() > 1 and bool((content == content[0]).all()):
        flat, content = flat[:1], content[:1]
    if flat.dtype.is_complex or flat.numel() > _LONGEST_LITERAL:
        return f'"{content.numpy().tobytes().hex()}"'
    numbers = ", ".join(map(_number, flat.tolist()))
    return numbers if flat.numel() == 1 else f"[{numbers}]"


def _number(number: Any) -> str:
    if isinstance(number, float) and (number != number or number in (float("inf"), float("-inf"))):
        return f'float("{number}")'
    return repr(number)


def constants_as_inputs(
    graph_module: torch.fx.GraphModule, inputs: Sequence[Any]
) -> tuple[torch.fx.GraphModule, list[Any]]:
    """A copy of the graph with its tensors as further inputs, and the inputs with them."""
    copy = copy_graph_module(graph_module)
    given = list(inputs)
    made: dict[str, torch.fx.Node] = {}
    placeholders = copy.graph.find_nodes(op="placeholder")
    for node in copy.graph.find_nodes(op="get_attr"):
        value = attribute_of(graph_module, str(node.target))
        if not isinstance(value, Tensor):
            continue
        if str(node.target) not in made:
            place = next((n for n in copy.graph.nodes if n not in placeholders), None)
            assert place is not None
            with copy.graph.inserting_before(place):
                made[str(node.target)] = copy.graph.placeholder(_LINE.sub("_", str(node.target)))
            made[str(node.target)].meta.update(node.meta)
            given.append(value)
        node.replace_all_uses_with(made[str(node.target)])
        copy.graph.erase_node(node)
    return copy, given


def file_text(
    graph_module: torch.fx.GraphModule,
    inputs: Sequence[Any],
    *,
    failure: str,
    setup: str = "",
    options: Mapping[str, Any] | None = None,
    values: bool = False,
    dynamic: Mapping[int, Sequence[int]] | None = None,
) -> str:
    """A Python file that compiles the graph, compares it with eager, and says what went wrong.

    ``setup`` is code that runs first. ``options`` are those of ``reproduce``. With ``values`` the inputs are these very
    numbers, and random ones otherwise. ``dynamic`` has the dimensions of symbolic size, by the input's position. Inputs
    that share memory do so in the file, too, and parameters are marked as such.
    """
    imports, program = program_text(graph_module)
    marks = dynamic or {}
    made: list[str] = []
    views: dict[int, tuple[str, int]] = {}
    for number, memory in enumerate(shared_memory(inputs)):
        numbers = f", values={values_text(memory.content(inputs))}" if values else ""
        made.append(f"    memory{number} = tensor([{memory.elements}], [1], {memory.dtype}{numbers})")
        views |= {position: (f"memory{number}", offset) for position, offset in memory.positions.items()}
    placeholders = graph_module.graph.find_nodes(op="placeholder")
    texts = (
        input_text(x, values=values, dynamic=marks.get(k, ()), static=is_static(node, x), of=views.get(k))
        for k, (node, x) in enumerate(zip(placeholders, inputs, strict=True))
    )
    given = ",\n        ".join(texts)
    shown = " ".join(failure.split()).replace('"""', "'''").replace("\\", "/")
    chosen = "".join(f", {name}={value!r}" for name, value in (options or {}).items())
    lines = [
        f'"""torchkiln: {shown}',
        "",
        "Run this file to see it (exit code 1 while it fails), or make it smaller with `kiln minify FILE`.",
        '"""',
        "",
        *imports,
        "",
        f"from torchkiln.debug.reproduction import reproduce, tensor{', view' if views else ''}",
        "",
        SETUP,
        *([setup.strip()] if setup.strip() else []),
        END_OF_SETUP,
        "",
        "",
        program,
        "",
        "",
        "def inputs():",
        "    torch.manual_seed(0)",
        *made,
        "    return [",
        *([f"        {given},"] if given else []),
        "    ]",
        "",
        "",
        f"OPTIONS = dict({chosen.removeprefix(', ')})",
        "",
        'if __name__ == "__main__":',
        "    reproduce(program, inputs(), **OPTIONS)",
    ]
    return "\n".join(lines) + "\n"


SETUP, END_OF_SETUP = "# setup", "# end of setup"
