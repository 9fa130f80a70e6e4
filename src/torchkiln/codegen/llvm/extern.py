"""Calls of torch operators from native code, by the first of three routes that fits.

``typed``: a function of torch's C ABI for this operator, writing into planned memory where it can. ``dispatcher``: any
operator whose arguments the stable ABI carries; a call that fails is made once more through Python, which raises what
eager raises. ``python``: a function of the graph's tuple, called with the interpreter held; higher-order operators.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from itertools import chain, zip_longest

import torch

from torchkiln.artifact.artifact import Route
from torchkiln.artifact.calls import Call, HigherOrderCall, NumberArgument, OperatorCall, TensorArgument
from torchkiln.codegen.llvm import bf16_gemm, blas, onednn, small_matmul, stable_abi
from torchkiln.codegen.llvm.frame import Frame, is_floating
from torchkiln.codegen.llvm.instructions import double_literal
from torchkiln.codegen.llvm.scans import emit_scan
from torchkiln.codegen.llvm.sorting import emit_sort
from torchkiln.codegen.llvm.stable_abi import NotCarried, Present, StableValue
from torchkiln.codegen.llvm.status import REFUSED
from torchkiln.codegen.llvm.support import declarations
from torchkiln.graph.effects import is_ordered_effect, is_torchs_own
from torchkiln.graph.native_operators import SCAN, SORT
from torchkiln.ir.higher_order import HigherOrder
from torchkiln.ir.index import Extent, Index
from torchkiln.ir.native_calls import is_check, is_computed
from torchkiln.ir.program import BF16_MATMULS, WRITES_INTO, Buffer, ExternArgument, ExternCall, StridedView
from torchkiln.schedule.dependencies import tensors_of
from torchkiln.target import Target

# Registers a call through Python and answers its place in the graph's tuple.
RegisterCall = Callable[[Call], int]


def fills_planned_memory(call: ExternCall) -> bool:
    """Whether the call writes its results into memory that must be there before it."""
    return is_computed(call) or (call.target in _WRITES_OUT and _typed(call) is not None)


def calls_blas(call: ExternCall, buffers: Mapping[str, Buffer], target: Target) -> bool:
    """Whether the call is one of BLAS, which reads and writes memory past torch, for all sizes that it takes."""
    if call.target in BF16_MATMULS:
        return True
    result = _result(call, buffers)
    return _typed(call) is not None and (
        blas.is_direct(call, result, target) or small_matmul.may_be_small(call, result, target)
    )


def _result(call: ExternCall, buffers: Mapping[str, Buffer]) -> Buffer | None:
    name = call.results[0] if len(call.results) == 1 else None
    return None if name is None else buffers[name]


def emit_extern(frame: Frame, call: ExternCall, python_call: RegisterCall) -> Route:
    """Write one call, and answer its route."""
    frame.begin_step(str(call.target), call.origin)
    taken: Route = "typed"
    typed = _typed(call)
    if typed in _RETURNS_NEW.values() and frame.plan.program.device == "cuda":
        typed = None  # they take memory, and through the dispatcher the error is torch's where there is none
    if is_check(call):
        _emit_check(frame, call, python_call)
    elif typed is not None:
        typed(frame, call)
    elif (values := _encoded(call)) is not None:
        taken = "dispatcher"
        _emit_dispatcher(frame, call, values, python_call)
    else:
        taken = "python"
        _call_python(frame, call, python_call)
        _take_items(frame, call)
    frame.end_step()
    return taken


# Typed


def _call_typed(frame: Frame, name: str, operands: Sequence[str]) -> None:
    """Call a function of torch's C ABI, which these typed operands declare."""
    frame.module.declare(f"declare i32 @{name}({', '.join(operand.split()[0] for operand in operands)})")
    frame.call(name, ", ".join(operands))


def _emit_matmul(frame: Frame, call: ExternCall) -> None:
    """mm, bmm, addmm, baddbmm: straight to BLAS where that takes them."""
    result, target = _result(call, frame.plan.program.buffers), frame.module.target
    operator = partial(_emit_matmul_operator, frame, call)
    if blas.is_direct(call, result, target):
        blas.emit_gemm(frame, call, otherwise=operator)
    elif small_matmul.may_be_small(call, result, target):
        small_matmul.emit_small_matmul(frame, call, otherwise=operator)
    else:
        operator()


