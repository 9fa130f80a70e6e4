"""The smallest set of values that separates backward from what cannot be computed again: a minimum cut.

Every value is an edge as wide as its bytes from a vertex "its inputs are there" to a vertex "it is there"; dependencies
are edges of unlimited width. Flow goes from the values that must not be computed again to those backward reads. Of all
minimum cuts, the one nearest to backward is taken: it computes the least again.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
from scipy.sparse import csr_matrix
from scipy.sparse.csgraph import breadth_first_order, maximum_flow

# Capacities are 32-bit integers, and so is the sum that a flow can reach.
_WIDEST = 1 << 30
_UNLIMITED = (1 << 31) - 1

Array = npt.NDArray[Any]


class NoCutError(ValueError):
    """Backward reads something that can be neither saved nor computed again."""


@dataclass(frozen=True)
class Network:
    """Values are numbered from 0. ``capacity`` has the bytes of each, None for one that cannot be saved.

    ``edges`` are pairs (value, value computed from it), ``sources`` must not be computed again, ``sinks`` are read.
    """

    capacity: Sequence[int | None]
    edges: Sequence[tuple[int, int]]
    sources: Sequence[int]
    sinks: Sequence[int]


@dataclass(frozen=True)
class Cut:
    """``values`` separate the sources from the sinks. ``flow`` times ``unit`` is their size in bytes, rounded up."""

    values: frozenset[int]
    flow: int
    unit: int


def minimum_cut(network: Network) -> Cut:
    """The smallest cut of ``network`` by bytes; among equals, the one nearest to the sinks."""
    count = len(network.capacity)
    source, sink = 2 * count, 2 * count + 1
    total = sum(c for c in network.capacity if c is not None)
    unit = max(1, -(-total // (_WIDEST - count - 1)))
    wide = [_UNLIMITED if c is None else -(-c // unit) for c in network.capacity]
    pairs = np.asarray(network.edges, dtype=np.int64).reshape(-1, 2)
    # Widths of equal edges would be added up.
    edges = np.stack(np.divmod(np.unique(pairs[:, 0] * count + pairs[:, 1]), max(1, count)), axis=1)
    own = np.arange(count, dtype=np.int64)
    sources = np.unique(np.asarray(network.sources, dtype=np.int64))
    sinks = np.unique(np.asarray(network.sinks, dtype=np.int64))
    tails = np.concatenate([2 * own, 2 * edges[:, 0] + 1, np.full(len(sources), source), 2 * sinks + 1])
    heads = np.concatenate([2 * own + 1, 2 * edges[:, 1], 2 * sources, np.full(len(sinks), sink)])
    widths = np.full(len(tails), _UNLIMITED, dtype=np.int64)
    widths[:count] = wide
    on_path = _between(tails, heads, widths, source, sink)
    tails, heads, widths = tails[on_path], heads[on_path], widths[on_path]
    if not len(tails):
        return Cut(frozenset(), 0, unit)
    shape = (2 * count + 2, 2 * count + 2)
    unlimited = widths == _UNLIMITED
    if sink in _reached(tails[unlimited], heads[unlimited], source, shape[0]):
        raise NoCutError("a value that backward reads can be neither saved nor computed again")
    graph = csr_matrix((widths.astype(np.int32), (tails, heads)), shape=shape)
    result = maximum_flow(graph, source, sink)
    residual = (graph - result.flow).tocoo()
    left = residual.data > 0
    # Backwards from the sink: what can still reach it is backward's side.
    behind = np.zeros(shape[0], dtype=bool)
    behind[_reached(residual.col[left], residual.row[left], sink, shape[0])] = True
    cut = behind[heads] & ~behind[tails] & (tails + 1 == heads) & (tails % 2 == 0) & (tails < 2 * count)
    return Cut(frozenset((tails[cut] // 2).tolist()), int(result.flow_value), unit)


def _between(tails: Array, heads: Array, widths: Array, source: int, sink: int) -> npt.NDArray[np.bool_]:
    """Which edges lie on a way from the source to the sink."""
    size = sink + 1
    forward = np.zeros(size, dtype=bool)
    forward[_reached(tails, heads, source, size)] = True
    backward = np.zeros(size, dtype=bool)
    backward[_reached(heads, tails, sink, size)] = True
    return forward[tails] & backward[heads]


def _reached(tails: Array, heads: Array, start: int, size: int) -> Array:
    graph = csr_matrix((np.ones(len(tails), dtype=np.int8), (tails, heads)), shape=(size, size))
    order: Array = breadth_first_order(graph, start, return_predecessors=False)
    return order
