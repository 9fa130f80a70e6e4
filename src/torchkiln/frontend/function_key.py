"""The cache key of a captured graph: all that AOTAutograd and the stages after it make of it."""

from __future__ import annotations

import platform
from collections.abc import Sequence
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch
import torch.fx
from torch._guards import detect_fake_mode
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from torchkiln.actions import has_limits
from torchkiln.cache import Cache, open_cache
from torchkiln.cache.key import CacheKey
from torchkiln.config import Settings
from torchkiln.frontend.tracing_state import tracing_state
from torchkiln.graph.fingerprints import package_digest
from torchkiln.graph.graph_text import GraphText, NoTextError, size_lines
from torchkiln.graph.manager import registered_fingerprints
from torchkiln.logs import code_log, is_shown
from torchkiln.recorder import is_listened_to
from torchkiln.target import Target

_CODE_LOGS = (code_log("torchkiln.codegen.llvm", "kernel_code"), code_log("torchkiln.codegen.llvm", "output_code"))


def cache_of(settings: Settings) -> Cache | None:
    """The cache for compilations with ``settings``; None where there is none, or somebody watches the stages run."""
    if has_limits(settings) or is_listened_to() or settings.record_passes or settings.checks or settings.check_numerics:
        return None
    return None if any(map(is_shown, _CODE_LOGS)) else open_cache(settings)


def function_key(
    graph_module: torch.fx.GraphModule, inputs: Sequence[Any], settings: Settings, target: Target
) -> tuple[CacheKey, GraphText]:
    """The key of a captured graph compiled where this is called, and the text of it, which numbers its symbols.

    Raises :class:`NoTextError` for a graph of which no key says enough.
    """
    text = GraphText()
    placeholders = graph_module.graph.find_nodes(op="placeholder")
    if len(placeholders) != len(inputs):
        raise NoTextError("a graph with other inputs than it is given")
    given = [_input(text, node, value) for node, value in zip(placeholders, inputs, strict=True)]
    content = {
        "graph": "\n".join(text.graph(graph_module)),
        "inputs": "\n".join([*given, *shared_memory(inputs)]),
        "sizes": "\n".join(size_lines(text, shape_env_of(inputs, placeholders))),
        "state": "\n".join(tracing_state()),
    }
    return CacheKey("function", {**content, **environment_fields(settings, target)}), text


def environment_fields(settings: Settings, target: Target) -> dict[str, str]:
    """What every compiled graph depends on beside itself."""
    return {
        **{f"setting {name}": value for name, value in settings.code_settings()},
        **{f"target {name}": value for name, value in target.field_texts()},
        "passes of users": "\n".join(registered_fingerprints()),
        **_versions(),
    }


def has_passes_of(key: CacheKey) -> bool:
    """Whether passes of users are those that ``key`` names: one may be registered before the last graph is compiled."""
    return key.fields["passes of users"] == "\n".join(registered_fingerprints())


def shape_env_of(inputs: Sequence[Any], placeholders: Sequence[torch.fx.Node]) -> ShapeEnv | None:
    mode = detect_fake_mode([*inputs, *(node.meta.get("example_value") for node in placeholders)])
    return None if mode is None else mode.shape_env


def _input(text: GraphText, node: torch.fx.Node, value: Any) -> str:
    """An input as AOTAutograd traces it: the fake tensor that Dynamo made, or what is given."""
    fake = node.meta.get("example_value", value)
    if not isinstance(value, torch.Tensor):
        return text.value(fake)
    if not isinstance(fake, torch.Tensor):
        raise NoTextError("an input that was captured as something else")
    if fake.requires_grad != value.requires_grad:
        raise NoTextError("an input that was captured without its gradient")
    static = node.meta.get("tensor_dict", {}).get("_dynamo_static_input_type")
    return f"{text.tensor(fake)} static" if static else text.tensor(fake)


def shared_memory(inputs: Sequence[Any]) -> list[str]:
    """Which inputs are one tensor or share a storage."""
    first: dict[int, int] = {}
    storages: dict[int, int] = {}
    lines = []
    for position, value in enumerate(inputs):
        if not isinstance(value, torch.Tensor) or value.layout is not torch.strided:
            continue
        if (same := first.setdefault(id(value), position)) != position:
            lines.append(f"input {position} is input {same}")
        storage = value.untyped_storage()._cdata
        if (other := storages.setdefault(storage, position)) != position:
            lines.append(f"input {position} is in the memory of input {other}")
    return lines


@cache
def _versions() -> dict[str, str]:
    return {
        "version torchkiln": f"{_version('torchkiln')} {package_digest()}",
        "version torch": f"{torch.__version__} {torch.version.git_version}",
        "version llvmlite": _version("llvmlite"),
        "version python": f"{platform.python_implementation()} {platform.python_version()}",
    }


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "unknown"
