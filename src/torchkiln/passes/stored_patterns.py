"""Writes the stored patterns and docs/patterns.md: ``python -m torchkiln.passes.stored_patterns [--check]``.

A pattern belongs to the releases of torch whose trace gives it. Run with another release, the command adds that release
to the sections that are the same there, and a section of its own where the trace differs.
"""

from __future__ import annotations

import sys
from pathlib import Path

from torchkiln import patterns
from torchkiln.passes import all_pipelines
from torchkiln.passes.joint.attention.page import PAGE, page
from torchkiln.patterns import text
from torchkiln.patterns.registration import rewrites_from_files, sections, torch_release

FOLDER = Path(patterns.__file__).parent / "stored"
_HEAD = "# Written by `python -m torchkiln.passes.stored_patterns`: traced patterns of built-in rewrites.\n"


def main(arguments: list[str]) -> int:
    stale = []
    for path, content in generated().items():
        before = path.read_text(encoding="utf-8") if path.exists() else ""
        if content == before:
            continue
        stale.append(path.name)
        if "--check" not in arguments:
            path.write_text(content, encoding="utf-8")
    if stale and "--check" in arguments:
        print(f"out of date: {', '.join(stale)}; run python -m torchkiln.passes.stored_patterns", file=sys.stderr)
        return 1
    print(f"{len(stale)} files written" if stale else "all files are current")
    return 0


def generated() -> dict[Path, str]:
    """What the files should hold, by path: one file for each family, the part of a name before its first slash.

    In a checkout, the page about them too.
    """
    all_pipelines()  # registers the built-in rewrites
    families: dict[str, dict[str, str]] = {}
    for name, rewrite in rewrites_from_files().items():
        family = name.partition("/")[0]
        families.setdefault(family, {})[name] = text.write(rewrite.traced_pattern())
    files = {FOLDER / f"{family}.txt": _merged(FOLDER / f"{family}.txt", made) for family, made in families.items()}
    return {**files, PAGE: page()} if PAGE.exists() else files


def _merged(path: Path, made: dict[str, str]) -> str:
    """The file with the patterns of this release of torch put in, and those of other releases kept."""
    release = torch_release()
    merged: dict[tuple[str, str], set[str]] = {(name, body): {release} for name, body in made.items()}
    before = path.read_text(encoding="utf-8") if path.exists() else ""
    for name, body, releases in sections(before):
        if name in made:
            merged.setdefault((name, body), set()).update(set(releases) - {release})
    parts = [
        f"== {name}: {' '.join(sorted(releases))}\n{body}"
        for (name, body), releases in sorted(merged.items())
        if releases
    ]
    return _HEAD + "\n" + "\n".join(parts)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
