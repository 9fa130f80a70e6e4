"""What a compiled graph returns: results share memory where eager's do, views the version of what they show."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import combinations
from typing import Any, Union

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

from torchkiln.config import Settings
from torchkiln.graph.aliases import TRACED_RESULTS, traced_results
from torchkiln.graph.tangents import mark_tangent
from torchkiln.ir.program import PassInput, Program, StridedView
from torchkiln.lowering import outputs
from torchkiln.lowering.builder import Builder
from torchkiln.lowering.graph import lower_graph
from torchkiln.target import capture_target

Function = Callable[..., Any]
Outcome = Union[Tensor, RuntimeError, None]

STEPS = range(3)  # the first goes AOTAutograd's way, the others past it


def _compiled(function: Function, **options: Any) -> Function:
    torch._dynamo.reset()
    return torch.compile(function, backend="kiln", fullgraph=True, options={"fallback": False}, **options)


class _Constant(torch.autograd.Function):
    """Its gradients are a saved input and a saved value, whatever it is given."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, y: Tensor) -> Tensor:
        kept = (x * y.view(4, 6)).exp()
        ctx.save_for_backward(x, kept)
        return kept + 1

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
        x, kept = ctx.saved_tensors
        return x, kept.view(24)


def _parts(x: Tensor, y: Tensor) -> Tensor:
    a, b = torch.cat([x, y.view(4, 6)]).split([4, 4])
    return a * 2 + b


# Functions of x, 4 x 6 elements, and y, 24. Gradients of most are one value, seen in several ways.
SHARING: dict[str, Function] = {
    "the tangent and a view of it": lambda x, y: x + y.view(4, 6),
    "a computed gradient and a view of it": lambda x, y: (x + y.view(4, 6)).sin(),
    "one gradient for both": lambda x, y: (x.view(24) + y).exp(),
    "two views": lambda x, y: (x.view(2, 12) + y.view(2, 12)).exp(),
    "a transpose": lambda x, y: (x.t() + y.view(6, 4)).sin(),
    "times one": lambda x, y: x * 1 + y.view(4, 6),
    "two copies": lambda x, y: x.clone() + y.view(4, 6).clone(),
    "broadcast": lambda x, y: x.sum() + y.sum(),
    "broadcast in two shapes": lambda x, y: (x.sum(1) + y.view(4, 2, 3).sum((1, 2))).exp(),
    "rows of one": lambda x, y: x[0].expand(3, 6) + y.view(4, 6)[:3],
    "joined": lambda x, y: torch.cat([x.view(24), y]),
    "joined by columns": lambda x, y: torch.cat([x, y.view(4, 6)], 1).sin(),
    "joined and taken apart": _parts,
    "overlapping parts": lambda x, y: (x.view(24)[:20] + y[4:]).exp(),
    "two results": lambda x, y: (x + y.view(4, 6), x.view(24) * 2),
    "a result each": lambda x, y: (x.view(24) + 0.5, y + 1),
    "saved values": _Constant.apply,
    "through a linear layer": lambda x, y: torch.relu(x @ x.t()) @ (x + y.view(1, 4, 6)[0]),
}


def _leaves() -> tuple[Tensor, Tensor]:
    return torch.randn(4, 6, requires_grad=True), torch.randn(24, requires_grad=True)


def _as_tuple(results: Any) -> tuple[Tensor, ...]:
    return results if isinstance(results, tuple) else (results,)


def _shared(tensors: Sequence[Tensor]) -> set[tuple[int, int]]:
    """Which of ``tensors`` lie in one storage."""
    pairs = combinations(range(len(tensors)), 2)
    place = [t.untyped_storage().data_ptr() for t in tensors]
    return {(a, b) for a, b in pairs if place[a] == place[b]}


def _gradients(function: Function, leaves: Sequence[Tensor], **options: Any) -> list[Tensor]:
    """Gradients of the leaves, the gradients given for them, results and leaves."""
    results = _as_tuple(function(*leaves))
    given = [torch.randn_like(r) for r in results]
    found = torch.autograd.grad(results, leaves, given, **options)
    return [*found, *given, *results, *leaves]


