"""The support modules compile for every version of torch, and graphs declare functions as they are defined."""

from __future__ import annotations

from dataclasses import replace

import pytest

from torchkiln.codegen.llvm.support import (
    calls,
    declarations,
    errors,
    handles,
    inputs,
    module_text,
    outputs,
    parts,
    seldom_called,
)
from torchkiln.codegen.llvm.support.part import Part
from torchkiln.config import Settings
from torchkiln.native.elf import read_object
from torchkiln.native.host import host_processor
from torchkiln.native.jit import compile_module
from torchkiln.native.tensor_keys import plain_keys
from torchkiln.target import capture_target


def _undefined(*given: Part) -> set[str]:
    """What the module of these parts needs; it defines all that they export."""
    code = read_object(compile_module(module_text(given, capture_target(Settings())), host_processor()))
    defined = {symbol.name for symbol in code.symbols if symbol.section is not None}
    assert defined >= {name for part in given for name in part.exports}
    return set(code.undefined)


def test_a_torch_without_the_newest_functions_has_support_functions_too(monkeypatch: pytest.MonkeyPatch) -> None:
    newest = {errors._LAST_ERROR, "torch_new_stable_ivalue", inputs.ANY_MODE_ON, outputs.WRAP_TENSOR}
    given = (*parts(), calls.part())
    for subject in (calls, errors, inputs, outputs):
        monkeypatch.setattr(subject, "address_of", lambda name: None)
    monkeypatch.setattr(handles, "plain_keys", lambda: replace(plain_keys(), offset=None))
    needed = _undefined(*given)
    assert not needed & newest
    assert {"_Znwm", "aoti_torch_get_layout", "aoti_torch_get_device_type"} <= needed


def test_support_functions_are_declared_for_graphs() -> None:
    for part in (*parts(), *seldom_called()):
        for function in part.functions:
            assert function.exported
            assert "*" not in declarations()[function.prototype.name]
