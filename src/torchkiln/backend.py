"""The backend object behind ``torch.compile(backend="kiln")``: options and modes in, :func:`compile_fx` called."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch.fx

# What each mode of torch.compile stands for. On the CPU the default is already what the others ask for: there is no
# launch overhead to take out, and no kernel choice that takes long enough to make optional.
MODES: Mapping[str, Mapping[str, object]] = MappingProxyType(
    {
        "default": MappingProxyType({}),
        "reduce-overhead": MappingProxyType({"cuda_graphs": True}),
        "max-autotune": MappingProxyType({}),
        "max-autotune-no-cudagraphs": MappingProxyType({}),
    }
)


def kiln(
    gm: torch.fx.GraphModule,
    example_inputs: Sequence[Any],
    *,
    options: Mapping[str, object] | None = None,
    mode: str | None = None,
) -> Callable[..., Any]:
    """Compile a graph that Dynamo captured. ``options`` are settings by name (see ``torchkiln.Settings``)."""
    # torch loads this module to list its backends. The compiler is imported when something is compiled: what the cache
    # has is loaded without it.
    from torchkiln import config
    from torchkiln.errors import OptionError
    from torchkiln.garbage import no_collections
    from torchkiln.recorder import timed_stage

    with timed_stage("import"), no_collections():
        from torchkiln.frontend.dynamo_exceptions import OptionErrorInDynamo
        from torchkiln.frontend.function_entry import function_entry
        from torchkiln.frontend.inference_only import reject_training
        from torchkiln.frontend.precompile import precompilation
        from torchkiln.frontend.process_start import start

    def compile_tangents(*arguments: Any) -> Callable[..., Any]:
        from torchkiln.compiler import compile_tangents

        return compile_tangents(gm, *arguments, settings=settings)

    def compile_unfolded(unfolding: Any) -> Callable[..., Any] | None:
        from torchkiln.compiler import compile_unfolded

        return compile_unfolded(gm, unfolding, settings=settings)

    try:
        if mode is not None and mode not in MODES:
            raise OptionError.unknown("mode", mode, MODES)
        settings = config.resolve({**MODES[mode or "default"], **(options or {})})
        reject_training(gm, example_inputs, settings)
        with timed_stage("cache key"), no_collections():
            target = start(settings)
            entry = function_entry(gm, example_inputs, settings, target)
            precompiling = precompilation(gm, settings, target)
        run = None
        if entry is not None:
            run = entry.load(compile_tangents, compile_unfolded, precompiling)
        if run is None:
            with timed_stage("import"), no_collections():
                from torchkiln.compiler import compile_captured
            run = compile_captured(gm, example_inputs, settings, entry, precompiling)
        return run if precompiling is None else precompiling.finished(run)
    except OptionError as error:
        raise OptionErrorInDynamo(str(error)) from None
