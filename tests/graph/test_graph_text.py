"""The text of a graph is the same wherever it was written, and differs where a compiler could see a difference."""

from __future__ import annotations

import textwrap
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.fx
from torch import Tensor
from torch._higher_order_ops.triton_kernel_wrap import triton_kernel_wrapper_functional, triton_kernel_wrapper_mutation

from torchkiln.graph.graph_text import GraphText, NoTextError


def _captured(function: Callable[..., Any], *inputs: Any, dynamic: bool = False) -> torch.fx.GraphModule:
    found: list[torch.fx.GraphModule] = []

    def backend(graph_module: torch.fx.GraphModule, _: Any) -> Callable[..., Any]:
        found.append(graph_module)
        return graph_module.forward

    torch._dynamo.reset()
    torch.compile(function, backend=backend, dynamic=dynamic, fullgraph=True)(*inputs)
    return found[0]


def _text(function: Callable[..., Any], *inputs: Any, dynamic: bool = False) -> str:
    graph_module = _captured(function, *inputs, dynamic=dynamic)
    text = GraphText()
    values = [node.meta["example_value"] for node in graph_module.graph.find_nodes(op="placeholder")]
    given = [text.tensor(value) if isinstance(value, Tensor) else text.value(value) for value in values]
    return "\n".join([*text.graph(graph_module), *given])


def test_a_graph_reads_as_numbered_calls() -> None:
    def f(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        z = torch.add(x, y, alpha=2)
        return z.sum(dim=-1, keepdim=True), torch.nn.functional.gelu(z)[1:, 0]

    wanted = """\
        %0 = input
        %1 = input
        %2 = torch.add(%0, %1, alpha=2)
        %3 = .sum(%2, dim=-1, keepdim=True)
        %4 = torch._C._nn.gelu(%2)
        %5 = _operator.getitem(%4, (slice(1, None, None), 0))
        return (%3, %5)"""
    assert "\n".join(GraphText().graph(_captured(f, torch.ones(3, 4), torch.ones(4)))) == textwrap.dedent(wanted)


def test_names_and_lines_of_the_program_are_no_part_of_it() -> None:
    def one(first: Tensor) -> Tensor:
        doubled = first * 2
        return doubled.exp()

    def other(x: Tensor) -> Tensor:


        return (x * 2).exp()

    assert _text(one, torch.ones(3)) == _text(other, torch.ones(3))


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (lambda x: x * 2, lambda x: x * 2.0),
        (lambda x: x * 2.0, lambda x: x * 2.0000000000000004),
        (lambda x: x * 0.0, lambda x: x * -0.0),
        (lambda x: x.sum(0), lambda x: x.sum(-1)),
        (lambda x: x[0:2], lambda x: x[0:3]),
        (lambda x: torch.add(x, x), lambda x: torch.sub(x, x)),
        (lambda x: x.to(torch.float64), lambda x: x.to(torch.int64)),
        (lambda x: x.clone(), lambda x: x.clone(memory_format=torch.channels_last)),
    ],
)
def test_programs_that_compute_something_else_have_another_text(one: Any, other: Any) -> None:
    x = torch.ones(2, 3, 4, 5)
    assert _text(one, x) != _text(other, x)


@pytest.mark.parametrize(
    "other",
    [
        torch.ones(3, 5),
        torch.ones(4, 3).t(),
        torch.ones(3, 4, dtype=torch.float64),
        torch.ones(3, 4, requires_grad=True),
        torch.ones(4, 4)[1:],
        torch.ones(3, 4, device="meta"),
    ],
)
def test_inputs_that_a_compiler_tells_apart_have_another_text(other: Tensor) -> None:
    assert GraphText().tensor(torch.ones(3, 4)) != GraphText().tensor(other)


def test_symbols_are_numbered_in_order_of_appearance() -> None:
    def f(x: Tensor, y: Tensor) -> Tensor:
        return x.reshape(-1) + y.sum()

    text = _text(f, torch.ones(5, 7), torch.ones(9), dynamic=True)
    assert "float32[z0,z1] strides [z1,1]" in text
    assert "float32[z2] strides [1]" in text
    assert text == _text(lambda a, b: a.reshape(-1) + b.sum(), torch.ones(6, 8), torch.ones(3), dynamic=True)


def test_bodies_are_part_of_the_text() -> None:
    def f(x: Tensor) -> Tensor:
        return torch.cond(x.sum() > 0, lambda t: t.exp(), lambda t: t.abs(), (x,))

    def g(x: Tensor) -> Tensor:
        return torch.cond(x.sum() > 0, lambda t: t.exp(), lambda t: t.neg(), (x,))

    assert "  %1 = .exp(%0)" in _text(f, torch.ones(3))
    assert _text(f, torch.ones(3)) != _text(g, torch.ones(3))


def test_what_a_trace_would_look_into_has_no_text() -> None:
    def mine(x: Tensor) -> Tensor:
        return x + 1

    graph = torch.fx.Graph()
    x = graph.placeholder("x")
    graph.output((graph.call_function(mine, (x,)),))
    with pytest.raises(NoTextError, match=r"a call of .*mine"):
        list(GraphText().graph(torch.fx.GraphModule({}, graph)))


def test_a_constant_of_a_functional_graph_is_there_by_its_content() -> None:
    def text(constant: Tensor) -> str:
        root = torch.nn.Module()
        root.register_buffer("c", constant)
        graph = torch.fx.Graph()
        graph.output((graph.get_attr("c"),))
        return "\n".join(GraphText(functional=True).graph(torch.fx.GraphModule(root, graph)))

    assert text(torch.tensor([1.0, 2.0])) == text(torch.tensor([1.0, 2.0]))
    assert text(torch.tensor([1.0, 2.0])) != text(torch.tensor([1.0, 3.0]))
    assert text(torch.tensor([0.0])) != text(torch.tensor([-0.0]))


class _Subclass(Tensor):
    pass


def test_subclasses_and_sparse_tensors_have_no_text() -> None:
    with pytest.raises(NoTextError, match="_Subclass"):
        GraphText().tensor(torch.ones(2).as_subclass(_Subclass))
    with pytest.raises(NoTextError, match="sparse"):
        GraphText().tensor(torch.ones(2).to_sparse())


@pytest.mark.parametrize("operator", [triton_kernel_wrapper_mutation, triton_kernel_wrapper_functional])
def test_a_triton_kernel_is_not_known_by_its_number(operator: Any) -> None:
    graph = torch.fx.Graph()
    graph.output(graph.call_function(operator, kwargs={"kernel_idx": 0, "constant_args_idx": 0, "grid": [(1, 1, 1)]}))
    with pytest.raises(NoTextError, match="a number of this process"):
        list(GraphText(functional=True).graph(torch.fx.GraphModule({}, graph)))


def test_what_a_call_was_decomposed_from_counts() -> None:
    """An index out of range is another error in a loss than in a gather."""

    def text(original: Any) -> str:
        graph = torch.fx.Graph()
        x, indices = graph.placeholder("x"), graph.placeholder("indices")
        x.meta["val"], indices.meta["val"] = torch.ones(3, 4), torch.zeros(3, 1, dtype=torch.int64)
        call = graph.call_function(torch.ops.aten.gather.default, (x, 1, indices))
        call.meta = {"val": torch.ones(3, 1), "original_aten": original}
        graph.output((call,))
        return "\n".join(GraphText(functional=True).graph(torch.fx.GraphModule({}, graph)))

    gather, loss = torch.ops.aten.gather.default, torch.ops.aten.nll_loss_forward.default
    assert text(gather) == text(gather)
    assert text(gather) != text(loss)
