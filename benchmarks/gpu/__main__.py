"""``python -m benchmarks.gpu models|launches|kernels``: tables of a card, made in visits of a few minutes.

Each cell runs in a process of its own, with empty caches. What is measured is kept in ``results/gpu/TABLE.jsonl``, with
the output of each process beside it, and a further run leaves it out. The table is printed at the end of each run.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu.entries import BACKENDS, MODELS, SMALL

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "results" / "gpu"
Key = tuple[str, str, str]


def main() -> int:
    options = _options()
    if not torch.cuda.is_available():
        print("There is no NVIDIA card here, or torch was built without CUDA.")
        return 1
    FOLDER.mkdir(parents=True, exist_ok=True)
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, Python {platform.python_version()}", flush=True)
    if options.table == "kernels":
        from benchmarks.gpu.kernels import run

        run(FOLDER / "kernels.jsonl", options.only, options.minutes)
        return 0
    file = FOLDER / f"{options.table}.jsonl"
    if options.again:
        file.unlink(missing_ok=True)
    end = time.monotonic() + 60 * options.minutes
    done = _read(file)
    cells = [key for key in _cells(options) if key not in done]
    for number, key in enumerate(cells):
        left = end - time.monotonic()
        if left < 20:
            print(f"time is up: {len(cells) - number} cells are left")
            break
        print(f"{number + 1} of {len(cells)}: {' '.join(key)} ... ", end="", flush=True)
        done[key] = _measured(options.table, key, min(left, options.limit))
        with file.open("a", encoding="utf-8") as out:
            out.write(json.dumps({"key": key, **done[key]}) + "\n")
        print(_figures(done[key]), flush=True)
    print(table_of(done))
    return 0


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu", description=__doc__)
    parser.add_argument("table", choices=["models", "launches", "kernels"])
    parser.add_argument("--only", default="", help="entries, with commas")
    parser.add_argument("--jobs", default="inference,training")
    parser.add_argument("--backends", default="")
    parser.add_argument("--minutes", type=float, default=9.0)
    parser.add_argument("--limit", type=float, default=240.0, help="seconds of a cell")
    parser.add_argument("--again", action="store_true", help="measure what has been measured, too")
    return parser.parse_args()


def _cells(options: argparse.Namespace) -> Iterable[Key]:
    entries = MODELS if options.table == "models" else SMALL
    usual = ("eager", "kiln", "inductor") if options.table == "models" else tuple(BACKENDS)
    backends = options.backends.split(",") if options.backends else usual
    names = options.only.split(",") if options.only else entries
    for name in names:
        for job in options.jobs.split(","):
            if job in entries[name].jobs:
                yield from ((name, job, backend) for backend in backends)


def _measured(table: str, key: Key, limit: float) -> dict[str, Any]:
    log = FOLDER / ("-".join((table, *key)).replace(" ", "_") + ".log")
    with tempfile.TemporaryDirectory() as caches:
        environment = {
            **os.environ,
            "TORCHINDUCTOR_CACHE_DIR": f"{caches}/inductor",
            "TRITON_CACHE_DIR": f"{caches}/triton",
            "KILN_CACHE_DIR": f"{caches}/kiln",
            "CUDA_CACHE_PATH": f"{caches}/cuda",
            "HF_HUB_OFFLINE": "1",
        }
        command = [sys.executable, "-m", "benchmarks.gpu.worker", table, *key]
        try:
            with log.open("wb") as out:
                subprocess.run(command, cwd=ROOT, env=environment, stdout=out, stderr=out, timeout=limit, check=False)
        except subprocess.TimeoutExpired:
            return {"failed": f"more than {limit:.0f} s"}
    lines = log.read_text(encoding="utf-8", errors="replace").splitlines()
    found = next((line for line in lines if line.startswith("RESULT ")), None)
    if found is not None:
        result: dict[str, Any] = json.loads(found.removeprefix("RESULT "))
        return result
    return {"failed": lines[-1] if lines else "no output"}


def _read(file: Path) -> dict[Key, dict[str, Any]]:
    """What was measured; cells that failed are tried again."""
    if not file.exists():
        return {}
    records = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]
    return {tuple(record.pop("key")): record for record in records if "failed" not in record}


def _figures(found: dict[str, Any]) -> str:
    if "failed" in found:
        return f"FAILED: {found['failed']}"
    fallbacks = f", {len(found['fallbacks'])} fallbacks" if found.get("fallbacks") else ""
    launched = "".join(f"\n    without CUDA graph: {reason}" for reason in found.get("without CUDA graph", ()))
    return f"{found['ms']:.3f} ms, first {found['first s']:.1f} s, {found['MiB']:.0f} MiB{fallbacks}{launched}"


def table_of(done: dict[Key, dict[str, Any]]) -> str:
    """A table in Markdown: a row for each entry and job, and geometric means of the ratios to kiln."""
    backends = [name for name in BACKENDS if any(key[2] == name for key in done)]
    rows = list(dict.fromkeys(key[:2] for key in done))
    lines = [f"| | {' | '.join(f'{b}: ms, first s, MiB' for b in backends)} |", "|---" * (len(backends) + 1) + "|"]
    for row in rows:
        cells = [done.get((*row, backend), {"failed": "not measured"}) for backend in backends]
        lines.append(f"| {' '.join(row)} | {' | '.join(map(_cell, cells))} |")
    for backend in backends:
        ratios = [_ms(done, (*row, backend)) / _ms(done, (*row, "kiln")) for row in rows]
        known = [ratio for ratio in ratios if math.isfinite(ratio)]
        if known and backend != "kiln":
            mean = math.exp(sum(map(math.log, known)) / len(known))
            said = f"{mean:.3f}, least {min(known):.3f}"
            lines.append(f"\nms of {backend} / kiln, geometric mean of {len(known)}: {said}")
    return "\n".join(lines)


def _cell(found: dict[str, Any]) -> str:
    if "failed" in found:
        return str(found["failed"])[:40]
    return f"{found['ms']:.3f}, {found['first s']:.1f}, {found['MiB']:.0f}"


def _ms(done: dict[Key, dict[str, Any]], key: Key) -> float:
    return float(done.get(key, {}).get("ms", math.nan))


if __name__ == "__main__":
    sys.exit(main())
