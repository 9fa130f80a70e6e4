"""A call compiled and in eager, compared to the bit: results, inputs afterwards, gradients, strides, shared memory.

Expected errors are compared too: both raise, and the same class of error.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from tests.programs.standalone import differences, run


def assert_same(
    function: Callable[..., Any],
    make: Callable[[], Sequence[Any]],
    *,
    leaves: Callable[[Sequence[Any]], list[torch.Tensor]] = lambda _: [],
    dynamic: bool = False,
    allowed: float = 0.0,
    **options: object,
) -> None:
    """``make`` gives fresh arguments each time. ``allowed`` is the largest error; with 0, bits and signs of zero agree.

    ``leaves`` picks, or makes, the tensors whose gradients are compared.
    """
    torch._dynamo.reset()
    settings = {"fallback": False, **options}
    compiled = torch.compile(function, backend="kiln", fullgraph=True, dynamic=dynamic, options=settings)
    wanted, refusal = _outcome(function, make, leaves)
    got, error = _outcome(compiled, make, leaves)
    if refusal is not None or error is not None:
        assert type(error) is type(refusal), f"eager: {refusal!r}, compiled: {error!r}"
        return
    limits = dict.fromkeys(wanted, allowed)
    found = [f"{name} {complaint}" for name, complaint in differences(wanted, got, limits)]
    assert not found, "\n".join(found)


def _outcome(
    function: Callable[..., Any],
    make: Callable[[], Sequence[Any]],
    leaves: Callable[[Sequence[Any]], list[torch.Tensor]],
) -> tuple[dict[str, Any], Exception | None]:
    arguments = list(make())
    chosen = leaves(arguments)

    def call(*values: Any) -> Any:
        result = function(*values)
        return result if isinstance(result, (tuple, list)) else (result,)

    try:
        return run(call, (arguments, chosen)), None
    except Exception as error:
        return {}, error
