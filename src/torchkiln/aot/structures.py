"""Structures of arguments and results as JSON, and back: nested tuples, lists and dictionaries."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

from torch.utils import _pytree as pytree

from torchkiln.errors import PackageError

_SEQUENCES: dict[str, type] = {"tuple": tuple, "list": list}
_MAPPINGS: dict[str, type] = {"dict": dict, "OrderedDict": OrderedDict}


def structure_to_json(structure: pytree.TreeSpec, what: str) -> Any:
    """``what`` names the whole in the error for a structure that cannot be stored: "arguments" or "results"."""
    return _to_json(pytree.tree_unflatten([None] * structure.num_leaves, structure), what)


def structure_from_json(tree: Any) -> pytree.TreeSpec:
    """Raises ValueError, TypeError or LookupError for what :func:`structure_to_json` does not write."""
    return pytree.tree_structure(_from_json(tree))


def _to_json(value: Any, what: str) -> Any:
    if value is None:
        return None
    kind = type(value)
    if kind in _SEQUENCES.values():
        return {kind.__name__: [_to_json(item, what) for item in value]}
    if kind in _MAPPINGS.values() and all(type(key) in (str, int) for key in value):
        return {kind.__name__: [[key, _to_json(item, what)] for key, item in value.items()]}
    raise PackageError(
        f"The {what} hold a {kind.__module__}.{kind.__qualname__}, which a package cannot store: wrap the model in one"
        " that takes and returns tuples, lists and dictionaries with text or integers as keys."
    )


def _from_json(tree: Any) -> Any:
    if tree is None:
        return None
    ((kind, items),) = tree.items()
    if kind in _SEQUENCES:
        return _SEQUENCES[kind](_from_json(item) for item in items)
    return _MAPPINGS[kind]((key, _from_json(item)) for key, item in items)
