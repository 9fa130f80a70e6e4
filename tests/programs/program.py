"""A generated program: what it is made of, and its text as a file that runs on its own."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

_FLOAT_NAMES = re.compile(r"torch\.(float32|float16|bfloat16)\b")
_MARK = "# -- printed with every program from here on --\n"


def _in_double(text: str) -> str:
    return _FLOAT_NAMES.sub("torch.float64", text)


@dataclass(frozen=True)
class Input:
    """Argument ``number``. ``base`` is an expression for new memory, ``finish`` statements that edit it in place, and
    ``text`` the argument as an expression of it; without a base the text is of another input's."""

    number: int
    text: str
    base: str | None = None
    dtype: torch.dtype | None = None
    finish: tuple[str, ...] = ()
    # How the argument takes part in gradients: "no", "leaf" (the argument itself), "view" (of a leaf), "computed".
    gradient: str = "no"

    def lines(self, *, reference: bool) -> list[str]:
        k, found = self.number, []
        if self.base is not None:
            found.append(f"b{k} = {self.base}")
            found += self.finish
            if reference and self.dtype is not None and self.dtype.is_floating_point:
                found.append(f"b{k} = disturb(b{k}.double(), {torch.finfo(self.dtype).eps})")
            if self.gradient in ("view", "computed"):
                found.append(f"b{k}.requires_grad_()")
                found.append(f"leaves.append(b{k})")
        # A copy keeps nothing for its backward, so that several steps may go through it.
        text = f"b{k}.clone()" + self.text.removeprefix(f"b{k}") if self.gradient == "computed" else self.text
        found.append(f"x{k} = {text}")
        if self.gradient == "leaf":
            found.append(f"leaves.append(x{k}.requires_grad_())")
        return found


@dataclass(frozen=True)
class Statement:
    """One line. ``name`` is what it defines (none for an update in place), ``exact`` whether any correct compiler
    gives the same bits, ``reads`` the names it mentions, ``eps`` the relative rounding of its result (0 for a view).
    ``meaning`` is the line that means the same in float64, where other dtypes in its place do not make it that."""

    text: str
    operator: str
    name: str | None
    reads: frozenset[str]
    exact: bool
    eps: float
    dtype: torch.dtype
    meaning: str | None = None

    def reference(self) -> list[str]:
        text = _in_double(self.meaning or self.text)
        if self.exact or self.name is None or not self.eps:
            return [text]
        target, _, value = text.partition(" = ")
        for name in self.reads:
            value = re.sub(rf"\b{name}\b", f"disturb({name}, {self.eps})", value)
        return [f"{target} = {value}", f"{target} = disturb({target}, {self.eps})"]


@dataclass(frozen=True)
class Program:
    inputs: tuple[Input, ...]
    statements: tuple[Statement, ...]
    outputs: tuple[str, ...]
    exact_outputs: frozenset[int]
    unsigned_outputs: frozenset[int]  # of the exact ones, those whose zeros may have either sign
    sizes: tuple[tuple[int, ...], ...]
    training: bool
    dynamic: str  # "static", "dynamic" (dynamic=True) or "marked" (dimensions marked)
    precision: str = "default"
    marks: tuple[tuple[int, int], ...] = field(default=())
    after: tuple[str, ...] = field(default=())  # statements that write to the outputs ``o`` before the backward pass
    steps: int = 0  # backward passes whose gradients add up in the leaves; 0: ``autograd.grad``, once
    between: str = ""  # a statement that writes to each gradient ``g`` after each step

    @property
    def mode(self) -> str:
        return f"{'training' if self.training else 'inference'} {self.dynamic}"

    def features(self) -> list[str]:
        """What the program does beside its statements, for the table of what was covered."""
        found = [f"{self.steps} steps"] if self.steps else []
        found += ["writes to outputs"] if self.after else []
        found += ["writes to gradients"] if self.between else []
        for one in self.inputs:
            if one.base is None:
                found.append("shares a leaf" if self._needs_gradient(one) else "shares memory")
            for name in ("as_strided", "channels_last", "expand", "unfold", "flip", "permute", "transpose"):
                found += [f"input {name}"] if name in one.text else []
        return found

    def _needs_gradient(self, one: Input) -> bool:
        return any(re.match(rf"[xb]{other.number}\b", one.text) and other.gradient != "no" for other in self.inputs)

    def source(self, *, reference: bool = False) -> str:
        """``inputs(...)`` and ``program(...)``.

        With ``reference``, everything is computed in float64, and ``disturb`` is called with what inexact statements
        read and with what they give.
        """
        parameters = ", ".join(f"n{k}" for k in range(len(self.sizes[0])))
        names = ", ".join(f"x{i.number}" for i in self.inputs)
        lines = [f"def inputs({parameters}):", "    leaves = []"]
        lines += [f"    {line}" for i in self.inputs for line in i.lines(reference=reference)]
        lines += [f"    return [{names}], leaves", "", "", f"def program({names}):"]
        for statement in self.statements:
            lines += [f"    {line}" for line in (statement.reference() if reference else [statement.text])]
        lines.append(f"    return ({', '.join(self.outputs)},)")
        lines += ["", "", "def after(o):", *(f"    {_in_double(text) if reference else text}" for text in self.after)]
        lines += [] if self.after else ["    pass"]
        lines += ["", "", "def between(g):", f"    {self.between or 'pass'}"]
        return "\n".join(lines) + "\n"

    def how(self, defined: dict[str, Any]) -> dict[str, Any]:
        """What :func:`run` is to do beside the call; ``defined`` is what the source defines."""
        return {
            "after": defined["after"] if self.after else None,
            "steps": self.steps,
            "between": defined["between"] if self.between else None,
        }

    def script(self, allowed: list[dict[str, float]]) -> str:
        """A file that runs on its own: exit status 1 where compiled and eager differ by more than ``allowed``."""
        body = (Path(__file__).parent / "standalone.py").read_text().split(_MARK)[1]
        dynamic = {"static": "False", "dynamic": "True", "marked": "None"}[self.dynamic]
        options = f'{{"fallback": False, "precision": "{self.precision}"}}'
        head = "import math\nimport re\nimport sys\nfrom typing import Any, Callable, Iterable\n\n"
        head += "import torch\nimport torch.nn.functional as F\n\n\n"
        after, between = "after" if self.after else None, "between" if self.between else None
        marks = "".join(f"        torch._dynamo.maybe_mark_dynamic(made[0][{i}], {d})\n" for i, d in self.marks)
        return f"""{head}{self.source()}

{body}

SIZES = {list(self.sizes)}
ALLOWED = {allowed}


def main() -> int:
    compiled = torch.compile(program, backend="kiln", fullgraph=True, dynamic={dynamic}, options={options})
    how = {{"after": {after}, "steps": {self.steps}, "between": {between}}}
    found = 0
    for sizes, allowed in zip(SIZES, ALLOWED):
        wanted = expected(program, lambda: inputs(*sizes), **how)
        made = inputs(*sizes)
{marks}        for name, complaint in differences(wanted, run(compiled, made, **how), allowed):
            print(f"sizes {{sizes}}: {{name}} {{complaint}}")
            found = 1
    return found


if __name__ == "__main__":
    sys.exit(main())
"""


def namespace(source: str, **more: Any) -> dict[str, Any]:
    """What ``source`` defines."""
    scope: dict[str, Any] = {"torch": torch, "F": torch.nn.functional, **more}
    exec(source, scope)
    return scope
