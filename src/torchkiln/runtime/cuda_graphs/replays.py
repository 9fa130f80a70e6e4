"""Which calls of a compiled graph are captured, and which capture a call replays.

A call is a replay where there is a capture that fits it and whose earlier results nobody holds. Other calls run as
without CUDA graphs, which is right for every call: two of each layout run so before one is captured, so that libraries
have chosen their kernels, and addresses that stay have shown themselves.
"""

from __future__ import annotations

import logging
from collections import Counter, OrderedDict
from collections.abc import Callable, Hashable, Sequence
from threading import get_ident
from typing import Any

import torch

from torchkiln.artifact.artifact import EntryInfo
from torchkiln.errors import first_line
from torchkiln.recorder import Recorder
from torchkiln.runtime.card import CardArray
from torchkiln.runtime.cuda_graphs.captured_call import CapturedCall, Places, layout_of
from torchkiln.runtime.cuda_graphs.device import StreamMemory
from torchkiln.runtime.plain_tensors import is_plain

WARM_UPS = 2
MOST_CAPTURES = 16
"""Captures of one graph at a time, for all sizes and addresses."""
MOST_REPLACED = 64
"""How many captures may make way for others before the graph is captured no more."""
MOST_FOR_ONE_CALL = 4
"""Captures that fit the same call, for callers who hold several results at a time."""
MOST_MOVES = 4
"""How often a weight may lie elsewhere before it is copied."""
MOST_COPIED = 256 << 20

Run = Callable[[list[Any]], list[Any]]

_log = logging.getLogger(__name__)


