"""Processes that write to one cache and are killed in the middle: ``python -m tests.cache.faults --rounds 100``."""

from __future__ import annotations

import argparse
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from tests.cache.keys import key, new_cache, payload

_SIZE = 300_000
_KEYS = 8


def write_for_ever(folder: Path) -> None:
    """Compile, as it were, and store one key after the other, from the beginning again and again."""
    cache = new_cache(folder)
    print("started", flush=True)
    while True:
        for number in range(_KEYS):
            with cache.compiling(key(number)):
                cache.put(key(number), payload(number, _SIZE))


def kill_while_writing(folder: Path, rounds: int, seed: int) -> int:
    """Start a writer and kill it, ``rounds`` times; each time, every key has its payload or none. How many had one."""
    moments, found = random.Random(seed), 0
    for _ in range(rounds):
        command = [sys.executable, "-m", "tests.cache.faults", "--write", str(folder)]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as writer:
            assert writer.stdout is not None
            assert writer.stdout.readline() == "started\n"
            time.sleep(moments.uniform(0, 0.02))
            writer.kill()
        found += _check(folder)
    return found


def _check(folder: Path) -> int:
    cache, found = new_cache(folder, wait_seconds=10), 0
    for number in range(_KEYS):
        stored = cache.get(key(number))
        assert stored in (None, payload(number, _SIZE)), f"key {number} has {len(stored or b'')} other bytes"
        found += stored is not None
        begin = time.monotonic()
        with cache.compiling(key(number)):
            assert time.monotonic() - begin < 10, "the lock of a killed process is still held"
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--write", type=Path)
    asked = parser.parse_args()
    if asked.write is not None:
        write_for_ever(asked.write)
    with tempfile.TemporaryDirectory() as folder:
        found = kill_while_writing(Path(folder) / "cache", asked.rounds, asked.seed)
        left = len(list((Path(folder) / "cache").glob(".*.tmp")))
    print(f"{asked.rounds} writers killed: {found} payloads read, all right; {left} temporary files were left behind")


if __name__ == "__main__":
    main()
