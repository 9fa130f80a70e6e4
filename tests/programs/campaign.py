"""Many programs, in several processes, with progress, and a table at the end of what they covered.

    python -m tests.programs.campaign --count 2000 --workers 2

Programs come in blocks; a block is one hypothesis run from a fixed seed, so it is the same programs each time. What a
block found is written to ``results/programs``; a block found there is not run again. A failing program, made as small
as hypothesis can, is a file there that runs on its own.
"""

from __future__ import annotations

import argparse
import json
import logging
import multiprocessing
import sys
import time
import warnings
from collections import Counter
from pathlib import Path
from typing import Any

import torch
from hypothesis import HealthCheck, Phase, given, seed, settings

from tests.programs.check import Different, check
from tests.programs.generate import programs
from tests.programs.program import Program

BLOCK = 50
OUTPUT = Path("results/programs")


def run_block(number: int, count: int = BLOCK, *, shrink: bool = True) -> dict[str, Any]:
    """What the programs of block ``number`` gave: how many of each verdict, what they covered, and what failed."""
    verdicts: Counter[str] = Counter()
    covered: Counter[str] = Counter()
    seen: set[str] = set()
    failure: list[Different] = []

    def one(program: Program | None) -> None:
        if program is None:
            return
        key = f"{program.source()}{program.sizes}{program.mode}{program.precision}"
        if key in seen:
            return
        try:
            verdict = check(program)
        except Different as different:
            failure[:] = [different]
            raise
        # Only now: hypothesis runs a failing program again, and must see it fail again.
        seen.add(key)
        if failure:
            return  # an attempt to make the failing program smaller
        verdicts[verdict] += 1
        if verdict == "same":
            for statement in program.statements:
                dtype = str(statement.dtype).removeprefix("torch.")
                covered[f"{statement.operator}|{dtype}|{program.mode}"] += 1

    phases = [Phase.generate, Phase.shrink] if shrink else [Phase.generate]
    within = settings(
        max_examples=count, deadline=None, database=None, report_multiple_bugs=False, phases=phases,
        suppress_health_check=list(HealthCheck), print_blob=False,
    )  # fmt: skip
    started = time.perf_counter()
    try:
        seed(number)(within(given(programs())(one)))()
    except Different:
        verdicts["different"] += 1
    return {
        "block": number,
        "torch": torch.__version__,
        "seconds": round(time.perf_counter() - started, 1),
        "verdicts": dict(verdicts),
        "covered": dict(covered),
        "complaints": failure[0].complaints if failure else [],
        "script": failure[0].script if failure else None,
    }


def _work(number: int) -> dict[str, Any]:
    torch.set_num_threads(1)
    logging.disable(logging.ERROR)  # what a capture refuses is counted, not logged
    warnings.simplefilter("ignore")
    try:
        return run_block(number)
    except Exception as error:  # a mistake of the generator: shown, not hidden
        return {"block": number, "verdicts": {"broken": 1}, "covered": {}, "complaints": [repr(error)], "script": None}


def table(results: list[dict[str, Any]]) -> str:
    """Verdicts, then how often each operator gave each dtype, and in which modes."""
    verdicts: Counter[str] = Counter()
    cells: Counter[tuple[str, str]] = Counter()
    modes: Counter[tuple[str, str]] = Counter()
    for result in results:
        verdicts.update(result["verdicts"])
        for key, times in result["covered"].items():
            operator, dtype, mode = key.split("|")
            cells[operator, dtype] += times
            modes[operator, mode] += times
    dtypes = sorted({d for _, d in cells})
    kinds = sorted({m for _, m in modes})
    width = max([len(o) for o, _ in cells], default=8)
    columns = [(d, len(d), cells) for d in dtypes] + [(m, len(m), modes) for m in kinds]
    lines = ["operator".ljust(width) + "".join(f"  {name}" for name, _, _ in columns)]
    for operator in sorted({o for o, _ in cells}):
        row = "".join(f"  {counts[operator, name] or '-':>{size}}" for name, size, counts in columns)
        lines.append(operator.ljust(width) + row)
    total = ", ".join(f"{times} {verdict}" for verdict, times in sorted(verdicts.items()))
    return "\n".join([*lines, "", f"{sum(verdicts.values())} programs: {total or 'none'}"])


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=2000, help="programs in all (2000)")
    parser.add_argument("--workers", type=int, default=2, help="processes (2)")
    parser.add_argument("--first", type=int, default=0, help="the first block (0); each has its own programs")
    parser.add_argument("--output", type=Path, default=OUTPUT, help=f"where results are kept ({OUTPUT})")
    parser.add_argument("--again", action="store_true", help="run blocks again that are there already")
    chosen = parser.parse_args(arguments)
    chosen.output.mkdir(parents=True, exist_ok=True)
    results: list[dict[str, Any]] = []
    number, agreed, failed = chosen.first, 0, 0
    with multiprocessing.get_context("spawn").Pool(chosen.workers, maxtasksperchild=4) as pool:
        pending: dict[int, Any] = {}
        while agreed < chosen.count:
            while len(pending) < chosen.workers + 1:
                pending[number] = _kept(chosen, number) or pool.apply_async(_work, (number,))
                number += 1
            first = min(pending)
            found = pending.pop(first)
            result = found if isinstance(found, dict) else found.get()
            _keep(chosen.output, result)
            results.append(result)
            agreed += result["verdicts"].get("same", 0)
            bad = bool(result["complaints"])
            failed += bad
            so_far = f"{agreed} of {chosen.count} the same, {failed} failed"
            print(f"block {first}: {result['verdicts']}, {so_far}", flush=True)
            if bad:
                print("\n".join(result["complaints"]) + "\n\n" + (result["script"] or ""), flush=True)
        pool.terminate()
    print(table(results))
    return 1 if failed else 0


def _kept(chosen: argparse.Namespace, number: int) -> dict[str, Any] | None:
    path = chosen.output / f"block-{number}.json"
    if chosen.again or not path.exists():
        return None
    found: dict[str, Any] = json.loads(path.read_text())
    # What failed is tried again: that is what one is working on.
    return None if found["complaints"] else found


def _keep(output: Path, result: dict[str, Any]) -> None:
    (output / f"block-{result['block']}.json").write_text(json.dumps(result))
    script = output / f"failure-{result['block']}.py"
    if result["script"]:
        script.write_text(result["script"])
    else:
        script.unlink(missing_ok=True)


if __name__ == "__main__":
    sys.exit(main())
