"""Products of tensors of two dtypes: refused where eager refuses them, in whatever form they are compiled."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.lowering.against_eager import compiled

Product = Callable[[Tensor, Tensor], Tensor]


def _several(a: Tensor, b: Tensor) -> Tensor:
    return torch.stack([a[k] @ b[k] for k in range(a.shape[0])])


# Function, and the sizes of its two operands: small ones, which become part of a kernel, and larger ones.
PRODUCTS: dict[str, tuple[Product, tuple[int, ...], tuple[int, ...]]] = {
    "mm": (torch.mm, (4, 5), (5, 6)),
    "mm, one term": (torch.mm, (40, 1), (1, 60)),
    "mm, large": (torch.mm, (70, 40), (40, 50)),
    "matmul": (torch.matmul, (2, 4, 5), (5, 6)),
    "matmul of batches": (torch.matmul, (2, 3, 4, 5), (2, 3, 5, 6)),
    "matmul by a vector": (torch.matmul, (4, 5), (5,)),
    "matmuls of a stack": (_several, (8, 16, 16), (8, 16, 16)),
    "relu of a sum": (lambda a, b: torch.relu(a @ b + a.new_ones(6)), (4, 5), (5, 6)),
    "bmm": (torch.bmm, (2, 4, 5), (2, 5, 6)),
    "mv": (torch.mv, (4, 5), (5,)),
    "dot": (torch.dot, (5,), (5,)),
    "einsum": (lambda a, b: torch.einsum("bij,bjk->bik", a, b), (2, 4, 5), (2, 5, 6)),
    "linear": (F.linear, (4, 5), (6, 5)),
    "linear, its bias": (lambda a, b: F.linear(a, a.new_ones(6, 5), b), (4, 5), (6,)),
    "relu of linear, its bias": (lambda a, b: F.relu(F.linear(a, a.new_ones(6, 5), b)), (4, 5), (6,)),
    "addmm": (lambda a, b: torch.addmm(a.new_ones(6), a, b), (4, 5), (5, 6)),
    "addmm, its addend": (lambda a, b: torch.addmm(b, a, a.t()), (4, 5), (4, 4)),
    "addmm, scaled": (lambda a, b: torch.addmm(b, a, a.t(), beta=2, alpha=3), (4, 5), (4, 4)),
    "baddbmm": (lambda a, b: torch.baddbmm(a.new_ones(2, 4, 6), a, b), (2, 4, 5), (2, 5, 6)),
    "baddbmm, its addend": (lambda a, b: torch.baddbmm(b, a, a.transpose(1, 2)), (2, 4, 5), (2, 4, 4)),
    "addmv": (lambda a, b: torch.addmv(a.new_ones(4), a, b), (4, 5), (5,)),
    "convolution of one pixel": (F.conv2d, (2, 8, 6, 6), (8, 8, 1, 1)),
}
# Those tried where sizes are known, and where they are symbolic.
PAIRS = {
    False: [(torch.float64, torch.float32), (torch.float32, torch.int64), (torch.float32, torch.bfloat16)],
    True: [(torch.float32, torch.float64)],
}


def _operands(name: str, pair: tuple[torch.dtype, torch.dtype]) -> list[Tensor]:
    return [torch.ones(shape).to(dtype) for shape, dtype in zip(PRODUCTS[name][1:], pair, strict=True)]


def _refused(name: str, pair: tuple[torch.dtype, torch.dtype]) -> bool:
    try:
        PRODUCTS[name][0](*_operands(name, pair))
    except RuntimeError:
        return True
    return False


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("name", PRODUCTS)
def test_a_product_of_two_dtypes_raises_as_in_eager(name: str, dynamic: bool) -> None:
    for pair in PAIRS[dynamic]:
        assert _refused(name, pair)
        torch._dynamo.reset()
        run = torch.compile(
            PRODUCTS[name][0], backend="kiln", fullgraph=True, dynamic=dynamic, options={"fallback": False}
        )
        with pytest.raises(RuntimeError):
            run(*_operands(name, pair))


@pytest.mark.parametrize("name", ["mm", "mm, one term", "relu of a sum", "relu of linear, its bias"])
def test_a_product_of_two_dtypes_in_a_functional_graph_raises_as_in_eager(name: str) -> None:
    """Without Dynamo: the graph holds the product, and it is refused when it runs. torch 2.11 prints why on stderr."""
    function = PRODUCTS[name][0]
    for pair in PAIRS[False][:2]:
        operands = _operands(name, pair)
        with pytest.raises(RuntimeError, match=r"dtype|this version of torch writes its message to stderr \(in aten"):
            compiled(lambda a, b: (function(a, b),), operands)(*operands)
