"""Functions from the cache: a second compilation of the same graph loads what the first one stored."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import torchkiln
from torchkiln import recorder


@pytest.fixture(autouse=True)
def _cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A cache of its own for each test, and nobody who listens: they would make the stages run."""
    monkeypatch.setattr(recorder, "_listeners", ())
    with torchkiln.settings(cache=True, cache_dir=str(tmp_path / "cache"), fallback=False, adaptive=False):
        yield


def _compiled(function: Callable[..., Any], **options: Any) -> Callable[..., Any]:
    torch._dynamo.reset()
    torchkiln.reset_stats()
    return torch.compile(function, backend="kiln", **options)


def _stages() -> set[str]:
    """What ran since the last :func:`_compiled`."""
    return set(torchkiln.stats().seconds)


def _ran_nothing_but_loads() -> bool:
    return not _stages() & {"AOTAutograd", "pre-grad passes", "lowering", "codegen"}


def _network(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    return F.layer_norm(F.gelu(x @ w + b), (16,)).softmax(-1)


def _inputs(requires_grad: bool = False) -> list[Tensor]:
    torch.manual_seed(0)
    return [t.requires_grad_(requires_grad) for t in (torch.randn(4, 8), torch.randn(8, 16), torch.randn(16))]


def test_a_second_compilation_for_inference_loads_the_first_one() -> None:
    first = _compiled(_network)(*_inputs())
    assert "codegen" in _stages()
    graphs = torchkiln.stats().by_graph
    second = _compiled(_network)(*_inputs())
    assert _ran_nothing_but_loads()
    assert torch.equal(first, second)
    torch.testing.assert_close(second, _network(*_inputs()))
    loaded = torchkiln.stats().by_graph
    assert [(g.kind, g.kernels, dict(g.calls)) for g in loaded] == [(g.kind, g.kernels, dict(g.calls)) for g in graphs]


def _step(run: Callable[..., Any]) -> list[Tensor]:
    inputs = _inputs(requires_grad=True)
    result = run(*inputs)
    result.square().sum().backward()
    return [result.detach(), *(x.grad for x in inputs if x.grad is not None)]


def test_a_training_step_loads_forward_and_backward() -> None:
    first = _step(_compiled(_network))
    run = _compiled(_network)
    second, third = _step(run), _step(run)
    assert _ran_nothing_but_loads()
    assert [g.kind for g in torchkiln.stats().by_graph] == ["forward", "backward"]
    for eager, one, two, three in zip(_step(_network), first, second, third, strict=True):
        assert torch.equal(one, two)
        assert torch.equal(two, three)
        torch.testing.assert_close(two, eager)


def test_a_forward_whose_backward_never_ran_is_traced_and_loaded() -> None:
    inputs = _inputs(requires_grad=True)
    first = _compiled(_network)(*inputs)
    second = _compiled(_network)(*inputs)
    assert "AOTAutograd" in _stages()
    assert "codegen" not in _stages()
    assert torch.equal(first, second)
    second.sum().backward()  # compiled now
    assert "codegen" in _stages()
    _compiled(_network)(*inputs).sum().backward()
    assert _ran_nothing_but_loads()


def test_other_sizes_settings_numbers_and_gradients_are_other_entries() -> None:
    def scaled(x: Tensor, factor: float = 2.0) -> Tensor:
        return x.exp() * factor

    _compiled(scaled)(torch.ones(3))
    _compiled(scaled)(torch.ones(3))
    assert _ran_nothing_but_loads()
    for run in (
        lambda: _compiled(scaled)(torch.ones(4)),
        lambda: _compiled(scaled)(torch.ones(3, dtype=torch.float64)),
        lambda: _compiled(scaled)(torch.ones(6)[::2]),
        lambda: _compiled(scaled)(torch.ones(3, requires_grad=True)),
        lambda: _compiled(lambda x: scaled(x, 3.0))(torch.ones(3)),
        lambda: _compiled(scaled, options={"vector_bits": 128})(torch.ones(3)),
        lambda: _compiled(scaled, options={"passes_skip": ("no_ops",)})(torch.ones(3)),
    ):
        run()
        assert "codegen" in _stages()


def test_symbolic_sizes_are_served_by_one_entry() -> None:
    def f(x: Tensor) -> Tensor:
        return (x - x.mean(0)).softmax(-1)

    _compiled(f, dynamic=True)(torch.randn(6, 5))
    run = _compiled(f, dynamic=True)
    for rows in (7, 3, 11):
        x = torch.randn(rows, 5)
        torch.testing.assert_close(run(x), f(x))
    assert _ran_nothing_but_loads()


def test_guards_that_compiling_adds_hold_for_a_loaded_function() -> None:
    """Tracing asks whether the length is a multiple of three; a length that is none must not be served."""

    def f(x: Tensor) -> Tensor:
        return F.pixel_shuffle(x, 3) if x.shape[0] % 9 == 0 else x + 1

    for _ in range(2):
        run = _compiled(f, dynamic=True)
        for channels in (18, 27, 10, 9):
            x = torch.randn(channels, 4, 4)
            torch.testing.assert_close(run(x), f(x))


def test_functions_of_one_graph_for_different_sizes_are_entries_of_their_own() -> None:
    """How many chunks there are depends on the size, in guards that tracing adds."""

    def f(x: Tensor) -> Tensor:
        return sum(part.sin().sum() for part in x.exp().chunk(3))  # type: ignore[return-value]

    for times in range(3):
        run = _compiled(f, dynamic=True)
        for size in (9, 7, 4, 9):
            x = torch.arange(float(size))
            torch.testing.assert_close(run(x), f(x))
        assert times == 0 or _ran_nothing_but_loads()
        assert bool(torchkiln.stats().cache.puts) is (times == 0)


def test_inputs_in_one_memory_are_not_those_apart() -> None:
    def f(x: Tensor, y: Tensor) -> Tensor:
        x.add_(1)
        return x * y

    for _ in range(2):
        apart = _compiled(f)(torch.arange(4.0), torch.arange(1.0, 5.0))
        torch.testing.assert_close(apart, torch.tensor([1.0, 4.0, 9.0, 16.0]))
        base = torch.arange(8.0)
        shared = _compiled(f)(base[:4], base[1:5])
        torch.testing.assert_close(shared, torch.tensor([2.0, 6.0, 12.0, 16.0]))


def test_random_numbers_go_on() -> None:
    def f(x: Tensor) -> Tensor:
        return F.dropout(x, 0.5)

    x = torch.ones(1000)
    torch.manual_seed(3)
    first = [_compiled(f)(x)]
    torch.manual_seed(3)
    run = _compiled(f)
    assert torch.equal(run(x), first[0])
    assert not torch.equal(run(x), first[0])
    assert _ran_nothing_but_loads()


def test_a_module_loads_with_other_weights() -> None:
    def model() -> nn.Module:
        return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))

    x = torch.randn(3, 8)
    _compiled(model())(x).sum().backward()
    other = model()
    found = _compiled(other)(x)
    found.sum().backward()
    assert _ran_nothing_but_loads()
    torch.testing.assert_close(found, other(x))


