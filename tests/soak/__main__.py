"""A long run: everything a compiled function meets in a process that lives for days, in random order, against eager.

    python -m tests.soak --minutes 30 --seed 0

Each activity runs once, then random ones until the time is over. Ends with a table, and with a status other than 0
where a result was wrong, an activity raised or did not end, or memory grew. A crash shows as the process's own status,
with the stack of every thread. Another backend, ``TORCHKILN_TEST_BACKEND=aot_eager``, shows what is torch's own.
"""

from __future__ import annotations

import argparse
import faulthandler
import logging
import sys
import time
import traceback
import warnings
from collections import Counter

import torch

import torchkiln
from tests.soak.activities import ACTIVITIES, Soak
from tests.soak.memory import MIB, Growth, Sample, growth, sample

_PROGRESS_SECONDS = 5.0
_SAMPLE_SECONDS = 10.0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", default="", help="names of activities, separated by commas")
    parser.add_argument("--patience", type=float, default=300.0, help="seconds until an activity counts as hanging")
    given = parser.parse_args()
    warnings.simplefilter("ignore")
    for name in ("torch", "torch._dynamo", "torch._subclasses", "torchkiln"):
        logging.getLogger(name).setLevel(logging.CRITICAL)
    faulthandler.enable()
    names = [name for name in given.only.split(",") if name]
    activities = [a for a in ACTIVITIES if not names or a.__name__ in names]
    if len(activities) < len(names):
        parser.error(f"activities are: {', '.join(a.__name__ for a in ACTIVITIES)}")

    soak = Soak(given.seed)
    torch.manual_seed(given.seed)
    runs: Counter[str] = Counter()
    seconds: Counter[str] = Counter()
    failures: list[tuple[str, str]] = []
    samples: list[Sample] = []
    start = said = time.monotonic()
    waiting = list(activities)
    while waiting or time.monotonic() - start < 60 * given.minutes:
        activity = waiting.pop(0) if waiting else soak.random.choice(activities)
        name = activity.__name__
        faulthandler.dump_traceback_later(given.patience, exit=True)
        begun = time.monotonic()
        try:
            activity(soak)
        except Exception:
            failures.append((name, traceback.format_exc()))
            print(f"FAILED {name}\n{failures[-1][1]}", flush=True)
        faulthandler.cancel_dump_traceback_later()
        now = time.monotonic()
        runs[name] += 1
        seconds[name] += now - begun  # type: ignore[assignment]
        if not samples or now - start - samples[-1].seconds > _SAMPLE_SECONDS:
            samples.append(sample(now - start, torchkiln.stats().graphs))
        if now - said > _PROGRESS_SECONDS:
            said = now
            print(_progress(now - start, given.minutes, runs, failures, samples[-1]), flush=True)
        if len(failures) >= 10:
            print("stopped after ten failures", flush=True)
            break
    samples.append(sample(time.monotonic() - start, torchkiln.stats().graphs))
    return _summary(runs, seconds, failures, samples, growth(samples))


def _progress(
    elapsed: float, minutes: float, runs: Counter[str], failures: list[tuple[str, str]], last: Sample
) -> str:
    return (
        f"{elapsed / 60:6.1f} of {minutes:g} min  {sum(runs.values()):6} activities  {last.graphs:6} graphs"
        f"  {last.resident / MIB:6.0f} MiB  {len(failures)} failures"
    )


def _summary(
    runs: Counter[str],
    seconds: Counter[str],
    failures: list[tuple[str, str]],
    samples: list[Sample],
    found: Growth | None,
) -> int:
    failed = Counter(name for name, _ in failures)
    print(f"\n{'activity':28} {'runs':>6} {'seconds':>8} {'failures':>8}")
    for name in runs:
        print(f"{name:28} {runs[name]:6} {seconds[name]:8.1f} {failed[name]:8}")
    first, last = samples[0].resident / MIB, samples[-1].resident / MIB
    print(f"\nmemory: {first:.0f} MiB at first, {last:.0f} at the end", end="")
    if found is None:
        print("; too short a run to tell growth")
    else:
        print(
            f"; {found.per_minute / MIB:+.2f} MiB a minute after the warm-up with {found.graphs_per_minute:.0f} graphs"
            f" compiled a minute, at most {found.limit / MIB:.2f} allowed"
        )
    grows = found is not None and found.is_too_much
    print("memory grows" if grows else "", f"{len(failures)} failures" if failures else "no failures", flush=True)
    return 1 if failures or grows else 0


if __name__ == "__main__":
    sys.exit(main())
