"""What Dynamo reports beside the graphs: graph breaks, guards, and why functions were compiled again."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import CodeType
from typing import Any

from torch._dynamo import convert_frame
from torch._dynamo.eval_frame import _debug_get_cache_entry_list
from torch._dynamo.output_graph import GraphCompileReason
from torch._dynamo.utils import graph_break_reasons

from torchkiln.debug.recompilations import why_recompiled
from torchkiln.debug.recording.model import GraphBreak, Guards, Line, Recompiled

_SPACES = re.compile(r"\s{2,}#")


class DynamoNotes:
    """Frames that Dynamo compiled and graphs that it broke since this was made.

    What Dynamo keeps of both is read with every frame, since ``torch._dynamo.reset()`` drops it.
    """

    def __init__(self) -> None:
        self._codes: dict[CodeType, dict[Guards, None]] = {}
        self._unread: dict[CodeType, None] = {}
        self._known_breaks: list[GraphCompileReason] = list(graph_break_reasons)
        self._breaks: list[GraphBreak] = []
        self._recompiled: dict[tuple[str, Line], dict[str, None]] = {}

    def compiled(self, code: CodeType, new_code: CodeType) -> CodeType | None:
        """Dynamo made new code for a frame, which stays as it is. Its guards are made after this."""
        self.read_guards()
        self._read_breaks()
        self._read_recompilations()
        self._codes.setdefault(code, {})
        self._unread[code] = None
        return None

    def read_guards(self) -> None:
        """Note the guards of what was compiled so far: they are gone when a module that they check is."""
        for code in self._unread:
            line = Line(code.co_filename, code.co_firstlineno)
            for entry in _debug_get_cache_entry_list(code):
                self._codes[code][Guards(code.co_qualname, _guard_text(entry), line)] = None
        self._unread.clear()

    def _read_breaks(self) -> None:
        known, now = self._known_breaks, list(graph_break_reasons)
        goes_on = len(now) >= len(known) and all(a is b for a, b in zip(known, now, strict=False))
        self._breaks += map(_graph_break, now[len(known) :] if goes_on else now)
        self._known_breaks = now

    def _read_recompilations(self) -> None:
        for found in why_recompiled().functions:
            reasons = self._recompiled.setdefault((found.function, Line(found.file, found.line)), {})
            reasons.update(dict.fromkeys(found.reasons))

    def count_breaks(self) -> int:
        """How many graphs were broken so far."""
        self._read_breaks()
        return len(self._breaks)

    def graph_breaks(self, first: int = 0, last: int | None = None) -> tuple[GraphBreak, ...]:
        """All, or those from number ``first`` to before ``last``."""
        self._read_breaks()
        return tuple(dict.fromkeys(self._breaks[first:last]))

    def guards(self, frame: CodeType | None = None) -> tuple[Guards, ...]:
        """Those of all code that was made for the frames, or for one; it may be several for each."""
        self.read_guards()
        return tuple(guards for code in self._frames(frame) for guards in self._codes.get(code, ()))

    def recompilations(self, frame: CodeType | None = None) -> tuple[Recompiled, ...]:
        """Those of the frames, or of one."""
        self._read_recompilations()
        places = {Line(code.co_filename, code.co_firstlineno) for code in self._frames(frame)}
        return tuple(
            Recompiled(function, tuple(reasons), line)
            for (function, line), reasons in self._recompiled.items()
            if line in places
        )

    def _frames(self, frame: CodeType | None) -> Sequence[CodeType]:
        return tuple(self._codes) if frame is None else (frame,)


@contextmanager
def noting() -> Iterator[DynamoNotes]:
    """Notes of what Dynamo compiles inside the block."""
    notes = DynamoNotes()
    handle = convert_frame.register_bytecode_hook(notes.compiled)
    try:
        yield notes
    finally:
        handle.remove()


def _graph_break(reason: GraphCompileReason) -> GraphBreak:
    frame = reason.user_stack[-1] if reason.user_stack else None
    line = Line(frame.filename, frame.lineno) if frame is not None and frame.lineno is not None else None
    return GraphBreak(_first_paragraph(str(reason.reason)), line)


def _guard_text(entry: Any) -> str:
    manager = entry.guard_manager
    parts = getattr(manager, "verbose_code_parts", None) or getattr(manager, "code_parts", None) or ()
    return "\n".join(_SPACES.sub("  #", str(part).strip()) for part in parts) or str(manager)


def _first_paragraph(reason: str) -> str:
    """What Dynamo says, without the explanation, hints and links that follow."""
    return reason.split("\n\n")[0].split("\n  Explanation")[0].strip()
