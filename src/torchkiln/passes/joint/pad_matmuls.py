"""Matmuls whose rows are no multiple of 16 bytes, padded where that was measured to pay.

Zeros are added to the operands and sliced off the result: they are multiplied with zeros or with what is not kept, so
the values are those of a matmul summed in another order. Matrix units of GPUs load lines of 16 bytes and fall
back to slower kernels otherwise; on a CPU libraries pack operands themselves, so nothing is tried there unless the
setting ``pad_matmuls`` asks for it.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from typing import Any

import torch
import torch.fx

from torchkiln.cache import Cache, open_cache
from torchkiln.config import Settings
from torchkiln.graph.dtypes import HALF
from torchkiln.graph.fake import is_symbolic, same_metadata
from torchkiln.graph.insertion import insert_call
from torchkiln.graph.nodes import fake_tensor, replace
from torchkiln.passes.joint.matmul_timing import (
    Matmul,
    Operand,
    Sizes,
    TimeCache,
    Times,
    key_of,
    measure_on_device,
    padded_matmul,
)
from torchkiln.target import Target

_aten = torch.ops.aten

_OPERATORS = {_aten.mm.default: "mm", _aten.bmm.default: "bmm", _aten.addmm.default: "addmm"}
_ALIGNMENT_BYTES = 16
_HALF_OR_FLOAT = (*HALF, torch.float32)

# Below this many multiplications a matmul is bound by its launch, which padding only adds to.
_FEWEST_MULTIPLICATIONS = 1 << 21

# A gain has to be worth the copies' memory, and to be more than the spread of a measurement.
_LEAST_GAIN = 1.05

Pays = Callable[[Matmul, Sizes], bool]


@cache
def known_times(cache: Cache | None) -> TimeCache:
    """The times this process knows, and those of earlier ones in ``cache``."""
    return TimeCache(cache)


def pads_on_gpu(settings: Settings) -> bool:
    return settings.pad_matmuls in ("gpu", "all")


def pads_on_cpu(settings: Settings) -> bool:
    return settings.pad_matmuls == "all"


def pad_gpu_matmuls(graph_module: torch.fx.GraphModule, target: Target, settings: Settings) -> bool:
    return pad_matmuls(graph_module, "cuda", _measured(target, settings))


def pad_cpu_matmuls(graph_module: torch.fx.GraphModule, target: Target, settings: Settings) -> bool:
    return pad_matmuls(graph_module, "cpu", _measured(target, settings))


def _measured(target: Target, settings: Settings) -> Pays:
    """The cache is opened when there is a matmul to pad: few graphs have one."""
    return lambda matmul, padded: measured_to_pay(matmul, padded, target, known_times(open_cache(settings)))


def measured_to_pay(
    matmul: Matmul,
    padded: Sizes,
    target: Target,
    known: TimeCache,
    *,
    measure: Callable[[Matmul, Sizes], Times | None] = measure_on_device,
) -> bool:
    """Whether padding pays by what was measured, now or earlier."""
    times = known.times(key_of(matmul, padded, target), lambda: measure(matmul, padded))
    return times is not None and pays(times)


def pays(times: Times) -> bool:
    return times.plain > _LEAST_GAIN * times.padded


def padded_sizes(matmul: Matmul) -> Sizes | None:
    """M, K and N rounded up to lines of 16 bytes; None for a matmul not worth a measurement."""
    if matmul.dtype not in _HALF_OR_FLOAT:
        return None
    rows, inner, columns = matmul.sizes
    batch = matmul.operands[-1].shape[0] if matmul.operator == "bmm" else 1
    if batch * rows * inner * columns < _FEWEST_MULTIPLICATIONS:
        return None
    step = _ALIGNMENT_BYTES // matmul.dtype.itemsize
    *_, first, second = matmul.operands
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
    """Pad every matmul on that kind of device for which ``is_better`` says so."""
    changed = False
    for node in list(graph_module.graph.nodes):
        matmul = _read(node)
        if matmul is None or matmul.device.type != device:
            continue
        padded = padded_sizes(matmul)
        if padded is not None and is_better(matmul, padded):
            _pad(node, padded)
            changed = True
    return changed


def _read(node: torch.fx.Node) -> Matmul | None:
    if node.op != "call_function" or node.target not in _OPERATORS or node.kwargs:
        return None
    tensors = [tensor for source in (node, *node.args) if (tensor := fake_tensor(source)) is not None]
    if len(tensors) <= len(node.args) or any(is_symbolic(value) or 0 in value.shape for value in tensors):
        return None
    result, *operands = tensors
    if any((value.dtype, value.device) != (result.dtype, result.device) for value in operands):
        return None
    return Matmul(_OPERATORS[node.target], result.device, result.dtype, tuple(map(Operand.of, operands)))


def _pad(node: torch.fx.Node, padded: Sizes) -> None:
    target: Any = node.target
    result = padded_matmul(target, node.args, padded, partial(insert_call, node), lambda source: source.meta["val"])
    assert same_metadata(result.meta["val"], node.meta["val"])
    replace(node, result)
