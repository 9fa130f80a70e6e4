"""The dtypes that kernels compute on, by kind."""

from __future__ import annotations

import torch

HALF = (torch.bfloat16, torch.float16)
FLOATS = (*HALF, torch.float32, torch.float64)
INTEGERS = (torch.int8, torch.int16, torch.int32, torch.int64, torch.uint8)
INTEGERS_AND_BOOL = (*INTEGERS, torch.bool)
