"""For which dtypes torch's oneDNN lays weights out for this processor."""

from __future__ import annotations

from functools import cache

import torch


@cache
def packed_dtypes() -> frozenset[str]:
    """Names of dtypes; none in a build without the operators. float16 needs AVX-512 FP16 or AVX-NE-CONVERT."""
    space = torch.ops.mkldnn
    if not torch.backends.mkldnn.is_available() or getattr(space, "_reorder_convolution_weight", None) is None:
        return frozenset()
    supported = {"float32": True}
    for dtype, question in (("bfloat16", "_is_mkldnn_bf16_supported"), ("float16", "_is_mkldnn_fp16_supported")):
        answer = getattr(space, question, None)
        supported[dtype] = answer is not None and bool(answer())
    return frozenset(dtype for dtype, is_supported in supported.items() if is_supported)
