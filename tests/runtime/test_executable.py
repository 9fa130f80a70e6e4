"""Compiled graphs called from Python: inputs, outputs, memory, threads, failures."""

from __future__ import annotations

import gc
import multiprocessing
import threading

import pytest
import torch

from tests.runtime.hand_made import HandMade, resident_bytes
from torchkiln.artifact import Artifact
from torchkiln.graph.native_operators import CHECK
from torchkiln.ir.program import Origin, PassInput, PlainValue, StridedView
from torchkiln.runtime.arena import arena_stats, clear_arena
from torchkiln.runtime.executable import CompiledGraph

aten = torch.ops.aten


@pytest.fixture(params=[True, False], ids=["direct", "handles"])
def direct(request: pytest.FixtureRequest) -> bool:
    """Both ways tensors get in and out."""
    return bool(request.param)


def add_graph(like: torch.Tensor) -> HandMade:
    graph = HandMade()
    graph.input("x", like)
    graph.input("y", like)
    graph.own("sum", like)
    graph.launch("add", "x", "y", "sum")
    graph.output("sum")
    return graph


def test_kernel_result_is_returned(direct: bool) -> None:
    x, y = torch.randn(5, 7), torch.randn(5, 7)
    (result,) = add_graph(x).build(direct=direct)([x, y])
    torch.testing.assert_close(result, x + y, rtol=0, atol=0)
    assert result.stride() == (7, 1)
    assert not result.requires_grad


def test_graph_declares_the_boxed_calling_convention() -> None:
    assert add_graph(torch.ones(1)).build()._boxed_call is True


def test_inputs_with_a_storage_offset_are_read_where_they_start(direct: bool) -> None:
    base = torch.arange(20, dtype=torch.float32)
    x, y = base[3:7], base[10:14]
    graph = add_graph(x)
    graph.output(StridedView("x", torch.float32, (2,), (1,), 1))
    total, view = graph.build(direct=direct)([x, y])
    assert total.tolist() == [13.0, 15.0, 17.0, 19.0]
    assert view.tolist() == [4.0, 5.0]
    assert view.data_ptr() == base[4:].data_ptr()


def test_parameters_are_inputs_like_any_tensor(direct: bool) -> None:
    x, y = torch.nn.Parameter(torch.randn(3)), torch.randn(3)
    (result,) = add_graph(y).build(direct=direct)([x, y])
    assert torch.equal(result, x.detach() + y)
    assert not result.requires_grad


def test_outputs_may_be_inputs_values_views_and_duplicates(direct: bool) -> None:
    x, y = torch.randn(2, 3), torch.randn(2, 3)
    graph = add_graph(x)
    marker = object()
    transposed = StridedView("sum", torch.float32, (3, 2), (1, 3))
    graph.output(PassInput(1), PlainValue(None), PlainValue(marker), "sum", transposed, "x")
    first, same_y, none, value, second, transposed, same_x = graph.build(direct=direct)([x, y])
    assert same_y is y
    assert none is None
    assert value is marker
    assert second is first
    assert torch.equal(transposed, (x + y).t())
    assert transposed.data_ptr() == first.data_ptr()
    assert same_x is x


def test_an_output_may_view_a_buffer_with_another_dtype(direct: bool) -> None:
    base = torch.arange(8, dtype=torch.float32)
    x = base[2:6]
    graph = add_graph(x)
    graph.output(StridedView("x", torch.int32, (3,), (1,), 1), StridedView("sum", torch.int16, (8,), (1,)))
    total, view, halves = graph.build(direct=direct)([x, x])
    assert torch.equal(view, x.view(torch.int32)[1:])
    assert view.data_ptr() == base[3:].data_ptr()
    assert torch.equal(halves, total.view(torch.int16))


def test_graph_without_steps(direct: bool) -> None:
    graph = HandMade()
    graph.input("x", torch.ones(2))
    graph.output(PassInput(0), PlainValue(7))
    x = torch.randn(2)
    same, seven = graph.build(direct=direct)([x])
    assert same is x
    assert seven == 7


def test_graph_without_inputs_or_outputs(direct: bool) -> None:
    assert HandMade().build(direct=direct)([]) == []


def test_inputs_that_are_not_tensors_are_passed_over(direct: bool) -> None:
    graph = HandMade()
    graph.input("n", None)
    graph.input("x", torch.ones(2))
    graph.own("sum", torch.ones(2))
    graph.launch("add", "x", "x", "sum")
    graph.output("sum", PassInput(0))
    total, number = graph.build(direct=direct)([12, torch.tensor([1.0, 2.0])])
    assert total.tolist() == [2.0, 4.0]
    assert number == 12


