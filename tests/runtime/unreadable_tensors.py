"""Tensors that memory does not tell the values of, at every place where one can reach native code.

``python -m tests.runtime.unreadable_tensors [CASE ...]`` runs cases in this process, each told on a line before it
starts and after it ends: reading where there is no memory ends the process, and the caller sees in which case.
"""

from __future__ import annotations

import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.testing._internal.two_tensor import TwoTensor

import torchkiln

SHAPE = (4, 6)
MODE = FakeTensorMode(allow_non_fake_inputs=True)


def _zeros(like: Tensor) -> Tensor:
    return torch._efficientzerotensor(like.shape, dtype=like.dtype)


def _zeros_at_an_offset(like: Tensor) -> Tensor:
    return torch._efficientzerotensor((2, *like.shape), dtype=like.dtype)[1]


def _freed(like: Tensor) -> Tensor:
    copy = like.detach().clone()
    copy.untyped_storage().resize_(0)
    return copy


def _shrunk(like: Tensor) -> Tensor:
    copy = torch.stack([like.detach(), like.detach()])[1]
    copy.untyped_storage().resize_(like.nbytes)
    return copy


def _fake(like: Tensor) -> Tensor:
    return MODE.from_tensor(like.detach())


# What takes the place of a tensor. Of these, native code is given copies.
COPIED: dict[str, Callable[[Tensor], Tensor]] = {
    "zeros": _zeros,
    "zeros_at_an_offset": _zeros_at_an_offset,
    "negated": lambda like: torch._neg_view(-like.detach()),
    "negated_and_expanded": lambda like: torch._neg_view(torch.ones(1, like.shape[-1])).expand(like.shape),
}
# These, only operators of torch can read.
OTHERS_TO_READ: dict[str, Callable[[Tensor], Tensor]] = {
    "sparse": lambda like: like.detach().to_sparse(),
    "mkldnn": lambda like: like.detach().to_mkldnn(),
    "meta": lambda like: like.detach().to("meta"),
    "fake": _fake,
    "pair": lambda like: TwoTensor(like.detach().clone(), like.detach().clone()),
}
# Eager reads outside of memory here, so there is nothing to compare with.
NO_MEMORY: dict[str, Callable[[Tensor], Tensor]] = {"freed": _freed, "shrunk": _shrunk}
KINDS = {**COPIED, **OTHERS_TO_READ, **NO_MEMORY}


def function(x: Tensor, y: Tensor) -> Tensor:
    return torch.exp(x) * torch.tanh(y)


def _compiled(fn: Callable[..., Any], **options: Any) -> Callable[..., Any]:
    return torch.compile(fn, backend="kiln", fullgraph=True, options={"fallback": False}, **options)


def _inputs() -> tuple[Tensor, Tensor]:
    torch.manual_seed(0)
    return torch.randn(SHAPE), torch.randn(SHAPE)


def _dense(result: Any) -> Any:
    if isinstance(result, FakeTensor) or (isinstance(result, Tensor) and result.device.type == "meta"):
        return type(result), result.device, result.dtype, tuple(result.shape), result.stride()
    if isinstance(result, TwoTensor):
        return _dense(result.a), _dense(result.b)
    if isinstance(result, Tensor):
        return result.detach().to_dense().clone() if result.layout is not torch.strided else result.detach().clone()
    return result


def same(compiled: Callable[[], Any], eager: Callable[[], Any], *, may_refuse: bool = False) -> None:
    """Compiled code answers as eager does: equal values, or an error where that is one.

    With ``may_refuse`` it may also raise where eager answers.
    """
    try:
        wanted = _dense(eager())
    except Exception:
        refused(compiled)
        return
    try:
        found = _dense(compiled())
    except RuntimeError as error:
        if not may_refuse or not str(error).strip():
            raise
        return
    torch.testing.assert_close(found, wanted) if isinstance(wanted, Tensor) else _equal(found, wanted)


