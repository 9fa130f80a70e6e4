"""Structures of arguments and results as JSON, and back: nested tuples, lists and dictionaries.

A file names no classes: results in other containers come back as the tuple or the dictionary of their parts.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from typing import Any

from torch.utils import _pytree as pytree

from torchkiln.errors import PackageError

_SEQUENCES: dict[str, type] = {"tuple": tuple, "list": list}
_MAPPINGS: dict[str, type] = {"dict": dict, "OrderedDict": OrderedDict}


def arguments_to_json(structure: pytree.TreeSpec) -> Any:
    """:class:`PackageError` for containers that a package cannot compare arguments with."""
    return _to_json(structure, "arguments")


def results_to_json(structure: pytree.TreeSpec) -> Any:
    """Named tuples as tuples, classes whose parts have names as dictionaries; :class:`PackageError` for others."""
    return _to_json(structure, "results")


def structure_from_json(tree: Any) -> pytree.TreeSpec:
    """Raises ValueError, TypeError or LookupError for what the functions above do not write."""
    return pytree.tree_structure(_from_json(tree))


def _to_json(structure: pytree.TreeSpec, what: str) -> Any:
    if structure.is_leaf():
        return None
    kind, keys = _class(structure), structure.context
    children = [_to_json(child, what) for child in structure.children()]
    if kind in _SEQUENCES.values():
        return {kind.__name__: children}
    if kind in _MAPPINGS.values() and all(type(key) in (str, int) for key in keys):
        return {kind.__name__: _pairs(keys, children)}
    if what == "results":
        if issubclass(kind, tuple):
            return {"tuple": children}
        names = _names_of_parts(structure)
        if names is not None:
            return {"dict": _pairs(names, children)}
    raise PackageError(
        f"The {what} hold a {kind.__module__}.{kind.__qualname__}, which a package cannot store: wrap the model in one"
        " that takes and returns tuples, lists and dictionaries with text or integers as keys."
    )


def _pairs(keys: Sequence[str | int], children: Sequence[Any]) -> list[list[Any]]:
    return [[key, child] for key, child in zip(keys, children, strict=True)]


def _names_of_parts(structure: pytree.TreeSpec) -> Sequence[str] | None:
    """The names that a registered class gives its parts; None if it gives none.

    Classes of ``transformers`` list the names, those of ``torch.export.register_dataclass`` the names of fields with a
    value, then of those that are None.
    """
    context = structure.context
    fields = context[0] if isinstance(context, (list, tuple)) and len(context) == 2 else None
    return next((names for names in (context, fields) if _are_names(names, structure.num_children)), None)


def _are_names(names: Any, count: int) -> bool:
    return isinstance(names, (list, tuple)) and len(names) == count and all(type(name) is str for name in names)


def _class(structure: pytree.TreeSpec) -> type:
    """The container's class: all named tuples are of one kind, and say theirs in the context."""
    kind: type = structure.context if pytree.is_namedtuple_class(structure.context) else structure.type
    return kind


def _from_json(tree: Any) -> Any:
    if tree is None:
        return None
    ((kind, items),) = tree.items()
    if kind in _SEQUENCES:
        return _SEQUENCES[kind](_from_json(item) for item in items)
    return _MAPPINGS[kind]((key, _from_json(item)) for key, item in items)
