"""One model compiled and in eager: inference and two training steps with dropout, judged against float64.

Compiling reorders sums and removes roundings, so compiled and eager differ although both are right. Both are compared
with the same computation in float64, from the same rounded weights and with the same dropout masks: what is compiled
may not be further from it than eager, but for rounding.
"""

from __future__ import annotations

import copy
import random
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy
import torch
from torch import Tensor, nn
from torch._dynamo.backends.registry import lookup_backend
from torch._dynamo.utils import counters
from torch.utils._python_dispatch import TorchDispatchMode

import torchkiln
from tests.models.architectures.architecture import Architecture, Inputs

STEPS = 2
# Errors of one tensor in the Euclidean norm: compiled may have this many times eager's, its typical one, or what
# roundings of the weights move the tensor by.
EAGER_FACTOR = 4.0
# What eager gets exactly may be off by this many units in the last place.
SLACK_ULPS = 8.0
# Roundings of the weights that are tried where the first does not explain a difference. A router or a rounded duration
# that two choices fit equally well is turned by some of them only: in GPT-OSS by three of ten.
ROUNDINGS = 12
# A tensor that is zero but for rounding (the gradient of a bias before a norm) is measured against the largest ones.
FLOOR = 1e-3

_RANDOM_IN_PLACE = frozenset(("uniform_", "normal_", "exponential_", "bernoulli_", "log_normal_", "cauchy_"))
_RANDOM_NEW = frozenset(("rand", "randn", "rand_like", "randn_like"))


@dataclass(frozen=True)
class Judgement:
    """One dtype of one model. Errors are relative, of the worst tensor; ``failures`` is empty where all is right.

    ``captured`` is what differs in the same way with ``aot_eager``: Dynamo captured another program than eager runs.
    ``undecided`` are tensors whose size a rounding of the weights changes in float64 too; they are not compared.
    """

    dtype: str
    failures: tuple[str, ...] = ()
    captured: tuple[str, ...] = ()
    undecided: tuple[str, ...] = ()
    output_error: float = 0.0
    eager_output_error: float = 0.0
    gradient_error: float = 0.0
    eager_gradient_error: float = 0.0
    graphs: int = 0
    breaks: int = 0
    kernels: int = 0
    externs: int = 0
    share: float = 0.0
    seconds: float = 0.0


class _DrawnAs(TorchDispatchMode):
    """Random float64 numbers are those of ``dtype``: a generator gives other numbers for another precision."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self._dtype = dtype

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = func.overloadpacket.__name__
        if name in _RANDOM_IN_PLACE and args[0].dtype == torch.float64:
            drawn = torch.empty_like(args[0], dtype=self._dtype)
            func(drawn, *args[1:], **kwargs)
            return args[0].copy_(drawn)
        if name in _RANDOM_NEW:
            like = args[0].dtype if name.endswith("_like") else torch.get_default_dtype()
            if (kwargs.get("dtype") or like) == torch.float64:
                return func(*args, **{**kwargs, "dtype": self._dtype}).double()
        return func(*args, **kwargs)


class _Count(TorchDispatchMode):
    """How many operators ran."""

    def __init__(self) -> None:
        super().__init__()
        self.operators = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.operators += 1
        return func(*args, **(kwargs or {}))


@dataclass
class _Coverage:
    """Counts the operators of graphs that were compiled, by running each captured graph once more on copies."""

    backend: str
    operators: int = 0
    counting: bool = False

    def __call__(self, graph: torch.fx.GraphModule, inputs: list[Any], **options: Any) -> Callable[..., Any]:
        captured = copy.deepcopy(graph)
        compiled = lookup_backend(self.backend)(graph, inputs, **options)

        def run(*arguments: Any) -> Any:
            if self.counting:
                copies = [a.detach().clone() if isinstance(a, Tensor) else a for a in arguments]
                with torch.random.fork_rng(devices=[]), torch.no_grad(), _Count() as count:
                    captured(*copies)
                self.operators += count.operators
            return compiled(*arguments)

        return run


@dataclass
class _Left:
    """What a run leaves behind, by name."""

    outputs: dict[str, Tensor] = field(default_factory=dict)
    gradients: dict[str, Tensor] = field(default_factory=dict)
    buffers: dict[str, Tensor] = field(default_factory=dict)


def _floating(output: Any, name: str = "output") -> Iterator[tuple[str, Tensor]]:
    """The floating-point tensors of a model's answer, by name."""
    if isinstance(output, Tensor):
        if output.is_floating_point():
            yield name, output
    elif isinstance(output, dict):
        for key, value in output.items():
            yield from _floating(value, f"{name}.{key}")
    elif isinstance(output, (tuple, list)):
        for k, value in enumerate(output):
            yield from _floating(value, f"{name}[{k}]")


