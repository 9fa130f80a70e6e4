"""Prepared weights are never stale: whatever changes a weight, the next call computes with what it is now."""

from __future__ import annotations

import copy
import gc
import os
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

import torchkiln
from torchkiln.runtime import prepared_weights


class _Network(nn.Module):
    """A convolution whose norm is folded, and a linear layer whose scale is."""

    def __init__(self) -> None:
        super().__init__()
        self.convolution, self.norm = nn.Conv2d(3, 4, 3, bias=False), nn.BatchNorm2d(4)
        self.linear, self.scale = nn.Linear(4 * 16, 5), nn.Parameter(torch.rand(5) + 0.5)
        self.gain = nn.Parameter(torch.tensor(1.5))
        nn.init.normal_(self.norm.weight)
        nn.init.normal_(self.norm.running_mean)  # type: ignore[arg-type]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(self.norm(self.convolution(x)).flatten(1)) * self.scale * self.gain


def _image() -> torch.Tensor:
    return torch.randn(2, 3, 6, 6)


def _compiled(model: nn.Module, *, frozen: bool) -> Callable[..., Any]:
    options = {"adaptive": False, "fallback": False}
    if frozen:
        return torchkiln.freeze(model, options=options)
    return torch.compile(model, backend="kiln", fullgraph=True, options=options)


def _check(call: Callable[..., Any], model: nn.Module) -> None:
    image = _image()
    with torch.no_grad():
        torch.testing.assert_close(call(image), model(image), atol=1e-4, rtol=1e-4)


def _step(model: _Network) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    model.train()
    model(_image()).square().sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    model.eval()


def _swap(model: _Network) -> None:
    model.convolution.weight = nn.Parameter(torch.randn(4, 3, 3, 3))


def _assign_data(model: _Network) -> None:
    model.convolution.weight.data = torch.randn(4, 3, 3, 3)


def _write_through_data(model: _Network) -> None:
    model.convolution.weight.data.normal_()  # which torch counts nowhere


def _update_buffer(model: _Network) -> None:
    model.norm.running_var.mul_(3)  # type: ignore[operator, union-attr]


def _replace_buffer(model: _Network) -> None:
    model.norm.running_var = torch.rand(4) + 2


def _load(model: _Network) -> None:
    model.load_state_dict(_Network().state_dict())


def _load_by_assigning(model: _Network) -> None:
    model.load_state_dict(_Network().state_dict(), assign=True)


def _swap_tensors(model: _Network) -> None:
    gc.collect()  # torch swaps no tensors with weak references, and Dynamo's graph has some until it is collected
    torch.utils.swap_tensors(model.scale, nn.Parameter(torch.randn(5)))


def _write_in_numpy(model: _Network) -> None:
    model.scale.detach().numpy()[:] = 7


def _set_to_another(model: _Network) -> None:
    with torch.no_grad():
        model.scale.set_(torch.randn(5))  # type: ignore[call-overload]


def _free_and_fill(model: _Network) -> None:
    """As FSDP does."""
    storage, values = model.scale.untyped_storage(), torch.randn(5)
    size = storage.size()
    storage.resize_(0)
    storage.resize_(size)
    with torch.no_grad():
        model.scale.copy_(values)


def _write_a_number_through_data(model: _Network) -> None:
    model.gain.data.mul_(2)


def _parametrize(model: _Network) -> None:
    class Doubled(nn.Module):
        def forward(self, weight: torch.Tensor) -> torch.Tensor:
            return weight * 2

    torch.nn.utils.parametrize.register_parametrization(model.linear, "weight", Doubled())


_CHANGES = [
    _step,
    _swap,
    _assign_data,
    _write_through_data,
    _write_a_number_through_data,
    _update_buffer,
    _replace_buffer,
    _load,
    _load_by_assigning,
    _swap_tensors,
    _write_in_numpy,
    _set_to_another,
    _free_and_fill,
    _parametrize,
]


@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("change", _CHANGES)
def test_a_change_between_calls_is_never_missed(change: Callable[[_Network], None], frozen: bool) -> None:
    model = _Network().eval()
    call = _compiled(model, frozen=frozen)
    _check(call, model)
    _check(call, model)
    change(model)
    _check(call, model)
    _check(call, model)


def test_weights_are_prepared_once_while_they_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    counted = _count_preparations(monkeypatch)
    model = _Network().eval()
    call = _compiled(model, frozen=False)
    for _ in range(5):
        _check(call, model)
    assert len(counted) == 1
    _update_buffer(model)
    for _ in range(3):
        _check(call, model)
    assert len(counted) == 2


@pytest.mark.parametrize("frozen", [False, True])
def test_another_part_of_the_same_memory_is_another_weight(frozen: bool) -> None:
    """As adapters that lie in one stacked tensor are chosen, in a way that only moves where a weight begins."""
    model, stacked = _Network().eval(), torch.randn(3, 4, 3, 3, 3)
    call = _compiled(model, frozen=frozen)
    for part in stacked:
        model.convolution.weight.data = part
        _check(call, model)


