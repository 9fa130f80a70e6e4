"""Scheduling: from a program of single loops to a plan of fused kernels, extern calls and memory."""

from __future__ import annotations

import logging
from dataclasses import replace

from torchkiln.config import Settings
from torchkiln.ir import expr as ex
from torchkiln.ir.higher_order import HigherOrder, OncePerBody
from torchkiln.ir.program import ExternCall, Origin, Program
from torchkiln.schedule.build import KernelBuilder
from torchkiln.schedule.dependencies import extent_product, output_buffers, reads
from torchkiln.schedule.fusion import FusedGroup, Unit, fuse
from torchkiln.schedule.inline import inline_pointwise
from torchkiln.schedule.limits import LIMITS
from torchkiln.schedule.memory import plan_memory
from torchkiln.schedule.plan import Launch, Plan, Step
from torchkiln.schedule.rounding import round_compared_values, round_shared_values
from torchkiln.schedule.same_kernels import SameKernels
from torchkiln.schedule.split import split_reductions
from torchkiln.schedule.widening import widen_repeated_values
from torchkiln.target import Target

_log = logging.getLogger(__name__)


def schedule(program: Program, settings: Settings, target: Target) -> Plan:
    """Round, inline, widen, split, fuse, order, and place in memory."""
    limits = LIMITS[target.device]
    plan_of = OncePerBody(lambda body: schedule(body, settings, target))
    program = round_compared_values(round_shared_values(program))
    if settings.fuse:
        program = inline_pointwise(program, limits, most_nodes=settings.inline_limit)
    program = split_reductions(widen_repeated_values(program, limits), limits)
    units = fuse(program, limits, enabled=settings.fuse)
    stored = _stored_outside(program, units)
    kernels = SameKernels(program.buffers, KernelBuilder(limits, target.vector_bits, settings.parallel_threshold))
    steps: list[Step] = []
    for unit, needed in zip(units, stored, strict=True):
        if isinstance(unit, ExternCall):
            bodies = unit.target
            steps.append(replace(unit, target=bodies.with_bodies(plan_of)) if isinstance(bodies, HigherOrder) else unit)
            continue
        if not isinstance(unit, FusedGroup):
            steps.append(unit)
            continue
        if extent_product(unit.rows) == 0:
            continue  # no point to compute
        built = kernels.build(unit, needed)
        nodes = tuple(dict.fromkeys(n for m in unit.members for n in m.origin.nodes))
        sources = next((m.origin.source for m in unit.members if m.origin.source), None)
        steps.append(Launch(built.kernel, built.buffers, built.sizes, Origin(nodes, sources)))
        if _log.isEnabledFor(logging.DEBUG):
            _log.debug("one kernel computes %s (%s)", ", ".join(nodes), sources)
    return plan_memory(program, steps)


def _stored_outside(program: Program, units: list[Unit]) -> list[set[str]]:
    """For each unit, the targets that must reach memory: read by another unit, returned, or an input's own."""
    visible = output_buffers(program)
    visible.update(i.buffer for i in program.inputs if i.buffer is not None)
    readers: dict[str, set[int]] = {}
    for position, unit in enumerate(units):
        names = (
            reads(unit)
            if not isinstance(unit, FusedGroup)
            else [load.buffer for m in unit.members for load in ex.loads(m.value)]
        )
        for name in names:
            readers.setdefault(name, set()).add(position)
    result: list[set[str]] = []
    for position, unit in enumerate(units):
        if not isinstance(unit, FusedGroup):
            result.append(set())
            continue
        targets = {m.target for m in unit.members}
        result.append({t for t in targets if t in visible or readers.get(t, set()) - {position}})
    return result


__all__ = ["schedule"]
