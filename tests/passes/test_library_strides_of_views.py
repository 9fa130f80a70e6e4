"""Library calls are given eager's strides behind any chain of views, whatever layouts passes give what is viewed.

Views leave gaps, repeat elements and overlap, and with symbolic sizes their strides are expressions. One program has
many chains, so that the class is cheap to test.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from conformance.forced_layouts import forced_layouts
from torchkiln.passes.joint import channels_last

Strides = dict[str, tuple[int, ...]]


@pytest.fixture(autouse=True)
def _channels_last_wherever_there_is_a_convolution(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(channels_last, "_pays", lambda found, *_: bool(found))


@pytest.fixture
def seen() -> Iterator[Strides]:
    """The strides that ``kiln_test_views::watch`` was given, by the name it was called with, and of its gradients."""
    library = torch.library.Library("kiln_test_views", "FRAGMENT")
    library.define("watch(Tensor x, str name) -> Tensor")
    found: Strides = {}

    def watch(x: Tensor, name: str) -> Tensor:
        found[name] = x.stride()
        return x.clone(memory_format=torch.contiguous_format)

    library.impl("watch", watch, "CPU")
    torch.library.register_fake("kiln_test_views::watch", lambda x, name: x.new_empty(x.shape), lib=library)
    torch.library.register_autograd(
        "kiln_test_views::watch",
        lambda ctx, gradient: (torch.ops.kiln_test_views.watch(gradient, f"gradient of {ctx.name}"), None),
        setup_context=lambda ctx, inputs, output: setattr(ctx, "name", inputs[1]),
        lib=library,
    )
    yield found
    library._destroy()


def _watch(x: Tensor, name: str) -> Tensor:
    watched: Tensor = torch.ops.kiln_test_views.watch(x, name)
    return watched


def _image(count: int, height: int, *, dynamic: bool) -> Tensor:
    """Images of a ``height`` that is symbolic if ``dynamic``; one symbol, as torch is slow with several (7 times)."""
    x = torch.randn(count, 3, height, 24)
    if dynamic:
        torch._dynamo.mark_dynamic(x, 2)
    return x


# -- chains of views --------------------------------------------------------------------------------------------------

KNOWN = [
    "[1:]",
    "[:, :2].transpose(2, 3)",
    "[:, 3]",
    "[:, :, 2:-1]",
    "[..., 1:]",
    "[:, ::2]",
    "[1:, ::3, ::2, 1::2]",
    "[:, :, : t.shape[2] // 2]",
    "[:, :1].expand(-1, 5, -1, -1)",
    "[:, :1, ::2].expand(-1, 5, -1, -1)[..., 1:]",
    "[:, :3].unsqueeze(1).expand(-1, 4, -1, -1, -1)",
    "[0].expand(t.shape[0], -1, -1, -1)",
    "[:, 1:].unfold(2, 4, 2)",
    ".unfold(3, 3, 1)",
    ".diagonal(0, 0, 1)",
    ".flatten(2)[..., 3:].transpose(1, 2)",
    ".chunk(2, 1)[1]",
    ".as_strided((3, t.shape[3]), (t.shape[2], 1), 2)",
    ".as_strided((t.shape[2], 3, 3), (t.shape[3], 1, 1))",
]


def _random_chain(draw: random.Random, example: Tensor) -> str:
    """Up to four views, each of the one before; all but one size of ``example`` stay above 2 on the way."""
    chain = ""
    for _ in range(draw.randint(2, 4)):
        t: Tensor = eval(f"t{chain}", {"t": example})
        dims = [dim for dim in range(t.dim()) if t.shape[dim] > 7]
        before = ":, " * (dim := draw.choice(dims or [0]))
        last = t.dim() - 1
        choices = [f".transpose({dim}, {draw.randint(0, last)})", f".movedim({dim}, 0)"]
        if t.dim() < 6:
            sizes = ", ".join("3" if k == dim else "-1" for k in range(t.dim() + 1))
            choices.append(f".unsqueeze({dim}).expand({sizes})")
        if dims:
            choices += [f"[{before}{part}]" for part in ("1:", ":-1", "1:-2", "::2", "1::2", ":3")]
            choices += [f".select({dim}, {draw.randint(0, 3)})"] if t.dim() > 3 else []
            choices += [f".unfold({dim}, 3, {draw.randint(1, 3)})"] if t.dim() < 6 else []
        chain += draw.choice(choices)
    return chain


def _chains() -> list[str]:
    draw, example = random.Random(0), torch.empty(8, 8, 20, 22)
    return [*KNOWN, *(_random_chain(draw, example) for _ in range(13))]


class Viewed(nn.Module):
    """A library call on each chain of views of values whose layouts passes change."""

    def __init__(self, chains: list[str]) -> None:
        super().__init__()
        self.first, self.second, self.norm = nn.Conv2d(3, 8, 3), nn.Conv2d(8, 8, 3, padding=1), nn.BatchNorm2d(8)
        self.chains = [(chain, eval(f"lambda t: t{chain}")) for chain in chains]

    def forward(self, x: Tensor) -> list[Tensor]:
        image = self.first(x)
        viewed = [image, self.norm(image).relu(), self.second(image.sigmoid())]
        return [
            _watch(view(viewed[number % len(viewed)]), name) for number, (name, view) in enumerate(self.chains)
        ]


def _assert_sees_what_eager_does(seen: Strides, found: Callable[[], Any], expected: Callable[[], Any]) -> None:
    seen.clear()
    theirs, eager = expected(), dict(seen)
    seen.clear()
    mine = found()
    assert seen == eager
    torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("force", [False, True], ids=["as they are", "forced"])
@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "symbolic"])
def test_library_calls_behind_views_are_given_eagers_strides(dynamic: bool, force: bool, seen: Strides) -> None:
    module = Viewed(_chains()[:: 4 if force else 1])  # torch takes long to follow forced layouts of symbolic sizes
    compiled = torch.compile(module, backend="kiln", fullgraph=True, options={"fallback": False})
    for height in (20, 26) if dynamic else (20,):
        x = _image(8, height + 2, dynamic=dynamic)
        with forced_layouts() if force else nullcontext(), torch.no_grad():
            _assert_sees_what_eager_does(seen, lambda: compiled(x), lambda: module(x))  # noqa: B023 (called here)
        assert len(seen) == len(module.chains)


# -- gradients that are views -----------------------------------------------------------------------------------------

JOINS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "first channels": lambda y, x: torch.cat([y, x], 1),
    "last channels": lambda y, x: torch.cat([x, x, y], 1),
    "rows": lambda y, x: torch.cat([x, y, x], 2),
    "columns": lambda y, x: torch.cat([y, x], 3),
    "images": lambda y, x: torch.cat([x, y]),
    "one of a stack": lambda y, x: torch.stack([x, y, x], 2).flatten(1, 2),
    "inner part": lambda y, x: F.pad(y, (1, 2, 3, 1)),
    "transposed part": lambda y, x: torch.cat([x.transpose(2, 3), y.transpose(2, 3)], 1),
    "part of a flat one": lambda y, x: torch.cat([y.flatten(2), x.flatten(2)], 2).unflatten(2, (4, -1)),
    "part of a sum": lambda y, x: torch.cat([y.sum((2, 3), keepdim=True).expand_as(x), x], 1),
}


class Joined(nn.Module):
    """Library calls whose gradients are parts of those of convolutions."""

    def __init__(self, names: list[str]) -> None:
        super().__init__()
        example = torch.empty(1, 3, 8, 8)
        channels = {name: JOINS[name](example, example).shape[1] for name in names}
        self.convolutions = nn.ModuleDict({name: nn.Conv2d(n, 4, 3) for name, n in channels.items()})

    def forward(self, x: Tensor) -> Tensor:
        joined = {name: JOINS[name](_watch(x * 2, name), x) for name in self.convolutions}
        return torch.stack([self.convolutions[name](value).square().mean() for name, value in joined.items()])


@pytest.mark.parametrize("force", [False, True], ids=["as they are", "forced"])
@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "symbolic"])
def test_library_calls_of_backward_are_given_eagers_strides(dynamic: bool, force: bool, seen: Strides) -> None:
    module = Joined(list(JOINS)[:: 2 if force else 1])
    compiled = torch.compile(module, backend="kiln", fullgraph=True, options={"fallback": False})

    def gradients(call: Callable[[Tensor], Tensor], x: Tensor) -> tuple[Tensor, ...]:
        x.requires_grad_()
        return torch.autograd.grad(call(x).sum(), [x, *module.parameters()])

    for height in (10, 13) if dynamic else (10,):
        x = _image(2, height, dynamic=dynamic)
        with forced_layouts() if force else nullcontext():
            _assert_sees_what_eager_does(
                seen,
                lambda: gradients(compiled, x),  # noqa: B023 (called here)
                lambda: gradients(module, x),  # noqa: B023 (called here)
            )
        assert len(seen) == 2 * len(module.convolutions)


# -- results ----------------------------------------------------------------------------------------------------------


def test_views_of_a_convolution_are_returned_with_eagers_strides_for_symbolic_sizes() -> None:
    module = nn.Conv2d(3, 8, 3)

    def function(x: Tensor) -> list[Tensor]:
        t = module(x)
        return [t[:, :2].transpose(2, 3), t[:, :, ::2], t[:, :1].expand(-1, 5, -1, -1), t.unfold(3, 3, 2)]

    compiled = torch.compile(function, backend="kiln", dynamic=True, fullgraph=True, options={"fallback": False})
    for height in (20, 26):
        x = torch.randn(4, 3, height, 24)
        with torch.no_grad():
            for mine, theirs in zip(compiled(x), function(x), strict=True):
                assert mine.stride() == theirs.stride()
                torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-4)
