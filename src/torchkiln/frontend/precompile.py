"""Functions that torch saves together with what Dynamo found out, so that a later process does not trace at all.

torch does so in two ways (docs/cache.md): ``aot_compile`` writes one function to a file, ``TORCH_CACHING_PRECOMPILE=1``
fills a folder. Dynamo then gives each captured graph an id, by which it asks for the compiled function. torch pickles
its own part of these files. Ours is the bytes of a :class:`PrecompiledFunction`, which is plain data.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

import torch._functorch.config as functorch_config
import torch.fx

from torchkiln.artifact import CompiledFunction, PrecompiledFunction, encode
from torchkiln.config import Settings
from torchkiln.errors import ArtifactError
from torchkiln.frontend.captured_call import CapturedCall
from torchkiln.frontend.precompiled import surroundings
from torchkiln.graph.fingerprints import package_digest
from torchkiln.native.binary_interface import binary_interface
from torchkiln.target import Target

Function = Callable[..., Any]

_log = logging.getLogger(__name__)


def precompilation(graph_module: torch.fx.GraphModule, settings: Settings, target: Target) -> Precompilation | None:
    """What torch is to save of a captured graph; None where it does not ask, or cannot."""
    backend_id = getattr(graph_module, "_backend_id", None)
    if backend_id is None or find_spec("torch._dynamo.aot_compile_types") is None:
        return None
    return Precompilation(backend_id, settings, target)


class Precompilation:
    """Takes a function when it is compiled, for torch to save it by the id of its captured graph."""

    def __init__(self, backend_id: str, settings: Settings, target: Target) -> None:
        self._id, self._settings, self._target = backend_id, settings, target
        self._surroundings = surroundings()
        self._content: bytes | None = None
        self._obstacle = "it runs eagerly, or its backward is not compiled yet"

    def compiled(self, function: CompiledFunction, _: CapturedCall) -> None:
        """Called when all graphs of the function are compiled or loaded."""
        self.compiled_unfolded(function)

    def compiled_unfolded(self, function: CompiledFunction) -> None:
        """Called when the weights of layers were refused: what is saved must run with weights such as these.

        It has no captured graph to run instead.
        """
        from torchkiln.frontend.savable import record

        if function.convention.consumed is not None:
            self.cannot_be_saved("it takes lists of tensors")
            return
        if any(graph.entry.is_for_this_process for graph in function.graphs().values()):
            self.cannot_be_saved("it calls a Triton kernel, which this process alone knows")
            return
        try:
            self._content = encode(self._described(function))
        except ArtifactError as error:
            self.cannot_be_saved(str(error))
            return
        record(self._id, self._content)

    def cannot_be_saved(self, obstacle: str) -> None:
        """Note why; torch traces such a function in every process."""
        self._obstacle = obstacle
        _log.warning("a compiled function is not saved with what Dynamo traced: %s", obstacle)

    def finished(self, call: Function) -> Function:
        """``call`` as torch is to get it: for ``aot_compile``, as something that it can save."""
        if not functorch_config.force_non_lazy_backward_lowering:
            return call
        from torchkiln.frontend.savable import SavableFunction

        return SavableFunction(call, self.content)

    def content(self) -> bytes:
        """What is saved; :class:`ArtifactError` where the function cannot be."""
        if self._content is None:
            raise ArtifactError(
                f"This compiled function cannot be saved: {self._obstacle}."
                " Call it in this process, or compile it where it runs."
            )
        return self._content

    def _described(self, function: CompiledFunction) -> PrecompiledFunction:
        return PrecompiledFunction(
            function,
            interface=tuple(binary_interface().items()),
            triple=self._target.triple,
            cpu=self._target.cpu,
            features=self._target.features,
            source=package_digest(),
            settings=self._surroundings,
            keep_memory=self._settings.keep_memory,
        )
