"""What every test shares: a fixed seed, a clean Dynamo, and the compile call of the backend under test."""

from __future__ import annotations

import gc
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from _pytest import python

import torchkiln
from tests.cache_use import CacheUse
from torchkiln import compiler
from torchkiln.artifact import Artifact, CallingConvention, CompiledFunction, decode, decode_function, encode
from torchkiln.artifact.artifact import EntryInfo
from torchkiln.frames import with_room_for_frames
from torchkiln.frontend import call_builder
from torchkiln.ir.verify import verify_program
from torchkiln.recorder import Record, listen
from torchkiln.runtime.executable import load
from torchkiln.schedule.verify import verify_plan

# Tests compile: what an earlier run left on disk must not decide whether they pass. See --cache-dir.
os.environ.setdefault("KILN_CACHE", "0")

# Children of a process that has run a backward pass cannot run one where torch, built for GPUs, started threads for it.
# It counts devices at the first pass: none on a machine without, until FakeTensorMode pretends that there are some.
if not torch.cuda.is_available():
    torch.ones((), requires_grad=True).backward()

# Another backend can take kiln's place, to tell a wrong test from a wrong compiler: TORCHKILN_TEST_BACKEND=aot_eager
BACKEND = os.environ.get("TORCHKILN_TEST_BACKEND", "kiln")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--round-trip", action="store_true", help="encode every compiled graph, decode it and load that before it runs"
    )
    parser.addoption(
        "--cache-dir", help="keep compiled code there; a second run loads it (KILN_CACHE=1 goes with it)", default=None
    )


def pytest_configure(config: pytest.Config) -> None:
    folder = config.getoption("--cache-dir")
    if folder is not None:  # in the environment, for processes that tests start
        os.environ.update(KILN_CACHE="1", KILN_CACHE_DIR=os.path.abspath(folder))


def pytest_collection_finish() -> None:
    """What is imported outlives every test: collections of garbage need not look at it."""
    gc.collect()
    gc.freeze()


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> object:
    """Room for the frames of Dynamo too: a test may start at a depth at which Python maps memory at each call."""
    return with_room_for_frames(python.pytest_pyfunc_call)(pyfuncitem)


_cache_use = CacheUse()


@pytest.fixture(autouse=True, scope="session")
def _counted_cache(request: pytest.FixtureRequest) -> Iterator[None]:
    """With ``--cache-dir``, how the folder was used is part of the summary."""
    folder = request.config.getoption("--cache-dir")
    if folder is None:
        yield
        return
    with _cache_use.counted(Path(folder).absolute()):
        yield


def pytest_sessionfinish(session: pytest.Session) -> None:
    if hasattr(session.config, "workeroutput"):
        session.config.workeroutput["cache_use"] = _cache_use.plain()


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    _cache_use.add(getattr(node, "workeroutput", {}).get("cache_use", [[], []]))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    if lines := list(_cache_use.lines() if _cache_use.counts else ()):
        terminalreporter.section("use of the cache")
        for line in lines:
            terminalreporter.write_line(line)


@pytest.fixture(autouse=True, scope="session")
def _round_trip(request: pytest.FixtureRequest) -> Iterator[None]:
    """With ``--round-trip``, every graph runs from what was read back; what cannot be stored is refused."""
    if not request.config.getoption("--round-trip"):
        yield
        return
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(compiler, "load", lambda artifact, **known: load(decode(encode(artifact)), **known))
        for name in ("inference_convention", "training_convention"):
            patch.setattr(call_builder, name, _read_back(getattr(call_builder, name)))
        yield


def _read_back(convention_of: Callable[..., CallingConvention]) -> Callable[..., CallingConvention]:
    empty = Artifact(b"", b"", EntryInfo((), (), (), (), 0, 0, ()), ())

    def read_back(*args: Any, **options: Any) -> CallingConvention:
        return decode_function(encode(CompiledFunction(convention_of(*args, **options), empty))).convention

    return read_back


@pytest.fixture(autouse=True, scope="session")
def _verified(request: pytest.FixtureRequest) -> Iterator[None]:
    """Every program and plan that a test compiles keeps the rules of its kind.

    Not with ``--cache-dir``: stages run for those who listen, and nothing is loaded then.
    """
    if request.config.getoption("--cache-dir") is not None:
        yield
        return

    def verify(record: Record) -> None:
        if record.stage == "program":
            verify_program(record.value)
        elif record.stage == "plan":
            verify_plan(record.value)

    with listen(verify):
        yield


@pytest.fixture(autouse=True)
def _same_start() -> Iterator[None]:
    torch.manual_seed(0)
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.fixture
def compile_strictly() -> Callable[..., Any]:
    """``torch.compile`` with the backend under test, raising instead of falling back and refusing graph breaks."""

    def compile_with_backend(fn: Callable[..., Any], **options: object) -> Any:
        if BACKEND != "kiln":
            return torch.compile(fn, backend=BACKEND, fullgraph=True, dynamic=False)
        return torch.compile(fn, backend="kiln", fullgraph=True, dynamic=False, options={"fallback": False, **options})

    return compile_with_backend


@pytest.fixture
def no_cache() -> Iterator[None]:
    """For tests that look at stages, or replace part of one: what a cache has does not run them."""
    with torchkiln.settings(cache=False):
        yield


@pytest.fixture
def everything_compiled() -> Iterator[None]:
    """Fails a test during which no graph was compiled, or one fell back to eager."""
    before = torchkiln.stats()
    yield
    after = torchkiln.stats()
    assert after.fallbacks == before.fallbacks
    assert BACKEND != "kiln" or after.graphs > before.graphs
