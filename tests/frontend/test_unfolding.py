"""Layers whose weights are refused, and the cache: what is stored follows from keys, never from values of weights."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import torchkiln
from tests.cache_use import CacheUse
from torchkiln import recorder
from torchkiln.artifact.codec import decode_function, encode
from torchkiln.cache import open_cache
from torchkiln.errors import DiscardedError, FallbackWarning, OptionError

GOOD, REFUSED = 2.0, 1e30


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A cache of its own, and nobody who listens: they would make the stages run."""
    monkeypatch.setattr(recorder, "_listeners", ())
    with torchkiln.settings(cache=True, cache_dir=str(tmp_path / "cache"), fallback=False, adaptive=False):
        yield tmp_path / "cache"


class _Model(nn.Module):
    """Two layers, each with a norm that is folded into its weight unless the norm's is too large."""

    def __init__(self, first: float = GOOD, second: float = GOOD) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList([nn.Conv2d(3, 4, 3), nn.Conv2d(4, 4, 3)])
        self.norms = nn.ModuleList([nn.BatchNorm2d(4), nn.BatchNorm2d(4)])
        self.scale(first, second)
        self.eval()

    def scale(self, *factors: float) -> None:
        for norm, factor in zip(self.norms, factors, strict=True):
            nn.init.constant_(norm.weight, factor)  # type: ignore[arg-type]

    def forward(self, x: Tensor) -> Tensor:
        for layer, norm in zip(self.layers, self.norms, strict=True):
            x = norm(layer(x)).relu()
        return x


def _image() -> Tensor:
    return torch.randn(2, 3, 6, 6)


def _check(call: Callable[..., Any], model: nn.Module, image: Tensor | None = None, error: float = 1e-5) -> None:
    image = _image() if image is None else image
    with torch.no_grad():
        expected = model(image)
        found = call(image)
    torch.testing.assert_close(found, expected, rtol=0, atol=error * float(expected.abs().max()))


def _process(
    folder: Path,
    *scales: tuple[float, float],
    around: Callable[[], AbstractContextManager[object]] = nullcontext,
    error: float = 1e-5,
    **options: Any,
) -> Counter[str]:
    """What a new process asks of the cache for the model, which it calls with norms of these scales."""
    torch._dynamo.reset()
    torchkiln.reset_stats()
    use, model = CacheUse(), _Model()
    call = torch.compile(model, backend="kiln", **options)
    with use.counted(folder):
        for each in scales:
            model.scale(*each)
            with around():
                for _ in range(2):
                    _check(call, model, error=error)
    of_process = ("target", "support")
    return Counter({f"{kind} {what}": n for (kind, what), n in use.counts.items() if kind not in of_process})


_FOUND = Counter({"function hits": 1})
_FOUND_UNFOLDED = _FOUND + Counter({"unfolded hits": 1})
_COMPILED = Counter({"function misses": 1, "function stored": 1, "graph misses": 2, "graph stored": 2})
# The second form of the graph, and what is left to compute of weights alone.
_COMPILED_UNFOLDED = Counter({"unfolded misses": 1, "unfolded stored": 1, "graph misses": 2, "graph stored": 2})


def test_a_process_finds_the_folded_function_whatever_the_weights_were_of_the_one_that_stored_it(folder: Path) -> None:
    assert _process(folder, (REFUSED, GOOD)) == _COMPILED + _COMPILED_UNFOLDED
    assert _process(folder, (GOOD, GOOD)) == _FOUND
    assert [graph.kind for graph in torchkiln.stats().by_graph] == ["inference", "weights"]
    assert _process(folder, (REFUSED, GOOD)) == _FOUND_UNFOLDED


def test_a_process_with_refused_weights_compiles_what_it_lacks_beside_a_function_it_found(folder: Path) -> None:
    assert _process(folder, (GOOD, GOOD)) == _COMPILED
    assert _process(folder, (REFUSED, GOOD)) == _FOUND + _COMPILED_UNFOLDED
    assert _process(folder, (REFUSED, GOOD)) == _FOUND_UNFOLDED
    assert _process(folder, (GOOD, GOOD)) == _FOUND


