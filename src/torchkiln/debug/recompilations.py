"""``torchkiln.why_recompiled``: which functions were compiled again, and the guards that failed."""

from __future__ import annotations

import re
from dataclasses import dataclass

from torch._dynamo.utils import guard_failures

# "3/1: ..." : the guard of the code that was compiled second for the fourth frame.
_NUMBERED = re.compile(r"^\d+/\d+: ")


@dataclass(frozen=True)
class Recompilation:
    """A function that was compiled more than once. ``reasons`` are the guards that failed, as Dynamo words them."""

    function: str
    file: str
    line: int
    reasons: tuple[str, ...]

    def __str__(self) -> str:
        return "\n".join([f"{self.function} ({self.file}:{self.line})", *(f"  {reason}" for reason in self.reasons)])


@dataclass(frozen=True)
class Recompilations:
    """All functions of this process that were compiled again, since the last ``torch._dynamo.reset()``."""

    functions: tuple[Recompilation, ...] = ()

    def __str__(self) -> str:
        return "\n".join(map(str, self.functions)) or "no function was compiled again"


def why_recompiled() -> Recompilations:
    """Which functions were compiled again, and why: sizes, numbers or objects that are other than they were.

    ``torch.compile(..., dynamic=True)`` or ``torch._dynamo.mark_dynamic`` make one program for sizes that vary.
    """
    return Recompilations(
        tuple(
            Recompilation(code.co_qualname, code.co_filename, code.co_firstlineno, _reasons(texts))
            for code, texts in guard_failures.items()
            if texts
        )
    )


def _reasons(texts: list[str]) -> tuple[str, ...]:
    found = (_NUMBERED.sub("", str(text).strip().splitlines()[0]) for text in texts)
    return tuple(dict.fromkeys(re.sub(r"\s{2,}#", "  #", reason) for reason in found))
