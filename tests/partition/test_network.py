"""The minimum cut: as wide as the flow, separating, and nearest to the sinks among equals."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from torchkiln.partition.network import Network, NoCutError, minimum_cut


@st.composite
def networks(draw: st.DrawFn) -> Network:
    """Values computed from earlier ones, some of which cannot be saved; sources can be."""
    count = draw(st.integers(1, 14))
    edges = [(a, b) for b in range(count) for a in range(b) if draw(st.integers(0, 3)) == 0]
    sources = [k for k in range(count) if draw(st.integers(0, 3)) == 0]
    sinks = [k for k in range(count) if draw(st.integers(0, 3)) == 0]
    size = st.one_of(st.integers(0, 5), st.integers(0, 10**12))
    capacity = [draw(size) if k in sources or draw(st.booleans()) else None for k in range(count)]
    return Network(capacity, edges, sources, sinks)


def _separates(network: Network, values: frozenset[int]) -> bool:
    """Whether every way from a source to a sink goes through one of ``values``."""
    reached = {k for k in network.sources if k not in values}
    for a, b in sorted(network.edges, key=lambda edge: edge[1]):
        if a in reached and b not in values:
            reached.add(b)
    return reached.isdisjoint(network.sinks)


def _width(network: Network, values: frozenset[int]) -> int:
    widths = [network.capacity[k] for k in values]
    assert None not in widths
    return sum(width for width in widths if width is not None)


@settings(max_examples=200, deadline=None)
@given(networks())
def test_a_cut_separates_and_is_as_wide_as_the_flow(network: Network) -> None:
    cut = minimum_cut(network)
    assert _separates(network, cut.values)
    assert _width(network, cut.values) == cut.flow


@settings(max_examples=100, deadline=None)
@given(networks())
def test_no_other_cut_is_narrower(network: Network) -> None:
    savable = [k for k, width in enumerate(network.capacity) if width is not None][:10]
    cut = minimum_cut(network)
    for chosen in range(1 << len(savable)):
        other = frozenset(k for bit, k in enumerate(savable) if chosen >> bit & 1)
        if _separates(network, other):
            assert _width(network, other) >= cut.flow


def test_among_equal_cuts_the_one_nearest_to_the_sinks_is_taken() -> None:
    chain = Network([8, 8, None, 8, 9], [(0, 1), (1, 2), (2, 3), (3, 4)], [0], [4])
    assert minimum_cut(chain).values == {3}


def test_values_that_are_read_twice_count_once() -> None:
    fan = Network([8, 5, 5], [(0, 1), (0, 1), (0, 2)], [0], [1, 2, 2])
    assert minimum_cut(fan).values == {0}


def test_sizes_beyond_32_bits_are_compared() -> None:
    huge = Network([7 << 40, (7 << 40) - (1 << 20)], [(0, 1)], [0], [1])
    assert minimum_cut(huge).values == {1}


def test_what_can_be_neither_saved_nor_recomputed_is_an_error() -> None:
    with pytest.raises(NoCutError):
        minimum_cut(Network([None, None], [(0, 1)], [0], [1]))


def test_nothing_is_cut_where_nothing_is_read() -> None:
    assert minimum_cut(Network([8, 8], [(0, 1)], [0], [])).values == frozenset()
    assert minimum_cut(Network([], [], [], [])).values == frozenset()
