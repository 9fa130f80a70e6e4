"""The page of a recording: data, modules and style sheet put into the frame that all pages share."""

from __future__ import annotations

import base64
import json
from functools import cache
from importlib.resources import files

from torchkiln.debug.recording.model import Recording
from torchkiln.debug.report.data import packed
from torchkiln.web_page import web_page

_FOLDER = files(__name__.rpartition(".")[0])


def report_page(recording: Recording) -> str:
    """The report as one HTML file. Texts of the user are data in it and never markup."""
    parts = (
        _file("body.html"),
        _data("recording", packed(recording)),
        _data("layout-library", _base64(_file("vendor/dagre.min.js"))),
        _data("layout-worker", _base64(_file("js/layout_worker.js"))),
        '<script type="module">import "report/main.js";</script>',
    )
    head = f"<style>{_file('report.css')}</style>\n{_import_map()}\n"
    return web_page(recording.about.name, parts, head=head, tools=_file("search.html"), main="report")


def _data(name: str, letters: str) -> str:
    """Something for the scripts to read; ``letters`` are those of base64."""
    return f'<script type="text/plain" id="{name}">{letters}</script>'


@cache
def _import_map() -> str:
    """The modules of the page by name. A browser gets them from here, not from the network."""
    scripts = sorted(item.name for item in (_FOLDER / "js").iterdir() if item.name.endswith(".js"))
    modules = {f"report/{name}": _module(name) for name in scripts if name != "layout_worker.js"}
    return f'<script type="importmap">{json.dumps({"imports": modules})}</script>'


def _module(name: str) -> str:
    """A module as an address; ``sourceURL`` is its name for a browser's debugger."""
    source = _file(f"js/{name}")
    return f"data:text/javascript;base64,{_base64(f'{source}//# sourceURL=report/{name}')}"


@cache
def _file(name: str) -> str:
    return _FOLDER.joinpath(*name.split("/")).read_text(encoding="utf-8")


def _base64(text: str) -> str:
    return base64.b64encode(text.encode()).decode("ascii")
