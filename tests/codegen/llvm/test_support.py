"""The support modules compile for every version of torch, and graphs declare functions as they are defined."""

from __future__ import annotations

from dataclasses import replace

import pytest

from torchkiln.codegen.llvm.support import (
    FOR_EVERY_GRAPH,
    SELDOM_CALLED,
    Exports,
    calls,
    declarations,
    errors,
    functions_of,
    handles,
    inputs,
    module_text,
    outputs,
)
from torchkiln.config import Settings
from torchkiln.native.elf import read_object
from torchkiln.native.host import host_processor
from torchkiln.native.jit import compile_module
from torchkiln.native.tensor_keys import plain_keys
from torchkiln.target import capture_target


def _undefined(given: Exports) -> set[str]:
    """What the module of these needs; it defines all of them."""
    code = read_object(compile_module(module_text(given, capture_target(Settings())), host_processor()))
    defined = {symbol.name for symbol in code.symbols if symbol.section is not None}
    assert defined >= {export.name for export in given}
    return set(code.undefined)


def test_a_torch_without_the_newest_functions_has_support_functions_too(monkeypatch: pytest.MonkeyPatch) -> None:
    newest = {errors._LAST_ERROR, "torch_new_stable_ivalue", inputs.ANY_MODE_ON, outputs.WRAP_TENSOR}
    given = (*FOR_EVERY_GRAPH, *calls.EXPORTS)
    for subject in (calls, errors, inputs, outputs):
        monkeypatch.setattr(subject, "address_of", lambda name: None)
    monkeypatch.setattr(handles, "plain_keys", lambda: replace(plain_keys(), offset=None))
    needed = _undefined(given)
    assert not needed & newest
    assert {"_Znwm", "aoti_torch_get_layout", "aoti_torch_get_device_type"} <= needed


def test_support_functions_are_declared_for_graphs() -> None:
    for exports in (FOR_EVERY_GRAPH, *SELDOM_CALLED):
        for function in functions_of(exports):
            assert function.exported
            assert "*" not in declarations()[function.prototype.name]
