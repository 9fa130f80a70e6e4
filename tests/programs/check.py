"""Whether a program gives compiled what it gives in eager, and how far apart the two may be.

How far is measured, not chosen: the program runs in float64, once as it is and a few times with every rounded value
moved by about one rounding of its dtype. What that moves the results by, and how far eager itself is from the float64
run, is what another correct order of the arithmetic may differ by.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from conformance.foreseen import foreseen_layouts
from tests.programs.program import Program, namespace
from tests.programs.standalone import differences, expected, run

_DISTURBED_RUNS = 3
_NEAR = 8.0  # times the measured error
_LEAST = 5e-324


class Different(AssertionError):
    """Compiled and eager disagree; the message is a program that shows it."""

    def __init__(self, complaints: list[str], script: str) -> None:
        self.complaints, self.script = complaints, script
        super().__init__("\n".join(complaints) + "\n\n" + script)


def check(program: Program, backend: str = "kiln") -> str:
    """Raise :class:`Different`, or say "same".

    Otherwise "refused", where eager does not run it (a gradient of what was overwritten), or "torch", where
    AOTAutograd without a compiler differs from eager in the same way, or foresees the strides that ours has.
    """
    defined = namespace(program.source())
    how = program.how(defined)
    try:
        wanted = [expected(defined["program"], partial(defined["inputs"], *sizes), **how) for sizes in program.sizes]
    except RuntimeError:
        return "refused"
    if any("error" in one and not program.after for one in wanted):
        return "refused"
    found = _complaints(program, backend, wanted)
    if not found:
        return "same"
    blamed = {(sizes, name, kind) for sizes, name, kind, _, _ in _complaints(program, "aot_eager", wanted)}
    found = [c for c in found if (c[0], c[1], c[2]) not in blamed or _inexcusable(program, c[1], wanted[c[0]])]
    if any(c[3].startswith("has strides") for c in found):
        foreseen = {c[:4] for c in _complaints(program, foreseen_layouts, wanted)}
        found = [c for c in found if not c[3].startswith("has strides") or c[:4] not in foreseen]
    if not found:
        return "torch"
    allowed = _allowed_for_script(program, wanted, found)
    complaints = [f"sizes {program.sizes[s]}: {name} {text}" for s, name, _, text, _ in found]
    raise Different(complaints, program.script(allowed))


def _inexcusable(program: Program, name: str, wanted: dict[str, Any]) -> bool:
    """Gradients of overwritten memory, and leaves whose gradients are one memory, are wrong whoever gives them."""
    if name == "memory of gradients shared":
        return True
    return name.startswith("gradient ") and ("error" in wanted or program.steps > 1)


def _complaints(
    program: Program, backend: str | Callable[..., Any], wanted: list[dict[str, Any]]
) -> list[tuple[int, str, str, str, torch.Tensor | None]]:
    """(number of the sizes, name, kind of complaint, complaint, what ours is)."""
    torch._dynamo.reset()
    defined = namespace(program.source())
    options: dict[str, Any] = {}
    if backend == "kiln":
        options = {"options": {"fallback": False, "precision": program.precision}}
    dynamic = {"static": False, "dynamic": True, "marked": None}[program.dynamic]
    compiled = torch.compile(defined["program"], backend=backend, fullgraph=True, dynamic=dynamic, **options)
    found = []
    for number, sizes in enumerate(program.sizes):
        made = defined["inputs"](*sizes)
        for argument, dim in program.marks:
            torch._dynamo.maybe_mark_dynamic(made[0][argument], dim)
        try:
            got = run(compiled, made, **program.how(defined))
        except Exception as error:
            text = f"{type(error).__name__}: {error}".split("\n\nSet TORCHDYNAMO_VERBOSE")[0]
            found.append((number, "the call", "raises", f"raises {text}", None))
            break
        quick = list(differences(wanted[number], got, {}))
        if quick:
            quick = list(differences(wanted[number], got, allowances(program, sizes, wanted[number])))
        found += [(number, name, text.split()[0], text, got.get(name)) for name, text in quick]
    return found


def _allowed_for_script(program: Program, wanted: list[dict[str, Any]], found: list[Any]) -> list[dict[str, float]]:
    """One number for each result: for one that differs, small enough to still show it."""
    answer = []
    for number, sizes in enumerate(program.sizes):
        measured = allowances(program, sizes, wanted[number])
        numbers = {}
        for name, limit in measured.items():
            if not isinstance(limit, torch.Tensor):
                numbers[name] = limit
                continue
            finite = limit[limit.isfinite()]
            numbers[name] = float(finite.max()) if finite.numel() else math.inf
            for where, other, kind, _, got in found:
                if (where, other, kind) == (number, name, "differs") and got is not None:
                    off = (got.double() - wanted[number][name].double()).abs()
                    numbers[name] = float(limit[~(off <= limit) & limit.isfinite()].min())
        answer.append(numbers)
    return answer


def allowances(program: Program, sizes: tuple[int, ...], eager: dict[str, Any]) -> dict[str, Any]:
    """The largest error allowed in each result, element by element; nothing for results that must agree in bits."""
    exact = {f"output {k}" for k in program.exact_outputs}
    unsigned = {f"output {k}" for k in program.unsigned_outputs}
    true = _in_double(program, sizes, None)
    if "error" in true and "error" not in eager:
        raise ValueError(
            f"the float64 run is another program: it raises {true['error']}\n{program.source(reference=True)}"
        )
    others = [_in_double(program, sizes, torch.Generator().manual_seed(k)) for k in range(_DISTURBED_RUNS)]
    answer: dict[str, Any] = {}
    for name, value in eager.items():
        if not isinstance(value, torch.Tensor) or not value.dtype.is_floating_point:
            continue
        if name in exact:
            if name in unsigned:
                answer[name] = _LEAST  # two zeros are no further apart
            continue
        right = true.get(name)
        if not value.numel() or right is None or right.shape != value.shape:
            continue
        errors = [(value.double() - right).abs()]
        errors += [(other[name] - right).abs() for other in others if other.get(name) is not None]
        error = torch.stack([e.nan_to_num(0.0, posinf=0.0) for e in errors]).amax(0)
        usual = float(torch.quantile(error.flatten()[:100_000], 0.9))
        finite = right[right.isfinite()].abs()
        scale = float(finite.max()) if finite.numel() else 0.0
        info = torch.finfo(value.dtype)
        limit = _NEAR * (error + 2 * usual + info.eps * scale + info.tiny)
        # Where eager overflowed on the way and the exact result did not, or the other way round, nothing is known.
        known = (value.isfinite() == right.isfinite()) & (right.abs() < info.max / 16) | (value.double() == right)
        known |= value.isnan() & right.isnan()
        answer[name] = torch.where(known, limit, math.inf)
    return answer


def _in_double(program: Program, sizes: tuple[int, ...], generator: torch.Generator | None) -> dict[str, Any]:
    def disturb(value: torch.Tensor, eps: float) -> torch.Tensor:
        if generator is None or not value.dtype.is_floating_point:
            return value
        return value * (1 + eps * (torch.rand(value.shape, generator=generator, dtype=torch.float64) * 2 - 1))

    defined = namespace(program.source(reference=True), disturb=disturb)
    torch.set_default_dtype(torch.float64)  # what integers are divided to
    try:
        return expected(defined["program"], partial(defined["inputs"], *sizes), **program.how(defined))
    finally:
        torch.set_default_dtype(torch.float32)
