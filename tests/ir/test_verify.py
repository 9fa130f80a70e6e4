"""The verifier of programs: what lowering makes passes, and each rule that is broken is named."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch._dynamo.exc import BackendCompilerFailed
from torch.fx.experimental.proxy_tensor import make_fx

from torchkiln.config import Settings
from torchkiln.errors import VerificationError
from torchkiln.ir import expr as ex
from torchkiln.ir import index as ix
from torchkiln.ir.expr import Constant, Load, Masked, Op
from torchkiln.ir.index import Size, Var
from torchkiln.ir.program import CheckSizes, ExternCall, Loop, PassInput, Program, SizeOfResult
from torchkiln.ir.verify import verify_program
from torchkiln.lowering import lower
from torchkiln.target import capture_target


def _program() -> Program:
    """A loop, a reduction and an extern call: ``(x @ x).relu().sum(0)``."""
    traced = make_fx(lambda x: torch.relu((x + 1) @ x).sum(0), tracing_mode="fake")(torch.randn(4, 4))
    return lower(traced, Settings(), capture_target(Settings()))


def _loops(program: Program) -> list[int]:
    return [k for k, operation in enumerate(program.operations) if isinstance(operation, Loop)]


def _with_loop(program: Program, number: int, **changes: object) -> Program:
    operations = list(program.operations)
    place = _loops(program)[number]
    operations[place] = replace(operations[place], **changes)  # type: ignore[arg-type]
    return replace(program, operations=tuple(operations))


def _loop(program: Program, number: int) -> Loop:
    found = program.operations[_loops(program)[number]]
    assert isinstance(found, Loop)
    return found


def _read_too_early(program: Program) -> Program:
    return replace(program, operations=program.operations[::-1])


def _beyond_the_end(program: Program) -> Program:
    loop = _loop(program, 0)
    return _with_loop(program, 0, store=tuple(subscript + 1 for subscript in loop.store))


def _load_beyond_the_end(program: Program) -> Program:
    (load,) = ex.loads(_loop(program, 0).value)
    moved = Load(load.buffer, (load.subscripts[0] - 1, *load.subscripts[1:]), load.dtype)
    return _with_loop(program, 0, value=moved)


def _other_dtype(program: Program) -> Program:
    return _with_loop(program, 0, value=ex.cast(_loop(program, 0).value, torch.float64))


def _mixed_dtypes(program: Program) -> Program:
    value = _loop(program, 0).value
    return _with_loop(program, 0, value=Op("add", (value, Constant(1.0, torch.float64)), torch.float32))


def _unknown_operation(program: Program) -> Program:
    value = _loop(program, 0).value
    return _with_loop(program, 0, value=Op("frobnicate", (value,), torch.float32))


def _missing_operand(program: Program) -> Program:
    return _with_loop(program, 0, value=Op("add", (_loop(program, 0).value,), torch.float32))


def _unbound_variable(program: Program) -> Program:
    stray = ex.IndexValue(ix.of(Var("stray", 4)), torch.int64)
    return _with_loop(program, 0, value=ex.cast(stray, torch.float32))


def _store_by_reduced_variable(program: Program) -> Program:
    loop = next(_loop(program, k) for k in range(len(_loops(program))) if _loop(program, k).reduced)
    number = [_loop(program, k) for k in range(len(_loops(program)))].index(loop)
    return _with_loop(program, number, store=(ix.of(loop.reduced[0]),))


def _no_buffer(program: Program) -> Program:
    loop = _loop(program, 0)
    return replace(program, buffers={n: b for n, b in program.buffers.items() if n != loop.target})


def _two_results(program: Program) -> Program:
    call = next(operation for operation in program.operations if isinstance(operation, ExternCall))
    place = program.operations.index(call)
    return replace(program, operations=(*program.operations[: place + 1], *program.operations[place:]))


def _unknown_size(program: Program) -> Program:
    check = CheckSizes("lt", ix.of(Size("s7", 1, 9, 3)), 4, "")
    return replace(program, operations=(check, *program.operations))


def _no_such_input(program: Program) -> Program:
    return replace(program, outputs=(PassInput(3),))


def _with_buffer(program: Program, which: str, **changes: object) -> Program:
    changed = replace(program.buffers[which], **changes)  # type: ignore[arg-type]
    return replace(program, buffers={**program.buffers, which: changed})


def _other_name(program: Program) -> Program:
    return _with_buffer(program, "a0", name="b7")


def _strides_of_another_rank(program: Program) -> Program:
    return _with_buffer(program, "a0", strides=(1,))


def _input_without_a_buffer(program: Program) -> Program:
    return replace(program, inputs=(replace(program.inputs[0], buffer="a9"),))


def _constant_without_a_buffer(program: Program) -> Program:
    return replace(program, constants=(("c9", torch.zeros(4)),))


def _constant_of_another_dtype(program: Program) -> Program:
    return replace(program, constants=(("a0", torch.zeros(4, 4, dtype=torch.float64)),))


def _loop_into_an_opaque_buffer(program: Program) -> Program:
    return _with_buffer(program, _loop(program, 0).target, opaque=True)


def _unknown_reduction(program: Program) -> Program:
    return _with_loop(program, len(_loops(program)) - 1, reducer="median")


def _reduced_by_nothing(program: Program) -> Program:
    return _with_loop(program, len(_loops(program)) - 1, reducer=None)


def _subscript_too_few(program: Program) -> Program:
    return _with_loop(program, 0, store=_loop(program, 0).store[:1])


def _mask_of_numbers(program: Program) -> Program:
    value = _loop(program, 0).value
    return _with_loop(program, 0, value=Masked(value, value))


def _read_as_another_dtype(program: Program) -> Program:
    (load,) = ex.loads(_loop(program, 0).value)
    return _with_loop(program, 0, value=ex.cast(Load(load.buffer, load.subscripts, torch.float64), torch.float32))


def _with_call(program: Program, **changes: object) -> Program:
    changed = (replace(o, **changes) if isinstance(o, ExternCall) else o for o in program.operations)  # type: ignore[arg-type]
    return replace(program, operations=tuple(changed))


def _changed_too_early(program: Program) -> Program:
    return _with_call(program, mutates=(_loop(program, len(_loops(program)) - 1).target,))


def _size_of_no_result(program: Program) -> Program:
    return _with_call(program, binds=(SizeOfResult(Size("s7", 1, 9, 3), "a0", 0),))


def _view_beyond_the_end(program: Program) -> Program:
    whole = program.buffers["a0"].whole
    return replace(program, outputs=(replace(whole, offset=1),))


def _view_of_the_whole_of_memory(program: Program) -> Program:
    return replace(program, outputs=(replace(program.buffers["a0"].whole, opaque=True),))


def test_what_lowering_makes_is_right() -> None:
    verify_program(_program())


@pytest.mark.parametrize(
    ("plant", "named"),
    [
        (_read_too_early, "is read before it is written"),
        (_beyond_the_end, "is not in 4"),
        (_load_beyond_the_end, "is not in 4"),
        (_other_dtype, "torch.float64 into torch.float32"),
        (_mixed_dtypes, "add mixes torch.float32 and torch.float64"),
        (_unknown_operation, "there is no operation frobnicate"),
        (_missing_operand, "add takes 2 operands, not 1"),
        (_unbound_variable, "no loop binds stray"),
        (_store_by_reduced_variable, "no loop binds"),
        (_no_buffer, "there is no buffer"),
        (_two_results, "is the result of a second operation"),
        (_unknown_size, "size s7 is not known yet"),
        (_no_such_input, "there is no such input"),
        (_other_name, "a buffer under the name a0"),
        (_strides_of_another_rank, "strides of another rank"),
        (_input_without_a_buffer, "an input without a buffer"),
        (_constant_without_a_buffer, "a constant without a buffer"),
        (_constant_of_another_dtype, "the constant is torch.float64"),
        (_loop_into_an_opaque_buffer, "a loop into an opaque buffer"),
        (_unknown_reduction, "there is no reduction median"),
        (_reduced_by_nothing, "loops of a reduction without one"),
        (_subscript_too_few, "1 subscripts of"),
        (_mask_of_numbers, "a mask of torch.float32"),
        (_read_as_another_dtype, "torch.float64 is read of torch.float32"),
        (_changed_too_early, "is changed before it is written"),
        (_size_of_no_result, "the size of a0, which is no result"),
        (_view_beyond_the_end, "reaches beyond a0"),
        (_view_of_the_whole_of_memory, "a view of memory of an opaque buffer, or the other way"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_a_planted_mistake_is_named(plant: Callable[[Program], Program], named: str) -> None:
    with pytest.raises(VerificationError, match=named):
        verify_program(plant(_program()))


def test_checking_mode_stops_a_wrong_program(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torchkiln.compiler.lower", lambda *_, **__: _read_too_early(_program()))
    compiled = torch.compile(lambda x: x.sin(), backend="kiln", options={"checks": True, "fallback": False})
    with pytest.raises(BackendCompilerFailed, match=r"lowering failed: VerificationError: .* read before it is"):
        compiled(torch.randn(4))
