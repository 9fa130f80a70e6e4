"""Plain functions as people write them: activations, losses, an optimizer step, stencils, filters, sampling."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from torchkiln.bench.cells import Job
from torchkiln.bench.entries.entry import BOTH, Entry, Inputs

INFERENCE = (Job.inference,)


def mish(x: Tensor) -> Tensor:
    return x * torch.tanh(F.softplus(x))


def rope(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """Rotary position embedding by halves, as most Llama-style models write it."""

    def rotated_half(x: Tensor) -> Tensor:
        half = x.size(-1) // 2
        return torch.cat((-x[..., half:], x[..., :half]), -1)

    return q * cos + rotated_half(q) * sin, k * cos + rotated_half(k) * sin


def focal_loss(logits: Tensor, target: Tensor) -> Tensor:
    entropy = F.cross_entropy(logits, target, reduction="none")
    return ((1 - torch.exp(-entropy)) ** 2 * entropy).mean()


def label_smoothing(logits: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(logits, target, label_smoothing=0.1)


def contrastive_loss(left: Tensor, right: Tensor) -> Tensor:
    """Each row of ``left`` belongs to the same row of ``right``, as in CLIP."""
    scores = F.normalize(left, dim=-1) @ F.normalize(right, dim=-1).T / 0.07
    rows = torch.arange(scores.size(0))
    return (F.cross_entropy(scores, rows) + F.cross_entropy(scores.T, rows)) / 2


def distillation_loss(student: Tensor, teacher: Tensor) -> Tensor:
    softened = F.log_softmax(student / 2, -1), F.log_softmax(teacher / 2, -1)
    return F.kl_div(*softened, reduction="batchmean", log_target=True) * 4


def adamw_step(p: list[Tensor], g: list[Tensor], m: list[Tensor], v: list[Tensor], step: Tensor) -> None:
    """One step of AdamW over a list of parameters, in place."""
    for w, d, first, second in zip(p, g, m, v, strict=True):
        first.lerp_(d, 0.1)
        second.mul_(0.999).addcmul_(d, d, value=0.001)
        w.mul_(1 - 1e-3 * 0.01)
        denominator = (second / (1 - 0.999**step)).sqrt_().add_(1e-8)
        w.addcdiv_(first / (1 - 0.9**step), denominator, value=-1e-3)


def stencil(u: Tensor, before: Tensor) -> Tensor:
    """A step of the wave equation on a torus: five points in space, two steps in time."""
    laplacian = u.roll(1, 0) + u.roll(-1, 0) + u.roll(1, 1) + u.roll(-1, 1) - 4 * u
    return 2 * u - before + 0.1 * laplacian


def image_filter(image: Tensor) -> Tensor:
    """Sobel edges of a grey image, normalized and brightened."""
    padded = F.pad(image, (1, 1, 1, 1), mode="replicate")
    down, up = padded[..., 2:, :], padded[..., :-2, :]
    right, left = padded[..., 2:], padded[..., :-2]
    gx = right[..., :-2, :] + 2 * right[..., 1:-1, :] + right[..., 2:, :]
    gx = gx - left[..., :-2, :] - 2 * left[..., 1:-1, :] - left[..., 2:, :]
    gy = down[..., :-2] + 2 * down[..., 1:-1] + down[..., 2:] - up[..., :-2] - 2 * up[..., 1:-1] - up[..., 2:]
    edges = (gx * gx + gy * gy + 1e-6).sqrt()
    return (edges / edges.amax((-1, -2), keepdim=True)).clamp(0, 1) ** 0.5


def pairwise_distances(x: Tensor, y: Tensor) -> Tensor:
    return (x[:, None, :] - y[None, :, :]).square().sum(-1).sqrt()


def sampling(logits: Tensor) -> Tensor:
    """The probabilities top-k and then top-p sampling draws from, at temperature 0.8."""
    logits = logits / 0.8
    least = logits.topk(50).values[..., -1:]
    logits = logits.masked_fill(logits < least, float("-inf"))
    ordered, order = logits.sort(-1, descending=True)
    probabilities = ordered.softmax(-1)
    beyond = probabilities.cumsum(-1) - probabilities > 0.9
    kept = ordered.masked_fill(beyond, float("-inf"))
    return torch.zeros_like(logits).scatter(-1, order, kept.softmax(-1))


def _adamw_inputs(variant: int) -> Inputs:
    shapes = [(512, 512), (512,), (2048, 512), (2048,), (512, 2048), (512,)][: (6, 4)[variant]]

    def some(scale: float) -> list[Tensor]:
        return [torch.rand(shape) * scale for shape in shapes]

    return {"p": some(1.0), "g": some(0.1), "m": some(0.01), "v": some(0.01), "step": torch.tensor(3.0)}


def _entry(function: Callable[..., Any], inputs: Callable[[int], Inputs], jobs: tuple[Job, ...] = BOTH) -> Entry:
    return Entry(function.__name__.replace("_", "-"), "functions", lambda: function, inputs, jobs)


def _classes(variant: int) -> Inputs:
    rows = (512, 256)[variant]
    return {"logits": torch.randn(rows, 1000), "target": torch.randint(1000, (rows,))}


def _rope_inputs(variant: int) -> Inputs:
    length = (512, 128)[variant]
    angles = torch.outer(torch.arange(length), 10000.0 ** -(torch.arange(0, 64, 2) / 64)).repeat(1, 2)
    q, k = torch.randn(2, 16, length, 64), torch.randn(2, 4, length, 64)
    return {"q": q, "k": k, "cos": angles.cos(), "sin": angles.sin()}


FUNCTIONS = (
    _entry(mish, lambda k: {"x": torch.randn((4096, 1024)[k], 256)}),
    _entry(rope, _rope_inputs),
    _entry(focal_loss, _classes),
    _entry(label_smoothing, _classes),
    _entry(contrastive_loss, lambda k: {n: torch.randn((512, 256)[k], 256) for n in ("left", "right")}),
    _entry(distillation_loss, lambda k: {n: torch.randn((256, 128)[k], 8000) for n in ("student", "teacher")}),
    _entry(adamw_step, _adamw_inputs, INFERENCE),
    _entry(stencil, lambda k: {n: torch.randn((1024, 512)[k], 1024) for n in ("u", "before")}),
    _entry(image_filter, lambda k: {"image": torch.rand((8, 4)[k], 1, 256, 256)}),
    _entry(pairwise_distances, lambda k: {"x": torch.randn((512, 256)[k], 64), "y": torch.randn(512, 64)}),
    _entry(sampling, lambda k: {"logits": torch.randn((8, 4)[k], 32000)}, INFERENCE),
)
