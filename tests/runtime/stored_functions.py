"""Functions compiled with kiln, as the bytes another process would read."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from torchkiln import compile_fx
from torchkiln.artifact import Artifact, CallingConvention, CompiledFunction, encode
from torchkiln.config import Settings
from torchkiln.recorder import Record, listen


def compiled_meanwhile(compile_and_run: Callable[[], Any]) -> bytes:
    """What is compiled meanwhile, one captured graph, as bytes."""
    graphs: list[Artifact] = []
    conventions: list[CallingConvention] = []

    def hear(record: Record) -> None:
        if record.stage == "code":
            graphs.append(record.value.artifact)
        elif record.stage == "calling convention":
            conventions.append(record.value)

    with listen(hear):
        compile_and_run()
    (convention,) = conventions
    assert not convention.wrapped
    return encode(CompiledFunction(convention, *graphs))


class Captured:
    """A function compiled with kiln that keeps the inputs Dynamo calls the captured graph with."""

    def __init__(self, function: Callable[..., Any], *, dynamic: bool = False) -> None:
        self.inputs: tuple[Any, ...] = ()
        self.call = torch.compile(function, backend=self._compile, dynamic=dynamic)

    def _compile(self, gm: torch.fx.GraphModule, example_inputs: list[Any]) -> Callable[..., Any]:
        run = compile_fx(gm, example_inputs, settings=Settings(fallback=False))

        def call(*inputs: Any) -> Any:
            self.inputs = inputs
            return run(*inputs)

        return call
