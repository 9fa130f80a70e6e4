"""The numeric check: passes that change results are found and named, and nothing of the user's is touched."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.fx
from torch._dynamo.exc import BackendCompilerFailed
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from tests.passes.pre_grad.captured import capture
from torchkiln.config import Settings
from torchkiln.errors import GraphCheckError, NotCheckedWarning
from torchkiln.graph.manager import Pass, PassManager, PassPipeline, register_pass, unregister_pass

aten = torch.ops.aten
CHECKING = Settings(check_numerics=True)


def _retarget(old: object, new: Callable[..., object], **facts: Any) -> Pass:
    def run(gm: torch.fx.GraphModule) -> bool:
        found = gm.graph.find_nodes(op="call_function", target=old)
        for node in found:
            node.target = new
        return bool(found)

    return Pass("retarget", run, **facts)


def _run(item: Pass, gm: torch.fx.GraphModule, inputs: list[Any] | None = None) -> bool:
    return PassManager(CHECKING).run(PassPipeline("test", (item,)), gm, inputs=inputs)


def test_the_pass_the_output_and_the_difference_are_named() -> None:
    gm = capture(lambda x: (x.cos(), torch.sin(x)), torch.zeros(2, 3))
    x = torch.tensor([[0.0, 0.0, 0.0], [0.0, 0.5, 0.0]])
    with pytest.raises(GraphCheckError, match=r"test/retarget \(number 1\) changed the numbers of output 1") as caught:
        _run(_retarget(torch.sin, torch.tan), gm, [x])
    difference = (x.tan() - x.sin()).max().item()
    assert f"largest difference is {difference:.6g}"[:28] in str(caught.value)
    assert "at [1, 1]" in str(caught.value)


def test_a_change_that_rounds_elsewhere_is_accepted() -> None:
    gm = capture(lambda x: torch.log2(x.exp()), torch.ones(8))
    assert _run(_retarget(torch.log2, lambda x: torch.log(x) / 0.6931471805599453), gm, [torch.randn(8)])


def test_what_a_graph_writes_to_its_inputs_is_compared() -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        torch.relu_(x)
        return x.sum() * 0

    gm = capture(function, torch.randn(4))
    with pytest.raises(GraphCheckError, match="input 0 after the call"):
        _run(_retarget(torch.relu_, torch.abs_), gm, [torch.tensor([-1.0, 2.0])])


def test_infinities_and_nan_are_values_like_others() -> None:
    gm = capture(lambda x: torch.log(x), torch.ones(3))
    values = torch.tensor([-1.0, 0.0, 1.0])
    assert _run(_retarget(torch.log, lambda x: torch.log2(x) * 0.6931471805599453), gm, [values])
    with pytest.raises(GraphCheckError, match="inf"):
        _run(_retarget(torch.log, lambda x: x.abs().log()), capture(lambda x: torch.log(x), torch.ones(3)), [values])


def test_the_users_tensors_and_random_numbers_stay() -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        x.add_(1)
        return torch.nn.functional.dropout(x, 0.5, True) + torch.rand(4)

    gm = capture(function, torch.zeros(4))
    x = torch.zeros(4)
    version, state = x._version, torch.get_rng_state()
    assert _run(_retarget(torch.nn.functional.dropout, lambda *args: torch.nn.functional.dropout(*args)), gm, [x])
    assert torch.equal(torch.get_rng_state(), state)
    assert x._version == version
    assert not x.any()


def test_buffers_of_modules_stay() -> None:
    model = torch.nn.Sequential(torch.nn.BatchNorm1d(3), torch.nn.Identity())
    gm = torch.fx.symbolic_trace(model)

    def drop_identity(graph_module: torch.fx.GraphModule) -> bool:
        (node,) = graph_module.graph.find_nodes(op="call_module", target="1")
        node.replace_all_uses_with(node.args[0])
        graph_module.graph.erase_node(node)
        return True

    assert _run(Pass("drop", drop_identity), gm, [torch.randn(4, 3)])
    assert model[0].num_batches_tracked == 0
    assert torch.equal(model[0].running_mean, torch.zeros(3))


def test_inputs_are_made_from_fake_tensors() -> None:
    with FakeTensorMode():
        x, index = torch.empty(4, 3).t(), torch.empty(5, dtype=torch.int64)
    gm = make_fx(lambda x, index: (x.sin()[:, index],))(x, index)
    with pytest.raises(GraphCheckError, match="output 0"):
        _run(_retarget(aten.sin.default, aten.cos.default), gm)


def test_sizes_known_at_run_time_take_those_of_the_example() -> None:
    gm = capture(lambda x: torch.sin(x).reshape(-1, x.size(0)), torch.randn(4, 6), dynamic=True)
    with pytest.raises(GraphCheckError, match="output 0"):
        _run(_retarget(torch.sin, torch.cos), gm)


def test_a_pass_that_means_to_change_numbers_says_so() -> None:
    gm = capture(lambda x: torch.sin(x), torch.randn(4))
    assert _run(_retarget(torch.sin, torch.cos, keep_numbers=False), gm, [torch.randn(4)])


def test_a_graph_that_does_not_run_is_reported_and_not_checked() -> None:
    gm = capture(lambda x: torch.sin(x), torch.randn(4))
    with pytest.warns(NotCheckedWarning, match="test passes are not checked.*TypeError"):
        assert _run(_retarget(torch.sin, torch.cos), gm, ["no tensor"])


def test_a_graph_that_fails_on_the_way_leaves_no_mode_on() -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return torch.func.grad(lambda row: (torch.sin(row) @ row).sum())(x)

    gm = capture(function, torch.randn(4))
    with pytest.raises(GraphCheckError, match="does not run"):
        _run(_retarget(torch.sin, torch.stft), gm, [torch.randn(4)])
    assert not torch.is_autocast_enabled("cpu")
    assert not torch._C._functorch.get_interpreter_stack()
    assert torch._C._autograd._saved_tensors_hooks_is_enabled()


def test_a_graph_that_a_pass_breaks_is_an_error() -> None:
    gm = capture(lambda x: torch.sin(x), torch.randn(4))
    with pytest.raises(GraphCheckError, match="does not run"):
        _run(_retarget(torch.sin, torch.stft), gm, [torch.randn(4)])


def test_the_setting_reaches_torch_compile(compile_strictly: Callable[..., Any]) -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        return torch.sin(x) + 1

    wrong = _retarget(torch.sin, torch.cos)
    register_pass("pre_grad", "post", wrong)
    try:
        with pytest.raises(BackendCompilerFailed, match=r"pre_grad/retarget.*output 0.*largest difference"):
            compile_strictly(function, check_numerics=True)(torch.randn(4))
    finally:
        unregister_pass("pre_grad", "post", "retarget")


def test_every_stage_is_checked_and_right(compile_strictly: Callable[..., Any]) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.GELU(), torch.nn.Dropout(0.5), torch.nn.LayerNorm(8))
    x = torch.randn(4, 6)
    compiled = compile_strictly(model, check_numerics=True, checks=True)
    compiled(x).sum().backward()
    gradients = [p.grad.clone() for p in model.parameters()]
    assert all(g.isfinite().all() for g in gradients)
    model.eval()
    torch.testing.assert_close(compiled(x), model(x))
