"""``kiln cache`` itself: what is stored, how two keys differ, and why a script did not find its entries."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table

from torchkiln.cache.entry import MOST_BYTES, Entry
from torchkiln.cache.exchange import export_entries, import_entries
from torchkiln.cache.explain import explain
from torchkiln.cache.folder import reason
from torchkiln.cache.store import Cache, Miss, open_cache, record_misses
from torchkiln.config import resolve
from torchkiln.errors import CacheEntryError, CacheError
from torchkiln.scripts import run_script
from torchkiln.stats import counted

_PREFIX = 12  # digits of a digest in tables
_LONGEST_FIELD = 2000


def opened() -> Cache:
    """The cache of the settings in force; CacheError where there is none."""
    cache = open_cache(resolve())
    if cache is None:
        raise CacheError("There is no cache: it is off (KILN_CACHE=0), or its folder cannot be used.")
    return cache


def show_list(cache: Cache, console: Console) -> None:
    table = Table("kind", "key", "size", "made", "last used", "torchkiln", title=str(cache.folder.path))
    now, total, count = time.time(), 0, 0
    for file, head in cache.heads():
        total, count = total + file.size, count + 1
        made, used = _ago(now - head.origin.created), _ago(now - file.used)
        table.add_row(head.key.kind, file.digest[:_PREFIX], _size(file.size), made, used, head.origin.version)
    console.print(table)
    entries = counted(count, "entry", "entries")
    console.print(f"{entries}, {_size(total)} of {_size(cache.folder.limit)}", markup=False, highlight=False)


def show_entry(cache: Cache, prefix: str, console: Console) -> None:
    """The fields of the key of one entry, and whether it can be verified."""
    digest = _digest(cache, prefix)
    head = _head(cache, digest)
    _say(console, f"{head.key.kind} {digest}")
    _say(console, f"made {time.strftime('%Y-%m-%d %H:%M:%S', time.localtime(head.origin.created))}")
    _say(console, f"by torchkiln {head.origin.version}")
    try:
        _say(console, f"verified, {_size(len(cache.entry(digest).payload))} of payload")
    except CacheEntryError as error:
        _say(console, f"not usable: {error}")
    for name, value in head.key.fields.items():
        cut = "" if len(value) <= _LONGEST_FIELD else f"\n... {len(value) - _LONGEST_FIELD} more characters"
        _say(console, f"\n{name}:\n{value[:_LONGEST_FIELD]}{cut}")


def show_differences(cache: Cache, first: str, second: str, console: Console) -> None:
    """The fields in which the keys of two entries differ."""
    ours, theirs = (_head(cache, _digest(cache, prefix)).key for prefix in (first, second))
    lines = explain(ours, theirs) or ["the keys are equal"]
    for line in lines:
        _say(console, line)


def clear(cache: Cache, console: Console) -> None:
    removed = cache.folder.clear()
    _say(console, f"{counted(removed, 'entry', 'entries')} removed from {cache.folder.path}")


def verify(cache: Cache, console: Console) -> bool:
    """Read every entry whole and remove damaged ones; whether all are usable."""
    good = bad = 0
    for file in cache.folder.files():
        try:
            if file.size > MOST_BYTES:  # which is not read
                raise CacheEntryError(f"an entry has at most {MOST_BYTES} bytes, not {file.size}")
            entry = cache.entry(file.digest)
            entry.key, entry.origin  # noqa: B018  # parsed, so that their errors are found too
        except CacheEntryError as error:
            bad += 1
            done = "removed" if error.damaged else "left there"
            if error.damaged:
                cache.folder.remove(file.digest)
            _say(console, f"{file.digest[:_PREFIX]}: {error}; {done}")
        else:
            good += 1
    _say(console, f"{counted(good, 'entry', 'entries')} verified, {bad} not usable")
    return bad == 0


def export_to(cache: Cache, path: Path, console: Console) -> None:
    try:
        written = export_entries(cache, path)
    except OSError as error:
        raise CacheError(f"{path} cannot be written ({reason(error)}); give another file.") from error
    _say(console, f"{counted(written, 'entry', 'entries')} written to {path}")


def import_from(cache: Cache, path: Path, console: Console) -> bool:
    """Whether every entry of the archive is in the cache now."""
    if path.exists() and not path.is_file():  # a device may have no end
        raise CacheError(f"{path} is no file; give a file of: kiln cache export.")
    try:
        done = import_entries(cache, path)
    except OSError as error:
        raise CacheError(f"{path} cannot be read ({reason(error)}); give a file of: kiln cache export.") from error
    for line in done.refused:
        _say(console, f"refused: {line}")
    _say(console, f"{counted(done.stored, 'entry', 'entries')} imported, {len(done.refused)} refused")
    return not done.refused


def show_misses(script: Path, arguments: Sequence[str], console: Console) -> bool:
    """Run a script; for each lookup that missed, the nearest stored key and the fields in which it differs.

    False where the script raised something: its traceback comes first.
    """
    if not script.is_file():
        raise CacheError(f"There is no script {script}; give the path of a Python file.")
    started = time.time()
    with record_misses() as misses:
        done = run_script(script, arguments)
    _say(console, counted(len(misses), "miss", "misses"))
    for miss in misses:
        _show_miss(miss, started, console)
    return not done.raised


def _show_miss(miss: Miss, started: float, console: Console) -> None:
    key = miss.key
    nearest = miss.cache.nearest(key, before=started)
    if nearest is None:
        _say(console, f"\n{key.kind} {key.digest[:_PREFIX]}: nothing of this kind was stored")
        return
    _say(console, f"\n{key.kind} {key.digest[:_PREFIX]}: the nearest stored is {nearest.digest[:_PREFIX]}")
    for line in explain(nearest, key):
        _say(console, f"  {line}")


def _digest(cache: Cache, prefix: str) -> str:
    """The one digest that begins with ``prefix``."""
    found = [file.digest for file in cache.folder.files() if file.digest.startswith(prefix.lower())]
    if len(found) == 1:
        return found[0]
    which = f"{len(found)} keys begin" if found else "no key begins"
    raise CacheError(f"In {cache.folder.path} {which} with {prefix!r}; see: kiln cache list.")


def _head(cache: Cache, digest: str) -> Entry:
    for file, head in cache.heads():
        if file.digest == digest:
            return head
    raise CacheError(f"The entry {digest[:_PREFIX]} is damaged; remove it with: kiln cache verify.")


def _say(console: Console, text: str) -> None:
    console.print(text, markup=False, highlight=False, soft_wrap=True)


def _size(size: int) -> str:
    amount, units = float(size), ["B", "KiB", "MiB", "GiB", "TiB"]
    while amount >= 1024 and len(units) > 1:
        amount, units = amount / 1024, units[1:]
    return f"{amount:.0f} {units[0]}" if units[0] == "B" else f"{amount:.1f} {units[0]}"


def _ago(seconds: float) -> str:
    for unit, length in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= length:
            return f"{seconds / length:.0f} {unit} ago"
    return f"{max(seconds, 0):.0f} s ago"
