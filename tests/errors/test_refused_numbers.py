"""Python numbers that eager refuses beside a tensor: those its dtype does not hold, and bool where numbers subtract."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.lowering.against_eager import compiled
from torchkiln.graph.operators import loops
from torchkiln.lowering import LOWERINGS

Compile = Callable[..., Any]
Overload = torch._ops.OpOverload

TOO_LARGE = [(torch.float16, 7e4), (torch.float32, -1e40), (torch.int8, 300)]
FILLS = ("full", "full_like", "new_full", "scalar_tensor")


def _numbers_of(op: Overload) -> list[str]:
    return [a.name for a in op._schema.arguments if a.type.str().strip("?") in ("number", "Scalar")]


def _argument(name: str, kind: str, dtype: torch.dtype) -> Any:
    others = {"mask": torch.bool, "condition": torch.bool, "index": torch.int64}
    if kind == "Tensor":
        return torch.eye(2, dtype=others.get(name, dtype))
    if kind == "int[]":
        return [2, 2] if name == "size" else [1, 1]
    return {"Scalar": 1, "number": 1, "int": 0, "bool": False, "float": 1.0, "str?": "trunc"}[kind]


def _calls(op: Overload) -> Iterator[tuple[str, list[Tensor], Callable[..., Tensor]]]:
    """Each number of ``op`` too large in turn: what it is, the tensors, and a function of them."""
    for dtype, number in TOO_LARGE:
        for which in _numbers_of(op):
            needed = [a for a in op._schema.arguments if a.name == which or not a.has_default_value()]
            given = {
                a.name: number if a.name == which else _argument(a.name, a.type.str().replace("SymInt", "int"), dtype)
                for a in needed
            }
            if op._schema.name.removeprefix("aten::") in FILLS:
                given["dtype"] = dtype
            tensors = {name: value for name, value in given.items() if isinstance(value, Tensor)}

            def call(*values: Tensor, given: Any = given, tensors: Any = tensors) -> Tensor:
                result: Tensor = op(**given | dict(zip(tensors, values, strict=True)))
                return result

            yield f"{which}={number} for {dtype}", list(tensors.values()), call


def _refusal(function: Callable[..., Any], inputs: list[Tensor]) -> str | None:
    try:
        function(*inputs)
    except RuntimeError as error:
        return str(error).split("\n")[0]
    return None


WITH_NUMBERS = sorted((op for op in LOWERINGS if op.namespace == "aten" and op in loops() and _numbers_of(op)), key=str)


@pytest.mark.parametrize("op", WITH_NUMBERS, ids=str)
def test_numbers_that_eager_finds_too_large_for_the_dtype_are_refused_in_its_words(op: Overload) -> None:
    for what, inputs, call in _calls(op):
        expected = _refusal(call, inputs)
        if expected is None or "without overflow" not in expected:
            continue
        with pytest.raises(RuntimeError, match="without overflow") as caught:
            compiled(lambda *xs, call=call: (call(*xs),), inputs)(*inputs)
        assert expected in str(caught.value), what


def test_the_operators_that_look_at_their_numbers_are_among_those_tried() -> None:
    refusing = {
        op.overloadpacket
        for op in WITH_NUMBERS
        for _, inputs, call in _calls(op)
        if "without overflow" in (_refusal(call, inputs) or "")
    }
    assert len(refusing) >= 20


X = torch.linspace(-1, 1, 6).view(2, 3)
REFUSED: dict[str, Callable[[Tensor], Tensor]] = {
    "masked_fill of float16": lambda x: x.half().masked_fill(x > 0, -1e9) + 1,
    "full of float16": lambda x: torch.full((2, 3), 1e9, dtype=torch.float16) + x,
    "full of float32": lambda x: torch.full((2, 3), 1e40) * x,
    "full, folded": lambda x: torch.full((2, 3), 1e40) * 0 + x,
    "clamp": lambda x: x.clamp(min=1e40).sum(0),
    "hardtanh": lambda x: F.hardtanh(x, -1e40, 1e40),
    "pad": lambda x: F.pad(x.half(), (1, 1), value=1e9),
    "where": lambda x: torch.where(x > 0, x, 1e40),
    "fill_": lambda x: (x * 2).fill_(1e40),
    "index_fill": lambda x: torch.index_fill(x, 0, torch.tensor([0]), 1e40),
    "add, alpha": lambda x: torch.add(x, x, alpha=1e40),
    "number - bool": lambda x: 1 - (x > 0),
    "tensor - bool": lambda x: x - (x > 0),
    "tensor - True": lambda x: torch.sub(x, True),
    "rsub of bool": lambda x: torch.rsub(x > 0, x),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_eager_refuses_is_refused_at_each_call(name: str, compile_strictly: Compile) -> None:
    function = REFUSED[name]
    expected = _refusal(function, [X])
    assert expected is not None
    torch._dynamo.reset()
    run = compile_strictly(function)
    for _ in range(2):
        with pytest.raises(RuntimeError) as caught:
            run(X)
        assert expected[:60] in str(caught.value)


def test_numbers_at_the_ends_of_a_type_are_part_of_kernels() -> None:
    def function(x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
        ends = torch.finfo(torch.float16)
        return (
            x.masked_fill(x > 0, ends.min),
            x.masked_fill(x > 0, float("-inf")),
            x.clamp(max=ends.max),
            y.masked_fill(y > 0, -255),
            torch.full((2,), 255, dtype=torch.uint8),
            x + 70000.0,
        )

    inputs = [X.half(), torch.arange(6, dtype=torch.uint8)]
    for mine, eagers in zip(compiled(function, inputs)(*inputs), function(*inputs), strict=True):
        assert torch.equal(mine, eagers)
