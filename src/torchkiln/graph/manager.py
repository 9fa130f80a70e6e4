"""The pass manager: runs pipelines of named passes over a graph, and numbers, times, records, skips and checks them."""

from __future__ import annotations

import hashlib
import logging
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch.fx
from torch._dynamo.exc import TorchDynamoException

from torchkiln.actions import Actions, in_pass
from torchkiln.config import Settings
from torchkiln.errors import (
    CompileError,
    GraphCheckError,
    NodeFailure,
    NotCheckedWarning,
    OptionError,
    PassFailure,
    first_line,
    warn_user,
)
from torchkiln.graph.fake import same_metadata, update_fake_values, value_key
from torchkiln.graph.fingerprints import function_digest, is_of_this_package, package_digest
from torchkiln.graph.nodes import nodes_in
from torchkiln.graph.numeric_check import WAY_OUT, CannotRun, NumericCheck
from torchkiln.graph.subgraphs import subgraphs
from torchkiln.recorder import Recorder, is_observed
from torchkiln.stats import PassRecord
from torchkiln.target import Target, capture_target

_log = logging.getLogger(__name__)

INFERENCE = frozenset({"inference"})
"""The ``kinds`` of a pass for inference alone."""
TRAINING = frozenset({"forward", "backward"})
"""The ``kinds`` of a pass for the two graphs of training."""


@dataclass(frozen=True)
class Pass:
    """One change to a graph: ``run`` edits the graph module in place and says whether it changed anything.

    ``wanted`` says for which settings it runs; None means for all.
    ``kinds`` are the kinds of graphs it runs on ("captured", "joint", "inference", "forward", "backward");
    None means all.
    A ``required`` pass is never skipped: without it the next stage cannot read the graph.
    ``sources`` gives more that the result depends on, such as the rewrites a pass applies.
    One that ``needs_target`` is called with the :class:`Target` too, one that ``needs_settings`` with these after it.
    A pass that does not ``keep_numbers`` is meant to change results, as one that draws other random numbers is.
    """

    name: str
    run: Callable[..., bool]
    wanted: Callable[[Settings], bool] | None = None
    kinds: frozenset[str] | None = None
    required: bool = False
    sources: Callable[[], str] | None = None
    keep_numbers: bool = True
    needs_target: bool = False
    needs_settings: bool = False

    def fingerprint(self) -> str:
        """Changes when the code of the pass does, so that no cache serves the work of an older one.

        For a pass of this package that is any file of the package, and for others ``run`` and what it calls by name.
        """
        own = package_digest() if is_of_this_package(self.run) else function_digest(self.run)
        parts = [self.name, own] if self.sources is None else [self.name, own, self.sources()]
        return hashlib.sha256("\n".join(parts).encode()).hexdigest()


@dataclass(frozen=True)
class Slot:
    """A place in a pipeline where the passes that users registered under this name run (:func:`register_pass`)."""

    name: str


@dataclass(frozen=True)
class Rounds:
    """Passes that run again, in this order, until a round changes nothing; at most ``most`` rounds."""

    passes: tuple[Pass, ...]
    most: int = 4


@dataclass(frozen=True)
class PassResult:
    """What observers get of a pass that changed a graph: the graph, which later passes edit, and its ``kind``.

    ``path`` is "stage/name". Number 0 is the graph as the stage of that ``path`` was given it.
    """

    number: int
    path: str
    kind: str | None
    graph_module: torch.fx.GraphModule
    keep_numbers: bool = True


@dataclass(frozen=True)
class PassPipeline:
    """The passes of one stage, in the order they run."""

    stage: str
    passes: tuple[Pass | Slot | Rounds, ...]

    def resolved(self) -> tuple[Pass, ...]:
        """The passes with what is registered now in place of the slots, those of rounds once."""
        return tuple(item for rounds in self.rounds() for item in rounds.passes)

    def rounds(self) -> Iterator[Rounds]:
        """The same as rounds, most of which are one pass that runs once."""
        for entry in self.passes:
            if isinstance(entry, Rounds):
                yield entry
            elif isinstance(entry, Slot):
                yield Rounds(registered_passes(self.stage, entry.name), most=1)
            else:
                yield Rounds((entry,), most=1)

    def fingerprint(self) -> str:
        """Changes when a pass does, or when their order does."""
        text = "\n".join([self.stage, *(item.fingerprint() for item in self.resolved())])
        return hashlib.sha256(text.encode()).hexdigest()


