"""The judge of captures lays results out as fake tensors foresee, with symbolic sizes too."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from conformance.foreseen import UnforeseenSizes, foreseen_layouts


@pytest.mark.parametrize("dynamic", [False, True])
def test_a_result_keeps_the_strides_that_are_foreseen(dynamic: bool) -> None:
    x = torch.randn(4, 3).t()
    found = torch.compile(lambda x: x + 1, backend=foreseen_layouts, dynamic=dynamic)(x)
    assert found.stride() == (1, 3)
    torch.testing.assert_close(found, x + 1)


@pytest.mark.parametrize("dynamic", [False, True])
def test_an_operator_that_gives_other_sizes_is_named(dynamic: bool) -> None:
    @torch.library.custom_op("tests::shorter", mutates_args=())
    def shorter(x: Tensor) -> Tensor:
        return x[1:].clone()

    @shorter.register_fake
    def _(x: Tensor) -> Tensor:
        return torch.empty_like(x)

    with pytest.raises(UnforeseenSizes, match=r"shorter.* gives torch.float32\[4\]"):
        torch.compile(lambda x: shorter(x) * 2, backend=foreseen_layouts, dynamic=dynamic)(torch.randn(5))