def test_messages_name_the_line_of_the_program_that_runs() -> None:
    def first(x: Tensor, i: Tensor) -> Tensor:
        return x[i]  # here

    def second(x: Tensor, i: Tensor) -> Tensor:
        y = x

        return y[i]  # there

    with pytest.raises(IndexError, match="# here"):
        _compiled(first)(torch.ones(3), torch.tensor([5]))
    with pytest.raises(IndexError, match="# there"):
        _compiled(second)(torch.ones(3), torch.tensor([5]))
    assert _ran_nothing_but_loads()


def test_tensors_that_native_code_cannot_read_run_as_captured() -> None:
    _compiled(_network)(*_inputs())
    run = _compiled(_network)
    run(*_inputs())
    assert _ran_nothing_but_loads()
    zero = torch._efficientzerotensor(4, 8)
    torch.testing.assert_close(run(zero, *_inputs()[1:]), _network(torch.zeros(4, 8), *_inputs()[1:]))


def test_forward_mode_works_on_a_loaded_function() -> None:
    def f(x: Tensor) -> Tensor:
        return x.sin() * x

    _compiled(f)(torch.ones(3))
    run = _compiled(f)
    run(torch.ones(3))
    assert _ran_nothing_but_loads()
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(torch.ones(3), torch.full((3,), 2.0))
        found = torch.autograd.forward_ad.unpack_dual(run(dual)).tangent
    one = torch.ones(3)
    torch.testing.assert_close(found, 2 * (one.cos() + one.sin()))


