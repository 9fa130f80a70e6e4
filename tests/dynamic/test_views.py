"""Views of symbolic sizes, of inputs and of results: whatever the size, a view lies in memory where eager's does."""

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
# Of rows whose number is known and whose length is not: an index into all of them is divided by the length.
ROW_VIEWS: dict[str, Callable[[Tensor], Sequence[Tensor]]] = {
    "all rows": lambda x: [x.flatten(), x.unsqueeze(1).flatten(1), x.view(2, -1)],
    "rows": lambda x: x.unbind(0),
    "half of the rows": lambda x: [x.view(2, -1)[1], x[2:].flatten()],
    "columns": lambda x: [x.t(), x.t()[1:], x.t().unflatten(1, (2, 2))],
    "blocks": lambda x: [x.unflatten(0, (2, 2)).transpose(0, 1), x.view(2, 2, -1).flatten(0, 1)[3]],
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


def _places(results: Sequence[Tensor]) -> list[object]:
    """For each tensor that has elements, whose memory it shows, where, and its strides."""
    storages = [r.untyped_storage().data_ptr() for r in results]
    return [
        (storages.index(storage), r.storage_offset(), [s for n, s in zip(r.shape, r.stride(), strict=True) if n > 1])
        for r, storage in zip(results, storages, strict=True)
        if r.numel()
    ]


@pytest.mark.parametrize("name", [*VIEWS, *ROW_VIEWS])
def test_views_of_one_result_show_the_same_memory(name: str, everything_compiled: None) -> None:
    view = VIEWS.get(name) or ROW_VIEWS[name]

    def function(x: Tensor) -> list[Tensor]:
        result = x.sin()
        return [result, *view(result)]

    run = torch.compile(function, backend="kiln", options={"fallback": False, "adaptive": False})
    for size in SIZES:
        x = torch.arange(float(size)) if name in VIEWS else torch.arange(float(4 * size)).view(4, size)
        torch._dynamo.maybe_mark_dynamic(x, x.dim() - 1)
        results, expected = run(x), function(x)
        for result, right in zip(results, expected, strict=True):
            torch.testing.assert_close(result, right)
        assert _places(results) == _places(expected)


_RETURNED_VIEWS: dict[str, Callable[[Tensor], Sequence[Tensor]]] = {
    "columns": lambda x: (y := x.exp().unflatten(1, (2, -1)), y[:, 1]),
    "rows": lambda x: (y := x.exp().unflatten(0, (2, -1)), y[1]),
    "pairs": lambda x: (y := x.exp().unflatten(1, (-1, 2)), y[:, 1:]),
    "transposed": lambda x: (y := x.sin().unflatten(1, (2, -1)), y.transpose(0, 1)[1:]),
    "halves": lambda x: (y := (x * 2).flatten().view(2, -1), y[1]),
    "a reshape there and back": lambda x: (y := x.reshape(-1, 2).exp().reshape(x.shape), y[:, 1:]),
    "rows of a computed width": lambda x: (y := x.view(-1).sin().view(-1, x.shape[1]), y[1:]),
}


@pytest.mark.parametrize("trains", [False, True])
@pytest.mark.parametrize("name", _RETURNED_VIEWS)
def test_a_view_of_a_result_is_that_part_of_it(name: str, trains: bool, everything_compiled: None) -> None:
    function = _RETURNED_VIEWS[name]
    run = torch.compile(function, backend="kiln", dynamic=True, options={"fallback": False})
    for size in (4, 6, 4, 8):
        x = torch.randn(size, size, requires_grad=trains)
        expected, results = function(x), run(x)
        assert all(torch.allclose(a, b, rtol=1e-6) for a, b in zip(results, expected, strict=True))
        assert len({r.untyped_storage().data_ptr() for r in results}) == 1
        if trains:
            right, found = (torch.autograd.grad(sum((t * t).sum() for t in r), x)[0] for r in (expected, results))
            torch.testing.assert_close(found, right)
