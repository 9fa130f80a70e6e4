"""Graph passes, one folder per stage of the flow; each folder's tuple is what runs, in order."""

from __future__ import annotations

from torchkiln.graph.manager import PassPipeline


def all_pipelines() -> tuple[PassPipeline, ...]:
    """The pipeline of every stage, in the order of the flow."""
    from torchkiln.passes.joint import JOINT
    from torchkiln.passes.post_grad import POST_GRAD
    from torchkiln.passes.pre_grad import PRE_GRAD

    return (PRE_GRAD, JOINT, POST_GRAD)
