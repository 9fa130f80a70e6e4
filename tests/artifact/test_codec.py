"""Artifacts as bytes: what is read back is what was written, and what is damaged or foreign is refused."""

from __future__ import annotations

import json
import math
import struct
from contextlib import suppress
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from torchkiln.artifact import Artifact, decode, encode
from torchkiln.artifact.artifact import EntryInfo, OutputSource
from torchkiln.artifact.calls import Body, HigherOrderCall, NumberArgument, OperatorCall, TensorArgument
from torchkiln.errors import ArtifactError


def _entry(*calls: OperatorCall | HigherOrderCall, values: tuple[object, ...] = ()) -> EntryInfo:
    return EntryInfo(
        inputs=("tensor", "number"),
        python_calls=calls,
        values=values,
        outputs=(OutputSource("tensor", 0),),
        tensor_outputs=1,
        number_outputs=0,
        extern_calls=(("aten.mm.default", "typed"),),
    )


def _artifact(*constants: torch.Tensor, values: tuple[object, ...] = ()) -> Artifact:
    return Artifact(b"\x7fELF code", b"", _entry(values=values), constants)


_PLAIN = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.text()
    | st.floats()
    | st.complex_numbers()
    | st.binary()
    | st.sampled_from([torch.float32, torch.bool, torch.strided, torch.channels_last, torch.device("cpu")])
    | st.builds(TensorArgument, st.integers(0, 9))
    | st.builds(NumberArgument, st.integers(0, 9)),
    lambda inner: st.lists(inner, max_size=4).map(tuple),
    max_leaves=12,
)


def _same(a: Any, b: Any) -> bool:
    """Equal in type and to the bit: 0.0 is not -0.0, NaN is NaN, and 1 is neither 1.0 nor True."""
    if type(a) is not type(b):
        return False
    if isinstance(a, tuple):
        return len(a) == len(b) and all(map(_same, a, b))
    if isinstance(a, float):
        return (math.isnan(a) and math.isnan(b)) or (a == b and math.copysign(1, a) == math.copysign(1, b))
    if isinstance(a, complex):
        return _same(a.real, b.real) and _same(a.imag, b.imag)
    return bool(a == b)


@settings(deadline=None, max_examples=150, derandomize=True)
@given(st.lists(_PLAIN, max_size=4).map(tuple))
def test_static_arguments_come_back_as_they_were(arguments: tuple[Any, ...]) -> None:
    call = OperatorCall("aten::sort", "stable", arguments, 2, where=0)
    found = decode(encode(Artifact(b"", b"", _entry(call), ())))
    assert _same(found.entry.python_calls[0].arguments, arguments)
    assert replace(found.entry, python_calls=()) == replace(_entry(call), python_calls=())


@pytest.mark.parametrize(
    "tensor",
    [
        torch.tensor(3.5),
        torch.empty(0, 4),
        torch.arange(24.0).view(4, 6)[1:, ::2],
        torch.ones(1).expand(5, 3),
        torch.randn(2, 3, 4, 4).to(memory_format=torch.channels_last),
        torch.tensor([0.0, -0.0, math.nan, math.inf]).to(torch.bfloat16),
        torch.tensor([True, False]),
        torch.randn(3, dtype=torch.complex64),
        torch.tensor([-(2**63), 2**63 - 1]),
    ],
    ids=["number", "empty", "strided", "expanded", "channels last", "bfloat16", "bool", "complex", "int64"],
)
def test_constants_keep_values_and_strides(tensor: torch.Tensor) -> None:
    (found,) = decode(encode(_artifact(tensor))).constants
    assert (found.dtype, found.shape, found.stride()) == (tensor.dtype, tensor.shape, tensor.stride())
    assert torch.equal(torch.view_as_real(found) if found.is_complex() else found.float().nan_to_num(7.0),
                       torch.view_as_real(tensor) if tensor.is_complex() else tensor.float().nan_to_num(7.0))


