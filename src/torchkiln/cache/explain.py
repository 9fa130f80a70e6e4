"""How two keys differ, in words: sizes and settings in full, texts by their first lines that differ, lists by words."""

from __future__ import annotations

import re
from itertools import zip_longest

from torchkiln.cache.key import CacheKey, Difference

_MOST_LINES = 3
_LONGEST = 160
_BEFORE = 40  # characters of a long line that are shown before the first one that differs
_WORD = re.compile(r"[\w+.\-]+")
_FEWEST_WORDS = 3


def explain(ours: CacheKey, theirs: CacheKey) -> list[str]:
    """The fields that differ, each on a line or, for long ones, on a few; no line where the keys are equal."""
    return [line for difference in ours.differences(theirs) for line in explain_difference(difference)]


def explain_difference(difference: Difference) -> list[str]:
    """One field as lines, the first of which begins with its name."""
    name, ours, theirs = difference.field, difference.ours, difference.theirs
    if ours is None or theirs is None:
        only, value = ("first", ours) if theirs is None else ("second", theirs)
        return [f"{name}: only the {only} has it: {_cut(value or '', 0)}"]
    if "\n" in ours or "\n" in theirs:
        return _lines(name, ours.split("\n"), theirs.split("\n"))
    our_words, their_words = _split(ours), _split(theirs)
    if _is_list(our_words) and _is_list(their_words) and set(our_words) != set(their_words):
        return [_words(name, our_words, their_words)]
    return [f"{name}: {_pair(ours, theirs)}"]


def _split(text: str) -> list[str]:
    return text.replace(",", " ").split()


def _is_list(words: list[str]) -> bool:
    """Whether order and number do not matter, as for features of a processor: distinct names and nothing else."""
    distinct = len(set(words)) == len(words) >= _FEWEST_WORDS
    return distinct and all(_WORD.fullmatch(word) for word in words)


def _words(name: str, ours: list[str], theirs: list[str]) -> str:
    parts = []
    for which, words, others in (("first", ours, theirs), ("second", theirs, ours)):
        only = [word for word in words if word not in set(others)]
        if only:
            parts.append(f"only the {which} has {' '.join(only)}")
    return f"{name}: {'; '.join(parts)}"


def _lines(name: str, ours: list[str], theirs: list[str]) -> list[str]:
    pairs = [(k, a, b) for k, (a, b) in enumerate(zip_longest(ours, theirs), 1) if a != b]
    more = len(pairs) - _MOST_LINES
    return [
        f"{name}: {len(pairs)} of {max(len(ours), len(theirs))} lines differ",
        *(f"  line {k}: {_pair(a, b)}" for k, a, b in pairs[:_MOST_LINES]),
        *([f"  and {more} more"] if more > 0 else []),
    ]


def _pair(ours: str | None, theirs: str | None) -> str:
    if ours is None or theirs is None:
        only, value = ("first", ours) if theirs is None else ("second", theirs)
        return f"only the {only} has it: {_cut(value or '', 0)}"
    start = next((k for k, (a, b) in enumerate(zip(ours, theirs, strict=False)) if a != b), 0)
    return f"{_cut(ours, start)} -> {_cut(theirs, start)}"


def _cut(text: str, start: int) -> str:
    """The part of a long text around ``start``."""
    if len(text) <= _LONGEST:
        return text or "(empty)"
    begin = min(max(start - _BEFORE, 0), len(text) - _LONGEST)
    end = begin + _LONGEST
    return f"{'...' if begin else ''}{text[begin:end]}{'...' if end < len(text) else ''}"
