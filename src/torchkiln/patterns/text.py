"""Patterns as text, one call a line, and back.

    needs aten._softmax.default, aten.bmm.default, ...
    %0 = aten.transpose.int($key:4, ?, ?)
    %1 = aten.bmm.default($query:4, %0)
    ...
    return %5

``$name`` is a capture, with its rank and, where it is exclusive, an exclamation mark; ``?`` is anything; ``@3:4`` is
the last of four dimensions. Reading is by this grammar alone: nothing in a file is evaluated.
"""

from __future__ import annotations

import json
import operator
import re
from collections.abc import Iterator
from functools import lru_cache
from typing import Any

import torch

from torchkiln.errors import PatternError
from torchkiln.patterns.expressions import (
    IGNORED,
    Call,
    Capture,
    Dimension,
    Expression,
    Ignored,
    Outputs,
    target_name,
)

# A string, a keyword with its "=", a call, a capture, punctuation, or a word.
_TOKEN = re.compile(r'\s*("(?:[^"\\]|\\.)*"|\w+=|%\d+|\$!?\w+(?::\d+)?|[?\[\](),]|[^\s\[\]()=,]+)')
_WORDS = {"None": None, "True": True, "False": False}
_TORCH_CONSTANTS = (torch.dtype, torch.memory_format, torch.layout)


def write(top: Call | Outputs) -> str:
    """The text of a pattern of calls, captures, lists and constants, such as a trace gives.

    Raises PatternError for what only patterns written by hand have: alternatives, repetition, conditions on users.
    """
    lines: list[str] = []
    numbers: dict[int, str] = {}

    def shown(value: Any) -> str:
        if isinstance(value, (Ignored, Dimension)):
            return repr(value)
        if isinstance(value, Capture):
            rank = "" if value.rank is None else f":{value.rank}"
            return f"${'!' if value.exclusive else ''}{value.name}{rank}"
        if isinstance(value, Call):
            return numbers[id(value)]
        if isinstance(value, (list, tuple)):
            return "[" + ", ".join(map(shown, value)) + "]"
        if isinstance(value, str):
            return json.dumps(value)
        if value is None or isinstance(value, (bool, int, float, *_TORCH_CONSTANTS)):
            return str(value)
        raise _not_writable(value)

    for call in _in_order(top):
        arguments = [shown(value) for value in call.args] + [f"{k}={shown(v)}" for k, v in call.kwargs.items()]
        if len(call.targets) > 1 or call.users is not None or call.shared:
            raise _not_writable(call)
        lines.append(f"%{len(numbers)} = {target_name(call.targets[0])}({', '.join(arguments)})")
        numbers[id(call)] = f"%{len(numbers)}"
    roots = top.roots if isinstance(top, Outputs) else (top,)
    lines.append(f"return {', '.join(map(shown, roots))}")
    first = "needs " + ", ".join(sorted({target_name(call.targets[0]) for call in _in_order(top)}))
    return "\n".join([first, *lines]) + "\n"


def _not_writable(part: Any) -> PatternError:
    return PatternError(f"A pattern with {part!r} cannot be written as text; register it as an expression.")


def needed(text: str) -> tuple[Any, ...]:
    """The operators a graph must have for the pattern to match, from the first line alone."""
    first = text.partition("\n")[0].removeprefix("needs ")
    return tuple(operator_named(name) for name in first.split(", "))


def read(text: str) -> Call | Outputs:
    """The pattern that :func:`write` wrote."""
    values: dict[str, Any] = {}
    for line in text.splitlines()[1:]:
        name, _, call = line.partition(" = ")
        if line.startswith("return "):
            roots = [values[root] for root in line.removeprefix("return ").split(", ")]
            return Outputs(*roots) if len(roots) > 1 else roots[0]
        target, _, arguments = call.partition("(")
        values[name] = made = Call(operator_named(target))
        made.args, made.kwargs = _read_items((found[1] for found in _TOKEN.finditer(arguments)), ")", values)
    raise PatternError("The text of a pattern ends without a return; write the file again.")


def _read_items(tokens: Iterator[str], end: str, values: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The values up to ``end``, those without a keyword first."""
    args: list[Any] = []
    kwargs: dict[str, Any] = {}
    for token in tokens:
        if token == end:
            return tuple(args), kwargs
        if token[-1] == "=":
            kwargs[token[:-1]] = _read_value(next(tokens), tokens, values)
        elif token != ",":
            args.append(_read_value(token, tokens, values))
    raise PatternError(f"The text of a pattern has no {end!r} after a list; write the file again.")


def _read_value(token: str, tokens: Iterator[str], values: dict[str, Any]) -> Any:
    if token == "?":
        return IGNORED
    if token == "[":
        return list(_read_items(tokens, "]", values)[0])
    if token[0] == "@":
        return _dimension(token)
    if token[0] == "$" and token not in values:
        name, _, rank = token[1:].partition(":")
        values[token] = Capture(name.lstrip("!"), exclusive=name[0] == "!", rank=int(rank) if rank else None)
    return values[token] if token[0] in "%$" else _constant(token)


def _dimension(token: str) -> Dimension:
    found = re.fullmatch(r"@(\d+):([1-9]\d*)", token)
    if found is None:
        raise PatternError(f"The text of a pattern has {token!r}, which is no dimension; write the file again.")
    return Dimension(int(found[1]), int(found[2]))


@lru_cache(maxsize=1024)
def _constant(token: str) -> Any:
    if token in _WORDS:
        return _WORDS[token]
    if token[0] == '"':
        return json.loads(token)
    if token.startswith("torch."):
        value = getattr(torch, token.removeprefix("torch."), None)
        if isinstance(value, _TORCH_CONSTANTS):
            return value
    elif re.fullmatch(r"[+-]?\d+", token):
        return int(token)
    else:
        try:
            return float(token)
        except ValueError:
            pass
    raise PatternError(f"The text of a pattern has {token!r}, which stands for nothing; write the file again.")


@lru_cache(maxsize=1024)
def operator_named(name: str) -> Any:
    """The operator overload or built-in function that a pattern names."""
    if name == "_operator.getitem":
        return operator.getitem
    try:
        found = operator.attrgetter(name)(torch.ops)
    except AttributeError:
        found = None
    if not isinstance(found, torch._ops.OpOverload):
        raise PatternError(f"A pattern names {name!r}, which is no operator of this version of torch.")
    return found


def _in_order(top: Any) -> list[Call]:
    """The calls of a pattern, each after those it is made of."""
    found: dict[int, Call] = {}

    def visit(item: Any) -> None:
        if isinstance(item, (list, tuple)):
            for part in item:
                visit(part)
        elif isinstance(item, Expression) and id(item) not in found:
            visit(item.parts())
            if isinstance(item, Call):
                found[id(item)] = item

    visit(top)
    return list(found.values())
