"""Many processes and threads at one cache: one compiles, the others wait a while, and nobody reads half a file."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from pathlib import Path

from tests.cache.faults import kill_while_writing
from tests.cache.keys import key, new_cache, payload
from torchkiln.cache import CacheKey
from torchkiln.stats import reset_stats, stats

# Asks for the same keys in its own order; what it "compiles" takes some milliseconds.
_WORKER = """
import random, sys, time
from pathlib import Path
from tests.cache.keys import key, new_cache, payload
cache, numbers = new_cache(Path(sys.argv[1])), list(range(20))
random.Random(int(sys.argv[2])).shuffle(numbers)
print("ready", flush=True)
sys.stdin.readline()
compiled = 0
for number in numbers:
    found = cache.get(key(number))
    if found is None:
        with cache.compiling(key(number)) as found:
            if found is None:
                compiled += 1
                time.sleep(0.005)
                found = payload(number)
                cache.put(key(number), found)
    assert found == payload(number), number
    assert cache.get(key(number)) == payload(number), number
print(compiled)
"""


def test_sixteen_processes_compile_each_of_twenty_keys_once(tmp_path: Path) -> None:
    workers = [
        subprocess.Popen(
            [sys.executable, "-c", _WORKER, str(tmp_path / "c"), str(seed)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for seed in range(16)
    ]
    for worker in workers:
        assert worker.stdout is not None
        assert worker.stdout.readline() == "ready\n"
    outputs = []
    for worker in workers:
        assert worker.stdin is not None
        worker.stdin.write("go\n")
        worker.stdin.flush()
    for worker in workers:
        outputs.append(worker.communicate(timeout=120)[0])
    assert [worker.returncode for worker in workers] == [0] * 16
    assert sum(map(int, outputs)) == 20
    names = {path.name for path in (tmp_path / "c").iterdir()}
    assert names == {".swept", *(f"{key(number).digest}.entry" for number in range(20))}


def test_writers_that_are_killed_leave_whole_entries_and_no_locks(tmp_path: Path) -> None:
    assert kill_while_writing(tmp_path / "c", rounds=12, seed=0) > 0


def test_a_thread_waits_for_the_one_that_compiles(tmp_path: Path) -> None:
    cache, found, waiting = new_cache(tmp_path / "c"), [], threading.Event()

    def ask() -> None:
        waiting.set()
        with cache.compiling(key()) as payload_meanwhile:
            found.append(payload_meanwhile)

    reset_stats()
    with cache.compiling(key()) as mine:
        assert mine is None
        thread = threading.Thread(target=ask)
        thread.start()
        waiting.wait()
        while stats().cache.waits == 0:
            time.sleep(0.001)
        assert found == []
        cache.put(key(), payload())
    thread.join()
    assert found == [payload()]


def test_where_compiling_fails_the_next_one_compiles(tmp_path: Path) -> None:
    cache = new_cache(tmp_path / "c")
    try:
        with cache.compiling(key()):
            raise RuntimeError("cannot be compiled")
    except RuntimeError:
        pass
    with cache.compiling(key()) as payload_meanwhile:
        assert payload_meanwhile is None
    assert not list((tmp_path / "c").glob("*.lock"))


def test_nobody_waits_for_longer_than_the_bound(tmp_path: Path) -> None:
    holding, asking = new_cache(tmp_path / "c"), new_cache(tmp_path / "c", wait_seconds=0.1)
    lock = holding.folder.try_lock(key().digest)
    assert lock is not None
    with asking.compiling(key()) as payload_meanwhile:
        assert payload_meanwhile is None
    assert asking.folder.try_lock(key().digest) is None  # it was not taken from its holder
    holding.folder.release(lock)
    taken = asking.folder.try_lock(key().digest)
    assert taken is not None
    asking.folder.release(taken)


def test_a_thread_that_compiles_waits_for_no_other_key(tmp_path: Path) -> None:
    cache, others = new_cache(tmp_path / "c"), new_cache(tmp_path / "c")
    lock = others.folder.try_lock(key(2).digest)
    assert lock is not None
    reset_stats()
    with cache.compiling(key(1)), cache.compiling(key(2)) as payload_meanwhile:
        assert payload_meanwhile is None
    assert stats().cache.waits == 0
    others.folder.release(lock)


def test_a_forked_child_does_not_release_the_lock_of_its_parent(tmp_path: Path) -> None:
    program = f"""
import os, sys
from pathlib import Path
from tests.cache.keys import key, new_cache
cache = new_cache(Path({str(tmp_path / "c")!r}))
with cache.compiling(key()):
    child = os.fork()
    if child == 0:
        cache.folder  # leaves the block as its parent does
    else:
        os.waitpid(child, 0)
        print(new_cache(Path({str(tmp_path / "c")!r})).folder.try_lock(key().digest))
if child == 0:
    os._exit(0)
print(cache.folder.try_lock(key().digest) is not None)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.split() == ["None", "True"]


def test_every_lookup_is_counted(tmp_path: Path) -> None:
    cache = new_cache(tmp_path / "c")
    reset_stats()
    cache.get(key())
    cache.put(key(), payload())
    cache.get(key())
    os.truncate(tmp_path / "c" / f"{key().digest}.entry", 50)
    cache.get(key())
    counts = stats().cache
    assert (counts.hits, counts.misses, counts.puts, counts.refused, counts.waits) == (1, 2, 1, 1, 0)
    assert "1 hit (0 remote), 2 misses, 1 stored, 1 refused, 0 waits" in str(stats())


def test_importing_the_cache_imports_nothing_large() -> None:
    program = (
        "import sys; from torchkiln.config import Settings; import torchkiln.cache;"
        " print([name for name in ('torch', 'fsspec', 'redis', 'rich', 'typer', 'numpy') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == "[]"


def test_equal_keys_have_one_digest_whatever_the_order_of_fields() -> None:
    first, second = CacheKey("graph", {"a": "1", "b": "2"}), CacheKey("graph", {"b": "2", "a": "1"})
    assert first.digest == second.digest
    assert CacheKey("graph", {"a": "1", "b": "3"}).digest != first.digest
    assert CacheKey("other", {"a": "1", "b": "2"}).digest != first.digest