def _sum(results: Any) -> Tensor:
    """One number of all results, through one gradient that reaches each of them where they have equal sizes."""
    flat = [r.reshape(-1) for r in _as_tuple(results)]
    size = min(r.numel() for r in flat)
    return torch.stack([r[:size] for r in flat]).sum(0).mul(3).sum()


@pytest.mark.parametrize("name", SHARING)
def test_gradients_share_memory_only_where_those_of_eager_do_and_add_up(name: str) -> None:
    function, leaves = SHARING[name], _leaves()
    compiled = _compiled(function)
    allowed = _shared(_gradients(function, leaves))
    for step in STEPS:
        assert _shared(_gradients(compiled, leaves, retain_graph=step == 1)) <= allowed, f"step {step}"
    # Eager itself adds twice into one memory where both gradients are views, so it is asked for one step.
    once = [g.clone() for g in torch.autograd.grad(_sum(function(*leaves)), leaves)]
    for step in STEPS:
        _sum(compiled(*leaves)).backward()
        for leaf, gradient in zip(leaves, once, strict=True):
            torch.testing.assert_close(leaf.grad, (step + 1) * gradient)
    torch.nn.utils.clip_grad_norm_(leaves, 0.5)
    norm = torch.cat([g.reshape(-1) for g in once]).norm()
    for leaf, gradient in zip(leaves, once, strict=True):
        torch.testing.assert_close(leaf.grad, gradient * (0.5 / norm), rtol=1e-4, atol=1e-5)


