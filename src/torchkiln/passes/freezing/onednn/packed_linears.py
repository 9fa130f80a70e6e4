"""Linear layers of inference as calls of oneDNN that are given their weight in the library's own layout.

Microseconds of a compiled layer with bias as a matmul of BLAS or of torch's, and packed (inputs and outputs above, rows
on the left; one thread, AMD Zen 4, of which 15 are Dynamo's guards):

| float32 | 64, 64 | 256, 256 | 256, 1024 | 768, 768 | 768, 3072 | 1024, 4096 |
|---|---|---|---|---|---|---|
| 1 | 17, 33 | 27, 40 | 53, 56 | 68, 77 | 855, 788 | 1307, 1333 |
| 4 | 20, 34 | 36, 46 | 84, 66 | 148, 100 | 980, 732 | 2288, 1250 |
| 32 | 23, 38 | 79, 84 | 229, 199 | 486, 421 | 2844, 2126 | 5720, 3281 |
| 128 | 34, 47 | 305, 287 | 894, 784 | 1769, 1608 | 7947, 6314 | 16281, 10613 |
| 512 | 93, 101 | 788, 760 | 3463, 2898 | 6722, 6137 | 28819, 22993 | |

| bfloat16 | 64, 64 | 256, 256 | 256, 1024 | 768, 768 | 768, 3072 | 1024, 4096 |
|---|---|---|---|---|---|---|
| 1 | 21, 33 | 85, 42 | 297, 64 | 629, 75 | 2502, 405 | 4557, 857 |
| 4 | 20, 33 | 65, 78 | 99, 56 | 190, 80 | 1064, 386 | 3225, 885 |
| 32 | 24, 35 | 78, 60 | 258, 141 | 549, 276 | 1308, 929 | 2389, 1958 |
| 128 | 38, 46 | 252, 159 | 984, 520 | 968, 824 | 3765, 3297 | 6457, 5839 |
| 512 | 78, 66 | 747, 393 | 1787, 1562 | 3498, 3013 | 13079, 11889 | |

A call of the library costs 13 µs more than one of BLAS; a weight that is not packed is packed by every call that has
more than one row. MKL's own packed matmul (``mkl::_mkl_linear``) took as long as its plain one on this processor (128
rows of 768 to 3072: 7186, 6995 and packed by oneDNN 5714), serves one number of rows and float32 alone, and keeps the
weight beside its copy, so it is not used.

On a Xeon of Intel, an inference of BERT-base in float32 took 117 to 135 ms in the version before layers were packed and
160 to 181 in one that packs them (two threads, two runs each), so float32 layers are left to MKL there. The layers were
not measured by themselves, nor those of other dtypes, for which the same sizes decide.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.fx

from torchkiln.config import Settings, bytes_of
from torchkiln.graph.fake import has_hint, is_symbolic, size_hint
from torchkiln.graph.insertion import insert_call, insert_known
from torchkiln.graph.nodes import replace
from torchkiln.graph.weights import is_larger_than_its_weights, weight_values
from torchkiln.passes.freezing.linears import Linear, linears, weight_of
from torchkiln.passes.freezing.onednn.calls import NOT_PACKED, OPERATORS
from torchkiln.target import Target


def pack_linears(graph_module: torch.fx.GraphModule, target: Target, settings: Settings) -> bool:
    graph = graph_module.graph
    if not target.packs:
        return False
    packed: dict[torch.fx.Node, torch.fx.Node] = {}
    left = math.inf if settings.freezing else bytes_of(settings.prepared_limit)
    changed = False
    for linear in linears(graph, weight_values(graph)):
        value: torch.Tensor = linear.matrix.meta["val"]
        nbytes = 0 if linear.matrix in packed else value.numel() * value.element_size()
        reason = _in_the_way(linear, target)
        if not reason and nbytes > left:
            reason = f"packed copies of weights would take more than prepared_limit, {settings.prepared_limit}"
        if reason:
            linear.node.meta[NOT_PACKED] = reason
            continue
        left -= nbytes
        if linear.matrix not in packed:
            packed[linear.matrix] = insert_call(linear.node, OPERATORS.pack_linear, weight_of(linear))
        arguments: tuple[Any, ...] = (linear.input, packed[linear.matrix], linear.bias, "none", [], "")
        replace(linear.node, insert_known(linear.node, linear.node.meta["val"], OPERATORS.linear, *arguments))
        changed = True
    return changed


def _in_the_way(linear: Linear, target: Target) -> str:
    """Why a layer is not packed; nothing where it is."""
    matrix, rows = linear.matrix.meta["val"], linear.input.meta["val"].shape[0]
    if matrix.device.type != "cpu" or is_symbolic(matrix) or matrix.numel() == 0 or not has_hint(rows):
        return "it is not computed on the CPU, or may have no elements"
    if is_larger_than_its_weights(linear.matrix):
        return "the weight is kept in a smaller dtype"
    if not target.packs_weights_of(matrix.dtype):
        return f"weights of {matrix.dtype} are not packed on this machine"
    if matrix.dtype == torch.float32 and not target.full_float32_matmul:
        return "float32 matmuls may be of less precision"
    if not _pays(target, matrix.dtype, size_hint(rows), *linear.features):
        return f"a matmul of {size_hint(rows)}x{linear.features[0]}x{linear.features[1]} is as fast without"
    return ""


def _pays(target: Target, dtype: torch.dtype, rows: int, inputs: int, outputs: int) -> bool:
    """Whether the packed call is faster; symbolic rows are taken for those of the example."""
    weights = inputs * outputs
    if dtype == torch.float32:
        return target.is_amd and rows > 1 and (weights >= 2**18 or rows * weights >= 2**23)
    return weights >= 2**18 or rows * weights >= 2**20 or (rows == 1 and weights >= 2**16)
