"""Scheduling: from a program of single loops to a plan of fused kernels, extern calls and memory."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace

from torchkiln.actions import Actions
from torchkiln.config import Settings
from torchkiln.ir.higher_order import HigherOrder, OncePerBody
from torchkiln.ir.program import ExternCall, Origin, Program
from torchkiln.schedule.build import BuiltKernel, KernelBuilder
from torchkiln.schedule.dependencies import extent_product, reads, visible_buffers
from torchkiln.schedule.fusion import Unit, fuse
from torchkiln.schedule.group import FusedGroup
from torchkiln.schedule.inline import inline_pointwise
from torchkiln.schedule.limits import LIMITS
from torchkiln.schedule.memory import plan_memory
from torchkiln.schedule.plan import Launch, Plan, Step
from torchkiln.schedule.rounding import round_compared_values, round_shared_values
from torchkiln.schedule.same_kernels import SameKernels
from torchkiln.schedule.side_by_side import put_side_by_side
from torchkiln.schedule.split import split_reductions
from torchkiln.schedule.widening import widen_repeated_values
from torchkiln.target import Target, target_on

_log = logging.getLogger(__name__)


def schedule(program: Program, settings: Settings, target: Target, actions: Actions | None = None) -> Plan:
    """Round, inline, widen, split, fuse, build the kernels, and place buffers in memory; ``actions`` counts fusions."""
    limits = LIMITS[program.device]
    plan_of = OncePerBody(lambda body: schedule(body, settings, target, actions))
    program = round_compared_values(round_shared_values(program))
    if settings.fuse:
        program = inline_pointwise(program, limits, most_nodes=settings.inline_limit, actions=actions)
    program = split_reductions(widen_repeated_values(program, limits), limits)
    units = fuse(program, limits, enabled=settings.fuse, actions=actions)
    if settings.fuse and limits.side_by_side_points:
        units = put_side_by_side(units, program.buffers, limits, actions)
    if actions is not None:
        actions.watch("groups", lambda: tuple(units))
    kernels = {
        device: SameKernels(
            program.buffers, KernelBuilder(LIMITS[device], target_on(target, device), settings.parallel_threshold)
        )
        for device in dict.fromkeys(("cpu", program.device))
    }
    visible, readers = visible_buffers(program), _readers(units)
    steps: list[Step] = []
    for position, unit in enumerate(units):
        if isinstance(unit, FusedGroup):
            targets = {member.target for member in unit.members}
            stored = {t for t in targets if t in visible or readers.get(t, set()) - {position}}
            if extent_product(unit.rows) != 0:  # else there is no point to compute
                device = program.buffers[unit.members[0].target].device
                steps.append(_launch(unit, kernels[device].build(unit, stored)))
        elif isinstance(unit, ExternCall) and isinstance(unit.target, HigherOrder):
            steps.append(replace(unit, target=unit.target.with_bodies(plan_of)))
        else:
            steps.append(unit)
    return plan_memory(program, steps)


def _readers(units: Sequence[Unit]) -> dict[str, set[int]]:
    """The positions of the units that read each buffer."""
    found: dict[str, set[int]] = {}
    for position, unit in enumerate(units):
        for operation in unit.members if isinstance(unit, FusedGroup) else (unit,):
            for name in reads(operation):
                found.setdefault(name, set()).add(position)
    return found


def _launch(group: FusedGroup, built: BuiltKernel) -> Launch:
    nodes = tuple(dict.fromkeys(n for m in group.members for n in m.origin.nodes))
    source = next((m.origin.source for m in group.members if m.origin.source), None)
    if _log.isEnabledFor(logging.DEBUG):
        _log.debug("one kernel computes %s (%s)", ", ".join(nodes), source)
    return Launch(built.kernel, built.buffers, built.sizes, Origin(nodes, source))


__all__ = ["schedule"]
