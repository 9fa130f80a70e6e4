"""Packages for inference, called as the models they were compiled from."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import transformers
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.export import Dim, export, register_dataclass

import torchkiln
from tests.aot.models import Attention, ConvNet, Counter, Mlp, Nested, Tied
from torchkiln.errors import ArgumentError, PackageError


def _loaded(model: Any, args: tuple[Any, ...], folder: Path, **options: Any) -> torchkiln.Package:
    return torchkiln.load(torchkiln.aot_compile(model, args, path=folder / "model.kiln", **options))


_MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[], Tensor]]] = {
    "mlp": (Mlp, lambda: torch.randn(5, 8)),
    "convolutions": (lambda: ConvNet().eval(), lambda: torch.randn(2, 3, 16, 16)),
    "channels last": (
        lambda: ConvNet().eval().to(memory_format=torch.channels_last),
        lambda: torch.randn(2, 3, 16, 16).to(memory_format=torch.channels_last),
    ),
    "attention": (Attention, lambda: torch.randn(2, 7, 16)),
    "tied weights": (Tied, lambda: torch.randint(10, (3, 4))),
}


@pytest.mark.parametrize("name", _MODELS)
def test_results_are_those_of_eager(name: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    make, example = _MODELS[name]
    model = make()
    package = _loaded(model, (example(),), tmp_path)
    for _ in range(2):
        x = example()
        with torch.no_grad():
            torch.testing.assert_close(package(x), model(x))


def test_sizes_in_the_declared_range_are_served(tmp_path: Path) -> None:
    model, batch, length = Attention(), Dim("batch", min=1, max=8), Dim("length", min=2, max=64)
    shapes = {"x": {0: batch, 1: length}, "mask": {0: batch, 3: length}}
    example = (torch.randn(2, 7, 16), torch.ones(2, 1, 1, 7, dtype=torch.bool))
    package = _loaded(model, example, tmp_path, dynamic_shapes=shapes)
    for rows, columns in ((2, 7), (3, 2), (8, 64)):
        x, mask = torch.randn(rows, columns, 16), torch.rand(rows, 1, 1, columns) > 0.3
        mask[..., 0] = True
        with torch.no_grad():
            torch.testing.assert_close(package(x, mask=mask), model(x, mask))


def test_buffers_and_arguments_are_written_as_by_eager(tmp_path: Path) -> None:
    model = Counter()
    package = _loaded(model, (torch.ones(2, 3), torch.zeros(2)), tmp_path)
    second = torchkiln.load(tmp_path / "model.kiln")
    for _ in range(3):
        x, log, eagers = torch.randn(2, 3), torch.zeros(2), torch.zeros(2)
        torch.testing.assert_close(package(x, log), model(x, eagers))
        assert torch.equal(log, eagers)
    assert int(package.weights["count"]) == 3
    torch.testing.assert_close(package.weights["total"], model.total)
    assert int(second.weights["count"]) == 0  # each loaded package has buffers of its own, and the file stays as it is


class _Writes(nn.Module):
    """Reads its second argument after it has written to the first, and to a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("last", torch.zeros(4))

    def forward(self, cache: Tensor, x: Tensor) -> Tensor:
        cache.copy_(x.flip(0))
        self.last.copy_(x * 2)
        return x + 1


def test_arguments_that_are_written_to_may_lie_beside_others_but_not_share_elements(tmp_path: Path) -> None:
    model = _Writes()
    package = _loaded(model, (torch.zeros(4), torch.zeros(4)), tmp_path)
    whole = torch.arange(32.0).view(4, 8)
    # Beside each other, and a row between the elements of a column.
    for cache, x in ((whole[0, :4], whole[0, 4:]), (whole[1, :4], whole[:, 5])):
        expected = x + 1
        assert torch.equal(package(cache, x), expected)
        assert torch.equal(cache, (expected - 1).flip(0))
    before = whole.clone()
    for cache, x in ((whole[0, :4], whole[0, :4]), (whole[0, :4], whole[0, 2:6]), (whole[1, :4], whole[:, 3])):
        with pytest.raises(ArgumentError, match="argument cache is written to and shares memory with the argument x;"):
            package(cache, x)
    with pytest.raises(ArgumentError, match="The weight last is written to and shares memory with the argument x;"):
        package(torch.zeros(4), package.weights["last"])
    assert torch.equal(whole, before)


