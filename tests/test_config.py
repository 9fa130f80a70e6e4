"""Settings: where they come from, which win, and what is refused."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from torchkiln import config
from torchkiln.config import Settings
from torchkiln.errors import OptionError


@pytest.fixture(autouse=True)
def _no_settings_in_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in Settings.__dataclass_fields__:
        monkeypatch.delenv(config.environment_name(name), raising=False)


def test_options_win_over_the_context_which_wins_over_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    assert config.resolve().threads is None
    monkeypatch.setenv("KILN_THREADS", "3")
    assert config.resolve().threads == 3
    with config.settings(threads=4):
        assert config.resolve().threads == 4
        assert config.resolve({"threads": 5}).threads == 5
    assert config.resolve().threads == 3


def test_inner_contexts_add_to_outer_ones_and_end_with_their_block() -> None:
    with config.settings(fallback=False), config.settings(threads=2) as inner:
        assert (inner.fallback, inner.threads) == (False, 2)
    assert config.resolve() == Settings()


def test_a_context_ends_when_its_block_raises() -> None:
    with pytest.raises(ZeroDivisionError), config.settings(threads=2):
        raise ZeroDivisionError
    assert config.resolve().threads is None


def test_a_context_holds_in_its_own_thread_only() -> None:
    seen: list[Settings] = []
    with config.settings(threads=2):
        thread = threading.Thread(target=lambda: seen.append(config.resolve()))
        thread.start()
        thread.join()
    assert seen == [Settings()]


@pytest.mark.parametrize(
    ("variable", "text", "name", "value"),
    [
        ("KILN_FALLBACK", "0", "fallback", False),
        ("KILN_CHECKS", "on", "checks", True),
        ("KILN_THREADS", "none", "threads", None),
        ("KILN_VECTOR_BITS", "256", "vector_bits", 256),
        ("KILN_PRECISION", "eager", "precision", "eager"),
        ("KILN_PASSES_SKIP", "no_ops, 3,joint/no_ops", "passes_skip", ("no_ops", 3, "joint/no_ops")),
        ("KILN_PASSES_LIMIT", "7", "passes_limit", 7),
    ],
)
def test_the_environment_gives_typed_values(
    monkeypatch: pytest.MonkeyPatch, variable: str, text: str, name: str, value: object
) -> None:
    monkeypatch.setenv(variable, text)
    assert getattr(config.resolve(), name) == value


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("threads", 0),
        ("threads", True),
        ("threads", "2"),
        ("fallback", 1),
        ("precision", "exact"),
        ("vector_bits", 300),
        ("parallel_threshold", None),
        ("passes_skip", 3),
        ("passes_limit", -1),
    ],
)
def test_a_bad_value_is_refused_however_it_is_given(name: str, value: object) -> None:
    for attempt in (
        lambda: Settings(**{name: value}),  # type: ignore[arg-type]
        lambda: config.resolve({name: value}),
        lambda: config.settings(**{name: value}).__enter__(),
    ):
        with pytest.raises(OptionError, match=f"'{name}' must be"):
            attempt()


def test_a_bad_value_in_the_environment_names_the_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KILN_THREADS", "many")
    with pytest.raises(OptionError, match=r"'many' \(given by KILN_THREADS\)"):
        config.resolve()


def test_an_unknown_option_lists_the_valid_ones_and_guesses() -> None:
    with pytest.raises(OptionError, match="did you mean 'threads'") as caught:
        config.resolve({"thread": 1})
    for name in Settings.__dataclass_fields__:
        assert name in str(caught.value)


def test_the_fingerprint_follows_what_shapes_the_code() -> None:
    assert Settings(threads=2).fingerprint() != Settings(threads=3).fingerprint()
    assert Settings(passes_skip=("no_ops",)).fingerprint() != Settings().fingerprint()
    assert Settings(fallback=False, checks=True, record_passes=True).fingerprint() == Settings().fingerprint()


def test_the_fingerprint_is_the_same_in_another_process() -> None:
    code = "from torchkiln.config import Settings; print(Settings(threads=2, passes_skip=['b', 'a']).fingerprint())"
    printed = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert printed.strip() == Settings(threads=2, passes_skip=("b", "a")).fingerprint()


def test_the_page_of_settings_has_the_table_of_the_sources() -> None:
    page = (Path(__file__).parents[1] / "docs" / "settings.md").read_text()
    assert f"\n\n{config.describe()}\n\n" in page
    for item in dataclasses.fields(Settings):
        assert f"| `{item.name}` | `{item.default!r}` | {item.metadata['doc']} |" in page


def test_settings_are_frozen() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        Settings().threads = 3  # type: ignore[misc]
