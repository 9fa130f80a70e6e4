"""The canonical form of a graph: one spelling for what can be written in many ways.

Every graph goes through these passes before the first rewrite looks at it, and so does every function of a rewrite.
Nothing here may join an operator with one before it: where a rewrite begins in the middle, its own trace shows both.
"""

from __future__ import annotations

import torch.fx

from torchkiln.canonicalize.casts import shorten_casts
from torchkiln.canonicalize.identities import remove_identities
from torchkiln.canonicalize.no_ops import remove_no_ops
from torchkiln.canonicalize.running_sums import replace_running_sums
from torchkiln.canonicalize.spelling import canonicalize
from torchkiln.canonicalize.torch_calls import normalize_calls
from torchkiln.canonicalize.uniform_values import fold_uniform_values
from torchkiln.graph.manager import Pass


def _remove_no_ops(graph_module: torch.fx.GraphModule) -> bool:
    return remove_no_ops(graph_module, saves_for_backward=True)


def _fold_uniform_values(graph_module: torch.fx.GraphModule) -> bool:
    return fold_uniform_values(graph_module, saves_for_backward=True)


# Of the graph Dynamo captured: torch-level calls.
CAPTURED = (
    Pass("normalize", normalize_calls),
    Pass("identities", remove_identities),
)

# Of the joint graph, and of an inference graph: functional ATen calls.
JOINT = (
    Pass("casts", shorten_casts),
    Pass("no_ops", _remove_no_ops),
    Pass("uniform_values", _fold_uniform_values),
    Pass("running_sums", replace_running_sums),
    Pass("canonical", canonicalize),
)

__all__ = ["CAPTURED", "JOINT"]