def test_constants_that_share_memory_share_it_again() -> None:
    whole = torch.arange(6.0)
    found, part = decode(encode(_artifact(whole, whole[2:4]))).constants
    part[0] = 100
    assert found.tolist() == [0, 1, 100, 3, 4, 5]
    assert whole[2] == 2


@pytest.mark.parametrize(
    "constant",
    [torch.eye(3).to_sparse(), torch.empty(2, device="meta"), torch.randn(2, dtype=torch.complex64).conj()],
    ids=["sparse", "meta", "conjugated"],
)
def test_a_constant_that_is_no_plain_memory_is_refused(constant: torch.Tensor) -> None:
    with pytest.raises(ArtifactError, match="cannot be stored"):
        encode(_artifact(constant))


def test_an_object_that_is_no_plain_data_is_refused() -> None:
    with pytest.raises(ArtifactError, match=r"holds a torch\._C\.Generator"):
        encode(_artifact(values=(torch.Generator(),)))


def test_damage_of_any_kind_is_an_artifact_error() -> None:
    data = encode(_artifact(torch.arange(4.0), values=(1.5, None, "text")))
    for length in range(len(data)):
        with pytest.raises(ArtifactError):
            decode(data[:length])
    with pytest.raises(ArtifactError, match="damaged"):
        decode(data + b"more")


@settings(deadline=None, max_examples=300, derandomize=True)
@given(st.data())
def test_changed_bytes_give_an_artifact_or_an_artifact_error(data: st.DataObject) -> None:
    good = bytearray(encode(_artifact(torch.arange(4.0), values=(1.5, None, "text"))))
    for _ in range(data.draw(st.integers(1, 3))):
        good[data.draw(st.integers(0, len(good) - 1))] = data.draw(st.integers(0, 255))
    with suppress(ArtifactError):
        assert isinstance(decode(bytes(good)), Artifact)


def _with_header(header: object) -> bytes:
    text = json.dumps(header).encode()
    return struct.pack("<4sIQ", b"KILN", 1, len(text)) + text


@pytest.mark.parametrize(
    "tree",
    [
        {"type": "eval", "source": "1"},
        {"type": "OutputSource", "kind": "tensor", "number": 0},
        {"code": "print(1)"},
        {"__init__": 1},
        {"float": "1.0", "int": 1},
        {"tensor": {"storage": 0, "dtype": "float32", "shape": [1], "strides": [1], "offset": 0}},
        [],
    ],
    ids=str,
)
def test_a_header_that_says_something_else_is_refused(tree: object) -> None:
    with pytest.raises(ArtifactError):
        decode(_with_header({"blobs": [], "artifact": tree}))


def test_a_tensor_beyond_its_memory_is_refused() -> None:
    data = encode(_artifact(torch.arange(4.0)))
    with pytest.raises(ArtifactError, match="damaged"):
        decode(data.replace(b'"shape":[4]', b'"shape":[5]'))


def test_another_version_says_so() -> None:
    data = bytearray(encode(_artifact()))
    data[4] = 99
    with pytest.raises(ArtifactError, match="format 99"):
        decode(bytes(data))


def test_a_body_that_several_calls_share_is_stored_once() -> None:
    inner = Body(Artifact(b"inner", b"", _entry(), ()), ())
    outer_call = HigherOrderCall("cond", (inner, inner), 0, 0, (), 1, where=0)
    outer = Body(Artifact(b"x" * 10_000, b"", _entry(outer_call), ()), (None,))
    calls = tuple(HigherOrderCall("map", (outer,), 0, 0, (), 1, where) for where in (0, 1))
    stored = encode(Artifact(b"", b"", _entry(*calls), ()))
    assert len(stored) < 20_000
    first, second = (call.bodies[0] for call in decode(stored).entry.python_calls)
    assert first is second
    nested = first.artifact.entry.python_calls[0].bodies
    assert nested[0] is nested[1]
    assert nested[0].artifact.step_code == b"inner"
