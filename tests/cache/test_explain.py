"""How two keys differ: the fields, and in long ones the lines or words."""

from __future__ import annotations

import pytest

from torchkiln.cache import CacheKey
from torchkiln.cache.explain import explain


def _explained(ours: str, theirs: str) -> list[str]:
    same = {"torch": "2.13.0"}
    return explain(CacheKey("graph", {"field": ours, **same}), CacheKey("graph", {"field": theirs, **same}))


@pytest.mark.parametrize(
    ("ours", "theirs", "expected"),
    [
        ("a", "a", []),
        ("64", "128", ["field: 64 -> 128"]),
        ("", "128", ["field: (empty) -> 128"]),
        ("[2, 3, 4]", "[2, 5, 4]", ["field: [2, 3, 4] -> [2, 5, 4]"]),
        ("avx avx2 fma", "avx avx2 fma avx512f", ["field: only the second has avx512f"]),
        ("+avx +avx2 +fma", "+avx +sse +bmi", ["field: only the first has +avx2 +fma; only the second has +sse +bmi"]),
        ("avx avx2 fma", "fma avx avx2", ["field: avx avx2 fma -> fma avx avx2"]),
        (
            "one\ntwo\nthree",
            "one\n2\nthree\nfour",
            ["field: 2 of 4 lines differ", "  line 2: two -> 2", "  line 4: only the second has it: four"],
        ),
        ("same\n" + "a\n" * 9, "same\n" + "b\n" * 9, ["field: 9 of 11 lines differ", *["  line"] * 3, "  and 6 more"]),
    ],
)
def test_a_field_is_explained_by_what_it_is(ours: str, theirs: str, expected: list[str]) -> None:
    found = _explained(ours, theirs)
    assert len(found) == len(expected)
    for line, beginning in zip(found, expected, strict=True):
        assert line.startswith(beginning)


def test_of_a_long_line_the_part_that_differs_is_shown() -> None:
    (line,) = _explained("x" * 5000 + "size 3" + "y" * 5000, "x" * 5000 + "size 4" + "y" * 5000)
    assert len(line) < 400
    assert "size 3" in line
    assert "size 4" in line


def test_fields_that_one_has_alone_and_kinds_are_named() -> None:
    first, second = CacheKey("graph", {"a": "1", "c": "3"}), CacheKey("function", {"b": "2", "c": "3"})
    assert explain(first, second) == [
        "kind: graph -> function",
        "a: only the first has it: 1",
        "b: only the second has it: 2",
    ]
