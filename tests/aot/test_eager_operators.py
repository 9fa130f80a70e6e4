"""Compiled operators for eager calls: stored by one process, found and served by another."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import torchkiln
from torchkiln.aot import eager_operators
from torchkiln.errors import OptionError, PackageError


@pytest.fixture(autouse=True)
def _own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The packages that calls are served by, as they are called."""
    calls: list[str] = []
    call = torchkiln.Package.__call__

    def counted(self: torchkiln.Package, *args: Any, **kwargs: Any) -> Any:
        calls.append(self.target)
        return call(self, *args, **kwargs)

    monkeypatch.setattr(torchkiln.Package, "__call__", counted)
    return calls


def _compile(op: str, f: Any, *args: Any, **kwargs: Any) -> eager_operators.CompiledOperator:
    return torchkiln.compile_op_with_persistent_cache("aten", op, "cpu", False, f, args, kwargs)


def test_entries_serve_calls_that_fit_and_others_fall_through(served: list[str]) -> None:
    x, y = torch.randn(3, 4), torch.randn(3, 4)
    expected = {
        "fits": torch.add(x, y, alpha=2),
        "alpha": torch.add(x, y, alpha=3),
        "sizes": torch.add(x[:2], y[:2], alpha=2),
        "strides": torch.add(x.t(), y.t(), alpha=2),
        "dtype": torch.add(x.double(), y.double(), alpha=2),
        "number": x + 1.5,
        "scalars": torch.tensor(1.0, dtype=torch.float16) + 0.1,
    }
    _compile("add.Tensor", torch.ops.aten.add.Tensor, x, y, alpha=2)
    registered = torchkiln.register_compiled_ops("aten", {"add.Tensor"})
    try:
        torch.testing.assert_close(torch.add(x, y, alpha=2), expected["fits"])
        assert len(served) == 1
        results = {
            "alpha": torch.add(x, y, alpha=3),
            "sizes": torch.add(x[:2], y[:2], alpha=2),
            "strides": torch.add(x.t(), y.t(), alpha=2),
            "dtype": torch.add(x.double(), y.double(), alpha=2),
            "number": x + 1.5,
            "scalars": torch.tensor(1.0, dtype=torch.float16) + 0.1,
        }
        for name, result in results.items():
            assert result.dtype == expected[name].dtype
            assert torch.equal(result, expected[name])
        assert len(served) == 1
    finally:
        registered.remove()
    torch.add(x, y, alpha=2)
    assert len(served) == 1


def test_entries_serve_the_modes_that_they_were_compiled_in(served: list[str]) -> None:
    x, y = torch.arange(4), torch.arange(1, 5)
    _compile("div.Tensor", torch.div, x, y)
    registered = torchkiln.register_compiled_ops("aten", {"div.Tensor"})
    try:
        assert (x / y).dtype == torch.float32
        assert len(served) == 1
        torch.set_default_dtype(torch.float64)
        assert (x / y).dtype == torch.float64
        torch.set_default_dtype(torch.float32)
        with torch.backends.mkldnn.flags(enabled=False):
            torch.div(x, y)
        torch.use_deterministic_algorithms(True)
        torch.div(x, y)
        assert len(served) == 1
    finally:
        torch.set_default_dtype(torch.float32)
        torch.use_deterministic_algorithms(False)
        registered.remove()


def test_operators_on_memory_that_overlaps_are_torchs() -> None:
    x = torch.randn(4)
    _compile("add_.Tensor", torch.Tensor.add_, torch.randn(3), torch.randn(3))
    registered = torchkiln.register_compiled_ops("aten", {"add_.Tensor"})
    try:
        with pytest.raises(RuntimeError, match="refer to a single memory location"):
            x[:3].add_(x[1:])
        y, expected = x[:3].clone(), 2 * x[:3]
        assert torch.equal(y.add_(y), expected)
    finally:
        registered.remove()


def test_gradients_go_through_overridden_operators(served: list[str]) -> None:
    x = torch.randn(5, requires_grad=True)
    registered = torchkiln.register_compiled_ops("aten", {"silu"})
    try:
        _compile("silu", torch.nn.functional.silu, x.detach())  # after the registration
        torch.nn.functional.silu(x).sum().backward()
    finally:
        registered.remove()
    assert len(served) == 1
    again = x.detach().requires_grad_()
    torch.nn.functional.silu(again).sum().backward()
    torch.testing.assert_close(x.grad, again.grad)


def test_an_operator_whose_code_calls_itself_is_torchs_inside(served: list[str]) -> None:
    x, y = torch.randn(64, 64, dtype=torch.float64), torch.randn(64, 64, dtype=torch.float64)
    expected = torch.linalg.solve_triangular(x, y, upper=True)
    name = "linalg_solve_triangular"
    _compile(name, torch.ops.aten.linalg_solve_triangular.default, x, y, upper=True)
    registered = torchkiln.register_compiled_ops("aten", {name})
    try:
        torch.testing.assert_close(torch.linalg.solve_triangular(x, y, upper=True), expected)
    finally:
        registered.remove()
    assert len(served) == 1


