"""A part of torch's operator database with layouts changed by force in front of every operator, against eager."""

from __future__ import annotations

import pytest
import torch

from conformance.cases import Case, database, samples
from conformance.check import PASSED, Verdict, Way, check
from conformance.forced_layouts import force_layouts, forced_layouts
from conformance.workers import Choice
from tests.passes.joint.graphs import trace
from torchkiln.graph.manager import registered_passes

aten = torch.ops.aten

# Operators whose kernels read memory as it lies, and some that take any strides.
OPERATORS = (
    "addmm",
    "as_strided_scatter",
    "cdist",
    "linalg.lu_solve",
    "linalg.svd",
    "nn.functional.adaptive_max_pool3d",
    "nn.functional.batch_norm",
    "nn.functional.conv2d",
    "nn.functional.embedding_bag",
    "nn.functional.fractional_max_pool2d",
    "nn.functional.group_norm",
    "nn.functional.nll_loss",
    "nn.functional.pdist",
    "scatter_reduce/amax",
    "searchsorted",
)


@pytest.mark.parametrize("operator", OPERATORS)
def test_operators_equal_eager_whatever_layouts_passes_leave(operator: str) -> None:
    if operator not in database():
        pytest.skip(f"this version of torch has no {operator} in its database")
    case = Case(operator, "float32")
    verdicts: list[Verdict] = []
    chosen = Choice(2).of(case, len(samples(case)))
    check(case, way=Way(layouts=True), only=chosen, done=lambda batch, _: verdicts.extend(batch))
    assert [verdict for verdict in verdicts if verdict.category != PASSED] == []
    assert len(verdicts) == len(chosen)


def test_every_operator_is_handed_another_layout_and_results_stay() -> None:
    gm = trace(lambda x, y: aten._cdist_forward(aten.sin(x), y, 2.0, None), torch.randn(4, 5, 6), torch.randn(4, 3, 6))
    assert force_layouts(gm)
    gm.graph.lint()
    for target in (aten.sin.default, aten._cdist_forward.default):
        (node,) = gm.graph.find_nodes(op="call_function", target=target)
        for source in node.all_input_nodes:
            assert not source.meta["val"].is_contiguous()
    assert gm.graph.output_node().all_input_nodes[0].meta["val"].is_contiguous()


def test_layouts_are_forced_only_while_asked_for() -> None:
    with forced_layouts():
        assert [item.name for item in registered_passes("joint", "post")] == ["forced_layouts"]
    assert registered_passes("joint", "post") == ()
