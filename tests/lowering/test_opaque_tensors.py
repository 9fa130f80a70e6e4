"""Tensors that are no strided memory of the CPU: operators of torch run on them, and loops are compiled around them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import nn
from torch.fx.experimental.proxy_tensor import make_fx

import torchkiln
from torchkiln import config
from torchkiln.codegen.llvm import generate
from torchkiln.compiler import compile_fx_inner
from torchkiln.errors import CompileError
from torchkiln.lowering import lower
from torchkiln.runtime.executable import load
from torchkiln.schedule import schedule
from torchkiln.schedule.plan import Launch, OwnTensor
from torchkiln.target import capture_target

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")  # sparse CSR is in beta, quantized tensors deprecated

_SETTINGS = config.resolve({"fallback": False})
_TARGET = capture_target(_SETTINGS)


def _dense(tensor: torch.Tensor) -> torch.Tensor:
    if tensor.is_quantized:
        return tensor.dequantize()
    return tensor if tensor.layout is torch.strided else tensor.to_dense()


def _assert_same(found: Any, expected: Any) -> None:
    if not isinstance(expected, torch.Tensor):
        assert found == expected
        return
    assert (found.layout, found.dtype, found.device) == (expected.layout, expected.dtype, expected.device)
    assert found.shape == expected.shape
    if expected.layout is torch.sparse_coo:
        assert found.is_coalesced() == expected.is_coalesced()
    if expected.device.type == "meta":
        assert found.stride() == expected.stride()
    else:
        torch.testing.assert_close(_dense(found), _dense(expected))


def _traced(fn: Callable[..., Any], arguments: Sequence[Any], mode: str = "fake") -> torch.fx.GraphModule:
    return make_fx(fn, tracing_mode=mode)(*arguments)


def _check_traced(fn: Callable[..., tuple[Any, ...]], *arguments: Any, mode: str = "fake") -> None:
    """Compare a traced graph with eager, twice: Dynamo itself gives no graph with sparse inputs."""
    compiled = compile_fx_inner(_traced(fn, arguments, mode), arguments, is_inference=True, settings=_SETTINGS)
    for _ in range(2):
        for found, expected in zip(compiled([*arguments]), fn(*arguments), strict=True):
            _assert_same(found, expected)


def _sparse() -> torch.Tensor:
    return torch.randn(4, 5).relu().to_sparse()


# Sparse gradients


@pytest.mark.parametrize("twice", [False, True])
@pytest.mark.usefixtures("everything_compiled")
def test_an_embedding_with_sparse_gradients_trains(compile_strictly: Callable[..., Any], twice: bool) -> None:
    table = nn.Embedding(50, 4, sparse=True)

    def model(positions: torch.Tensor) -> torch.Tensor:
        found = table(positions).sum(1)
        return found.tanh() * (table(positions + 1).sum(1) if twice else 2)

    compiled = compile_strictly(model)
    for _ in range(2):
        positions = torch.randint(0, 40, (3, 4))
        gradients = []
        for run in (model, compiled):
            table.weight.grad = None
            run(positions).sum().backward()
            gradients.append(table.weight.grad)
        expected, found = gradients
        assert found.layout is torch.sparse_coo
        assert found._nnz() == expected._nnz()
        _assert_same(found, expected)


@pytest.mark.usefixtures("everything_compiled")
def test_sparse_adam_steps_as_in_eager(compile_strictly: Callable[..., Any]) -> None:
    def weight_after(compile_or_not: Callable[..., Any]) -> torch.Tensor:
        torch.manual_seed(0)
        table = nn.Embedding(50, 4, sparse=True)
        optimizer = torch.optim.SparseAdam(table.parameters())
        model = compile_or_not(lambda positions: table(positions).tanh().sum(1))
        for _ in range(3):
            optimizer.zero_grad()
            model(torch.randint(0, 50, (3, 4))).pow(2).sum().backward()
            optimizer.step()
        return table.weight.detach()

    torch.testing.assert_close(weight_after(compile_strictly), weight_after(lambda fn: fn))


@pytest.mark.parametrize("mode", ["sum", "mean"])
@pytest.mark.usefixtures("everything_compiled")
def test_a_bag_of_embeddings_with_sparse_gradients_trains(compile_strictly: Callable[..., Any], mode: str) -> None:
    bag = nn.EmbeddingBag(50, 4, sparse=True, mode=mode)
    arguments = torch.randint(0, 50, (12,)), torch.tensor([0, 3, 7])
    gradients = []
    for run in (bag, compile_strictly(bag)):
        bag.weight.grad = None
        run(*arguments).sin().sum().backward()
        gradients.append(bag.weight.grad)
    _assert_same(gradients[1], gradients[0])


@pytest.mark.usefixtures("everything_compiled")
def test_sparse_gradients_serve_all_sizes_of_one_compilation() -> None:
    table = nn.Embedding(50, 4, sparse=True)

    def model(positions: torch.Tensor) -> torch.Tensor:
        return table(positions).sum(1) * 2

    compiled = torch.compile(model, backend="kiln", fullgraph=True, dynamic=True, options={"fallback": False})
    before = torchkiln.stats()
    for shape in ((3, 4), (5, 7), (2, 9)):
        positions = torch.randint(0, 50, shape)
        gradients = []
        for run in (model, compiled):
            table.weight.grad = None
            run(positions).sum().backward()
            gradients.append(table.weight.grad)
        _assert_same(gradients[1], gradients[0])
    assert torchkiln.stats().graphs == before.graphs + 2
    assert torchkiln.stats().per_size == before.per_size


# Sparse values of a graph


@pytest.mark.parametrize("layout", [torch.sparse_coo, torch.sparse_csr])
def test_a_sparse_matrix_is_multiplied_between_compiled_loops(layout: torch.layout) -> None:
    matrix = _sparse().to_dense().to_sparse(layout=layout)
    _check_traced(lambda s, x: ((s @ (x * 2) + 1).sin(),), matrix, torch.randn(5, 3))


@pytest.mark.parametrize("mode", ["fake", "symbolic"])
def test_sparse_tensors_come_in_and_go_out(mode: str) -> None:
    _check_traced(lambda s, x: (s + s, s, (x * 2) + s), _sparse(), torch.randn(4, 5), mode=mode)


def test_sparse_tensors_are_made_and_read_inside() -> None:
    def fn(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        inside = (x * 2).relu().to_sparse()
        return inside.to_dense() + 1, inside.t(), torch.sparse.sum(inside, 1).to_dense().sin()

    _check_traced(fn, torch.randn(4, 5))


def test_a_sparse_tensor_keeps_the_values_it_was_made_of_after_the_call() -> None:
    def fn(indices: torch.Tensor, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        values = (x * 2).sin().view(-1)  # would lie in the arena, and be overwritten, if torch did not hold on to it
        made = torch.sparse_coo_tensor(indices, values, (64, 64))
        later = x @ x
        return made, (later @ later).cos().sum()

    arguments = torch.arange(4096).repeat(2, 1) // torch.tensor([[64], [1]]) % 64, torch.randn(64, 64)
    # In this order: passes would change it.
    plan = schedule(lower(_traced(fn, arguments), _SETTINGS, _TARGET), _SETTINGS, _TARGET)
    run = load(generate(plan, _SETTINGS, _TARGET).artifact)
    for found, expected in zip(run([*arguments]), fn(*arguments), strict=True):
        _assert_same(found, expected)


def test_a_sparse_value_owns_its_memory_and_is_freed_after_its_last_use() -> None:
    def fn(x: torch.Tensor) -> torch.Tensor:
        inside = (x * 2).to_sparse()
        product = torch.sparse.mm(inside, x.T.contiguous())
        return (product.sin() @ x).cos()

    plan = schedule(lower(_traced(fn, [torch.randn(32, 32)]), _SETTINGS, _TARGET), _SETTINGS, _TARGET)
    (opaque,) = (name for name, buffer in plan.program.buffers.items() if buffer.opaque)
    assert plan.program.buffers[opaque].nbytes == 0
    assert plan.storage[opaque] == OwnTensor()
    (last,) = (k for k, names in enumerate(plan.frees) if opaque in names)
    assert "mm" in str(plan.steps[last])
    assert last < len(plan.steps) - 1
    assert any(isinstance(step, Launch) for step in plan.steps[last + 1 :])


def test_the_values_of_a_sparse_tensor_are_declined_with_a_reason() -> None:
    with pytest.raises(CompileError, match="the number of values that a sparse tensor holds at run time"):
        _check_traced(lambda s: (s._values() * 2,), _sparse())


# Quantized tensors


def _quantized(x: torch.Tensor) -> torch.Tensor:
    return torch.quantize_per_tensor(x, 0.1, 3, torch.quint8)


def _is_traced_when_quantized() -> bool:
    try:
        make_fx(_quantized, tracing_mode="fake")(torch.zeros(1))
    except torch._subclasses.fake_tensor.UnsupportedFakeTensorException:
        return False
    return True


# Torch 2.11 has no fake quantized tensors: Dynamo breaks the graph there, and no backend is given one.
_TRACED_WHEN_QUANTIZED = pytest.mark.skipif(not _is_traced_when_quantized(), reason="torch cannot trace quantization")


def _per_channel(x: torch.Tensor) -> torch.Tensor:
    scales, zeros = torch.tensor([0.1, 0.2, 0.3]), torch.tensor([0, 1, 2])
    return torch.quantize_per_channel(x, scales, zeros, 0, torch.qint8)


@_TRACED_WHEN_QUANTIZED
@pytest.mark.parametrize(
    "fn",
    [
        lambda x: _quantized(x * 2).dequantize() + 1,
        lambda x: _quantized(x * 2),
        lambda x: _quantized(x).relu().dequantize() * 2,
        lambda x: torch.cat([_quantized(x), _quantized(x + 1)]).t().dequantize().sin(),
    ],
    ids=["there and back", "returned", "computed with", "views"],
)
def test_quantized_tensors_of_a_graph_are_those_of_eager(fn: Callable[..., Any]) -> None:
    _check_traced(lambda x: (fn(x),), torch.randn(3, 4))


@_TRACED_WHEN_QUANTIZED
@pytest.mark.parametrize("quantize", [_quantized, _per_channel])
@pytest.mark.usefixtures("everything_compiled")
def test_quantization_inside_a_compiled_function(
    compile_strictly: Callable[..., Any], quantize: Callable[..., Any]
) -> None:
    def fn(x: torch.Tensor) -> torch.Tensor:
        return quantize(x * 2).dequantize() + 1

    x = torch.randn(3, 4)
    compiled = torch.compile(fn, backend="kiln", options={"fallback": False}) if quantize is _per_channel else None
    torch.testing.assert_close((compiled or compile_strictly(fn))(x), fn(x))


# Tensors without data


@pytest.mark.usefixtures("everything_compiled")
def test_tensors_without_data_go_through_a_graph(compile_strictly: Callable[..., Any]) -> None:
    def fn(given: torch.Tensor, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        made = torch.empty(x.shape[0], 2, device="meta").sin().sum(1)
        return given.t()[1:] * 2, x.to("meta").mm(given), made, x.sin() + 1, given

    given, x = torch.empty(3, 4, device="meta"), torch.randn(3, 3)
    compiled = compile_strictly(fn)
    for _ in range(2):
        for found, expected in zip(compiled(given, x), fn(given, x), strict=True):
            _assert_same(found, expected)


# What is declined


def test_a_sparse_operand_of_a_higher_order_operator_is_declined_with_a_reason() -> None:
    def fn(x: torch.Tensor) -> Any:
        held = torch.empty(3, device="meta")
        return torch.cond(x.sum() > 0, lambda a, b: (a * 2, b * 2), lambda a, b: (a + 1, b + 1), (x, held))

    compiled = torch.compile(fn, backend="kiln", fullgraph=True, options={"fallback": False})
    with pytest.raises(Exception, match="a sparse, quantized or meta tensor given to the higher-order operator cond"):
        compiled(torch.randn(3))
