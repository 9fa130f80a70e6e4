"""Compile samples of an operator and judge what comes out against eager.

Samples are compiled several at a time, as independent calls in one function: most of the time of a small compilation
is Dynamo's and AOTAutograd's per graph. Where anything in a batch differs or fails, its samples are compiled one by
one, and those verdicts count.
"""

from __future__ import annotations

import gc
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch._dynamo.exc import BackendCompilerFailed, InternalTorchDynamoError, TorchRuntimeError, Unsupported

from conformance.cases import RANDOM, UNWRITTEN, Case, Sample, database, samples, seed_everything
from conformance.compare import (
    as_near_as_eager,
    copy_arguments,
    cotangents,
    difference,
    in_float64,
    roughly_equal,
    tensors_of,
)
from conformance.forced_layouts import forced_layouts
from conformance.foreseen import UnforeseenSizes, foreseen_layouts
from conformance.observe import Observed, observe

BATCH = 16

PASSED = "passed"
WRONG = "wrong"
CRASHED = "crashed"
NOT_COMPILED = "not compiled"
CAPTURE_FAILED = "capture failed"
ROUNDED = "as eager with every operation rounded"
EAGERS_NUMBERS = "values compared with rng='eager'"
METADATA_ONLY = "sizes, strides and dtypes only"
CATEGORIES = (PASSED, WRONG, CRASHED, NOT_COMPILED, CAPTURE_FAILED)


@dataclass(frozen=True)
class Verdict:
    """How one sample came out; ``note`` says more about a pass, ``reason`` why it is not one."""

    sample: int
    category: str
    reason: str = ""
    note: str = ""


@dataclass(frozen=True)
class Way:
    """How to compile: by which backend, whether sizes are symbols, and whether layouts are changed by force."""

    backend: Any = "kiln"
    dynamic: bool = False
    layouts: bool = False

    def with_backend(self, backend: Any) -> Way:
        return replace(self, backend=backend)


OURS = Way()


@dataclass(frozen=True)
class Run:
    """Results, gradients and the arguments afterwards (for operators that write into them)."""

    results: Any
    gradients: Any
    arguments: Any


@dataclass
class _Prepared:
    """A sample with what eager makes of it."""

    number: int
    sample: Sample
    seed: int
    eager: Run
    differentiate: bool
    values: bool  # whether eager determines them
    draws: bool  # whether they are random numbers
    notes: list[str] = field(default_factory=list)


