"""``kiln cache``: what each command prints, and the exit codes scripts rely on."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest
from typer.testing import CliRunner

from tests.cache.keys import payload
from torchkiln.cache import Cache, CacheKey, open_cache
from torchkiln.cache.entry import MOST_BYTES
from torchkiln.cli import app
from torchkiln.config import Settings, resolve

FEATURES = "avx avx2 fma"


def _key(**changed: str) -> CacheKey:
    fields = {"graph": "x = placeholder()\ny = relu(x)", "features": FEATURES, "size": "64", "torch": "2.13.0"}
    return CacheKey("graph", {**fields, **changed})


@pytest.fixture
def cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Cache:
    monkeypatch.setenv("KILN_CACHE", "1")
    monkeypatch.setenv("KILN_CACHE_DIR", str(tmp_path / "c"))
    opened = open_cache(resolve())
    assert opened is not None
    return opened


def _run(*arguments: object, code: int = 0) -> str:
    result = CliRunner().invoke(app, ["cache", *map(str, arguments)])
    assert result.exit_code == code, result.output
    return result.output


def test_list_has_a_row_for_each_entry(cache: Cache) -> None:
    cache.put(_key(), payload())
    cache.put(CacheKey("matmul times", {"m": "1"}), b"[1.0, 2.0]")
    printed = _run("list")
    assert re.search(rf"graph\s+│ {_key().digest[:12]} │ \d\.\d KiB │ \d s ago │ \d s ago", printed)
    assert re.search(r"matmul times │ [0-9a-f]{12} │ \d+ B", printed)
    assert "2 entries" in printed


def test_show_prints_all_fields_of_a_key_by_its_beginning(cache: Cache) -> None:
    cache.put(_key(), payload())
    printed = _run("show", _key().digest[:6])
    assert "graph " + _key().digest in printed
    assert "verified, 4.9 KiB of payload" in printed
    for name, value in _key().fields.items():
        assert f"{name}:\n{value}\n" in printed


def test_show_says_that_an_entry_is_damaged(cache: Cache, tmp_path: Path) -> None:
    cache.put(_key(), payload())
    path = tmp_path / "c" / f"{_key().digest}.entry"
    path.write_bytes(path.read_bytes()[:-1])
    assert "not usable: an entry of" in _run("show", _key().digest)


def test_a_key_that_is_not_there_or_not_unique_is_an_error_in_one_line(cache: Cache) -> None:
    for number in range(17):  # two of them begin alike
        cache.put(_key(size=str(number)), payload())
    assert "no key begins with 'xyz'" in _run("show", "xyz", code=1)
    assert "17 keys begin with ''" in _run("explain", "", "", code=1)


def test_explain_names_the_fields_that_differ(cache: Cache) -> None:
    first, second = _key(), _key(size="128", features=f"{FEATURES} avx512f", graph="x = placeholder()\ny = gelu(x)")
    for key in (first, second):
        cache.put(key, payload())
    assert _run("explain", first.digest, second.digest).splitlines() == [
        "features: only the second has avx512f",
        "graph: 1 of 2 lines differ",
        "  line 2: y = relu(x) -> y = gelu(x)",
        "size: 64 -> 128",
    ]
    assert _run("explain", first.digest, first.digest) == "the keys are equal\n"


def test_clear_removes_all_entries(cache: Cache) -> None:
    cache.put(_key(), payload())
    assert "1 entry removed" in _run("clear")
    assert cache.get(_key()) is None


def test_verify_finds_and_removes_damaged_entries(cache: Cache, tmp_path: Path) -> None:
    cache.put(_key(), payload())
    cache.put(_key(size="3"), payload())
    assert "2 entries verified, 0 not usable" in _run("verify")
    path = tmp_path / "c" / f"{_key().digest}.entry"
    path.write_bytes(path.read_bytes()[:-1] + b"?")
    assert "1 entry verified, 1 not usable" in _run("verify", code=1)
    assert not path.exists()
    assert "1 entry verified, 0 not usable" in _run("verify")


def test_verify_removes_what_is_too_large_to_be_read(cache: Cache) -> None:
    cache.put(_key(), payload())
    os.truncate(cache.folder.path / f"{_key().digest}.entry", MOST_BYTES + 1)  # a hole, which takes no room
    assert "at most 1073741824 bytes" in _run("verify", code=1)
    assert "0 entries verified, 0 not usable" in _run("verify")


def test_what_is_exported_can_be_imported(cache: Cache, tmp_path: Path) -> None:
    cache.put(_key(), payload())
    assert "1 entry written" in _run("export", tmp_path / "a.zip")
    _run("clear")
    assert "1 entry imported, 0 refused" in _run("import", tmp_path / "a.zip")
    assert cache.get(_key()) == payload()
    (tmp_path / "b.zip").write_bytes(b"no archive")
    for name in ("b.zip", "absent.zip", "/dev/zero"):
        assert _run("import", tmp_path / name, code=1).count("\n") == 1


_SCRIPT = """
import sys
from torchkiln.cache import CacheKey, open_cache
from torchkiln.config import resolve

