"""Large matmuls as calls of oneDNN's linear layer, where that is faster than what torch's ``mm`` and ``addmm`` call.

MKL multiplies with vectors of 256 bits on AMD's processors; a Zen 5 has units for 512. The operator takes a second
matrix that is not packed and makes its result. Microseconds of BLAS and so, one thread of a Zen 5, with each matrix as
its rows lie in memory (n) or transposed (t):

| M x K x N | nn | nt | tn | tt |
|---|---|---|---|---|
| 1 x 768 x 768 | 28, 41 | 29, 39 | 28, 42 | 29, 38 |
| 4 x 768 x 768 | 115, 48 | 82, 72 | 117, 51 | 87, 76 |
| 32 x 768 x 768 | 365, 163 | 362, 197 | 362, 174 | 353, 209 |
| 512 x 768 x 768 | 5175, 2310 | 5238, 2396 | 5267, 2460 | 5294, 2538 |
| 1024 x 768 x 3072 | 43453, 20702 | 44013, 19285 | 43021, 21458 | 43673, 20081 |
| 128 x 64 x 64 | 11, 15 | 11, 15 | 11, 20 | 11, 20 |
| 512 x 64 x 64 | 39, 28 | 39, 28 | 44, 43 | 44, 43 |
| 25088 x 64 x 128 | 4629, 2293 | 4684, 2110 | 5034, 3719 | 5028, 3289 |
| 1024 x 1024 x 16 | 377, 273 | 430, 262 | 768, 845 | 796, 879 |

In bfloat16 ``addmm`` is a call of oneDNN too, which adds to what is in the result: torch stores the bias in all rows of
it before. The same processor, ``addmm`` and so: 25088 x 64 x 128 1050 and 924, 512 x 768 x 768 1401 and 1226, 128 x 768
x 3072 1560 and 1418, 128 x 256 x 256 53 and 48. ``mm`` takes as long either way.

The library reads the first matrix row by row; one that lies otherwise is copied by the operator, which many columns pay
for. A bias is added by the call; any other addend by a kernel. Symbolic sizes are left to BLAS: oneDNN makes a kernel
ready for each combination of sizes.

BLAS writes into planned memory, where a result may lie in that of another one; the call allocates its result. So in
training only results that own their memory anyway are made so, those that the graph returns: with all of them, a step
of an MLP took 3 % more memory than in eager (20.0 and 19.4 MB).
"""

from __future__ import annotations

import math
from collections.abc import Collection
from functools import partial
from typing import Any

import torch
import torch.fx

from torchkiln.config import Settings
from torchkiln.graph.aliases import memory_root
from torchkiln.graph.fake import has_one_dtype, is_row_major, is_symbolic
from torchkiln.graph.insertion import insert_call, insert_known
from torchkiln.graph.nodes import calls_of, fake_tensor, replace, rewrite_each
from torchkiln.ir.matrices import leading
from torchkiln.passes.freezing.onednn.calls import OPERATORS
from torchkiln.target import Target

_aten = torch.ops.aten

# Multiplications from which on the call costs less than BLAS.
_LEAST_WORK = 2**22
# Columns that pay for a copy of the first matrix.
_LEAST_COLUMNS = 64


def may_sum_in_another_order(settings: Settings) -> bool:
    """Whether matmuls may be taken by another library than eager's."""
    return settings.precision != "eager"


def call_onednn(graph_module: torch.fx.GraphModule, target: Target) -> bool:
    """For all large matmuls."""
    return _call_each(graph_module, target, None)


def call_onednn_for_results(graph_module: torch.fx.GraphModule, target: Target) -> bool:
    """For those that the graph returns, as they are or as views."""
    return _call_each(graph_module, target, set(map(memory_root, graph_module.graph.output_node().all_input_nodes)))


def _call_each(graph_module: torch.fx.GraphModule, target: Target, among: Collection[torch.fx.Node] | None) -> bool:
    if not target.multiplies_by_onednn and not target.packs_weights_of(torch.bfloat16):
        return False
    calls = calls_of(graph_module.graph, _aten.mm.default, _aten.addmm.default)
    chosen = (node for node in calls if among is None or node in among)
    return rewrite_each(chosen, partial(_call, target=target))


def _call(node: torch.fx.Node, target: Target) -> bool:
    given: Any = node.args
    *addends, left, right = given
    if node.kwargs or not _is_large(node, left, right):
        return False
    bias = addends[0] if addends and _is_bias(addends[0], node) else None
    if not _pays(target, left.meta["val"], right.meta["val"].shape[1], with_bias=bias is not None):
        return False
    weight = insert_call(node, _aten.permute.default, right, [1, 0])
    arguments: tuple[Any, ...] = (left, weight, bias, "none", [], "")
    made = insert_known(node, node.meta["val"], OPERATORS.linear, *arguments)
    if addends and bias is None:
        made = insert_known(node, node.meta["val"], _aten.add.Tensor, made, addends[0])
    replace(node, made)
    return True


def _is_large(node: torch.fx.Node, left: Any, right: Any) -> bool:
    result, first, second = map(fake_tensor, (node, left, right))
    if result is None or first is None or second is None or not has_one_dtype(node):
        return False
    if any(matrix.layout is not torch.strided for matrix in (result, first, second)):
        return False
    if result.device.type != "cpu" or not is_row_major(result) or any(map(is_symbolic, (result, first, second))):
        return False
    if leading(first.shape, first.stride()) is None or not _is_dense(second):
        return False
    return math.prod(first.shape) * second.shape[1] >= _LEAST_WORK


def _is_dense(matrix: torch.Tensor) -> bool:
    """Whether no memory lies between its rows, or its columns.

    As a second matrix the library takes others too, and multiplies them by its reference code: 256 x 768 x 512 float32
    with 8 elements between the rows 1.9 s, else 0.86 ms.
    """
    return is_row_major(matrix) or is_row_major(matrix.t())


def _pays(target: Target, left: torch.Tensor, columns: int, *, with_bias: bool) -> bool:
    if left.dtype == torch.bfloat16:
        return with_bias and left.is_contiguous() and target.packs_weights_of(left.dtype)
    if left.dtype != torch.float32 or not target.multiplies_by_onednn:
        return False
    return left.is_contiguous() or columns >= _LEAST_COLUMNS


def _is_bias(addend: Any, total: torch.fx.Node) -> bool:
    value = fake_tensor(addend)
    return value is not None and tuple(value.shape) == tuple(total.meta["val"].shape[1:]) and value.is_contiguous()
