"""Operators called from native code, by every route, against the same operators called from Python."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from tests.runtime.hand_made import HandMade, resident_bytes
from torchkiln.artifact.artifact import EntryInfo
from torchkiln.ir.program import Origin, PassInput, StridedView
from torchkiln.runtime.executable import CompiledGraph

aten = torch.ops.aten


@pytest.fixture(params=[True, False], ids=["direct", "handles"])
def direct(request: pytest.FixtureRequest) -> bool:
    """Both ways tensors get in and out."""
    return bool(request.param)


def flat(answer: Any) -> list[Any]:
    return list(answer) if isinstance(answer, (tuple, list)) else [answer]


def routes(info: EntryInfo) -> list[str]:
    return [route for _, route in info.extern_calls]


def check(target: torch._ops.OpOverload, *arguments: Any, direct: bool | None = None, route: str) -> None:
    """Run ``target`` as a one-step graph with every tensor an input, and compare results and strides with eager."""
    graph = HandMade()
    tensors: list[torch.Tensor] = []

    def replace(value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            tensors.append(value)
            return graph.input(f"in{len(tensors) - 1}", value)
        return [replace(v) for v in value] if isinstance(value, (tuple, list)) else value

    names = tuple(replace(a) for a in arguments)
    filled = [*arguments, *(a.default_value for a in target._schema.arguments[len(arguments) :])]
    positional = sum(not a.kwarg_only for a in target._schema.arguments)
    keywords = {a.name: v for a, v in zip(target._schema.arguments, filled, strict=True) if a.kwarg_only}
    expected = flat(target(*filled[:positional], **keywords))
    results = [None if e is None else graph.own(f"out{k}", e) for k, e in enumerate(expected)]
    graph.extern(target, names, tuple(results))
    graph.output(*(r for r in results if r is not None))
    compiled = graph.build(direct=direct)
    assert routes(compiled.info) == [route]
    for _ in range(2):
        actual = compiled(list(tensors))
        wanted = [e for e in expected if e is not None]
        for result, eager in zip(actual, wanted, strict=True):
            torch.testing.assert_close(result, eager, rtol=1e-5, atol=1e-5, equal_nan=True)
            assert result.stride() == eager.stride()
            assert not result.requires_grad


def test_matrix_products(direct: bool) -> None:
    a, b, c = torch.randn(4, 5), torch.randn(6, 5).t(), torch.randn(6)
    check(aten.mm.default, a, b, route="typed", direct=direct)
    check(aten.addmm.default, c, a, b, 0.5, 2, route="typed", direct=direct)
    x, y, z = torch.randn(3, 4, 5), torch.randn(3, 6, 5).transpose(1, 2), torch.randn(3, 4, 6)
    check(aten.bmm.default, x, y, route="typed", direct=direct)
    check(aten.baddbmm.default, z, x, y, 2.0, 0.25, route="typed", direct=direct)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_products_of_other_float_types(dtype: torch.dtype) -> None:
    a, b = torch.ones(2, 3, dtype=dtype), torch.ones(3, 2, dtype=dtype)
    check(aten.mm.default, a, b, route="typed")
    check(aten.addmm.default, torch.ones(2, dtype=dtype), a, b, route="typed")


def test_matmuls_of_integers() -> None:
    a, b = torch.arange(6).view(2, 3), torch.arange(6).view(3, 2)
    check(aten.mm.default, a, b, route="dispatcher")
    check(aten.addmm.default, torch.tensor([1, 2]), a, b, route="python")


def test_convolution(direct: bool) -> None:
    x, w, b = torch.randn(2, 4, 9, 8), torch.randn(6, 2, 3, 3), torch.randn(6)
    check(aten.convolution.default, x, w, b, [2, 1], [1, 0], [1, 1], False, [0, 0], 2, route="typed", direct=direct)
    check(aten.convolution.default, x, w, None, [1, 1], [1, 1], [1, 1], False, [0, 0], 2, route="typed")
    channels_last = x.to(memory_format=torch.channels_last)
    check(aten.convolution.default, channels_last, w, b, [1, 1], [0, 0], [2, 1], False, [0, 0], 2, route="typed")
    t = torch.randn(4, 3, 2, 2)
    check(aten.convolution.default, x, t, None, [2, 2], [0, 0], [1, 1], True, [1, 0], 1, route="typed")


@pytest.mark.parametrize("mask", [[True, True, True], [False, True, False], [True, False, True]])
def test_convolution_backward_with_results_left_out(mask: list[bool]) -> None:
    x, w = torch.randn(2, 4, 9, 8), torch.randn(6, 4, 3, 3)
    gradient = torch.randn(2, 6, 7, 6)
    geometry = ([1, 1], [0, 0], [1, 1], False, [0, 0], 1, mask)
    check(aten.convolution_backward.default, gradient, x, w, [6], *geometry, route="typed")


def test_results_that_nobody_reads(direct: bool) -> None:
    x = torch.randn(5, 6)
    graph = HandMade()
    graph.input("x", x)
    graph.own("indices", torch.empty(5, 2, dtype=torch.int64))
    graph.extern(aten.topk.default, ("x", 2), (None, "indices"))
    graph.output("indices")
    assert torch.equal(graph.build(direct=direct)([x])[0], x.topk(2).indices)


def test_dispatcher_carries_every_kind_of_argument(direct: bool) -> None:
    x = torch.randn(4, 6)
    check(aten.topk.default, x, 3, route="dispatcher", direct=direct)
    check(aten.sort.default, x, 0, True, route="dispatcher", direct=direct)
    check(aten._to_copy.default, x, torch.bfloat16, route="dispatcher", direct=direct)
    check(
        aten._to_copy.default,
        x,
        None,
        torch.strided,
        torch.device("cpu"),
        None,
        False,
        torch.contiguous_format,
        route="dispatcher",
        direct=direct,
    )
    check(aten.native_group_norm.default, x.view(2, 2, 6), torch.randn(2), None, 2, 2, 6, 1, 1e-5, route="dispatcher")
    check(aten._upsample_bilinear2d_aa.vec, torch.randn(1, 2, 8, 8), None, False, [0.5, 0.75], route="dispatcher")
    check(aten._upsample_bilinear2d_aa.vec, torch.randn(1, 2, 8, 8), [3, 5], True, None, route="dispatcher")
    check(aten.cat.default, [x, x[1:]], 0, route="dispatcher", direct=direct)
    check(aten.split_with_sizes_copy.default, x, [1, 5], 1, route="dispatcher", direct=direct)
    check(aten.max_pool2d_with_indices.default, torch.randn(1, 2, 8, 8), [2, 2], route="dispatcher")
    check(aten.histc.default, torch.rand(50), 10, 0, 1, route="python")
    check(aten.bucketize.Tensor, x, torch.tensor([-1.0, 0.0, 1.0]), route="dispatcher")


def test_lists_of_optional_tensors(direct: bool) -> None:
    x, rows, values = torch.zeros(4, 5), torch.tensor([3, 1]), torch.randn(4, 2)
    check(aten.index_put.default, x, [None, rows], values, True, route="dispatcher", direct=direct)
    check(aten.index.Tensor, torch.randn(4, 5), [rows, None], route="dispatcher", direct=direct)


def test_python_carries_strings_of_which_the_stable_abi_leaks_a_copy(direct: bool) -> None:
    x = torch.randn(4, 6)
    check(aten.gelu.default, x, "tanh", route="python", direct=direct)
    check(aten.searchsorted.Tensor, torch.arange(4.0), x, route="dispatcher", direct=direct)


def test_python_carries_what_the_stable_abi_does_not(direct: bool) -> None:
    x = torch.randn(3, 4)
    check(aten.softplus.default, x, 2.0, 10, route="python", direct=direct)
    check(aten.add.Scalar, torch.randn(2, dtype=torch.complex64), 1 + 2j, route="python", direct=direct)
    check(aten.linalg_vector_norm.default, x, 3, [1], True, torch.float64, route="python", direct=direct)


def test_operators_of_other_libraries_go_through_python() -> None:
    @torch.library.custom_op("kiln_test::twice_and_half", mutates_args=())
    def twice_and_half(x: torch.Tensor, scale: float) -> tuple[torch.Tensor, torch.Tensor]:
        return x * scale, x / scale

    check(torch.ops.kiln_test.twice_and_half.default, torch.randn(3), 2.0, route="python")


def test_operands_in_the_arena_and_results_put_there(direct: bool) -> None:
    x = torch.randn(8, 8)
    graph = HandMade()
    graph.input("x", x)
    graph.arena("sum", x)
    graph.arena("product", x)
    graph.arena("sorted", x)
    graph.own("out", x)
    graph.launch("add", "x", "x", "sum")
    graph.extern(aten.mm.default, (graph.view("sum"), StridedView("sum", torch.float32, (8, 8), (1, 8))), ("product",))
    graph.extern(aten.sort.default, ("product",), ("sorted", None))
    graph.launch("mul", "sorted", "sorted", "out")
    graph.output("out")
    expected = ((x + x) @ (x + x).t()).sort().values ** 2
    torch.testing.assert_close(graph.build(direct=direct)([x])[0], expected)


def test_operands_that_are_views(direct: bool) -> None:
    base = torch.randn(100)
    x = base[10:34].view(4, 6)
    graph = HandMade()
    graph.input("x", x)
    graph.own("out", torch.empty(3, 3))
    columns = StridedView("x", torch.float32, (3, 2), (6, 1), 4)
    rows = StridedView("x", torch.float32, (2, 3), (6, 1), 1)
    graph.extern(aten.mm.default, (columns, rows), ("out",))
    graph.own("bits", torch.empty(2, 6, dtype=torch.int32))
    as_integers = StridedView("x", torch.int32, (2, 6), (6, 1), 6)
    graph.extern(aten.clone.default, (as_integers,), ("bits",))
    graph.output("out", "bits")
    product, bits = graph.build(direct=direct)([x])
    torch.testing.assert_close(product, x[:3, 4:] @ x[:2, 1:4])
    assert torch.equal(bits, x.view(torch.int32)[1:3])


def test_a_result_with_other_strides_is_copied_to_the_planned_ones(direct: bool) -> None:
    x = torch.randn(3, 4)
    graph = HandMade()
    graph.input("x", x)
    graph.own("out", torch.empty(4, 3).t())
    graph.extern(aten.clone.default, ("x",), ("out",))
    graph.output("out")
    (result,) = graph.build(direct=direct)([x])
    assert torch.equal(result, x)
    assert result.stride() == (1, 3)


def test_a_result_that_lies_in_the_arena_is_copied_out(direct: bool) -> None:
    x = torch.randn(4)
    graph = HandMade()
    graph.input("x", x)
    graph.arena("sum", x)
    graph.own("alias", x)
    graph.launch("add", "x", "x", "sum")
    graph.extern(aten.alias.default, ("sum",), ("alias",))
    graph.launch("mul", "x", "x", "sum")
    graph.output("alias")
    assert torch.equal(graph.build(direct=direct)([x])[0], x + x)


def test_a_result_of_another_size_is_an_error_that_names_the_operator(direct: bool) -> None:
    x = torch.randn(3, 4)
    graph = HandMade()
    graph.input("x", x)
    graph.own("out", torch.empty(3, 5))
    graph.extern(aten.clone.default, ("x",), ("out",), origin=Origin(("clone",), "model.py:3"))
    graph.output("out")
    with pytest.raises(RuntimeError, match=r"aten.clone.default \(clone\), model.py:3 returned a tensor of another"):
        graph.build(direct=direct)([x])


@pytest.mark.parametrize(
    ("line", "shown"),
    [
        ('a "b" \\22 100%s.py:3', 'a "b" \\22 100%s.py:3'),
        ("two\nlines\r; ret", "two\nlines\r; ret"),
        ("mödel_模型.py:3", "mödel_模型.py:3"),
        ("not\udc80utf-8.py", "not\\udc80utf-8.py"),
    ],
    ids=["quotes", "line ends", "letters", "no UTF-8"],
)
def test_lines_of_any_characters_are_named(line: str, shown: str, direct: bool) -> None:
    x = torch.randn(3, 4)
    graph = HandMade()
    graph.input("x", x)
    graph.own("out", torch.empty(3, 5))
    graph.extern(aten.clone.default, ("x",), ("out",), origin=Origin((), line))
    graph.output("out")
    with pytest.raises(RuntimeError) as caught:
        graph.build(direct=direct)([x])
    assert str(caught.value).startswith(f"aten.clone.default, {shown} returned a tensor of another")


def test_texts_live_as_long_as_the_native_function() -> None:
    x = torch.randn(3, 4)
    graph = HandMade()
    graph.input("x", x)
    graph.own("out", torch.empty(3, 5))
    graph.extern(aten.mm.default, ("x", "x"), ("out",), origin=Origin(("mm",), "model.py:3"))
    graph.output("out")
    function = graph.build(direct=True).function
    gc.collect()
    others = [bytes(64) for _ in range(10_000)]
    with pytest.raises(RuntimeError, match=r"\(in aten.mm.default \(mm\), model.py:3\)"):
        function([x])
    assert others


def test_operators_that_write_their_arguments(direct: bool) -> None:
    mean, x = torch.zeros(5), torch.randn(5)
    graph = HandMade()
    graph.input("mean", mean)
    graph.input("x", x)
    graph.arena("scratch", x)
    graph.launch("add", "x", "x", "scratch")
    graph.extern(aten.copy_.default, ("mean", "scratch"), (None,), mutates=("mean",))
    tail = StridedView("mean", torch.float32, (2,), (1,), 3)
    graph.extern(aten.zero_.default, (tail,), (None,), mutates=("mean",))
    expected = x + x
    expected[3:] = 0
    assert graph.build(direct=direct)([mean, x]) == []
    assert torch.equal(mean, expected)


def test_gradients_are_not_recorded(direct: bool) -> None:
    x = torch.nn.Parameter(torch.randn(3, 3))
    graph = HandMade()
    graph.input("x", x)
    graph.own("sorted", x.detach())
    graph.own("soft", x.detach())
    graph.extern(aten.sort.default, ("x",), ("sorted", None))
    graph.extern(aten.softplus.default, ("x",), ("soft",))
    graph.output("sorted", "soft")
    with torch.enable_grad():
        results = graph.build(direct=direct)([x])
        assert torch.is_grad_enabled()
    assert [r.requires_grad for r in results] == [False, False]


def failing_graph() -> tuple[HandMade, torch.Tensor]:
    """Allocates, calls, and then an operator that fails when an index is out of range."""
    table = torch.randn(4, 5000)
    graph = HandMade()
    graph.input("table", table)
    graph.input("index", torch.zeros(4, 5000, dtype=torch.int64))
    graph.own("sum", table)
    graph.own("sorted", table)
    graph.own("out", table)
    graph.arena("scratch", table)
    graph.launch("add", "table", "table", "sum")
    graph.launch("add", "table", "sum", "scratch")
    graph.extern(aten.sort.default, ("scratch",), ("sorted", None))
    graph.extern(aten.gather.default, ("sorted", 1, "index"), ("out",), origin=Origin(("gather",), "net.py:40"))
    graph.output("out", "sum")
    return graph, table


def test_an_operator_that_fails_raises_its_own_text_and_the_next_call_works(direct: bool) -> None:
    graph, table = failing_graph()
    compiled = graph.build(direct=direct)
    good, bad = torch.zeros(4, 5000, dtype=torch.int64), torch.full((4, 5000), 9999)
    with pytest.raises(RuntimeError) as caught:
        compiled([table, bad])
    assert "aten.gather.default (gather), net.py:40" in "".join(caught.value.__notes__)
    assert "index 9999 is out of bounds for dimension 1 with size 5000" in str(caught.value)
    result, total = compiled([table, good])
    torch.testing.assert_close(result, (table * 3).sort().values.gather(1, good))
    assert torch.equal(total, table + table)


def growth_of_failing_calls(compiled: CompiledGraph, inputs: list[torch.Tensor], count: int) -> int:
    """Bytes by which ``count`` calls that raise make the process grow."""
    before = 0
    for repetitions in (50, count):
        before = resident_bytes()
        for _ in range(repetitions):
            with pytest.raises((RuntimeError, IndexError)):
                compiled(inputs)
        gc.collect()
    return resident_bytes() - before


def test_calls_that_fail_in_torch_leak_nothing(direct: bool) -> None:
    graph, table = failing_graph()
    # Torch takes 9 ms to describe each error. Any one of the tensors leaked would be 24 MB.
    assert growth_of_failing_calls(graph.build(direct=direct), [table, torch.full((4, 5000), 9999)], 300) < 2_000_000


def test_calls_with_a_wrong_result_leak_nothing(direct: bool) -> None:
    x = torch.randn(10_000)
    graph = HandMade()
    graph.input("x", x)
    graph.own("sum", x)
    graph.own("out", torch.empty(3))
    graph.launch("add", "x", "x", "sum")
    graph.extern(aten.clone.default, ("sum",), ("out",))
    graph.output("sum", "out")
    assert growth_of_failing_calls(graph.build(direct=direct), [x], 2000) < 2_000_000


def test_an_error_raised_in_python_arrives_as_it_is(direct: bool) -> None:
    @torch.library.custom_op("kiln_test::refuse", mutates_args=())
    def refuse(x: torch.Tensor) -> torch.Tensor:
        raise LookupError("not today")

    x = torch.randn(3)
    graph = HandMade()
    graph.input("x", x)
    graph.own("sum", x)
    graph.own("out", x)
    graph.launch("add", "x", "x", "sum")
    graph.extern(torch.ops.kiln_test.refuse.default, ("sum",), ("out",), origin=Origin(("refuse",), "net.py:7"))
    graph.output("out")
    compiled = graph.build(direct=direct)
    for _ in range(3):
        with pytest.raises(LookupError, match="not today") as caught:
            compiled([x])
    assert "kiln_test.refuse.default" in "".join(caught.value.__notes__)


def test_results_of_python_calls_leak_nothing() -> None:
    x = torch.randn(10_000)
    graph = HandMade()
    graph.input("x", x)
    graph.own("soft", x)
    graph.extern(aten.softplus.default, ("x",), ("soft",))
    graph.output("soft")
    compiled = graph.build()
    for _ in range(200):
        compiled([x])
    gc.collect()
    before = resident_bytes()
    for _ in range(2000):
        compiled([x])
    gc.collect()
    assert resident_bytes() - before < 2_000_000


def test_lists_of_results_of_another_length_are_an_error() -> None:
    x = torch.randn(6)
    graph = HandMade()
    graph.input("x", x)
    graph.own("a", torch.empty(3))
    graph.extern(aten.split_with_sizes_copy.default, ("x", [3, 3]), ("a",))
    graph.output("a")
    with pytest.raises(RuntimeError, match=r"aten.split_with_sizes_copy.default"):
        graph.build()([x])


def asserting_graph() -> HandMade:
    """Two checks with a message, neither of which returns anything, and then a sum."""
    yes, x = torch.tensor(True), torch.randn(3)
    graph = HandMade()
    graph.input("first", yes)
    graph.input("second", yes)
    graph.input("x", x)
    graph.own("sum", x)
    graph.own("out", x)
    graph.launch("add", "x", "x", "sum")
    graph.extern(aten._assert_async.msg, ("first", "the first"), (None,))
    graph.extern(aten._assert_async.msg, ("second", "the second"), (None,))
    graph.launch("add", "sum", "x", "out")
    graph.output("out")
    return graph


def test_operators_that_return_nothing_leave_their_arguments_alone(direct: bool) -> None:
    compiled = asserting_graph().build(direct=direct)
    yes, no, x = torch.tensor(True), torch.tensor(False), torch.randn(3)
    for _ in range(1000):
        torch.testing.assert_close(compiled([yes, yes, x])[0], x * 3)
    assert yes.item() is True
    for inputs, text in (([yes, no, x], "the second"), ([no, yes, x], "the first")):
        for _ in range(20):
            with pytest.raises(RuntimeError) as caught:
                compiled(inputs)
            assert str(caught.value) == text
            assert caught.value.__notes__ == ["(in aten._assert_async.msg)"]


@pytest.mark.parametrize(
    ("target", "arguments"),
    [
        (aten._assert_async.msg, ("no", "a message")),
        (aten.cat.default, (["x", "square"], 7)),
        (aten.index.Tensor, ("x", [None, "rows"])),
        (aten.sum.dim_IntList, ("x", [9] * 2000)),
        (aten.native_group_norm.default, ("square", "x", None, 2, 2, 6, 1, 1e-5)),
        (aten.mm.default, ("half", "x")),
        (aten.convolution.default, ("x", "square", None, [1], [0], [1], False, [0], 1)),
    ],
    ids=["string", "tensor list", "optional list", "optional integer list", "optional tensor", "typed", "typed result"],
)
def test_arguments_of_an_operator_that_fails_are_freed_once(
    target: torch._ops.OpOverload, arguments: tuple[Any, ...], direct: bool
) -> None:
    x = torch.randn(100, 64)
    graph = HandMade()
    graph.input("x", x)
    graph.input("rows", torch.tensor([0]))
    graph.input("no", torch.tensor(False))
    graph.arena("square", x)
    graph.own("half", x)
    graph.own("out", x)
    graph.launch("add", "x", "x", "square")
    graph.launch("add", "square", "x", "half")
    graph.extern(target, arguments, ("out",) if target._schema.returns else (None,))
    graph.output("half")
    compiled = graph.build(direct=direct)
    # Torch takes milliseconds to describe an error. 200 leaks of a tensor or of the long list are over 3 MB. The
    # string is short because torch itself leaks one copy of each that its stable ABI reads.
    inputs = [x, torch.tensor([10_000]), torch.tensor(False)]
    assert growth_of_failing_calls(compiled, inputs, 200) < 2_000_000


def test_lists_of_results_of_another_length_leak_nothing(direct: bool) -> None:
    x = torch.randn(20_000)
    graph = HandMade()
    graph.input("x", x)
    graph.own("a", torch.empty(10_000))
    graph.extern(aten.split_with_sizes_copy.default, ("x", [10_000, 10_000]), ("a",))
    graph.output("a")
    assert growth_of_failing_calls(graph.build(direct=direct), [x], 1000) < 2_000_000


class Passing(TorchDispatchMode):
    """Runs every operator from Python, as it is."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


