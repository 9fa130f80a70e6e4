"""A recording as the compact JSON that the report carries: every line of text once, every place in a source once."""

from __future__ import annotations

import base64
import dataclasses
import gzip
import json
from collections.abc import Mapping
from typing import Any

from torchkiln.debug.recording.model import Kernel, Line, Recording


def packed(recording: Recording) -> str:
    """:func:`report_data`, compressed, in the letters of base64: nothing in it can be taken for HTML."""
    text = json.dumps(report_data(recording), ensure_ascii=False, separators=(",", ":"))
    return base64.b64encode(gzip.compress(text.encode("utf-8", "replace"), 6, mtime=0)).decode("ascii")


def report_data(recording: Recording) -> dict[str, Any]:
    """The fields of ``recording`` with numbers in place of texts and of lines of sources.

    ``texts`` has runs of ``lines``: first line and length, in turns. ``numbers`` says which of them the recording's own
    texts are. ``places`` has files and line numbers.
    """
    packer = _Packer()
    texts = [packer.text(text) for text in recording.texts]
    content: dict[str, Any] = packer.pack(dataclasses.replace(recording, texts=(), sources={}))
    content["texts"] = packer.texts
    content["numbers"] = texts
    content["sources"] = {name: packer.text(text) for name, text in recording.sources.items()}
    return {**content, "lines": packer.lines, "places": packer.places}


class _Packer:
    """The tables, as far as they are filled."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self.texts: list[list[int]] = []
        self.places: list[tuple[str, int]] = []
        self._line_numbers: dict[str, int] = {}
        self._text_numbers: dict[str, int] = {}
        self._place_numbers: dict[Line, int] = {}

    def pack(self, value: Any) -> Any:
        """A value of the recording as JSON."""
        if isinstance(value, Line):
            return self._place(value)
        if isinstance(value, Kernel):
            codes = {name: self.text(getattr(value, name)) for name in ("text", "llvm", "assembly")}
            return {**self._fields(value), **codes}
        if dataclasses.is_dataclass(value):
            return self._fields(value)
        if isinstance(value, tuple):
            return [self.pack(item) for item in value]
        if isinstance(value, Mapping):
            return {name: self.pack(item) for name, item in value.items()}
        return value

    def text(self, text: str) -> int:
        """The number of a text. Texts that share lines share their runs: a pass changes few lines of a graph."""
        number = self._text_numbers.get(text)
        if number is None:
            number = self._text_numbers[text] = len(self.texts)
            self.texts.append(self._runs(text))
        return number

    def _runs(self, text: str) -> list[int]:
        runs: list[int] = []
        following = -1
        for line in text.split("\n"):
            if 0 <= following < len(self.lines) and self.lines[following] == line:
                runs[-1] += 1
                following += 1
                continue
            number = self._line_numbers.setdefault(line, len(self.lines))
            if number == len(self.lines):
                self.lines.append(line)
            if number == following:
                runs[-1] += 1
            else:
                runs += (number, 1)
            following = number + 1
        return runs

    def _place(self, line: Line) -> int:
        number = self._place_numbers.setdefault(line, len(self.places))
        if number == len(self.places):
            self.places.append((line.file, line.line))
        return number

    def _fields(self, value: Any) -> dict[str, Any]:
        skipped = ("text", "llvm", "assembly") if isinstance(value, Kernel) else ()
        names = (item.name for item in dataclasses.fields(value))
        return {name: self.pack(getattr(value, name)) for name in names if name not in skipped}