@pytest.mark.parametrize("shape", [(), (0,), (3, 0, 2), (1, 1)])
def test_small_and_empty_shapes(direct: bool, shape: tuple[int, ...]) -> None:
    x, y = torch.randn(shape), torch.randn(shape)
    (result,) = add_graph(x).build(direct=direct)([x, y])
    assert torch.equal(result, x + y)
    assert result.shape == shape


def test_constants_are_read_by_kernels_and_returned_as_themselves(direct: bool) -> None:
    weight = torch.randn(6)
    graph = HandMade()
    graph.input("x", weight)
    graph.constant("w", weight)
    graph.own("sum", weight)
    graph.launch("add", "x", "w", "sum")
    graph.output("sum", "w")
    x = torch.randn(6)
    total, same = graph.build(direct=direct)([x])
    assert torch.equal(total, x + weight)
    assert same is weight


def test_kernels_write_into_inputs(direct: bool) -> None:
    x, y = torch.randn(4), torch.randn(4)
    expected = x + y
    graph = HandMade()
    graph.input("x", x)
    graph.input("y", y)
    graph.launch("add", "x", "y", "x")
    assert graph.build(direct=direct)([x, y]) == []
    assert torch.equal(x, expected)


def chain_graph(like: torch.Tensor) -> HandMade:
    """(x + y) * x, the sum in the arena."""
    graph = HandMade()
    graph.input("x", like)
    graph.input("y", like)
    graph.arena("sum", like)
    graph.own("product", like)
    graph.launch("add", "x", "y", "sum")
    graph.launch("mul", "sum", "x", "product")
    graph.output("product")
    return graph


@pytest.mark.parametrize("size", [16, 100_000])
def test_values_in_the_arena(direct: bool, size: int) -> None:
    x, y = torch.randn(size), torch.randn(size)
    (result,) = chain_graph(x).build(direct=direct)([x, y])
    assert torch.equal(result, (x + y) * x)


def test_graphs_share_one_arena_block_when_they_run_in_turn() -> None:
    clear_arena()
    before = arena_stats()
    small, large = torch.randn(10_000), torch.randn(50_000)
    graphs = [(chain_graph(t).build(), t) for t in (small, large)]
    for _ in range(3):
        for graph, x in graphs:
            assert torch.equal(graph([x, x])[0], (x + x) * x)
    after = arena_stats()
    assert after.blocks - before.blocks == 1
    assert 200_000 <= after.bytes - before.bytes <= 201_000
    clear_arena()
    assert arena_stats().blocks == before.blocks


@pytest.mark.parametrize("threads", [None, 1, 2])
def test_parallel_kernels(threads: int | None) -> None:
    x = torch.randn(100_003)
    graph = HandMade()
    graph.input("x", x)
    graph.own("sum", x)
    graph.launch("add", "x", "x", "sum", grain=1000)
    graph.output("sum")
    text = graph.text(threads)
    assert ("call i32 @torch_parallel_for" in text) == (threads != 1)
    assert torch.equal(graph.build(threads=threads)([x])[0], x + x)


@pytest.mark.parametrize("error", [IndexError, RuntimeError])
def test_an_index_out_of_range_raises_and_the_next_call_works(direct: bool, error: type[Exception]) -> None:
    table, index = torch.randn(4), torch.tensor([0, 3, 1])
    graph = HandMade()
    graph.input("table", table)
    graph.input("index", index)
    graph.own("rows", torch.empty(3))
    graph.arena("bad", torch.empty(1, dtype=torch.bool))
    graph.launch("gather4", "table", "index", "bad", "rows")
    graph.extern(
        CHECK, ("bad", error.__name__, "index out of range in gather"), (), origin=Origin(("gather_1",), "model.py:12")
    )
    graph.output("rows")
    compiled = graph.build(direct=direct)
    with pytest.raises(error, match=r"index out of range in gather \(gather_1\), model.py:12"):
        compiled([table, torch.tensor([0, 4, 1])])
    assert torch.equal(compiled([table, index])[0], table[index])


