"""Support functions as data: processes that are given their code load and run graphs without a compiler."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from tests.runtime.stored_functions import Captured, compiled_meanwhile
from torchkiln.artifact import Artifact, SupportCode, decode_support, encode
from torchkiln.artifact.artifact import EntryInfo
from torchkiln.artifact.support import SupportModule
from torchkiln.cache.key import CacheKey
from torchkiln.codegen.llvm.support import compile_support
from torchkiln.config import Settings
from torchkiln.errors import ArtifactError
from torchkiln.runtime import support
from torchkiln.target import capture_target

TARGET = capture_target(Settings())


@pytest.fixture(scope="module")
def code() -> SupportCode:
    return compile_support(TARGET)


@pytest.fixture
def nothing_provided(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a process that has loaded nothing yet."""
    monkeypatch.setattr(support, "_provided", None)
    monkeypatch.setattr(support, "_loaded", {})


def _layer(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    return torch.softmax(x @ w + b, -1)


def _sorted_rows(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
    """Sorting and calls of torch's operators are modules of support functions of their own."""
    return torch.sort(torch.sin(x), -1).values, torch.linalg.matrix_exp(w)


def _tensors() -> tuple[Tensor, Tensor, Tensor]:
    torch.manual_seed(1)
    return torch.randn(4, 5), torch.randn(5, 5), torch.randn(5)


_LOAD = """
import sys
from pathlib import Path
import torch
from torchkiln.artifact import decode_function, decode_support
from torchkiln.runtime.direct_calls import load_function
from torchkiln.runtime.support import provide

training, inference, code, answer = map(Path, sys.argv[1:])
provide(decode_support(code.read_bytes()))
torch.manual_seed(1)
x, w, b = torch.randn(4, 5), torch.randn(5, 5), torch.randn(5)
sorted_rows = load_function(decode_function(inference.read_bytes()))(x, w)
x, w, b = (t.requires_grad_() for t in (x, w, b))
(result,) = load_function(decode_function(training.read_bytes()))(x, w, b)
result.square().sum().backward()
torch.save([*sorted_rows, result.detach(), x.grad, w.grad, b.grad], answer)
compiler = ("llvmlite", "torch._dynamo", "torch._inductor", "torchkiln.compiler", "torchkiln.frontend")
stages = tuple(f"torchkiln.{stage}" for stage in ("codegen", "schedule", "lowering", "partition", "passes", "patterns"))
found = [name for name in sys.modules if name.startswith((*compiler, *stages))]
assert not found, found
"""


def test_a_process_that_is_given_support_code_does_without_a_compiler(code: SupportCode, tmp_path: Path) -> None:
    training, inference, stored, answer = (tmp_path / name for name in ("training", "inference", "code", "answer"))
    x, w, b = _tensors()
    inference.write_bytes(compiled_meanwhile(lambda: Captured(_sorted_rows).call(x, w)))
    leaves = [t.clone().requires_grad_() for t in (x, w, b)]
    training.write_bytes(compiled_meanwhile(lambda: Captured(_layer).call(*leaves).sum().backward()))
    stored.write_bytes(encode(code))
    command = [sys.executable, "-c", _LOAD, training, inference, stored, answer]
    subprocess.run(command, env=dict(os.environ), check=True, timeout=300)
    leaves = [t.clone().requires_grad_() for t in (x, w, b)]
    expected = _layer(*leaves)
    expected.square().sum().backward()
    torch.testing.assert_close(
        torch.load(answer, weights_only=True),
        [*_sorted_rows(x, w), expected.detach(), *[leaf.grad for leaf in leaves]],
    )


def test_support_code_comes_back_as_it_was(code: SupportCode) -> None:
    assert decode_support(encode(code)) == code


@pytest.mark.usefixtures("nothing_provided")
def test_provided_code_is_loaded_in_place_of_compiling(code: SupportCode, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torchkiln.codegen.llvm.support.compile_module", lambda *_: pytest.fail("it was compiled"))
    support.provide(code)
    for module in code.modules:
        for name in module.exports:
            assert support.address(name) is not None
    assert support.address("kiln_no_such_function") is None


@pytest.mark.usefixtures("nothing_provided")
@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda c: replace(c, interface=_with(c, torch="2.9.0 0000")), "compiled for torch 2.9.0 0000"),
        (lambda c: replace(c, interface=_with(c, python="cpython-39")), "compiled for python cpython-39"),
        (lambda c: replace(c, interface=_with(c, torchkiln="0.0.1")), "compiled for torchkiln 0.0.1"),
        (lambda c: replace(c, interface=()), "compile it again"),
        (lambda c: replace(c, features=f"{c.features},+a_feature_to_come"), "processor"),
        (lambda c: replace(c, triple="aarch64-unknown-linux-gnu"), "processor"),
    ],
)
def test_code_for_another_process_is_refused(
    code: SupportCode, change: Callable[[SupportCode], SupportCode], message: str
) -> None:
    with pytest.raises(ArtifactError, match=message):
        support.provide(change(code))
    assert support._provided is None