def _seed() -> None:
    """Some models draw from numpy or from Python."""
    torch.manual_seed(1)
    numpy.random.seed(1)
    random.seed(1)


def _infer(model: nn.Module, call: Callable[..., Any], inputs: Inputs) -> _Left:
    model.eval()
    _seed()
    with torch.no_grad():
        return _Left({f"inference {name}": value for name, value in _floating(call(**inputs))})


def _train(model: nn.Module, call: Callable[..., Any], inputs: Inputs) -> _Left:
    """Steps whose gradients add up; the first call of a compiled function takes another path than later ones."""
    model.train()
    _seed()
    left = _Left()
    for step in range(STEPS):
        outputs = dict(_floating(call(**inputs)))
        losses = [value.square().mean() for value in outputs.values() if value.requires_grad]
        torch.stack([loss.double() for loss in losses]).sum().backward()
        left.outputs |= {f"step {step} {name}": value.detach() for name, value in outputs.items()}
    # AOTAutograd gives zeros where eager gives None: for a parameter whose output the loss does not read.
    left.gradients = {n: torch.zeros_like(p) if p.grad is None else p.grad for n, p in model.named_parameters()}
    left.buffers = {n: b for n, b in model.named_buffers() if b.is_floating_point()}
    return left


def _errors(got: dict[str, Tensor], want: dict[str, Tensor], eager: dict[str, Tensor]) -> dict[str, float]:
    """By name, relative to the tensor's size, or to the largest one's where the tensor is next to nothing.

    Infinite where NaNs and infinities are elsewhere than eager's; float64 may have others than eager.
    """
    norms = {name: value.double().nan_to_num(0.0, 0.0, 0.0).norm().item() for name, value in want.items()}
    floor = max(FLOOR * max(norms.values(), default=0.0), 1e-300)
    found = {}
    for name, value in want.items():
        other, like = got[name].double(), eager[name]
        if other.shape != value.shape or not torch.equal(other.isfinite(), like.isfinite()):
            found[name] = float("inf")
            continue
        known = like.isfinite() & value.isfinite()
        found[name] = (other - value.double())[known].norm().item() / max(norms[name], floor)
    return found


def _judge(
    what: str,
    compiled: dict[str, Tensor],
    eager: dict[str, Tensor],
    precise: dict[str, Tensor],
    moved: list[dict[str, Tensor]],
    dtype: torch.dtype,
) -> tuple[float, float, dict[str, str]]:
    """The worst errors of compiled and of eager, and complaints by name."""
    if compiled.keys() != eager.keys():
        return float("inf"), 0.0, {f"{what}s": f"are {sorted(compiled)}, eager's {sorted(eager)}"}
    ours, theirs = _errors(compiled, precise, eager), _errors(eager, precise, eager)
    moves = [_errors(one, precise, precise) for one in moved]
    typical = statistics.median(theirs.values()) if theirs else 0.0
    complaints = {}
    for name, error in ours.items():
        undecided = any(one[name].shape != precise[name].shape for one in moved)
        if undecided and compiled[name].dtype == eager[name].dtype and compiled[name].dim() == eager[name].dim():
            theirs[name] = ours[name] = 0.0
            continue
        if compiled[name].dtype != eager[name].dtype or compiled[name].shape != eager[name].shape:
            shapes = [f"{t.dtype} {tuple(t.shape)}" for t in (compiled[name], eager[name])]
            complaints[f"{what} {name}"] = f"is {shapes[0]}, eager's {shapes[1]}"
            continue
        conditioning = max((move[name] for move in moves if move[name] < float("inf")), default=0.0)
        limit = EAGER_FACTOR * max(theirs[name], typical, conditioning) + SLACK_ULPS * torch.finfo(dtype).eps
        if not error <= limit:
            complaints[f"{what} {name}"] = f"has error {error:.2g}, eager {theirs[name]:.2g}, limit {limit:.2g}"
    return max(ours.values(), default=0.0), max(theirs.values(), default=0.0), complaints


