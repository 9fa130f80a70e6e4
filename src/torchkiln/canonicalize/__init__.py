"""The canonical form of a graph: one form for what can be written in many ways.

Every graph goes through these passes before the first rewrite looks at it, and so does every function of a rewrite.
Nothing here may merge an operator with one before it: where a rewrite begins in the middle, its own trace shows both.
"""

from __future__ import annotations

from torchkiln.canonicalize.aten_calls import canonicalize
from torchkiln.canonicalize.casts import shorten_casts
from torchkiln.canonicalize.identities import remove_identities
from torchkiln.canonicalize.no_ops import remove_no_ops
from torchkiln.canonicalize.running_sums import replace_running_sums
from torchkiln.canonicalize.torch_calls import normalize_calls
from torchkiln.canonicalize.uniform_values import fold_uniform_values
from torchkiln.graph.manager import Pass

# Of the graph Dynamo captured: torch-level calls.
CAPTURED = (
    Pass("normalize", normalize_calls),
    Pass("identities", remove_identities),
)

# Of the joint graph, and of an inference graph: functional ATen calls.
JOINT = (
    Pass("casts", shorten_casts),
    Pass("no_ops", remove_no_ops),
    Pass("uniform_values", fold_uniform_values),
    Pass("running_sums", replace_running_sums),
    Pass("canonical", canonicalize),
)

__all__ = ["CAPTURED", "JOINT"]
