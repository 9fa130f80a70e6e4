"""Processes that check cases. One that dies or takes too long is replaced, and the sample it was at is named."""

from __future__ import annotations

import faulthandler
import gc
import multiprocessing
import os
import random
import resource
import signal
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from queue import Empty, Queue
from typing import Any

from conformance.cases import Case
from conformance.check import BATCH, CRASHED, Verdict
from conformance.records import FOLDER, Record, new_record
from torchkiln.frames import with_room_for_frames

_CASES_PER_PROCESS = 400
_MOST_MEMORY = 4 << 30


@dataclass(frozen=True)
class Choice:
    """Which samples of a case: all, or ``each`` of them picked the same way in every run; and how they are compiled.

    ``dynamic`` makes sizes symbolic, ``layouts`` changes them by force (conformance/forced_layouts.py).
    """

    each: int | None = None
    dynamic: bool = False
    layouts: bool = False

    def __str__(self) -> str:
        parts = ["all" if self.each is None else f"{self.each} each"]
        parts += [name for name in ("dynamic", "layouts") if getattr(self, name)]
        return ", ".join(parts)

    def of(self, case: Case, total: int) -> list[int]:
        numbers = list(range(total))
        if self.each is None or total <= self.each:
            return numbers
        return sorted(random.Random(str(case)).sample(numbers, self.each))


@dataclass(frozen=True)
class _Part:
    """Samples of a case and how many to compile at once; None stands for all those chosen."""

    numbers: list[int] | None
    batch: int


