"""Calling conventions as bytes: what is read back is what was written."""

from __future__ import annotations

from collections import namedtuple
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils import _pytree as pytree

from torchkiln.artifact import Artifact, CallingConvention, CompiledFunction, decode, decode_function, encode
from torchkiln.artifact.artifact import EntryInfo
from torchkiln.artifact.convention import Result, Tangent
from torchkiln.errors import ArtifactError

_GRAPH = Artifact(b"code", b"", EntryInfo((), (), (), (), 0, 0, ()), ())

_NESTS = st.recursive(
    st.just(0),
    lambda inner: st.lists(inner, max_size=3)
    | st.lists(inner, max_size=3).map(tuple)
    | st.dictionaries(st.text(max_size=3) | st.integers(), inner, max_size=3),
    max_leaves=8,
)
_SIZES = st.lists(st.integers(0, 2**62), max_size=4).map(tuple)
_CONVENTIONS = st.builds(
    CallingConvention,
    inputs=st.integers(0, 9),
    results=st.lists(st.builds(Result, st.booleans(), _SIZES), max_size=3).map(tuple),
    structure=_NESTS.map(pytree.tree_structure),
    mutated=_SIZES,
    consumed=st.none() | _SIZES,
    saved_numbers=st.integers(0, 5),
    tangents=st.lists(
        st.builds(Tangent, st.integers(0, 3), _SIZES, _SIZES, st.sampled_from([None, torch.channels_last])), max_size=2
    ).map(tuple),
    wrapped=st.text(max_size=5),
)


@settings(deadline=None, max_examples=150, derandomize=True)
@given(_CONVENTIONS)
def test_a_convention_comes_back_as_it_was(convention: CallingConvention) -> None:
    found = decode_function(encode(CompiledFunction(convention, _GRAPH)))
    assert found.convention == convention
    assert found.forward.step_code == b"code"
    assert found.backward is None


Pair = namedtuple("Pair", "first second")


@pytest.mark.parametrize("results", [Pair(0, 0), {1.5: 0}, {"a": Pair(0, 0)}])
def test_structures_of_other_types_are_refused(results: Any) -> None:
    function = CompiledFunction(CallingConvention(0, (), pytree.tree_structure(results)), _GRAPH)
    with pytest.raises(ArtifactError, match="cannot be stored"):
        encode(function)


def test_a_graph_is_not_taken_for_a_function_nor_the_other_way() -> None:
    function = CompiledFunction(CallingConvention(0, (), pytree.tree_structure(())), _GRAPH)
    with pytest.raises(ArtifactError, match="something else"):
        decode(encode(function))
    with pytest.raises(ArtifactError, match="something else"):
        decode_function(encode(_GRAPH))
