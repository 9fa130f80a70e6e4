"""What the soak does: calls, threads, compilations, errors, forks and interrupts, all of it checked against eager."""

from __future__ import annotations

import copy
import gc
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from random import Random
from typing import Any

import torch
from torch import Tensor, nn

import torchkiln
from tests.soak.programs import PROGRAMS, Program, Wrong, check, compiled, one_off

_CHILD_SECONDS = 240


class Soak:
    """Compiled functions that live until :meth:`forget`, and the activities. Each takes a moment and raises
    :class:`Wrong` where something is not as in eager; anything else it raises is a defect too."""

    def __init__(self, seed: int) -> None:
        self.random = Random(seed)
        self._functions: dict[tuple[str, bool | None], Callable[..., Any]] = {}

    def _function(self, program: Program, *, dynamic: bool | None = False) -> Callable[..., Any]:
        key = program.name, dynamic
        if key not in self._functions:
            self._functions[key] = compiled(program.function, dynamic=dynamic)
        return self._functions[key]

    def forget(self) -> None:
        self._functions.clear()
        torch._dynamo.reset()
        gc.collect()

    # Activities

    def calls(self) -> None:
        """One size, many calls, some of them compared."""
        program = self.random.choice(PROGRAMS)
        run, inputs = self._function(program), program.inputs(8)
        with torch.no_grad():
            for _ in range(self.random.randint(20, 200)):
                run(*[x.clone() for x in inputs])
        check(program, run, inputs)

    def changing_sizes(self) -> None:
        """A few sizes compiled one by one, and any size by a function compiled for all."""
        program = self.random.choice(PROGRAMS)
        for _ in range(4):
            check(program, self._function(program), program.inputs(self.random.choice((4, 8, 16))))
        if program.name != "chosen":  # compiled once for each size
            for _ in range(6):
                check(program, self._function(program, dynamic=True), program.inputs(self.random.randint(2, 40)))

    def training(self) -> None:
        """Steps of an optimizer with gradients summed over batches and writes in between, beside an eager copy."""
        torch.manual_seed(self.random.randrange(2**31))
        mine = nn.Sequential(nn.Linear(6, 10), nn.GELU(), nn.LayerNorm(10), nn.Linear(10, 3)).double()
        eagers = copy.deepcopy(mine)
        run = compiled(mine)
        optimizers = [torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9) for model in (mine, eagers)]
        for step in range(self.random.randint(2, 8)):
            batches = [torch.randn(4, 6, dtype=torch.float64) for _ in range(self.random.randint(1, 3))]
            for x in batches:
                run(x).square().mean().backward()
                eagers(x).square().mean().backward()
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad(set_to_none=bool(step % 2))
            with torch.no_grad():
                for model in (mine, eagers):
                    next(model.parameters()).mul_(0.99)
        for (name, one), other in zip(mine.named_parameters(), eagers.parameters(), strict=True):
            if not torch.allclose(one, other, rtol=1e-6, atol=1e-9):
                raise Wrong(f"weight {name} after training differs by {(one - other).abs().max()}")

    def gradients(self) -> None:
        program = self.random.choice([p for p in PROGRAMS if p.trains])
        for _ in range(5):
            check(program, self._function(program), program.inputs(8), gradients=True)
        size = self.random.randint(2, 30)
        check(program, self._function(program, dynamic=True), program.inputs(size), gradients=True)

    def threads(self) -> None:
        """Several threads call the same functions at once, on inputs of their own; the first calls compile."""
        chosen = [self.random.choice(PROGRAMS) for _ in range(3)]
        runs = [self._function(program, dynamic=self.random.choice((False, None))) for program in chosen]
        start = threading.Barrier(4)

        def work(seed: int) -> None:
            random = Random(seed)
            start.wait()
            for _ in range(8):
                program, run = random.choice(list(zip(chosen, runs, strict=True)))
                check(program, run, program.inputs(8), gradients=program.trains and random.random() < 0.5)

        with ThreadPoolExecutor(4) as pool:
            for done in [pool.submit(work, self.random.randrange(2**31)) for _ in range(4)]:
                done.result()

    def threads_that_compile(self) -> None:
        """Functions of their own, compiled in several threads at once and dropped there."""

        def work(seed: int) -> None:
            program = one_off(Random(seed))
            run = compiled(program.function)
            for _ in range(3):
                check(program, run, program.inputs(5), gradients=True)

        with ThreadPoolExecutor(3) as pool:
            for done in [pool.submit(work, self.random.randrange(2**31)) for _ in range(3)]:
                done.result()

    def compile_and_drop(self) -> None:
        for _ in range(2):
            program = one_off(self.random)
            run = compiled(program.function, dynamic=self.random.choice((False, True)))
            check(program, run, program.inputs(self.random.randint(2, 12)), gradients=self.random.random() < 0.5)
            del run
        if self.random.random() < 0.3:
            self.forget()

    def errors(self) -> None:
        """Errors inside a call, in hooks and of sizes that do not fit; what was called works afterwards."""
        rows = next(p for p in PROGRAMS if p.name == "rows")
        run, inputs = self._function(rows), rows.inputs(8)
        check(rows, run, inputs)
        for _ in range(20):
            _raises(IndexError, lambda: run(inputs[0], inputs[1] + 100))
        check(rows, run, inputs)
        network = next(p for p in PROGRAMS if p.name == "network")
        run = self._function(network)
        for _ in range(5):
            given = [x.requires_grad_() for x in network.inputs(8)]
            with torch.autograd.graph.saved_tensors_hooks(lambda t: t, _fail):
                result = run(*given)
            _raises(ZeroDivisionError, result.sum().backward)
            given[0].register_hook(_fail)
            _raises(ZeroDivisionError, run(*given).sum().backward)
            _raises(RuntimeError, lambda given=given: run(given[0], given[1][:4], given[2]))
        check(network, run, network.inputs(8), gradients=True)

    def forks(self) -> None:
        """A child calls what its parent has compiled, and compiles something itself."""
        program = self.random.choice([p for p in PROGRAMS if p.name != "chosen"])
        run = self._function(program)
        check(program, run, program.inputs(8))
        seed = self.random.randrange(2**31)

        def child() -> None:
            check(program, run, program.inputs(8))
            new = one_off(Random(seed))
            check(new, compiled(new.function), new.inputs(6))

        _in_child(child)
        check(program, run, program.inputs(8))

    def forks_beside_threads(self) -> None:
        """The parent forks while other threads of it call and compile; the child calls what was compiled before.

        Without Dynamo: a child waits forever where it asks for guards while another thread of its parent did at the
        fork, with any backend.
        """
        program = next(p for p in PROGRAMS if p.name == "sorted")
        inputs = program.inputs(8)
        run = torchkiln.compile_fx(torch.fx.symbolic_trace(program.function), inputs)
        check(program, run, inputs)
        stop = threading.Event()

        def call() -> None:
            while not stop.is_set():
                run(*inputs)

        new = one_off(self.random)
        compiles = threading.Thread(target=lambda: compiled(new.function)(*new.inputs(6)))
        workers = [threading.Thread(target=call), compiles]
        for worker in workers:
            worker.start()
        try:
            for _ in range(3):
                _in_child(lambda: check(program, run, inputs))
        finally:
            stop.set()
            for worker in workers:
                worker.join()
        check(program, run, inputs)

    def interrupted_compilations(self) -> None:
        """SIGINT at some moment of a compilation; the same function then compiles."""
        program = one_off(self.random)
        run = compiled(program.function)
        inputs = program.inputs(6)
        _interrupted(self.random.uniform(0, 0.6), lambda: check(program, run, inputs, gradients=True))
        _nothing_left_on()
        check(program, run, program.inputs(6), gradients=True)
        known = self.random.choice(PROGRAMS)
        check(known, self._function(known), known.inputs(8))

    def interrupted_calls(self) -> None:
        """SIGINT at some moment of a loop of calls and training steps."""
        program = self.random.choice([p for p in PROGRAMS if p.trains])
        run = self._function(program)
        check(program, run, program.inputs(8), gradients=True)

        def steps() -> None:
            for _ in range(100):
                check(program, run, program.inputs(8), gradients=True)

        for _ in range(5):
            _interrupted(self.random.uniform(0, 0.02), steps)
            _nothing_left_on()
            check(program, run, program.inputs(8), gradients=True)