def _emit_matmul_operator(frame: Frame, call: ExternCall) -> None:
    """``out, a, b``, or ``out, bias, a, b, beta, alpha`` with an addend."""
    assert isinstance(call.target, torch._ops.OpOverload)
    assert call.results[0] is not None
    library = frame.library_of(call.results[0])
    views = [frame.buffer(call.results[0]).whole, *tensors_of(call.arguments)]
    operands = [f"ptr {frame.borrow(view)}" for view in views]
    operands += [f"double {double_literal(factor)}" for factor in call.arguments if not isinstance(factor, StridedView)]
    _call_typed(frame, f"aoti_torch_{library}_{call.target._schema.name.removeprefix('aten::')}_out", operands)


def _emit_convolution(frame: Frame, call: ExternCall) -> None:
    x, weight, bias, *geometry = call.arguments
    operands = [*(f"ptr {frame.borrow(t)}" for t in (x, weight)), f"ptr {_optional_handle(frame, bias)}"]
    operands += _window(frame, geometry)
    result = frame.temporary()
    _call_typed(frame, f"aoti_torch_{frame.library_of(x.buffer)}_convolution", [*operands, f"ptr {result}"])
    _take(frame, call, [result])


def _emit_convolution_backward(frame: Frame, call: ExternCall) -> None:
    gradient, x, weight, bias_sizes, *geometry, mask = call.arguments
    operands = [f"ptr {frame.borrow(t)}" for t in (gradient, x, weight)]
    frame.reserve("items", 1)
    if bias_sizes is None:
        operands += ["ptr null", "i64 0"]
    else:
        frame.emit(f"store ptr {frame.integers(bias_sizes)}, ptr %items")
        operands += ["ptr %items", f"i64 {len(bias_sizes)}"]
    frame.reserve("stack", len(mask))
    for k, wanted in enumerate(mask):
        at = frame.fresh(f"getelementptr i32, ptr %stack, i64 {k}")
        frame.emit(f"store i32 {int(wanted)}, ptr {at}")
    operands += _window(frame, geometry)
    results = [frame.temporary() for _ in range(3)]
    operands += ["ptr %stack", f"i64 {len(mask)}", *(f"ptr {r}" for r in results)]
    _call_typed(frame, f"aoti_torch_{frame.library_of(x.buffer)}_convolution_backward", operands)
    _take(frame, call, results)


def _emit_onednn(frame: Frame, call: ExternCall) -> None:
    name, result = onednn.function_of(call.target), frame.temporary()
    assert name is not None
    _call_typed(frame, name, [*onednn.operands_of(frame, call), f"ptr {result}"])
    _take(frame, call, [result])


def _window(frame: Frame, geometry: Sequence[ExternArgument]) -> list[str]:
    """The arguments of a convolution that say which elements it takes."""
    stride, padding, dilation, transposed, output_padding, groups = geometry
    lists = [_integer_list(frame, values) for values in (stride, padding, dilation)]
    after = _integer_list(frame, output_padding)
    return [*chain(*lists), f"i32 {int(transposed)}", *after, f"i64 {int(groups)}"]


def _emit_check(frame: Frame, call: ExternCall, python_call: RegisterCall) -> None:
    """Fail where the flag is set: here, or through Python where the message has a number in it."""
    flag, error, text, *rest = call.arguments
    named = any(value is not None for value in rest)
    if not named:
        frame.begin_step(text, call.origin)
    value = frame.fresh(f"load i8, ptr {frame.data_pointer(flag.buffer)}")
    good = frame.fresh(f"icmp eq i8 {value}, 0")
    if not named:
        frame.require(good, REFUSED[error])
        return
    next_block, bad = frame.new_label(), frame.new_label()
    frame.emit(f"br i1 {good}, label %{next_block}, label %{bad}")
    frame.start_block(bad)
    with frame.side_branch():
        _call_python(frame, call, python_call)
    frame.emit("br label %failed")
    frame.start_block(next_block)


def _take(frame: Frame, call: ExternCall, slots: list[str]) -> None:
    """Move results out of the temporary slots a typed call left them in."""
    named = [(name, slot) for name, slot in zip(call.results, slots, strict=False) if name is not None]
    frame.take_results([(name, frame.take(slot)) for name, slot in named], call)


