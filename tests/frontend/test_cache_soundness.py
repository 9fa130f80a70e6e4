"""Programs and states of a process that look alike and compute different things are different entries of the cache."""

from __future__ import annotations

import contextlib
import functools
import struct
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch._decomp import decomposition_table
from torch._higher_order_ops.auto_functionalize import auto_functionalized
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils import checkpoint

import torchkiln
from torchkiln import recorder
from torchkiln.frontend.graph_entry import _notes
from torchkiln.frontend.tracing_state import tracing_state
from torchkiln.graph import decompositions
from torchkiln.graph.program_memory import NOTED, ProgramMemory

X = torch.arange(4.0)


@pytest.fixture(autouse=True)
def _cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(recorder, "_listeners", ())
    with torchkiln.settings(cache=True, cache_dir=str(tmp_path / "cache"), fallback=False, adaptive=False):
        yield


def _compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    torch._dynamo.reset()
    return torch.compile(function, backend="kiln")


def _library(namespace: str, kind: str, name: str, function: Callable[..., Any], schema: str = "") -> Any:
    library = torch.library.Library(namespace, kind)
    if schema:
        library.define(name + schema)
    library.impl(name, function, "CompositeImplicitAutograd")
    return library


def _operator(namespace: str, kind: str, factor: float) -> float:
    """The first element of an operator of the user's, called by its packet, that multiplies by ``factor``."""
    library = _library(namespace, kind, "kiln_scaled", lambda x: x * factor, "(Tensor x) -> Tensor")
    try:
        return float(_compiled(lambda x: getattr(torch.ops, namespace).kiln_scaled(x) + 1)(torch.ones(3))[0])
    finally:
        library._destroy()


@pytest.mark.parametrize(("namespace", "kind"), [("kiln_tests", "DEF"), ("aten", "FRAGMENT")])
def test_an_operator_of_the_user_is_not_known_by_its_name(namespace: str, kind: str) -> None:
    assert [_operator(namespace, kind, factor) for factor in (2.0, 3.0, 2.0)] == [3.0, 4.0, 3.0]


def test_an_operator_of_torch_that_the_user_implements_is_not_torchs() -> None:
    def linear(x: Tensor, w: Tensor) -> Tensor:
        return F.linear(x, w)

    x, w = torch.ones(2, 3), torch.ones(4, 3)
    for factor in (1.0, 2.0):
        library = contextlib.ExitStack()
        if factor != 1.0:
            scaled = _library("aten", "IMPL", "linear", lambda x, w, b=None, k=factor: (x @ w.t()) * k)
            library.callback(scaled._destroy)
        with library:
            assert float(_compiled(linear)(x, w)[0, 0]) == 3 * factor


def test_a_function_with_the_name_of_torchs_is_not_torchs() -> None:
    for factor in (2.0, 3.0):

        @torch.compiler.allow_in_graph
        @functools.wraps(F.relu)
        def relu(x: Tensor, k: float = factor) -> Tensor:
            return x * k

        assert torch.equal(_compiled(lambda x, relu=relu: relu(x))(X), X * factor)


@pytest.mark.parametrize("named", [functools.wraps, lambda _: lambda function: function])
def test_a_decomposition_of_the_user_is_asked(named: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    def loss(x: Tensor, y: Tensor) -> Tensor:
        return F.huber_loss(x, y)

    x, operator = torch.ones(3), torch.ops.aten.huber_loss.default
    assert float(_compiled(loss)(x, torch.zeros(3))) == 0.5
    torchs = decomposition_table[operator]

    @named(torchs)
    def doubled(*args: Any, **kwargs: Any) -> Tensor:
        return torchs(*args, **kwargs) * 2

    monkeypatch.setitem(decomposition_table, operator, doubled)
    decompositions._table.cache_clear()  # as in another process
    try:
        assert float(_compiled(loss)(x, torch.zeros(3))) == 1.0
    finally:
        decompositions._table.cache_clear()


def test_the_dtype_of_autocast_counts_where_the_graph_leaves_it_open() -> None:
    def f(x: Tensor) -> Tensor:
        with torch.autocast("cpu"):
            return x @ x

    before = torch.get_autocast_dtype("cpu")
    try:
        for dtype in (torch.bfloat16, torch.float16):
            torch.set_autocast_dtype("cpu", dtype)
            assert _compiled(f)(torch.ones(2, 2)).dtype == dtype
    finally:
        torch.set_autocast_dtype("cpu", before)


def test_which_attention_is_allowed_is_part_of_the_key() -> None:
    torch.manual_seed(0)
    q = torch.randn(1, 2, 8, 16, dtype=torch.bfloat16)

    def attention(q: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, q, q)

    def results(**options: Any) -> list[Tensor]:
        found = []
        with torchkiln.settings(**options):
            for backend in (SDPBackend.FLASH_ATTENTION, SDPBackend.MATH):
                with sdpa_kernel(backend):
                    found.append(_compiled(attention)(q))
        return found

    anew, cached = results(cache=False), results()
    assert not torch.equal(*anew)  # otherwise this says nothing
    assert all(torch.equal(a, b) for a, b in zip(anew, cached, strict=True))


def test_floats_that_are_no_number_keep_their_sign() -> None:
    for sign, bits in ((False, 0x7FF8000000000000), (True, 0xFFF8000000000000)):
        nan = struct.unpack("<d", struct.pack("<Q", bits))[0]
        found = _compiled(lambda x, nan=nan: (torch.full((4,), nan) + 0 * x).signbit())(X)
        assert found.tolist() == [sign] * 4


def _saved(policy: checkpoint.CheckpointPolicy) -> int:
    """How many tensors forward saves of a checkpointed region."""
    contexts = functools.partial(checkpoint.create_selective_checkpoint_contexts, lambda *_, **__: policy)

    def f(x: Tensor, w: Tensor) -> Any:
        def region(x: Tensor, w: Tensor) -> Tensor:
            return torch.sigmoid(x @ w).sin().cos() @ w

        return checkpoint.checkpoint(region, x, w, use_reentrant=False, context_fn=contexts)

    run, inputs = _compiled(f), [torch.ones(8, 8, requires_grad=True) for _ in range(2)]
    run(*inputs).sum().backward()
    packed: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: packed.append(t) or t, lambda t: t):
        run(*inputs)
    return len(packed)


