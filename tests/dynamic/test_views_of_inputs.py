"""Views of inputs of symbolic sizes: whatever the size, a result lies in memory where eager's does."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch

Tensor = torch.Tensor

VIEWS: dict[str, Callable[[Tensor], Sequence[Tensor]]] = {
    "chunks": lambda x: x.chunk(4),
    "chunks of columns": lambda x: x.view(-1, 1).expand(-1, 3).chunk(3, 1),
    "thirds": lambda x: x.tensor_split(3),
    "pieces": lambda x: x.split(5),
    "all but the first": lambda x: [x[1:], x[3:], x[:-2]],
    "every third": lambda x: [x[::3], x[1::3]],
    "halves": lambda x: [x[: x.shape[0] // 2], x[x.shape[0] // 2 :]],
    "windows": lambda x: [x.unfold(0, 4, 2)],
    "diagonal": lambda x: [x.view(1, -1).expand(3, -1).diagonal(1)],
}
SIZES = (4, 8, 12, 44, 11, 5, 4, 7)


@pytest.mark.parametrize("name", VIEWS)
def test_a_view_of_an_input_lies_where_eagers_does(name: str, everything_compiled: None) -> None:
    function = VIEWS[name]
    run = torch.compile(function, backend="kiln", dynamic=True, options={"fallback": False, "adaptive": False})
    for size in SIZES:
        x = torch.arange(float(size))
        results, expected = run(x), function(x)
        assert len(results) == len(expected)
        for result, right in zip(results, expected, strict=True):
            assert result.shape == right.shape
            assert torch.equal(result, right)
            assert right.numel() == 0 or result.data_ptr() == right.data_ptr()
            strides = zip(result.shape, result.stride(), right.stride(), strict=True)
            assert all(a == b for size, a, b in strides if size > 1)
