"""Targets as text and back: JSON, read strictly."""

from __future__ import annotations

import json
from dataclasses import fields
from typing import Any

from torchkiln.errors import ArtifactError
from torchkiln.target.target import Target


def write_target(target: Target) -> str:
    """The target as JSON; equal targets give equal text."""
    values = {field.name: getattr(target, field.name) for field in fields(target)}
    return json.dumps(values, default=sorted, separators=(",", ":"))


def read_target(text: str | bytes) -> Target:
    """The target that :func:`write_target` made this text of; :class:`ArtifactError` where there is none."""
    try:
        values = json.loads(text)
        if type(values) is not dict or values.keys() != {field.name for field in fields(Target)}:
            raise ValueError("its fields are not those of a target")
        return Target(**{field.name: _read(values[field.name], str(field.type)) for field in fields(Target)})
    except (ValueError, TypeError, RecursionError) as error:
        raise ArtifactError(f"This description of a target is damaged ({error}); compile it again.") from error


def _read(value: Any, kind: str) -> Any:
    if kind == "frozenset[str]":
        if type(value) is list and all(type(item) is str for item in value):
            return frozenset(value)
    elif type(value).__name__ == kind:
        return value
    raise ValueError(f"{value!r} is no {kind}")
