"""Targets as text and back: JSON, read strictly."""

from __future__ import annotations

import json
from dataclasses import asdict, fields
from typing import Any

from torchkiln.errors import ArtifactError
from torchkiln.target.card import Card
from torchkiln.target.target import Target


def write_target(target: Target) -> str:
    """The target as JSON; equal targets give equal text."""
    values = {field.name: getattr(target, field.name) for field in fields(target)}
    return json.dumps(values, default=_plain, separators=(",", ":"))


def read_target(text: str | bytes) -> Target:
    """The target that :func:`write_target` made this text of; :class:`ArtifactError` where there is none."""
    try:
        values = json.loads(text)
        if type(values) is not dict or values.keys() != {field.name for field in fields(Target)}:
            raise ValueError("its fields are not those of a target")
        return Target(**{field.name: _read(values[field.name], str(field.type)) for field in fields(Target)})
    except (ValueError, TypeError, RecursionError) as error:
        raise ArtifactError(f"This description of a target is damaged ({error}); compile it again.") from error


def _plain(value: Any) -> Any:
    return asdict(value) if isinstance(value, Card) else sorted(value)


def _read(value: Any, kind: str) -> Any:
    if kind == "Card | None":
        return None if value is None else _read_card(value)
    if kind == "frozenset[str]":
        if type(value) is list and all(type(item) is str for item in value):
            return frozenset(value)
    elif type(value).__name__ == kind:
        return value
    raise ValueError(f"{value!r} is no {kind}")


def _read_card(value: Any) -> Card:
    known = {field.name: str(field.type) for field in fields(Card)}
    if type(value) is dict and value.keys() == known.keys():
        return Card(**{name: _read(value[name], kind) for name, kind in known.items()})
    raise ValueError(f"{value!r} is no card")
