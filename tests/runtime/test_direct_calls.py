"""Compiled functions as bytes, loaded and called by the calling convention alone."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.runtime.stored_functions import Captured, compiled_meanwhile
from torchkiln import compile_fx
from torchkiln.artifact import decode_function
from torchkiln.config import Settings
from torchkiln.errors import ArtifactError
from torchkiln.runtime.direct_calls import load_function


def _layer(x: Tensor, w: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    return torch.softmax(x @ w + b, -1), x.detach().amax(0)


def _leaves(rows: int = 4) -> list[Tensor]:
    torch.manual_seed(1)
    return [torch.randn(*sizes, requires_grad=True) for sizes in ((rows, 5), (5, 6), (6,))]


@pytest.mark.parametrize("dynamic", [False, True])
def test_a_training_step_of_a_loaded_function(dynamic: bool) -> None:
    captured = Captured(_layer, dynamic=dynamic)
    loaded = load_function(decode_function(compiled_meanwhile(lambda: captured.call(*_leaves())[0].sum().backward())))
    for rows in (4, 9) if dynamic else (4, 4):
        mine, eagers = _leaves(rows), _leaves(rows)
        captured.call(*mine)
        results, expected = loaded(*captured.inputs), _layer(*eagers)
        torch.testing.assert_close(results, expected)
        assert [r.requires_grad for r in results] == [True, False]
        gradient = torch.randn(6, rows).T
        results[0].backward(gradient)
        expected[0].backward(gradient)
        torch.testing.assert_close([x.grad for x in mine], [x.grad for x in eagers])


_LOAD = """
import sys, torch
from torchkiln.artifact import decode_function
from torchkiln.runtime.direct_calls import load_function

with open(sys.argv[1], "rb") as file:
    loaded = load_function(decode_function(file.read()))
torch.manual_seed(1)
x, w, b = (torch.randn(*sizes, requires_grad=True) for sizes in ((4, 5), (5, 6), (6,)))
results = loaded(x, w, b)
results[0].square().sum().backward()
torch.save([*[r.detach() for r in results], x.grad, w.grad, b.grad], sys.argv[2])
stages = ("compiler", "frontend", "lowering", "partition", "passes")
assert not [name for name in sys.modules if name.startswith(tuple(f"torchkiln.{stage}" for stage in stages))]
"""


def test_another_process_needs_nothing_but_the_bytes(tmp_path: Path) -> None:
    stored, answer = tmp_path / "function", tmp_path / "answer"
    stored.write_bytes(compiled_meanwhile(lambda: Captured(_layer).call(*_leaves())[0].sum().backward()))
    subprocess.run([sys.executable, "-c", _LOAD, stored, answer], env=dict(os.environ), check=True, timeout=300)
    leaves = _leaves()
    expected = _layer(*leaves)
    expected[0].square().sum().backward()
    torch.testing.assert_close(
        torch.load(answer, weights_only=True), [*[r.detach() for r in expected], *[x.grad for x in leaves]]
    )


_LOAD_ANY = """
import sys
from torchkiln.artifact import decode_function
from torchkiln.runtime.direct_calls import load_function

with open(sys.argv[1], "rb") as file:
    load_function(decode_function(file.read()))
assert "torch._dynamo" not in sys.modules
"""


@pytest.mark.parametrize("dynamic", [False, True])
def test_another_process_loads_functions_that_write_and_whose_sizes_are_symbolic(dynamic: bool, tmp_path: Path) -> None:
    captured, stored = Captured(_count, dynamic=dynamic), tmp_path / "function"
    stored.write_bytes(compiled_meanwhile(lambda: captured.call(torch.ones(3), torch.zeros(()))))
    subprocess.run([sys.executable, "-c", _LOAD_ANY, stored], env=dict(os.environ), check=True, timeout=300)


def test_functions_that_need_the_wrapper_or_a_backward_are_not_loaded() -> None:
    stored = decode_function(compiled_meanwhile(lambda: Captured(_layer).call(*_leaves())[0].sum().backward()))
    with pytest.raises(ArtifactError, match="needs AOTAutograd's wrapper"):
        load_function(replace(stored, convention=replace(stored.convention, wrapped="autocast")))
    with pytest.raises(ArtifactError, match="lacks its backward"):
        load_function(replace(stored, backward=None))


def _count(x: Tensor, times: Tensor) -> Tensor:
    times.add_(1)
    return x * times


def test_calls_that_are_refused_advance_no_version() -> None:
    x, times = torch.ones(3), torch.zeros(())
    call = compile_fx(torch.fx.symbolic_trace(_count), [x, times], settings=Settings(fallback=False, adaptive=False))
    call(x, times)
    assert times._version == 1
    with pytest.raises(RuntimeError, match="input 0"):
        call(torch.ones(4), times)
    with pytest.raises(TypeError, match="takes 2 inputs"):
        call(x)
    with pytest.raises(TypeError, match="input 1 is not a tensor"):
        call(x, None)
    assert times._version == 1
    negated = torch._neg_view(torch.zeros(()))
    call(x, negated)  # runs as captured
    assert negated._version == 1


def test_a_tensor_of_inference_mode_is_not_written_outside_of_it() -> None:
    with torch.inference_mode():
        times = torch.zeros(())
    x = torch.ones(3)
    call = compile_fx(torch.fx.symbolic_trace(_count), [x, torch.zeros(())], settings=Settings(fallback=False))
    for run in (_count, call):
        with pytest.raises(RuntimeError, match="Inplace update to inference tensor outside InferenceMode"):
            run(x, times)
    with torch.inference_mode():
        before = times.clone()  # eager wrote before it refused to
        call(x, times)
        assert times == before + 1


def test_inputs_that_are_written_to_count_it_as_in_eager() -> None:
    captured = Captured(_count)
    mine, eagers = torch.zeros(()), torch.zeros(())
    loaded = load_function(decode_function(compiled_meanwhile(lambda: captured.call(torch.ones(3), mine))))
    mine.zero_()
    before = mine._version
    for _ in range(3):
        torch.testing.assert_close(loaded(*captured.inputs), (_count(torch.ones(3), eagers),))
        assert mine._version - before == eagers._version


def test_nested_inputs_and_results() -> None:
    def function(pair: list[Tensor], scale: dict[str, Tensor]) -> dict[str, Any]:
        return {"sum": pair[0] + pair[1], "rest": [(pair[0] * scale["by"],)]}

    graph = torch.fx.symbolic_trace(function)
    inputs = ([torch.ones(3), torch.full((3,), 2.0)], {"by": torch.tensor(3.0)})
    stored = compiled_meanwhile(lambda: compile_fx(graph, inputs, settings=Settings(fallback=False))(*inputs))
    results = load_function(decode_function(stored))(*inputs)
    assert results.keys() == {"sum", "rest"}
    assert isinstance(results["rest"][0], tuple)
    torch.testing.assert_close(results, function(*inputs))
