"""Room for Python's frames: what is called behaves as ever, at any depth of the stack."""

from __future__ import annotations

import resource
from concurrent.futures import ThreadPoolExecutor
from types import FunctionType

import pytest

from torchkiln.frames import with_room_for_frames


def _deep(depth: int) -> int:
    return 0 if depth == 0 else 1 + _deep(depth - 1)


def test_arguments_results_names_and_errors_pass_through() -> None:
    @with_room_for_frames
    def named(a: int, /, b: int, *, c: int = 3) -> tuple[int, int, int]:
        """What it does."""
        if a < 0:
            raise ValueError("negative")
        return a, b, c

    assert named(1, b=2) == (1, 2, 3)
    assert named(1, 2, c=4) == (1, 2, 4)
    assert (named.__name__, named.__doc__) == ("named", "What it does.")
    with pytest.raises(ValueError, match="negative"):
        named(-1, 2)


def test_calls_nest_and_go_deeper_than_one_piece_of_memory() -> None:
    roomy = with_room_for_frames(lambda depth: _deep(depth))
    assert roomy(900) == 900
    assert with_room_for_frames(lambda: roomy(10) + roomy(20))() == 30


def test_generators_inside_go_on_outside() -> None:
    @with_room_for_frames
    def numbers(count: int) -> object:
        return (k * k for k in range(count))

    assert list(numbers(4)) == [0, 1, 4, 9]


def test_no_depth_of_the_caller_makes_calls_map_memory() -> None:
    """Each mapping of a chunk is a page fault when its first frame is written: thousands of them at the wrong depth."""

    def small() -> None:
        pass

    leaf = FunctionType(small.__code__.replace(co_stacksize=100), {})  # more words than a frame of ``below``

    def many_calls() -> int:
        before = resource.getrusage(resource.RUSAGE_THREAD).ru_minflt
        for _ in range(5000):
            leaf()
        return resource.getrusage(resource.RUSAGE_THREAD).ru_minflt - before

    def below(depth: int, call: object) -> int:
        return below(depth - 1, call) if depth else call()  # type: ignore[operator]

    def faults(call: object) -> list[int]:
        return [below(depth, call) for depth in range(200)]

    with ThreadPoolExecutor(1) as fresh:  # this thread has room for frames already: every test has
        plain = fresh.submit(faults, many_calls).result()
        roomy = fresh.submit(faults, with_room_for_frames(many_calls)).result()
    assert max(plain) > 2500, "Python no longer maps memory at some depth, so that frames.py is not needed"
    assert max(roomy) < 500
