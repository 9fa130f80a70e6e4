"""Library calls are given the strides eager gives them, whatever passes and lowering do to the layouts before them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.parametrizations import weight_norm

import torchkiln
from conformance.forced_layouts import forced_layouts
from tests.passes.joint.graphs import trace
from torchkiln.graph.manager import Rounds
from torchkiln.graph.strides import restrided
from torchkiln.passes.joint import channels_last
from torchkiln.passes.library_strides import note_eager_strides, restore_eager_strides

aten = torch.ops.aten
Compile = Callable[..., Any]


@pytest.fixture(params=["always", "never"])
def channels_last_options(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Options under which images have their channels last wherever there is a convolution, or never."""
    if request.param == "always":
        monkeypatch.setattr(channels_last, "_pays", lambda found, *_: bool(found))
    return {"passes_skip": ("joint/channels_last",)} if request.param == "never" else {}


def _gradients(call: Callable[[Tensor], Tensor], module: nn.Module, x: Tensor) -> list[Tensor]:
    x = x.detach().requires_grad_()
    result = call(x)
    torch.manual_seed(5)
    gradients = torch.autograd.grad(result, [x, *module.parameters()], torch.randn_like(result), materialize_grads=True)
    return [result.detach(), *gradients]


def _assert_trains_as_eager(module: nn.Module, x: Tensor, compiled: Any) -> None:
    for mine, theirs in zip(_gradients(compiled, module, x), _gradients(module, module, x), strict=True):
        assert mine.stride() == theirs.stride()
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-4)


# -- weight norm ----------------------------------------------------------------------------------------------------

NORMED: dict[str, Callable[[], tuple[nn.Module, Tensor]]] = {
    "3 x 3": lambda: (weight_norm(nn.Conv2d(2, 16, 3)), torch.randn(2, 2, 16, 16)),
    "over the second dimension": lambda: (weight_norm(nn.Conv2d(2, 16, 3), dim=1), torch.randn(2, 2, 16, 16)),
    "over everything": lambda: (weight_norm(nn.Conv2d(2, 16, 3), dim=None), torch.randn(2, 2, 16, 16)),
    "strided": lambda: (weight_norm(nn.Conv2d(3, 8, (3, 5), stride=2, padding=1)), torch.randn(2, 3, 17, 16)),
    "1 x 1": lambda: (weight_norm(nn.Conv2d(4, 8, 1)), torch.randn(2, 4, 9, 9)),
    "in groups": lambda: (weight_norm(nn.Conv2d(4, 8, 3, groups=2)), torch.randn(2, 4, 12, 12)),
    "depthwise": lambda: (weight_norm(nn.Conv2d(8, 8, 5, groups=8, padding=2)), torch.randn(2, 8, 12, 12)),
    "transposed": lambda: (weight_norm(nn.ConvTranspose2d(4, 6, 3, stride=2)), torch.randn(2, 4, 8, 8)),
    "of sequences": lambda: (weight_norm(nn.Conv1d(4, 6, 3, padding=1)), torch.randn(2, 4, 20)),
    "of volumes": lambda: (weight_norm(nn.Conv3d(2, 4, 3)), torch.randn(1, 2, 6, 6, 6)),
    "two": lambda: (
        nn.Sequential(weight_norm(nn.Conv2d(3, 8, 3)), nn.ReLU(), weight_norm(nn.Conv2d(8, 4, 3))),
        torch.randn(2, 3, 14, 14),
    ),
}


@pytest.mark.parametrize("name", NORMED)
def test_gradients_of_weight_normed_convolutions_are_eagers(
    name: str, channels_last_options: dict[str, Any], compile_strictly: Compile
) -> None:
    module, x = NORMED[name]()
    _assert_trains_as_eager(module, x, compile_strictly(module, **channels_last_options))


def test_gradients_of_a_weight_normed_convolution_are_eagers_where_channels_last_pay(compile_strictly: Compile) -> None:
    module, x = weight_norm(nn.Conv2d(2, 16, 3)), torch.randn(2, 2, 32, 32)
    _assert_trains_as_eager(module, x, compile_strictly(module))


def test_gradients_of_a_weight_normed_convolution_of_symbolic_sizes_are_eagers() -> None:
    module = weight_norm(nn.Conv2d(2, 16, 3))
    compiled = torch.compile(module, backend="kiln", dynamic=True, options={"fallback": False})
    for side in (16, 20):
        _assert_trains_as_eager(module, torch.randn(2, 2, side, side + 3), compiled)