def _count_preparations(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    counted: list[object] = []
    prepare = prepared_weights.PreparedGraph._prepare

    def counting(graph: Any, inputs: Any) -> Any:
        counted.append(graph)
        return prepare(graph, inputs)

    monkeypatch.setattr(prepared_weights.PreparedGraph, "_prepare", counting)
    return counted


def test_a_sampled_write_that_goes_unseen_is_told_of() -> None:
    model = _Network().eval()
    call = _compiled(model, frozen=False)
    _check(call, model)
    model.convolution.weight.data.view(-1)[37] += 100  # one element, which is not looked at
    torchkiln.prepare_again()
    _check(call, model)


def test_parametrized_weights_follow_what_they_are_made_of() -> None:
    model = nn.Sequential(torch.nn.utils.parametrizations.weight_norm(nn.Conv1d(4, 4, 3)), nn.BatchNorm1d(4)).eval()
    call = _compiled(model, frozen=False)
    x = torch.randn(2, 4, 9)
    with torch.no_grad():
        for _ in range(2):
            torch.testing.assert_close(call(x), model(x))
            model[0].parametrizations.weight.original0.mul_(2)  # type: ignore[union-attr, operator]


_HUGE = 1e30  # a factor that is not folded: sums of such products may overflow


class _TwoNorms(nn.Module):
    """Two layers, each with a norm that is folded into its weight unless the norm's is too large."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(3, 4, 3), nn.Conv2d(4, 4, 3)
        self.first_norm, self.second_norm = nn.BatchNorm2d(4), nn.BatchNorm2d(4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first_norm(self.first(x)).relu()
        result: torch.Tensor = self.second_norm(self.second(x))
        return result


def _call_and_check(call: Callable[..., Any], model: nn.Module) -> None:
    image = _image()
    with torch.no_grad():
        expected = model(image)
        torch.testing.assert_close(call(image), expected, rtol=0, atol=1e-5 * float(expected.abs().max()))


def _scale(norm: nn.Module, factor: float) -> None:
    with torch.no_grad():
        norm.weight.fill_(factor)  # type: ignore[operator, union-attr]


@pytest.mark.usefixtures("no_cache")
def test_a_layer_whose_weight_is_refused_stays_as_it_is_and_the_others_stay_folded(
    caplog: pytest.LogCaptureFixture,
) -> None:
    model = _TwoNorms().eval()
    _scale(model.first_norm, _HUGE)
    call = _compiled(model, frozen=False)
    for _ in range(2):
        _call_and_check(call, model)
    assert not any("runs as captured" in record.message for record in caplog.records)
    graphs = torchkiln.stats().graphs
    layers = [str(record) for record in torchkiln.stats().matmuls[-2:]]
    assert sum("_native_batch_norm" in layer for layer in layers) == 1, layers
    for factor in (2.0, _HUGE, 3.0):
        _scale(model.first_norm, factor)
        _call_and_check(call, model)
    assert torchkiln.stats().graphs == graphs, "both forms are compiled once"
    _scale(model.second_norm, _HUGE)
    _call_and_check(call, model)
    assert not any("runs as captured" in record.message for record in caplog.records)


def test_weights_that_cannot_be_prepared_are_tried_once_until_they_change(monkeypatch: pytest.MonkeyPatch) -> None:
    tried: list[object] = []

    class Counted(prepared_weights.WeightMarks):
        def __init__(self, *given: Any) -> None:
            tried.append(given)
            super().__init__(*given)

    monkeypatch.setattr(prepared_weights, "WeightMarks", Counted)
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4)).eval()
    _scale(model[1], _HUGE)
    call = _compiled(model, frozen=False)
    for _ in range(3):
        _call_and_check(call, model)
    assert len(tried) == 2, "folded, and as they are"
    _scale(model[1], 2.0)
    for _ in range(2):
        _call_and_check(call, model)
    assert len(tried) == 3


def test_refused_weights_of_a_symbolic_graph_run_as_captured(caplog: pytest.LogCaptureFixture) -> None:
    model = _TwoNorms().eval()
    _scale(model.first_norm, _HUGE)
    call = torch.compile(model, backend="kiln", dynamic=True, options={"fallback": False, "adaptive": False})
    _call_and_check(call, model)
    (message,) = (record.message for record in caplog.records if "runs as captured" in record.message)
    assert message.startswith("a graph runs as captured: a weight overflows where an operation with constants is")


def test_two_models_that_share_weights_both_see_a_change() -> None:
    first, second = _Network().eval(), _Network().eval()
    second.convolution = first.convolution
    calls = [_compiled(model, frozen=False) for model in (first, second)]
    for _ in range(2):
        for call, model in zip(calls, (first, second), strict=True):
            _check(call, model)
        with torch.no_grad():
            first.convolution.weight.mul_(-2)


def test_one_code_serves_models_with_weights_of_their_own() -> None:
    """Dynamo compiles the forward once, for both."""
    models = [_Network().eval() for _ in range(2)]
    calls = [_compiled(model, frozen=False) for model in models]
    for _ in range(3):
        for call, model in zip(calls, models, strict=True):
            _check(call, model)


def test_a_copy_of_a_model_has_weights_of_its_own() -> None:
    model = _Network().eval()
    call = _compiled(model, frozen=False)
    _check(call, model)
    other: Any = copy.deepcopy(call)
    with torch.no_grad():
        model.convolution.weight.mul_(3)
    _check(other, other._orig_mod)
    _check(call, model)


def test_functional_call_computes_with_the_weights_it_is_given() -> None:
    model = _Network().eval()
    others = {name: torch.randn_like(value) for name, value in model.named_parameters()}

    def function(weights: dict[str, torch.Tensor], x: torch.Tensor) -> torch.Tensor:
        return torch.func.functional_call(model, weights, (x,))

    call = torch.compile(function, backend="kiln", options={"adaptive": False, "fallback": False})
    image = _image()
    with torch.no_grad():
        for weights in (dict(model.named_parameters()), others, dict(model.named_parameters()), others):
            torch.testing.assert_close(call(weights, image), function(weights, image), atol=1e-4, rtol=1e-4)


def test_threads_that_call_while_another_updates_see_one_of_the_states() -> None:
    """Weights of a call may be those before or after an update; a later call sees the update."""
    model = nn.Sequential(nn.Conv1d(1, 1, 1, bias=False), nn.BatchNorm1d(1)).eval()
    call, x = _compiled(model, frozen=False), torch.ones(1, 1, 4)
    factor = float((1 + 1e-5) ** -0.5)
    wrong: list[float] = []
    finished = threading.Event()

    def read() -> None:
        with torch.no_grad():
            while not finished.is_set():
                value = float(call(x)[0, 0, 0]) / factor
                if abs(value - round(value)) > 1e-3:
                    wrong.append(value)

    with torch.no_grad():
        model[0].weight.fill_(1)  # type: ignore[union-attr, operator]
        call(x)
        threads = [threading.Thread(target=read) for _ in range(3)]
        for thread in threads:
            thread.start()
        try:
            for number in range(2, 40):
                model[0].weight.fill_(number)  # type: ignore[union-attr, operator]
                assert round(float(call(x)[0, 0, 0]) / factor) == number
        finally:
            finished.set()
            for thread in threads:
                thread.join()
    assert not wrong


@pytest.mark.parametrize("frozen", [False, True])
def test_weights_made_in_inference_mode_are_not_taken_for_what_they_were(frozen: bool) -> None:
    with torch.inference_mode():
        model = _Network().eval()
        call = _compiled(model, frozen=frozen)
        image = _image()
        for _ in range(2):
            torch.testing.assert_close(call(image), model(image), atol=1e-4, rtol=1e-4)
            model.convolution.weight.mul_(2)
            model.norm.running_mean.add_(1)  # type: ignore[operator, union-attr]


def test_a_call_in_inference_mode_and_one_outside_of_it_share_what_was_prepared() -> None:
    model, image = _Network().eval(), _image()
    call = _compiled(model, frozen=False)
    with torch.inference_mode():
        inside = call(image)
    with torch.no_grad():
        outside = call(image)
        torch.testing.assert_close(inside, outside, atol=0, rtol=0)
        _update_buffer(model)
        torch.testing.assert_close(call(image), model(image), atol=1e-4, rtol=1e-4)


def test_fake_and_meta_tensors_are_answered_as_eager_answers_them() -> None:
    model = _Network().eval()
    call = _compiled(model, frozen=False)
    _check(call, model)
    meta = copy.deepcopy(model).to("meta")
    with torch.no_grad():
        answer = torch.compile(meta, backend="kiln")(_image().to("meta"))
        assert answer.device.type == "meta"
        assert answer.shape == (2, 5)
        mode = FakeTensorMode(allow_non_fake_inputs=True)
        with mode:
            fake = call(mode.from_tensor(_image()))
        assert fake.shape == (2, 5)
    _check(call, model)


_PROGRAM = """
import sys, torch, torchkiln
from torch import nn
torch.manual_seed(int(sys.argv[1]))
model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU()).eval()
nn.init.normal_(model[1].running_mean)
call, x = torch.compile(model, backend="kiln", options={"adaptive": False}), torch.randn(2, 3, 6, 6)
with torch.no_grad():
    for _ in range(3):
        torch.testing.assert_close(call(x), model(x), atol=1e-5, rtol=1e-5)
        model[0].weight.mul_(-2)
        model[1].running_var.add_(1)
print(sorted(set(torchkiln.stats().seconds) & {"AOTAutograd", "codegen", "lowering"}))
"""


def test_a_function_from_the_cache_prepares_the_weights_of_its_process(tmp_path: Path) -> None:
    answers = [
        subprocess.run(
            [sys.executable, "-c", _PROGRAM, str(seed)],
            env={**os.environ, "KILN_CACHE": "1", "KILN_CACHE_DIR": str(tmp_path)},
            capture_output=True,
            text=True,
            check=False,
        )
        for seed in (1, 2)
    ]
    assert [answer.returncode for answer in answers] == [0, 0], answers[-1].stderr
    assert [answer.stdout.strip() for answer in answers] == ["['AOTAutograd', 'codegen', 'lowering']", "[]"]
