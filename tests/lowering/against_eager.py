"""Compiled against eager, many operators in one graph: values, dtypes, shapes and strides."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

import torchkiln
from torchkiln.config import Settings
from torchkiln.graph.decompositions import decompositions

FLOATS = (torch.float32, torch.float64, torch.float16, torch.bfloat16)
INTEGERS = (torch.int8, torch.int16, torch.int32, torch.int64, torch.uint8)
DTYPES = (*FLOATS, *INTEGERS, torch.bool)
SHAPES = ((), (0,), (1,), (5,), (3, 0, 2), (4, 7), (2, 3, 33), (2, 130))

# What one operator may be off by; float math functions are a few units in the last place from the exact result.
_RELATIVE = {torch.float32: 2e-6, torch.float64: 1e-13, torch.float16: 1e-3, torch.bfloat16: 8e-3}
# Sums are taken in another order than eager's.
REDUCTION_SLACK = 8


def capture(function: Callable[..., Any], inputs: Sequence[Any]) -> torch.fx.GraphModule:
    """The functional ATen graph of ``function``, taken apart as the backend takes graphs apart."""
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    fakes = [mode.from_tensor(value) if isinstance(value, torch.Tensor) else value for value in inputs]
    # Traced first: what torch takes apart inside an operator may mutate too, and must be made functional as well.
    traced = make_fx(function, decomposition_table=decompositions())(*fakes)
    functional = torch.func.functionalize(traced, remove="mutations")
    return make_fx(functional, decomposition_table=decompositions())(*fakes)


def compiled(function: Callable[..., Any], inputs: Sequence[Any], **settings: Any) -> Callable[..., list[Any]]:
    """``function`` of positional tensors to a tuple of tensors, compiled with no fallback and no Dynamo."""
    run = torchkiln.compile_fx_inner(
        capture(function, inputs), list(inputs), is_inference=True, settings=Settings(fallback=False, **settings)
    )
    return lambda *arguments: list(run(list(arguments)))


def check(
    functions: Mapping[str, Callable[..., Any]],
    inputs: Sequence[torch.Tensor],
    *,
    exact: bool = False,
    slack: float = 1,
    extern: Sequence[str] = (),
    **settings: Any,
) -> None:
    """Compile all ``functions`` of ``inputs`` as one graph and compare every result with eager.

    ``exact`` asks for the same bits (any NaN equals any NaN); otherwise being close to what eager gives in float64
    will do as well, since eager's own float16 and bfloat16 functions are not always the closest. Operators named in
    ``extern`` may be called through the dispatcher; any other must have become generated code. Functions that eager
    refuses are left out.
    """
    expected: dict[str, tuple[torch.Tensor, ...]] = {}
    for name, function in functions.items():
        try:
            expected[name] = _flat(function(*inputs))
        except (RuntimeError, IndexError, TypeError, NotImplementedError):
            continue
    assert expected, "eager refused every function"

    def together(*arguments: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return tuple(result for name in expected for result in _flat(functions[name](*arguments)))

    before = torchkiln.stats().extern_calls
    run = compiled(together, inputs, **settings)
    results = iter(run(*inputs))
    called = {k for k, v in torchkiln.stats().extern_calls.items() if v > before.get(k, 0)}
    complaints = [f"{name} ran as an extern call" for name in sorted(called.difference(extern))]
    for name, wanted in expected.items():
        for position, value in enumerate(wanted):
            got = next(results)
            complaint = difference(got, value, exact=exact, slack=slack)
            if complaint and not exact and value.dtype.is_floating_point and got.dtype == value.dtype:
                precise = _flat(functions[name](*(_in_double(x) for x in inputs)))[position]
                if difference(got.contiguous(), precise.to(value.dtype).contiguous(), slack=slack) is None:
                    complaint = None
            if complaint:
                complaints.append(f"{name}, result {position}: {complaint}")
    assert not complaints, "\n" + "\n".join(complaints)


def _in_double(value: torch.Tensor) -> torch.Tensor:
    return value.double() if value.dtype.is_floating_point else value


def _flat(result: Any) -> tuple[torch.Tensor, ...]:
    return (result,) if isinstance(result, torch.Tensor) else tuple(result)


def difference(got: torch.Tensor, wanted: torch.Tensor, *, exact: bool = False, slack: float = 1) -> str | None:
    """What differs, or None."""
    if (got.dtype, got.shape) != (wanted.dtype, wanted.shape):
        return f"{got.dtype}{list(got.shape)} where eager gives {wanted.dtype}{list(wanted.shape)}"
    if got.numel() and any(a != b for a, b, n in zip(got.stride(), wanted.stride(), got.shape, strict=True) if n > 1):
        return f"strides {got.stride()} where eager gives {wanted.stride()}"
    same = _same_bits(got, wanted)
    if not exact and got.dtype.is_floating_point:
        relative = _RELATIVE[got.dtype] * slack
        # Denormal results may be flushed by either side.
        smallest = torch.finfo(got.dtype).tiny * (1 if got.dtype == torch.float16 else 64)
        close = torch.isclose(got.double(), wanted.double(), rtol=relative, atol=smallest + 1e-30, equal_nan=True)
        if slack > 1:
            close |= torch.isclose(got.double(), wanted.double(), rtol=0, atol=relative, equal_nan=True)
        same |= close
    if bool(same.all()):
        return None
    at = tuple(int(k) for k in (~same).nonzero()[0])
    return (
        f"{int((~same).sum())} of {same.numel()} differ, first at {at}: {got[at].item()!r}, eager {wanted[at].item()!r}"
    )


def _same_bits(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    if not left.dtype.is_floating_point:
        return left == right
    return ((left == right) & (left.signbit() == right.signbit())) | (left.isnan() & right.isnan())


_SPECIAL = (
    0.0, -0.0, 1.0, -1.0, 0.5, -0.5, 1.5, 2.5, -2.5, float("nan"), float("inf"), float("-inf"),
    1e-40, -1e-42, 3.4e38, -3.4e38, 88.8, -87.5, -104.0, 1e-8, 0.9999999, 1.0000001, 16777217.0, 255.5,
)  # fmt: skip


def specimen(dtype: torch.dtype, shape: Sequence[int], seed: int = 0, *, tame: bool = False) -> torch.Tensor:
    """Values of every awkward kind the dtype has, shuffled among plain ones; ``tame`` leaves out the awkward."""
    generator = torch.Generator().manual_seed(seed)
    count = int(torch.Size(shape).numel())
    if dtype == torch.bool:
        return torch.randint(0, 2, tuple(shape), generator=generator).bool()
    if dtype.is_floating_point:
        values = torch.randn(count, generator=generator, dtype=torch.float64) * (1 if tame else 3)
        special = torch.tensor(_SPECIAL, dtype=torch.float64)
    else:
        info = torch.iinfo(dtype)
        values = torch.randint(max(info.min, -9), 10, (count,), generator=generator, dtype=torch.int64)
        special = torch.tensor([0, 1, 2, info.min, info.max, info.min + 1, info.max - 1, info.max // 2])
    if not tame:
        chosen = torch.rand(count, generator=generator) < 0.4
        picks = torch.randint(0, len(special), (count,), generator=generator)
        values = torch.where(chosen, special[picks], values)
    return values.to(dtype).reshape(tuple(shape))


def layouts(value: torch.Tensor) -> dict[str, torch.Tensor]:
    """The same values in memory laid out in every way an input may be."""
    found = {"contiguous": value}
    if value.dim() >= 2:
        found["transposed"] = value.transpose(0, -1).contiguous().transpose(0, -1)
    if value.dim() >= 1 and value.numel():
        wide = torch.zeros((*value.shape[:-1], value.shape[-1] * 2 + 3), dtype=value.dtype)
        wide[..., 1 : 1 + 2 * value.shape[-1] : 2] = value
        found["sliced"] = wide[..., 1 : 1 + 2 * value.shape[-1] : 2]
        found["expanded"] = value.select(0, 0).unsqueeze(0).expand(value.shape)
        padded = torch.zeros((value.shape[0] + 2, *value.shape[1:]), dtype=value.dtype)
        padded[2:] = value
        found["offset"] = padded[2:]
    return found
