"""Fake values: recomputed where a change reaches, and nowhere else."""

from __future__ import annotations

import pytest
import torch
import torch.fx
from hypothesis import given
from hypothesis import strategies as st
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from tests.graph.symbolic import symbolic_tensor
from torchkiln.errors import NodeFailure
from torchkiln.graph.fake import (
    computing_with,
    fake_mode_of,
    may_overlap,
    same_metadata,
    same_strides,
    stride_expression,
    update_fake_values,
)

aten = torch.ops.aten


def _traced() -> torch.fx.GraphModule:
    with FakeTensorMode():
        inputs = torch.empty(4, 3), torch.empty(3)
    return make_fx(lambda x, b: ((x + b).sin().sum(1), b * 2))(*inputs)


def test_only_nodes_downstream_of_a_change_are_recomputed() -> None:
    gm = _traced()
    kept = {node: node.meta["val"] for node in gm.graph.nodes if node.op != "output"}
    sin = gm.graph.find_nodes(op="call_function", target=aten.sin.default)[0]
    with gm.graph.inserting_after(sin):
        double = gm.graph.call_function(aten._to_copy.default, (sin,), {"dtype": torch.float64})
    sin.replace_all_uses_with(double, delete_user_cb=lambda user: user is not double)
    changed = update_fake_values(gm)
    seen = [(node.target, before.dtype, node.meta["val"].dtype) for node, before in changed.items()]
    assert double.meta["val"].dtype is torch.float64
    assert seen == [(aten.sum.dim_IntList, torch.float32, torch.float64)]
    for node, value in kept.items():
        if node.target is not aten.sum.dim_IntList:
            assert node.meta["val"] is value


def test_a_node_that_cannot_be_computed_is_named() -> None:
    gm = _traced()
    node = gm.graph.find_nodes(op="call_function", target=aten.sum.dim_IntList)[0]
    node.args = (node.args[0], [7])
    del node.meta["val"]
    with pytest.raises(NodeFailure) as caught:
        update_fake_values(gm)
    assert caught.value.node == node.name


def test_metadata_is_compared_by_dtype_size_and_stride() -> None:
    mode = FakeTensorMode()
    with mode:
        one, same = torch.empty(2, 3), torch.empty(2, 3)
        turned, other = torch.empty(3, 2).t(), torch.empty(2, 3, dtype=torch.int64)
    assert same_metadata((one, 1), (same, 1))
    assert not same_metadata(one, turned)
    assert not same_metadata(one, other)
    assert not same_metadata((one, 1), (same, 2))
    assert not same_metadata(1, True)


def test_the_mode_is_found_on_the_nodes() -> None:
    gm = _traced()
    assert fake_mode_of(gm.graph) is gm.graph.find_nodes(op="placeholder")[0].meta["val"].fake_mode
    assert fake_mode_of(torch.fx.symbolic_trace(torch.nn.ReLU()).graph) is None


def test_a_stride_over_what_may_be_empty_is_the_same_however_torch_counts_that() -> None:
    mode = FakeTensorMode(shape_env=ShapeEnv())
    x = symbolic_tensor(mode, "x", 6)
    rows = x.shape[0] - 2
    with mode:
        one, other, third = (torch.empty_strided((3, rows), (n, 1)) for n in (torch.sym_max(1, rows), rows, 2 * rows))
    assert stride_expression(one.stride(0)) == rows.node.expr
    assert same_strides(one, other)
    assert not same_strides(one, third)


def test_fake_values_of_padded_images_leave_their_sizessymbolic_tensor() -> None:
    mode = FakeTensorMode(shape_env=ShapeEnv())
    x = symbolic_tensor(mode, "x", 2, 3, 6, 10)
    with computing_with(mode):
        padded = aten.constant_pad_nd.default(x, [1, 2, 3, 1], 0.0)
    assert padded.shape[2].node.expr == x.shape[2].node.expr + 4
    assert not mode.shape_env.guards


_DIMENSIONS = st.lists(st.tuples(st.integers(0, 4), st.integers(0, 12)), max_size=4)


@given(_DIMENSIONS)
def test_elements_that_share_a_place_are_found(dimensions: list[tuple[int, int]]) -> None:
    sizes, strides = [size for size, _ in dimensions], [stride for _, stride in dimensions]
    room = sum(size * stride for size, stride in dimensions) + 1
    places = torch.arange(room).as_strided(sizes, strides).flatten().tolist()
    if len(set(places)) < len(places):
        assert may_overlap(torch.empty(room, device="meta").as_strided(sizes, strides))


@given(st.lists(st.integers(0, 4), max_size=4), st.data())
def test_permuted_tensors_and_parts_of_them_do_not_overlap(sizes: list[int], data: st.DataObject) -> None:
    order = data.draw(st.permutations(range(len(sizes))))
    value = torch.empty(sizes, device="meta").permute(order)
    assert not may_overlap(value)
    assert not may_overlap(value[tuple(slice(0, None, data.draw(st.integers(1, 3))) for _ in sizes)])