# -- other kernels that read memory as it lies ----------------------------------------------------------------------


class Between(nn.Module):
    """A convolution, a function of its result, and where that is an image another convolution."""

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.first, self.second, self.function = nn.Conv2d(3, 8, 3), nn.Conv2d(8, 4, 3), function

    def forward(self, x: Tensor) -> Tensor:
        result = self.function(self.first(x))
        return self.second(result) if result.dim() == 4 else result


SAMPLES = torch.tensor([[[0.3, 0.6]] * 8] * 2)
SAMPLES_OF_VOLUMES = torch.tensor([[[0.3, 0.6, 0.2]] * 8] * 2)
CLASSES = torch.randint(0, 8, (2, 14, 14))
BETWEEN: dict[str, Callable[[Tensor], Tensor]] = {
    "fractional pooling": lambda y: F.fractional_max_pool2d(y, 2, output_size=9, _random_samples=SAMPLES),
    "fractional pooling of volumes": lambda y: F.fractional_max_pool3d(
        y.unflatten(2, (2, 7)), (1, 2, 2), output_size=(1, 4, 8), _random_samples=SAMPLES_OF_VOLUMES
    ).flatten(2, 3),
    "adaptive pooling of volumes": lambda y: F.adaptive_max_pool3d(y.unflatten(2, (2, 7)), (2, 3, 5)).flatten(2, 3),
    "pooling of volumes": lambda y: F.max_pool3d(y.unflatten(2, (2, 7)), (1, 2, 2)).flatten(2, 3),
    "group norm": lambda y: F.group_norm(y, 4),
    "loss of images": lambda y: F.cross_entropy(y, CLASSES, reduction="none"),
    "distances": lambda y: torch.cdist(y.flatten(2), y.flatten(2)),
    "weight norm of the result": lambda y: torch._weight_norm(y, y.amax((1, 2, 3), keepdim=True), 0),
    "attention": lambda y: F.scaled_dot_product_attention(y, y, y),
    "inverse": lambda y: torch.linalg.inv(y + 5 * torch.eye(14)),
}


@pytest.mark.parametrize("name", BETWEEN)
def test_gradients_through_library_calls_between_convolutions_are_eagers(
    name: str, channels_last_options: dict[str, Any], compile_strictly: Compile
) -> None:
    module = Between(BETWEEN[name])
    _assert_trains_as_eager(module, torch.randn(2, 3, 16, 16), compile_strictly(module, **channels_last_options))


# -- operators of users, which see the strides ----------------------------------------------------------------------


@pytest.fixture
def strides_of() -> Iterator[Any]:
    """Operators that say what strides they were given, by the tag that speaks of them."""
    library = torch.library.Library("kiln_test_strides", "FRAGMENT")
    tags = {"plain": (), "ordered": (torch.Tag.needs_fixed_stride_order,)}
    if hasattr(torch.Tag, "needs_exact_strides"):
        tags["exact"] = (torch.Tag.needs_exact_strides,)
    for name, given in tags.items():
        library.define(f"{name}(Tensor x) -> Tensor", tags=given)
        library.impl(name, lambda x: torch.tensor(x.stride()) + 0 * x.long().flatten()[0], "CPU")
        torch.library.register_fake(
            f"kiln_test_strides::{name}", lambda x: torch.empty(x.dim(), dtype=torch.int64), lib=library
        )
    library.define("write(Tensor(a!) x) -> ()")

    def write(x: Tensor) -> None:
        x.copy_(torch.arange(x.numel(), dtype=x.dtype).reshape(x.shape) * x.stride(0) + x.stride(-1))

    library.impl("write", write, "CPU")
    torch.library.register_fake("kiln_test_strides::write", lambda x: None, lib=library)
    library.define("several(Tensor[] xs) -> Tensor")
    library.impl("several", lambda xs: torch.tensor([s for x in xs for s in x.stride()]), "CPU")
    torch.library.register_fake(
        "kiln_test_strides::several",
        lambda xs: torch.empty(sum(x.dim() for x in xs), dtype=torch.int64),
        lib=library,
    )
    yield torch.ops.kiln_test_strides
    library._destroy()