# Passes of users by stage and slot. A process has one set of them, as it has one set of registered operators.
_registered: dict[tuple[str, str], tuple[Pass, ...]] = {}


def register_pass(stage: str, slot: str, item: Pass, *, first: bool = False) -> None:
    """Run ``item`` in that slot from now on, after those already there; a name given again is replaced.

    With ``first`` it runs before them.
    """
    present = registered_passes(stage, slot)
    if any(other.name == item.name for other in present):
        _registered[stage, slot] = tuple(item if other.name == item.name else other for other in present)
    else:
        _registered[stage, slot] = (item, *present) if first else (*present, item)


def unregister_pass(stage: str, slot: str, name: str) -> None:
    """Remove the pass of that name, if there is one."""
    _registered[stage, slot] = tuple(item for item in registered_passes(stage, slot) if item.name != name)


def registered_passes(stage: str, slot: str) -> tuple[Pass, ...]:
    """What is registered for that slot, in order."""
    return _registered.get((stage, slot), ())


def registered_fingerprints() -> list[str]:
    """A line for each pass that users registered: where it runs, its name, and the digest of its code."""
    return [
        f"{stage}/{slot} {item.name} {item.fingerprint()}"
        for (stage, slot), items in sorted(_registered.items())
        for item in items
    ]


class PassManager:
    """Runs the pipelines of one compilation.

    Passes are numbered 1, 2, 3, ... over all stages and graphs of the compilation, in the order they run, and a pass
    that is skipped keeps its number; so ``passes_limit`` finds the pass that breaks a model by halving. The graphs of
    the compilation are counted by its ``recorder``. ``target`` is what it compiles for, the machine
    as it is now where none is given. With ``keep_artifacts``, its compiled graphs keep what they were loaded from.
    """

    def __init__(
        self,
        settings: Settings,
        target: Target | None = None,
        *,
        keep_artifacts: bool = False,
        recorder: Recorder | None = None,
    ) -> None:
        self.recorder = recorder if recorder is not None else Recorder()
        self.target = target if target is not None else capture_target(settings)
        self.settings = settings
        self.keep_artifacts = keep_artifacts
        self.actions = Actions(settings, self.recorder)
        """Counts what the compilation does."""
        self.changed_by: set[str] = set()
        """The passes that have changed a graph, as "stage/name"."""

    def run(
        self,
        pipeline: PassPipeline,
        graph_module: torch.fx.GraphModule,
        *,
        kind: str | None = None,
        inputs: Sequence[object] | None = None,
    ) -> bool:
        """Run every pass of ``pipeline`` on ``graph_module`` and its subgraphs; returns whether anything changed.

        ``kind`` is what the graph is (see :class:`Pass`); without it only passes for all kinds run. ``inputs`` are what
        ``check_numerics`` runs the graph on; without them it makes some from the fake values of the placeholders.
        """
        changed = False
        if is_observed():
            self.recorder.tell("pass", PassResult(0, pipeline.stage, kind, graph_module))
        check = _numeric_check(pipeline.stage, graph_module, inputs) if self.settings.check_numerics else None
        for rounds in pipeline.rounds():
            for _ in range(rounds.most):
                edited = [self._run_pass(pipeline.stage, item, graph_module, kind, check) for item in rounds.passes]
                changed |= any(edited)
                if not any(edited):
                    break
        if changed:
            for module in [*subgraphs(graph_module), graph_module]:
                module.recompile()
        return changed

    def _run_pass(
        self,
        stage: str,
        item: Pass,
        graph_module: torch.fx.GraphModule,
        kind: str | None,
        check: NumericCheck | None,
    ) -> bool:
        number, path = self.actions.number("pass"), f"{stage}/{item.name}"
        recorded = self.settings.record_passes
        if self._skips(path, item, number, kind):
            if recorded:
                self.recorder.ran_pass(PassRecord(number, stage, item.name, 0.0, changed=False, skipped=True))
            return False
        before = str(graph_module.graph) if recorded else ""
        if is_observed():
            self.actions.tell("pass", number, path)
        start = time.perf_counter()
        changed = self._edit(item, graph_module, f"{path} (number {number})")
        seconds = time.perf_counter() - start
        if is_observed():
            if changed:
                self.recorder.tell("pass", PassResult(number, path, kind, graph_module, item.keep_numbers))
            self.recorder.tell("pass time", PassRecord(number, stage, item.name, seconds, changed=changed))
        if changed:
            _log.debug("pass %d, %s, changed the %s graph in %.4f s", number, path, kind, seconds)
            self.changed_by.add(path)
        if changed and check is not None:
            if item.keep_numbers:
                check.compare(graph_module, f"{path} (number {number})")
            else:
                check.accept(graph_module)
        if recorded:
            after = str(graph_module.graph)
            record = PassRecord(number, stage, item.name, seconds, changed=changed, before=before, after=after)
            self.recorder.ran_pass(record)
        return changed

    def _edit(self, item: Pass, graph_module: torch.fx.GraphModule, name: str) -> bool:
        """Run a pass on a graph and its subgraphs; each one that it changes is checked where settings ask for that."""
        changed = False
        for module in [*subgraphs(graph_module), graph_module]:
            # Asked before the pass runs: what the graph returns is what must not change.
            returned = _returned_values(module) if self.settings.checks else []
            with in_pass(self.actions):
                edited = _run(item, module, self.target, self.settings)
            if edited:
                changed = True
                if self.settings.checks:
                    _check(module, name, returned)
        return changed

    def _skips(self, path: str, item: Pass, number: int, kind: str | None) -> bool:
        if item.kinds is not None and kind not in item.kinds:
            return True
        if item.required:
            return False
        limit = self.settings.passes_limit
        if limit is not None and number > limit:
            return True
        if item.wanted is not None and not item.wanted(self.settings):
            return True
        return any(choice in (number, item.name, path) for choice in self.settings.passes_skip)