def test_a_gradient_that_two_results_are_given_reaches_two_leaves_as_two() -> None:
    def function(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        return (x + 1).view(4, 6), y + 1

    compiled = _compiled(function)
    x, y = torch.randn(24, requires_grad=True), torch.randn(4, 6, requires_grad=True)
    for step in STEPS:
        first, second = compiled(x, y)
        (first + second).mul(3).sum().backward()
        for leaf in (x, y):
            torch.testing.assert_close(leaf.grad, torch.full_like(leaf, 3.0 * (step + 1)))


def test_gradients_that_are_kept_for_another_backward_stay_as_they_are() -> None:
    compiled, leaves = _compiled(SHARING["saved values"]), _leaves()
    expected = [g.clone() for g in torch.autograd.grad(_sum(SHARING["saved values"](*leaves)), leaves)]
    for _ in STEPS:
        result = _sum(compiled(*leaves))
        for _again in range(2):
            found = torch.autograd.grad(result, leaves, retain_graph=True)
            torch.testing.assert_close(list(found), expected)
            for gradient in found:
                gradient.zero_()


def test_sizes_known_only_at_run_time_share_no_more_memory() -> None:
    def function(x: Tensor, y: Tensor, z: Tensor) -> Tensor:
        return torch.cat([x + y.view(x.shape) + z.t(), x]).sin()

    compiled = _compiled(function, dynamic=True)
    for rows in (4, 7, 5, 9):
        leaves = [torch.randn(n, requires_grad=True) for n in ((rows, 6), (rows * 6,), (6, rows))]
        allowed = _shared(_gradients(function, leaves))
        assert _shared(_gradients(compiled, leaves)) <= allowed
        once = [g.clone() for g in torch.autograd.grad(_sum(function(*leaves)), leaves)]
        for _ in STEPS:
            _sum(compiled(*leaves)).backward()
        torch.testing.assert_close([leaf.grad for leaf in leaves], [3 * g for g in once])


def test_complex_gradients_share_no_memory() -> None:
    def function(x: Tensor, y: Tensor) -> Tensor:
        return (x + y.view(4, 6)).exp()

    compiled = _compiled(function)
    leaves = [torch.randn(n, dtype=torch.complex64, requires_grad=True) for n in ((4, 6), (24,))]
    for step in STEPS:
        compiled(*leaves).abs().sum().backward()
        once = torch.autograd.grad(function(*leaves).abs().sum(), leaves)
        torch.testing.assert_close([leaf.grad for leaf in leaves], [(step + 1) * g for g in once])


@pytest.mark.usefixtures("no_cache")  # lowering is watched
def test_a_usual_network_gets_no_copies_of_gradients_and_no_views_by_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[str] = []
    for name in ("_copied", "_view_by_torch"):
        original = getattr(outputs, name)
        monkeypatch.setattr(outputs, name, lambda *a, f=original, n=name: (made.append(n), f(*a))[1])
    layer = torch.nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
    _compiled(layer)(torch.randn(2, 5, 8)).sum().backward()
    assert made == []
    _compiled(SHARING["a computed gradient and a view of it"])(*_leaves()).sum().backward()
    assert made == ["_copied"]


def test_optimizers_that_step_in_place_train_as_in_eager() -> None:
    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a = torch.nn.Parameter(torch.full((4, 6), 0.5))
            self.b = torch.nn.Parameter(torch.full((1, 24), 0.25))

        def forward(self, x: Tensor) -> Tensor:
            return torch.relu(x) @ (self.a + self.b.view(4, 6))

    def trained(wrap: Function) -> list[Tensor]:
        model = Model()
        call = wrap(model)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        for step in range(6):
            call(torch.eye(4)).sum().backward()
            if step % 2:
                optimizer.step()
                optimizer.zero_grad(set_to_none=step < 4)
        return list(model.parameters())

    torch.testing.assert_close(trained(_compiled), trained(lambda model: model))


def test_a_gradient_given_stays_as_it_is_where_a_graph_of_gradients_is_made() -> None:
    compiled = _compiled(lambda x, y: x + y)
    x, y = torch.randn(4, 6, requires_grad=True), torch.randn(4, 6, requires_grad=True)
    for _ in STEPS:
        given = torch.randn(4, 6)
        first, second = torch.autograd.grad(compiled(x, y), (x, y), given, create_graph=True)
        assert not given.requires_grad
        assert given.grad_fn is None
        torch.testing.assert_close((first.detach(), second.detach()), (given, given))


# -- the same of any backward, without running it ---------------------------------------------------------------------

_VIEWS: tuple[Function, ...] = (
    lambda a, _: a.reshape(-1),
    lambda a, _: a.reshape(-1, 2),
    lambda a, _: a.reshape(-1)[2:],
    lambda a, _: a.reshape(-1)[:4],
    lambda a, _: a.unsqueeze(0),
    lambda a, _: a.unsqueeze(-1).expand(*a.shape, 3),
    lambda a, _: a.transpose(0, -1),
    lambda a, _: a.detach(),
    lambda a, _: torch.ops.aten.alias(a),
    lambda a, _: a[:, 1:] if a.dim() > 1 else a[1:],
)
_COMPUTED: tuple[Function, ...] = (
    lambda a, _: a.exp(),
    lambda a, _: a.clone(),
    lambda a, b: torch.cat([a.reshape(-1), b.reshape(-1)]),
    lambda a, _: a.sum(),
    lambda a, _: torch.zeros(4, 6),
    lambda a, _: a.reshape(-1).repeat(1),
)
_STEPS = st.lists(
    st.tuples(st.sampled_from((*_VIEWS, *_VIEWS, *_COMPUTED)), st.integers(0, 9), st.integers(0, 9)),
    min_size=2,
    max_size=7,
)


def _backward_graph(steps: Sequence[tuple[Function, int, int]], chosen: Sequence[int]) -> torch.fx.GraphModule:
    def function(saved: Tensor, tangents_1: Tensor, tangents_2: Tensor) -> list[Tensor]:
        values = [saved, tangents_1, tangents_2]
        for step, first, second in steps:
            source = values[first % len(values)]
            fits = source.numel() in range(2, 600, 2)
            values.append(step(source if fits else saved, values[second % len(values)]))
        return [values[k % len(values)] for k in chosen]

    inputs = torch.randn(4, 6), torch.randn(4, 6), torch.randn(24)
    module = make_fx(function, tracing_mode="fake")(*inputs)
    for position, node in enumerate(module.graph.find_nodes(op="placeholder")[1:]):
        mark_tangent(node, position)
    return module


def _elements(view: StridedView) -> set[int]:
    shape, strides = ([int(n) for n in numbers] for numbers in (view.shape, view.strides))  # type: ignore[arg-type]
    places = torch.arange(int(view.offset), int(view.offset) + 10_000)  # type: ignore[arg-type]
    return set(places.as_strided(shape, strides).reshape(-1).tolist())


def _given(program: Program, output: StridedView | PassInput) -> str | None:
    names = {given.buffer: given.name for given in program.inputs}
    return program.inputs[output.position].name if isinstance(output, PassInput) else names.get(output.buffer)


@settings(max_examples=40, deadline=None, derandomize=True, database=None)
@given(_STEPS, st.lists(st.integers(0, 9), min_size=2, max_size=5), st.booleans())
def test_no_two_results_of_a_backward_show_one_element(
    steps: list[tuple[Function, int, int]], chosen: list[int], known: bool
) -> None:
    module = _backward_graph(steps, chosen)
    traced = traced_results(module.graph, 0)
    if known:
        module.graph.output_node().meta[TRACED_RESULTS] = traced
    results = (program := lower_graph(module, capture_target(Settings()), kind="backward")).outputs
    for output, eager in zip(results, traced, strict=True):
        assert isinstance(output, (StridedView, PassInput))
        of = _given(program, output)
        assert of is None or (known and eager is not None and eager.shows_tangent and of.startswith("tangents"))
    for (a, first), (b, second) in combinations(zip(results, traced, strict=True), 2):
        if known and first == second:
            assert a == b  # one tensor, as in eager
        elif isinstance(a, StridedView) and isinstance(b, StridedView) and a.buffer == b.buffer:
            assert not _elements(a) & _elements(b)
        elif (of := {_given(program, a), _given(program, b)}) != {None} and None not in of:
            # Tangents may be one memory at run time: they are told apart by autograd where they are the tensors given.
            assert isinstance(a, PassInput)
            assert isinstance(b, PassInput)


# -- writes between forward and backward ------------------------------------------------------------------------------

WRITTEN: dict[str, Function] = {
    "exp": lambda x: torch.exp(x),
    "a view of exp": lambda x: torch.exp(x).view(-1),
    "part of sigmoid": lambda x: torch.sigmoid(x)[1:3],
    "columns of tanh": lambda x: torch.tanh(x)[:, 1:4],
    "two views of exp": lambda x: ((e := torch.exp(x)).view(-1), e.t()),
    "exp and a view of it": lambda x: ((e := torch.exp(x)), e[1:]),
    "a view of exp and a function of it": lambda x: ((e := torch.exp(x)).view(-1), e.sin()),
    "a diagonal": lambda x: torch.exp(x).diagonal(),
    "rows of softmax": lambda x: torch.softmax(x, 1).view(2, 12),
    "a copy": lambda x: torch.exp(x).clone(),
    "not saved, of a saved input": lambda x: torch.sin(x).view(24),
    "a view of a matmul": lambda x: torch.tanh(x @ x.t()).view(-1),
    "without gradient": lambda x: (torch.exp(x), (x > 0).view(-1)),
}

WRITES: dict[str, Function] = {
    "times two": lambda o: o.mul_(2),
    "zero, unseen": lambda o: o.detach().zero_(),
    "other sizes": lambda o: o.unsqueeze_(0).squeeze_(0),
    "a part": lambda o: o.view(-1)[:1].mul_(3) if o.is_contiguous() else o[..., :1].mul_(3),
}


def _outcome(function: Function, write: Function, x: Tensor, which: int) -> Outcome:
    """The gradient with one result written before backward, or the error of backward; None where the write fails."""
    results = _as_tuple(function(x))
    try:
        write(results[which])
    except RuntimeError:
        return None
    return _backward_of(results, x)


def _backward_of(results: Any, x: Tensor) -> Tensor | RuntimeError:
    try:
        return torch.autograd.grad([r.sum() for r in _as_tuple(results) if r.requires_grad], x)[0]
    except RuntimeError as error:
        return error


def _without_sharing(function: Function, write: Function, x: Tensor, which: int) -> Tensor:
    """What the gradient is where values that were saved are not the ones that are written."""
    results = [r.clone() if k == which else r for k, r in enumerate(_as_tuple(function(x)))]
    write(results[which])
    return torch.autograd.grad([r.sum() for r in results if r.requires_grad], x)[0]


@pytest.mark.parametrize("name", WRITTEN)
def test_a_result_written_before_backward_gives_the_error_or_the_gradient_of_eager(name: str) -> None:
    function = WRITTEN[name]
    x = torch.linspace(-2, 2, 24).view(4, 6).requires_grad_()
    floating = [k for k, result in enumerate(_as_tuple(function(x))) if result.is_floating_point()]
    compiled = _compiled(function)
    for _way in ("AOTAutograd's", "past it"):
        for what, write in WRITES.items():
            for which in floating:
                expected, found = (_outcome(f, write, x, which) for f in (function, compiled))
                _compare(found, expected, lambda w=write, k=which: _without_sharing(function, w, x, k), what)
        assert isinstance(_backward_of(compiled(x), x), Tensor)


def _compare(found: Outcome, expected: Outcome, without_sharing: Callable[[], Tensor], what: str) -> None:
    """``found`` must be what is expected, or right where eager raises: what backward computes again was not written."""
    if isinstance(expected, RuntimeError):
        assert "modified by an inplace operation" in str(expected)
        if isinstance(found, RuntimeError):
            assert "modified by an inplace operation" in str(found)
            return
        expected = without_sharing()
    if expected is None or isinstance(found, RuntimeError):
        assert found is expected, what
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize(
    "function", [lambda x: torch.sin(x.t()), lambda x: x[1:] * x[:-1], lambda x: x.view(24)[3:].exp()]
)
def test_an_input_written_before_backward_is_noticed(function: Function) -> None:
    compiled = _compiled(function)
    for _ in STEPS:
        x = torch.randn(4, 6, requires_grad=True)
        expected = torch.autograd.grad(function(x).sum(), x)[0]
        result = compiled(x)
        with torch.no_grad():
            x.mul_(2)
        found = _backward_of(result, x)
        if isinstance(found, RuntimeError):
            assert "modified by an inplace operation" in str(found)
        else:
            torch.testing.assert_close(found, expected)
        torch.autograd.grad(compiled(x).sum(), x)


def test_views_of_symbolic_sizes_share_the_version_of_what_is_saved() -> None:
    compiled = _compiled(lambda x: torch.exp(x)[1:, 2:], dynamic=True)
    for rows in (4, 7, 5, 9):
        x = torch.randn(rows, 6, requires_grad=True)
        expected = torch.autograd.grad(torch.exp(x)[1:, 2:].sum(), x)
        torch.testing.assert_close(torch.autograd.grad(compiled(x).sum(), x), expected)
        result = compiled(x)
        result.mul_(2)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            result.sum().backward()


@pytest.mark.parametrize("shape", [(0, 5), (1, 5), (3, 1)])
def test_views_of_few_or_no_elements_are_returned(shape: tuple[int, int], compile_strictly: Callable[..., Any]) -> None:
    x = torch.randn(shape, requires_grad=True)
    results = compile_strictly(lambda x: x.unbind(1))(x)
    assert [result.shape for result in results] == [(shape[0],)] * shape[1]
    torch.testing.assert_close(list(results), list(x.unbind(1)))
    torch.stack(results).sum().backward()
    torch.testing.assert_close(x.grad, torch.ones(shape))


# Tensors of 4 x 4 elements that passes fold to a number, compute where they are read, merge or read through.
REWRITTEN: dict[str, Function] = {
    "zeroed": lambda x: x.clone().zero_(),
    "filled": lambda x: torch.empty(4, 4).fill_(3),
    "zeros like": lambda x: torch.zeros_like(x),
    "transposed ones": lambda x: torch.ones(4, 4).t().contiguous(),
    "uniform arithmetic": lambda x: torch.ones_like(x) * 3 - 1,
    "truths": lambda x: torch.zeros_like(x).isnan(),
    "halves": lambda x: torch.ones_like(x).half(),
    "a range": lambda x: torch.arange(16.0).view(4, 4),
    "a constant": lambda x: torch.tensor([[1.0, 2.0, 3.0, 4.0]] * 4),
    "ones below the diagonal": lambda x: torch.ones(4, 4).tril(),
    "times one": lambda x: (x + 1) * 1,
    "twice negated": lambda x: x.neg().neg(),
    "a copy": lambda x: x.clone(),
    "computed": lambda x: x.sin(),
    "complex": lambda x: torch.complex(x, x + 1),
    "complex zeros": lambda x: torch.zeros(4, 4, dtype=torch.complex64),
}


def _views(base: Tensor) -> list[Tensor]:
    same_size = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.uint8}[base.itemsize]
    more = [torch.view_as_real(base), base[1:].imag] if base.is_complex() else []
    return [
        *more,
        base.permute(0, 1), base.t(), base.view(16), base[1:], base[:, ::2], base[1], base.expand(2, 4, 4),
        base.diagonal(), base.unfold(0, 2, 1), base.detach(), base.as_strided((2, 2), (1, 2), 1),
        base.reshape(2, 8), base.split(2)[1], base.t()[1:].unsqueeze(1), base.view(same_size),
        base[1:].view(torch.uint8),
    ]  # fmt: skip


