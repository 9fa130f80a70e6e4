"""Frozen models: compiled for inference alone, and with their own weights discarded where that is asked for."""

from __future__ import annotations

import copy
import gc
import io
import threading
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils import prune

import torchkiln
from torchkiln.errors import DiscardedError, OptionError


def _model() -> nn.Module:
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 36, 5))
    model[1].running_mean.normal_()  # type: ignore[union-attr, operator]
    return model.eval()


def _image() -> torch.Tensor:
    return torch.randn(2, 3, 8, 8)


def _frozen(model: nn.Module, **options: Any) -> Callable[..., Any]:
    return torchkiln.freeze(model, **options)


@pytest.mark.parametrize("discard", [False, True])
def test_a_frozen_model_gives_what_the_model_gave(discard: bool) -> None:
    model, images = _model(), [_image() for _ in range(3)]
    with torch.no_grad():
        expected = [model(image) for image in images]
        frozen = _frozen(model, discard_parameters=discard)
        for image, right in zip(images, expected, strict=True):
            torch.testing.assert_close(frozen(image), right)


@pytest.mark.parametrize("discard", [False, True])
def test_a_call_that_would_record_gradients_is_refused_in_one_sentence(discard: bool) -> None:
    frozen = _frozen(_model(), discard_parameters=discard)
    with pytest.raises(OptionError, match=r"^Freezing is for inference, and this call would record gradients: .*\.$"):
        frozen(_image())


def test_the_setting_refuses_training_too() -> None:
    model = _model()
    compiled = torch.compile(model, backend="kiln", options={"freezing": True})
    with pytest.raises(OptionError, match="Freezing is for inference"):
        compiled(_image())
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    torch.testing.assert_close(compiled(image := _image()), model(image))


@pytest.mark.parametrize("layer", [nn.BatchNorm1d(4), nn.Dropout(0.1)])
def test_a_model_in_training_mode_is_refused(layer: nn.Module) -> None:
    with pytest.raises(OptionError, match=f"a {type(layer).__name__} is in training mode"):
        torchkiln.freeze(nn.Sequential(nn.Linear(4, 4), layer))


def test_what_is_no_module_is_refused_in_one_sentence() -> None:
    with pytest.raises(OptionError, match=r"^torchkiln\.freeze takes a module, not function; .*\.$"):
        _frozen(torch.compile(lambda x: x + 1))  # type: ignore[arg-type]


def test_training_mode_is_of_no_matter_to_a_model_that_does_the_same_in_it() -> None:
    model, x = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4)), torch.randn(2, 4)
    with torch.no_grad():
        torch.testing.assert_close(_frozen(model)(x), model(x))


def test_a_changed_weight_is_prepared_again() -> None:
    model, image = _model(), _image()
    frozen = _frozen(model)
    with torch.no_grad():
        frozen(image)
        model[1].running_mean.add_(1)  # type: ignore[union-attr, operator]
        model[0].weight.mul_(2)  # type: ignore[union-attr, operator]
        torch.testing.assert_close(frozen(image), model(image))


_USES: dict[str, Callable[[nn.Module], object]] = {
    "a call": lambda model: model(_image()),
    "state_dict": lambda model: model.state_dict(),
    "to": lambda model: model.to(torch.float64),
    "deepcopy": lambda model: copy.deepcopy(model),
    "save": lambda model: torch.save(model, io.BytesIO()),
    "load_state_dict": lambda model: model.load_state_dict(_model().state_dict()),
    "arithmetic": lambda model: model[0].weight + 1,  # type: ignore[index]
    "a write": lambda model: model[0].weight.add_(1),  # type: ignore[index]
    "data": lambda model: model[0].weight.data,  # type: ignore[index]
    "assignment of data": lambda model: setattr(model[0].weight, "data", torch.zeros(8, 3, 3, 3)),  # type: ignore[index]
    "an element": lambda model: model[0].weight[0, 0, 0, 0].item(),  # type: ignore[index]
    "numpy": lambda model: model[0].weight.detach().numpy(),  # type: ignore[index]
}


@pytest.mark.parametrize("name", _USES)
def test_a_use_of_a_model_whose_weights_were_discarded_raises_one_sentence(name: str) -> None:
    model, image = _model(), _image()
    frozen = _frozen(model, discard_parameters=True)
    with torch.no_grad():
        expected = frozen(image)
        with pytest.raises(DiscardedError, match="discarded its weights"):
            _USES[name](model)
        assert torch.equal(frozen(image), expected)


