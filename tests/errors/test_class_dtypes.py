"""Classes and positions of dtypes that eager refuses, in operators of which tracing drops the check."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch._dynamo.exc import TorchRuntimeError

OPERATORS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "one_hot": lambda x, t: F.one_hot(t, 4) + x,
    "one_hot, by name": lambda x, t: F.one_hot(t, num_classes=4) * 2,
    "one_hot of nothing": lambda x, t: F.one_hot(t[:0], 4) + 1,
    "multi_margin_loss": F.multi_margin_loss,
    "multi_margin_loss, by name": lambda x, t: F.multi_margin_loss(input=x, target=t, p=2, reduction="none"),
    "multi_margin_loss, a gradient": lambda x, t: torch.func.grad(F.multi_margin_loss)(x, t),
    "multilabel_margin_loss": lambda x, t: F.multilabel_margin_loss(x, t[:, None].expand(4, 4)),
    "multilabel_margin_loss of one": lambda x, t: F.multilabel_margin_loss(x[0], t, reduction="sum"),
    "nll_loss": F.nll_loss,
    "index_select": lambda x, t: x.index_select(0, t),
    "index_add": lambda x, t: x.index_add(0, t, x),
}
DTYPES = [torch.int64, torch.int32, torch.int16, torch.uint8, torch.bool]


def _outcome(function: Callable[..., Any], dtype: torch.dtype) -> Tensor | RuntimeError:
    x, classes = torch.linspace(-1, 1, 16).view(4, 4), torch.tensor([0, 1, 1, 0]).to(dtype)
    try:
        result: Tensor = function(x, classes)
    except RuntimeError as error:
        return error
    return result


@pytest.mark.parametrize("name", OPERATORS)
def test_a_dtype_is_taken_or_refused_in_eagers_words(compile_strictly: Callable[..., Any], name: str) -> None:
    function = OPERATORS[name]
    compiled = compile_strictly(function)
    for dtype in DTYPES:
        wanted, got = _outcome(function, dtype), _outcome(compiled, dtype)
        if isinstance(got, TorchRuntimeError):  # Dynamo's fake tensors refuse it, whatever the backend
            continue
        if isinstance(wanted, RuntimeError) or isinstance(got, RuntimeError):
            assert type(got) is type(wanted), f"{dtype}: eager {wanted!r}, compiled {got!r}"
            assert str(got).startswith(str(wanted).splitlines()[0]), dtype
        else:
            torch.testing.assert_close(got, wanted)
    assert isinstance(_outcome(compiled, torch.int64), Tensor)
