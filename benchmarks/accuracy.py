"""How far float32 functions are from the exactly rounded value, here and in eager, and how fast.

    python benchmarks/accuracy.py [--only sin,cos] [--exhaustive] [--samples 24] [--json FILE]

Errors are in units of the last place (ulp) of the exact result: 0.5 is correctly rounded. Arguments are 2**SAMPLES
patterns of bits, evenly spread over all 2**32, so every exponent and sign has its share; with ``--exhaustive`` all of
them. Functions of two arguments take random pairs. The exact value is float64's, and that of mpmath for the few results
of which float64 has too few digits (``lgamma`` and ``digamma`` near their zeros). Speed is eager's time over ours for
262,144 values of ordinary size, taken in turns, the call included.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import mpmath
import torch
import torch.nn.functional as F

Function = Callable[..., torch.Tensor]

UNARY: dict[str, Function] = {
    **{
        name: getattr(torch, name)
        for name in (
            *("exp", "exp2", "expm1", "log", "log2", "log10", "log1p", "sin", "cos", "tan", "asin", "acos", "atan"),
            *("sinh", "cosh", "tanh", "asinh", "acosh", "atanh", "erf", "erfc", "erfinv", "lgamma", "digamma"),
            *("sqrt", "rsqrt", "reciprocal", "sigmoid"),
        )
    },
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu tanh": lambda x: F.gelu(x, approximate="tanh"),
    "mish": F.mish,
    "softplus": F.softplus,
    "logsigmoid": F.logsigmoid,
    "elu": F.elu,
    "selu": F.selu,
    "logit": torch.logit,
    "pow 2.5": lambda x: x**2.5,
    "pow -0.375": lambda x: x**-0.375,
    "sinc": torch.sinc,
    "ndtri": torch.special.ndtri,
    "log_ndtr": torch.special.log_ndtr,
    "entr": torch.special.entr,
}
BINARY: dict[str, Function] = {
    "pow": torch.pow,
    "atan2": torch.atan2,
    "hypot": torch.hypot,
    "fmod": torch.fmod,
    "remainder": torch.remainder,
    "floor_divide": torch.floor_divide,
    "logaddexp": torch.logaddexp,
    "logaddexp2": torch.logaddexp2,
    "xlogy": torch.xlogy,
}
FUNCTIONS = {**UNARY, **BINARY}
# Near their zeros float64 has too few digits of these; how many arguments of each are computed in many.
_ZEROS: dict[str, Callable[[mpmath.mpf], mpmath.mpf]] = {
    "lgamma": lambda x: mpmath.log(abs(mpmath.gamma(x))) if x < 1e6 else mpmath.loggamma(x),
    "digamma": mpmath.digamma,
}
_MOST_EXACT = 2000
_BLOCK = 1 << 22


@dataclass(frozen=True)
class Result:
    """The worst error of one function, in ulp, and where it is."""

    name: str
    ours: float
    ours_at: tuple[float, ...]
    eager: float
    eager_at: tuple[float, ...]
    speed: float | None


def ulp_errors(got: torch.Tensor, exact: torch.Tensor) -> torch.Tensor:
    """The distance of float32 results from float64 ones, in units of the last place of the latter as float32.

    Infinite where one of them is NaN, or infinite, and the other is not what rounds to it.
    """
    exponent = torch.frexp(exact).exponent.clamp(min=-125)
    error = (got.double() - exact).abs() * torch.exp2((24 - exponent).double())
    nearest = exact.float()
    # Beyond the largest number the next one would be infinity: one ulp further than that number is that much wrong.
    most = torch.finfo(torch.float32).max
    overflow = nearest.isinf() | got.isinf()
    clipped = exact.clamp(-(2.0**128), 2.0**128)
    steps = (got.double().clamp(-(2.0**128), 2.0**128) - clipped).abs() / 2.0**104
    error = torch.where(overflow & (exact.abs() > 0.5 * most), steps, error)
    error = torch.where(got == nearest, error.clamp(max=0.5).nan_to_num(0.0), error)
    both_nan = got.isnan() & exact.isnan()
    return torch.where(both_nan, 0.0, error).nan_to_num(torch.inf, torch.inf)


def patterns(start: int, count: int, step: int) -> torch.Tensor:
    """Float32 values by the bits ``start``, ``start + step``, ..."""
    bits = start + step * torch.arange(count, dtype=torch.int64)
    return torch.where(bits < 2**31, bits, bits - 2**32).int().view(torch.float32)


def blocks(arity: int, samples: int, *, exhaustive: bool) -> Iterator[tuple[torch.Tensor, ...]]:
    """The arguments, a few million at a time."""
    if arity == 2:
        yield from _pairs(samples)
        return
    step = 1 if exhaustive else max(1, 2 ** (32 - samples))
    # An odd offset, so that samples are not all round numbers.
    first = 0 if exhaustive else (step * 5 // 8) | 1
    total = 2**32 // step
    for begin in range(0, total, _BLOCK):
        yield (patterns(first % step + begin * step, min(_BLOCK, total - begin), step),)


def _pairs(samples: int) -> Iterator[tuple[torch.Tensor, ...]]:
    generator = torch.Generator().manual_seed(0)
    count = min(_BLOCK, 2**samples // 4)
    for scale in (0.5, 3.0, 30.0, None):
        if scale is None:
            made = [torch.randint(-(2**31), 2**31, (count,), generator=generator) for _ in range(2)]
            yield tuple(bits.int().view(torch.float32) for bits in made)
        else:
            yield tuple(torch.randn(count, generator=generator) * scale for _ in range(2))


def exact_value(name: str, arguments: Sequence[torch.Tensor]) -> torch.Tensor:
    """What the function is, in float64."""
    exact = FUNCTIONS[name](*(x.double() for x in arguments))
    if name in _ZEROS:
        (x,) = arguments
        near = ((exact.abs() < 1e-2) & x.isfinite() & (x.abs() < 1e4) & (x != x.round())).nonzero().flatten()
        for k in near[:: max(1, len(near) // _MOST_EXACT)].tolist():
            with mpmath.workdps(40):
                exact[k] = float(_ZEROS[name](mpmath.mpf(float(x[k]))))
        far = torch.ones_like(exact, dtype=torch.bool)
        far[near] = False
        far[near[:: max(1, len(near) // _MOST_EXACT)]] = True
        exact = torch.where(far, exact, torch.nan)
    return exact


def compiled(function: Function) -> Function:
    run: Function = torch.compile(
        lambda *x: function(*x),
        backend="kiln",
        fullgraph=True,
        dynamic=False,
        options={"fallback": False, "cache": False},
    )
    return run


def worst(name: str, run: Function, arguments: Sequence[torch.Tensor], exact: torch.Tensor) -> tuple[float, int]:
    errors = ulp_errors(run(*arguments), exact)
    if name in _ZEROS:
        errors = torch.where(exact.isnan(), 0.0, errors)
    place = int(errors.argmax())
    return float(errors[place]), place


def measure(name: str, samples: int, *, exhaustive: bool = False, timed: bool = True) -> Result:
    """The worst errors of ``name`` over all arguments."""
    torch._dynamo.reset()
    function = FUNCTIONS[name]
    run = compiled(function)
    found: dict[str, tuple[float, tuple[float, ...]]] = {"ours": (-1.0, ()), "eager": (-1.0, ())}
    for arguments in blocks(2 if name in BINARY else 1, samples, exhaustive=exhaustive):
        exact = exact_value(name, arguments)
        for who, call in (("ours", run), ("eager", function)):
            error, place = worst(name, call, arguments, exact)
            if error > found[who][0]:
                found[who] = error, tuple(float(x[place]) for x in arguments)
    return Result(name, *found["ours"], *found["eager"], _speed(name) if timed else None)


def _speed(name: str) -> float:
    torch._dynamo.reset()
    function, arity = FUNCTIONS[name], 2 if name in BINARY else 1
    run = compiled(function)
    inputs = [torch.rand(1 << 18) * 0.9 + 0.05 for _ in range(arity)]
    if name == "acosh":
        inputs = [inputs[0] + 1]
    best = {}
    run(*inputs)
    for _ in range(30):
        for who, call in (("ours", run), ("eager", function)):
            start = time.perf_counter()
            call(*inputs)
            best[who] = min(best.get(who, float("inf")), time.perf_counter() - start)
    return best["eager"] / best["ours"]


def line(result: Result) -> str:
    def place(at: tuple[float, ...]) -> str:
        return ", ".join(f"{x:.9g}" for x in at)

    speed = "" if result.speed is None else f"{result.speed:.2f}"
    where = f"{place(result.ours_at)} | {place(result.eager_at)}"
    return f"| {result.name} | {result.ours:.2f} | {result.eager:.2f} | {speed} | {where} |"


HEADER = """| function | worst ulp | eager's | speed | worst at | eager's worst at |
|---|---|---|---|---|---|"""


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", default="", help="names of functions, by commas")
    parser.add_argument("--exhaustive", action="store_true", help="all 2**32 arguments of functions of one")
    parser.add_argument("--samples", type=int, default=24, help="log2 of how many arguments otherwise")
    parser.add_argument("--json", type=Path, help="a file for the figures")
    options = parser.parse_args(arguments)
    names = [name for name in options.only.split(",") if name] or list(FUNCTIONS)
    unknown = [name for name in names if name not in FUNCTIONS]
    if unknown:
        parser.error(f"no function {unknown[0]!r}; there are {', '.join(FUNCTIONS)}")
    print(HEADER, flush=True)
    results = []
    for name in names:
        results.append(measure(name, options.samples, exhaustive=options.exhaustive))
        print(line(results[-1]), flush=True)
    if options.json:
        options.json.write_text(json.dumps([asdict(result) for result in results], indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