def test_a_model_whose_weights_were_discarded_can_be_printed_and_walked() -> None:
    model = _model()
    with torch.no_grad():
        _frozen(model, discard_parameters=True)(_image())
    assert "Conv2d(3, 8" in str(model)
    assert str(model[0].weight) == "DiscardedTensor(size=(8, 3, 3, 3), dtype=torch.float32)"  # type: ignore[index]
    assert sum(p.numel() for p in model.parameters()) == 8 * 27 + 8 + 16 + 5 * 288 + 5
    assert "DiscardedTensor" in repr(list(model.parameters()))
    weight: Any = model[0].weight  # type: ignore[index]
    assert (f"{weight}", len(weight), weight.nbytes, weight.is_floating_point()) == (str(weight), 8, 8 * 27 * 4, True)
    with pytest.raises(DiscardedError, match=r"^data was asked of"):
        _ = weight.data


def test_weights_that_calls_read_as_they_are_stay_in_the_model() -> None:
    """The model goes on sharing them."""
    model = nn.Sequential(nn.Embedding(10, 8), nn.Conv1d(8, 8, 3), nn.BatchNorm1d(8)).eval()
    model[0] = _Transposed(model[0])
    tokens = torch.randint(10, (2, 6))
    with torch.no_grad():
        frozen = _frozen(model, discard_parameters=True)
        frozen(tokens)
        table = model[0].inner.weight
        assert type(table) is nn.Parameter
        before = frozen(tokens)
        table.mul_(0)
        after = frozen(tokens)
    assert not torch.equal(before, after)


class _Transposed(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x).transpose(1, 2)


def test_discarded_weights_are_freed() -> None:
    model = _model()
    weight = weakref.ref(model[0].weight)  # type: ignore[index]
    with torch.no_grad():
        frozen = _frozen(model, discard_parameters=True)
        frozen(_image())
        gc.collect()
        assert weight() is None
        frozen(_image())


def test_a_tensor_that_somebody_else_holds_is_still_theirs() -> None:
    model = _model()
    weight = model[0].weight  # type: ignore[index]
    before = weight.detach().clone()  # type: ignore[union-attr, operator]
    with torch.no_grad():
        _frozen(model, discard_parameters=True)(_image())
    assert torch.equal(weight, before)  # type: ignore[arg-type]


def test_a_weight_put_in_the_place_of_a_discarded_one_is_not_ignored() -> None:
    model, image = _model(), _image()
    with torch.no_grad():
        frozen = _frozen(model, discard_parameters=True)
        frozen(image)
        model[0].weight = nn.Parameter(torch.zeros(8, 3, 3, 3))  # type: ignore[index]
        with pytest.raises(DiscardedError, match=r"^The tensor 'weight' of a frozen model was replaced, but .*\.$"):
            frozen(image)


def test_a_call_that_needs_further_code_is_refused_once_weights_are_discarded() -> None:
    model = _model()[:3]  # type: ignore[index]
    with torch.no_grad():
        frozen = _frozen(model, discard_parameters=True, options={"fallback": False})
        frozen(_image())
        for other in (torch.randn(5, 3, 16, 16), _image()[:1]):
            with pytest.raises(DiscardedError, match="needs further code"):
                frozen(other)
        with torch.compiler.set_stance("force_eager"), pytest.raises(DiscardedError, match="run eagerly"):
            frozen(_image())


def test_a_refused_call_leaves_the_code_of_earlier_calls_in_use() -> None:
    """Dynamo would make the size symbolic, and serve the first size by that code too."""
    model, image = _model()[:3], _image()  # type: ignore[index]
    with torch.no_grad():
        expected = model(image)
        frozen = _frozen(model, discard_parameters=True)
        frozen(image)
        for _ in range(2):
            with pytest.raises(DiscardedError):
                frozen(torch.cat([image, image]))
            torch.testing.assert_close(frozen(image), expected)