def test_autocast_is_another_entry() -> None:
    def f(x: Tensor, w: Tensor) -> Tensor:
        return x @ w

    x, w = torch.randn(4, 8), torch.randn(8, 4)
    _compiled(f)(x, w)
    for _ in range(2):
        with torch.autocast("cpu", torch.bfloat16):
            assert _compiled(f)(x, w).dtype == torch.bfloat16
    assert _ran_nothing_but_loads()
    with torch.autocast("cpu", torch.float16):
        assert _compiled(f)(x, w).dtype == torch.float16
    assert _compiled(f)(x, w).dtype == torch.float32


def test_an_operator_of_the_user_is_looked_up_after_tracing() -> None:
    @torch.library.custom_op("tests::doubled", mutates_args=())
    def doubled(x: Tensor) -> Tensor:
        return x * 2

    @doubled.register_fake
    def _(x: Tensor) -> Tensor:
        return torch.empty_like(x)

    def f(x: Tensor) -> Tensor:
        return doubled(x.exp()) + 1

    _compiled(f)(torch.ones(3))
    found = _compiled(f)(torch.ones(3))
    assert "AOTAutograd" in _stages()
    assert "codegen" not in _stages()
    torch.testing.assert_close(found, f(torch.ones(3)))


def test_a_pass_of_the_user_is_part_of_the_key() -> None:
    def f(x: Tensor) -> Tensor:
        return x.exp() + 1

    _compiled(f)(torch.ones(3))

    @torchkiln.graph_pass(name="nothing of note", stage="joint")
    def nothing(graph_module: torch.fx.GraphModule) -> bool:
        return False

    try:
        _compiled(f)(torch.ones(3))
        assert "codegen" in _stages()
        _compiled(f)(torch.ones(3))
        assert _ran_nothing_but_loads()
    finally:
        torchkiln.remove_graph_pass("nothing of note")
    _compiled(f)(torch.ones(3))
    assert _ran_nothing_but_loads()


def test_a_process_that_has_used_vmap_loads_too() -> None:
    """torch registers batched forms of its operators with the first one."""
    torch.func.vmap(lambda x: x.exp())(torch.ones(2, 3))
    for _ in range(2):
        _compiled(_network)(*_inputs())
    assert _ran_nothing_but_loads()


def test_cache_off_compiles_anew() -> None:
    for _ in range(2):
        _compiled(_network, options={"cache": False})(*_inputs())
        assert "codegen" in _stages()


def test_stances_of_torch_decide_before_the_cache() -> None:
    def lookups() -> int:
        counts = torchkiln.stats().cache
        return counts.hits + counts.misses

    x, given = torch.randn(3, 4), torch.randn(3, 4, dtype=torch.float64)
    for tensor in (x, given):
        _compiled(torch.sin)(tensor)
    run = _compiled(torch.sin)
    with torch.compiler.set_stance("force_eager"):
        assert torch.equal(run(x), x.sin())
    assert lookups() == 0
    torch.testing.assert_close(run(x), x.sin())
    assert _ran_nothing_but_loads()
    before = lookups()
    assert before > 0
    with torch.compiler.set_stance("eager_on_recompile"):
        assert torch.equal(run(given), given.sin())
    with torch.compiler.set_stance("fail_on_recompile"), pytest.raises(RuntimeError, match="fail_on_recompile"):
        run(given)  # although the cache has it
    assert lookups() == before
    torch.testing.assert_close(run(given), given.sin())
    assert _ran_nothing_but_loads()
    assert lookups() > before
