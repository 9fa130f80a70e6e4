"""Graph passes, one folder per stage of the flow; each folder's tuple is what runs, in order."""

from __future__ import annotations

from torchkiln.config import Settings
from torchkiln.errors import OptionError
from torchkiln.graph.manager import PassPipeline
from torchkiln.passes.joint import JOINT
from torchkiln.passes.post_grad import POST_GRAD
from torchkiln.passes.pre_grad import PRE_GRAD


def all_pipelines() -> tuple[PassPipeline, ...]:
    """The pipeline of every stage, in the order of the flow."""
    return (PRE_GRAD, JOINT, POST_GRAD)


def reject_unknown_passes(settings: Settings) -> None:
    """Raise :class:`OptionError` where ``passes_skip`` names a pass that there is not."""
    asked = [choice for choice in settings.passes_skip if isinstance(choice, str)]
    if not asked:
        return
    passes = [(pipeline.stage, item.name) for pipeline in all_pipelines() for item in pipeline.resolved()]
    names = {name for _, name in passes} | {f"{stage}/{name}" for stage, name in passes}
    for choice in asked:
        if choice not in names:
            raise OptionError.unknown("pass in passes_skip", choice, names)