def _places(tensors: Sequence[Tensor]) -> list[tuple[int, int]]:
    """For each tensor the first one in its memory, and how far after that one it starts."""
    storages = [t.untyped_storage().data_ptr() for t in tensors]
    firsts = [storages.index(storage) for storage in storages]
    return [(first, t.data_ptr() - tensors[first].data_ptr()) for first, t in zip(firsts, tensors, strict=True)]


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("name", REWRITTEN)
def test_results_share_memory_where_those_of_eager_do(name: str, training: bool) -> None:
    make = REWRITTEN[name]

    def function(x: Tensor) -> tuple[Tensor, ...]:
        seen, whole, parts = make(x), make(x), make(x)
        return (*_views(seen), seen, whole, whole.permute(0, 1), parts[:2], parts[1:])

    x = torch.linspace(-2, 2, 16).view(4, 4).requires_grad_(training)
    expected, found = function(x), _compiled(function)(x)
    assert _places((x, *found)) == _places((x, *expected))
    torch.testing.assert_close(found, expected)
    assert [t.stride() for t in found] == [t.stride() for t in expected]


def test_views_of_a_filled_tensor_of_symbolic_sizes_share_its_memory() -> None:
    def function(x: Tensor) -> tuple[Tensor, ...]:
        filled = torch.full_like(x, 2)
        return filled[1:], filled, filled.view(-1), filled.t()

    compiled = _compiled(function, dynamic=True)
    for rows in (4, 7, 5):
        x = torch.randn(rows, 3)
        found = compiled(x)
        assert _places(found) == _places(function(x))
        torch.testing.assert_close(found, function(x))