def _equal(found: Any, wanted: Any) -> None:
    assert repr(found) == repr(wanted), f"{found} where eager answers {wanted}"


def refused(compiled: Callable[[], Any]) -> None:
    with pytest.raises(RuntimeError, match=r"\w"):
        compiled()


# Places. Each gets the kind of tensor, and is checked against eager on the same one.


def check_input(kind: str) -> None:
    """The first call is made with it: compiled for it by Dynamo, as far as that goes."""
    x, y = _inputs()
    unreadable = KINDS[kind](x)
    compiled = torch.compile(function, backend="kiln", options={"adaptive": False})
    if kind in NO_MEMORY:
        refused(lambda: compiled(unreadable, y))
        return
    for _ in range(3):
        same(lambda: compiled(unreadable, y), lambda: function(unreadable, y))
    torch.testing.assert_close(compiled(x, y), function(x, y))


def _unguarded(*, training: bool) -> Callable[..., Any]:
    """The function without Dynamo's guards, after calls that have opened every fast path."""
    x, y = _inputs()
    x.requires_grad_(training)
    module = torch.fx.symbolic_trace(function)
    with torchkiln.settings(fallback=False):
        compiled = torchkiln.compile_fx(module, [x, y])
    for _ in range(3):
        result = compiled(x, y)
        if training:
            result.sum().backward()
    return compiled


def check_unguarded_input(kind: str) -> None:
    """Compiled for plain tensors and called past all guards."""
    compiled = _unguarded(training=False)
    x, y = _inputs()
    unreadable = KINDS[kind](y)
    if kind in NO_MEMORY:
        refused(lambda: compiled(x, unreadable))
    else:
        same(lambda: compiled(x, unreadable), lambda: function(x, unreadable))
    torch.testing.assert_close(compiled(x, y), function(x, y))


def check_unguarded_training_input(kind: str) -> None:
    compiled = _unguarded(training=True)
    x, y = _inputs()
    unreadable = KINDS[kind](y)

    def step(run: Callable[..., Tensor]) -> Tensor:
        leaf = x.clone().requires_grad_()
        result = run(leaf, unreadable)
        if isinstance(result, FakeTensor) or result.layout is not torch.strided:
            return result
        return torch.autograd.grad(result.sum(), leaf)[0]

    if kind in NO_MEMORY:
        refused(lambda: step(compiled))
    else:
        same(lambda: step(compiled), lambda: step(function))
    torch.testing.assert_close(compiled(x, y), function(x, y))


def _gradient(run: Callable[..., Tensor], gradient: Tensor) -> Tensor:
    x, y = _inputs()
    x.requires_grad_()
    return torch.autograd.grad(run(x, y), x, gradient)[0]


def check_gradient(kind: str) -> None:
    """The gradient of the result, in the first backward, which AOTAutograd runs."""
    _check_step(kind, 0, lambda run: _gradient(run, KINDS[kind](torch.ones(SHAPE))))


def check_later_gradient(kind: str) -> None:
    """And in later ones, which go past AOTAutograd."""
    _check_step(kind, 3, lambda run: _gradient(run, KINDS[kind](torch.ones(SHAPE))))


def check_hook(kind: str) -> None:
    """What a hook unpacks for backward."""
    _check_step(kind, 0, lambda run: _with_hook(run, KINDS[kind]), saved=True)


def check_later_hook(kind: str) -> None:
    _check_step(kind, 3, lambda run: _with_hook(run, KINDS[kind]), saved=True)


def _with_hook(run: Callable[..., Tensor], unpack: Callable[[Tensor], Tensor]) -> Tensor:
    x, y = _inputs()
    x.requires_grad_()
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t, unpack):
        result = run(x, y)
    return torch.autograd.grad(result, x, torch.ones(SHAPE))[0]