def _payloads(folder: Path, kinds: tuple[str, ...] = ("function", "unfolded")) -> dict[tuple[str, str], bytes]:
    cache = open_cache(torchkiln.config.resolve())
    assert cache is not None
    assert cache.folder.path == folder
    return {
        (head.key.kind, file.digest): cache.entry(file.digest).payload
        for file, head in cache.heads()
        if head.key.kind in kinds
    }


@pytest.mark.parametrize(
    ("around", "error"),
    [(nullcontext, 1e-5), (torch.inference_mode, 1e-5), (lambda: torch.autocast("cpu", torch.bfloat16), 0.05)],
    ids=["no_grad", "inference_mode", "autocast"],
)
def test_entries_are_the_same_bytes_in_whichever_order_processes_came(
    folder: Path, around: Callable[[], AbstractContextManager[object]], error: float
) -> None:
    """One traces the graph once and keeps it; the other finds the function, and traces when a weight is refused."""
    _process(folder, (REFUSED, GOOD), around=around, error=error)
    first = _payloads(folder)
    for file in folder.glob("*.entry"):
        file.unlink()
    _process(folder, (GOOD, GOOD), around=around, error=error)
    found = _process(folder, (REFUSED, GOOD), around=around, error=error)
    assert found["function hits"] == found["unfolded stored"] == 1
    assert _payloads(folder) == first


def _freeze(model: _Model) -> None:
    torch._dynamo.reset()
    torchkiln.reset_stats()
    image = _image()
    with torch.no_grad():
        expected = model(image)
        found = torchkiln.freeze(model, discard_parameters=True)(image)
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)


def _freeze_good(folder: Path) -> None:
    model = _Model()
    _freeze(model)
    with pytest.raises(DiscardedError):
        model.layers[0].weight.data  # noqa: B018


def _freeze_refused(folder: Path) -> None:
    with pytest.raises(OptionError, match="Nothing can be discarded, since a weight overflows"):
        _freeze(_Model(REFUSED))


@pytest.mark.parametrize("order", [(_freeze_good, _freeze_refused), (_freeze_refused, _freeze_good)])
def test_weights_are_discarded_where_they_can_be_whatever_an_earlier_process_froze(
    folder: Path, order: tuple[Callable[[Path], None], ...]
) -> None:
    for process in (*order, *order):
        process(folder)
    assert "lowering" not in torchkiln.stats().seconds, "the last process found all in the cache"


def test_layers_refused_at_different_calls_have_entries_of_their_own(folder: Path) -> None:
    states = [(REFUSED, GOOD), (GOOD, REFUSED), (REFUSED, REFUSED), (GOOD, GOOD), (REFUSED, GOOD)]
    found = _process(folder, *states)
    assert found["unfolded stored"] == 3
    assert _process(folder, *reversed(states)) == _FOUND + Counter({"unfolded hits": 3})


def test_a_graph_of_symbolic_sizes_is_stored_with_all_layers_folded(folder: Path) -> None:
    """It runs as captured while weights are refused."""
    _process(folder, (REFUSED, GOOD), dynamic=True)
    stored = _payloads(folder)
    assert [kind for kind, _ in stored] == ["function"]
    found = _process(folder, (GOOD, GOOD), (REFUSED, GOOD), dynamic=True)
    # Dynamo asks first with floats as inputs, and then without.
    assert found == _FOUND + Counter({"function misses": 1})
    assert _payloads(folder) == stored


def test_threads_that_find_a_function_compile_what_it_lacks_once(folder: Path) -> None:
    _process(folder, (GOOD, GOOD))
    torch._dynamo.reset()
    torchkiln.reset_stats()
    model, image, use = _Model(), _image(), CacheUse()
    call, wrong = torch.compile(model, backend="kiln"), list[BaseException]()
    _check(call, model)
    model.scale(REFUSED, GOOD)
    begin = threading.Barrier(4)

    def check() -> None:
        begin.wait()
        try:
            _check(call, model, image)
        except BaseException as error:
            wrong.append(error)

    threads = [threading.Thread(target=check) for _ in range(4)]
    with use.counted(folder):
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert not wrong
    assert use.counts["unfolded", "stored"] == use.counts["unfolded", "misses"] == 1


