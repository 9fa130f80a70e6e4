"""The card's side of CUDA graphs: streams, captures, and what captures on one stream share."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from typing import Any, Protocol

import torch

from torchkiln.garbage import no_collections

Run = Callable[[int, list[Any]], list[Any]]
"""Runs a graph on the current stream, whose handle it is given, with these inputs."""

_STEP = 2 << 20  # bytes by which shared memory grows


class StreamMemory:
    """What all captures that are replayed on one stream share.

    Replays on one stream run one after the other, so one piece of memory serves for the intermediate values of all.
    ``lock`` is held from the copies of a call's inputs to its replay. ``owned`` are the addresses of storages that
    belong to captures.
    """

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.owned: set[int] = set()
        self._scratch: weakref.ref[torch.Tensor] | None = None

    def scratch(self, nbytes: int, place: torch.device) -> torch.Tensor:
        """At least so many bytes, which whoever captures with them must hold."""
        held = None if self._scratch is None else self._scratch()
        if held is None or held.nbytes < nbytes:
            held = torch.empty(max(-(-nbytes // _STEP), 1) * _STEP, dtype=torch.uint8, device=place)
            self._scratch = weakref.ref(held)
        return held


class Captures(Protocol):
    """What captures launches on a card."""

    @property
    def place(self) -> torch.device:
        """Where its memory is."""

    def memory(self) -> StreamMemory:
        """That of the stream on which this thread launches."""

    def is_capturing(self) -> bool:
        """Whether somebody captures the stream on which this thread launches."""

    def holds(self, tensor: torch.Tensor) -> bool:
        """Whether the card has the tensor's memory."""

    def capture(self, run: Run, inputs: list[Any]) -> tuple[Callable[[], object], list[Any]]:
        """What launches again all that ``run`` launches on a stream of its own, and the results of ``run``.

        Nothing is computed before the first replay. Memory that is taken meanwhile is that of this capture alone, as
        long as what replays it lives or somebody holds a tensor in it.
        """


_one_at_a_time = threading.Lock()  # torch allows for one capture in a process


class CudaCaptures:
    """Captures by torch, whose allocator and random generators know of them."""

    def __init__(self, number: int) -> None:
        self.place = torch.device("cuda", number)
        self._number = number
        self._memories: dict[int, StreamMemory] = {}
        self._stream: torch.cuda.Stream | None = None

    def memory(self) -> StreamMemory:
        stream = torch.cuda.current_stream(self._number).cuda_stream
        return self._memories.setdefault(stream, StreamMemory())

    def is_capturing(self) -> bool:
        with torch.cuda.device(self._number):
            return torch.cuda.is_current_stream_capturing()

    def holds(self, tensor: torch.Tensor) -> bool:
        return tensor.device == self.place

    def capture(self, run: Run, inputs: list[Any]) -> tuple[Callable[[], object], list[Any]]:
        # Garbage that is collected meanwhile might be CUDA graphs and streams of others.
        with _one_at_a_time, torch.cuda.device(self._number), no_collections():
            torch.cuda.current_blas_handle()  # that of this thread: one must not be made while launches are captured
            if self._stream is None:
                self._stream = torch.cuda.Stream(self._number)
            torch.cuda.synchronize(self._number)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.stream(self._stream):
                # Other threads may do what a capture forbids, such as taking pinned memory.
                graph.capture_begin(capture_error_mode="thread_local")
                try:
                    results = run(self._stream.cuda_stream, inputs)
                except BaseException as error:
                    _end_of_failed(graph, error)
                    raise
                graph.capture_end()
            return graph.replay, results


def _end_of_failed(graph: torch.cuda.CUDAGraph, error: BaseException) -> None:
    try:
        graph.capture_end()
    except RuntimeError as broken:
        error.add_note(f"(the capture cannot be ended: {broken})")
