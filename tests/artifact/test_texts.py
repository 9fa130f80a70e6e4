"""Lines of the user's program are data beside the code: the same graph has the same code wherever it was written."""

from __future__ import annotations

import importlib.util
import traceback
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from torchkiln.artifact import Artifact, decode, encode, with_sources
from torchkiln.artifact.artifact import EntryInfo
from torchkiln.artifact.calls import Body, HigherOrderCall
from torchkiln.artifact.texts import Description
from torchkiln.recorder import Record, listen
from torchkiln.runtime.executable import load

Function = Callable[..., Tensor]

_STEP = """import torch
def step(x, w, positions, rows, others):
    y = x @ w
    z = y.gather(1, positions)
    e = torch.nn.functional.embedding(rows, w)
    g = torch.nn.functional.embedding(others, x)
    return z.sort()[0] * 2 + e.sum() + g.sum()
"""
_ON_ONE_LINE = """from torch.nn.functional import embedding as F
def step(x, w, positions, rows, others):
    y = x @ w; z = y.gather(1, positions); e = F(rows, w); g = F(others, x); return z.sort()[0] * 2 + e.sum() + g.sum()
"""
_COND = """import torch
def step(x, w, positions, rows, others):
    def gathered(x, positions):
        return x.gather(1, positions) + 1
    def negated(x, positions):
        return -x
    return torch.cond(x.sum() > 0, gathered, negated, (x, positions)) @ w
"""
_LATER = "# A line that\n# moves all others.\n\n"

X, W = torch.linspace(0, 1, 32 * 96).reshape(32, 96), torch.linspace(-1, 2, 96 * 96).reshape(96, 96)
POSITIONS = torch.arange(96).flip(0).expand(32, 96).contiguous()
ROWS, OTHERS = torch.tensor([0, 95]), torch.tensor([31])
INPUTS = X, W, POSITIONS, ROWS, OTHERS
# What is bad in the inputs, and how the line that finds it begins.
BAD = {
    "z = y.gather": (X, W, POSITIONS + 1, ROWS, OTHERS),
    "e = torch.nn": (X, W, POSITIONS, ROWS + 1, OTHERS),
    "g = torch.nn": (X, W, POSITIONS, ROWS, OTHERS + 1),
}


def _written(path: Path, text: str) -> Function:
    """The function ``step`` of a module with this text."""
    path.write_text(text)
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.step  # type: ignore[no-any-return]


def _artifacts(function: Function, *inputs: Tensor, train: bool = False, **options: Any) -> list[Artifact]:
    """Those of the graphs that a step makes: of inference, or of forward and backward."""
    found: list[Record] = []
    torch._dynamo.reset()
    compiled = torch.compile(function, backend="kiln", fullgraph=True, options={"fallback": False, **options})
    with listen(found.append):
        result = compiled(*(t.clone().requires_grad_(train and t.is_floating_point()) for t in inputs))
        if train:
            result.sum().backward()
    return [record.value.artifact for record in found if record.stage == "code"]


def _failure(artifact: Artifact, inputs: tuple[Tensor, ...]) -> str:
    """The error of a call, with its notes."""
    with pytest.raises((IndexError, RuntimeError)) as caught:
        load(artifact)(list(inputs))
    return "".join(traceback.format_exception_only(caught.value))


def _line(path: Path, code: str) -> str:
    """How messages name the line of a file that begins with ``code``."""
    lines = path.read_text().splitlines()
    (number,) = (k for k, line in enumerate(lines, 1) if line.strip().startswith(code))
    return f"{path}:{number} in "


@pytest.mark.parametrize("train", [False, True], ids=["inference", "training"])
def test_code_does_not_depend_on_where_a_graph_was_written(train: bool, tmp_path: Path) -> None:
    texts = {"first": _STEP, "second": _LATER + _STEP, "third": _ON_ONE_LINE}
    first, second, third = (
        _artifacts(_written(tmp_path / f"{name}.py", text), *INPUTS, train=train)
        for name, text in texts.items()
    )
    assert len(first) == (2 if train else 1)
    for one, *others in zip(first, second, third, strict=True):
        assert one.sources
        for other in others:
            assert other.step_code == one.step_code
            assert other.kernel_code == one.kernel_code
            assert set(other.sources).isdisjoint(one.sources)
            assert [(t.what, t.nodes) for t in other.texts] == [(t.what, t.nodes) for t in one.texts]