def test_a_pass_registered_before_a_weight_is_refused_leaves_no_entry_without_it(folder: Path) -> None:
    """The first form of the graph was compiled without the pass, and the key of both says so."""
    model = _Model()
    call = torch.compile(model, backend="kiln")
    _check(call, model)
    stored = _payloads(folder)
    model.scale(REFUSED, GOOD)

    @torchkiln.graph_pass(name="a late pass", stage="post_grad")
    def nothing(graph_module: torch.fx.GraphModule) -> bool:
        return False

    try:
        _check(call, model)
    finally:
        torchkiln.remove_graph_pass("a late pass")
    assert _payloads(folder) == stored


def test_a_pass_registered_before_the_backward_leaves_no_function_without_it(folder: Path) -> None:
    x = torch.randn(4, requires_grad=True)
    result = torch.compile(lambda x: x.exp().sin(), backend="kiln")(x)
    stored = _payloads(folder)

    @torchkiln.graph_pass(name="a late pass", stage="post_grad")
    def nothing(graph_module: torch.fx.GraphModule) -> bool:
        return False

    try:
        result.sum().backward()
    finally:
        torchkiln.remove_graph_pass("a late pass")
    assert _payloads(folder) == stored


def test_a_damaged_entry_of_a_refused_layer_is_compiled_again(folder: Path) -> None:
    _process(folder, (REFUSED, GOOD))
    ((_, digest),) = _payloads(folder, ("unfolded",))
    file = folder / f"{digest}.entry"
    file.write_bytes(file.read_bytes()[:-1] + b"?")
    assert _process(folder, (REFUSED, GOOD))["unfolded stored"] == 1
    assert _process(folder, (REFUSED, GOOD)) == _FOUND_UNFOLDED


def test_an_entry_of_a_refused_layer_that_cannot_be_loaded_is_compiled_again(folder: Path) -> None:
    _process(folder, (REFUSED, GOOD))
    [((_, digest), payload)] = _payloads(folder, ("unfolded",)).items()
    cache = open_cache(torchkiln.config.resolve())
    assert cache is not None
    broken = decode_function(payload).with_graphs(lambda graph: replace(graph, step_code=graph.step_code[:100]))
    cache.put(cache.entry(digest).key, encode(broken))
    assert _process(folder, (REFUSED, GOOD))["unfolded stored"] == 1
    assert _process(folder, (REFUSED, GOOD)) == _FOUND_UNFOLDED


@pytest.mark.parametrize("found", [False, True])
def test_a_pass_that_fails_for_a_refused_layer_has_the_call_run_eagerly(folder: Path, found: bool) -> None:
    switch = {"fails": False}

    @torchkiln.graph_pass(name="a pass that fails", stage="joint")
    def failing(graph_module: torch.fx.GraphModule) -> bool:
        if switch["fails"]:
            raise RuntimeError("this pass fails")
        return False

    try:
        if found:
            _process(folder, (GOOD, GOOD))
        torch._dynamo.reset()
        model = _Model()
        call = torch.compile(model, backend="kiln", options={"fallback": True})
        _check(call, model)
        model.scale(REFUSED, GOOD)
        switch["fails"] = True
        with pytest.warns(FallbackWarning, match="this pass fails"):
            _check(call, model)
        _check(call, model)
    finally:
        torchkiln.remove_graph_pass("a pass that fails")


def test_training_of_a_model_with_refused_weights_is_stored_and_found_as_ever(folder: Path) -> None:
    _process(folder, (REFUSED, GOOD))
    for expected in ({"misses", "stored"}, {"hits"}):
        torch._dynamo.reset()
        use, model = CacheUse(), _Model(REFUSED)
        with use.counted(folder):
            run, image = torch.compile(model, backend="kiln"), _image()
            found = torch.autograd.grad(run(image).sum(), model.norms[0].bias)  # type: ignore[arg-type]
            right = torch.autograd.grad(model(image).sum(), model.norms[0].bias)  # type: ignore[arg-type]
        torch.testing.assert_close(found, right, atol=1e-4, rtol=1e-4)
        assert {what for kind, what in use.counts if kind == "function"} == expected
        assert not any(kind == "unfolded" for kind, _ in use.counts)
