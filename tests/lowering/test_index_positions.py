"""Positions of every operator that takes them, from far below to far above: taken or refused as eager does."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

Function = Callable[[Tensor, Tensor], Any]
X = torch.linspace(-1, 1, 24).reshape(4, 6)
ONES = torch.ones(3, 6)


def _all(i: Tensor) -> Tensor:
    """The three positions for each of six columns."""
    return i[:, None].repeat(1, 6)


def _assign(x: Tensor, i: Tensor, value: Any) -> Tensor:
    y = x.clone()
    y[i] = value
    return y


# Functions of x, 4 x 6, and three positions.
OPERATORS: dict[str, Function] = {
    "index": lambda x, i: x[i],
    "index, second dimension": lambda x, i: x[:, i],
    "index, two tensors": lambda x, i: x[i, i],
    "index_select": lambda x, i: x.index_select(0, i),
    "gather": lambda x, i: x.gather(0, _all(i)),
    "take": lambda x, i: x.take(i),
    "take_along_dim": lambda x, i: torch.take_along_dim(x, i[:, None], 0),
    "take_along_dim, flat": lambda x, i: torch.take_along_dim(x, i),
    "put": lambda x, i: x.put(i, ONES[:, 0]),
    "put, accumulating": lambda x, i: x.put(i, ONES[:, 0], accumulate=True),
    "scatter": lambda x, i: x.scatter(0, _all(i), ONES),
    "scatter, a number": lambda x, i: x.scatter(0, _all(i), 2.0),
    "scatter, one in each row": lambda x, i: x[:3].scatter(1, i[:, None], 2.0),
    "scatter, adding": lambda x, i: x.scatter(0, _all(i), ONES, reduce="add"),
    "scatter, multiplying by a number": lambda x, i: x.scatter(0, _all(i), 2.0, reduce="multiply"),
    "scatter_add": lambda x, i: x.scatter_add(0, _all(i), ONES),
    **{
        f"scatter_reduce, {how}": lambda x, i, how=how: x.scatter_reduce(0, _all(i), ONES, how)
        for how in ("mean", "amax")
    },
    **{
        f"index_reduce, {how}": lambda x, i, how=how: x.index_reduce(0, i, ONES, how)
        for how in ("prod", "amin")
    },
    "index_add": lambda x, i: x.index_add(0, i, ONES, alpha=2),
    "index_copy": lambda x, i: x.index_copy(0, i, ONES),
    "index_copy, second dimension": lambda x, i: x[:3].index_copy(1, i, ONES[:, :3]),
    "index_copy_": lambda x, i: x.clone().index_copy_(0, i, ONES),
    "index_fill": lambda x, i: x.index_fill(0, i, 2.0),
    "index_fill, a tensor": lambda x, i: x.index_fill(0, i, x[0, 0]),
    "index_put": lambda x, i: x.index_put((i,), ONES),
    "index_put, accumulating": lambda x, i: x.index_put((i,), ONES, accumulate=True),
    "index_put, two tensors": lambda x, i: x.index_put((i, i), ONES[:, 0]),
    "assignment": lambda x, i: _assign(x, i, ONES),
    "assignment of a number": lambda x, i: _assign(x, i, 3.0),
    "embedding": lambda x, i: F.embedding(i, x),
    "embedding, padded": lambda x, i: F.embedding(i, x, padding_idx=1),
    **{f"embedding_bag, {how}": lambda x, i, how=how: F.embedding_bag(i[None], x, mode=how) for how in ("sum", "max")},
    "one_hot": lambda x, i: F.one_hot(i, 4),
    "bincount": lambda x, i: torch.bincount(i.clamp(max=9), minlength=12),
    "max_unpool1d": lambda x, i: F.max_unpool1d(x[:1, :3], i[None], 2),
    "nll_loss": lambda x, i: F.nll_loss(x[:3], i),
    "nll_loss, ignoring": lambda x, i: F.nll_loss(x[:3], i, reduction="sum", ignore_index=-1),
    "nll_loss, of one": lambda x, i: F.nll_loss(x[0], i[1]),
    "nll_loss, images": lambda x, i: F.nll_loss(x[None, :, :3], i[None]),
    "cross_entropy": lambda x, i: F.cross_entropy(x[:3], i),
    "cross_entropy, smoothed": lambda x, i: F.cross_entropy(x[:3], i, label_smoothing=0.1),
    "cross_entropy, weighted": lambda x, i: F.cross_entropy(x[:3], i, weight=x[0].abs() + 1, reduction="none"),
}
POSITIONS = [[0, 2, 3], [0, -1, 2], [0, -4, 1], [0, -5, 1], [0, -7, 1], [0, 4, 1], [0, 6, 1], [0, 24, 1], [0, -25, 1]]
POSITIONS += [[0, -100, 1], [0, 2**40, 1], [0, -(2**63), 1]]
# Those of which this compiler makes code of its own; the others are one call of torch whatever the sizes.
GENERATED = ["index", "index_select", "gather", "take", "scatter, one in each row", "embedding", "cross_entropy"]


def _outcome(function: Function, positions: list[int], dtype: torch.dtype) -> Tensor | Exception:
    try:
        result: Tensor = function(X.clone(), torch.tensor(positions, dtype=dtype))
    except (IndexError, RuntimeError) as error:
        return error
    return result


def _check(name: str, *, dynamic: bool, dtype: torch.dtype = torch.int64) -> None:
    function = OPERATORS[name]
    compiled = torch.compile(function, backend="kiln", fullgraph=True, dynamic=dynamic, options={"fallback": False})
    for positions in POSITIONS:
        if not torch.iinfo(dtype).min <= positions[1] <= torch.iinfo(dtype).max:
            continue
        wanted, got = _outcome(function, positions, dtype), _outcome(compiled, positions, dtype)
        if isinstance(wanted, Exception) or isinstance(got, Exception):
            assert isinstance(got, type(wanted)), f"{positions}: eager {wanted!r}, compiled {got!r}"
        else:
            torch.testing.assert_close(got, wanted, equal_nan=True, msg=lambda text, at=positions: f"{at}: {text}")


@pytest.mark.parametrize("name", OPERATORS)
def test_positions_are_taken_or_refused_as_in_eager(name: str) -> None:
    _check(name, dynamic=False)


@pytest.mark.parametrize("name", GENERATED)
def test_positions_are_taken_or_refused_as_in_eager_where_sizes_are_symbolic(name: str) -> None:
    _check(name, dynamic=True)


@pytest.mark.parametrize(
    "name", ["index", "index_select", "gather", "index_copy", "index_fill", "embedding", "nll_loss", "cross_entropy"]
)
def test_positions_of_32_bits_are_taken_or_refused_as_in_eager(name: str) -> None:
    _check(name, dynamic=False, dtype=torch.int32)


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("name", ["nll_loss", "nll_loss, images", "cross_entropy", "cross_entropy, weighted"])
def test_a_class_out_of_range_is_named_as_in_eager(name: str, dynamic: bool) -> None:
    function = OPERATORS[name]
    compiled = torch.compile(function, backend="kiln", fullgraph=True, dynamic=dynamic, options={"fallback": False})
    for bad in (7, -3, 2**40, -(2**63)):
        target = torch.tensor([0, bad, 1])
        with pytest.raises(IndexError) as eager:
            function(X, target)
        assert f"Target {bad} is out of bounds." in str(eager.value)
        with pytest.raises(IndexError) as caught:
            compiled(X, target)
        assert str(caught.value).startswith(str(eager.value))
        assert f"{__file__}" in "".join(caught.value.__notes__)
    torch.testing.assert_close(compiled(X, torch.tensor([0, 3, 1])), function(X, torch.tensor([0, 3, 1])))
