"""What a report carries: all texts, each line once; files of the package; nothing that could be taken for markup."""

from __future__ import annotations

import base64
import fnmatch
import gzip
import hashlib
import json
import re
import tomllib
from pathlib import Path
from typing import Any

from tests.debug.report.made_up import NASTY, large, small
from torchkiln.debug.report import report_page
from torchkiln.debug.report.data import report_data

ROOT = Path(__file__).parents[3]
REPORT = ROOT / "src" / "torchkiln" / "debug" / "report"


def _carried(page: str) -> dict[str, Any]:
    match = re.search(r'<script type="text/plain" id="recording">([\w+/=]+)</script>', page)
    assert match is not None
    content: dict[str, Any] = json.loads(gzip.decompress(base64.b64decode(match[1])))
    return content


def _text(data: dict[str, Any], number: int) -> str:
    runs = data["texts"][number]
    lines = [data["lines"][first + k] for first, count in zip(runs[::2], runs[1::2], strict=True) for k in range(count)]
    return "\n".join(lines)


def test_every_text_of_a_recording_can_be_read_from_its_page() -> None:
    recording = small()
    data = _carried(report_page(recording))
    assert tuple(_text(data, number) for number in data["numbers"]) == recording.texts
    assert {name: _text(data, number) for name, number in data["sources"].items()} == dict(recording.sources)
    kernel = data["compilations"][0]["kernels"][0]
    known = recording.compilations[0].kernels[0]
    codes = tuple(_text(data, kernel[kind]) for kind in ("text", "llvm", "assembly"))
    assert codes == (known.text, known.llvm, known.assembly)
    places = [tuple(data["places"][place]) for place in kernel["lines"]]
    assert places == [(line.file, line.line) for line in known.lines]


def test_a_line_that_many_texts_share_is_carried_once() -> None:
    recording = large(500)
    data = report_data(recording)
    kernels = recording.compilations[0].kernels
    codes = [text for kernel in kernels for text in (kernel.text, kernel.llvm, kernel.assembly)]
    texts = [*recording.texts, *recording.sources.values(), *codes]
    assert sorted(data["lines"]) == sorted({line for text in texts for line in text.split("\n")})
    # 500 lines, and ten that each of 40 passes changed.
    assert len({line for text in recording.texts for line in text.split("\n")}) == 900


def test_texts_of_the_user_are_no_markup_of_the_page() -> None:
    page = report_page(small())
    assert NASTY not in page
    assert "<b>" not in page
    assert "train.py &lt;b&gt;&amp;amp;&lt;/b&gt; Block</title>" in page
    assert _carried(page)["graph_breaks"][0]["reason"] == f"call of print {NASTY}"


def test_a_page_is_the_same_every_time() -> None:
    assert report_page(small()) == report_page(small())


def test_the_layout_library_is_the_one_that_make_fetched_with_its_licence() -> None:
    vendor = REPORT / "vendor"
    checksum, name = (vendor / "dagre.min.js.sha256").read_text().split()
    content = (vendor / name).read_bytes()
    assert hashlib.sha256(content).hexdigest() == checksum
    version = re.search(r"^DAGRE \?= (.+)$", (ROOT / "Makefile").read_text(), re.M)
    assert version is not None
    assert content.decode().startswith(f"/*! @dagrejs/dagre {version[1]},")
    assert b"Permission is hereby granted, free of charge" in content
    assert b"sourceMappingURL" not in content


def test_a_wheel_has_the_files_of_the_pages() -> None:
    patterns = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["package-data"]["torchkiln"]
    folder = ROOT / "src" / "torchkiln"
    files = [path for part in ("debug/report", "web_page") for path in (folder / part).rglob("*") if path.is_file()]
    data = [str(path.relative_to(folder)) for path in files if path.suffix not in (".py", ".pyc")]
    assert len(data) > 25
    assert [name for name in data if not any(fnmatch.fnmatch(name, pattern) for pattern in patterns)] == []
