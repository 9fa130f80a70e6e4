"""Warnings come once and point at the user's line; programs eager refuses raise eager's error."""

from __future__ import annotations

import inspect
import warnings

import pytest
import torch

from torchkiln import config
from torchkiln.config import Settings
from torchkiln.errors import CompileError, FallbackWarning, SettingWarning


def _write_into_expanded(x: torch.Tensor) -> torch.Tensor:
    y = (x * 2).expand(4, 3)
    y.add_(1)
    return y


def _assign_into_expanded(x: torch.Tensor) -> torch.Tensor:
    y = (x * 2).expand(4, 3)
    y[0] = 1
    return y


def test_a_write_into_expanded_memory_is_eagers_error() -> None:
    x = torch.zeros(1, 3)
    with pytest.raises(RuntimeError) as eager:
        _write_into_expanded(x)
    with pytest.warns(FallbackWarning), pytest.raises(RuntimeError) as caught:
        torch.compile(_write_into_expanded, backend="kiln")(x)
    assert caught.type is eager.type
    assert str(caught.value) == str(eager.value)


def test_an_assignment_into_expanded_memory_reaches_every_element_that_is_the_same_place() -> None:
    x = torch.zeros(1, 3)
    with pytest.warns(FallbackWarning):
        result = torch.compile(_assign_into_expanded, backend="kiln")(x)
    assert torch.equal(result, _assign_into_expanded(x))


def test_without_fallback_the_error_names_the_line_of_the_write() -> None:
    run = torch.compile(_write_into_expanded, backend="kiln", options={"fallback": False})
    with pytest.raises(Exception, match=r"y\.add_\(1\)") as caught:
        run(torch.zeros(1, 3))
    assert isinstance(caught.value, CompileError) or "CompileError" in str(caught.value)


def test_writes_into_memory_without_overlap_are_compiled() -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        y = (x * 2).expand(1, 3).t()
        y.add_(1)
        y.squeeze_()
        return y

    run = torch.compile(function, backend="kiln", fullgraph=True, options={"fallback": False})
    x = torch.randn(1, 3)
    assert torch.equal(run(x), function(x))


def test_the_fallback_warning_points_at_the_line_that_called() -> None:
    run = torch.compile(_write_into_expanded, backend="kiln")
    frame = inspect.currentframe()
    assert frame is not None
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with pytest.raises(RuntimeError):
            run(torch.zeros(1, 3))
    line = frame.f_lineno - 1
    (warning,) = [w for w in caught if w.category is FallbackWarning]
    assert (warning.filename, warning.lineno) == (__file__, line)
    assert "y.add_(1)" in str(warning.message)


def test_an_unknown_variable_is_warned_of_once_with_the_name_it_may_mean(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KILN_THREEDS", "2")
    with pytest.warns(SettingWarning, match=r"KILN_THREEDS sets nothing \(did you mean KILN_THREADS\?\)") as caught:
        config.resolve()
    assert caught[0].filename == __file__
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        config.resolve()


def test_known_variables_are_not_warned_of(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in Settings.__dataclass_fields__:
        monkeypatch.delenv(config.environment_name(name), raising=False)
    monkeypatch.setenv("KILN_RNG", "eager")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert config.resolve().rng == "eager"
