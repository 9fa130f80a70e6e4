"""Frozen dataclasses as JSON values and back, by the types of their fields. Nothing is evaluated."""

from __future__ import annotations

import dataclasses
import types
from collections.abc import Mapping
from functools import cache
from typing import Any, TypeVar, Union, get_args, get_origin, get_type_hints

from torchkiln.errors import RecordingError

_T = TypeVar("_T")


def encode(value: Any) -> Any:
    """A dataclass as a dictionary of its fields, a tuple as a list; numbers, texts and None are themselves."""
    if dataclasses.is_dataclass(value):
        return {item.name: encode(getattr(value, item.name)) for item in dataclasses.fields(value)}
    if isinstance(value, tuple):
        return [encode(item) for item in value]
    if isinstance(value, Mapping):
        return {key: encode(item) for key, item in value.items()}
    return value


def decode_versioned(kind: type[_T], content: Any, version: int) -> _T:
    """A ``kind`` from the dictionary that says it has this ``version``."""
    if not isinstance(content, dict) or "version" not in content:
        raise RecordingError("This is no recording of torchkiln.")
    if content["version"] != version:
        raise RecordingError(
            f"This recording has format {content['version']}, this version of torchkiln reads {version}; record again."
        )
    fields = {name: value for name, value in content.items() if name != "version"}
    decoded: _T = _decode(kind, fields, kind.__name__)
    return decoded


def _decode(kind: Any, value: Any, where: str) -> Any:
    if dataclasses.is_dataclass(kind):
        return _decode_fields(kind, value, where)
    origin, given = get_origin(kind), get_args(kind)
    if origin is tuple:
        if not isinstance(value, list):
            raise RecordingError(f"This recording is damaged: {where} is not a list.")
        return tuple(_decode(given[0], item, where) for item in value)
    if origin is Mapping:
        if not isinstance(value, dict):
            raise RecordingError(f"This recording is damaged: {where} is not a dictionary.")
        return {name: _decode(given[1], item, f"{where}.{name}") for name, item in value.items()}
    if origin in (Union, types.UnionType):
        return _decode_one_of(given, value, where)
    if type(value) is kind:
        return value
    if kind is float and type(value) is int:
        return float(value)
    raise RecordingError(f"This recording is damaged: {where} is not of type {kind.__name__}.")


def _decode_one_of(kinds: tuple[Any, ...], value: Any, where: str) -> Any:
    """Unions here are of plain values, or of one dataclass and None."""
    if value is None and types.NoneType in kinds:
        return None
    plain = [kind for kind in kinds if kind is type(value)]
    others = [kind for kind in kinds if kind is not types.NoneType]
    return _decode(plain[0] if plain else others[0], value, where)


def _decode_fields(kind: Any, value: Any, where: str) -> Any:
    if not isinstance(value, dict):
        raise RecordingError(f"This recording is damaged: {where} is not a dictionary.")
    hints = _hints(kind)
    if value.keys() != hints.keys():
        odd = ", ".join(sorted(value.keys() ^ hints.keys()))
        raise RecordingError(f"This recording is damaged: {where} has not the fields it must have ({odd}).")
    return kind(**{name: _decode(hint, value[name], f"{where}.{name}") for name, hint in hints.items()})


@cache
def _hints(kind: Any) -> dict[str, Any]:
    """The types of the fields, class attributes left out."""
    hints = get_type_hints(kind)
    return {item.name: hints[item.name] for item in dataclasses.fields(kind)}
