"""Tensors that native code cannot read: eager's answer or an error, never the end of the process."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys

import pytest
import torch

from tests.runtime.test_executable import add_graph
from tests.runtime.unreadable_tensors import CASES
from torchkiln.errors import NotPlainError
from torchkiln.native import tensor_keys
from torchkiln.runtime.plain_tensors import is_plain, make_plain, plain_copy


def _outcomes(cases: tuple[str, ...]) -> dict[str, str]:
    """What came of each case, run in one process for as long as that lives."""
    found: dict[str, str] = {}
    while len(found) < len(cases):
        left = [case for case in cases if case not in found]
        command = [sys.executable, "-m", "tests.runtime.unreadable_tensors", *left]
        environment = {**os.environ, "PYTHONWARNINGS": "ignore", "OMP_NUM_THREADS": "1"}
        process = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=900, check=False)
        running = None
        for line in process.stdout.splitlines():
            word, _, rest = line.partition("\t")
            case, _, text = rest.partition("\t")
            if word == "begin":
                running = case
            elif word in ("passed", "failed"):
                found[case] = "passed" if word == "passed" else text.replace("\\n", "\n")
                running = None
        if running is not None:
            found[running] = f"ended the process with status {process.returncode}"
        elif process.returncode != 0 or not set(left) <= found.keys():
            raise AssertionError(process.stderr[-2000:])
    return found


# Two processes: one per worker of the suite.
@pytest.mark.parametrize("part", [0, 1])
def test_a_tensor_that_cannot_be_read_is_answered_as_by_eager_or_refused(part: int) -> None:
    wrong = {case: outcome for case, outcome in _outcomes(CASES[part::2]).items() if outcome != "passed"}
    assert not wrong, "\n\n".join(f"{case}: {outcome}" for case, outcome in wrong.items())


@pytest.mark.parametrize("direct", [True, False], ids=["direct", "handles"])
def test_both_ways_into_native_code_copy_what_can_be_copied_and_refuse_the_rest(direct: bool) -> None:
    graph, x = add_graph(torch.ones(2, 3)).build(direct=direct), torch.randn(2, 3)
    assert torch.equal(graph([x, torch._efficientzerotensor(2, 3)])[0], x)
    assert torch.equal(graph([x, torch._neg_view(x)])[0], torch.zeros(2, 3))
    with pytest.raises(NotPlainError, match="input 1 of a compiled graph is a tensor on the device meta"):
        graph([x, x.to("meta")])
    with pytest.raises(NotPlainError, match=r"input 0 of a compiled graph is a torch.sparse_coo tensor"):
        graph([x.to_sparse(), x])
    freed = x.clone()
    freed.untyped_storage().resize_(0)
    with pytest.raises(RuntimeError, match=r"input 1 .* its storage was made too small"):
        graph([x, freed])
    inputs = [x, x.to("meta")]
    with pytest.raises(NotPlainError):
        graph(inputs)
    assert inputs[0] is x


def test_where_the_keys_of_a_tensor_are_was_found_in_this_torch() -> None:
    offset = tensor_keys.plain_keys().offset
    assert offset is not None
    for tensor in (torch.ones(3), torch._neg_view(torch.ones(3)), torch.ones(2, device="meta")):
        held = ctypes.c_uint64.from_address(tensor._cdata + offset).value
        assert held == torch._C._dispatch_keys(tensor).raw_repr()


def test_without_the_place_of_the_keys_graphs_run_through_handles(monkeypatch: pytest.MonkeyPatch) -> None:
    from torchkiln.native import tensor_layout as layout

    monkeypatch.setattr(layout, "plain_keys", lambda: tensor_keys.PlainKeys(0, 0, 0, 0, None))
    layout.check_layout.cache_clear()
    try:
        assert "dispatch keys" in layout.check_layout().reason
        assert not add_graph(torch.ones(3)).build().direct
    finally:
        layout.check_layout.cache_clear()


def test_plain_tensors_are_those_whose_memory_holds_their_values() -> None:
    x = torch.randn(3, 4)
    with torch.inference_mode():
        made_for_inference = torch.randn(3)
    for plain in (x, x.t(), x[1:], torch.nn.Parameter(x), made_for_inference, torch.tensor(1), torch.empty(0)):
        assert is_plain(plain)
    marked = (torch._neg_view(x), torch.zeros(3, dtype=torch.complex64).conj(), torch._efficientzerotensor(3))
    for other in (*marked, x.to_sparse(), x.to_mkldnn(), x.to("meta")):
        assert not is_plain(other)


@pytest.mark.parametrize("shape", [(), (0, 3), (3, 4)])
def test_a_copy_has_the_values_and_strides_of_the_original(shape: tuple[int, ...]) -> None:
    x = torch.randn(shape)
    layouts = [x, x.t() if x.dim() == 2 else x, x.expand(5, *shape), torch.randn(*shape, 2)[..., 1]]
    for original in layouts:
        marked = torch._neg_view(original)
        copy = plain_copy(marked)
        assert copy is not None
        assert is_plain(copy)
        assert copy.stride() == marked.stride()
        assert torch.equal(copy, -original)


def test_what_a_graph_writes_to_is_never_a_copy() -> None:
    marked = torch._neg_view(torch.ones(3))
    inputs = [marked]
    with pytest.raises(NotPlainError, match="to be written"):
        make_plain(inputs, tensors=[0], written=[0], numbers=[])
    assert inputs[0] is marked


def test_a_graph_whose_operator_calls_another_that_refuses_its_inputs_does_not_run_again() -> None:
    """Only what the graph itself was given can make it run as captured: then nothing of it has run yet."""
    calls = []

    @torch.library.custom_op("kiln_test_plain::other_graph", mutates_args=())
    def other_graph(x: torch.Tensor) -> torch.Tensor:
        calls.append(x.clone())
        raise NotPlainError("input 0 of a compiled graph is a sparse tensor", compilation=-1)

    other_graph.register_fake(torch.empty_like)

    def function(x: torch.Tensor) -> torch.Tensor:
        x.add_(1)
        return other_graph(x) * 2

    compiled = torch.compile(function, backend="kiln", fullgraph=True, options={"fallback": False})
    for step in range(1, 4):
        with pytest.raises(NotPlainError, match="a sparse tensor"):
            compiled(torch.zeros(3))
        assert len(calls) == step
        assert torch.equal(calls[-1], torch.ones(3))
