"""What object code relies on in a process beyond the processor: whose private layouts and functions it was made for."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from functools import cache
from types import MappingProxyType

import torch

import torchkiln


@cache
def binary_interface() -> Mapping[str, str]:
    """That of this process, by name. Object code serves processes with an equal one."""
    python = f"{sys.implementation.cache_tag}{sys.abiflags}-{sys.implementation._multiarch}"
    return MappingProxyType(
        {
            "torchkiln": torchkiln.__version__,
            "torch": f"{torch.__version__} {torch.version.git_version}",
            "python": python,
        }
    )