@pytest.mark.parametrize("train", [False, True], ids=["inference", "training"])
@pytest.mark.parametrize("code", BAD)
def test_messages_name_the_line_of_their_own_program(code: str, train: bool, tmp_path: Path) -> None:
    paths = tmp_path / "first.py", tmp_path / "second.py"
    first, second = (
        _artifacts(_written(path, text), *INPUTS, train=train)[0]
        for path, text in zip(paths, (_STEP, _LATER + _STEP), strict=True)
    )
    lines = [_line(path, code) for path in paths]
    moved = with_sources(first, dict(zip(first.sources, second.sources, strict=True)))
    for artifact, line in ((first, lines[0]), (second, lines[1]), (moved, lines[1])):
        for stored in (artifact, decode(encode(artifact))):
            message = _failure(stored, BAD[code])
            assert line in message
            assert message.count("in step: ") == 1
            torch.testing.assert_close(
                load(stored)(list(INPUTS))[0], _written(paths[0], _STEP)(*INPUTS)
            )


def test_lines_in_bodies_move_too(tmp_path: Path) -> None:
    paths = tmp_path / "first.py", tmp_path / "second.py"
    first, second = (
        _artifacts(_written(path, text), *INPUTS)[0]
        for path, text in zip(paths, (_COND, _LATER + _COND), strict=True)
    )
    bodies = [[b.artifact for c in a.entry.python_calls for b in getattr(c, "bodies", ())] for a in (first, second)]
    assert [body.step_code for body in bodies[0]] == [body.step_code for body in bodies[1]]
    lines = {
        old: new
        for a, b in zip((first, *bodies[0]), (second, *bodies[1]), strict=True)
        for old, new in zip(a.sources, b.sources, strict=True)
    }
    moved = decode(encode(with_sources(first, lines)))
    for artifact, path in ((first, paths[0]), (second, paths[1]), (moved, paths[1])):
        message = _failure(artifact, (X, POSITIONS + 1, W))
        assert _line(path, "return x.gather") in message  # in the body, and the call around it
        assert _line(path, "return torch.cond") in message
        assert str(paths[path is paths[0]]) not in message


def test_a_body_that_several_calls_share_stays_one_when_lines_move() -> None:
    entry = EntryInfo((), (), (), (), 0, 0, ())
    body = Body(Artifact(b"", b"", entry, (), (Description("aten.mm.default", ("mm",), 1),), ("a.py:1", "a.py:2")), ())
    call = HigherOrderCall("cond", (body, body), 0, 0, (), 1, where=0)
    outer = Artifact(b"", b"", replace(entry, python_calls=(call,)), (), (Description("cond", (), 0),), ("a.py:3",))
    moved = with_sources(outer, {"a.py:2": "b.py:20", "a.py:3": "b.py:30"})
    assert moved.texts[0].text(moved.sources) == "cond, b.py:30"
    first, second = moved.entry.python_calls[0].bodies
    assert first is second
    assert first.artifact.sources == ("a.py:1", "b.py:20")
    assert first.artifact.texts[0].text(first.artifact.sources) == "aten.mm.default (mm), b.py:20"
    assert (outer.sources, body.artifact.sources) == (("a.py:3",), ("a.py:1", "a.py:2"))


def test_lines_are_stored_once(tmp_path: Path) -> None:
    (artifact,) = _artifacts(_written(tmp_path / "first.py", _ON_ONE_LINE), *INPUTS)
    assert len(artifact.texts) > 4
    assert len(artifact.sources) == 1


def test_a_profile_names_lines_by_the_same_table(tmp_path: Path) -> None:
    path = tmp_path / "first.py"
    (artifact,) = _artifacts(_written(path, _STEP), *INPUTS, profile=True)
    (matmul,) = (step for step in artifact.entry.timed_steps if step.name.startswith("aten.mm"))
    assert matmul.source is not None
    assert artifact.sources[matmul.source].startswith(_line(path, "y = x @ w"))


def test_the_printed_code_has_the_texts_as_comments(tmp_path: Path) -> None:
    found: list[Record] = []
    with listen(found.append):
        torch.compile(_written(tmp_path / "first.py", _STEP), backend="kiln")(*INPUTS)
    (text,) = (record.value.text for record in found if record.stage == "code")
    assert f"; 'aten.mm.default (mm), {_line(tmp_path / 'first.py', 'y = x @ w')}step: y = x @ w'" in text