def test_structures_of_arguments_and_results_are_kept(tmp_path: Path) -> None:
    model = Nested()

    def example() -> tuple[Any, ...]:
        return {"x": torch.randn(2, 3), "pair": (torch.randn(2), [torch.randn(2), torch.randn(3)])}, torch.randn(2)

    package = _loaded(model, example(), tmp_path, kwargs={"scale": 3.0, "name": "sum"})
    args = example()
    expected = model(*args, scale=3.0, name="sum")
    result = package(*args, name="sum", scale=3.0)  # in any order
    torch.testing.assert_close(result, expected)
    assert type(result) is type(expected)
    assert type(result["parts"]) is list
    assert result["parts"][1][1] is args[0]["pair"][1][1]


class _Pair(NamedTuple):
    first: Tensor
    rest: list[Tensor]


@dataclass
class _Scores:
    logits: Tensor
    loss: Tensor | None = None


class _Classes(nn.Module):
    def forward(self, x: Tensor) -> Any:
        return _Pair(x + 1, [x * 2]), torch.max(x, 0), _Scores(x - 1)


def test_classes_come_back_as_tuples_and_dictionaries(tmp_path: Path) -> None:
    register_dataclass(_Scores)
    model, x = _Classes(), torch.randn(3, 2)
    pair, extremes, scores = model(x)
    result = _loaded(model, (x,), tmp_path)(x)
    torch.testing.assert_close(result, (tuple(pair), tuple(extremes), {"logits": scores.logits}))
    assert [type(part) for part in result] == [tuple, tuple, dict]


def test_results_of_transformers_are_dictionaries(tmp_path: Path) -> None:
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}
    model = transformers.BertModel(transformers.BertConfig(vocab_size=50, **sizes)).eval()
    given = {"input_ids": torch.randint(50, (2, 7)), "attention_mask": torch.ones(2, 7, dtype=torch.long)}
    package = _loaded(model, (), tmp_path, kwargs=given)
    with torch.no_grad():
        expected = model(**given)
    result = package(**given)
    torch.testing.assert_close(result["last_hidden_state"], expected.last_hidden_state)
    torch.testing.assert_close(result, dict(expected))


def test_views_of_arguments_share_their_memory(tmp_path: Path) -> None:
    class Views(nn.Module):
        def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
            doubled = x * 2
            return x[1:], doubled, doubled.t()

    package = _loaded(Views(), (torch.ones(3, 2),), tmp_path)
    x = torch.randn(3, 2)
    part, doubled, turned = package(x)
    part.zero_()
    assert torch.equal(x[1:], torch.zeros(2, 2))
    doubled.zero_()
    assert torch.equal(turned, torch.zeros(2, 3))


def test_arguments_of_other_strides_are_copied(tmp_path: Path) -> None:
    model = Mlp()
    package = _loaded(model, (torch.randn(5, 8),), tmp_path)
    for x in (torch.randn(8, 5).t(), torch.randn(5, 16)[:, ::2], torch.randn(8).expand(5, 8)):
        with torch.no_grad():
            torch.testing.assert_close(package(x), model(x))


def test_control_flow_and_sizes_that_depend_on_data_are_compiled(tmp_path: Path) -> None:
    class DataDependent(nn.Module):
        def forward(self, x: Tensor) -> Any:
            chosen = torch.cond(x.sum() > 0, lambda x: x * 2, lambda x: x - 1, (x,))
            count = (x > 0).sum().item()
            return chosen, x[x > 0], torch.ones(3) * count, count

    model = DataDependent()
    package = _loaded(model, (torch.randn(3, 4),), tmp_path)
    for x in (torch.randn(3, 4), -torch.ones(3, 4), torch.ones(3, 4)):
        torch.testing.assert_close(package(x), model(x))


