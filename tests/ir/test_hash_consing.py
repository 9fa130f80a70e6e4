"""Hash-consing: one object for equal arguments, filled once, alive no longer than its users."""

from __future__ import annotations

import gc
import weakref

import pytest

from torchkiln.ir import expr, index
from torchkiln.ir.hash_consing import hash_consed


@hash_consed()
class Pair:
    """A value with a record of how often one was filled."""

    left: object
    right: object
    filled = 0

    def __post_init__(self) -> None:
        if self.left is None:
            raise ValueError("no left side")
        Pair.filled += 1


@hash_consed(key=lambda text: text.lower())
class Word:
    text: str


def test_equal_arguments_give_one_object_that_is_filled_once() -> None:
    before = Pair.filled
    first = Pair("a", (1, 2))
    assert Pair("a", (1, 2)) is first
    assert (first.left, first.right) == ("a", (1, 2))
    assert Pair.filled == before + 1
    assert Pair("a", (2, 1)) is not first


def test_a_key_says_which_arguments_are_equal() -> None:
    first = Word("Kiln")
    assert Word("kiln") is first
    assert first.text == "Kiln"
    assert Word("oven") is not first


def test_an_object_that_nobody_holds_is_freed_and_made_anew() -> None:
    held = weakref.ref(Pair("gone", 0))
    gc.collect()
    assert held() is None
    before = Pair.filled
    again = Pair("gone", 0)
    assert Pair.filled == before + 1
    assert again.left == "gone"


def test_an_object_that_could_not_be_filled_is_not_found_later() -> None:
    for _ in range(2):
        with pytest.raises(ValueError, match="no left side"):
            Pair(None, 0)


def test_classes_share_no_table() -> None:
    quotient, remainder = (made(index.of(index.Var("i", 9)), 4) for made in (index.Quotient, index.Remainder))
    assert type(quotient) is index.Quotient
    assert type(remainder) is index.Remainder


@pytest.mark.parametrize("consed", [index.Index, index.Var, index.Size, index.Quotient, index.DataIndex, expr.Op])
def test_asking_for_the_class_of_a_value_takes_no_metaclass(consed: type) -> None:
    assert type(consed) is type
