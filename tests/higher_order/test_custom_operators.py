"""Operators from torch.library: functional, mutating, differentiable, with effects."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch
from torch.library import custom_op

import torchkiln
from tests.higher_order.against_eager import check, compiled

Tensor = torch.Tensor
log: list[tuple[str, float]] = []


@custom_op("kiln_test::shift_", mutates_args={"x"})
def shift_(x: Tensor, by: float) -> None:
    x += by


@custom_op("kiln_test::swap_", mutates_args={"x", "y"})
def swap_(x: Tensor, y: Tensor, scale: Tensor) -> Tensor:
    saved = x.clone()
    x.copy_(y * scale)
    y.copy_(saved)
    return x + y


@custom_op("kiln_test::fill_all_", mutates_args={"xs"})
def fill_all_(xs: Sequence[Tensor], value: float) -> None:
    for k, x in enumerate(xs):
        x.fill_(value + k)


@custom_op("kiln_test::maybe_", mutates_args={"x"})
def maybe_(x: Tensor | None, y: Tensor) -> Tensor:
    if x is not None:
        x.mul_(2)
    return y * 2


@custom_op("kiln_test::cube", mutates_args=())
def cube(x: Tensor) -> Tensor:
    return x**3


@custom_op("kiln_test::several", mutates_args=())
def several(x: Tensor) -> tuple[Tensor, Tensor]:
    return x.sin(), x.argsort()


@custom_op("kiln_test::pieces", mutates_args=())
def pieces(x: Tensor, count: int) -> list[Tensor]:
    return [piece.clone() for piece in x.chunk(count)]


@custom_op("kiln_test::note", mutates_args=())
def note(x: Tensor, text: str) -> Tensor:
    log.append((text, float(x.sum())))
    return x.clone()


@swap_.register_fake
def _(x: Tensor, y: Tensor, scale: Tensor) -> Tensor:
    return torch.empty_like(x)


@maybe_.register_fake
def _(x: Tensor | None, y: Tensor) -> Tensor:
    return torch.empty_like(y)


@cube.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty_like(x)


@several.register_fake
def _(x: Tensor) -> tuple[Tensor, Tensor]:
    return torch.empty_like(x), torch.empty_like(x, dtype=torch.int64)


@pieces.register_fake
def _(x: Tensor, count: int) -> list[Tensor]:
    return [torch.empty_like(piece) for piece in x.chunk(count)]


@note.register_fake
def _(x: Tensor, text: str) -> Tensor:
    return torch.empty_like(x)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    ctx.save_for_backward(inputs[0])


cube.register_autograd(lambda ctx, grad: grad * 3 * ctx.saved_tensors[0] ** 2, setup_context=_keep)
several.register_autograd(lambda ctx, grad, _: grad * ctx.saved_tensors[0].cos(), setup_context=_keep)
note.register_autograd(lambda ctx, grad: (grad, None))


@pytest.fixture
def ordered() -> Iterator[None]:
    effects = pytest.importorskip("torch._library.effects")
    note.register_effect(effects.EffectType.ORDERED)
    log.clear()
    yield
    note.register_effect(None)


@pytest.mark.parametrize("training", [False, True])
def test_functional_operators_with_gradients(training: bool) -> None:
    def function(x: Tensor) -> Any:
        values, order = several(cube(x * 2))
        return values.exp(), order, pieces(x.detach() + 1, 3)

    check(function, torch.randn(7, 3).requires_grad_(training))


def test_a_list_of_results_in_the_middle_of_a_graph() -> None:
    def function(x: Tensor) -> Tensor:
        first, second = pieces(x * 2, 2)
        return first.sin() @ second.t().cos()

    check(function, torch.randn(6, 4))


def _on_an_intermediate(x: Tensor) -> Tensor:
    y = x * 2
    shift_(y, 1.5)
    return y.sin()


def _old_value_read_later(x: Tensor) -> tuple[Tensor, Tensor]:
    y = x * 2
    before = y.exp()
    z = y.clone()
    shift_(z, 1.0)
    return before + y, z


def _on_an_input(x: Tensor) -> Tensor:
    before = x.sum()
    shift_(x, 1.0)
    return x * before


def _on_a_view_of_an_input(x: Tensor) -> Tensor:
    shift_(x[1:3], 1.0)
    shift_(x.t()[0], -2.0)
    return x.cos()


def _on_views_of_an_intermediate(x: Tensor) -> tuple[Tensor, Tensor]:
    y = x + 1
    part = y.view(-1)[::3]
    shift_(part, 5.0)
    return y * 2, part


def _on_a_constant(x: Tensor) -> Tensor:
    y = torch.zeros(3, 2)
    shift_(y, 4.0)
    shift_(y[1], 1.0)
    return y + x.sum()


def _twice_the_same(x: Tensor) -> tuple[Tensor, Tensor]:
    y = x.sin()
    shift_(y, 1.0)
    z = y * 3
    shift_(y, 1.0)
    return y, z


def _input_returned(x: Tensor) -> tuple[Tensor, Tensor]:
    shift_(x, 1.0)
    return x, x * 2


def _expanded(x: Tensor) -> Tensor:
    y = x.sum(1, keepdim=True).expand(4, 5).clone()
    shift_(y, 1.0)
    return y


def _lists(x: Tensor) -> tuple[Tensor, ...]:
    a, b = x * 2, x + 1
    total = a + b
    fill_all_([a, b[1:]], 3.0)
    return a, b, total


def _two_arguments(x: Tensor) -> tuple[Tensor, ...]:
    a, b = x.exp(), x.sin()
    c = swap_(a, b, x.mean())
    return a, b, c


def _optional(x: Tensor) -> tuple[Tensor, ...]:
    a = x + 1
    return maybe_(None, x), maybe_(a, x), a


@pytest.mark.parametrize(
    "function",
    [
        _on_an_intermediate,
        _old_value_read_later,
        _on_an_input,
        _on_a_view_of_an_input,
        _on_views_of_an_intermediate,
        _on_a_constant,
        _twice_the_same,
        _input_returned,
        _expanded,
        _lists,
        _two_arguments,
        _optional,
    ],
)
def test_mutating_operators(function: Any) -> None:
    check(function, torch.randn(4, 5))


def test_mutating_an_input_in_another_layout() -> None:
    check(_on_an_input, torch.randn(5, 4).t())
    base = torch.randn(4, 10)
    run = compiled(_on_an_input)
    expected = base.clone()
    results = run(base[:, ::2]), _on_an_input(expected[:, ::2])
    torch.testing.assert_close(results[0], results[1])
    torch.testing.assert_close(base, expected)


def test_a_mutating_operator_in_training() -> None:
    def function(x: Tensor, statistics: Tensor) -> Tensor:
        shift_(statistics, 0.5)
        return (x * statistics).sin()

    check(function, torch.randn(4, 5, requires_grad=True), torch.ones(5))


def test_a_mutating_operator_in_a_branch() -> None:
    def function(x: Tensor) -> Tensor:
        def left(x: Tensor) -> Tensor:
            y = x * 2
            shift_(y, 1.0)
            return y

        return torch.cond(x.sum() > 0, left, lambda x: x.sin(), (x,))

    check(function, torch.rand(4))


def _copies(function: Any, *inputs: Tensor) -> int:
    """How many more kernels run than the number of other operators asks for."""
    before = torchkiln.stats().launches
    compiled(function)(*inputs)
    return torchkiln.stats().launches - before


def test_nothing_is_copied_where_the_old_value_is_not_needed() -> None:
    def alone(x: Tensor) -> Tensor:
        shift_(x, 1.0)
        return x.sum()

    assert _copies(alone, torch.randn(40)) == 1  # the sum
    assert _copies(_on_an_intermediate, torch.randn(40)) == 2  # one before the call and one after it


@pytest.mark.skipif(not hasattr(torch.Tag, "out"), reason="this torch does not trace custom out= operators")
def test_an_out_operator() -> None:
    library = torch.library.Library("kiln_test", "FRAGMENT")
    library.define("scaled.out(Tensor x, float by, *, Tensor(a!) out) -> Tensor(a!)", tags=(torch.Tag.out,))

    def scaled(x: Tensor, by: float, *, out: Tensor) -> Tensor:
        return out.copy_(x * by)

    library.impl("scaled.out", scaled, "CompositeExplicitAutograd")
    library.impl("scaled.out", lambda x, by, *, out: out, "Meta")

    def function(x: Tensor) -> Tensor:
        out = torch.empty_like(x)
        torch.ops.kiln_test.scaled.out(x, 3.0, out=out)
        return out + 1

    check(function, torch.randn(6))


def test_calls_with_effects_keep_their_order_and_are_never_dropped(ordered: None) -> None:
    def function(x: Tensor) -> Tensor:
        late = note(x * 100, "first")
        note(x.sin().exp(), "second")
        result = note(x, "third")
        return result + late.sum()

    x = torch.rand(5)
    function(x)
    expected = list(log)
    log.clear()
    result = compiled(function)(x)
    torch.testing.assert_close(result, x + (x * 100).sum())
    assert [text for text, _ in log] == [text for text, _ in expected] == ["first", "second", "third"]
    torch.testing.assert_close([v for _, v in log], [v for _, v in expected])


def test_effects_in_training(ordered: None) -> None:
    check(lambda x: note(x.sin(), "a").cos() + note(x, "b"), torch.rand(5, requires_grad=True))
    assert [text for text, _ in log] == ["a", "b", "a", "b"]


@pytest.mark.parametrize("training", [False, True])
def test_linear_algebra_with_checks(training: bool) -> None:
    def function(x: Tensor) -> tuple[Tensor, ...]:
        square = x @ x.t() + 3 * torch.eye(4)
        return torch.linalg.inv(square), torch.linalg.cholesky(square) * 2, torch.linalg.solve(square, x)

    check(function, torch.randn(4, 4).requires_grad_(training), tolerance={"rtol": 1e-4, "atol": 1e-5})


def test_a_singular_matrix_raises_the_error_eager_raises() -> None:
    run = compiled(lambda x: torch.linalg.inv(x) * 2)
    with pytest.raises(torch.linalg.LinAlgError, match="singular"):
        run(torch.zeros(3, 3))
    torch.testing.assert_close(run(torch.eye(3)), torch.eye(3) * 2)


def test_on_sizes_that_change(ordered: None) -> None:
    def function(x: Tensor) -> tuple[Tensor, Tensor]:
        y = note(x * 2, "a")
        shift_(y[1:], 1.0)
        shift_(x, 1.0)
        return y, torch.linalg.inv(x @ x.t() + 9 * torch.eye(x.shape[0]))

    run = torch.compile(function, backend="kiln", fullgraph=True, dynamic=True, options={"fallback": False})
    for size in (3, 4):
        x = torch.rand(size, 5)
        y = x.clone()
        torch.testing.assert_close(run(x), function(y), rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(x, y)


@torch.compiler.nested_compile_region
def _noted(x: Tensor) -> Tensor:
    return note(x, "in a region") * 2


def test_effects_in_branches_and_regions(ordered: None) -> None:
    def function(x: Tensor) -> Tensor:
        chosen = torch.cond(x.sum() > 0, lambda x: note(x, "in a branch") + 1, lambda x: x.sin(), (x,))
        return _noted(note(chosen, "between")) + _noted(x)

    x = torch.rand(4)
    check(function, x)
    half = len(log) // 2
    assert log[:half] == log[half:]
    assert [text for text, _ in log[:half]] == ["in a branch", "between", "in a region", "in a region"]