class Replays:
    """Calls of a loaded graph with a card; ``run`` runs it with a list of inputs, none of which it may keep or reuse.

    ``ordinary`` is how it is called without CUDA graphs. ``kind`` says in words what graph it is.
    """

    def __init__(
        self, info: EntryInfo, card: CardArray, run: Run, ordinary: Run, *, kind: str, recorder: Recorder
    ) -> None:
        assert info.card is not None
        self._info, self._facts, self._card, self._run, self._ordinary = info, info.card, card, run, ordinary
        self._kind, self._recorder = kind, recorder
        self._tensors = [*info.positions("tensor"), *info.positions("opaque")]
        self._numbers = info.positions("number")
        self._memory: StreamMemory | None = None
        self._captured: list[CapturedCall] = []  # the one replayed last comes first
        self._warm: OrderedDict[Hashable, int] = OrderedDict()  # how many calls of a layout there were
        self._last: dict[int, int] = {}  # addresses by position
        self._moves: Counter[int] = Counter()
        self._replaced = 0
        self._threads: set[int] = set()  # those that have run it: libraries keep something for each
        self._arena_bytes = 0
        self._told: set[str] = set()
        self._refused = ""
        if self._facts.uncapturable:
            self._refuse(self._facts.uncapturable)

    def __call__(self, inputs: list[Any]) -> list[Any]:
        captures = self._card.captures
        if self._refused or torch._C._len_torch_dispatch_stack() or captures.is_capturing():
            return self._ordinary(inputs)
        memory = captures.memory()
        if self._memory is None:
            self._memory = memory
        if memory is not self._memory:
            self._tell("it is called on several streams; calls on another than the first one run without")
            return self._ordinary(inputs)
        with memory.lock:
            chosen = self._fitting(inputs) or self._new(inputs)
            if chosen is not None:
                return chosen.replay(inputs)
        return self._launched(inputs)

    def _launched(self, inputs: list[Any]) -> list[Any]:
        """The results of a call whose steps are launched one by one."""
        if self._refused:
            return self._ordinary(inputs)
        results = self._run(inputs)
        self._threads.add(get_ident())
        self._arena_bytes = max(self._arena_bytes, self._card.arena_bytes)
        return results

    # -- which capture ------------------------------------------------------------------------------------

    def _fitting(self, inputs: list[Any]) -> CapturedCall | None:
        for k, captured in enumerate(self._captured):
            if captured.fits(inputs) and captured.is_free:
                if k:
                    self._captured.insert(0, self._captured.pop(k))
                return captured
        return None

    def _new(self, inputs: list[Any]) -> CapturedCall | None:
        """A capture for this call; None where it runs without."""
        if len(inputs) != len(self._info.inputs) or not all(map(self._is_usable, inputs, range(len(inputs)))):
            return None
        self._note_addresses(inputs)
        if not self._is_warm(inputs) or get_ident() not in self._threads or not self._may_capture(inputs):
            return None
        places = self._places(inputs)
        if places is None:
            return None
        try:
            scratch = self._memory_here().scratch(self._arena_bytes, self._card.captures.place)
            made = CapturedCall(self._run, inputs, places, self._info, self._card, self._memory_here(), scratch)
        except Exception as error:
            self._refuse(f"its launches could not be captured: {type(error).__name__}: {first_line(error)}")
            return None
        self._captured.insert(0, made)
        _log.info("a graph for %s was captured, %d times by now", self._kind, len(self._captured) + self._replaced)
        return made

    def _is_usable(self, value: Any, position: int) -> bool:
        if self._info.inputs[position] not in ("tensor", "opaque"):
            return True
        if not isinstance(value, torch.Tensor) or not is_plain(value):
            return False  # it is copied, or refused, without CUDA graphs
        if not self._card.captures.holds(value):
            self._refuse(f"its input {position} is on the CPU")
            return False
        return True

    def _memory_here(self) -> StreamMemory:
        assert self._memory is not None
        return self._memory

    def _note_addresses(self, inputs: Sequence[Any]) -> None:
        for position in self._tensors:
            address = inputs[position].data_ptr()
            if self._last.setdefault(position, address) != address:
                self._last[position] = address
                self._moves[position] += not self._is_owned(inputs[position])

    def _is_owned(self, tensor: torch.Tensor) -> bool:
        """Whether a capture owns the memory of ``tensor``, such as one of forward, which saved it for backward."""
        return tensor.untyped_storage().data_ptr() in self._memory_here().owned

    def _is_warm(self, inputs: Sequence[Any]) -> bool:
        layout = (*(layout_of(inputs[p]) for p in self._tensors), *(inputs[p] for p in self._numbers))
        calls = self._warm[layout] = self._warm.pop(layout, 0) + 1
        if len(self._warm) > MOST_REPLACED:
            self._warm.popitem(last=False)
        return calls > WARM_UPS

    def _may_capture(self, inputs: list[Any]) -> bool:
        if sum(captured.fits(inputs) for captured in self._captured) >= MOST_FOR_ONE_CALL:
            self._tell(f"the results of {MOST_FOR_ONE_CALL} earlier calls are held; while they are, calls run without")
            return False
        if len(self._captured) < MOST_CAPTURES:
            return True
        free = [k for k, captured in enumerate(self._captured) if captured.is_free]
        if not free:
            return False
        if self._replaced == MOST_REPLACED:
            self._tell(f"it is called in more than {MOST_CAPTURES} ways in turns; other calls run without")
            return False
        self._replaced += 1
        del self._captured[free[-1]]
        return True

    def _places(self, inputs: Sequence[Any]) -> Places | None:
        known: list[int] = []
        checked: list[int] = []
        copied: list[int] = []
        for position in self._tensors:
            written, static = position in self._info.written, position in self._facts.static
            moves = self._moves[position]
            if written and moves > MOST_MOVES:
                self._refuse(f"its input {position}, which it writes to, lies elsewhere in each call")
                return None
            owned = self._is_owned(inputs[position])
            stays = written or owned or moves < (MOST_MOVES if static else 1)
            if not stays:
                copied.append(position)
            elif (static or owned) and position not in self._facts.sized:
                known.append(position)
            else:
                checked.append(position)
        nbytes = sum(inputs[position].nbytes for position in copied)
        if nbytes > MOST_COPIED:
            self._refuse(f"inputs of {nbytes >> 20} MiB lie elsewhere in each call")
            return None
        return Places(tuple(known), tuple(checked), tuple(copied), self._numbers)

    # -- reasons ------------------------------------------------------------------------------------------

    def _refuse(self, reason: str) -> None:
        """No call is captured from now on."""
        self._refused = reason
        self._captured.clear()
        self._tell(reason)

    def _tell(self, reason: str) -> None:
        if reason not in self._told:
            self._told.add(reason)
            self._recorder.runs_without_cuda_graph(self._kind, reason)