cache = open_cache(resolve())
assert sys.argv[2:] == ["--help", "-x"], sys.argv
graph = "x = placeholder()\\ny = relu(x)"
fields = {"graph": graph, "features": "avx avx2 fma", "size": sys.argv[1], "torch": "2.13.0"}
for kind in ("graph", "function"):
    key = CacheKey(kind, fields)
    if cache.get(key) is None:
        cache.put(key, b"compiled")
sys.exit(3)
"""


def test_why_missed_names_the_field_in_which_the_nearest_entry_differs(cache: Cache, tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(_SCRIPT)
    for size, graph in (("64", "x = placeholder()\ny = relu(x)"), ("32", "other"), ("128", "x\ny\nz")):
        cache.put(_key(size=size, graph=graph), payload())
    missed, function = _key(size="128"), CacheKey("function", _key(size="128").fields)
    assert _run("why-missed", script, "128", "--help", "-x").splitlines() == [
        "2 misses",
        "",
        f"graph {missed.digest[:12]}: the nearest stored is {_key().digest[:12]}",
        "  size: 64 -> 128",
        "",
        f"function {function.digest[:12]}: nothing of this kind was stored",
    ]
    assert _run("why-missed", script, "128", "--help", "-x").splitlines() == ["0 misses"]


def test_why_missed_of_a_script_that_fails_says_what_it_missed_so_far(cache: Cache, tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(_SCRIPT.replace("sys.exit(3)", "raise ValueError('of the script')"))
    printed = _run("why-missed", script, "128", "--help", "-x", code=1)
    assert "2 misses" in printed


def test_why_missed_of_no_script_is_an_error_in_one_line(cache: Cache, tmp_path: Path) -> None:
    assert "There is no script" in _run("why-missed", tmp_path / "absent.py", code=1)


def test_without_a_cache_the_commands_say_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KILN_CACHE", "0")
    assert open_cache(resolve()) is None
    assert "There is no cache" in _run("list", code=1)


def test_one_configuration_has_one_object(tmp_path: Path) -> None:
    first = Settings(cache_dir=str(tmp_path / "c"))
    assert open_cache(first) is open_cache(Settings(cache_dir=str(tmp_path / "c"), threads=3))
    assert open_cache(first) is not open_cache(Settings(cache_dir=str(tmp_path / "d")))


def test_the_folder_is_in_the_users_cache_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    opened = open_cache(Settings())
    assert opened is not None
    assert opened.folder.path == tmp_path / "torchkiln" / "compiled"
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")  # to be ignored, says the specification
    monkeypatch.setenv("HOME", str(tmp_path))
    opened = open_cache(Settings())
    assert opened is not None
    assert opened.folder.path == tmp_path / ".cache" / "torchkiln" / "compiled"