def _optional_handle(frame: Frame, view: StridedView | None) -> str:
    """A pointer to a handle, null for None. One to a call: it uses the first of ``%items``."""
    if view is None:
        return "null"
    frame.fill("items", [f"ptr {frame.borrow(view)}"])
    return "%items"


def _integer_list(frame: Frame, values: tuple[Extent, ...]) -> tuple[str, str]:
    return f"ptr {frame.integers(values)}", f"i64 {len(values)}"


_Emitter = Callable[[Frame, ExternCall], None]
_aten = torch.ops.aten
_WRITES_OUT: dict[object, _Emitter] = {
    **dict.fromkeys((_aten.mm.default, _aten.bmm.default, _aten.addmm.default, _aten.baddbmm.default), _emit_matmul),
    **dict.fromkeys(BF16_MATMULS, bf16_gemm.emit_bf16_gemm),
}
assert _WRITES_OUT.keys() == WRITES_INTO
_NATIVE: dict[object, _Emitter] = {SCAN: emit_scan, SORT: emit_sort}
_RETURNS_NEW: dict[object, _Emitter] = {
    _aten.convolution.default: _emit_convolution,
    _aten.convolution_backward.default: _emit_convolution_backward,
}


def _typed(call: ExternCall) -> _Emitter | None:
    """The writer of a typed call, where there is one and its arguments are of the kind it takes."""
    if is_computed(call):
        return _NATIVE[call.target]
    if call.through_python:
        return None
    if onednn.function_of(call.target) is not None:
        return _emit_onednn
    emitter = _WRITES_OUT.get(call.target) or _RETURNS_NEW.get(call.target)
    if emitter is None or not all(is_floating(v) for v in tensors_of(call.arguments)):
        # Integers must not be scaled by the typed functions' float factors; complex numbers cannot be.
        return None
    if call.target in _WRITES_OUT and call.results[0] is None:
        return None
    return emitter


# Dispatcher


def _encoded(call: ExternCall) -> tuple[StableValue, ...] | None:
    """The arguments as the stable ABI carries them; None where the dispatcher is not for this call."""
    # Other operators may be written in Python. The errors of ordered effects have classes of their own (LinAlgError),
    # which the C ABI does not tell.
    if isinstance(call.target, HigherOrder) or not is_torchs_own(call.target) or is_ordered_effect(call.target):
        return None
    if call.through_python:
        return None
    schema = call.target._schema
    kinds = [r.real_type.kind() for r in schema.returns]
    listed = kinds == ["ListType"] and schema.returns[0].real_type.getElementType().kind() == "TensorType"
    if not listed and any(kind != "TensorType" for kind in kinds):
        return None
    try:
        return tuple(
            stable_abi.encode(a.real_type, value, a.N)  # type: ignore[attr-defined]  # torch's stub lacks N
            for a, value in zip(schema.arguments, call.arguments, strict=True)
        )
    except NotCarried:
        return None


def _emit_dispatcher(
    frame: Frame, call: ExternCall, values: tuple[StableValue, ...], python_call: RegisterCall
) -> None:
    assert isinstance(call.target, torch._ops.OpOverload)
    schema = call.target._schema
    frame.reserve("stack", len(schema.returns))
    # Handles first, for making them can fail; from there to the call nothing does.
    owned = [frame.own(view) for view in tensors_of(call.arguments)]
    handles = iter([frame.take(slot) for slot in owned])
    frame.fill("stack", (_stable(frame, value, handles) for value in values))
    frame.module.declare("declare i32 @aoti_torch_call_dispatcher(ptr, ptr, ptr)")
    name, overload = frame.module.string(schema.name), frame.module.string(schema.overload_name)
    failed, done = frame.new_label(), frame.new_label()
    frame.call("aoti_torch_call_dispatcher", f"ptr {name}, ptr {overload}, ptr %stack", failed=failed)
    frame.branch(done)
    frame.start_block(failed)
    with frame.side_branch():
        _emit_again_through_python(frame, call, python_call)
    frame.start_block(done)
    if [r.real_type.kind() for r in schema.returns] == ["ListType"]:
        # It must be as long as the graph expects.
        frame.module.declare(declarations()["kiln_take_list"])
        frame.reserve("items", len(call.results))
        items = frame.fresh("load ptr, ptr %stack")
        frame.call_status("kiln_take_list", f"ptr {items}, i64 {len(call.results)}, ptr %items")
        _take_items(frame, call)
    else:
        # As many as the operator returns: what is left on the stack are arguments, which it has freed.
        results = zip_longest(call.results[: len(schema.returns)], range(len(schema.returns)))
        frame.take_results([(name, frame.load("%stack", k)) for name, k in results], call)