def test_which_arguments_of_a_mutating_call_share_memory_in_the_program_is_noted() -> None:
    def notes(*numbers: int) -> list[str]:
        graph = torch.fx.Graph()
        x = graph.placeholder("x")
        call = graph.call_function(auto_functionalized, (), {"x": x, "y": x, "k": 2})
        call.meta[NOTED] = {"x": ProgramMemory(numbers[0]), "y": ProgramMemory(numbers[1]), "k": 2}
        graph.output((call,))
        return list(_notes(graph))

    assert notes(0, 0) == notes(0, 0)
    assert notes(0, 0) != notes(0, 1)


def test_the_policy_of_a_checkpoint_is_asked_again() -> None:
    policies = checkpoint.CheckpointPolicy
    assert _saved(policies.MUST_SAVE) > _saved(policies.MUST_RECOMPUTE)


class _Scale:
    """A pass that multiplies what ``exp`` computes."""

    def __init__(self, factor: float) -> None:
        self.factor = factor

    def __call__(self, graph_module: torch.fx.GraphModule) -> bool:
        graph = graph_module.graph
        for node in graph.find_nodes(op="call_function", target=torch.ops.aten.exp.default):
            with graph.inserting_after(node):
                scaled = graph.call_function(torch.ops.aten.mul.Tensor, (node, self.factor))
            scaled.meta = dict(node.meta)
            node.replace_all_uses_with(scaled, delete_user_cb=lambda user, scaled=scaled: user is not scaled)
        return bool(graph.find_nodes(op="call_function", target=torch.ops.aten.exp.default))


def test_the_state_of_a_pass_is_part_of_the_key() -> None:
    for factor in (2.0, 3.0, 2.0):
        torchkiln.graph_pass(name="scale", stage="joint")(_Scale(factor))
        try:
            torch.testing.assert_close(_compiled(lambda x: x.exp() + 1)(X), X.exp() * factor + 1)
        finally:
            torchkiln.remove_graph_pass("scale")


def test_a_pass_in_torchs_configuration_is_not_skipped() -> None:
    x = torch.ones(3, requires_grad=True)

    def run() -> None:
        _compiled(lambda x: x.sin() * 2)(x).sum().backward()

    def noted(graph: Any, _inputs: Any) -> Any:
        seen.append(graph)
        return graph

    seen: list[Any] = []
    run()
    with torch._functorch.config.patch(joint_custom_pass=noted):
        run()
        run()
    assert len(seen) == 2


def test_constants_of_a_graph_are_read_while_tensors_are_fake() -> None:
    """AOTAutograd calls a compiler inside a mode of fake tensors."""

    def f(x: Tensor) -> Tensor:
        return x + torch.tensor([1.0, 2.0, 3.0, 4.0])

    for _ in range(2):
        assert torch.equal(_compiled(f)(X), f(X))
    with FakeTensorMode():
        assert _compiled(lambda: torch.ones(2) + torch.tensor([1.0, 2.0]))().shape == (2,)


@pytest.mark.parametrize("backend", ["FLASH_ATTENTION", "EFFICIENT_ATTENTION", "CUDNN_ATTENTION", "MATH"])
def test_kernels_of_attention_that_are_forbidden_are_part_of_the_key(backend: str) -> None:
    """On a card the trace has the operator of the first kernel that is allowed."""
    allowed = [kernel for kernel in SDPBackend.__members__.values() if kernel.name != backend and kernel.value >= 0]
    before = tracing_state()
    with sdpa_kernel([kernel for kernel in allowed if kernel.name.endswith(("_ATTENTION", "MATH"))]):
        assert len(set(tracing_state()) ^ set(before)) == 2  # a line of another value
    assert tracing_state() == before