def test_a_weight_swapped_for_a_discarded_one_is_not_ignored() -> None:
    model, image = _model(), _image()
    with torch.no_grad():
        frozen = _frozen(model, discard_parameters=True)
        frozen(image)
        torch.utils.swap_tensors(model[0].weight, nn.Parameter(torch.zeros(8, 3, 3, 3)))  # type: ignore[index]
        with pytest.raises(DiscardedError, match="was replaced"):
            frozen(image)


def test_a_pruned_model_may_be_discarded() -> None:
    """Its weight is a plain attribute that was computed with gradients, which torch cannot copy."""
    model, image = _model(), _image()
    prune.random_unstructured(model[0], "weight", 0.5)  # type: ignore[index, arg-type]
    with torch.no_grad():
        expected = model(image)
        frozen = _frozen(model, discard_parameters=True)
        torch.testing.assert_close(frozen(image), expected)
        torch.testing.assert_close(frozen(image), expected)


def test_a_model_that_cannot_be_copied_is_refused_in_one_sentence() -> None:
    model = _model()
    model.lock = threading.Lock()  # type: ignore[assignment]
    with pytest.raises(OptionError, match=r"^discard_parameters compiles a copy of the model, .*lock.*discarding\.$"):
        _frozen(model, discard_parameters=True)


def test_weights_may_be_tied() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Conv2d(4, 4, 1), nn.Conv2d(4, 4, 1)
            self.second.weight = self.first.weight
            self.norm = nn.BatchNorm2d(4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.norm(self.second(self.norm(self.first(x))))

    model, x = Tied().eval(), torch.randn(2, 4, 9, 9)
    with torch.no_grad():
        expected = model(x)
        frozen = _frozen(model, discard_parameters=True)
        torch.testing.assert_close(frozen(x), expected)
        torch.testing.assert_close(frozen(x), expected)


def test_threads_may_make_the_first_call() -> None:
    model, image = _model(), _image()
    with torch.no_grad():
        expected = model(image)
    frozen, results = _frozen(model, discard_parameters=True), list[torch.Tensor]()

    def call() -> None:
        with torch.no_grad():
            results.append(frozen(image))

    threads = [threading.Thread(target=call) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(results) == 4
    for result in results:
        torch.testing.assert_close(result, expected)


class _Scaled(nn.Module):
    """A linear layer whose factor is too large to be folded into its weight."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.factor = nn.Linear(8, 8), nn.Parameter(torch.full((8,), 1e30))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.linear(x) * self.factor
        return result


def test_weights_that_cannot_be_prepared_are_not_discarded() -> None:
    model, x = _Scaled().eval(), torch.randn(4, 8) * 1e-3
    with torch.no_grad(), pytest.raises(OptionError, match="Nothing can be discarded, since a weight overflows"):
        torchkiln.freeze(model, discard_parameters=True)(x)
    with torch.no_grad():
        torch.testing.assert_close(torchkiln.freeze(model)(x), model(x))


def test_a_first_call_that_was_refused_may_be_tried_again() -> None:
    model, x = _Scaled().eval(), torch.randn(4, 8)
    weight = weakref.ref(model.linear.weight)
    frozen = torchkiln.freeze(model, discard_parameters=True)
    with torch.no_grad():
        for _ in range(2):
            with pytest.raises(OptionError, match="Nothing can be discarded"):
                frozen(x)
        model.factor.fill_(2.0)
        expected = model(x)
        torch.testing.assert_close(frozen(x), expected)
        gc.collect()
        assert weight() is None
        torch.testing.assert_close(frozen(x), expected)


def test_a_first_call_that_is_tried_again_discards_nothing_for_graphs_of_the_refused_one() -> None:
    """Refused weights have a graph of their own, with weights prepared of the other layers."""
    model, image = _model(), _image()
    model.append(nn.Unflatten(1, (5, 1, 1))).append(nn.Conv2d(5, 5, 1)).append(nn.BatchNorm2d(5)).eval()
    nn.init.constant_(model[1].weight, 1e30)
    frozen = torchkiln.freeze(model, discard_parameters=True)
    with torch.no_grad():
        with pytest.raises(OptionError, match="Nothing can be discarded"):
            frozen(image)
        nn.init.constant_(model[1].weight, 2.0)
        expected = model(image)
        for _ in range(2):
            torch.testing.assert_close(frozen(image), expected)
    with pytest.raises(DiscardedError):
        model[0].weight.data  # noqa: B018