_SERVE = """
import sys, torch, torchkiln
from torchkiln.aot.eager_operators import load_eager_op_cache

(entry,) = load_eager_op_cache("aten", "gelu", "cpu")
assert entry.inputs == (("tensor", "torch.float32", (6,), (1,)), ("str", "tanh")), entry.inputs
torchkiln.register_compiled_ops("aten", {"gelu"})
torch.manual_seed(0)
torch.save(torch.nn.functional.gelu(torch.randn(6), approximate="tanh"), sys.argv[1])
assert "llvmlite" not in sys.modules
assert entry.package is not None
"""


def test_another_process_finds_and_serves_an_entry(tmp_path: Path) -> None:
    _compile("gelu", torch.nn.functional.gelu, torch.randn(6), approximate="tanh")
    answer = tmp_path / "answer"
    subprocess.run([sys.executable, "-c", _SERVE, answer], env=dict(os.environ), check=True, timeout=300)
    torch.manual_seed(0)
    expected = torch.nn.functional.gelu(torch.randn(6), approximate="tanh")
    torch.testing.assert_close(torch.load(answer, weights_only=True), expected)


def test_the_metadata_names_every_input(tmp_path: Path) -> None:
    entry = _compile("add.Tensor", torch.ops.aten.add.Tensor, torch.randn(2, 3), 1.5)
    tensor = {"kind": "tensor", "dtype": "torch.float32", "sizes": [2, 3], "strides": [3, 1], "device": "cpu"}
    assert json.loads(entry.path.with_suffix(".json").read_text())["inputs"] == [
        {"name": "self", **tensor},
        {"name": "other", "kind": "float", "value": (1.5).hex()},
        {"name": "alpha", "kind": "int", "value": 1},
    ]
    assert entry.path.is_relative_to(tmp_path / "torchkiln" / "eager" / "aten" / "cpu" / "add.Tensor")


def test_damaged_entries_are_not_used(served: list[str]) -> None:
    x = torch.randn(4)
    entry = _compile("silu", torch.nn.functional.silu, x)
    expected = torch.nn.functional.silu(x)
    content = bytearray(entry.path.read_bytes())
    content[100] ^= 1
    entry.path.write_bytes(content)
    registered = torchkiln.register_compiled_ops("aten", {"silu"})
    try:
        assert torch.equal(torch.nn.functional.silu(x), expected)
    finally:
        registered.remove()
    assert served == []
    entry.path.with_suffix(".json").write_text('{"format": 2, "operator": "aten::silu", "inputs": [[]]}')
    assert torchkiln.load_eager_op_cache("aten", "silu", "cpu") == []


def test_a_folder_that_others_may_write_to_is_not_used() -> None:
    entry = _compile("silu", torch.nn.functional.silu, torch.randn(4))
    entry.path.parent.chmod(0o777)
    assert torchkiln.load_eager_op_cache("aten", "silu", "cpu") == []
    with pytest.raises(PackageError, match="writable by others"):
        _compile("silu", torch.nn.functional.silu, torch.randn(4))


def test_a_folder_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "torchkiln").write_text("in its place")
    with pytest.raises(PackageError, match=r"cannot be made \([A-Z][a-z ]+\); set XDG_CACHE_HOME"):
        _compile("silu", torch.nn.functional.silu, torch.randn(4))


def test_wrong_requests_are_refused_in_one_sentence() -> None:
    x = torch.randn(4)
    silu = torch.nn.functional.silu
    with pytest.raises(OptionError, match="dynamic must be False"):
        torchkiln.compile_op_with_persistent_cache("aten", "silu", "cpu", True, silu, (x,), {})
    with pytest.raises(OptionError, match="for the device 'cpu', not for 'cuda'"):
        torchkiln.compile_op_with_persistent_cache("aten", "silu", "cuda", False, silu, (x,), {})
    with pytest.raises(OptionError, match="no operator aten::no_such"):
        torchkiln.compile_op_with_persistent_cache("aten", "no_such", "cpu", False, silu, (x,), {})
    for wrong in ("add", "add_", "add.no_such"):
        with pytest.raises(OptionError, match=rf"no operator aten::{wrong}; .*overload: add_?\.Tensor"):
            torchkiln.register_compiled_ops("aten", {wrong})
    with pytest.raises(OptionError, match=r"must be a set, as in \{'silu'\}, not text"):
        torchkiln.register_compiled_ops("aten", "silu")
    with pytest.raises(OptionError, match=r"'dims' is \[0\]; compiled operators take tensors, bool"):
        _compile("flip", torch.flip, x, [0])
    with pytest.raises(OptionError, match=r"'\.\./outside::silu' has no name of torch's"):
        torchkiln.load_eager_op_cache("../outside", "silu", "cpu")