def test_errors_of_operators_have_eagers_class(tmp_path: Path) -> None:
    class Inverse(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return torch.linalg.inv(x)

    package, x = _loaded(Inverse(), (torch.eye(3),), tmp_path), torch.randn(3, 3) + 4 * torch.eye(3)
    torch.testing.assert_close(package(x), torch.linalg.inv(x))
    with pytest.raises(torch.linalg.LinAlgError, match="singular"):
        package(torch.zeros(3, 3))


def test_exported_programs_are_compiled_in_either_form(tmp_path: Path) -> None:
    for decomposed in (False, True):
        model = Counter()
        exported = export(copy.deepcopy(model), (torch.ones(2, 3), torch.zeros(2)))
        package = _loaded(exported.run_decompositions() if decomposed else exported, (), tmp_path)
        for _ in range(2):
            x, log, eagers = torch.randn(2, 3), torch.zeros(2), torch.zeros(2)
            torch.testing.assert_close(package(x, log), model(x, eagers))
            assert torch.equal(log, eagers)


def test_a_captured_graph_is_compiled_with_its_weights(tmp_path: Path) -> None:
    model = Mlp()
    path = torchkiln.compile_fx_aot(torch.fx.symbolic_trace(model), [torch.randn(5, 8)], path=tmp_path / "graph.kiln")
    package = torchkiln.load(path)
    x = torch.randn(5, 8)
    with torch.no_grad():
        torch.testing.assert_close(package(x), model(x))
    assert set(package.weights) == set(model.state_dict())


def test_weights_are_replaced_by_name(tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    old, new = Mlp(), Mlp()
    package, x = _loaded(old, (torch.randn(5, 8),), tmp_path), torch.randn(5, 8)
    package.load_weights(new.state_dict())
    with torch.no_grad():
        torch.testing.assert_close(package(x), new(x))
    save_file(old.state_dict(), tmp_path / "old.safetensors")
    package.load_weights(tmp_path / "old.safetensors")
    with torch.no_grad():
        torch.testing.assert_close(package(x), old(x))
    save_file(dict(package.weights), tmp_path / "again.safetensors")
    assert all(torch.equal(v, load_file(tmp_path / "again.safetensors")[k]) for k, v in old.state_dict().items())


def test_weights_of_any_strides_are_stored(tmp_path: Path) -> None:
    class Strided(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("expanded", torch.randn(3, 1).expand(3, 4))
            self.register_buffer("with_gaps", torch.randn(3, 8)[:, ::2])
            self.register_buffer("transposed", torch.randn(4, 3).t())

        def forward(self, x: Tensor) -> Tensor:
            return x * self.expanded + self.with_gaps - self.transposed

    model, x = Strided(), torch.randn(3, 4)
    torch.testing.assert_close(_loaded(model, (x,), tmp_path)(x), model(x))


def test_either_name_of_a_tied_weight_replaces_it(tmp_path: Path) -> None:
    model, tokens = Tied(), torch.randint(10, (3, 4))
    package = _loaded(model, (tokens,), tmp_path)
    for name in ("embedding.weight", "out.weight"):
        weight = torch.randn(10, 4)
        package.load_weights({name: weight})
        model.out.weight.data.copy_(weight)
        with torch.no_grad():
            torch.testing.assert_close(package(tokens), model(tokens))


def test_a_tied_weight_is_not_replaced_by_two_that_differ(tmp_path: Path) -> None:
    model, tokens = Tied(), torch.randint(10, (3, 4))
    package = _loaded(model, (tokens,), tmp_path)
    weight = torch.randn(10, 4)
    weight[2, 1] = torch.nan
    for changed in (0.5, torch.nan):
        other = weight.clone()
        other[5, 3] = changed
        with pytest.raises(ArgumentError, match="are one in the package, and are given with different values"):
            package.load_weights({"embedding.weight": weight, "out.weight": other})
    with torch.no_grad():
        torch.testing.assert_close(package(tokens), model(tokens))
        package.load_weights({"embedding.weight": weight, "out.weight": weight.clone()})
        model.out.weight.copy_(weight)
        torch.testing.assert_close(package(tokens), model(tokens), equal_nan=True)


def test_a_state_dict_may_hold_what_the_code_does_not_read(tmp_path: Path) -> None:
    class Normalizes(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.normalize, self.never = nn.BatchNorm1d(3), nn.Linear(3, 3)

        def forward(self, x: Tensor) -> Tensor:
            return self.normalize(x)

    old, new, x = Normalizes().eval(), Normalizes().eval(), torch.randn(5, 3)
    for tensor in new.state_dict().values():
        tensor.copy_(torch.rand(tensor.shape) + 1)
    package = _loaded(old, (x,), tmp_path)
    package.load_weights(new.state_dict())
    with torch.no_grad():
        torch.testing.assert_close(package(x), new(x))
    assert sorted(package.weights) == [f"normalize.{n}" for n in ("bias", "running_mean", "running_var", "weight")]
    with pytest.raises(ArgumentError, match=r"no weight 'normalize\.other'"):
        package.load_weights({**new.state_dict(), "normalize.other": torch.zeros(3)})


def test_wrong_weights_are_refused_and_none_is_replaced(tmp_path: Path) -> None:
    model = Mlp()
    package, x = _loaded(model, (torch.randn(5, 8),), tmp_path), torch.randn(5, 8)
    bias = torch.randn(16)
    wrong = {
        "no weight 'other'": {"layers.0.bias": bias, "other": bias},
        r"float32 of \[4\] on the CPU, not torch.float32 of \[16\]": {"layers.0.bias": bias, "layers.3.bias": bias},
        "not torch.float64": {"layers.0.bias": bias.double()},
        "must be a tensor, not 'text'": {"layers.0.bias": "text"},
        "with memory, not a torch.sparse_coo tensor": {"layers.0.bias": bias.to_sparse()},
        "with memory, not a FakeTensor": {"layers.0.bias": FakeTensorMode().from_tensor(bias)},
        "a mapping of names to tensors or the path of a file, not None": None,
    }
    for message, weights in wrong.items():
        with pytest.raises(torchkiln.errors.ArgumentError, match=message):
            package.load_weights(weights)
    for content in (b"", b"short", bytes(8), b"\x02" + bytes(7) + b"[]", b"\x09" + bytes(7) + b'{"a": {}}'):
        (tmp_path / "no.safetensors").write_bytes(content)
        with pytest.raises(PackageError, match=r"no\.safetensors"):
            package.load_weights(tmp_path / "no.safetensors")
    with torch.no_grad():
        torch.testing.assert_close(package(x), model(x))


def test_models_that_a_package_cannot_hold_are_refused_in_one_sentence(tmp_path: Path) -> None:
    class Shares(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            whole = torch.zeros(4)
            self.register_buffer("whole", whole)
            self.register_buffer("part", whole[:2])

        def forward(self, x: Tensor) -> Tensor:
            self.whole.add_(1)
            return x + self.part

    with pytest.raises(PackageError, match="shares memory with part"):
        torchkiln.aot_compile(Shares(), (torch.ones(2),), path=tmp_path / "model.kiln")
    with pytest.raises(PackageError, match=r"gaps or overlaps in memory; compile with x\.contiguous\(\)"):
        torchkiln.aot_compile(Mlp(), (torch.ones(5, 16)[:, ::2],), path=tmp_path / "model.kiln")
    assert not list(tmp_path.iterdir())


def test_a_graph_that_dynamo_captured_with_symbolic_sizes_is_compiled(tmp_path: Path) -> None:
    captured: list[torch.fx.GraphModule] = []

    def capture(gm: torch.fx.GraphModule, example_inputs: list[Any]) -> Callable[..., Any]:
        captured.append(gm)
        return gm.forward

    torch.compile(lambda x, y: torch.softmax(x * 2, -1) @ y, backend=capture, dynamic=True)(
        torch.randn(5, 8), torch.randn(8, 3)
    )
    (graph,) = captured
    fakes = [node.meta["example_value"] for node in graph.graph.find_nodes(op="placeholder")]
    package = torchkiln.load(torchkiln.compile_fx_aot(graph, fakes, path=tmp_path / "graph.kiln"))
    for rows, columns, width in ((5, 8, 3), (2, 9, 4)):
        x, y = torch.randn(rows, columns), torch.randn(columns, width)
        tensors, numbers = iter((x, y)), {5: rows, 8: columns, 3: width}
        given = [numbers[f.node.hint] if isinstance(f, torch.SymInt) else next(tensors) for f in fakes]
        torch.testing.assert_close(package(*given), (torch.softmax(x * 2, -1) @ y,))


class _Scaled(nn.Module):
    """A layer with a factor for each of its results, which compilers fold into the weight."""

    def __init__(self, factor: float) -> None:
        super().__init__()
        self.linear, self.factor = nn.Linear(8, 8), nn.Parameter(torch.full((8,), factor))

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.linear(x) * self.factor
        return result


@pytest.mark.parametrize("factor", [1e30, float("nan"), float("inf")])
def test_weights_that_cannot_be_prepared_are_used_as_they_are(
    factor: float, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model, x = _Scaled(factor).eval(), torch.randn(4, 8) * 1e-3
    with torch.no_grad():
        package = _loaded(model, (x,), tmp_path)
        torch.testing.assert_close(package(x), model(x), equal_nan=True)
    assert "the package computes with linear.weight as it is" in caplog.text


def test_weights_that_a_package_cannot_take_are_refused_when_they_are_loaded(tmp_path: Path) -> None:
    model, x = _Scaled(2.0).eval(), torch.randn(4, 8)
    with torch.no_grad():
        package = _loaded(model, (x,), tmp_path)
        expected = model(x)
        with pytest.raises(ArgumentError, match=r"The package cannot take these weights: a weight overflows"):
            package.load_weights({"factor": torch.full((8,), 1e30)})
        torch.testing.assert_close(package(x), expected)
        package.load_weights({"factor": torch.full((8,), 4.0)})
        torch.testing.assert_close(package(x), 2 * expected)
