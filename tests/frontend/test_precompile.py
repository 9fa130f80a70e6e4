"""Functions that torch saves with what Dynamo traced: another process calls them without tracing or compiling."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils import _pytree as pytree

from torchkiln.artifact import (
    Artifact,
    CallingConvention,
    CompiledFunction,
    PrecompiledFunction,
    decode_as,
    encode,
)
from torchkiln.artifact.artifact import EntryInfo
from torchkiln.config import Settings
from torchkiln.errors import ArtifactError
from torchkiln.frontend.precompiled import load_precompiled
from torchkiln.graph.fingerprints import package_digest
from torchkiln.native.binary_interface import binary_interface
from torchkiln.target import capture_target

PROGRAM = Path(__file__).with_name("precompiled_program.py")


def _run(how: str, step: str, folder: Path, **environment: str) -> dict[str, Any]:
    own = {
        "KILN_CACHE": "1",
        "KILN_CACHE_DIR": str(folder / "cache"),
        "TORCHINDUCTOR_CACHE_DIR": str(folder / "torch"),
        "TORCH_CACHING_PRECOMPILE": "1" if how == "folder" else "0",
    }
    done = subprocess.run(
        [sys.executable, str(PROGRAM), how, step, str(folder)],
        env={**os.environ, **own, **environment},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return {**json.loads(done.stdout.splitlines()[-1]), "log": done.stderr}


@pytest.mark.skipif(
    not getattr(torch._dynamo.config, "enable_aot_compile", False),
    reason="aot_compile is on by default from torch 2.13 on",
)
def test_a_file_of_aot_compile_runs_and_trains_in_another_process(tmp_path: Path) -> None:
    saved = _run("file", "save", tmp_path)
    assert "codegen" in saved["stages"]
    assert "share memory" in saved["not saved"]
    loaded = _run("file", "load", tmp_path)
    assert loaded["stages"] == ["load precompiled"]
    assert loaded["sparse"].startswith("NotPlainError")
    assert loaded["dual"].startswith("UnsupportedError")


def test_a_folder_of_precompiled_functions_saves_tracing(tmp_path: Path) -> None:
    saved = _run("folder", "save", tmp_path)
    assert saved["traced for the network"] == 2
    assert "share memory" in saved["log"]
    loaded = _run("folder", "load", tmp_path)
    assert loaded["traced for the network"] == 0
    assert loaded["traced"] == 1  # what cannot be saved, in the module of what was loaded
    other = _run("folder", "load", tmp_path, KILN_VECTOR_BITS="128")
    assert other["traced for the network"] == 2
    assert "vector_bits=None" in other["log"]


def _function() -> PrecompiledFunction:
    empty = Artifact(b"", b"", EntryInfo((), (), (), (), 0, 0, ()), ())
    structure = pytree.tree_structure(())
    function = CompiledFunction(CallingConvention(0, (), structure), empty)
    host = capture_target(Settings())
    texts = {"triple": host.triple, "cpu": host.cpu, "features": host.features, "source": package_digest()}
    return PrecompiledFunction(
        function, interface=tuple(binary_interface().items()), settings=(("a", "1"),), keep_memory=False, **texts
    )


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"features": "+sse9"}, "processor with more"),
        ({"interface": (("torch", "0.1"),)}, "compiled for"),
        ({"source": "other"}, "another state of torchkiln"),
        ({"settings": (("a", "2"),)}, "a=2"),
    ],
)
def test_code_for_another_process_is_refused_with_the_reason(change: dict[str, Any], message: str) -> None:
    stored = decode_as(encode(replace(_function(), **change)), PrecompiledFunction)
    with pytest.raises(ArtifactError, match=message):
        _reject(stored)
    _reject(decode_as(encode(_function()), PrecompiledFunction))


def _reject(stored: PrecompiledFunction) -> None:
    stored.reject_other_process(package_digest())
    stored.reject_other_settings((("a", "1"),))


def test_a_wrapped_or_damaged_function_is_not_loaded() -> None:
    whole = _function()
    function = whole.function
    wrapped = replace(function, convention=replace(function.convention, wrapped="autocast"))
    with pytest.raises(ArtifactError, match="wrapper"):
        load_precompiled(encode(replace(whole, function=wrapped)), any_settings=True)
    one_too_many = replace(function, backward=function.forward)
    with pytest.raises(ArtifactError, match="backward"):
        load_precompiled(encode(replace(whole, function=one_too_many)), any_settings=True)
    content = encode(whole)
    for damaged in (b"", content[:40], b"x" + content[1:], content.replace(b"triple", b"tripl\xff", 1)):
        with pytest.raises(ArtifactError):
            load_precompiled(damaged, any_settings=True)
