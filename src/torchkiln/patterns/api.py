"""What users write: ``@torchkiln.rewrite`` and ``@torchkiln.graph_pass``."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal, TypeVar

import torch
import torch.fx

from torchkiln.errors import OptionError, PatternError
from torchkiln.graph.fake import update_fake_values
from torchkiln.graph.fingerprints import function_digest
from torchkiln.graph.manager import Pass, register_pass, unregister_pass
from torchkiln.patterns.expressions import Call, Outputs
from torchkiln.patterns.index import Through
from torchkiln.patterns.match import Match
from torchkiln.patterns.rewrites import DirectRewrite, Rewrite, RewriteSet, TracedRewrite, argument_names
from torchkiln.patterns.tracing import fwd_only, joint_fwd_bwd, torch_level

Stage = Literal["pre_grad", "joint", "post_grad"]
STAGES = ("pre_grad", "joint", "post_grad")

_T = TypeVar("_T")


class RegisteredRewrite:
    """A rewrite of the user's. It runs as a pass of its own name, until :meth:`unregister`."""

    def __init__(self, name: str, stage: Stage, priority: int, rewrites: Sequence[Rewrite]) -> None:
        self.name = name
        self.stage = stage
        self.slot = f"priority_{priority}"
        self.set = RewriteSet(name, list(rewrites))
        register_pass(stage, self.slot, Pass(name, self.set.apply, sources=self.set.fingerprint))

    def __repr__(self) -> str:
        return f"<rewrite {self.name} at {self.stage}>"

    def unregister(self) -> None:
        """Stop applying it to graphs compiled from now on."""
        unregister_pass(self.stage, self.slot, self.name)


def rewrite(
    *,
    stage: Stage,
    search: Callable[..., Any] | None = None,
    pattern: Call | Outputs | None = None,
    example_inputs: Iterable[Any] = (),
    when: Callable[[Match], bool] | None = None,
    priority: int = 0,
    through: Through | None = None,
    exclusive: Sequence[str] = (),
) -> Callable[[Any], RegisteredRewrite]:
    """Register a rewrite: compiled graphs compute ``replace`` wherever they computed ``search``.

    Decorates a class with the two functions, or the replacing function with ``search`` given::

        @torchkiln.rewrite(stage="joint", example_inputs=(torch.empty(4, 8), torch.empty(8)))
        class ReluOfSum:
            def search(x, bias):
                return torch.relu(x + bias)

            def replace(x, bias):
                return my_library.relu_of_sum(x, bias)

    ``example_inputs`` has one value for each argument, tensors and numbers; a number stands for any number, and is best
    one that appears nowhere else. In the stage ``joint`` one definition serves inference and training: the gradients of
    ``replace`` take the place of those of ``search``. Where only the forward is found, it alone is replaced, so both
    must compute the same. ``when`` gets the match and has the last word. ``through`` says what a match may see
    through: ``"no_ops"`` or ``"views"``. Rewrites of a lower ``priority`` run first.

    With ``pattern`` (an expression of :mod:`torchkiln.patterns`) the function decorated edits the graph itself and is
    called as ``function(match, **captures)``.
    """
    if stage not in STAGES:
        raise OptionError.unknown("stage", stage, STAGES)
    if priority not in (0, 1, 2):
        raise OptionError.bad_value("priority", priority, "0, 1 or 2")
    examples = tuple(example_inputs)

    def register(decorated: Any) -> RegisteredRewrite:
        name = decorated.__name__
        if pattern is not None:
            made: list[Rewrite] = [DirectRewrite(name, pattern, decorated, when=when, through=through)]
            return RegisteredRewrite(name, stage, priority, made)
        searched, replaced = search, decorated
        if searched is None:
            searched, replaced = (getattr(decorated, part, None) for part in ("search", "replace"))
        if searched is None or replaced is None:
            raise PatternError(f"Rewrite {name!r} has no search function; give it in the class or as search=.")
        _check_examples(name, searched, examples)
        options = {"when": when, "through": through, "exclusive": tuple(exclusive)}
        return RegisteredRewrite(name, stage, priority, _traced(name, stage, searched, replaced, examples, options))

    return register


