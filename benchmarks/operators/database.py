"""torch's operator database with larger samples than it has for tests.

Its samples are made of a few sizes that are constants of its modules. Made with larger constants, they are larger and
still fit each other: indices are in range, and sizes among the arguments are those of the tensors.
"""

from __future__ import annotations

import math
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from benchmarks.operators.entry import Call, Entry
from benchmarks.operators.programs import MATRIX
from conformance.cases import DTYPES, RANDOM, UNWRITTEN, Case, Sample, cases, database, differentiable, seed_everything
from conformance.compare import copy_arguments, tensors_of

# Elements of the largest tensor of a sample: as many as a matrix of the programs. With constants of about 900, samples
# of two dimensions have as many, with 92 those of three, with 30 those of four.
_GOAL = math.prod(MATRIX)
_ITS_OWN = 5
_SIZES = (_ITS_OWN, 30, 92, 900)
_MOST = 4 << 20
_FEWEST = 1 << 16

# Samples that are looked at of each size: operators with many have them for combinations of options, alike in size.
_SAMPLES = 24

# Seconds for making samples of one size. Some are made with loops over their elements, or with decompositions.
_MAKING = 3.0

# About how many elements a dimension of an image has that is repeated.
_WINDOWS = 32

# Seconds of a call in eager. A sample that would take ten times as long, by its elements, is not tried.
_LONGEST = 0.1


_FACTORIES = frozenset(
    (torch.empty, torch.full, torch.ones, torch.rand, torch.randint, torch.randn, torch.randperm, torch.zeros)
)


class _TooLarge(Exception):
    """A tensor of a sample has too many elements."""


@dataclass(frozen=True)
class _Candidate:
    sample: Sample

    @property
    def elements(self) -> int:
        return max((tensor.numel() for tensor in tensors_of((self.sample.args, self.sample.kwargs))), default=0)

    @property
    def is_empty(self) -> bool:
        return any(not tensor.numel() for tensor in tensors_of((self.sample.args, self.sample.kwargs)))

    @property
    def distance(self) -> float:
        """From what is wanted, as a factor's logarithm."""
        return abs(math.log2(max(self.elements, 1) / _GOAL))


def entries() -> dict[str, Entry]:
    """The operators that have one of the dtypes, by name."""
    names = dict.fromkeys(case.operator for case in cases(dtypes=("float32", "bfloat16")))
    return {name: Entry(name, partial(_make, name)) for name in names}


def _make(name: str, dtype: torch.dtype) -> Call:
    """The sample of about the size that is wanted, if eager takes it in good time; ``LookupError`` where none is.

    Only where the database has none, one is repeated until it is large.
    """
    case = Case(name, next(known for known, its_dtype in DTYPES.items() if its_dtype is dtype))
    if dtype not in database()[name].supported_dtypes("cpu"):
        raise LookupError(f"the operator has no {case.dtype}")
    operator = database()[name].op
    made = [candidate for size in _SIZES if (candidate := _nearest(_samples(case, size))) is not None]
    found = _largest_in_time(operator, made)
    if found is None or found.elements < _GOAL / 8:
        grown = [_Candidate(more) for less in made[:1] for more in repeated(less.sample)]
        found = _first_in_time(operator, grown) or found
    if found is None or found.elements < _FEWEST:
        raise LookupError("the database has no large sample")
    sample = found.sample
    base = name.partition("/")[0]
    return Call(operator, sample.args, sample.kwargs, sample.for_gradient, base not in RANDOM and base not in UNWRITTEN)


def _nearest(samples: list[Sample]) -> _Candidate | None:
    """The sample that is nearest in size; none with a tensor without elements is."""
    made = map(_Candidate, samples)
    return min((one for one in made if not one.is_empty), key=lambda one: one.distance, default=None)


def _largest_in_time(operator: Callable[..., Any], made: list[_Candidate]) -> _Candidate | None:
    """The one nearest in size of those that take little time; from small to large, and none that would take long."""
    found: _Candidate | None = None
    spent = 0.0
    for candidate in sorted(made, key=lambda candidate: candidate.elements):
        if found is not None and spent * candidate.elements / max(found.elements, 1) > 10 * _LONGEST:
            break
        seconds = _seconds(operator, candidate.sample)
        if seconds is not None and seconds > _LONGEST:
            break
        if seconds is not None and (found is None or candidate.distance < found.distance):
            found, spent = candidate, seconds
    return found