def check(
    case: Case,
    *,
    way: Way = OURS,
    only: Sequence[int] | None = None,
    batch: int = BATCH,
    begin: Callable[[Sequence[int]], None] = lambda _: None,
    done: Callable[[Sequence[Verdict], Observed], None] = lambda _verdicts, _observed: None,
) -> None:
    """Judge the samples numbered ``only`` (default: all). ``begin`` and ``done`` hear of every batch as it goes."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        made = samples(case)
        numbers = list(range(len(made))) if only is None else [n for n in only if n < len(made)]
        for chunk in _chunks(numbers, batch):
            begin(chunk)
            observed = Observed()
            verdicts = _check_chunk(case, [(n, made[n]) for n in chunk], way, observed)
            done(verdicts, observed)


def _chunks(numbers: Sequence[int], size: int) -> Iterator[list[int]]:
    for start in range(0, len(numbers), size):
        yield list(numbers[start : start + size])


def _check_chunk(case: Case, chunk: list[tuple[int, Sample]], way: Way, observed: Observed) -> list[Verdict]:
    operator = database()[case.operator].op
    verdicts: list[Verdict] = []
    ready: list[_Prepared] = []
    for number, sample in chunk:
        prepared = _prepare(case, operator, number, sample)
        if isinstance(prepared, Verdict):
            verdicts.append(prepared)
        else:
            ready.append(prepared)
    for differentiate in (True, False):
        group = [p for p in ready if p.differentiate == differentiate]
        verdicts += _check_group(operator, group, way, observed)
    return sorted(verdicts, key=lambda v: v.sample)


def _prepare(case: Case, operator: Any, number: int, sample: Sample) -> _Prepared | Verdict:
    seed = 1000 + number
    differentiate = any(t.requires_grad for t in tensors_of((sample.args, sample.kwargs)))
    notes = []
    try:
        eager = _run_eager(operator, sample, seed, differentiate=False)
    except Exception as error:
        return Verdict(number, CAPTURE_FAILED, f"eager itself fails: {_line(error)}")
    if differentiate:
        try:
            eager = _run_eager(operator, sample, seed, differentiate=True)
            differentiate = eager.gradients is not None
        except Exception as error:
            notes.append(f"forward only: eager's gradient fails: {_line(error)}")
            differentiate = False
    base = case.operator.partition("/")[0]
    draws = base in RANDOM and _draws(operator, sample)
    values = base not in UNWRITTEN and not draws
    return _Prepared(number, sample, seed, eager, differentiate, values, draws, notes)


def _draws(operator: Any, sample: Sample) -> bool:
    """Whether eager takes numbers from the random generator for this sample."""
    args, kwargs = copy_arguments((sample.args, sample.kwargs))
    seed_everything(0)
    before = _generators()
    with torch.no_grad():
        operator(*args, **kwargs)
    return not all(map(torch.equal, before, _generators()))


def _generators() -> list[torch.Tensor]:
    """The states of the generators of the CPU and of the cards in use."""
    return [torch.get_rng_state(), *(torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else ())]


def _run_eager(operator: Any, sample: Sample, seed: int, *, differentiate: bool) -> Run:
    seed_everything(seed)
    return call_eager(operator, sample, differentiate)


def call_eager(operator: Any, sample: Sample, differentiate: bool) -> Run:
    args, kwargs = copy_arguments((sample.args, sample.kwargs))
    with torch.set_grad_enabled(differentiate):
        results = operator(*args, **kwargs)
    return _finish(sample, results, (args, kwargs), differentiate)


def _finish(
    sample: Sample, results: Any, arguments: Any, differentiate: bool, weights: list[torch.Tensor] | None = None
) -> Run:
    gradients = None
    if differentiate:
        found = _differentiable(sample, results)
        inputs = [t for t in tensors_of(arguments) if t.requires_grad and t.is_leaf]
        if found and inputs:
            gradients = torch.autograd.grad(
                found, inputs, cotangents(found) if weights is None else weights, allow_unused=True
            )
    return Run(results, gradients, arguments)


def _differentiable(sample: Sample, results: Any) -> list[torch.Tensor]:
    processed = sample.for_gradient(results) if sample.for_gradient is not None else results
    return [t for t in tensors_of(processed) if t.requires_grad]


def _check_group(operator: Any, group: list[_Prepared], way: Way, observed: Observed) -> list[Verdict]:
    if not group:
        return []
    together: dict[int, str] = {}
    if len(group) > 1:
        try:
            with observe(observed):
                runs = _run_compiled(operator, group, way)
        except Exception as error:
            together = {p.number: _line(error) for p in group}
            del error
        else:
            for prepared, run in zip(group, runs, strict=True):
                found = _judge(operator, prepared, run)
                if found is not None:
                    together[prepared.number] = found
    verdicts = {}
    for prepared in group:
        if len(group) > 1 and prepared.number not in together:
            verdicts[prepared.number] = _passed(prepared)
        else:
            verdicts[prepared.number] = _check_alone(operator, prepared, way, observed)
    if together and all(_plainly_passed(verdicts[number]) for number in together):
        # Each is right alone, and nothing among them explains why they were not together.
        for number, reason in together.items():
            verdicts[number] = Verdict(number, WRONG, f"only next to other calls: {reason}")
    if way.backend == "kiln":
        drawing = [p for p in group if p.draws and verdicts[p.number].category == PASSED]
        verdicts |= {v.sample: v for v in _check_numbers_drawn(operator, drawing, way)}
    return list(verdicts.values())


def _check_numbers_drawn(operator: Any, group: list[_Prepared], way: Way) -> list[Verdict]:
    """Samples that draw random numbers once more with ``rng="eager"``, which draws those eager draws."""
    if len(group) > 1 and _different_numbers(operator, group, way) is None:
        found: list[str | None] = [None] * len(group)
    else:
        found = [_different_numbers(operator, [prepared], way) for prepared in group]
    verdicts = []
    for prepared, different in zip(group, found, strict=True):
        if different is None:
            prepared.notes.append(EAGERS_NUMBERS)
            verdicts.append(_passed(prepared))
        elif _different_numbers(operator, [prepared], way.with_backend("aot_eager")) is not None:
            reason = f"the captured graph, run by torch, draws other numbers too: {different}"
            verdicts.append(Verdict(prepared.number, CAPTURE_FAILED, reason))
        else:
            verdicts.append(Verdict(prepared.number, WRONG, f"with rng='eager': {different}"))
    return verdicts


def _different_numbers(operator: Any, group: list[_Prepared], way: Way) -> str | None:
    """How results differ that are drawn one after the other from one seed, in eager and compiled."""
    settings = {"rng": "eager"} if way.backend == "kiln" else {}
    seed_everything(group[0].seed)
    eager = [call_eager(operator, p.sample, p.differentiate) for p in group]
    try:
        runs = _run_compiled(operator, group, way, **settings)
    except Exception as error:
        return _line(error)
    for mine, theirs in zip(runs, eager, strict=True):
        for a, b in ((mine.results, theirs.results), (mine.gradients, theirs.gradients)):
            found = difference(a, b)
            if found is not None:
                return _judge_numbers_drawn(operator, group[0], mine, theirs, found) if len(group) == 1 else found
    return None


def _judge_numbers_drawn(operator: Any, prepared: _Prepared, mine: Run, eager: Run, found: str) -> str | None:
    """As :func:`_judge`, where eager draws the same numbers in float64; ``found`` where it does not."""
    sample = replace(prepared, eager=eager, values=True, notes=[])
    try:
        exact = _run_in_float64(operator, sample)
    except Exception:
        return found
    if "values:" not in found or not roughly_equal(eager.results, exact.results):
        return found
    return _judge(operator, sample, mine)


def _plainly_passed(verdict: Verdict) -> bool:
    return verdict.category == PASSED and ROUNDED not in verdict.note


def _passed(prepared: _Prepared) -> Verdict:
    only_metadata = not prepared.values and EAGERS_NUMBERS not in prepared.notes
    notes = [*prepared.notes, METADATA_ONLY] if only_metadata else prepared.notes
    return Verdict(prepared.number, PASSED, note="; ".join(notes))


def _check_alone(operator: Any, prepared: _Prepared, way: Way, observed: Observed) -> Verdict:
    try:
        with observe(observed):
            run = _run_compiled(operator, [prepared], way)[0]
    except Exception as error:
        return Verdict(prepared.number, *_classify(operator, prepared, way, error))
    found = _judge(operator, prepared, run)
    if found is None:
        return _passed(prepared)
    if way.backend == "kiln" and _differs_by_rounding_only(operator, prepared, way):
        prepared.notes.append(ROUNDED)
        return _passed(prepared)
    if _capture_gives(operator, prepared, run, way.with_backend("aot_eager")):
        return Verdict(prepared.number, CAPTURE_FAILED, f"the captured graph, run by torch, gives the same: {found}")
    if "strides" in found and _capture_gives(operator, prepared, run, way.with_backend(foreseen_layouts)):
        return Verdict(prepared.number, CAPTURE_FAILED, f"the capture foresees another layout than eager's: {found}")
    return Verdict(prepared.number, WRONG, found)


def _differs_by_rounding_only(operator: Any, prepared: _Prepared, way: Way) -> bool:
    """Whether, of half types, the results are eager's once every operation rounds as eager's do.

    By default a chain of operations is computed in float32. Where eager's roundings happen to cancel, as in x / |x|,
    that is farther from the exact result than eager is, with nothing wrong.
    """
    half = (torch.bfloat16, torch.float16)
    if not any(t.dtype in half for t in tensors_of((prepared.sample.args, prepared.sample.kwargs))):
        return False
    try:
        run = _run_compiled(operator, [prepared], way, precision="eager")[0]
    except Exception:
        return False
    return _judge(operator, prepared, run) is None


def _run_compiled(operator: Any, group: Sequence[_Prepared], way: Way, **settings: Any) -> list[Run]:
    torch._dynamo.reset()
    calls = [copy_arguments((p.sample.args, p.sample.kwargs)) for p in group]

    def every_call(calls: Any) -> Any:
        return [operator(*args, **kwargs) for args, kwargs in calls]

    options: dict[str, Any] = {}
    if way.backend == "kiln":
        options = {"options": {"fallback": False, "guard_filter_fn": _no_guards, **settings}}
    compiled = torch.compile(every_call, backend=way.backend, fullgraph=True, dynamic=way.dynamic, **options)
    differentiate = group[0].differentiate
    seed_everything(group[0].seed)
    with forced_layouts() if way.layouts else nullcontext():
        with torch.set_grad_enabled(differentiate):
            results = compiled(calls)
        if not differentiate:
            return [Run(r, None, c) for r, c in zip(results, calls, strict=True)]
        return _gradients_of_all(group, results, calls)


def _gradients_of_all(group: Sequence[_Prepared], results: Sequence[Any], calls: Sequence[Any]) -> list[Run]:
    """One backward for all samples, since they are one graph."""
    outputs: list[torch.Tensor] = []
    weights: list[torch.Tensor] = []
    inputs: list[torch.Tensor] = []
    spans = []
    for prepared, result, call in zip(group, results, calls, strict=True):
        found = _differentiable(prepared.sample, result)
        outputs += found
        weights += cotangents(found)
        leaves = [t for t in tensors_of(call) if t.requires_grad and t.is_leaf]
        spans.append((len(inputs), len(inputs) + len(leaves)))
        inputs += leaves
    gradients = torch.autograd.grad(outputs, inputs, weights, allow_unused=True)
    return [Run(r, gradients[a:b], c) for r, c, (a, b) in zip(results, calls, spans, strict=True)]


def _judge(operator: Any, prepared: _Prepared, run: Run) -> str | None:
    eager = prepared.eager
    parts = [("", run.results, eager.results), ("gradient ", run.gradients, eager.gradients)]
    parts.append(("argument afterwards, ", run.arguments, eager.arguments))
    exact: Run | None = None
    for label, mine, theirs in parts:
        found = difference(mine, theirs, values=prepared.values)
        if found is None:
            continue
        if "values:" not in found:
            return label + found
        if exact is None:
            try:
                exact = _run_in_float64(operator, prepared)
            except Exception as error:
                return f"{label}{found} (no float64 reference: {_line(error)})"
        reference = {"": exact.results, "gradient ": exact.gradients}.get(label, exact.arguments)
        if difference(mine, theirs, values=False) is not None:
            return f"{label}{difference(mine, theirs, values=False)}"
        try:
            farther = as_near_as_eager(mine, theirs, reference)
        except Exception as error:
            return f"{label}{found} (no float64 reference: {_line(error)})"
        if farther is not None:
            return f"{label}{farther}"
        prepared.notes.append(f"{label or 'result '}judged by float64")
    return None


def _run_in_float64(operator: Any, prepared: _Prepared) -> Run:
    sample = prepared.sample
    args, kwargs = in_float64(copy_arguments((sample.args, sample.kwargs)))
    weights = None
    if prepared.differentiate:
        eager = _run_eager(operator, sample, prepared.seed, differentiate=False).results
        del eager
        args_again, kwargs_again = copy_arguments((sample.args, sample.kwargs))
        seed_everything(prepared.seed)
        found = _differentiable(sample, operator(*args_again, **kwargs_again))
        weights = [in_float64(w) for w in cotangents(found)]
    seed_everything(prepared.seed)
    with torch.set_grad_enabled(prepared.differentiate):
        results = operator(*args, **kwargs)
    return _finish(sample, results, (args, kwargs), prepared.differentiate, weights)


def _classify(operator: Any, prepared: _Prepared, way: Way, error: Exception) -> tuple[str, str]:
    """Category and reason of an exception raised while compiling or running."""
    from torchkiln.errors import CompileError, UnsupportedError

    inner = error.__cause__ if isinstance(error, BackendCompilerFailed) and error.__cause__ is not None else error
    if isinstance(error, BackendCompilerFailed):
        inner = error.inner_exception
    if isinstance(inner, (Unsupported, TorchRuntimeError, InternalTorchDynamoError)):
        return CAPTURE_FAILED, f"Dynamo: {_line(inner)}"
    if isinstance(inner, CompileError) and isinstance(inner.cause, UnsupportedError):
        return NOT_COMPILED, str(inner.cause)
    if way.backend != "aot_eager":
        try:
            _run_compiled(operator, [prepared], way.with_backend("aot_eager"))
        except Exception as again:
            return CAPTURE_FAILED, f"torch's own capture fails too: {_line(again)}"
        with suppress(Exception):
            try:
                _run_compiled(operator, [prepared], way.with_backend(foreseen_layouts))
            except UnforeseenSizes as mismatch:
                return CAPTURE_FAILED, f"the capture foresees other sizes: {str(mismatch).splitlines()[0]}"
    return CRASHED, _line(inner)


def _capture_gives(operator: Any, prepared: _Prepared, run: Run, way: Way) -> bool:
    """Whether the captured graph, run by torch itself, gives what the compiled one gave."""
    try:
        plain = _run_compiled(operator, [prepared], way)[0]
    except Exception:
        return False
    return all(
        difference(mine, theirs, values=prepared.values) is None
        for mine, theirs in (
            (run.results, plain.results),
            (run.gradients, plain.gradients),
            (run.arguments, plain.arguments),
        )
    )


def _line(error: BaseException) -> str:
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text[:300]}"


def collect_garbage() -> None:
    """Free what a case made. What outlives it is in torch's caches, and is not looked at again.

    After 200 cases collections would take a fifth of the time.
    """
    torch._dynamo.reset()
    gc.collect()
    gc.freeze()


def _no_guards(guards: Sequence[Any]) -> list[bool]:
    """What is called once needs no check whether it may be called again."""
    return [False] * len(guards)
