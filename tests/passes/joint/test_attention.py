"""Attention written out becomes the fused operator, and computes what eager computes."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import torchkiln
from torchkiln.graph.manager import Pass, register_pass, unregister_pass
from torchkiln.passes.joint.attention import ATTENTION, FORMS, checks
from torchkiln.passes.joint.attention import page as docs
from torchkiln.passes.joint.attention.forms import AttentionForm
from torchkiln.patterns.explain import explain_match

FLASH = "aten._scaled_dot_product_flash_attention_for_cpu.default"
FLASH_BACKWARD = "aten._scaled_dot_product_flash_attention_for_cpu_backward.default"

Function = Callable[..., Any]


MEASURED, LEAST_KEYS = checks.LEAST_SCORES, checks.LEAST_KEYS


@pytest.fixture(autouse=True)
def _any_size_pays(monkeypatch: pytest.MonkeyPatch) -> None:
    """The examples are small, so that they are quick; what the limits are for has tests of its own."""
    torchkiln.reset_stats()
    monkeypatch.setattr(checks, "LEAST_SCORES", 0)
    monkeypatch.setattr(checks, "LEAST_KEYS", 0)


def fused() -> tuple[int, int]:
    """Calls of the fused operator and of its backward in what was compiled.

    In bfloat16 the backward of one over few elements is five batched matmuls (``lowering/attention.py``).
    """
    calls = torchkiln.stats().extern_calls
    forward = calls.get(FLASH, 0)
    written_out = calls.get("aten.bmm.dtype", 0) // 5 if forward else 0  # else they are matmuls of the user's
    return forward, calls.get(FLASH_BACKWARD, 0) + written_out


def leaves(*sizes: int, count: int = 3, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    return [torch.randn(sizes, dtype=dtype).requires_grad_() for _ in range(count)]


def gradients(function: Function, inputs: Sequence[Any], seed: int = 7) -> tuple[Any, tuple[Tensor, ...]]:
    result = function(*inputs)
    generator = torch.Generator().manual_seed(seed)
    weights = torch.randn(result.shape, generator=generator, dtype=torch.float64).to(result.dtype)
    wanted = [value for value in inputs if isinstance(value, Tensor) and value.requires_grad]
    return result.detach(), torch.autograd.grad(result, wanted, weights)


def close(actual: Any, expected: Any, **tolerance: Any) -> None:
    torch.testing.assert_close(actual, expected, **{"rtol": 1e-4, "atol": 2e-5, "equal_nan": True, **tolerance})


# -- every form -------------------------------------------------------------------------------------------------------

FUSED_IN_INFERENCE = [form for form in FORMS if form.inference]
GROUPS = [FUSED_IN_INFERENCE[start : start + 8] for start in range(0, len(FUSED_IN_INFERENCE), 8)]


def example(form: AttentionForm, fill: float = -math.inf) -> tuple[list[Tensor], list[float]]:
    """Inputs for a form: no row of a mask hides all keys."""
    tensors: list[Tensor] = []
    for given in form.inputs():
        if given.dtype == torch.bool:
            hidden = torch.rand(given.shape) < 0.4
            hidden[..., 0] = False
            tensors.append(hidden if "filled" in form.name else ~hidden)
        else:
            tensors.append(torch.randn(given.shape).to(given.dtype).requires_grad_(given.requires_grad))
    numbers = {"scale": 3.1 if "divided" in form.name else 0.3, "fill": fill, "dropout_p": 0.25}
    return tensors, [numbers[name] for name in form.scalars]


def all_of(group: Sequence[AttentionForm], numbers: Sequence[Sequence[float]]) -> Function:
    searches = [form.search for form in group]  # Dynamo of torch 2.11 cannot trace how signatures are made

    def together(inputs: list[list[Tensor]]) -> list[Tensor]:
        return [search(*given, *n) for search, given, n in zip(searches, inputs, numbers, strict=True)]

    return together


def test_there_are_many_forms_with_names_of_their_own() -> None:
    assert len({form.name for form in FORMS}) == len(FORMS)
    assert len(FORMS) > 80


@pytest.mark.parametrize("group", GROUPS, ids=lambda group: group[0].name)
def test_every_form_is_fused_in_inference(group: list[AttentionForm], compile_strictly: Function) -> None:
    inputs, numbers = zip(*map(example, group), strict=True)
    function = all_of(group, numbers)
    with torch.no_grad():
        results = compile_strictly(function)(list(inputs))
        eager = function(list(inputs))
        exact = function([[_double(tensor) for tensor in tensors] for tensors in inputs])
    assert fused() == (len(group), 0)
    for result, expected, reference in zip(results, eager, exact, strict=True):
        _close_to_eager_and_exact(result, expected, reference)


@pytest.mark.parametrize("group", GROUPS, ids=lambda group: group[0].name)
def test_every_form_is_fused_in_training(group: list[AttentionForm], compile_strictly: Function) -> None:
    inputs, numbers = zip(*map(example, group), strict=True)
    function = all_of(group, numbers)
    weights = [torch.randn(result.shape).to(result.dtype) for result in function(list(inputs))]

    def trained(called: Function, tensors: list[list[Tensor]], exactly: bool = False) -> list[Tensor]:
        results = called(tensors)
        wanted = [tensor for given in tensors for tensor in given if tensor.requires_grad]
        grads = torch.autograd.grad(results, wanted, [w.double() if exactly else w for w in weights])
        return [result.detach() for result in results] + list(grads)

    compiled = trained(compile_strictly(function), list(inputs))
    eager = trained(function, list(inputs))
    exact = trained(function, [[_double(tensor) for tensor in tensors] for tensors in inputs], exactly=True)
    assert fused() == (len(group), len(group))
    for result, expected, reference in zip(compiled, eager, exact, strict=True):
        _close_to_eager_and_exact(result, expected, reference)


def _double(tensor: Tensor) -> Tensor:
    return tensor if tensor.dtype == torch.bool else tensor.detach().double().requires_grad_(tensor.requires_grad)


def _close_to_eager_and_exact(result: Tensor, expected: Tensor, exact: Tensor) -> None:
    assert result.dtype == expected.dtype
    assert result.stride() == expected.stride()
    if result.dtype == torch.float32:
        close(result, expected)
        close(result.double(), exact)
    else:  # eager rounds scores and weights to eight bits, the fused operator does not
        error, eager_error = ((tensor.double() - exact).abs().max() for tensor in (result, expected))
        assert error <= 1.5 * eager_error + 0.01
        close(result, expected, rtol=0.1, atol=0.1)


# -- what stays as it is ----------------------------------------------------------------------------------------------


def _plain(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return ((q @ k.transpose(-2, -1)) * 0.3).softmax(-1) @ v


NEAR_MISSES: dict[str, Function] = {
    "softmax over queries": lambda q, k, v: ((q @ k.transpose(-2, -1)) * 0.3).softmax(-2) @ v,
    "no softmax": lambda q, k, v: ((q @ k.transpose(-2, -1)) * 0.3).sigmoid() @ v,
    "key not transposed": lambda q, k, v: ((q @ k) * 0.3).softmax(-1) @ v,
    "two scales": lambda q, k, v: ((q @ k.transpose(-2, -1)) * 0.3 * 0.7).softmax(-1) @ v,
    "scale of the softmax": lambda q, k, v: (((q @ k.transpose(-2, -1)) * 0.3).softmax(-1) * 0.5) @ v,
    "scale that is computed": lambda q, k, v: ((q @ k.transpose(-2, -1)) * q.mean()).softmax(-1) @ v,
    "scores capped": lambda q, k, v: ((q @ k.transpose(-2, -1)) * 0.3).tanh().softmax(-1) @ v,
    "fill that shows": lambda q, k, v: (q @ k.mT).masked_fill(k.mT > 1, -100.0).softmax(-1) @ v,
    "values of another width": lambda q, k, v: _plain(q, k, v[..., :4]),
    "one head for the batch": lambda q, k, v: _plain(q, k[:1], v[:1]),
    "scores with their sum added": lambda q, k, v: ((q @ k.mT) + (q @ k.mT).sum(-1, keepdim=True)).softmax(-1) @ v,
}


@pytest.mark.parametrize("name", NEAR_MISSES)
@pytest.mark.parametrize("training", [False, True], ids=["inference", "training"])
def test_what_looks_like_attention_and_is_not_stays(name: str, training: bool, compile_strictly: Function) -> None:
    function, inputs = NEAR_MISSES[name], leaves(2, 3, 8, 8)
    compiled = compile_strictly(function)
    if training:
        close(gradients(compiled, inputs), gradients(function, inputs))
    else:
        with torch.no_grad():
            close(compiled(*inputs), function(*inputs))
    assert fused() == (0, 0)


def test_weights_that_are_returned_keep_attention_as_it_is(compile_strictly: Function) -> None:
    def function(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        weights = ((q @ k.transpose(-2, -1)) * 0.3).softmax(-1)
        return weights @ v, weights

    inputs = [tensor.detach() for tensor in leaves(2, 3, 6, 8)]
    close(compile_strictly(function)(*inputs), function(*inputs))
    assert fused() == (0, 0)


def test_small_attention_is_not_fused_and_large_is(compile_strictly: Function, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checks, "LEAST_SCORES", MEASURED)
    compiled = compile_strictly(_plain)
    small, large = torch.randn(1, 2, 16, 8), torch.randn(1, 2, 1024, 8)
    close(compiled(small, small, small), _plain(small, small, small))
    assert fused() == (0, 0)
    torch._dynamo.reset()
    close(compiled(large, large, large), _plain(large, large, large))
    assert fused() == (1, 0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(("keys", "is_fused"), [(LEAST_KEYS - 1, False), (LEAST_KEYS, True), (LEAST_KEYS + 5, True)])
def test_a_query_that_is_nan_stays_nan_however_few_keys_there_are(
    keys: int, is_fused: bool, dtype: torch.dtype, compile_strictly: Function, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checks, "LEAST_KEYS", LEAST_KEYS)
    query, key, value = (torch.randn(1, 2, length, 8).to(dtype) for length in (4, keys, keys))
    query[0, 1, 2] = math.nan
    result, expected = compile_strictly(_plain)(query, key, value), _plain(query, key, value)
    assert result[0, 1, 2].isnan().all()
    close(result, expected, rtol=0.02, atol=0.02)
    assert fused() == (int(is_fused), 0)


DECLINED = {
    "multiplied, dropout": "no fused attention with dropout",
    "divided, mask filled, dropout": "no fused attention with dropout",
    "multiplied, mask added, softmax in float32, dropout": "no fused attention with dropout",
    "multiplied, mask learned": "no fused attention with a gradient of the mask",
    "unscaled, mask learned, one for the batch": "no fused attention with a gradient of the mask",
}


@pytest.mark.usefixtures("no_cache")  # a pass keeps what it is given
@pytest.mark.parametrize("name", DECLINED)
def test_what_the_cpu_has_no_kernel_for_is_found_and_declined_with_a_reason(
    name: str, compile_strictly: Function
) -> None:
    (form,) = (item for item in FORMS if item.name == name)
    (tensors, numbers), search = example(form), form.search
    seen: list[torch.fx.GraphModule] = []

    def keep(graph_module: torch.fx.GraphModule) -> bool:
        seen.append(copy.deepcopy(graph_module))
        return False

    register_pass("joint", "priority_0", Pass("kept", keep))
    try:
        gradients(compile_strictly(lambda *given: search(*given, *numbers)), tensors)
    finally:
        unregister_pass("joint", "priority_0", "kept")
    assert fused() == (0, 0)
    (rewrite,) = (item for item in ATTENTION.rewrites if item.name == f"attention/{name} (training)")
    assert DECLINED[name] in str(explain_match(rewrite, seen[0]))


# -- rows that see no key ---------------------------------------------------------------------------------------------


def _hidden() -> Tensor:
    hidden = torch.zeros(2, 1, 6, 6, dtype=torch.bool)
    hidden[0, :, 1] = True  # sees nothing
    hidden[1, :, 2, :3] = True
    return hidden


@pytest.mark.parametrize("fill", [-math.inf, -1e9, torch.finfo(torch.float32).min])
def test_a_filled_row_without_a_key_is_what_eager_makes_of_it(fill: float, compile_strictly: Function) -> None:
    def function(q: Tensor, k: Tensor, v: Tensor, hidden: Tensor) -> Tensor:
        return ((q @ k.transpose(-2, -1)) * 0.3).masked_fill(hidden, fill).softmax(-1) @ v

    inputs = [*leaves(2, 3, 6, 8), _hidden()]
    with torch.no_grad():
        close(compile_strictly(function)(*inputs), function(*inputs))
    result, (query, key, value) = gradients(compile_strictly(function), inputs)
    expected, (eager_query, eager_key, eager_value) = gradients(function, inputs)
    assert fused()[1] == 1
    assert math.isnan(expected[0, 0, 1, 0]) == (fill == -math.inf)
    close((result, query, value), (expected, eager_query, eager_value))
    if fill != -math.inf:  # otherwise NaN, as is the gradient of the values
        close(key, eager_key)


@pytest.mark.parametrize("fill", [-math.inf, -1e9, torch.finfo(torch.float32).min])
@pytest.mark.parametrize("keys", [6, 700])
def test_a_row_without_a_key_by_an_added_mask_is_what_eager_makes_of_it(
    fill: float, keys: int, compile_strictly: Function
) -> None:
    def function(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
        return ((q @ k.transpose(-2, -1)) * 0.3 + mask).softmax(-1) @ v

    mask = torch.zeros(2, 1, 6, keys)
    mask[0, :, 1] = fill
    mask[1, :, 2, :3] = fill
    inputs = [torch.randn(2, 3, 6, 8).requires_grad_(), *leaves(2, 3, keys, 8, count=2), mask]
    with torch.no_grad():
        close(compile_strictly(function)(*inputs), function(*inputs))
    close(gradients(compile_strictly(function), inputs), gradients(function, inputs))
    assert fused()[1] == 1


def test_the_lowest_bfloat16_hides_all_keys_as_in_eager(compile_strictly: Function) -> None:
    def function(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
        scores = (q @ k.transpose(-2, -1)) * 0.3 + mask
        return scores.softmax(-1, dtype=torch.float32).to(q.dtype) @ v

    mask = torch.zeros(2, 1, 6, 6, dtype=torch.bfloat16)
    mask[0, :, 1] = torch.finfo(torch.bfloat16).min
    inputs = [*leaves(2, 3, 6, 8, dtype=torch.bfloat16), mask]
    close(gradients(compile_strictly(function), inputs), gradients(function, inputs), rtol=0.05, atol=0.03)
    assert fused() == (1, 1)


# -- masks made of constants ------------------------------------------------------------------------------------------


def _tril(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    n = q.size(-2)
    hidden = torch.ones(n, n).tril().view(1, 1, n, n) == 0
    return ((q @ k.transpose(-2, -1)) * 0.3).masked_fill(hidden, -math.inf).softmax(-1) @ v


def _triu(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    n = q.size(-2)
    return ((q @ k.transpose(-2, -1)) / 3.1 + torch.full((n, n), -math.inf).triu(1)).softmax(3) @ v


def _positions(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    place = torch.arange(q.size(-2))
    lowest = torch.finfo(q.dtype).min
    return (q @ k.mT + torch.where(place[:, None] >= place, 0.0, lowest)).softmax(-1) @ v


def _where(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    seen = torch.tril(torch.ones(q.size(-2), q.size(-2), dtype=torch.bool))
    return torch.where(seen, (q @ k.mT) * 0.3, -1e9).softmax(-1) @ v


def _window(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    place = torch.arange(q.size(-2))
    return (q @ k.mT).masked_fill((place[:, None] - place).abs() > 2, -1e9).softmax(-1) @ v


@pytest.mark.parametrize("function", [_tril, _triu, _positions, _where, _window], ids=lambda f: f.__name__)
@pytest.mark.parametrize("training", [False, True], ids=["inference", "training"])
def test_a_causal_mask_becomes_a_flag(function: Function, training: bool, compile_strictly: Function) -> None:
    inputs = leaves(2, 3, 6, 8)
    compiled = compile_strictly(function, record_passes=True)
    if training:
        close(gradients(compiled, inputs), gradients(function, inputs))
    else:
        with torch.no_grad():
            close(compiled(*inputs), function(*inputs))
    assert fused() == (1, int(training))
    (after,) = (record.after for record in torchkiln.stats().passes if record.name == "attention" and record.changed)
    causal = function is not _window
    assert after.count("attn_mask") == (0 if causal else 1 + training)
    assert ("0.0, True)" in after) == causal
    assert "masked_fill" not in after  # no row is empty


def test_a_mask_that_hides_nothing_goes(compile_strictly: Function) -> None:
    def function(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        mask = torch.where(torch.arange(6) < 6, 0.0, -math.inf)[None, :]
        return ((q @ k.mT) * 0.3 + mask).softmax(-1) @ v

    inputs = leaves(2, 3, 6, 8)
    with torch.no_grad():
        close(compile_strictly(function, record_passes=True)(*inputs), function(*inputs))
    assert fused() == (1, 0)
    assert not any("attn_mask" in record.after for record in torchkiln.stats().passes if record.name == "attention")


def _finite(n: int, dtype: torch.dtype) -> Tensor:
    return torch.full((n, n), torch.finfo(dtype).min, dtype=dtype).triu(1)


def _infinite(n: int, dtype: torch.dtype) -> Tensor:
    return torch.full((n, n), -math.inf, dtype=dtype).triu(1)


def _seen_nearby(n: int, dtype: torch.dtype) -> Tensor:
    return torch.ones(n, n, dtype=torch.bool).tril().triu(-2)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("mask", [_finite, _infinite, _seen_nearby], ids=lambda f: f.__name__)
def test_constant_masks_of_every_dtype(mask: Function, dtype: torch.dtype, compile_strictly: Function) -> None:
    def function(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask(q.size(-2), dtype))

    inputs = leaves(2, 3, 6, 8, dtype=dtype)
    close(gradients(compile_strictly(function), inputs), gradients(function, inputs), rtol=0.05, atol=0.03)


# -- graphs -----------------------------------------------------------------------------------------------------------


def test_the_graph_before_and_after(compile_strictly: Function) -> None:
    inputs = [torch.randn(2, 3, 6, 8) for _ in range(3)]
    compile_strictly(_plain, record_passes=True)(*inputs)
    (record,) = (record for record in torchkiln.stats().passes if record.name == "attention")
    targets = [line.partition("target=")[2].partition("]")[0] for line in record.before.splitlines() if "call_" in line]
    assert [target.rpartition("aten.")[2] for target in targets] == [
        "permute.default", "view.default", "view.default", "bmm.default", "view.default", "mul.Tensor",
        "_softmax.default", "view.default", "view.default", "bmm.default", "view.default",
    ]  # fmt: skip
    after = [line.strip() for line in record.after.splitlines() if "call_" in line]
    assert len(after) == 2
    assert "_scaled_dot_product_flash_attention_for_cpu.default](args = (%arg1_1, %arg0_1, %arg2_1)" in after[0]
    assert "scale: 0.3" in after[0]
    assert "operator.getitem" in after[1]


def test_every_layer_of_many_is_fused(compile_strictly: Function) -> None:
    def function(x: Tensor, weights: list[Tensor]) -> Tensor:
        for weight in weights:
            q, k, v = ((x @ weight).view(2, 5, 3, 4, 8).permute(2, 0, 3, 1, 4)).unbind(0)
            x = x + _plain(q, k, v).transpose(1, 2).reshape(2, 5, 32)
        return x

    x = torch.randn(2, 5, 32)
    weights = [(torch.randn(32, 96) * 0.1).requires_grad_() for _ in range(9)]
    results = []
    for called in (compile_strictly(function), function):
        result = called(x, weights)
        results.append((result, torch.autograd.grad(result.sin().sum(), weights)))
    close(*results)
    assert fused() == (9, 9)


def test_any_sizes_are_fused_by_one_compilation() -> None:
    torch._dynamo.reset()
    counter = torch._dynamo.testing.CompileCounterWithBackend("kiln")

    def function(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
        return ((q @ k.transpose(-2, -1)) * 0.3 + mask).softmax(-1) @ v

    compiled = torch.compile(function, backend=counter, dynamic=True, fullgraph=True)
    for batch, length in ((2, 6), (3, 9), (5, 4)):
        inputs = [*leaves(batch, 3, length, 8), torch.randn(batch, 1, length, length)]
        close(gradients(compiled, inputs), gradients(function, inputs))
    assert counter.frame_count == 1
    assert fused() == (1, 1)
    assert not torchkiln.stats().fallbacks


@pytest.mark.parametrize(("dynamic", "trains", "expected"), [(True, True, 0), (True, False, 1), (False, True, 1)])
def test_few_half_scores_of_symbolic_sizes_are_not_fused_in_training(
    dynamic: bool, trains: bool, expected: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checks, "LEAST_SCORES", MEASURED)
    compiled = torch.compile(_plain, backend="kiln", dynamic=dynamic, fullgraph=True, options={"fallback": False})
    inputs = [leaf.detach().requires_grad_(trains) for leaf in leaves(2, 3, 18, 16, dtype=torch.bfloat16)]
    result = compiled(*inputs)
    close(result, _plain(*inputs), rtol=2e-2, atol=2e-2)
    if trains:
        result.sum().backward()
    assert fused()[0] == expected


def test_the_page_of_patterns_is_current() -> None:
    assert docs.page() == docs.PAGE.read_text(encoding="utf-8"), "run python -m torchkiln.passes.stored_patterns"