def _strides(what: str, compiled: dict[str, Tensor], eager: dict[str, Tensor]) -> dict[str, str]:
    found = {}
    for name, value in eager.items():
        other = compiled.get(name)
        if other is not None and other.shape == value.shape:
            sizes = zip(other.stride(), value.stride(), value.shape, strict=True)
            if any(a != b and n > 1 for a, b, n in sizes):
                found[f"{what} {name}"] = f"are {other.stride()}, eager's {value.stride()}"
    return found


@contextmanager
def _reference(model: nn.Module, dtype: torch.dtype) -> Iterator[None]:
    """float64 as ``dtype`` would be: the same random numbers, and no operator that takes no float64."""
    for module in model.modules():
        config = getattr(module, "config", None)
        if getattr(config, "_experts_implementation", None) is not None:
            config._experts_implementation = "eager"  # grouped matmul refuses float64
    with _DrawnAs(dtype):
        yield


def _operators(model: nn.Module, inputs: Inputs) -> int:
    model = copy.deepcopy(model).train()
    _seed()
    with torch.no_grad(), _Count() as count:
        model(**inputs)
    return count.operators


@dataclass(frozen=True)
class _Eager:
    """What eager and float64 leave behind of inference and of training; each of ``moved`` is float64 with every weight
    and input off by one rounding: norms over few elements amplify that, and other correct orders of sums differ as
    much."""

    model: nn.Module
    inputs: Inputs
    dtype: torch.dtype
    left: list[_Left]
    precise: list[_Left]
    moved: list[list[_Left]]


def _run_eagerly(architecture: Architecture, dtype: torch.dtype) -> _Eager:
    torch.manual_seed(0)
    model = architecture.build().to(dtype)
    inputs = {k: v.to(dtype) if v.is_floating_point() else v for k, v in architecture.inputs().items()}
    eager = copy.deepcopy(model)
    left = [_infer(eager, eager, inputs), _train(eager, eager, inputs)]
    precise = _run_precisely(model, inputs, dtype, lambda value: value)
    found = _Eager(model, inputs, dtype, left, precise, [])
    _try_rounding(found)
    return found


def _run_precisely(
    model: nn.Module, inputs: Inputs, dtype: torch.dtype, change: Callable[[Tensor], Tensor]
) -> list[_Left]:
    """In float64, with every weight and input changed."""
    model = copy.deepcopy(model).double()
    inputs = {k: change(v.double()) if v.is_floating_point() else v for k, v in inputs.items()}
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(change(parameter))
    with _reference(model, dtype):
        return [_infer(model, model, inputs), _train(model, model, inputs)]


def _try_rounding(eager: _Eager) -> None:
    """One more of ``moved``, with roundings that were not tried."""
    generator = torch.Generator().manual_seed(2 + len(eager.moved))
    eps = torch.finfo(eager.dtype).eps

    def change(value: Tensor) -> Tensor:
        return value * (1 + eps * (torch.rand(value.shape, generator=generator, dtype=value.dtype) - 0.5))

    eager.moved.append(_run_precisely(eager.model, eager.inputs, eager.dtype, change))


def _run_compiled(eager: _Eager, backend: str, coverage: _Coverage) -> list[_Left]:
    options: dict[str, Any] = {"options": {"fallback": False, "rng": "eager"}} if backend == "kiln" else {}
    torch._dynamo.reset()
    model = copy.deepcopy(eager.model)
    left = [_infer(model, torch.compile(model, backend=backend, dynamic=False, **options), eager.inputs)]
    torch._dynamo.reset()
    torchkiln.reset_stats()
    counters.clear()
    model = copy.deepcopy(eager.model)
    call = torch.compile(model, backend=coverage, dynamic=False, **options)
    coverage.counting = True

    def counted(**arguments: Tensor) -> Any:
        answer = call(**arguments)
        coverage.counting = False
        return answer

    left.append(_train(model, counted, eager.inputs))
    return left


def _of_kind(kind: str, side: list[_Left]) -> dict[str, Tensor]:
    return {name: value for left in side for name, value in getattr(left, kind).items()}