def _run(item: Pass, graph_module: torch.fx.GraphModule, target: Target, settings: Settings) -> bool:
    needed = (*((target,) if item.needs_target else ()), *((settings,) if item.needs_settings else ()))
    try:
        return item.run(graph_module, *needed)
    except (CompileError, NodeFailure, OptionError, TorchDynamoException):
        raise  # these say what failed, or are Dynamo's way to ask for another attempt
    except Exception as error:
        raise PassFailure(item.name) from error


def _numeric_check(
    stage: str, graph_module: torch.fx.GraphModule, inputs: Sequence[object] | None
) -> NumericCheck | None:
    try:
        return NumericCheck(graph_module, inputs)
    except CannotRun as error:
        warn_user(f"The numbers of {stage} passes are not checked on one graph: {error}.", NotCheckedWarning)
        return None


def _returned_values(graph_module: torch.fx.GraphModule) -> list[object]:
    key = value_key(graph_module.graph)
    return [node.meta.get(key) for node in nodes_in(graph_module.graph.output_node().args)]


def _check(graph_module: torch.fx.GraphModule, name: str, returned: list[object]) -> None:
    """Raise GraphCheckError unless the graph is well formed and returns values like those in ``returned``."""
    try:
        graph_module.graph.lint()
        # A captured graph may write and switch modes: calling its functions again on its fake values would do that.
        if value_key(graph_module.graph) == "val":
            update_fake_values(graph_module, everything=True)
    except Exception as error:
        cause = first_line(error.__cause__ or error)  # torch goes on with the whole graph
        raise GraphCheckError(f"Pass {name} left a graph that is not well formed: {cause}. {WAY_OUT}") from error
    values = _returned_values(graph_module)
    for position, (before, after) in enumerate(zip(returned, values, strict=False)):
        if before is not None and after is not None and not same_metadata(before, after):
            raise GraphCheckError(f"Pass {name} changed output {position} from {before} to {after}. {WAY_OUT}")
    if len(returned) != len(values):
        count = f"{len(returned)} to {len(values)}"
        raise GraphCheckError(f"Pass {name} changed the number of returned tensors from {count}. {WAY_OUT}")
