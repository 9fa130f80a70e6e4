"""The two forms in which torch takes a compiled function from a backend to save it. Imported where it asks for one."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

from torch._dynamo.aot_compile_types import SerializableCallable
from torch._dynamo.bytecode_transformation import unique_id
from torch._dynamo.precompile_context import BackendCacheArtifact, PrecompileContext

from torchkiln.frontend.precompiled import load_precompiled

Function = Callable[..., Any]


class SavableFunction(SerializableCallable):
    """``call``, for ``aot_compile``; ``content`` is asked for when the function is saved."""

    def __init__(self, call: Function, content: Callable[[], bytes]) -> None:
        self._call, self._content = call, content

    @classmethod
    def serialize_compile_artifacts(cls, fn: SavableFunction) -> bytes:
        return fn._content()

    @classmethod
    def deserialize_compile_artifacts(cls, data: bytes) -> SavableFunction:
        return cls(load_precompiled(data, any_settings=True), lambda: data)

    def __call__(self, *inputs: Any) -> Any:
        return self._call(*inputs)


class PrecompiledArtifact(BackendCacheArtifact[Function]):
    """A function in the folder of ``TORCH_CACHING_PRECOMPILE``, loaded as soon as torch has read the bytes.

    torch takes an error there for a miss, and traces. One in :meth:`after_deserialization` would be the user's.
    """

    _function: Function | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {"key": self.key, "content": self.content}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.key, self.content = state["key"], state["content"]
        _take_numbers_up_to(self.key)
        self._function = load_precompiled(self.content, any_settings=False)

    def __deepcopy__(self, _: Any) -> PrecompiledArtifact:
        return PrecompiledArtifact(self.key, self.content)

    def after_deserialization(self) -> Function:
        if self._function is None:
            self._function = load_precompiled(self.content, any_settings=False)
        return self._function


def _take_numbers_up_to(backend_id: str) -> None:
    """Keep Dynamo from giving new globals the names of those that it installs with a loaded function.

    It numbers both from 0 in each process, and refuses to trace in a module that has the name already (torch 2.13). The
    id of a captured graph, ``__compiled_fn_12_...``, has a higher number than the globals that its guards read.
    """
    number = re.match(r"__compiled_fn_(\d{1,6})_", backend_id)
    if number is None:
        return
    while int(unique_id("taken").rpartition("_")[2]) < int(number[1]):
        pass


def record(backend_id: str, content: bytes) -> None:
    """Hand torch what it is to save for a captured graph; ``torch.compiler.save_cache_artifacts`` writes it."""
    PrecompileContext.record_artifact(PrecompiledArtifact(backend_id, content))