def _check_step(kind: str, steps_before: int, step: Callable[..., Tensor], *, saved: bool = False) -> None:
    compiled, ones = _compiled(function), torch.ones(SHAPE)
    for _ in range(steps_before):
        torch.testing.assert_close(_gradient(compiled, ones), _gradient(function, ones))
    if kind in NO_MEMORY:
        refused(lambda: step(compiled))
    elif saved and kind.startswith("zeros"):
        assert torch.equal(step(compiled), torch.zeros(SHAPE))  # a product with what was saved, whatever that is
    else:
        same(lambda: step(compiled), lambda: step(function), may_refuse=True)
    torch.testing.assert_close(_gradient(compiled, ones), _gradient(function, ones))


@contextmanager
def _operator(answer: Callable[[Tensor], Tensor]) -> Iterator[Callable[[Tensor], Tensor]]:
    """An operator of Python code that answers ``answer`` of its argument, and says it was a plain tensor."""
    with torch.library._scoped_library("kiln_unreadable", "FRAGMENT") as library:
        library.define("answer(Tensor x) -> Tensor")
        library.impl("answer", answer, "CPU")
        library.impl("answer", torch.empty_like, "Meta")
        yield torch.ops.kiln_unreadable.answer


def check_result_of_an_operator(kind: str) -> None:
    """In the middle of a graph, for a kernel and for an operator of torch to read."""
    _check_operator(kind, dynamic=False)


def check_result_of_an_operator_of_symbolic_sizes(kind: str) -> None:
    _check_operator(kind, dynamic=True)


def _check_operator(kind: str, *, dynamic: bool) -> None:
    with _operator(KINDS[kind]) as operator:

        def fn(x: Tensor) -> tuple[Tensor, Tensor]:
            middle = operator(x + 1)
            return middle * 2, middle @ x.t()

        compiled, x = _compiled(fn, dynamic=dynamic), _inputs()[0]
        if kind not in COPIED:
            refused(lambda: compiled(x))
            return
        for _ in range(2):
            for found, wanted in zip(compiled(x), fn(x), strict=True):
                torch.testing.assert_close(found, wanted)


def check_body(kind: str) -> None:
    """An input that only the body of a higher-order operator reads."""

    def fn(x: Tensor, y: Tensor) -> Tensor:
        return torch.cond(y.sum() > -1e9, lambda t: torch.exp(t) * 2, lambda t: t - 1, (x,))

    x, y = _inputs()
    unreadable = KINDS[kind](x)
    compiled = torch.compile(fn, backend="kiln", options={"adaptive": False})
    if kind in NO_MEMORY:
        refused(lambda: compiled(unreadable, y))
    else:
        same(lambda: compiled(unreadable, y), lambda: torch.exp(unreadable) * 2)
    torch.testing.assert_close(compiled(x, y), fn(x, y))


def check_sizes(kind: str) -> None:
    """With symbolic sizes."""
    compiled = torch.compile(function, backend="kiln", dynamic=True, options={"adaptive": False})

    def check(rows: int) -> None:
        x, y = torch.randn(rows, 6), torch.randn(rows, 6)
        unreadable = KINDS[kind](x)
        if kind in NO_MEMORY:
            refused(lambda: compiled(unreadable, y))
        else:
            same(lambda: compiled(unreadable, y), lambda: function(unreadable, y))
        torch.testing.assert_close(compiled(x, y), function(x, y))

    check(4)
    check(5)


def check_written_input(kind: str) -> None:
    """The graph writes to it."""

    def fn(x: Tensor, y: Tensor) -> Tensor:
        x.mul_(y)
        return x + 1

    compiled = torch.compile(fn, backend="kiln", options={"adaptive": False})

    def call(run: Callable[..., Tensor]) -> Tensor:
        x, y = _inputs()
        unreadable = KINDS[kind](x)
        result = run(unreadable, y)
        written = _dense(unreadable)
        return torch.stack([result, written]) if isinstance(written, Tensor) and type(result) is Tensor else result

    if kind in NO_MEMORY:
        refused(lambda: call(compiled))
    else:
        same(lambda: call(compiled), lambda: call(fn))


