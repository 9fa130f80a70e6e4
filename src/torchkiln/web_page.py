"""HTML pages of drawings and tables that load nothing and need no script: what the reports share."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from html import escape

_STYLE = """
:root { color-scheme: light dark; --line: #8884; }
body { font: 15px/1.45 system-ui, sans-serif; max-width: 72rem; margin: 2rem auto; padding: 0 1rem; }
h1 { font-size: 1.5rem; } h2 { font-size: 1.15rem; margin-top: 2.2rem; }
table { border-collapse: collapse; width: 100%; font-variant-numeric: tabular-nums; }
th, td { padding: .3rem .6rem; border-bottom: 1px solid var(--line); text-align: right; vertical-align: top; }
th.text, td.text { text-align: left; }
code { font-family: ui-monospace, monospace; font-size: .87em; overflow-wrap: anywhere; }
svg { width: 100%; height: auto; font: 12px system-ui, sans-serif; }
svg text { fill: currentColor; } .axis { stroke: currentColor; opacity: .35; }
.grid { stroke: currentColor; opacity: .1; }
circle { fill-opacity: .75; } circle:hover { fill-opacity: 1; stroke: currentColor; }
.curve { fill: none; stroke: currentColor; opacity: .35; }
.key { display: inline-block; width: .8em; height: .8em; margin: 0 .3em 0 1em; border-radius: 50%; }
summary { cursor: pointer; } .remark { opacity: .75; }
"""


def web_page(title: str, parts: Iterable[str]) -> str:
    """A whole page; ``parts`` are HTML, ``title`` is text."""
    title = escape(title)
    head = (
        '<meta charset="utf-8"/>\n<meta name="viewport" content="width=device-width, initial-scale=1"/>\n'
        f"<title>{title}</title>\n<style>{_STYLE}</style>"
    )
    body = "\n".join(part for part in (f"<h1>{title}</h1>", *parts) if part)
    return f'<!DOCTYPE html>\n<html lang="en">\n<head>\n{head}\n</head>\n<body>\n{body}\n</body>\n</html>'


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
