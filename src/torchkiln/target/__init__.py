"""The machine that code is compiled for, as one value: this one, as it is now, or a level that many machines have."""

from torchkiln.target.capture import capture_target
from torchkiln.target.card import Card, emulated_card
from torchkiln.target.gpu import gpu_target, place_of, target_on
from torchkiln.target.levels import TARGETS, runs_here, target_for
from torchkiln.target.target import Target
from torchkiln.target.text import read_target, write_target

__all__ = [
    "TARGETS",
    "Card",
    "Target",
    "capture_target",
    "emulated_card",
    "gpu_target",
    "place_of",
    "read_target",
    "runs_here",
    "target_for",
    "target_on",
    "write_target",
]
