"""Matrix products with lines that are no multiple of 16 bytes, padded where that was measured to pay.

Zeros are added to the operands and cut off the result: what they are multiplied with is zeros again or not kept, so
the values are those of a product summed in another order. Matrix units of GPUs load whole lines of 16 bytes and fall
back to slower kernels otherwise; on a CPU libraries pack operands themselves, so nothing is tried there unless the
setting ``pad_matmuls`` asks for it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import torch
import torch.fx

from torchkiln.config import Settings
from torchkiln.graph.fake import is_symbolic, same_metadata
from torchkiln.graph.insertion import insert_call
from torchkiln.passes.joint.matmul_timing import (
    Measure,
    Operand,
    Product,
    TimeCache,
    Times,
    cache_file,
    measure_on_device,
    padding,
)

_aten = torch.ops.aten

_OPERATORS = {_aten.mm.default: "mm", _aten.bmm.default: "bmm", _aten.addmm.default: "addmm"}
_ALIGNMENT_BYTES = 16
_HALF_OR_FLOAT = (torch.float16, torch.bfloat16, torch.float32)

# Below this many multiplications a product is bound by its launch, which padding only adds to.
_FEWEST_MULTIPLICATIONS = 1 << 21

# A gain has to be worth the copies' memory, and to be more than the spread of a measurement.
_LEAST_GAIN = 1.05

Pays = Callable[[Product, tuple[int, int, int]], bool]


@cache
def process_times() -> TimeCache:
    """The times this process knows, and those of earlier ones in the user's cache folder."""
    return TimeCache(cache_file())


def pads_on_gpu(settings: Settings) -> bool:
    return settings.pad_matmuls in ("gpu", "all")


def pads_on_cpu(settings: Settings) -> bool:
    return settings.pad_matmuls == "all"


def pad_gpu_matmuls(graph_module: torch.fx.GraphModule) -> bool:
    return pad_matmuls(graph_module, "cuda", measured_to_pay)


def pad_cpu_matmuls(graph_module: torch.fx.GraphModule) -> bool:
    return pad_matmuls(graph_module, "cpu", measured_to_pay)


def measured_to_pay(
    product: Product,
    padded: tuple[int, int, int],
    *,
    known: TimeCache | None = None,
    measure: Measure = measure_on_device,
) -> bool:
    """Whether padding pays by what was measured, now or earlier."""
    times = (process_times() if known is None else known).times(product, padded, measure)
    return times is not None and pays(times)


def pays(times: Times) -> bool:
    return times.plain > _LEAST_GAIN * times.padded


def padded_sizes(product: Product) -> tuple[int, int, int] | None:
    """M, K and N rounded up to whole lines of 16 bytes; None for a product not worth a measurement."""
    if product.dtype not in _HALF_OR_FLOAT:
        return None
    rows, inner, columns = product.sizes
    batch = product.operands[-1].shape[0] if product.operator == "bmm" else 1
    if batch * rows * inner * columns < _FEWEST_MULTIPLICATIONS:
        return None
    step = _ALIGNMENT_BYTES // product.dtype.itemsize
    *_, first, second = product.operands
    in_rows = first.stride[-1] == 1
    lines = (inner if in_rows else rows, columns if second.stride[-1] == 1 else inner, columns)
    if all(line % step == 0 or line == 1 for line in lines):
        return None
    # Padded operands lie in rows of K and of N. M needs no padding then, unless it is what makes the first one so.
    wide_inner, wide_columns = (size if size == 1 else -(-size // step) * step for size in (inner, columns))
    wide_rows = rows if in_rows or wide_inner != inner else -(-rows // step) * step
    padded = (wide_rows, wide_inner, wide_columns)
    return None if padded == (rows, inner, columns) else padded


def pad_matmuls(graph_module: torch.fx.GraphModule, device: str, is_better: Pays) -> bool:
    """Pad every product on that kind of device for which ``is_better`` says so."""
    graph = graph_module.graph
    changed = False
    for node in list(graph.nodes):
        product = _product_of(node)
        if product is None or product.device.type != device:
            continue
        padded = padded_sizes(product)
        if padded is None or not is_better(product, padded):
            continue
        changed |= _pad(node, padded)
    return changed


def _product_of(node: torch.fx.Node) -> Product | None:
    if node.op != "call_function" or node.target not in _OPERATORS or node.kwargs:
        return None
    values = [node.meta.get("val")]
    values += [source.meta.get("val") if isinstance(source, torch.fx.Node) else None for source in node.args]
    tensors = [value for value in values if isinstance(value, torch.Tensor)]
    if len(tensors) < len(values) or any(is_symbolic(value) or 0 in value.shape for value in tensors):
        return None
    result, *operands = tensors
    if any((value.dtype, value.device) != (result.dtype, result.device) for value in operands):
        return None
    name = _OPERATORS[node.target]
    return Product(name, result.device, result.dtype, tuple(Operand.of(value) for value in operands))


def _pad(node: torch.fx.Node, padded: tuple[int, int, int]) -> bool:
    *terms, first, second = node.args
    rows, inner, columns = padded
    value = node.meta["val"]
    batch = list(value.shape[:-2])
    wide = [
        *(_padded(node, term, [rows, columns][-_rank(term) :]) for term in terms),
        _padded(node, first, [*batch, rows, inner]),
        _padded(node, second, [*batch, inner, columns]),
    ]
    target: Any = node.target
    result = insert_call(node, target, *wide)
    for dim in (-2, -1):
        if result.meta["val"].shape[dim] != value.shape[dim]:
            result = insert_call(node, _aten.slice.Tensor, result, value.dim() + dim, 0, value.shape[dim])
    if not same_metadata(result.meta["val"], value):
        result = insert_call(node, _aten.clone.default, result, memory_format=torch.contiguous_format)
    assert same_metadata(result.meta["val"], value)
    node.replace_all_uses_with(result)
    node.graph.erase_node(node)
    return True


def _rank(term: Any) -> int:
    rank: int = term.meta["val"].dim()
    return rank


def _padded(node: torch.fx.Node, operand: Any, shape: Sequence[int]) -> torch.fx.Node:
    widths = padding(operand.meta["val"].shape, shape)
    while len(widths) > 2 and widths[-2:] == [0, 0]:
        del widths[-2:]  # dimensions that nothing is added to
    return insert_call(node, _aten.constant_pad_nd.default, operand, widths) if any(widths) else operand
