"""The pass manager: numbers, skipping, bisecting, records, checks, subgraphs, fingerprints."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.fx
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from torchkiln.config import Settings
from torchkiln.errors import GraphCheckError, OptionError
from torchkiln.graph.manager import Pass, PassManager, PassPipeline, Rounds
from torchkiln.passes import all_pipelines, reject_unknown_passes
from torchkiln.stats import reset_stats, stats

aten = torch.ops.aten


@pytest.fixture(autouse=True)
def _fresh() -> None:
    reset_stats()


def _graph() -> torch.fx.GraphModule:
    with FakeTensorMode():
        x = torch.empty(4, 3)
    return make_fx(lambda x: (x.sin().exp(),))(x)


def _noting(log: list[str], name: str) -> Pass:
    def run(gm: torch.fx.GraphModule) -> bool:
        log.append(name)
        return False

    return Pass(name, run)


def _pipeline(*passes: Pass, stage: str = "test") -> PassPipeline:
    return PassPipeline(stage, passes)


def test_passes_run_in_order_and_numbers_go_on_over_pipelines() -> None:
    log: list[str] = []
    manager = PassManager(Settings(record_passes=True))
    manager.run(_pipeline(_noting(log, "a"), _noting(log, "b")), _graph())
    manager.run(_pipeline(_noting(log, "c"), stage="later"), _graph())
    assert log == ["a", "b", "c"]
    assert [(p.number, p.stage, p.name) for p in stats().passes] == [
        (1, "test", "a"),
        (2, "test", "b"),
        (3, "later", "c"),
    ]


def test_skipping_by_number_keeps_the_numbers_of_the_others() -> None:
    log: list[str] = []
    manager = PassManager(Settings(passes_skip=(2,), record_passes=True))
    manager.run(_pipeline(*(_noting(log, name) for name in "abc")), _graph())
    assert log == ["a", "c"]
    assert [(p.number, p.skipped) for p in stats().passes] == [(1, False), (2, True), (3, False)]


@pytest.mark.parametrize(("skipped", "ran"), [("no_ops", []), ("joint/no_ops", ["test"]), ("test/no_ops", ["joint"])])
def test_skipping_by_name_with_or_without_stage(skipped: str, ran: list[str]) -> None:
    log: list[str] = []
    pipelines = tuple(
        PassPipeline(stage, (Pass("no_ops", lambda gm, stage=stage: bool(log.append(stage))),))
        for stage in ("test", "joint")
    )
    manager = PassManager(Settings(passes_skip=(skipped,)))
    for pipeline in pipelines:
        manager.run(pipeline, _graph())
    assert log == ran


def test_skipping_a_pass_that_does_not_exist_lists_those_that_do() -> None:
    with pytest.raises(OptionError, match=r"Unknown pass in passes_skip 'no_op'.*post_grad/dead_code"):
        reject_unknown_passes(Settings(passes_skip=("no_op",)))


def test_the_passes_limit_stops_after_that_many_passes() -> None:
    log: list[str] = []
    PassManager(Settings(passes_limit=2)).run(_pipeline(*(_noting(log, name) for name in "abcd")), _graph())
    assert log == ["a", "b"]


def _replace(old: object, new: Callable[..., object]) -> Pass:
    def run(gm: torch.fx.GraphModule) -> bool:
        found = gm.graph.find_nodes(op="call_function", target=old)
        for node in found:
            node.target = new
        return bool(found)

    return Pass("replace", run)


def test_records_hold_the_text_before_and_after() -> None:
    gm = _graph()
    assert PassManager(Settings(record_passes=True)).run(_pipeline(_replace(aten.sin.default, aten.cos.default)), gm)
    (record,) = stats().passes
    assert record.changed
    assert "aten.sin" in record.before
    assert "aten.cos" not in record.before
    assert "aten.cos" in record.after
    torch.testing.assert_close(gm(torch.ones(4, 3))[0], torch.ones(4, 3).cos().exp())


def test_nothing_is_recorded_unless_asked() -> None:
    PassManager(Settings()).run(_pipeline(_replace(aten.sin.default, aten.cos.default)), _graph())
    assert stats().passes == ()


def test_checks_find_a_graph_that_is_not_well_formed() -> None:
    def use_before_definition(gm: torch.fx.GraphModule) -> bool:
        sin, exp = (node for node in gm.graph.nodes if node.op == "call_function")
        sin.prepend(exp)
        return True

    pipeline = _pipeline(Pass("breaker", use_before_definition))
    with pytest.raises(GraphCheckError, match=r"test/breaker \(number 1\).*passes_skip"):
        PassManager(Settings(checks=True)).run(pipeline, _graph())


def test_checks_find_an_output_that_looks_different() -> None:
    pipeline = _pipeline(_replace(aten.exp.default, aten.isnan.default))
    with pytest.raises(GraphCheckError, match="changed output 0"):
        PassManager(Settings(checks=True)).run(pipeline, _graph())


def test_checks_accept_a_change_that_keeps_the_outputs() -> None:
    gm = _graph()
    assert PassManager(Settings(checks=True)).run(_pipeline(_replace(aten.sin.default, aten.cos.default)), gm)


def test_passes_reach_subgraphs_of_subgraphs_once_inner_first() -> None:
    def leaf(target: object) -> torch.fx.GraphModule:
        graph = torch.fx.Graph()
        graph.output((graph.call_function(target, (graph.placeholder("x"),)),))
        return torch.fx.GraphModule({}, graph)

    def around(inner: torch.fx.GraphModule) -> torch.fx.GraphModule:
        root = torch.nn.Module()
        root.body = inner
        graph = torch.fx.Graph()
        x = graph.placeholder("x")
        called = graph.call_function(
            torch.ops.higher_order.cond, (x, graph.get_attr("body"), graph.get_attr("body"), (x,))
        )
        graph.output((called,))
        return torch.fx.GraphModule(root, graph)

    innermost = leaf(aten.sin.default)
    outer = around(around(innermost))
    seen: list[torch.fx.GraphModule] = []
    PassManager(Settings()).run(_pipeline(Pass("see", lambda gm: bool(seen.append(gm)))), outer)
    assert [sum(1 for n in gm.graph.nodes if n.target is aten.sin.default) for gm in seen] == [1, 0, 0]
    assert seen[0] is outer.body.body
    assert seen[-1] is outer


def test_a_fingerprint_is_stable_and_depends_on_name_and_order() -> None:
    one, two = all_pipelines()[2].passes[:2]
    assert one.fingerprint() == Pass(one.name, one.run).fingerprint()
    assert one.fingerprint() != Pass("other", one.run).fingerprint()
    assert one.fingerprint() != two.fingerprint()
    assert _pipeline(one, two).fingerprint() != _pipeline(two, one).fingerprint()


def test_a_fingerprint_of_a_pass_without_source_depends_on_its_code() -> None:
    def made(text: str) -> Pass:
        names: dict[str, Callable[[torch.fx.GraphModule], bool]] = {}
        exec(text, {"__name__": "nowhere"}, names)
        return Pass("made", names["run"])

    assert made("def run(gm): return gm == 1").fingerprint() != made("def run(gm): return gm == 2").fingerprint()


def test_names_are_unique_within_a_stage() -> None:
    for pipeline in all_pipelines():
        entries = [item.passes if isinstance(item, Rounds) else (item,) for item in pipeline.passes]
        names = [item.name for several in entries for item in several]
        assert len(set(names)) == len(names)


def test_checks_do_not_run_a_captured_graph_again(compile_strictly: Callable[..., object]) -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        return torch.func.grad(lambda y: (y.relu() ** 2).sum())(x)

    x = torch.randn(4)
    torch.testing.assert_close(compile_strictly(function, checks=True)(x), function(x))
