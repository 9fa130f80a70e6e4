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

_TOKEN = re.compile(r'\s*("(?:[^"\\]|\\.)*"|%\d+|\$!?\w+(?::\d+)?|[?\[\]()=,]|[^\s\[\]()=,]+)')
_WORDS = {"None": None, "True": True, "False": False}
_TORCH_CONSTANTS = (torch.dtype, torch.memory_format, torch.layout)


def write(top: Call | Outputs) -> str:
    """The text of a pattern of calls, captures, lists and constants, such as a trace gives.

    Raises PatternError for what only patterns written by hand have: alternatives, repetition, conditions on users.
    """
    lines: list[str] = []
    numbers: dict[int, str] = {}

    def shown(value: Any) -> str:
        if isinstance(value, Ignored):
            return "?"
        if isinstance(value, Capture):
            rank = "" if value.rank is None else f":{value.rank}"
            return f"${'!' if value.exclusive else ''}{value.name}{rank}"
        if isinstance(value, Dimension):
            return repr(value)
        if isinstance(value, Call):
            return numbers[id(value)]
        if isinstance(value, (list, tuple)):
            return "[" + ", ".join(map(shown, value)) + "]"
        if isinstance(value, str):
            return json.dumps(value)
        if value is None or isinstance(value, (bool, int, float, *_TORCH_CONSTANTS)):
            return str(value)
        raise PatternError(f"A pattern with {value!r} cannot be written as text; register it as an expression.")

    for call in _in_order(top):
        arguments = [shown(value) for value in call.args] + [f"{k}={shown(v)}" for k, v in call.kwargs.items()]
        if len(call.targets) > 1 or call.users is not None or call.shared:
            raise PatternError(f"A pattern with {call!r} cannot be written as text; register it as an expression.")
        lines.append(f"%{len(numbers)} = {target_name(call.targets[0])}({', '.join(arguments)})")
        numbers[id(call)] = f"%{len(numbers)}"
    roots = top.roots if isinstance(top, Outputs) else (top,)
    lines.append(f"return {', '.join(map(shown, roots))}")
    first = "needs " + ", ".join(sorted({target_name(call.targets[0]) for call in _in_order(top)}))
    return "\n".join([first, *lines]) + "\n"


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
        values[name] = _read_call(target, arguments, values)
    raise PatternError("The text of a pattern ends without a return; write the file again.")


def _read_call(target: str, arguments: str, values: dict[str, Any]) -> Call:
    tokens = _tokens(arguments)
    args: list[Any] = []
    kwargs: dict[str, Any] = {}
    token = next(tokens)
    while token != ")":
        following = next(tokens)
        if following == "=":
            kwargs[token] = _read_value(next(tokens), tokens, values)
            following = next(tokens)
        elif token == "[":
            args.append(_read_list(following, tokens, values))
            following = next(tokens)
        else:
            args.append(_read_value(token, tokens, values))
        token = next(tokens) if following == "," else following
    call = Call(operator_named(target))
    call.args, call.kwargs = tuple(args), kwargs
    return call


def _read_value(token: str, tokens: Iterator[str], values: dict[str, Any]) -> Any:
    if token == "?":
        return IGNORED
    if token[0] == "%":
        return values[token]
    if token[0] == "$":
        if token not in values:
            name, _, rank = token[1:].partition(":")
            values[token] = Capture(name.lstrip("!"), exclusive=name[0] == "!", rank=int(rank) if rank else None)
        return values[token]
    if token == "[":
        return _read_list(next(tokens), tokens, values)
    if token[0] == "@":
        return _dimension(token)
    return _constant(token)


def _read_list(token: str, tokens: Iterator[str], values: dict[str, Any]) -> list[Any]:
    items: list[Any] = []
    while token != "]":
        items.append(_read_value(token, tokens, values))
        token = next(tokens)
        if token == ",":
            token = next(tokens)
    return items


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
        import operator

        return operator.getitem
    try:
        namespace, packet, overload = name.split(".")
        found = getattr(getattr(getattr(torch.ops, namespace), packet), overload)
    except (AttributeError, ValueError):
        raise PatternError(
            f"A pattern names the operator {name!r}, which this version of torch does not have."
        ) from None
    if not isinstance(found, torch._ops.OpOverload):
        raise PatternError(f"A pattern names {name!r}, which is not an operator.")
    return found


def _tokens(text: str) -> Iterator[str]:
    return (found.group(1) for found in _TOKEN.finditer(text))


def _in_order(top: Expression) -> list[Call]:
    """The calls of a pattern, each after those it is made of."""
    found: dict[int, Call] = {}
    entered: set[int] = set()
    pending: list[tuple[Any, bool]] = [(top, False)]
    while pending:
        item, done = pending.pop()
        if isinstance(item, (list, tuple)):
            pending.extend((part, False) for part in reversed(item))
        elif not isinstance(item, Expression):
            continue
        elif done:
            if isinstance(item, Call):
                found.setdefault(id(item), item)
        elif id(item) not in entered:
            entered.add(id(item))
            pending.append((item, True))
            pending.extend((part, False) for part in reversed(item.parts()))
    return list(found.values())
