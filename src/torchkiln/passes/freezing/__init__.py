"""Passes on inference graphs that move work from calls to weights: what is computed from weights alone is hoisted.

They run in rounds until none changes the graph, since one makes room for another. Values change by rounding only.
"""

from __future__ import annotations

from collections.abc import Callable

import torch.fx

from torchkiln.config import Settings
from torchkiln.graph.manager import INFERENCE, Pass, Rounds
from torchkiln.passes.freezing.batch_norm import fold_batch_norms
from torchkiln.passes.freezing.merged_linears import merge_linears
from torchkiln.passes.freezing.pointwise import fold_pointwise_after, fold_pointwise_before
from torchkiln.passes.freezing.quantized import QUANTIZED
from torchkiln.passes.post_grad.common_subexpressions import merge_common_subexpressions


def prepares_weights(settings: Settings) -> bool:
    """Whether passes may round otherwise to have more computed from weights alone."""
    return settings.prepare_weights and settings.precision != "eager"


def _pass(name: str, run: Callable[[torch.fx.GraphModule], bool]) -> Pass:
    return Pass(name, run, kinds=INFERENCE, wanted=prepares_weights)


FREEZING = Rounds(
    (
        *QUANTIZED,
        _pass("common_subexpressions", merge_common_subexpressions),  # casts of autocast, one for each reader
        _pass("fold_batch_norm", fold_batch_norms),
        _pass("fold_pointwise_after", fold_pointwise_after),
        _pass("fold_pointwise_before", fold_pointwise_before),
        _pass("merge_linears", merge_linears),
    )
)
