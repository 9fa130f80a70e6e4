"""HTML pages that load nothing: the frame that the reports share, with its header, colours, tables and keys.

Light and dark follow the browser, or the choice in the header, which needs no script.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from functools import cache
from html import escape
from importlib.resources import files

_FLAME = (
    '<svg viewBox="0 0 24 24" aria-hidden="true"><path d="M13 1c1 4-1 6-3 8.5S6.5 13.5 6.5 16a6 6 0 0 0 12 .2'
    "c0-3-1.5-5-2.5-6.2-.3 1.7-1 2.7-2.2 3.3C14.6 9 15.5 5 13 1z"
    'M12 22a3.2 3.2 0 0 1-3-3.3c0-1.8 1.5-2.7 2.3-4.4 1.9 1.3 3.7 2.8 3.7 4.7a3 3 0 0 1-3 3z"/></svg>'
)


def web_page(title: str, parts: Iterable[str], *, head: str = "", tools: str = "", main: str = "frame-main") -> str:
    """A whole page; ``parts`` are HTML, ``title`` is text.

    ``head`` is HTML for the head, ``tools`` for the header, ``main`` the class of what holds the parts.
    """
    title = escape(title)
    meta = '<meta charset="utf-8"/>\n<meta name="viewport" content="width=device-width, initial-scale=1"/>\n'
    header = f'<span class="brand">{_FLAME}torchkiln</span><h1>{title}</h1>{tools}{_scheme_choice()}'
    body = "\n".join(part for part in parts if part)
    return (
        f'<!DOCTYPE html>\n<html lang="en">\n<head>\n{meta}<title>{title}</title>\n<style>{_style()}</style>\n{head}'
        f'</head>\n<body>\n<header class="frame-header">{header}</header>\n<main class="{main}">\n{body}\n</main>\n'
        "</body>\n</html>"
    )


def table(headings: Sequence[str], rows: Iterable[Sequence[str]], words: Collection[str]) -> str:
    """A table whose cells are HTML; the columns of the headings ``words`` are text, the others figures."""
    marks = [' class="text"' if heading in words else "" for heading in headings]

    def line(tag: str, cells: Sequence[str]) -> str:
        return f"<tr>{''.join(f'<{tag}{mark}>{cell}</{tag}>' for mark, cell in zip(marks, cells, strict=True))}</tr>"

    body = "\n".join(line("td", row) for row in rows)
    return f"<table><thead>{line('th', headings)}</thead>\n<tbody>\n{body}\n</tbody></table>"


def key(colors: Mapping[str, str]) -> str:
    """What the colors of a drawing mean: names with their colors."""
    items = (f'<span class="key" style="background: {color}"></span>{escape(name)}' for name, color in colors.items())
    return f"<p>{''.join(items)}</p>"


def _scheme_choice() -> str:
    """Radio buttons that the style sheet looks at."""
    labels = []
    for scheme in ("auto", "light", "dark"):
        mark = ' checked="checked"' if scheme == "auto" else ""
        button = f'<input class="unseen" type="radio" name="scheme" id="scheme-{scheme}"{mark}/>'
        labels.append(f"<label>{button}{scheme.capitalize()}</label>")
    return f'<div class="scheme" role="radiogroup" aria-label="Colours">{"".join(labels)}</div>'


@cache
def _style() -> str:
    return files(__name__).joinpath("frame.css").read_text(encoding="utf-8")