WEIGHT = torch.randn(8, 3, 3, 3)
GIVEN: dict[str, Callable[[Tensor], Tensor]] = {
    "an input": lambda x: x,
    "a loop's result": lambda x: x + 1,
    "a transposed loop's result": lambda x: (x + 1).transpose(1, 3),
    "a loop's result of a transposed input": lambda x: x.transpose(1, 3) + 1,
    "a copy of a transposed input": lambda x: x.transpose(1, 3).contiguous(),
    "a part with gaps": lambda x: (x * 2)[:, :, ::2, 1:5],
    "an expanded value": lambda x: (x.sum((2, 3), keepdim=True) + 1).expand(2, 3, 4, 5),
    "one channel": lambda x: (x * 2)[:, :1],
    "a convolution": lambda x: F.conv2d(x, WEIGHT),
    "an activation of a convolution": lambda x: F.conv2d(x, WEIGHT).relu(),
    "a part of a convolution": lambda x: F.conv2d(x, WEIGHT).relu()[:, 2:5, ::2],
    "an expanded mean of a convolution": lambda x: F.conv2d(x, WEIGHT).mean((0, 1), keepdim=True).expand(2, 8, -1, -1),
    "rows of a convolution": lambda x: F.conv2d(x, WEIGHT).flatten(2).transpose(1, 2),
    "complex values": lambda x: torch.complex(F.conv2d(x, WEIGHT), F.conv2d(x, WEIGHT)),
    "a channels-last copy": lambda x: (x + 1).contiguous(memory_format=torch.channels_last),
    "a cat": lambda x: torch.cat([x.transpose(2, 3), x.transpose(2, 3) + 1], 1),
    "a result with a kernel for one pixel": lambda x: F.conv2d(x, WEIGHT).amax((2, 3), keepdim=True),
}