PLACES = {name.removeprefix("check_"): check for name, check in list(globals().items()) if name.startswith("check_")}


# Calls that are no combination of the above.


def fake_mode_over_real_tensors() -> None:
    x, y = _inputs()
    compiled = _compiled(function)
    torch.testing.assert_close(compiled(x, y), function(x, y))
    with MODE:
        found = compiled(x, y)
    assert isinstance(found, FakeTensor)
    assert found.shape == SHAPE
    torch.testing.assert_close(compiled(x, y), function(x, y))


def fake_mode_without_inputs() -> None:
    def fn() -> Tensor:
        return torch.tensor([1.0, 2.0]) * torch.arange(2)

    compiled = _compiled(fn)
    with MODE:
        assert isinstance(compiled(), FakeTensor)
    torch.testing.assert_close(compiled(), fn())


def fake_tensors_keep_strides_and_views() -> None:
    def fn(x: Tensor) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
        return (x * 2).t(), x[1:], {"sum": x.sum(0, keepdim=True).to(torch.float64)}

    with FakeTensorMode():
        x = torch.randn(6, 4).t()
        found, wanted = _compiled(fn)(x), fn(x)
    for a, b in zip(torch.utils._pytree.tree_leaves(found), torch.utils._pytree.tree_leaves(wanted), strict=True):
        assert isinstance(a, FakeTensor)
        assert (a.shape, a.stride(), a.dtype, a.device) == (b.shape, b.stride(), b.dtype, b.device)
    assert torch._C._is_alias_of(found[1], x)


def fake_tensors_train() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.LayerNorm(8), torch.nn.GELU(), torch.nn.Linear(8, 1))
    with FakeTensorMode(allow_non_fake_inputs=True):
        fake = torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.LayerNorm(8), torch.nn.GELU(), torch.nn.Linear(8, 1))
        _compiled(fake)(torch.randn(SHAPE)).sum().backward()
    for parameter in fake.parameters():
        assert isinstance(parameter.grad, FakeTensor)
        assert parameter.grad.shape == parameter.shape
    x = torch.randn(SHAPE)
    torch.testing.assert_close(_compiled(model)(x), model(x))


def fake_tensors_of_symbolic_sizes() -> None:
    from torch.fx.experimental.symbolic_shapes import ShapeEnv

    mode = FakeTensorMode(shape_env=ShapeEnv(), allow_non_fake_inputs=True)
    x = _inputs()[0]
    fake = mode.from_tensor(x)
    compiled = torch.compile(lambda t: torch.exp(t) * 2, backend="kiln", dynamic=True)
    torch.testing.assert_close(compiled(x), torch.exp(x) * 2)
    found = compiled(fake)
    assert isinstance(found, FakeTensor)
    assert tuple(int(size) for size in found.shape) == SHAPE


def wrappers_of_transforms() -> None:
    compiled = _unguarded(training=False)
    x, y = torch.randn(3, *SHAPE), torch.randn(3, *SHAPE)
    torch.testing.assert_close(torch.func.vmap(compiled)(x, y), function(x, y))
    found = torch.func.grad(lambda t: compiled(t, y).sum())(x)
    torch.testing.assert_close(found, torch.func.grad(lambda t: function(t, y).sum())(x))
    found = torch.func.jvp(lambda t: compiled(t, y), (x,), (torch.ones_like(x),))
    torch.testing.assert_close(found, torch.func.jvp(lambda t: function(t, y), (x,), (torch.ones_like(x),)))


def zero_tangents_of_forward_mode() -> None:
    from torch.autograd import forward_ad

    compiled = _compiled(function)
    x, y = _inputs()
    for _ in range(2):
        with forward_ad.dual_level():
            dual = forward_ad.make_dual(x, _zeros(x)), forward_ad.make_dual(y, torch.ones_like(y))
            found, wanted = forward_ad.unpack_dual(compiled(*dual)), forward_ad.unpack_dual(function(*dual))
            torch.testing.assert_close(found.primal, wanted.primal)
            torch.testing.assert_close(found.tangent, wanted.tangent)


