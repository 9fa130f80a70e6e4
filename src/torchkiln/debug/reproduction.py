"""What files that reproduce a failure import: inputs, and the check that fails."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from torchkiln.debug.check import check
from torchkiln.debug.failure import SAID, STARTED, kind_of


def tensor(
    shape: Sequence[int],
    strides: Sequence[int],
    dtype: torch.dtype,
    *,
    requires_grad: bool = False,
    values: float | Sequence[float] | str | None = None,
    dynamic: Sequence[int] = (),
    static: bool = False,
) -> Tensor:
    """A tensor of these sizes and strides: with ``values``, a number, a list or hexadecimal bytes, or random numbers.

    Integers are zeros, which is an index that every tensor has, unless they are given. Dimensions that are ``dynamic``
    have symbolic sizes. A ``static`` tensor stays the same from call to call, as a parameter.
    """
    made = torch.empty_strided(shape, strides, dtype=dtype)
    if isinstance(values, str):
        content = torch.frombuffer(bytearray(bytes.fromhex(values)), dtype=dtype) if values else torch.empty(0)
        store(made, content.to(dtype))
    elif values is not None:
        given = values if isinstance(values, Sequence) else [values]
        store(made, torch.tensor(given, dtype=torch.float64 if dtype.is_floating_point else dtype))
    elif dtype.is_floating_point or dtype.is_complex:
        store(made, torch.randn(list(shape), dtype=torch.complex64 if dtype.is_complex else torch.float32))
    elif dtype is torch.bool:
        store(made, torch.randint(0, 2, list(shape)))
    else:
        made.zero_()
    return _marked(made.requires_grad_(requires_grad), dynamic, static=static)


def view(
    memory: Tensor,
    offset: int,
    shape: Sequence[int],
    strides: Sequence[int],
    dtype: torch.dtype,
    *,
    requires_grad: bool = False,
    dynamic: Sequence[int] = (),
    static: bool = False,
) -> Tensor:
    """A tensor, a leaf of its own, over ``memory`` from that element of its dtype on; others may show the same."""
    made = torch.empty(0, dtype=dtype).set_(memory.untyped_storage(), offset, tuple(shape), tuple(strides))
    return _marked(made.requires_grad_(requires_grad), dynamic, static=static)


def _marked(tensor: Tensor, dynamic: Sequence[int], *, static: bool) -> Tensor:
    if dynamic:
        torch._dynamo.mark_dynamic(tensor, list(dynamic))
    if static:
        torch._dynamo.mark_static_address(tensor)
    return tensor


def store(target: Tensor, content: Tensor) -> None:
    """Store ``content``, as many elements in order or one for all, in ``target``, which may be expanded.

    Torch refuses to write elements that share memory; here they are written once.
    """
    wanted = content.reshape(target.shape) if content.numel() == target.numel() else content.expand(target.shape)
    once = tuple(slice(0, 1 if stride == 0 else None) for stride in target.stride())
    with torch.no_grad():
        target[once].copy_(wanted[once])


def reproduce(
    program: Callable[..., Any],
    inputs: Sequence[Any],
    *,
    dynamic: bool | None = False,
    slower: float | None = None,
    settings: Mapping[str, object] | None = None,
    modes: Mapping[str, str] | None = None,
) -> None:
    """Compile ``program``, call it and compare it with eager; ends the process with exit code 1 where that fails.

    What it prints says whether it got so far, and which kind of failure it is.
    """
    print(STARTED, flush=True)
    try:
        check(program, inputs, dynamic=dynamic, slower=slower, settings=settings, modes=modes)
    except Exception as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        print(f"{SAID}{kind_of(error)}", flush=True)
        sys.exit(1)
    print("no failure: the compiled program agrees with eager")
