"""Programs as a hypothesis strategy: inputs with odd layouts, then statements, each tried in eager as it is added.

A program holds for several assignments of its sizes at once: a statement stays only where eager accepts it at all of
them. Every choice is a draw, the simplest first, so that a failing program shrinks.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
from hypothesis import strategies as st

from tests.programs.program import Input, Program, Statement, namespace

FLOATS = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
INTEGERS = (torch.int64, torch.int32, torch.uint8, torch.bool, torch.int8)
SIZES = (2, 3, 1, 5, 4, 7, 8, 13, 16, 17, 33, 65, 0, 128)
MOST_ELEMENTS = 20_000

T = TypeVar("T")
_REFUSALS = (RuntimeError, IndexError, TypeError, ValueError, NotImplementedError)


class Growth:
    """A program while it grows: its values at every assignment of sizes, and which of them are exact."""

    def __init__(self, draw: Callable[..., Any]) -> None:
        self._draw = draw
        self.training = draw(st.booleans())
        self.dynamic = self.pick(("static", "dynamic", "marked", "static"))
        count = 1 if self.dynamic == "static" else 3
        self.sizes = tuple((self.pick(SIZES), self.pick(SIZES)) for _ in range(count))
        self.scopes = [namespace("", n0=a, n1=b) for a, b in self.sizes]
        self.inputs: list[Input] = []
        self.statements: list[Statement] = []
        self.marks: list[tuple[int, int]] = []
        # Values which eager and any other order of the same arithmetic agree on bit for bit: only these may be
        # compared, ranked or truncated, where a rounding difference would become another answer.
        self.exact: set[str] = set()
        self.special: set[str] = set()
        # Exact but for the sign of a zero, which eager's own maximum gives by where an element lies.
        self.unsigned: set[str] = set()
        self.names: list[str] = []

    # -- choices ------------------------------------------------------------------------------------------------

    def pick(self, choices: Sequence[T]) -> T:
        chosen: T = self._draw(st.sampled_from(choices))
        return chosen

    def number(self, low: int, high: int) -> int:
        """Simplest nearest zero."""
        return int(self._draw(st.integers(low, max(low, high))))

    def chance(self, one_in: int) -> bool:
        return self.number(0, one_in - 1) == one_in - 1

    def value(self, accept: Callable[[torch.Tensor], bool] = lambda _: True, *, exact: bool = False) -> str | None:
        """A name of an acceptable value, the latest ones first."""
        found = [n for n in reversed(self.names) if accept(self[n]) and (not exact or n in self.exact)]
        if not found:
            return None
        return self.pick(found[:4] if len(found) > 4 and not self.chance(3) else found)

    def floating(self, *, least: int = 0, exact: bool = False) -> str | None:
        return self.value(lambda v: v.dtype.is_floating_point and v.dim() >= least, exact=exact)

    def dimension(self, name: str) -> int:
        return self.number(0, self[name].dim() - 1)

    def dimensions(self, name: str) -> tuple[int, ...]:
        rank = self[name].dim()
        return tuple(sorted(self._draw(st.sets(st.integers(0, rank - 1), min_size=1, max_size=rank))))

    def permutation(self, rank: int) -> tuple[int, ...]:
        return tuple(self._draw(st.permutations(range(rank))))

    def __getitem__(self, name: str) -> torch.Tensor:
        """The value at the first assignment of sizes."""
        value: torch.Tensor = self.scopes[0][name]
        return value

    # -- inputs -------------------------------------------------------------------------------------------------

    def add_input(self) -> None:
        k = len(self.inputs)
        if k and self.chance(5) and self._add_view_of_another(k):
            return
        rank = self.pick((2, 1, 3, 0, 4))
        shape = [self.pick(("n0", "n1", *(str(s) for s in SIZES[:12]))) for _ in range(rank)]
        while any(math.prod(self._size(d, scope) for d in shape) > 8000 for scope in self.scopes):
            shape.pop()
        dtype = self.pick((*FLOATS, *INTEGERS)) if self.chance(2) else self.pick(FLOATS)
        base = self._fresh(shape, dtype, seed=k)
        finish: tuple[str, ...] = ()
        text = f"b{k}"
        if self.chance(3) and shape:
            text += self._layout(len(shape), f"b{k}")
        elif dtype.is_floating_point and self.chance(10):
            finish = (f"b{k}.view(-1)[::{self.number(3, 7)}] = {self.pick(_SPECIAL)}",)
        gradient = "no"
        if self.training and dtype.is_floating_point:
            gradient = self.pick(("leaf", "view", "computed", "no"))
        self._accept_input(Input(k, text, base, dtype, finish, gradient), shape)

    def _add_view_of_another(self, k: int) -> bool:
        """An argument that shares memory with an earlier one: the same tensor, or a view of it or of its base."""
        of = self.pick(self.inputs)
        x = f"x{of.number}"
        rank = self.scopes[0][x].dim()
        views = [x, f"{x}.detach()"]
        if rank:
            views += [f"{x}[1:]", f"{x}[..., ::2]", f"{x}[:-1]", f"{x}.transpose(0, -1)", f"{x}.view(-1)"]
            if of.base is not None and of.gradient in ("no", "view"):
                views += [f"b{of.number}", f"b{of.number}[1:]"]
        self._accept_input(Input(k, self.pick(views), None, self.scopes[0][x].dtype), None)
        return len(self.inputs) > k

    def _accept_input(self, new: Input, shape: list[str] | None) -> None:
        trials = []
        for scope in self.scopes:
            trial = dict(scope, leaves=[])
            try:
                for line in new.lines(reference=False):
                    exec(line, trial)
            except _REFUSALS:
                return
            trials.append(trial)
        self.scopes = trials
        self.inputs.append(new)
        name = f"x{new.number}"
        self.names.append(name)
        self.exact.add(name)
        if new.finish:
            self.special.add(name)
        if self.dynamic == "marked" and shape is not None and new.text == f"b{new.number}":
            self.marks += [(new.number, d) for d, size in enumerate(shape) if size.startswith("n")]

    def _size(self, text: str, scope: dict[str, Any]) -> int:
        return int(scope[text]) if text.startswith("n") else int(text)

    def _fresh(self, shape: list[str], dtype: torch.dtype, seed: int) -> str:
        size = f"({', '.join(shape)}{',' if len(shape) == 1 else ''})"
        generator = f"generator=torch.Generator().manual_seed({seed})"
        if dtype.is_floating_point:
            return f"torch.randn({size}, dtype=torch.float32, {generator}).to({dtype})"
        whole = {torch.bool: (0, 2), torch.uint8: (0, 256), torch.int8: (-128, 128)}
        low, high = whole.get(dtype) or self.pick(((-3, 6), (0, 6), (-1000, 1000)))
        return f"torch.randint({low}, {high}, {size}, {generator}).to({dtype})"

    def _layout(self, rank: int, base: str) -> str:
        kinds = ["transpose", "step", "offset", "expand", "flip", "window", "narrow", "inner_expand", "both", "strided"]
        if rank >= 4:
            kinds += ["channels_last", "channels_last", "channels_last"]
        kind = self.pick(kinds)
        if kind == "channels_last":
            return ".contiguous(memory_format=torch.channels_last)"
        if kind == "inner_expand":
            return ".unsqueeze(-1).expand(" + "-1, " * rank + f"{self.pick((3, 2, 8))})"
        if kind == "both":
            return ".transpose(0, -1)[..., 1:]"
        if kind == "strided":
            return self.pick((
                f".as_strided(({base}.numel() // 3, 2), (2, 1), 1)", f".as_strided((2, {base}.numel() // 2), (1, 2))",
                f".as_strided((3, {base}.numel() // 2), (1, 1))",
                f".as_strided(({base}.numel() // 4, 1, 2), (3, 5, 0), 2)",
            ))  # fmt: skip
        if kind == "transpose":
            return f".permute({self.permutation(rank)})"
        if kind == "step":
            return f"[..., ::{self.pick((2, 3))}]"
        if kind == "offset":
            return "[1:]"
        if kind == "expand":
            return f"[:1].expand({self.pick((5, 2, 17))}, {', '.join('-1' for _ in range(rank - 1))})"
        if kind == "flip":
            return f".flip({self.number(0, rank - 1)})"
        if kind == "window":
            return ".unfold(0, 2, 1)"
        return "[..., 1:-1]"

    # -- statements -----------------------------------------------------------------------------------------------

    def let(
        self, operator: str, text: str, *sources: str | None, exact: bool = False, meaning: str | None = None
    ) -> str | None:
        """``name = text``, unless eager refuses it or the result is too large or too wild to go on with.

        ``meaning`` is the text for the float64 run, where it is another one.
        """
        name = f"v{len(self.statements)}"
        line = f"{name} = {text}"
        trials = self._try(line)
        if trials is None:
            return None
        for trial in trials:
            value = trial[name]
            if not isinstance(value, torch.Tensor) or value.numel() > MOST_ELEMENTS or value.dim() > 6:
                return None
            if value.dtype.is_complex or (value.dtype.is_floating_point and not _tame(value)):
                return None
        self.scopes = trials
        reads = frozenset(s for s in sources if s is not None)
        kept = exact and reads <= self.exact
        dtype = trials[0][name].dtype
        # A view rounds nothing, and stays a view in the float64 run: a write to one of the two shows in the other.
        rounds = not any(_share_memory(trial[name], trial[s]) for trial in trials for s in reads)
        coarsest = max([_eps(dtype), *(_eps(self[s].dtype) for s in reads)]) if rounds else 0.0
        reference = None if meaning is None else f"{name} = {meaning}"
        self.statements.append(Statement(line, operator, name, reads, kept, coarsest, dtype, reference))
        self.names.append(name)
        if kept:
            self.exact.add(name)
        if operator in _EXTREMA or reads & self.unsigned:
            self.unsigned.add(name)
        return name

    def update(self, operator: str, text: str, target: str, *sources: str, exact: bool = True) -> None:
        """A statement that changes ``target`` in place, and with it what shares its memory."""
        # The one thing known not to compile: an input changed in place of which several elements lie at one place.
        if any(n.startswith("x") and _overlaps(scope[n]) for scope in self.scopes for n in self._sharing(target)):
            return
        # What eager refuses may have been half done: the memory is put back.
        before = [{n: scope[n].detach().clone() for n in self._sharing(target)} for scope in self.scopes]
        trials = self._try(text)
        if trials is None or not all(_tame(t[target]) for t in trials if t[target].dtype.is_floating_point):
            for scope, values in zip(self.scopes, before, strict=True):
                for n, value in values.items():
                    if not _overlaps(scope[n]):
                        scope[n].data.copy_(value)
            return
        self.scopes = trials
        dtype = self[target].dtype
        reads = frozenset((target, *sources))
        kept = exact and reads <= self.exact
        self.statements.append(Statement(text, operator, None, reads, kept, _eps(dtype), dtype))
        if not kept:
            self.exact -= set(self._sharing(target))
        if operator in _EXTREMA or reads & self.unsigned:
            self.unsigned |= set(self._sharing(target))

    def _sharing(self, name: str) -> list[str]:
        place = self[name].untyped_storage().data_ptr()
        return [n for n in self.names if self[n].untyped_storage().data_ptr() == place]

    def _try(self, line: str) -> list[dict[str, Any]] | None:
        trials = []
        for scope in self.scopes:
            trial = dict(scope)
            try:
                exec(line, trial)
            except _REFUSALS:
                return None
            trials.append(trial)
        return trials

    # -- the end ----------------------------------------------------------------------------------------------

    def finish(self) -> Program | None:
        if not self.inputs:
            return None
        names = [n for n in self.names if n.startswith("v")] or [self.names[0]]
        read = {s for statement in self.statements for s in statement.reads}
        outputs = [n for n in names if n not in read][-4:] or [names[-1]]
        for _ in range(self.number(0, 2)):
            outputs.append(self.pick(list(reversed(self.names))))
        after = self._writes_after(outputs) if self.chance(3) else ()
        steps = self.pick((0, 2, 3)) if self.training else 0
        halves = any(t[n].dtype.itemsize == 2 for t in self.scopes[:1] for n in self.names)
        return Program(
            inputs=tuple(self.inputs),
            statements=self._needed(outputs),
            outputs=tuple(outputs),
            exact_outputs=frozenset(k for k, n in enumerate(outputs) if n in self.exact),
            unsigned_outputs=frozenset(k for k, n in enumerate(outputs) if n in self.unsigned),
            sizes=self.sizes,
            training=self.training,
            dynamic=self.dynamic,
            precision=self.pick(("default", "eager")) if halves else "default",
            marks=tuple(self.marks),
            after=after,
            steps=steps,
            between=self.pick(("", "g.mul_(0.5)", "g.clamp_(-1, 1)", "g.add_(1)")) if steps else "",
        )

    def _writes_after(self, outputs: list[str]) -> tuple[str, ...]:
        """Statements that write to an output or to a view of one; whether eager allows that shows when it runs."""
        found = []
        for _ in range(self.number(1, 2)):
            k = self.number(0, len(outputs) - 1)
            view = self.pick(("", ".view(-1)", "[1:]", ".transpose(0, -1)", ".detach()", "[..., ::2]"))
            write = self.pick((".mul_(2)", ".add_(1)", ".zero_()", ".neg_()"))
            value = self[outputs[k]]
            if not value.dim():
                view = ""
            if value.dtype == torch.bool:
                write = ".zero_()"
            found.append(f"o[{k}]{view}{write}")
        return tuple(found)

    def _needed(self, outputs: list[str]) -> tuple[Statement, ...]:
        """The statements that reach an output; updates in place always do."""
        wanted, kept = set(outputs), []
        for statement in reversed(self.statements):
            if statement.name is None or statement.name in wanted:
                wanted |= statement.reads
                kept.append(statement)
        return tuple(reversed(kept))


_EXTREMA = frozenset(
    ("maximum", "minimum", "fmax", "amax", "amin", "min_values", "sort", "clamp", "hardtanh", "clamp_", "relu")
)
_SPECIAL = ("-0.0", 'float("nan")', 'float("inf")', "-float('inf')", "1e-40")


def _eps(dtype: torch.dtype) -> float:
    return torch.finfo(dtype).eps if dtype.is_floating_point else 0.0


def _share_memory(one: torch.Tensor, other: torch.Tensor) -> bool:
    return one.untyped_storage().data_ptr() == other.untyped_storage().data_ptr() and one.numel() > 0


def _overlaps(value: torch.Tensor) -> bool:
    """Whether some stride is no longer than what the smaller ones reach."""
    reach = 0
    for stride, size in sorted((step, n) for step, n in zip(value.stride(), value.shape, strict=True) if n > 1):
        if stride <= reach:
            return True
        reach += stride * (size - 1)
    return False


def _tame(value: torch.Tensor) -> bool:
    """No finite element is large enough for its square or sum to overflow a half."""
    size = value.detach().double().abs()
    return bool(((size < 5e3) | ~size.isfinite()).all())


@st.composite
def programs(draw: Callable[..., Any]) -> Program | None:
    """A program, or None where not even an input was accepted."""
    from tests.programs.vocabulary import OPERATORS

    growth = Growth(draw)
    growth.add_input()
    for _ in range(growth.number(0, 2)):
        growth.add_input()
    if growth.inputs:
        wanted = growth.pick((1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 12, 14, 16))
        for _ in range(wanted * 3):
            if len(growth.statements) >= wanted:
                break
            growth.pick(OPERATORS)(growth)
    return growth.finish()