def _first_in_time(operator: Callable[..., Any], made: list[_Candidate]) -> _Candidate | None:
    return next(
        (one for one in made if (seconds := _seconds(operator, one.sample)) is not None and seconds <= 5 * _LONGEST),
        None,
    )


def _samples(case: Case, size: int) -> list[Sample]:
    """Samples with this constant, up to the first that is too large or fails."""
    info = database()[case.operator]
    found: list[Sample] = []
    seed_everything(0)
    with _constants(size), _Bounded(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            made = iter(info.sample_inputs("cpu", DTYPES[case.dtype], requires_grad=differentiable(case)))
            end = time.monotonic() + _MAKING
            for _, sample in zip(range(_SAMPLES), made, strict=False):
                found.append(Sample((sample.input, *sample.args), dict(sample.kwargs), sample.output_process_fn_grad))
                if time.monotonic() > end:
                    break
        except (_TooLarge, RuntimeError, ValueError, IndexError, TypeError, AssertionError, MemoryError):
            pass
    return found


@contextmanager
def _constants(size: int) -> Iterator[None]:
    """The database makes tensors of about this size in each dimension."""
    sizes = {"XS": size - size // 8, "S": size, "M": size + size // 8, "L": size + size // 4}
    before: list[tuple[Any, str, int]] = []
    database()
    for name, module in list(sys.modules.items()):
        if name.startswith("torch.testing._internal.") and size != _ITS_OWN:
            known = [(key, vars(module).get(key)) for key in sizes]
            before += [(module, key, value) for key, value in known if isinstance(value, int)]
    try:
        for module, key, _ in before:
            setattr(module, key, sizes[key])
        yield
    finally:
        for module, key, value in before:
            setattr(module, key, value)


class _Bounded(TorchFunctionMode):
    """No tensor is made that has far too many elements."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _FACTORIES:
            sizes = next((given for given in args if isinstance(given, (tuple, list))), args)
            if math.prod(size for size in sizes if isinstance(size, int)) > _MOST:
                raise _TooLarge(f"{func.__name__} of {sizes}")
        return func(*args, **(kwargs or {}))


def repeated(sample: Sample) -> Iterator[Sample]:
    """The sample with its first tensor, and all that have the same sizes, repeated until there are enough elements.

    Vectors become matrices. Of others, the dimensions after the second grow too, or the last of a matrix; then the
    first alone, where the others are sizes that other arguments know. Whether an operator takes it shows in a call.
    """
    tensors = tensors_of(sample.args[:1])
    if not tensors or not tensors[0].numel() or not tensors[0].dim():
        return
    shape = tensors[0].shape
    for times in _repetitions(shape):

        def grow(value: Any, times: tuple[int, ...] = times) -> Any:
            if not isinstance(value, Tensor) or value.shape != shape or value.layout is not torch.strided:
                return value
            grown = value.detach().repeat(times)
            if len(shape) == 1:
                grown = grown[: MATRIX[0], : MATRIX[1]].contiguous()
            return grown.requires_grad_(value.requires_grad)

        args, kwargs = pytree.tree_map(grow, (sample.args, sample.kwargs))
        yield Sample(args, kwargs, sample.for_gradient)


def _repetitions(shape: Sequence[int]) -> list[tuple[int, ...]]:
    if len(shape) == 1:
        return [(MATRIX[0], -(-MATRIX[1] // shape[0]))]
    inner = [1] * (len(shape) - 1)
    alone = (-(-_GOAL // math.prod(shape)), *inner)
    if len(shape) == 2:
        inner = [max(1, MATRIX[1] // shape[1])]
    else:
        inner[1:] = [max(1, _WINDOWS // size) for size in shape[2:]]
    rest = math.prod(shape) * math.prod(inner)
    return [(-(-_GOAL // rest), *inner), alone]


def _seconds(operator: Callable[..., Any], sample: Sample) -> float | None:
    """Of a call in eager; None where it fails."""
    args, kwargs = copy_arguments((sample.args, sample.kwargs))
    try:
        with torch.no_grad(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            start = time.perf_counter()
            operator(*args, **kwargs)
            return time.perf_counter() - start
    except Exception:
        return None
