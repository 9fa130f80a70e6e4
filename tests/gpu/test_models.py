"""Models with gradients on a card, and small ones on an emulated card: never farther from float64 than eager's."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import torchkiln
from tests.gpu.emulated_card import emulated


@pytest.fixture(params=["emulated", pytest.param("cuda", marks=pytest.mark.card)])
def device(request: pytest.FixtureRequest) -> Iterator[torch.device]:
    torch._dynamo.reset()
    torch.manual_seed(0)
    with torchkiln.settings(cache=False, fallback=False):
        if request.param == "cuda":
            yield torch.device("cuda")
        else:
            with emulated():
                yield torch.device("cpu")
    torch._dynamo.reset()


class Block(nn.Module):
    """A layer of a transformer."""

    def __init__(self, width: int, heads: int, *, causal: bool = False) -> None:
        super().__init__()
        self.heads, self.causal = heads, causal
        self.first, self.second = nn.LayerNorm(width), nn.LayerNorm(width)
        self.taken, self.given = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.wide, self.narrow = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, width = x.shape
        parts = self.taken(self.first(x)).view(batch, length, 3, self.heads, width // self.heads)
        query, key, value = parts.permute(2, 0, 3, 1, 4)
        seen = F.scaled_dot_product_attention(query, key, value, is_causal=self.causal)
        x = x + self.given(seen.transpose(1, 2).reshape(batch, length, width))
        return x + self.narrow(F.gelu(self.wide(self.second(x))))


class Language(nn.Module):
    def __init__(self, *, causal: bool = False, dropout: float = 0.0) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(101, 64), nn.Embedding(32, 64)
        self.blocks = nn.ModuleList(Block(64, 4, causal=causal) for _ in range(2))
        self.dropout, self.last = nn.Dropout(dropout), nn.Linear(64, 101)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.words(tokens) + self.places(torch.arange(tokens.shape[1], device=tokens.device))
        for block in self.blocks:
            x = block(self.dropout(x))
        return F.cross_entropy(self.last(x).flatten(0, 1).float(), tokens.flatten())


class Images(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            *(nn.Conv2d(3, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(2)),
            *(nn.Conv2d(8, 16, 3, padding=1, groups=2, bias=False), nn.BatchNorm2d(16), nn.SiLU()),
            *(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, 5)),
        )

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(self.layers(images).float(), torch.arange(len(images), device=images.device) % 5)


def _tokens(device: torch.device) -> torch.Tensor:
    return torch.randint(0, 101, (3, 24), device=device)


def _images(device: torch.device) -> torch.Tensor:
    return torch.randn(4, 3, 16, 16, device=device)


MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[torch.device], torch.Tensor]]] = {
    "bert": (Language, _tokens),
    "gpt": (lambda: Language(causal=True), _tokens),
    "images": (Images, _images),
}


def step(model: nn.Module, run: Callable[..., Any], given: torch.Tensor) -> list[torch.Tensor]:
    """The loss and the gradients of all parameters."""
    model.zero_grad(set_to_none=True)
    loss = run(given)
    loss.backward()
    return [loss.detach(), *(p.grad.clone() for p in model.parameters() if p.grad is not None)]


def compare(model: nn.Module, given: torch.Tensor, *, dtype: torch.dtype = torch.float32, **options: Any) -> None:
    """Compiled in ``dtype`` the error is that of eager, give or take rounding, both seen from float64."""
    exact = copy.deepcopy(model).double()
    wide = given.double() if given.is_floating_point() else given
    expected = step(exact, exact, wide)
    model = model.to(dtype)
    given = given.to(dtype) if given.is_floating_point() else given
    eager = copy.deepcopy(model)
    by_eager = step(eager, eager, given)
    found = step(model, torch.compile(model, backend="kiln", fullgraph=True, **options), given)
    for mine, theirs, right in zip(found, by_eager, expected, strict=True):
        assert (mine.dtype, mine.device) == (theirs.dtype, theirs.device)
        scale = right.abs().max() + 1e-3
        error, allowed = (float((value.double() - right).abs().max() / scale) for value in (mine, theirs))
        assert error <= 2 * allowed + 8 * torch.finfo(dtype).eps, f"{error} of {allowed}"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", MODELS)
def test_models_train_as_near_to_float64_as_in_eager(name: str, dtype: torch.dtype, device: torch.device) -> None:
    make, inputs = MODELS[name]
    compare(make().to(device), inputs(device), dtype=dtype)


def test_one_graph_serves_batches_of_any_size(device: torch.device) -> None:
    model = Language(causal=True).to(device)
    eager = copy.deepcopy(model)
    run = torch.compile(model, backend="kiln", fullgraph=True, dynamic=True)
    graphs = torchkiln.stats().graphs
    for batch, length in ((3, 24), (5, 17), (2, 32)):
        tokens = torch.randint(0, 101, (batch, length), device=device)
        for mine, theirs in zip(step(model, run, tokens), step(eager, eager, tokens), strict=True):
            torch.testing.assert_close(mine, theirs, rtol=1e-3, atol=1e-4)
    assert torchkiln.stats().graphs == graphs + 2


def test_autocast_rounds_where_eager_does(device: torch.device) -> None:
    model, tokens = Language().to(device), _tokens(device)
    eager = copy.deepcopy(model)
    run = torch.compile(model, backend="kiln", fullgraph=True)
    with torch.autocast(device.type, torch.bfloat16):
        found, expected = run(tokens), eager(tokens)
    torch.testing.assert_close(found, expected, rtol=1e-2, atol=1e-2)
    found.backward()
    expected.backward()
    for mine, theirs in zip(model.parameters(), eager.parameters(), strict=True):
        assert mine.grad is not None
        assert theirs.grad is not None
        scale = float(theirs.grad.abs().max()) + 1e-4
        torch.testing.assert_close(mine.grad, theirs.grad, rtol=0, atol=0.05 * scale)


def test_checkpointed_blocks_are_recomputed(device: torch.device) -> None:
    class Checkpointed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.block = Block(64, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return checkpoint(self.block, x, use_reentrant=False).square().mean()

    compare(Checkpointed().to(device), torch.randn(2, 16, 64, device=device))


def test_dropout_draws_the_numbers_that_eager_draws(device: torch.device) -> None:
    """With rng="eager"; on a card torch draws them whatever the setting."""
    model, tokens = Language(dropout=0.3).to(device), _tokens(device)
    eager = copy.deepcopy(model)
    run = torch.compile(model, backend="kiln", fullgraph=True, options={"rng": "eager", "fallback": False})
    for seed in (1, 2):
        torch.manual_seed(seed)
        expected = step(eager, eager, tokens)
        torch.manual_seed(seed)
        for mine, theirs in zip(step(model, run, tokens), expected, strict=True):
            torch.testing.assert_close(mine, theirs, rtol=1e-3, atol=1e-4)


def test_an_optimizer_steps_in_compiled_code(device: torch.device) -> None:
    model, x = nn.Linear(32, 32).to(device), torch.randn(8, 32, device=device)
    eager = copy.deepcopy(model)
    for each, compiled in ((model, True), (eager, False)):
        optimizer = torch.optim.AdamW(each.parameters(), lr=1e-2, capturable=device.type == "cuda")
        update = torch.compile(optimizer.step, backend="kiln") if compiled else optimizer.step
        for _ in range(3):
            optimizer.zero_grad()
            each(x).square().sum().backward()
            update()
    for mine, theirs in zip(model.parameters(), eager.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-5)


def test_inference_gives_what_eager_gives(device: torch.device) -> None:
    model, tokens = Language(causal=True).to(device).eval(), _tokens(device)
    run = torch.compile(model, backend="kiln", fullgraph=True)
    for mode in (torch.no_grad(), torch.inference_mode(), nullcontext()):
        with mode:
            torch.testing.assert_close(run(tokens), model(tokens), rtol=1e-4, atol=1e-4)
