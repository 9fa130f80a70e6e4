"""Precompiled functions in the process that calls them: loaded from bytes, without a captured graph."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torchkiln import config
from torchkiln.artifact import PrecompiledFunction, decode_as
from torchkiln.errors import ArtifactError, UnsupportedError
from torchkiln.frontend.captured_call import CapturedCall
from torchkiln.frontend.dual_numbers import CarriesTangents
from torchkiln.frontend.process_start import start
from torchkiln.garbage import no_collections
from torchkiln.graph.fake import outside_tracing
from torchkiln.graph.fingerprints import package_digest
from torchkiln.graph.manager import registered_fingerprints
from torchkiln.recorder import Recorder, timed_stage
from torchkiln.runtime.accounting import account_for
from torchkiln.runtime.direct_calls import direct_call
from torchkiln.runtime.executable import load

Function = Callable[..., Any]


def surroundings() -> tuple[tuple[str, str], ...]:
    """Settings and passes of users that hold where options of ``torch.compile`` are not known."""
    return (*config.resolve().code_settings(), ("passes of users", "\n".join(registered_fingerprints())))


def load_precompiled(content: bytes, *, any_settings: bool) -> Function:
    """The function that was saved, as Dynamo calls it; :class:`ArtifactError` where it does not run here.

    Where not ``any_settings`` will do, it must have been compiled under those of this process.
    """
    with timed_stage("load precompiled"), no_collections(), outside_tracing():
        start(config.resolve())  # support functions
        stored = decode_as(content, PrecompiledFunction)
        stored.reject_other_process(package_digest())
        if not any_settings:
            stored.reject_other_settings(surroundings())
        return CarriesTangents(_loaded_call(stored), _refuse_tangents)


def _loaded_call(stored: PrecompiledFunction) -> CapturedCall:
    function, recorder = stored.function, Recorder()
    if function.convention.wrapped:
        raise ArtifactError("This compiled function needs AOTAutograd's wrapper; compile it again.")
    function.reject_incomplete()
    artifacts = function.graphs()
    graphs = {name: load(artifact, compilation=recorder.id) for name, artifact in artifacts.items()}
    for summary in (artifact.summary for artifact in artifacts.values()):
        if summary is not None:
            account_for(summary, recorder, keep_memory=stored.keep_memory)
    return CapturedCall(
        None,
        function.convention.structure,
        recorder,
        direct=direct_call(function.convention, **graphs),
        trains=function.backward is not None,
    )


def _refuse_tangents(*_: Any) -> Function:
    raise UnsupportedError(
        "A precompiled function does not take dual numbers, for which its graph would be traced again; call"
        " torch.compile in this process for forward-mode differentiation."
    )
