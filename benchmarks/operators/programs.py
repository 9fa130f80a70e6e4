"""Programs of one or a few operators on large inputs, which the database has in small or not at all."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.operators.entry import Call, Entry
from benchmarks.operators.layouts import Layout

_AS_IT_IS = (Layout.contiguous,)
_OF_MATRICES = (Layout.contiguous, Layout.transposed, Layout.every_second, Layout.broadcast, Layout.rows)
_OF_IMAGES = (Layout.contiguous, Layout.channels_last, Layout.permuted, Layout.every_second)

MATRIX = (768, 1024)
IMAGES = (8, 64, 56, 56)


def _entry(
    name: str,
    function: Callable[..., Any],
    *sizes: tuple[int, ...],
    layouts: tuple[Layout, ...] = _AS_IT_IS,
    others: Callable[[], tuple[Any, ...]] = tuple,
    positive: bool = False,
) -> Entry:
    """``sizes`` are those of floating-point arguments; ``others`` makes what comes after them."""

    def make(dtype: torch.dtype) -> Call:
        draw = (lambda size: torch.rand(size) + 0.5) if positive else torch.randn
        made = [draw(size).to(dtype).requires_grad_() for size in sizes]
        return Call(function, (*made, *others()))

    return Entry(name, make, layouts)


def cat_of_transposed(x: Tensor, y: Tensor) -> Tensor:
    return torch.cat([x.t(), y.t()])


def cat_of_transposed_columns(x: Tensor, y: Tensor) -> Tensor:
    return torch.cat([x.t(), y.t()], -1)


def stack_of_transposed(x: Tensor, y: Tensor) -> Tensor:
    return torch.stack([x.t(), y.t()])


def stack_of_transposed_last(x: Tensor, y: Tensor) -> Tensor:
    return torch.stack([x.t(), y.t()], -1)


def roll_of_transposed(x: Tensor) -> Tensor:
    return torch.roll(x.t(), 3, -1)


def repeat_interleave_of_transposed(x: Tensor) -> Tensor:
    return x.t().repeat_interleave(2, -1)


def softmax_of_transposed(x: Tensor) -> Tensor:
    return torch.softmax(x.t(), -1)


def product_of_halves(x: Tensor) -> Tensor:
    left, right = x.chunk(2, -1)
    return left * right


def product_of_half_rows(x: Tensor) -> Tensor:
    top, bottom = x.chunk(2, 0)
    return top * bottom


def _resize(mode: str) -> Callable[[Tensor], Tensor]:
    return lambda x: F.interpolate(x, scale_factor=2.0, mode=mode)


def _indices(count: int, of: int) -> Callable[[], tuple[Any, ...]]:
    return lambda: (torch.randint(of, (count,)),)


_MATRICES = (
    _entry("cat of transposed", cat_of_transposed, MATRIX, MATRIX),
    _entry("cat of transposed (last dimension)", cat_of_transposed_columns, MATRIX, MATRIX),
    _entry("stack of transposed", stack_of_transposed, MATRIX, MATRIX),
    _entry("stack of transposed (last dimension)", stack_of_transposed_last, MATRIX, MATRIX),
    _entry("roll of transposed", roll_of_transposed, MATRIX),
    _entry("repeat_interleave of transposed", repeat_interleave_of_transposed, MATRIX),
    _entry("softmax of transposed", softmax_of_transposed, (1024, 1024)),
    _entry("product of halves", product_of_halves, MATRIX, layouts=_OF_MATRICES),
    _entry("product of halves (rows)", product_of_half_rows, MATRIX, layouts=_OF_MATRICES),
    _entry("flip of columns", lambda x: x.flip(-1), MATRIX, layouts=_OF_MATRICES),
    _entry("flip of rows", lambda x: x.flip(0), MATRIX, layouts=_OF_MATRICES),
    _entry("row sum", lambda x: x.sum(-1), MATRIX, layouts=_OF_MATRICES),
    _entry("column sum", lambda x: x.sum(0), MATRIX, layouts=_OF_MATRICES),
    _entry("row softmax", lambda x: torch.softmax(x, -1), MATRIX, layouts=_OF_MATRICES),
    _entry(
        "layer norm",
        lambda x, weight, bias: F.layer_norm(x, x.shape[-1:], weight, bias),
        MATRIX,
        MATRIX[1:],
        MATRIX[1:],
        layouts=_OF_MATRICES,
    ),
    _entry("relu", torch.relu, MATRIX, layouts=_OF_MATRICES),
    _entry("gelu", F.gelu, MATRIX, layouts=_OF_MATRICES),
    _entry("gelu (tanh)", lambda x: F.gelu(x, approximate="tanh"), MATRIX),
    _entry("row cumsum", lambda x: x.cumsum(-1), MATRIX, layouts=_OF_MATRICES),
    _entry("column cumsum", lambda x: x.cumsum(0), MATRIX),
    _entry("row cumprod", lambda x: x.cumprod(-1), MATRIX, layouts=_OF_MATRICES, positive=True),
    _entry("column cumprod", lambda x: x.cumprod(0), MATRIX, positive=True),
    _entry("row prod", lambda x: x.prod(-1), MATRIX, layouts=_OF_MATRICES, positive=True),
    _entry("column prod", lambda x: x.prod(0), MATRIX, positive=True),
    _entry(
        "index_select (last dimension)",
        lambda x, index: x.index_select(-1, index),
        MATRIX,
        layouts=_OF_MATRICES,
        others=_indices(1024, 1024),
    ),
    _entry(
        "index_select of rows",
        lambda x, index: x.index_select(0, index),
        MATRIX,
        layouts=_OF_MATRICES,
        others=_indices(768, 768),
    ),
    _entry("column softmax", lambda x: torch.softmax(x, 0), MATRIX, layouts=_OF_MATRICES),
    _entry("linear", F.linear, (256, 768), (768, 768), (768,), layouts=_OF_MATRICES),
    _entry("addmm of matrices", torch.addmm, (768,), (256, 768), (768, 768)),
    _entry("outer product", torch.outer, (768,), (1024,)),
    _entry("cross entropy", F.cross_entropy, MATRIX, layouts=_OF_MATRICES, others=_indices(768, 1024)),
    _entry(
        "embedding",
        lambda weight, index: F.embedding(index, weight),
        (8192, 256),
        layouts=_OF_MATRICES,
        others=_indices(2048, 8192),
    ),
    _entry(
        "attention",
        F.scaled_dot_product_attention,
        (2, 8, 128, 64),
        (2, 8, 128, 64),
        (2, 8, 128, 64),
        layouts=(*_AS_IT_IS, Layout.permuted),
    ),
    _entry("small matmuls 16×64×16", torch.bmm, (512, 16, 64), (512, 64, 16)),
    _entry("small matmuls 8×8×8", torch.bmm, (4096, 8, 8), (4096, 8, 8)),
    _entry("small matmuls 32×32×32", torch.bmm, (256, 32, 32), (256, 32, 32), layouts=(*_AS_IT_IS, Layout.transposed)),
)

_PICTURES = (
    _entry("reflect pad", lambda x: F.pad(x, (3, 3, 3, 3), mode="reflect"), IMAGES, layouts=_OF_IMAGES),
    _entry("replicate pad", lambda x: F.pad(x, (3, 3, 3, 3), mode="replicate"), IMAGES, layouts=_OF_IMAGES),
    _entry("circular pad", lambda x: F.pad(x, (3, 3, 3, 3), mode="circular"), IMAGES, layouts=_OF_IMAGES),
    _entry("constant pad", lambda x: F.pad(x, (3, 3, 3, 3)), IMAGES, layouts=_OF_IMAGES),
    _entry("resize (bilinear)", _resize("bilinear"), (8, 64, 28, 28), layouts=_OF_IMAGES),
    _entry("resize (nearest)", _resize("nearest"), (8, 64, 28, 28), layouts=_OF_IMAGES),
    _entry("resize (bicubic)", _resize("bicubic"), (8, 16, 28, 28), layouts=_OF_IMAGES),
    _entry("unfold of images", lambda x: F.unfold(x, 3, padding=1), (4, 32, 56, 56), layouts=_OF_IMAGES),
    _entry(
        "fold into images",
        lambda x: F.fold(x, (56, 56), 3, padding=1),
        (4, 288, 3136),
        layouts=(*_AS_IT_IS, Layout.rows),
    ),
    _entry("group norm", lambda x, w, b: F.group_norm(x, 8, w, b), IMAGES, (64,), (64,), layouts=_OF_IMAGES),
    _entry("instance norm", F.instance_norm, IMAGES, layouts=_OF_IMAGES),
    _entry(
        "batch norm",
        lambda x, w, b: F.batch_norm(x, None, None, w, b, training=True),
        IMAGES,
        (64,),
        (64,),
        layouts=_OF_IMAGES,
    ),
    _entry(
        "depthwise convolution",
        lambda x, w: F.conv2d(x, w, padding=1, groups=64),
        IMAGES,
        (64, 1, 3, 3),
        layouts=_OF_IMAGES,
    ),
    _entry("1×1 convolution", F.conv2d, IMAGES, (64, 64, 1, 1), layouts=_OF_IMAGES),
    _entry("3×3 convolution", lambda x, w: F.conv2d(x, w, padding=1), IMAGES, (64, 64, 3, 3), layouts=_OF_IMAGES),
    _entry("max pool", lambda x: F.max_pool2d(x, 3, 2, 1), IMAGES, layouts=_OF_IMAGES),
    _entry("average pool", lambda x: F.avg_pool2d(x, 3, 2, 1), IMAGES, layouts=_OF_IMAGES),
    _entry("adaptive average pool", lambda x: F.adaptive_avg_pool2d(x, 7), IMAGES, layouts=_OF_IMAGES),
    _entry("pixel shuffle", lambda x: F.pixel_shuffle(x, 2), IMAGES, layouts=_OF_IMAGES),
)

PROGRAMS = {entry.name: entry for entry in (*_MATRICES, *_PICTURES)}
