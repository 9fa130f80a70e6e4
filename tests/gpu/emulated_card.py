"""A card that is this process: the whole flow of a graph with a card, with kernels run by threads of the CPU.

Everything but the driver is what a card gets: plan, artifact, native entry, arguments, grids. The entry calls the
driver through the same array of addresses; here they are functions of Python.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from tests.codegen.llvm.gpu.emulator import Emulated
from tests.gpu.emulated_captures import EmulatedCaptures
from torchkiln import recorder
from torchkiln.artifact import Artifact
from torchkiln.artifact.calls import HigherOrderCall
from torchkiln.codegen.llvm import Generated
from torchkiln.ir.higher_order import HigherOrder
from torchkiln.ir.program import ExternCall
from torchkiln.recorder import Record
from torchkiln.runtime.card import emulator
from torchkiln.schedule.kernel import GpuMapping, Kernel
from torchkiln.schedule.plan import Launch, Plan, all_steps
from torchkiln.target import Card, emulated_card

HOPPER = Card(9, 0, processors=132, shared_bytes=227 << 10, bandwidth=4_800_000_000_000, emulated=True, takes_all=True)
CONTEXT, STREAM = 0x1234, 0x5678

_pointers = ctypes.c_void_p, ctypes.c_void_p
_extents = [ctypes.c_uint] * 7
_LAUNCH = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, *_extents, ctypes.c_void_p, *_pointers)
_ONE = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p)
_OF_STREAM = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p)
_NUMBERED = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_int, ctypes.c_void_p)


@dataclass(frozen=True)
class Launched:
    """What the driver was asked for."""

    symbol: str
    grid: int
    threads: int


@dataclass(frozen=True)
class _Memory:
    """What a launch of the emulator reads of a tensor."""

    address: int
    elements: int = 1

    def data_ptr(self) -> int:
        return self.address

    def numel(self) -> int:
        return self.elements


@dataclass
class EmulatedDriver:
    """A driver that knows the kernels of every plan that was made while it listened.

    ``failing`` makes launches answer that error. ``guards`` are the cards made current and not yet left. ``capturing``
    is whether a CUDA graph is captured, ``unloaded`` the symbols of each module that nobody uses any more. ``stream``
    is torch's, ``graphs`` what captures launches.
    """

    launches: list[Launched] = field(default_factory=list)
    failing: int = 0
    guards: list[int] = field(default_factory=list)
    entered: int = 0
    context_here: int = 0
    capturing: bool = False
    stream: int = STREAM
    unloaded: list[tuple[str, ...]] = field(default_factory=list)
    _kernels: dict[tuple[str, ...], list[Kernel]] = field(default_factory=dict)
    _known: dict[bytes, dict[str, Kernel]] = field(default_factory=dict)
    _loaded: list[tuple[Emulated, str, Kernel]] = field(default_factory=list)
    _plans: list[Plan] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.graphs = EmulatedCaptures(self)
        self._functions = {
            "cuLaunchKernel": _LAUNCH(self._launch),
            "cuCtxGetCurrent": _ONE(self._current_context),
            "cuCtxSetCurrent": _ONE(self._set_context),
            "cuStreamIsCapturing": _OF_STREAM(self._is_capturing),
            "aoti_torch_get_current_cuda_stream": _NUMBERED(self._stream),
            "aoti_torch_create_cuda_guard": _NUMBERED(self._guard),
            "aoti_torch_delete_cuda_guard": _ONE(self._leave),
        }

    # -- what the run time calls ----------------------------------------------------------------------------

    def function(self, name: str) -> int:
        address = ctypes.cast(self._functions[name], ctypes.c_void_p).value
        assert address is not None
        return address

    def context(self, number: int) -> int:
        return CONTEXT

    def captures(self, number: int) -> EmulatedCaptures:
        return self.graphs

    def load(self, code: bytes, symbols: Sequence[str], number: int) -> tuple[list[int], Callable[[], object]]:
        kernels = self._known[code]
        assert tuple(kernels) == tuple(symbols)
        module = Emulated(code.decode(), kernels)
        first = len(self._loaded) + 1
        self._loaded += [(module, symbol, kernel) for symbol, kernel in kernels.items()]
        return list(range(first, first + len(symbols))), partial(self.unloaded.append, tuple(symbols))

    # -- what stages made -----------------------------------------------------------------------------------

    def listener(self, record: Record) -> None:
        if record.stage == "plan":
            self._plans.append(record.value)
        if isinstance(record.value, Generated):
            self._learn(record.value.artifact, self._plans[-1])

    def _learn(self, artifact: Artifact, plan: Plan) -> None:
        """Which kernel has which symbol, in a graph and in the bodies of its higher-order operators."""
        kernels = dict.fromkeys(step.kernel for step in plan.steps if isinstance(step, Launch))
        named = {f"kernel{k}": kernel for k, kernel in enumerate(kernels)}
        if artifact.entry.card is not None:
            self._known[artifact.card_code] = {symbol: named[symbol] for symbol in artifact.entry.card.kernels}
        targets = [step.target for step in plan.steps if isinstance(step, ExternCall)]
        called = [target for target in targets if isinstance(target, HigherOrder)]
        calls = [call for call in artifact.entry.python_calls if isinstance(call, HigherOrderCall)]
        for target, call in zip(called, calls, strict=True):
            for body, code in zip(target.bodies, call.bodies, strict=True):
                self._learn(code.artifact, body)

    # -- what native code calls -----------------------------------------------------------------------------

    def _launch(self, function: int, grid: int, *rest: Any) -> int:
        _, _, threads, _, _, shared, stream, cells, extra = rest
        assert (stream or 0, shared, extra) == (self.stream, 0, None)
        assert self.guards, "launched while another device was current"
        module, symbol, kernel = self._loaded[function - 1]
        assert isinstance(kernel.mapping, GpuMapping)
        assert threads == kernel.mapping.threads
        self.launches.append(Launched(symbol, grid, threads))
        if self.failing:
            return self.failing
        if not 0 < grid < 2**31:
            return 1  # CUDA_ERROR_INVALID_VALUE
        count, sizes = len(kernel.nest.parameters), len(kernel.nest.sizes)
        places = (ctypes.c_void_p * (count + sizes)).from_address(cells)
        values = [ctypes.c_int64.from_address(place).value for place in places]
        memory = [_Memory(value, int(k not in kernel.mapping.values)) for k, value in enumerate(values[:count])]
        assert all(place.address % 16 == 0 for place in memory if place.elements)
        module.launch(symbol, memory, values[count:], grid)  # type: ignore[arg-type]
        return 0

    def _current_context(self, place: int) -> int:
        ctypes.c_void_p.from_address(place).value = self.context_here
        return 0

    def _set_context(self, context: int) -> int:
        assert context == CONTEXT
        self.context_here = context
        return 0

    def _is_capturing(self, stream: int, place: int) -> int:
        assert stream == self.stream
        ctypes.c_int32.from_address(place).value = int(self.capturing)
        return 0

    def _stream(self, number: int, place: int) -> int:
        ctypes.c_void_p.from_address(place).value = self.stream
        return 0

    def _guard(self, number: int, place: int) -> int:
        self.guards.append(number)
        self.entered += 1
        ctypes.c_void_p.from_address(place).value = len(self.guards)
        return 0

    def _leave(self, guard: int) -> int:
        assert guard == len(self.guards)
        self.guards.pop()
        return 0


@contextmanager
def emulated(card: Card = HOPPER) -> Iterator[EmulatedDriver]:
    """Compile for a card and run its kernels here; the tensors are those of the CPU."""
    driver = EmulatedDriver()
    with emulated_card(card), recorder.listen(driver.listener), emulator(driver):
        yield driver


def steps_on_card(plan: Plan) -> list[Launch]:
    return [s for s in all_steps(plan) if isinstance(s, Launch) and isinstance(s.kernel.mapping, GpuMapping)]