@pytest.mark.parametrize("dtype", [torch.int32, torch.int8])
@pytest.mark.parametrize("whole", [False, True])
def test_a_view_of_another_dtype_shares_the_version_of_what_is_saved(whole: bool, dtype: torch.dtype) -> None:
    def function(x: Tensor) -> tuple[Tensor, Tensor]:
        saved = x.exp()
        return saved.sin(), (saved if whole else saved[1:]).detach().view(dtype)

    for run in (function, _compiled(function)):
        x = torch.linspace(-2, 2, 24).view(4, 6).requires_grad_()
        result, bits = run(x)
        bits.zero_()
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            result.sum().backward()


def test_a_body_does_not_return_a_view_of_its_argument_that_torch_made() -> None:
    """Where an input starts in its storage is known to torch alone, so ``as_strided`` of it is a call."""

    def body(x: Tensor) -> list[Tensor]:
        return [x.as_strided((2, 2), (3, 1), 1), x.as_strided((3,), (1,), 0)]

    traced = make_fx(body, tracing_mode="fake")(torch.randn(8))
    target = capture_target(Settings())
    shown = lower_graph(traced, target).outputs
    copied = lower_graph(traced, target, fresh_outputs=True).outputs
    assert all(isinstance(output, StridedView) for output in (*shown, *copied))
    assert [output.buffer[0] for output in shown] == ["x", "x"]  # results of calls
    assert [output.buffer[0] for output in copied] == ["b", "b"]  # results of loops


def test_a_buffer_that_was_dropped_says_nothing_of_the_next_one_of_its_name() -> None:
    builder = Builder(capture_target(Settings()))
    base = builder.read(builder.add_buffer("a", torch.float32, (4,), (1,)))
    before = builder.mark()
    view = builder.view_by_torch(torch.ops.aten.detach.default, (), builder.materialize(base), (4,), (1,))
    assert builder.memory_of(view.buffer) == "a0"
    assert not builder.starts_its_storage(view.buffer)
    builder.rollback(before)
    again = builder.add_buffer("x", torch.float32, (4,), (1,))
    assert again.name == view.buffer
    assert builder.memory_of(again.name) == again.name
    assert builder.starts_its_storage(again.name)