def _with(code: SupportCode, **other: str) -> tuple[tuple[str, str], ...]:
    return tuple({**dict(code.interface), **other}.items())


def test_what_is_no_support_code_is_not_decoded(code: SupportCode) -> None:
    with pytest.raises(ArtifactError, match="something else"):
        decode_support(encode(Artifact(b"", b"", EntryInfo((), (), (), (), 0, 0, ()), ())))
    for changed in ({"cpu": 3}, {"interface": (("torch",),)}, {"modules": (b"code",)}):
        with pytest.raises(TypeError):
            replace(code, **changed)
    for module in ({"code": "text"}, {"exports": (1,)}):
        with pytest.raises(TypeError):
            replace(code.modules[0], **module)


class _Entries:
    def __init__(self) -> None:
        self.values: dict[str, bytes] = {}
        self.stored = 0

    def get(self, key: CacheKey) -> bytes | None:
        return self.values.get(key.digest)

    def put(self, key: CacheKey, value: bytes) -> None:
        self.values[key.digest] = value
        self.stored += 1


def _provide_anew(entries: _Entries, source: str = "digest") -> SupportCode:
    support._provided = None
    support.provide_from(entries, TARGET, source)
    assert support._provided is not None
    return support._provided


@pytest.mark.usefixtures("nothing_provided")
def test_a_cache_has_what_was_compiled_for_the_next_process(code: SupportCode) -> None:
    entries = _Entries()
    assert _provide_anew(entries).modules == ()
    first, seldom = code.modules[:2]
    for module, stored in ((first, (first,)), (seldom, (first, seldom)), (first, (first, seldom))):
        assert support._module_with(module.exports[0]) == module
        assert _provide_anew(entries).modules == stored
    assert entries.stored == 2
    assert _provide_anew(entries, source="another digest").modules == ()


@pytest.mark.usefixtures("nothing_provided")
def test_damaged_code_and_that_of_others_is_compiled_again(code: SupportCode) -> None:
    key = support.support_key(TARGET, "digest").digest
    for damaged in (b"", encode(code)[:-1], encode(replace(code, interface=_with(code, torch="2.9.0 0000")))):
        entries = _Entries()
        entries.values[key] = damaged
        assert _provide_anew(entries).modules == ()
        assert support._module_with("kiln_arena_clear") == code.module_with("kiln_arena_clear")
        assert entries.stored == 1


def test_code_depends_on_no_more_of_a_target_than_its_key_has(code: SupportCode) -> None:
    flags = {"float32_matmul": "tf32", "deterministic": True, "default_dtype": "float64"}
    same = replace(TARGET, sleef=frozenset(), blas=frozenset(), sleef_bits=0, **flags)
    assert support.support_key(same, "digest").digest == support.support_key(TARGET, "digest").digest
    assert compile_support(same) == code


def test_every_name_is_in_one_module(code: SupportCode) -> None:
    names = [name for module in code.modules for name in module.exports]
    assert len(names) == len(set(names))
    assert all(code.module_with(name) in code.modules for name in names)
    assert isinstance(code.module_with("kiln_arena_clear"), SupportModule)