@pytest.mark.parametrize("force", [False, True], ids=["as they are", "forced"])
@pytest.mark.parametrize("name", GIVEN)
def test_operators_of_users_are_given_eagers_strides(
    name: str, force: bool, strides_of: Any, compile_strictly: Compile, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(channels_last, "_pays", lambda found, *_: bool(found))

    def function(x: Tensor) -> list[Tensor]:
        value = GIVEN[name](x)
        found = [getattr(strides_of, tag)(value) for tag in ("plain", "ordered", "exact") if hasattr(strides_of, tag)]
        return [*found, strides_of.several([value, x])]

    x = torch.randn(2, 3, 12, 14)
    expected = function(x)
    with forced_layouts() if force else torch.no_grad():
        found = compile_strictly(function)(x)
    for mine, theirs in zip(found, expected, strict=True):
        assert mine.tolist() == theirs.tolist()


@pytest.mark.parametrize("name", ["a convolution", "rows of a convolution", "a loop's result of a transposed input"])
def test_operators_of_users_are_given_eagers_strides_for_symbolic_sizes(name: str, strides_of: Any) -> None:
    def function(x: Tensor) -> Tensor:
        return strides_of.plain(GIVEN[name](x))

    compiled = torch.compile(function, backend="kiln", dynamic=True, options={"fallback": False})
    for height in (40, 52):
        x = torch.randn(2, 3, height, 44)
        assert compiled(x).tolist() == function(x).tolist()


@pytest.mark.parametrize("name", ["a loop's result", "a convolution", "a part with gaps"])
@pytest.mark.parametrize("force", [False, True], ids=["as they are", "forced"])
def test_operators_of_users_write_to_memory_with_eagers_strides(
    name: str, force: bool, strides_of: Any, compile_strictly: Compile, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(channels_last, "_pays", lambda found, *_: bool(found))

    def function(x: Tensor) -> Tensor:
        value = GIVEN[name](x)
        strides_of.write(value)
        return value * 2

    x = torch.randn(2, 3, 12, 14)
    with forced_layouts() if force else torch.no_grad():
        found = compile_strictly(function)(x)
    torch.testing.assert_close(found, function(x))


def test_bodies_give_operators_of_users_eagers_strides(
    strides_of: Any, compile_strictly: Compile, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(channels_last, "_pays", lambda found, *_: bool(found))

    def function(x: Tensor) -> Tensor:
        y = F.conv2d(x, WEIGHT)
        return torch.cond(y.sum() > 0, lambda y: strides_of.plain(y), lambda y: strides_of.plain(y.sin()), (y,))

    for x in (torch.randn(2, 3, 12, 14), -torch.randn(2, 3, 12, 14)):
        assert compile_strictly(function)(x).tolist() == function(x).tolist()


def test_an_operator_that_takes_any_layout_is_given_what_is_there(
    compile_strictly: Compile, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(channels_last, "_pays", lambda found, *_: bool(found))
    library = torch.library.Library("kiln_test_flexible", "DEF")
    try:
        library.define("strides_of(Tensor x) -> Tensor", tags=(torch.Tag.flexible_layout,))
        library.impl("strides_of", lambda x: torch.tensor(x.stride()), "CPU")
        torch.library.register_fake(
            "kiln_test_flexible::strides_of", lambda x: torch.empty(x.dim(), dtype=torch.int64), lib=library
        )

        def function(x: Tensor) -> Tensor:
            return torch.ops.kiln_test_flexible.strides_of(F.conv2d(x, WEIGHT))

        assert compile_strictly(function)(torch.randn(2, 3, 12, 14)).tolist() == [960, 1, 96, 8]
    finally:
        library._destroy()


# -- the passes -----------------------------------------------------------------------------------------------------


def _graph_with_another_layout() -> tuple[torch.fx.GraphModule, torch.fx.Node]:
    gm = trace(lambda x: aten._cdist_forward(aten.sin(x), x, 2.0, None), torch.randn(4, 5, 6))
    note_eager_strides(gm)
    (call,) = gm.graph.find_nodes(op="call_function", target=aten._cdist_forward.default)
    value = call.args[0].meta["val"]
    with value.fake_mode:
        like = torch.empty_strided(value.shape, (1, 24, 4))
    with gm.graph.inserting_before(call):
        copy = restrided(gm.graph, call.args[0], like)[-1]
    call.update_arg(0, copy)
    return gm, call


def test_a_call_whose_argument_got_another_layout_reads_a_copy() -> None:
    gm, call = _graph_with_another_layout()
    assert call.args[0].meta["val"].stride() == (1, 24, 4)
    assert restore_eager_strides(gm)
    gm.graph.lint()
    assert call.args[0].meta["val"].stride() == (30, 6, 1)
    assert not restore_eager_strides(gm)


def test_values_that_a_pass_left_without_fake_values_get_them() -> None:
    gm, call = _graph_with_another_layout()
    for node in gm.graph.nodes:
        if node.target is aten.clone.default:
            for user in [node, *node.users]:
                del user.meta["val"]
    assert restore_eager_strides(gm)
    assert call.args[0].meta["val"].stride() == (30, 6, 1)


def test_a_call_that_inherited_what_was_noted_for_another_keeps_its_arguments() -> None:
    gm, call = _graph_with_another_layout()
    call.target = aten.cross_entropy_loss.default
    assert not restore_eager_strides(gm)


@pytest.mark.parametrize(
    "strides",
    [(30, 6, 1), (6, 24, 1), (1, 4, 20), (60, 12, 2), (1, 0, 4), (0, 6, 1), (200, 7, 1), (0, 0, 0)],
    ids=str,
)
def test_copies_have_the_strides_asked_for(strides: tuple[int, ...]) -> None:
    gm = trace(lambda x: aten.sin(x), torch.randn(4, 5, 6))
    (sin,) = gm.graph.find_nodes(op="call_function", target=aten.sin.default)
    with sin.meta["val"].fake_mode:
        like = torch.empty_strided((4, 5, 6), strides)
    output = gm.graph.output_node()
    with gm.graph.inserting_before(output):
        made = restrided(gm.graph, sin, like)
    output.args = (made[-1],)
    gm.recompile()
    assert made[-1].meta["val"].stride() == strides
    # Along a stride of 0, all elements are one.
    x = torch.randn([1 if stride == 0 else size for size, stride in zip((4, 5, 6), strides, strict=True)])
    x = x.expand(4, 5, 6).contiguous()
    result = gm(x)
    assert result.stride() == strides
    assert torch.equal(result, x.sin())


def test_stages_note_first_and_restore_last() -> None:
    for pipeline in torchkiln.passes.all_pipelines()[1:]:
        names = [item.name for item in pipeline.passes if not isinstance(item, Rounds)]
        assert names.index("eager_strides") < names.index("pre")
        assert names.index("library_strides") > names.index("priority_2")