def inputs_that_nobody_reads_may_be_anything() -> None:
    module = torch.fx.symbolic_trace(lambda x, y: x * 2)
    x, y = _inputs()
    with torchkiln.settings(fallback=False):
        compiled = torchkiln.compile_fx(module, [x, y])
    for unread in (y, _freed(y), _fake(y), y.to("meta"), y.to_sparse()):
        torch.testing.assert_close(compiled(x, unread), x * 2)


def empty_tensors_have_no_memory_and_need_none() -> None:
    compiled = _compiled(lambda x, y: (x * 2).sum(0) + y)
    x, y = torch.empty(0, 6), torch.randn(6)
    for empty in (x, torch.empty(5, 6)[5:], torch._efficientzerotensor(0, 6)):
        torch.testing.assert_close(compiled(empty, y), y)


def the_first_compilation_of_a_process_in_inference_mode() -> None:
    """Tensors made there lack keys that others have."""
    x, y = _inputs()
    compiled = _compiled(function)
    with torch.inference_mode():
        torch.testing.assert_close(compiled(x, y), function(x, y))
        made = torch.ones(SHAPE)
        torch.testing.assert_close(compiled(made, y), function(made, y))
    torch.testing.assert_close(compiled(x, y), function(x, y))


OTHERS: dict[str, Callable[[], None]] = {
    check.__name__: check
    for check in (
        the_first_compilation_of_a_process_in_inference_mode,
        fake_mode_over_real_tensors,
        fake_mode_without_inputs,
        fake_tensors_keep_strides_and_views,
        fake_tensors_train,
        fake_tensors_of_symbolic_sizes,
        wrappers_of_transforms,
        zero_tangents_of_forward_mode,
        inputs_that_nobody_reads_may_be_anything,
        empty_tensors_have_no_memory_and_need_none,
    )
}
# Dynamo itself refuses some combinations, and others are no different from those that are here.
_LEFT_OUT = {
    "unguarded_input": {"negated_and_expanded"},
    "unguarded_training_input": {"negated_and_expanded", "mkldnn", "zeros_at_an_offset"},
    "gradient": {"mkldnn", "shrunk", "zeros_at_an_offset"},
    "later_gradient": {"mkldnn"},
    "hook": {"negated_and_expanded", "mkldnn", "shrunk", "zeros_at_an_offset"},
    "later_hook": {"negated_and_expanded", "mkldnn"},
    "result_of_an_operator": {"negated_and_expanded", "zeros_at_an_offset"},
    "result_of_an_operator_of_symbolic_sizes": {"negated_and_expanded", "zeros_at_an_offset", "sparse", "mkldnn"},
    "body": {"zeros_at_an_offset", "negated", "negated_and_expanded", "mkldnn", "sparse", "pair"},
    "sizes": {"zeros_at_an_offset", "negated_and_expanded", "mkldnn", "sparse", "pair"},
    "written_input": {"zeros_at_an_offset", "negated_and_expanded", "mkldnn", "sparse", "meta"},
}
CASES = (
    *OTHERS,
    *(f"{kind} as {place}" for place in PLACES for kind in KINDS if kind not in _LEFT_OUT.get(place, ())),
)


def run(case: str) -> None:
    torch._dynamo.reset()
    if case in OTHERS:
        OTHERS[case]()
    else:
        kind, place = case.split(" as ")
        PLACES[place](kind)


def main(cases: list[str]) -> None:
    for case in cases:
        print(f"begin\t{case}", flush=True)
        try:
            run(case)
        except BaseException:
            text = traceback.format_exc()[-3000:].replace("\n", "\\n")
            print(f"failed\t{case}\t{text}", flush=True)
        else:
            print(f"passed\t{case}", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:] or list(CASES))