def _stable(frame: Frame, value: StableValue, handles: Iterator[str]) -> str:
    """A typed operand holding ``value``; ``handles`` gives the handle of each tensor in turn."""
    module = frame.module
    if isinstance(value, (int, Index)):
        return f"i64 {frame.number(value)}"
    if isinstance(value, StridedView):
        return f"ptr {next(handles)}"
    if isinstance(value, Present):
        module.declare(declarations()["kiln_box"])
        item = _stable(frame, value.item, handles)
        if item.startswith("ptr"):
            item = f"i64 {frame.fresh(f'ptrtoint {item} to i64')}"
        return f"ptr {frame.fresh(f'call ptr @kiln_box({item})')}"
    module.declare(declarations()["kiln_list"])
    numbers = [item for item in value if isinstance(item, (int, Index))]
    array = "%items"
    if len(numbers) == len(value):
        array = frame.integers(numbers)
    else:
        frame.fill("items", [_stable(frame, item, handles) for item in value])
    return f"ptr {frame.fresh(f'call ptr @kiln_list(ptr {array}, i64 {len(value)})')}"


# Python


def _emit_again_through_python(frame: Frame, call: ExternCall, python_call: RegisterCall) -> None:
    """After a failure, which the C ABI only counts: Python gives the error the class and the text of eager's.

    Where the second call does not fail, the first failure stands. An error raised in Python is set already.
    """
    frame.module.declare(declarations()["kiln_error_set"])
    again = frame.new_label()
    frame.emit(f"br i1 {frame.fresh('call i1 @kiln_error_set()')}, label %failed, label %{again}")
    frame.start_block(again)
    _call_python(frame, call, python_call)
    for k in range(len(call.results)):
        slot = frame.temporary()
        frame.emit(f"store ptr {frame.load('%items', k)}, ptr {slot}")
    frame.emit("br label %failed")


def _take_items(frame: Frame, call: ExternCall) -> None:
    frame.take_results([(name, frame.load("%items", k)) for k, name in enumerate(call.results)], call)


def _call_python(frame: Frame, call: ExternCall, python_call: RegisterCall) -> None:
    """Call through Python; the handles that come back are in ``%items``."""
    described, views, numbers = _python_call(call, frame.texts.number(str(call.target), call.origin))
    place = python_call(described)
    frame.reserve("items", described.results)
    slots = [frame.own(view) for view in views]
    frame.fill("stack", (f"ptr {frame.take(slot)}" for slot in slots))
    frame.module.declare(declarations()["kiln_python_call"])
    frame.call_status(
        "kiln_python_call",
        f"ptr %objects, i64 {place}, ptr %stack, i64 {len(views)}, ptr {frame.integers(numbers)}, i64 {len(numbers)}, "
        f"ptr %items, i64 {described.results}",
    )


def _python_call(call: ExternCall, where: int) -> tuple[Call, list[StridedView], list[Index]]:
    """A call as the artifact describes it, with the tensors and the numbers known at run time it is given.

    ``where`` is the number of its text.
    """
    views: list[StridedView] = []
    numbers: list[Index] = []

    def template(argument: ExternArgument) -> ExternArgument:
        if isinstance(argument, StridedView):
            views.append(argument)
            return TensorArgument(len(views) - 1)
        if isinstance(argument, (tuple, list)):
            return tuple(template(item) for item in argument)
        if isinstance(argument, Index):
            numbers.append(argument)
            return NumberArgument(len(numbers) - 1)
        return argument

    target = call.target
    shared = (tuple(template(a) for a in call.arguments), len(call.results), where)
    if isinstance(target, HigherOrder):
        described: Call = HigherOrderCall(target.kind, target.bodies, target.carried, target.scanned, *shared)
    else:
        described = OperatorCall(target._schema.name, target._schema.overload_name, *shared)
    return described, views, numbers
