"""What the call of AOTAutograd changes for the whole process is shared by the threads that compile."""

from __future__ import annotations

import threading

from torchkiln.frontend.aot import _SharedRegistration


class _Registry:
    """Refuses what torch's refuses: to register twice, and to end what is not registered."""

    def __init__(self) -> None:
        self.present = False
        self.times = 0

    def register(self) -> object:
        assert not self.present
        self.present, self.times = True, self.times + 1
        return self.end

    def end(self) -> None:
        assert self.present
        self.present = False


def test_a_registration_lasts_until_the_last_thread_leaves() -> None:
    registry = _Registry()
    shared = _SharedRegistration(registry.register)  # type: ignore[arg-type]
    entered, may_leave, seen = threading.Event(), threading.Event(), []

    def other() -> None:
        with shared:
            entered.set()
            may_leave.wait(10)
            seen.append(registry.present)

    thread = threading.Thread(target=other)
    with shared:
        thread.start()
        assert entered.wait(10)
    may_leave.set()
    thread.join(10)
    assert seen == [True]
    assert not registry.present
    with shared:
        assert registry.present
    assert (registry.present, registry.times) == (False, 2)


def test_a_registration_ends_with_an_error_too() -> None:
    registry = _Registry()
    shared = _SharedRegistration(registry.register)  # type: ignore[arg-type]
    try:
        with shared:
            raise KeyError
    except KeyError:
        pass
    assert not registry.present


def test_what_is_there_already_is_left_alone() -> None:
    with _SharedRegistration(lambda: None):
        pass