def run(
    cases: Sequence[Case],
    *,
    backend: str,
    choice: Choice,
    workers: int,
    limit: float,
    report: Callable[[Record], None],
    progress: Callable[[int, Case, int], None] = lambda _worker, _case, _samples: None,
) -> None:
    """Check ``cases``; ``report`` gets each record as it is complete, ``progress`` each batch (from other threads).

    ``limit`` is in seconds, for one sample; a batch gets as much for each.
    """
    waiting: Queue[Case] = Queue()
    for case in cases:
        waiting.put(case)
    lock = threading.Lock()

    def work(number: int) -> None:
        worker = _Worker(number, backend, limit)
        try:
            while True:
                try:
                    case = waiting.get_nowait()
                except Empty:
                    return
                record = worker.check(case, choice, lambda n, case=case: progress(number, case, n))  # type: ignore[misc]
                with lock:
                    report(record)
        finally:
            worker.stop()

    threads = [threading.Thread(target=work, args=(n,), daemon=True) for n in range(workers)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


class _Worker:
    """The near side of one process: starts it, talks to it, replaces it."""

    def __init__(self, number: int, backend: str, limit: float) -> None:
        self._number = number
        self._backend = backend
        self._limit = limit
        self._process: Any = None
        self._pipe: Connection | None = None
        self._cases = 0

    def check(self, case: Case, choice: Choice, progress: Callable[[int], None]) -> Record:
        record = new_record(case, self._backend, str(choice))
        start = time.perf_counter()
        parts = [_Part(None, BATCH)]
        while parts:
            part = parts.pop(0)
            pipe = self._started()
            pipe.send((case, choice, part.numbers, part.batch))
            parts = [*self._follow(pipe, record, part, progress), *parts]
        record.seconds = round(time.perf_counter() - start, 2)
        self._cases += 1
        return record

    def _follow(self, pipe: Connection, record: Record, part: _Part, progress: Callable[[int], None]) -> list[_Part]:
        """Take in what the process says until the part is done or the process is; what is left to do."""
        left = part.numbers
        current: list[int] = []
        while True:
            limit = self._limit * max(1, len(current)) if current else 600.0
            message: Any = None
            try:
                if pipe.poll(limit):
                    message = pipe.recv()
                    why = ""
                else:
                    why = f"took longer than {self._limit:.0f} s"
            except (EOFError, ConnectionResetError, OSError):
                self._process.join(10)
                why = f"the process died ({_exit_text(self._process.exitcode)})"
            if message is None:
                self.stop(busy=True)
                return self._after_a_crash(record, _Part(left, part.batch), current, why)
            kind, payload = message
            if kind == "numbers" and left is None:
                left = payload
            elif kind == "begin":
                current = payload
            elif kind == "batch":
                verdicts, lowerings, externs, kernels = payload
                record.add(verdicts)
                record.kernels += kernels
                for name, count in externs.items():
                    record.externs[name] = record.externs.get(name, 0) + count
                for name in lowerings:
                    record.lowerings.setdefault(name, [min(current), max(current)])
                assert left is not None
                done = {v.sample for v in verdicts}
                left = [n for n in left if n not in done]
                current = []
                progress(len(verdicts))
            elif kind == "failed":
                record.add([Verdict(0, CRASHED, f"samples could not be made: {payload}")])
                return []
            elif kind == "end":
                if payload > _MOST_MEMORY:
                    self.stop()
                return []

    def _after_a_crash(self, record: Record, left: _Part, current: list[int], why: str) -> list[_Part]:
        if not current or left.numbers is None:
            record.add([Verdict(0, CRASHED, f"{why} while making samples")])
            return []
        rest = [n for n in left.numbers if n not in current]
        again = [_Part(rest, left.batch)] if rest else []
        if len(current) > 1:
            return [_Part(current, 1), *again]  # once more, one by one, to find which it was
        record.add([Verdict(current[0], CRASHED, why)])
        return again

    def _started(self) -> Connection:
        if self._process is not None and self._cases >= _CASES_PER_PROCESS:
            self.stop()
        if self._process is None:
            context = multiprocessing.get_context("spawn")
            self._pipe, far = context.Pipe()
            log = FOLDER / f"worker-{self._number}.log"
            self._process = context.Process(target=_serve, args=(far, self._backend, log), daemon=True)
            self._process.start()
            far.close()
            self._cases = 0
        assert self._pipe is not None
        return self._pipe

    def stop(self, *, busy: bool = False) -> None:
        if self._pipe is not None:
            self._pipe.close()  # an idle process ends by itself when nobody is there to talk to
        if self._process is not None:
            self._process.join(0 if busy else 5)
            self._process.kill()
            self._process.join()
        self._process = self._pipe = None


def _exit_text(code: int | None) -> str:
    if code is not None and code < 0:
        return signal.Signals(-code).name
    return f"exit code {code}"


@with_room_for_frames
def _serve(pipe: Connection, backend: str, log: Path) -> None:
    """The far side: checks what it is sent and says what happens.

    Dynamo maps and unmaps 10,000 chunks of frames a second without the room: half of a run's processor time.
    """
    log.parent.mkdir(parents=True, exist_ok=True)
    output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(output, 1)
    os.dup2(output, 2)
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    faulthandler.enable()

    import logging

    import torch

    import torchkiln.compiler  # noqa: F401 - imported before the freeze
    from conformance.check import Way, check, collect_garbage, samples

    logging.disable(logging.ERROR)
    torch.set_num_threads(1)
    # What is imported outlives every case. A collection takes 10 ms without it and 160 with it: a quarter of a run.
    gc.collect()
    gc.freeze()
    while True:
        try:
            case, choice, todo, batch = pipe.recv()
        except EOFError:
            return
        try:
            numbers = todo if todo is not None else choice.of(case, len(samples(case)))
        except Exception as error:
            pipe.send(("failed", f"{type(error).__name__}: {error}"[:300]))
            continue
        pipe.send(("numbers", numbers))
        check(
            case,
            way=Way(backend, choice.dynamic, choice.layouts),
            only=numbers,
            batch=batch,
            begin=lambda chunk: pipe.send(("begin", list(chunk))),
            done=lambda verdicts, seen: pipe.send(
                ("batch", (list(verdicts), sorted(seen.lowerings), seen.externs, seen.kernels))
            ),
        )
        collect_garbage()
        pipe.send(("end", resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024))