def _undecided(eager: _Eager) -> tuple[str, ...]:
    sizes = {name: value.shape for name, value in _of_kind("outputs", eager.precise).items()}
    moved = [_of_kind("outputs", side) for side in eager.moved]
    return tuple(name for name, size in sizes.items() if any(side[name].shape != size for side in moved))


def _compare(compiled: list[_Left], eager: _Eager) -> tuple[list[float], dict[str, str]]:
    """The worst errors (outputs and eager's, gradients and eager's, buffers and eager's), and complaints by name."""
    errors: list[float] = []
    complaints: dict[str, str] = {}
    for kind in ("outputs", "gradients", "buffers"):
        sides = [_of_kind(kind, side) for side in (compiled, eager.left, eager.precise)]
        moved = [_of_kind(kind, side) for side in eager.moved]
        worst, eager_worst, found = _judge(kind.removesuffix("s"), *sides, moved, eager.dtype)
        errors += [worst, eager_worst]
        complaints |= found
        if kind == "outputs":
            complaints |= _strides("strides of output", sides[0], sides[1])
    return errors, complaints


def _blame(eager: _Eager, complaints: dict[str, str]) -> tuple[dict[str, str], dict[str, str]]:
    """Complaints about the compiler, and those that capture alone, with no compiler behind it, gives as well."""
    try:
        _, captured = _compare(_run_compiled(eager, "aot_eager", _Coverage("aot_eager")), eager)
    except Exception:
        return complaints, {}
    ours = {name: text for name, text in complaints.items() if name not in captured}
    return ours, {name: text for name, text in complaints.items() if name in captured}


def _blame_error(eager: _Eager, error: Exception) -> dict[str, tuple[str, ...]]:
    """An error of the compiler, or of capture where that raises the same class with no compiler behind it."""
    text = " ".join(f"{type(error).__name__}: {error}".split("\n\nSet TORCHDYNAMO_VERBOSE")[0].split())[:600]
    try:
        _run_compiled(eager, "aot_eager", _Coverage("aot_eager"))
    except Exception as other:
        if type(other) is type(error):
            return {"captured": (text,)}
    return {"failures": (text,)}


def check(architecture: Architecture, dtype_name: str, backend: str = "kiln") -> Judgement:
    """Compile and compare in this process; an exception is eager's own."""
    started = time.perf_counter()
    eager = _run_eagerly(architecture, getattr(torch, dtype_name))
    coverage = _Coverage(backend)
    try:
        compiled = _run_compiled(eager, backend, coverage)
    except Exception as error:
        return Judgement(dtype_name, **_blame_error(eager, error), seconds=time.perf_counter() - started)
    stats = torchkiln.stats()
    breaks = sum(counters["graph_break"].values())
    failures = [f"{fallback.graph} fell back: {fallback.reason}" for fallback in stats.fallbacks]
    if backend == "kiln" and not stats.graphs:
        failures.append("no graph was compiled")
    errors, complaints = _compare(compiled, eager)
    while complaints and len(eager.moved) < ROUNDINGS:
        _try_rounding(eager)
        errors, complaints = _compare(compiled, eager)
    captured: dict[str, str] = {}
    if complaints and backend == "kiln":
        complaints, captured = _blame(eager, complaints)
    return Judgement(
        dtype=dtype_name,
        failures=tuple(failures + _first(complaints)),
        captured=tuple(_first(captured)),
        undecided=_undecided(eager),
        output_error=errors[0],
        eager_output_error=errors[1],
        gradient_error=errors[2],
        eager_gradient_error=errors[3],
        graphs=stats.graphs,
        breaks=breaks,
        kernels=stats.kernels,
        externs=sum(stats.extern_calls.values()),
        # Capture adds a few operators (constants are lifted), so that the ratio may be a little above 1.
        share=min(1.0, coverage.operators / max(_operators(eager.model, eager.inputs), 1)),
        seconds=time.perf_counter() - started,
    )


def _first(complaints: dict[str, str]) -> list[str]:
    """A few of them, outputs before gradients."""
    shown = [f"{name} {text}" for name, text in complaints.items()]
    return shown[:4] + ([f"and {len(shown) - 4} more"] if len(shown) > 4 else [])
