"""Copies of inputs are as the inputs are: strides, shared memory, gradients, marks."""

from __future__ import annotations

import torch

from torchkiln.memory.unchanged import copied_inputs, marked_dynamic


def test_copies_have_the_strides_of_the_originals() -> None:
    given = [torch.arange(4.0).expand(3, 4), torch.randn(4, 6).t()[::2], torch.randn(5)[2:], torch.tensor(3.0)]
    copies = copied_inputs(given)
    for copy, value in zip(copies, given, strict=True):
        assert torch.equal(copy, value)
        assert copy.stride() == value.stride()
        assert copy.data_ptr() != value.data_ptr()


def test_what_shares_memory_shares_it_again() -> None:
    x = torch.zeros(2, 3)
    copies, named = copied_inputs(((x, [x, x[1]]), {"y": x.t()}))
    copies[0].fill_(7)
    assert copies[1][0] is copies[0]
    assert torch.equal(copies[1][1], torch.full((3,), 7.0))
    assert torch.equal(named["y"], torch.full((3, 2), 7.0))
    assert torch.equal(x, torch.zeros(2, 3))


def test_copies_are_leaves_that_ask_for_gradients_as_before_and_keep_marks() -> None:
    x = torch.randn(3, requires_grad=True)
    marked = torch.randn(4, 5)
    torch._dynamo.mark_dynamic(marked, 1)
    product, plain, dynamic = copied_inputs([x * 2, x.detach(), marked])
    assert product.requires_grad
    assert product.is_leaf
    assert not plain.requires_grad
    assert marked_dynamic(dynamic) == [1]


def test_copies_have_all_marks_for_sizes_and_do_not_share_them() -> None:
    x = torch.randn(4, 5, 6)
    torch._dynamo.mark_dynamic(x, 0, min=2, max=9)
    torch._dynamo.maybe_mark_dynamic(x, 1)
    torch._dynamo.mark_static(x, 2)
    (copied,) = copied_inputs([x])
    assert vars(copied) == vars(x)
    torch._dynamo.maybe_mark_dynamic(copied, 2)
    assert vars(copied) != vars(x)