def _check_examples(name: str, search: Callable[..., Any], examples: Sequence[Any]) -> None:
    names = argument_names(search)
    if len(examples) != len(names):
        raise PatternError(
            f"Rewrite {name!r} has {len(examples)} example inputs for {len(names)} arguments"
            f" ({', '.join(names)}); give one for each."
        )


def _traced(
    name: str,
    stage: Stage,
    search: Callable[..., Any],
    replace: Callable[..., Any],
    examples: Sequence[Any],
    options: Mapping[str, Any],
) -> list[Rewrite]:
    named = zip(argument_names(search), examples, strict=True)
    scalars = {name: value for name, value in named if not isinstance(value, torch.Tensor)}
    tensors = [value.detach() for value in examples if isinstance(value, torch.Tensor)]
    tracer = torch_level if stage == "pre_grad" else fwd_only
    forward = TracedRewrite(name, search, replace, lambda: tensors, tracer, scalars=scalars, **options)
    if stage != "joint":
        return [forward]
    # With gradients first: in a joint graph, the forward alone would be found in every place where both are.
    return [*(_with_gradients(forward, tensors, choice) for choice in _choices(tensors)), forward]


def _with_gradients(forward: TracedRewrite, tensors: Sequence[torch.Tensor], wanted: tuple[int, ...]) -> TracedRewrite:
    examples = [value.clone().requires_grad_(k in wanted) for k, value in enumerate(tensors)]
    return dataclasses.replace(forward, example_inputs=lambda: examples, trace=joint_fwd_bwd, forward=forward)


def _choices(tensors: Sequence[torch.Tensor]) -> Iterator[tuple[int, ...]]:
    """Every choice of arguments that may ask for gradients, the most first."""
    differentiable = [k for k, value in enumerate(tensors) if value.is_floating_point() or value.is_complex()]
    if len(differentiable) > _MOST_CHOICES:
        return iter([tuple(differentiable)])
    return (c for n in range(len(differentiable), 0, -1) for c in itertools.combinations(differentiable, n))


# With more differentiable arguments than this, only the case that all of them ask for gradients is looked for.
_MOST_CHOICES = 4


def graph_pass(
    *, stage: Stage, position: Literal["pre", "post"] = "post", name: str | None = None
) -> Callable[[_T], _T]:
    """Register a function that edits an FX graph module in place and returns whether it did.

    It runs before (``pre``) or after (``post``) the passes of its stage, on every graph and subgraph compiled from now
    on. ``pre_grad`` graphs have torch-level calls, the others functional ATen operators. Nodes that are added need no
    fake values: those are computed afterwards. A function registered under the same name takes its place.
    """
    if stage not in STAGES:
        raise OptionError.unknown("stage", stage, STAGES)
    if position not in ("pre", "post"):
        raise OptionError.bad_value("position", position, "'pre' or 'post'")

    def register(function: _T) -> _T:
        assert callable(function)
        title = str(name or getattr(function, "__name__", type(function).__name__))

        def run(graph_module: torch.fx.GraphModule) -> bool:
            changed = function(graph_module)
            if not isinstance(changed, bool):
                raise PatternError(f"Graph pass {title!r} returned {changed!r}; return whether it changed the graph.")
            if changed:
                graph_module.graph.lint()
                update_fake_values(graph_module)
            return changed

        register_pass(stage, position, Pass(title, run, sources=lambda: function_digest(function)))
        return function

    return register


def remove_graph_pass(name: str) -> None:
    """Remove a pass registered by :func:`graph_pass`."""
    for stage in STAGES:
        for position in ("pre", "post"):
            unregister_pass(stage, position, name)
