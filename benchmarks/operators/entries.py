"""All there is to measure, by name."""

from __future__ import annotations

from collections.abc import Sequence

from benchmarks.operators.entry import Entry
from benchmarks.operators.programs import PROGRAMS

GROUPS = ("programs",)


def entry_of(name: str) -> Entry:
    """Raises ``LookupError`` for a name that is none."""
    if name not in PROGRAMS:
        raise LookupError(f"no entry is called {name}")
    return PROGRAMS[name]


def chosen(only: str) -> list[Entry]:
    """Entries that these words with commas stand for, in order: a group, a name, or else a part of names.

    All of them without words. Raises ``LookupError`` for a word that stands for none.
    """
    words = [word.strip() for word in only.split(",") if word.strip()] or list(GROUPS)
    found: dict[str, Entry] = {}
    for word in words:
        for entry in _entries(word):
            found[entry.name] = entry
    return list(found.values())


def _entries(word: str) -> Sequence[Entry]:
    if word == "programs":
        return list(PROGRAMS.values())
    if word in PROGRAMS:
        return [PROGRAMS[word]]
    found = [entry for name, entry in PROGRAMS.items() if word in name]
    if not found:
        raise LookupError(f"no entry is called {word}")
    return found
