"""Times that graphs compiled with the setting ``profile`` keep of their steps."""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Sequence
from dataclasses import dataclass

from torchkiln.artifact.artifact import TIMES_SYMBOL, TimedStep
from torchkiln.native.loader import LoadedObject


@dataclass(frozen=True)
class StepTime:
    """How often a step ran since the graph was loaded, and for how long in all."""

    step: TimedStep
    calls: int
    nanoseconds: int


class StepTimes:
    """The times of one loaded graph; keeps its code in memory."""

    def __init__(self, loaded: LoadedObject, steps: Sequence[TimedStep]) -> None:
        self._loaded = loaded
        self._steps = tuple(steps)
        self._numbers = (ctypes.c_int64 * (2 * len(steps))).from_address(loaded[TIMES_SYMBOL])
        _all.append(weakref.ref(self))

    def read(self) -> list[StepTime]:
        """What came together so far, in the order of the steps; the first ones are what comes around steps."""
        numbers = list(self._numbers)
        return [StepTime(step, numbers[2 * k], numbers[2 * k + 1]) for k, step in enumerate(self._steps)]


_all: list[weakref.ref[StepTimes]] = []


def profiled() -> list[StepTimes]:
    """Every graph of this process that keeps times and is still there, in the order they were loaded."""
    return [times for found in _all if (times := found()) is not None]
