"""Keys: all that a cached value depends on, as named fields of text."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property


@dataclass(frozen=True)
class Difference:
    """A field that two keys do not agree in; None where one of them does not have it."""

    field: str
    ours: str | None
    theirs: str | None


def digest_of(content: bytes) -> str:
    """The digest of the key with this content."""
    return hashlib.sha256(content).hexdigest()


@dataclass(frozen=True)
class CacheKey:
    """What an entry is of (``kind``: "function", "graph", "target", ...) and all that its value depends on.

    ``fields`` are text by name, of any length. Equal keys are equal across processes and machines: no field holds an
    address, a path of the user's or anything else that differs between two runs of one program.
    """

    kind: str
    fields: Mapping[str, str]

    @cached_property
    def content(self) -> bytes:
        """The whole key as bytes; equal for equal keys."""
        return json.dumps([self.kind, sorted(self.fields.items())], separators=(",", ":"), ensure_ascii=True).encode()

    @cached_property
    def digest(self) -> str:
        """64 hexadecimal digits: the name of the entry."""
        return digest_of(self.content)

    def differences(self, other: CacheKey) -> Iterator[Difference]:
        """The fields in which the two differ, in this key's order, then those that only ``other`` has."""
        if self.kind != other.kind:
            yield Difference("kind", self.kind, other.kind)
        for name in (*self.fields, *(name for name in other.fields if name not in self.fields)):
            ours, theirs = self.fields.get(name), other.fields.get(name)
            if ours != theirs:
                yield Difference(name, ours, theirs)
