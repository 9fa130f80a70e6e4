"""What tensors made of positions are said to hold is what they hold when the graph runs."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.fx

from tests.passes.pre_grad.captured import capture
from torchkiln.passes.pre_grad.positions import Choice, Contents, Linear, Positions
from torchkiln.passes.pre_grad.rewriting import CapturedGraph

Program = Callable[[torch.Tensor, torch.Tensor], Any]

ROWS, COLUMNS = 4, 5
SCORES = torch.randn(ROWS, COLUMNS)
DATA = torch.tensor([3, 0, 2, 1])


def _number_of(value: Any) -> int:
    return value.node.hint if isinstance(value, torch.SymInt) else value


def _linear(value: Linear, shape: torch.Size) -> torch.Tensor:
    assert len(value.coefficients) == len(shape)
    found = torch.full(shape, _number_of(value.constant))
    for dim, (coefficient, size) in enumerate(zip(value.coefficients, shape, strict=True)):
        found += coefficient * torch.arange(size).view(-1, *[1] * (len(shape) - dim - 1))
    return found


def _elements(contents: Contents, like: torch.Tensor) -> torch.Tensor:
    """The tensor that ``contents`` describes."""
    if isinstance(contents, Linear):
        return _linear(contents, like.shape)
    inside = torch.ones(like.shape, dtype=torch.bool)
    for condition in contents.conditions:
        inside &= _linear(condition, like.shape) >= 0
    found = torch.empty_like(like)
    found[inside], found[~inside] = contents.inside, contents.outside
    return found


class _Checked(torch.fx.Interpreter):
    """Runs a graph and compares each tensor with what is said of it; keeps what was said of the last one."""

    last: Contents | None = None

    def __init__(self, graph_module: torch.fx.GraphModule) -> None:
        super().__init__(graph_module)
        self._positions = Positions(CapturedGraph(graph_module))

    def run_node(self, n: torch.fx.Node) -> Any:
        value = super().run_node(n)
        if n.op not in ("placeholder", "output") and isinstance(value, torch.Tensor):
            self.last = self._positions.contents(n)
            if self.last is not None:
                expected = _elements(self.last, value)
                torch.testing.assert_close(value, expected, rtol=0, atol=0, equal_nan=True, msg=n.format_node())
        return value


def _check(program: Program, *, dynamic: bool = False) -> Contents | None:
    """What the last tensor is said to hold."""
    graph_module = capture(program, SCORES, DATA, dynamic=dynamic)
    given = []
    for node in graph_module.graph.find_nodes(op="placeholder"):
        fake = node.meta.get("example_value")
        by_name = DATA if "data" in str(node.target) else SCORES
        given.append(_number_of(fake) if isinstance(fake, torch.SymInt) else by_name)
    checked = _Checked(graph_module)
    checked.run(*given)
    return checked.last


def _rows(x: torch.Tensor) -> torch.Tensor:
    return torch.arange(x.shape[0])[:, None]


KNOWN: dict[str, tuple[Program, type]] = {
    "numbers_beyond_float32": (lambda x, data: torch.full((2, 3), 2.0**31, dtype=torch.float64) - 1, Choice),
    "sums_that_are_all_true": (
        lambda x, data: torch.logical_and(_rows(x).ge(2) + 1, _rows(x).ge(3) + torch.ones(4, 1)),
        Choice,
    ),
    "times_a_number_that_a_half_does_not_have": (
        lambda x, data: torch.zeros(4, 4, dtype=torch.float16).masked_fill(_rows(x) > 1, 1.0) * -1e9 + 0.0,
        type(None),
    ),
    "zero_times_one_that_bfloat16_does_not_have": (
        lambda x, data: (1.0 - torch.ones(4, 4, dtype=torch.bfloat16)) * -1e9,
        Choice,
    ),
    "kept_rows": (lambda x, data: _rows(x)[None, ..., None] * 3 - 1, Linear),
}
UNKNOWN: dict[str, Program] = {
    "positions_at_data": lambda x, data: torch.arange(4)[data],
    "a_mask_at_data": lambda x, data: (_rows(x) > 1)[:, data[:1] * 0],
    "rows_at_data": lambda x, data: torch.ones(4, 4).tril()[data],
    "chosen_by_a_mask_of_data": lambda x, data: torch.arange(4)[data > 1][:2],
    "filled_with_data": lambda x, data: torch.zeros(4).masked_fill(torch.arange(4) > 1, data[0]),
    "positions_that_wrap": lambda x, data: torch.arange(4) + (2**63 - 2),
    "products_that_wrap": lambda x, data: torch.arange(4) * (2**62),
    "numbers_that_wrap": lambda x, data: torch.full((4,), 2**62) + 2**62,
    "a_number_that_one_kernel_rounds": lambda x, data: torch.full((4,), 0.5, dtype=torch.bfloat16) - 1.00312,
    "nan": lambda x, data: torch.full((4,), float("inf")) * 0.0,
}


@pytest.mark.parametrize("name", KNOWN)
def test_what_is_known_of_positions_is_true(name: str) -> None:
    program, kind = KNOWN[name]
    assert type(_check(program)) is kind


@pytest.mark.parametrize("name", UNKNOWN)
def test_what_depends_on_data_or_does_not_fit_is_not_known(name: str) -> None:
    assert _check(UNKNOWN[name]) is None


NUMBERS = ["0", "1", "-1", "2", "True", "False", "0.5", "-1e4", "-1e30", "-3e38", "1e-46", "300", "2**62", "x.shape[1]"]
NUMBERS += ["float('inf')", "float('-inf')", "float('nan')"]
DTYPES = ["bool", "int8", "uint8", "int32", "int64", "float16", "bfloat16", "float32", "float64"]
SIZES = ["x.shape[0]", "x.shape[1]", "x.shape[0] + 1", "1", "4"]
FORMS = {
    "new": """torch.arange(SIZE) | torch.arange(2, SIZE, 2) | torch.arange(SIZE, dtype=torch.DTYPE)
        torch.ones(SIZE, SIZE, dtype=torch.DTYPE) | torch.full((SIZE, SIZE), NUMBER) | torch.full_like(TENSOR, NUMBER)
        TENSOR.new_ones(SIZE, SIZE) | torch.zeros((SIZE, SIZE))""",
    "moved": """TENSOR[:, None] | TENSOR[None] | TENSOR[..., None, :] | TENSOR.unsqueeze(-1) | TENSOR[data] | TENSOR[1:]
        TENSOR[:, data] | TENSOR.expand(x.shape) | TENSOR.expand(2, -1, -1) | TENSOR[TENSOR > 0] | TENSOR[::2]""",
    "compared": """TENSOR > TENSOR | TENSOR <= NUMBER | torch.lt(TENSOR, TENSOR) | TENSOR.ge(NUMBER) | ~TENSOR
        TENSOR == TENSOR | TENSOR & TENSOR | torch.logical_or(TENSOR, TENSOR) | torch.logical_and(TENSOR, TENSOR)
        torch.logical_not(TENSOR)""",
    "computed": """TENSOR + TENSOR | TENSOR - NUMBER | NUMBER - TENSOR | TENSOR * NUMBER | TENSOR * TENSOR
        torch.sub(TENSOR, TENSOR, alpha=2) | TENSOR.to(torch.DTYPE) | TENSOR.bool() | TENSOR.mul_(NUMBER)""",
    "chosen": """torch.where(TENSOR > NUMBER, NUMBER, NUMBER) | torch.where(TENSOR.bool(), TENSOR, NUMBER)
        TENSOR.masked_fill(TENSOR.bool(), NUMBER) | TENSOR.tril() | TENSOR.triu(1) | torch.tril(TENSOR, NUMBER)""",
}


def _random_program(seed: int) -> str:
    """A program of calls that eager takes, one after the other."""
    draw = random.Random(seed)
    forms = {kind: [form.strip() for form in text.replace("\n", " | ").split(" | ")] for kind, text in FORMS.items()}
    values: dict[str, Any] = {"torch": torch, "x": SCORES, "data": DATA}
    names, lines = ["data"], []
    while len(lines) < 16:
        text = draw.choice(forms[draw.choice(list(forms))])
        for word, choices in (("TENSOR", names[-8:]), ("NUMBER", NUMBERS), ("DTYPE", DTYPES), ("SIZE", SIZES)):
            while word in text:
                text = text.replace(word, draw.choice(choices), 1)
        if text.startswith("data.mul_"):
            continue
        try:
            value = eval(text, values)
        except (RuntimeError, TypeError, IndexError, ValueError, OverflowError):
            continue
        if value.dim() > 4 or value.dim() == 0:
            continue
        names.append(f"v{len(lines)}")
        lines.append(f"{names[-1]} = {text}")
        values[names[-1]] = value
    return "\n    ".join(["def program(x, data):", *lines, f"return {', '.join(names)}"])


@pytest.mark.parametrize("dynamic", [False, True])
def test_what_is_known_in_random_programs_is_true(dynamic: bool) -> None:
    said = 0
    for seed in range(24):
        scope: dict[str, Any] = {"torch": torch}
        exec(_random_program(seed), scope)
        try:
            said += _check(scope["program"], dynamic=dynamic) is not None
        except torch._dynamo.exc.TorchDynamoException:  # sizes decided by data
            continue
    assert said > 4