def test_an_error_under_a_dispatch_mode_keeps_its_class_and_text(direct: bool) -> None:
    x = torch.tensor([1, 2])
    graph = HandMade()
    graph.input("x", x)
    graph.input("y", x)
    graph.own("out", x)
    graph.extern(aten.floor_divide.default, ("x", "y"), ("out",), origin=Origin(("div",), "net.py:5"))
    graph.output("out")
    compiled = graph.build(direct=direct)
    with Passing(), pytest.raises(RuntimeError) as caught:
        compiled([x, torch.tensor([1, 0])])
    assert str(caught.value) == "ZeroDivisionError"
    assert caught.value.__notes__ == ["(in aten.floor_divide.default (div), net.py:5)"]
    with pytest.raises(RuntimeError) as caught:
        compiled([x, torch.tensor([1, 0])])
    assert str(caught.value) == "ZeroDivisionError"
    assert caught.value.__notes__ == ["(in aten.floor_divide.default (div), net.py:5)"]


def test_inputs_only_the_list_holds_are_freed_after_their_last_use() -> None:
    watched: list[weakref.ref[torch.Tensor]] = []
    alive: list[list[bool]] = []

    @torch.library.custom_op("kiln_test::look", mutates_args=())
    def look(x: torch.Tensor) -> torch.Tensor:
        alive.append([reference() is not None for reference in watched])
        return x.clone()

    x = torch.randn(50)
    graph = HandMade()
    for name in ("once", "twice", "returned", "kept"):
        graph.input(name, x)
    for name in ("a", "b", "c", "d", "e"):
        graph.own(name, x)
    look_at = torch.ops.kiln_test.look.default
    graph.launch("add", "once", "twice", "a")
    graph.extern(look_at, ("a",), ("b",))
    graph.launch("add", "b", "twice", "c")
    graph.launch("add", "c", "returned", "d")
    graph.launch("add", "d", "kept", "d")
    graph.extern(look_at, ("d",), ("e",))
    graph.output("e", PassInput(2))
    compiled = graph.build(direct=True)
    kept = torch.randn(50)
    inputs = [torch.randn(50), torch.randn(50), torch.randn(50), kept]
    expected = inputs[0] + inputs[1] * 2 + inputs[2] + kept
    returned = inputs[2].clone()
    watched += [weakref.ref(t) for t in inputs]
    results = compiled(inputs)
    torch.testing.assert_close(results[0], expected)
    assert torch.equal(results[1], returned)
    assert alive == [[False, True, True, True], [False, False, True, True]]
    assert inputs[:2] == [None, None]
    assert inputs[3] is kept
