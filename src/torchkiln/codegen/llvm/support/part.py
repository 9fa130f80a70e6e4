"""What one file adds to the support module."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Part:
    """Functions of one subject: what they call from outside, a line each, their code, and the names graphs may use."""

    declarations: str
    code: str
    exports: tuple[str, ...]


def message(name: str, text: str) -> str:
    """A C string that code of the same part names ``@message_<name>``."""
    return f'@message_{name} = private constant [{len(text) + 1} x i8] c"{text}\\00"'
