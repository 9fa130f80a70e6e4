"""Calls of torch operators from native code: typed functions, the dispatcher, or a way back into Python.

Three routes, the first that fits is taken. ``typed``: a function of torch's C ABI for this operator, writing into
planned memory where it can. ``dispatcher``: any operator whose arguments the stable ABI carries. ``python``: a
function of the graph's tuple, called with the interpreter held; higher-order operators take this one.

A call that fails is made once more through Python, which raises what eager raises.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial

import torch

from torchkiln.artifact.artifact import Route
from torchkiln.artifact.calls import Call, HigherOrderCall, NumberArgument, OperatorCall, TensorArgument
from torchkiln.codegen.llvm import bf16_gemm, blas, small_matmul, stable_abi
from torchkiln.codegen.llvm.frame import Frame, description, is_floating
from torchkiln.codegen.llvm.sorting import emit_sort
from torchkiln.codegen.llvm.stable_abi import Bits, NotCarried, OwnedHandle, Present, StableValue, Text
from torchkiln.codegen.llvm.support import declarations
from torchkiln.graph.effects import is_ordered_effect, is_torchs_own
from torchkiln.ir.higher_order import HigherOrder
from torchkiln.ir.index import Extent, Index
from torchkiln.ir.native_calls import is_check, is_sort
from torchkiln.ir.program import BF16_MATMULS, WRITES_INTO, Buffer, ExternArgument, ExternCall, StridedView
from torchkiln.schedule.dependencies import reads
from torchkiln.target import Target

# Registers a call through Python and answers its place in the tuple.
RegisterCall = Callable[[Call], int]


def route(call: ExternCall) -> Route:
    """How an operator is called."""
    if is_check(call) or _typed(call) is not None:
        return "typed"
    try:
        _encode(call)
    except NotCarried:
        return "python"
    return "dispatcher"


def fills_planned_memory(call: ExternCall) -> bool:
    """Whether the call writes its results into memory that must be there before it."""
    return is_sort(call) or (call.target in _WRITES_OUT and _typed(call) is not None)


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
    """Write one call. ``python_call`` registers a call through Python and answers its place in the tuple."""
    frame.begin_step(str(call.target), call.origin)
    taken = route(call)
    typed = _typed(call)
    if is_check(call):
        _emit_check(frame, call, python_call)
    elif typed is not None:
        typed(frame, call)
    elif taken == "dispatcher":
        _emit_dispatcher(frame, call, python_call)
    else:
        _emit_python(frame, call, python_call)
    frame.end_step()
    return taken


# Typed


def _name_in_abi(call: ExternCall) -> str:
    assert isinstance(call.target, torch._ops.OpOverload)
    return call.target._schema.name.removeprefix("aten::")


def _emit_product(frame: Frame, call: ExternCall) -> None:
    """mm, bmm: straight to BLAS where that takes them."""
    result, operator = _result(call, frame.plan.program.buffers), partial(_emit_product_operator, frame, call)
    if blas.is_direct(call, result, frame.module.target):
        blas.emit_product(frame, call, otherwise=operator)
    elif small_matmul.may_be_small(call, result, frame.module.target):
        small_matmul.emit_small_product(frame, call, otherwise=operator)
    else:
        operator()


def _emit_product_operator(frame: Frame, call: ExternCall) -> None:
    """mm, bmm: ``out, a, b``."""
    name = _name_in_abi(call)
    result = call.results[0]
    assert result is not None
    handles = [frame.borrow(frame.whole_view(result)), *(frame.borrow(a) for a in call.arguments)]
    frame.module.declare(f"declare i32 @aoti_torch_cpu_{name}_out(ptr, ptr, ptr)")
    frame.call(f"aoti_torch_cpu_{name}_out", ", ".join(f"ptr {h}" for h in handles))


def _emit_scaled_product(frame: Frame, call: ExternCall) -> None:
    """addmm, baddbmm: straight to BLAS where that takes them."""
    operator = partial(_emit_scaled_product_operator, frame, call)
    if small_matmul.may_be_small(call, _result(call, frame.plan.program.buffers), frame.module.target):
        small_matmul.emit_small_product(frame, call, otherwise=operator)
    else:
        operator()


def _emit_scaled_product_operator(frame: Frame, call: ExternCall) -> None:
    """addmm, baddbmm: ``out, bias, a, b, beta, alpha``."""
    name = _name_in_abi(call)
    result = call.results[0]
    assert result is not None
    *matrices, beta, alpha = call.arguments
    handles = [frame.borrow(frame.whole_view(result)), *(frame.borrow(m) for m in matrices)]
    frame.module.declare(f"declare i32 @aoti_torch_cpu_{name}_out(ptr, ptr, ptr, ptr, double, double)")
    scales = f"double {_double(beta)}, double {_double(alpha)}"
    frame.call(f"aoti_torch_cpu_{name}_out", f"{', '.join(f'ptr {h}' for h in handles)}, {scales}")


def _emit_convolution(frame: Frame, call: ExternCall) -> None:
    x, weight, bias, stride, padding, dilation, transposed, output_padding, groups = call.arguments
    handles = f"ptr {frame.borrow(x)}, ptr {frame.borrow(weight)}, ptr {_optional_handle(frame, bias)}"
    geometry = ", ".join(_integer_list(frame, v) for v in (stride, padding, dilation))
    result = frame.temporary()
    frame.module.declare(
        "declare i32 @aoti_torch_cpu_convolution(ptr, ptr, ptr, ptr, i64, ptr, i64, ptr, i64, i32, ptr, i64, i64, ptr)"
    )
    frame.call(
        "aoti_torch_cpu_convolution",
        f"{handles}, {geometry}, i32 {int(transposed)}, {_integer_list(frame, output_padding)}, i64 {int(groups)}, "
        f"ptr {result}",
    )
    _take(frame, call, [result])


def _emit_convolution_backward(frame: Frame, call: ExternCall) -> None:
    gradient, x, weight, bias_sizes, *geometry, mask = call.arguments
    stride, padding, dilation, transposed, output_padding, groups = geometry
    handles = ", ".join(f"ptr {frame.borrow(t)}" for t in (gradient, x, weight))
    frame.items_size = max(frame.items_size, 1)
    bias = "ptr null, i64 0"
    if bias_sizes is not None:
        frame.emit(f"store ptr {frame.integers(bias_sizes)}, ptr %items")
        bias = f"ptr %items, i64 {len(bias_sizes)}"
    frame.stack_size = max(frame.stack_size, len(mask))
    for k, wanted in enumerate(mask):
        at = frame.fresh(f"getelementptr i32, ptr %stack, i64 {k}")
        frame.emit(f"store i32 {int(wanted)}, ptr {at}")
    window = ", ".join(_integer_list(frame, v) for v in (stride, padding, dilation))
    results = [frame.temporary() for _ in range(3)]
    frame.module.declare(
        "declare i32 @aoti_torch_cpu_convolution_backward(ptr, ptr, ptr, ptr, i64, ptr, i64, ptr, i64, ptr, i64, i32, "
        "ptr, i64, i64, ptr, i64, ptr, ptr, ptr)"
    )
    frame.call(
        "aoti_torch_cpu_convolution_backward",
        f"{handles}, {bias}, {window}, i32 {int(transposed)}, {_integer_list(frame, output_padding)}, "
        f"i64 {int(groups)}, ptr %stack, i64 {len(mask)}, {', '.join(f'ptr {r}' for r in results)}",
    )
    _take(frame, call, results)


def _emit_check(frame: Frame, call: ExternCall, python_call: RegisterCall) -> None:
    """Fail where the flag is set: here, or through Python where the message has a number in it."""
    flag, error, text, *rest = call.arguments
    named = any(value is not None for value in rest)
    if not named:
        frame.begin_step(text, call.origin)
    value = frame.fresh(f"load i8, ptr {frame.data_pointer(flag.buffer)}")
    good, next_block = frame.fresh(f"icmp eq i8 {value}, 0"), frame.new_label()
    bad = frame.new_label() if named else "refused_index" if error == "IndexError" else "refused"
    frame.emit(f"br i1 {good}, label %{next_block}, label %{bad}")
    if named:
        frame.start_block(bad)
        with frame.side_branch():
            _call_python(frame, call, python_call)
        frame.emit("br label %failed")
    frame.start_block(next_block)


def _take(frame: Frame, call: ExternCall, slots: list[str]) -> None:
    """Move results out of the temporary slots a typed call left them in."""
    results = []
    for name, slot in zip(_padded(call.results, len(slots)), slots, strict=True):
        if name is not None:
            handle = frame.fresh(f"load ptr, ptr {slot}")
            frame.emit(f"store ptr null, ptr {slot}")
            results.append((name, handle))
    frame.take_results(results, call.binds, reads(call))


def _optional_handle(frame: Frame, view: StridedView | None) -> str:
    """A pointer to a handle, null for None. One to a call: it uses the first of ``%items``."""
    if view is None:
        return "null"
    frame.items_size = max(frame.items_size, 1)
    handle = frame.borrow(view)
    frame.emit(f"store ptr {handle}, ptr %items")
    return "%items"


def _integer_list(frame: Frame, values: tuple[Extent, ...]) -> str:
    return f"ptr {frame.integers(values)}, i64 {len(values)}"


def _double(value: float) -> str:
    bits = stable_abi.encode(torch._C.FloatType.get(), value)
    assert isinstance(bits, Bits)
    assert isinstance(bits.value, int)
    return f"0x{bits.value & 0xFFFFFFFFFFFFFFFF:016X}"


_Emitter = Callable[[Frame, ExternCall], None]
_aten = torch.ops.aten
_WRITES_OUT: dict[object, _Emitter] = {
    _aten.mm.default: _emit_product,
    _aten.bmm.default: _emit_product,
    **dict.fromkeys(BF16_MATMULS, bf16_gemm.emit_wide_product),
    _aten.addmm.default: _emit_scaled_product,
    _aten.baddbmm.default: _emit_scaled_product,
}
assert _WRITES_OUT.keys() == WRITES_INTO
_RETURNS_NEW: dict[object, _Emitter] = {
    _aten.convolution.default: _emit_convolution,
    _aten.convolution_backward.default: _emit_convolution_backward,
}


def _typed(call: ExternCall) -> _Emitter | None:
    """The writer of a typed call, where there is one and its arguments are of the kind it takes."""
    if is_sort(call):
        return emit_sort
    emitter = _WRITES_OUT.get(call.target) or _RETURNS_NEW.get(call.target)
    if emitter is None or not all(is_floating(v) for v in _views(call.arguments)):
        # Whole numbers must not be scaled by the typed functions' float factors; complex numbers cannot be.
        return None
    if call.target in _WRITES_OUT and call.results[0] is None:
        return None
    return emitter


def _views(arguments: ExternArgument) -> Iterator[StridedView]:
    if isinstance(arguments, StridedView):
        yield arguments
    elif isinstance(arguments, (tuple, list)):
        for item in arguments:
            yield from _views(item)


def _padded(results: tuple[str | None, ...], count: int) -> tuple[str | None, ...]:
    return results + (None,) * (count - len(results))


# Dispatcher


def _encode(call: ExternCall) -> tuple[StableValue, ...]:
    if isinstance(call.target, HigherOrder):
        raise NotCarried("a higher-order operator")
    schema = call.target._schema
    if not is_torchs_own(call.target):
        raise NotCarried(f"operators of {call.target.namespace} may be written in Python")
    if is_ordered_effect(call.target):
        raise NotCarried("its errors have classes of their own (LinAlgError), which the C ABI does not tell")
    kinds = [r.real_type.kind() for r in schema.returns]
    listed = kinds == ["ListType"] and schema.returns[0].real_type.getElementType().kind() == "TensorType"
    if not listed and any(kind != "TensorType" for kind in kinds):
        raise NotCarried(f"returns {kinds}")
    return tuple(
        stable_abi.encode(a.real_type, value, a.N)  # type: ignore[attr-defined]  # torch's stub lacks N
        for a, value in zip(schema.arguments, call.arguments, strict=True)
    )


def _emit_dispatcher(frame: Frame, call: ExternCall, python_call: RegisterCall) -> None:
    values = _encode(call)
    assert isinstance(call.target, torch._ops.OpOverload)
    schema = call.target._schema
    returned = len(schema.returns)
    frame.stack_size = max(frame.stack_size, len(values), returned)
    # Handles first, for making them can fail; from there to the call nothing does.
    owned = [frame.own(view) for value in values for view in stable_abi.tensors(value)]
    handles = []
    for slot in owned:
        handles.append(frame.fresh(f"load ptr, ptr {slot}"))
        frame.emit(f"store ptr null, ptr {slot}")
    given = iter(handles)
    for k, value in enumerate(values):
        frame.emit(f"store {_stable(frame, value, given)}, ptr {frame.element('%stack', k)}")
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
        frame.take_results(_list_results(frame, call), call.binds, reads(call))
    else:
        # No more than the operator returns: what is left on the stack are arguments, which it has freed.
        results = _padded(call.results[:returned], returned)
        frame.take_results([(name, frame.load("%stack", k)) for k, name in enumerate(results)], call.binds, reads(call))


def _list_results(frame: Frame, call: ExternCall) -> list[tuple[str | None, str]]:
    """The handles of a returned list, which must be as long as the graph expects."""
    count = len(call.results)
    frame.module.declare(declarations()["kiln_take_list"])
    frame.items_size = max(frame.items_size, count)
    items = frame.fresh("load ptr, ptr %stack")
    frame.call_status("kiln_take_list", f"ptr {items}, i64 {count}, ptr %items")
    return [(name, frame.load("%items", k)) for k, name in enumerate(call.results)]


def _stable(frame: Frame, value: StableValue, handles: Iterator[str]) -> str:
    """A typed operand holding ``value``; ``handles`` gives the handle of each tensor in turn."""
    module = frame.module
    if isinstance(value, Bits):
        return f"i64 {frame.number(value.value)}"
    if isinstance(value, OwnedHandle):
        return f"ptr {next(handles)}"
    if isinstance(value, Text):
        module.declare("declare i32 @torch_new_string_handle(ptr, i64, ptr)")
        frame.items_size = max(frame.items_size, 1)
        length = len(value.text.encode())
        frame.call("torch_new_string_handle", f"ptr {module.string(value.text)}, i64 {length}, ptr %items")
        return f"ptr {frame.fresh('load ptr, ptr %items')}"
    if isinstance(value, Present):
        module.declare(declarations()["kiln_box"])
        item = _stable(frame, value.item, handles)
        if item.startswith("ptr"):
            item = f"i64 {frame.fresh(f'ptrtoint {item} to i64')}"
        return f"ptr {frame.fresh(f'call ptr @kiln_box({item})')}"
    module.declare(declarations()["kiln_list"])
    constants = [item.value for item in value.items if isinstance(item, Bits)]
    array = "%items"
    if len(constants) == len(value.items):
        array = frame.integers(constants)
    else:
        operands = [_stable(frame, item, handles) for item in value.items]
        frame.items_size = max(frame.items_size, len(operands))
        for k, operand in enumerate(operands):
            frame.emit(f"store {operand}, ptr {frame.element('%items', k)}")
    return f"ptr {frame.fresh(f'call ptr @kiln_list(ptr {array}, i64 {len(value.items)})')}"


# Python


def _emit_again_through_python(frame: Frame, call: ExternCall, python_call: RegisterCall) -> None:
    """After a failure: the C ABI says that a call failed, Python gives the error the class and the text of eager's.

    Where the second call does not fail, the first one's failure stands. An error that was raised in Python, by a
    dispatch mode or a kernel written there, is there already.
    """
    frame.module.declare(declarations()["kiln_error_set"])
    again = frame.new_label()
    frame.emit(f"br i1 {frame.fresh('call i1 @kiln_error_set()')}, label %failed, label %{again}")
    frame.start_block(again)
    _call_python(frame, call, python_call)
    count = len(call.results)
    for k in range(count):
        slot = frame.temporary()
        frame.emit(f"store ptr {frame.load('%items', k)}, ptr {slot}")
    frame.emit("br label %failed")


def _emit_python(frame: Frame, call: ExternCall, python_call: RegisterCall) -> None:
    _call_python(frame, call, python_call)
    frame.take_results(
        [(name, frame.load("%items", k)) for k, name in enumerate(call.results)], call.binds, reads(call)
    )


def _call_python(frame: Frame, call: ExternCall, python_call: RegisterCall) -> None:
    """Call through Python; the handles that come back are in ``%items``."""
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
    arguments = tuple(template(a) for a in call.arguments)
    count = len(call.results)
    where = description(str(target), call.origin)
    if isinstance(target, HigherOrder):
        place = python_call(
            HigherOrderCall(target.kind, target.bodies, target.carried, target.scanned, arguments, count, where)
        )
    else:
        place = python_call(OperatorCall(target._schema.name, target._schema.overload_name, arguments, count, where))
    frame.stack_size = max(frame.stack_size, len(views))
    frame.items_size = max(frame.items_size, count)
    slots = [frame.own(view) for view in views]
    for k, slot in enumerate(slots):
        handle = frame.fresh(f"load ptr, ptr {slot}")
        frame.emit(f"store ptr null, ptr {slot}")
        frame.emit(f"store ptr {handle}, ptr {frame.element('%stack', k)}")
    frame.module.declare(declarations()["kiln_python_call"])
    frame.call_status(
        "kiln_python_call",
        f"ptr %objects, i64 {place}, ptr %stack, i64 {len(views)}, ptr {frame.integers(numbers)}, i64 {len(numbers)}, "
        f"ptr %items, i64 {count}",
    )