@pytest.mark.parametrize(
    "wrong",
    [
        torch.ones(3, 2),
        torch.ones(6),
        torch.ones(2, 3, dtype=torch.float64),
        torch.ones(3, 2).t(),
    ],
    ids=["sizes", "dimensions", "dtype", "strides"],
)
def test_an_input_of_another_kind_is_refused(direct: bool, wrong: torch.Tensor) -> None:
    compiled = add_graph(torch.ones(2, 3)).build(direct=direct)
    with pytest.raises(RuntimeError, match="input 1 is not a tensor of the type"):
        compiled([torch.ones(2, 3), wrong])


def test_strides_of_dimensions_of_one_element_do_not_matter(direct: bool) -> None:
    x = torch.randn(1, 3)
    odd = torch.empty_strided((1, 3), (17, 1)).copy_(x)
    assert torch.equal(add_graph(x).build(direct=direct)([odd, x])[0], x + x)


@pytest.mark.parametrize("bad", [None, 3, "x"])
def test_something_that_is_not_a_tensor_is_refused(direct: bool, bad: object) -> None:
    with pytest.raises(TypeError, match="input 0 is not a tensor"):
        add_graph(torch.ones(2)).build(direct=direct)([bad, torch.ones(2)])


def test_a_wrong_number_of_inputs_is_refused(direct: bool) -> None:
    with pytest.raises(TypeError, match="takes a list of 2 inputs, got 1"):
        add_graph(torch.ones(2)).build(direct=direct)([torch.ones(2)])


def test_outputs_have_one_owner(direct: bool) -> None:
    compiled = add_graph(torch.ones(2)).build(direct=direct)
    x = torch.ones(2)
    references = x._use_count()
    (result,) = compiled([x, x])
    assert result._use_count() == torch.ones(2)._use_count()
    assert x._use_count() == references


def test_eight_threads_run_one_graph_at_once() -> None:
    size = 30_000
    graph = chain_graph(torch.ones(size))
    graph.steps.clear()
    graph.frees.clear()
    graph.launch("add", "x", "y", "sum", grain=4000)
    graph.launch("mul", "sum", "x", "product", grain=4000)
    compiled = graph.build()
    wrong: list[int] = []

    def work(seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        for _ in range(100):
            x, y = (torch.randn(size, generator=generator) for _ in range(2))
            if not torch.equal(compiled([x, y])[0], (x + y) * x):
                wrong.append(seed)

    workers = [threading.Thread(target=work, args=(seed,)) for seed in range(8)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert wrong == []
    assert arena_stats().blocks <= 8


def test_ten_thousand_calls_do_not_grow_memory(direct: bool) -> None:
    x = torch.randn(8, 8)
    graph = chain_graph(x)
    graph.extern(aten.sort.default, ("product",), ("values", None))
    graph.own("values", x)
    graph.output("values", StridedView("values", torch.float32, (8,), (8,)))
    compiled = graph.build(direct=direct)

    def calls(count: int) -> None:
        for _ in range(count):
            compiled([x, x])

    calls(2000)
    gc.collect()
    before = resident_bytes()
    calls(10_000)
    gc.collect()
    assert resident_bytes() - before < 1_000_000


def test_dropped_graphs_give_back_their_code() -> None:
    artifact = chain_graph(torch.ones(16)).artifact()
    x = torch.randn(16)

    def load(count: int) -> None:
        for _ in range(count):
            assert torch.equal(CompiledGraph(artifact)([x, x])[0], (x + x) * x)

    load(100)
    gc.collect()
    before = resident_bytes()
    load(400)
    gc.collect()
    # Each graph maps at least four pages of its own; the engine keeps only a few hundred bytes of names.
    assert resident_bytes() - before < 400 * 4096


def _run_in_another_process(artifact: Artifact, answer: multiprocessing.SimpleQueue[list[float]]) -> None:
    graph = CompiledGraph(artifact)
    answer.put(graph([torch.tensor([1.0, 2.0]), torch.tensor([10.0, 20.0])])[0].tolist())


def test_object_code_runs_in_another_process() -> None:
    graph = add_graph(torch.ones(2))
    graph.own("sorted", torch.ones(2))
    graph.extern(aten.sort.default, ("sum", -1, True), ("sorted", None), frees=("sum",))
    graph.outputs.clear()
    graph.output("sorted")
    context = multiprocessing.get_context("spawn")
    answer: multiprocessing.SimpleQueue[list[float]] = context.SimpleQueue()
    process = context.Process(target=_run_in_another_process, args=(graph.artifact(), answer))
    process.start()
    process.join(120)
    assert process.exitcode == 0
    assert answer.get() == [22.0, 11.0]
