"""All there is to measure, by name: programs, and the operators of the database."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache

from benchmarks.operators.entry import Entry
from benchmarks.operators.programs import PROGRAMS

PROGRAMS_GROUP, DATABASE_GROUP = "programs", "database"


@cache
def _database() -> Mapping[str, Entry]:
    """Imported where it is asked for: that takes seconds."""
    from benchmarks.operators import database

    return database.entries()


def entry_of(name: str) -> Entry:
    """Raises ``LookupError`` for a name that is none."""
    found = PROGRAMS.get(name) or _database().get(name)
    if found is None:
        raise LookupError(f"no entry is called {name}")
    return found


def chosen(only: str) -> list[Entry]:
    """Entries that these words with commas stand for, in order: a group, a name, or else a part of names.

    All of them without words. Raises ``LookupError`` for a word that stands for none.
    """
    words = [word.strip() for word in only.split(",") if word.strip()] or [PROGRAMS_GROUP, DATABASE_GROUP]
    found: dict[str, Entry] = {}
    for word in words:
        for entry in _entries(word):
            found[entry.name] = entry
    return list(found.values())


def _entries(word: str) -> Sequence[Entry]:
    if word == PROGRAMS_GROUP:
        return list(PROGRAMS.values())
    if word == DATABASE_GROUP:
        return list(_database().values())
    if word in PROGRAMS:
        return [PROGRAMS[word]]
    if word in _database():
        return [_database()[word]]
    found = [entry for name, entry in (*PROGRAMS.items(), *_database().items()) if word in name]
    if not found:
        raise LookupError(f"no entry is called {word}")
    return found
