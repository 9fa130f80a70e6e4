"""Times that graphs compiled with the setting ``profile`` keep of their steps."""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Sequence
from dataclasses import dataclass

from torchkiln.artifact.artifact import TIMES_PER_STEP, TIMES_SYMBOL, TimedStep
from torchkiln.native.loader import LoadedObject


@dataclass(frozen=True)
class StepTime:
    """How often a step ran since the graph was loaded, for how long in all, and the least that it took."""

    step: TimedStep
    calls: int
    nanoseconds: int
    least_nanoseconds: int


class StepTimes:
    """The times of one loaded graph; keeps its code in memory."""

    def __init__(self, loaded: LoadedObject, steps: Sequence[TimedStep]) -> None:
        self._loaded = loaded
        self._steps = tuple(steps)
        self._numbers = (ctypes.c_int64 * (TIMES_PER_STEP * len(steps))).from_address(loaded[TIMES_SYMBOL])
        _all.append(weakref.ref(self))

    def read(self) -> list[StepTime]:
        """What came together so far, in the order of the steps; the first ones are what comes around steps."""
        numbers = list(self._numbers)
        every = [numbers[k::TIMES_PER_STEP] for k in range(TIMES_PER_STEP)]
        return [
            StepTime(step, calls, taken, ~least) for step, calls, taken, least in zip(self._steps, *every, strict=True)
        ]


_all: list[weakref.ref[StepTimes]] = []


def profiled() -> list[StepTimes]:
    """Every graph of this process that keeps times and is still there, in the order they were loaded."""
    return [times for found in _all if (times := found()) is not None]