# torch 2.11 itself ends the process where threads differentiate while another one compiles (with aot_eager too), or
# takes the tracing of another thread for its own.
_THREADS_COMPILE = tuple(map(int, torch.__version__.split(".")[:2])) >= (2, 13)

ACTIVITIES: tuple[Callable[[Soak], None], ...] = (
    Soak.calls,
    Soak.changing_sizes,
    Soak.training,
    Soak.gradients,
    *((Soak.threads, Soak.threads_that_compile) if _THREADS_COMPILE else ()),
    Soak.compile_and_drop,
    Soak.errors,
    Soak.forks,
    Soak.forks_beside_threads,
    Soak.interrupted_compilations,
    Soak.interrupted_calls,
)


def _fail(_: Tensor) -> Tensor:
    raise ZeroDivisionError("a hook of the soak")


def _raises(error: type[Exception], call: Callable[[], object]) -> None:
    try:
        call()
    except error:
        return
    raise Wrong(f"no {error.__name__} was raised")


def _in_child(work: Callable[[], None]) -> None:
    """Run ``work`` in a forked child and wait for it. Threads of OpenMP do not live on there, so it uses one."""
    sys.stdout.flush()
    sys.stderr.flush()
    child = os.fork()
    if child == 0:
        status = 1
        try:
            torch.set_num_threads(1)
            work()
            status = 0
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stderr.flush()
            os._exit(status)
    end = time.monotonic() + _CHILD_SECONDS
    while time.monotonic() < end:
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            if status != 0:
                raise Wrong(f"a forked child ended with status {status}")
            return
        time.sleep(0.005)
    os.kill(child, signal.SIGABRT)  # prints where it hangs, by the fault handler
    os.waitpid(child, 0)
    raise Wrong(f"a forked child did not end in {_CHILD_SECONDS} s")


def _interrupted(seconds: float, work: Callable[[], None]) -> None:
    """Run ``work``, with SIGINT for this, the main, thread so long after the start, or at its end.

    What it raises then is no matter: Dynamo makes an AssertionError of an interrupt inside its guards, and says that
    they fail. A wrong result is one at any time, and afterwards everything works.
    """
    main = threading.get_ident()

    def fire() -> None:
        time.sleep(seconds)
        signal.pthread_kill(main, signal.SIGINT)

    timer = threading.Thread(target=fire)
    try:
        timer.start()
        work()
        timer.join()
    except Wrong:
        raise
    except (KeyboardInterrupt, Exception):
        pass
    finally:
        try:
            timer.join()
        except KeyboardInterrupt:  # it came after another error
            timer.join()


def _nothing_left_on() -> None:
    if torch._C._len_torch_dispatch_stack():
        raise Wrong("a dispatch mode is on after an interrupt")
    if not torch.is_grad_enabled():
        raise Wrong("gradients are off after an interrupt")
    if torch.is_inference_mode_enabled() or torch.is_autocast_enabled("cpu"):
        raise Wrong("inference mode or autocast is on after an interrupt")
    if not gc.isenabled():
        raise Wrong("Python's collector is off after an interrupt")
