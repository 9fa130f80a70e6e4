"""The report in a browser: clicks, search, stepping, keys, colours, phones, large graphs."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.bench.made_up import figures, record
from tests.debug.report.made_up import MODEL, NASTY
from torchkiln.bench.html_plot import html_plot

Show = Callable[..., Any]
VIEWS = ("overview", "graph", "passes", "kernels", "memory", "fusion", "capture")


def _related(page: Any) -> set[str]:
    """Names of the nodes that are lit up in the drawing."""
    keys = page.eval_on_selector_all(".graph .related", "all => all.map(box => box.dataset.key)")
    return {key.removeprefix("node ") for key in keys}


def _lit_lines(page: Any) -> list[str]:
    return _texts_once_drawn(page, ".source .row.related .no")


def _texts_once_drawn(page: Any, selector: str) -> list[str]:
    """Texts of rows of code: the browser draws blocks of rows when they come into view, and has no texts before."""
    drawn = "s => { const f = [...document.querySelectorAll(s)]; return f.length && f.every(e => e.innerText.trim()); }"
    page.wait_for_function(drawn, arg=selector)
    return [text.strip() for text in page.locator(selector).all_inner_texts()]


def _wait_for_drawing(page: Any) -> None:
    page.wait_for_selector(".graph .box")
    page.wait_for_function("!document.querySelector('.graph').hasAttribute('aria-busy')")


def test_the_overview_has_times_speed_and_what_deserves_a_look(show: Show) -> None:
    page = show()
    cards = page.locator(".cards").inner_text()
    assert "3.00 ×" in cards
    assert "50.0 µs a call, eager 150 µs" in cards
    assert "110 ms" in cards
    hints = page.locator(".hints").inner_text()
    assert "graph 1 backward runs eagerly: an operator is not known" in hints
    assert "forward was compiled again: x.size(0) == 32" in hints
    # 24576 bytes in 2.5 µs and 100000 operations at 2.4e11 a second: arithmetic takes 0.4167 µs, a sixth.
    assert "kernel0 takes 33 % of graph 1 forward and reaches 17 % of this machine's arithmetic." in hints


def test_a_click_leads_from_node_to_source_and_kernel_to_code_and_back(show: Show) -> None:
    page = show("#graph")
    _wait_for_drawing(page)
    page.click('[data-key="node add"]')
    page.wait_for_selector(".inspector h3:has-text('add')")
    assert _lit_lines(page) == ["12"]
    assert _related(page) == {"add"}
    page.click(".inspector .card >> text=kernel0")
    page.wait_for_selector(".kernel-detail h2:has-text('kernel0')")
    assert "red0 = max" in _texts_once_drawn(page, ".kernel-detail .code")[0]
    page.click(".kernel-detail >> text=LLVM")
    page.wait_for_selector(".kernel-detail .code:has-text('define void @kernel0')")
    page.click(".kernel-detail >> text=Assembly")
    page.wait_for_selector(".kernel-detail .code:has-text('vaddps')")
    page.click(".kernel-detail >> text=Show in graph")
    _wait_for_drawing(page)
    page.wait_for_selector(".inspector h3:has-text('kernel0')")
    assert _related(page) == {"relu", "add", "_softmax"}
    assert _lit_lines(page) == ["11", "12"]
    page.go_back()
    page.wait_for_selector(".kernel-detail .code:has-text('vaddps')")


def test_a_line_of_the_source_lights_up_its_nodes_and_kernels(show: Show) -> None:
    page = show("#graph")
    _wait_for_drawing(page)
    page.click(".source .row.linked >> text=self.linear")
    page.wait_for_selector(f".inspector h3:has-text('{MODEL.rpartition('/')[2]}:10')")
    assert _related(page) == {"permute", "mm"}
    assert "sgemm" in page.locator(".inspector").inner_text()
    assert "float32 matmuls go to BLAS" in page.locator(".inspector").inner_text()
    page.click(".inspector >> text=permute")
    page.wait_for_selector(".inspector h3:has-text('permute')")
    page.click(".inspector dd a:has-text('linear')")
    page.wait_for_selector(".stages [aria-current]:has-text('captured')")
    assert page.locator(".inspector h3").inner_text() == "linear"
    page.click(".stages >> text=post-grad")
    page.wait_for_selector(".inspector h3:has-text('permute')")


def test_stages_without_nodes_are_texts_and_nodes_are_a_list_too(show: Show) -> None:
    page = show("#graph?s=3")
    assert "arena of 8192 bytes" in _texts_once_drawn(page, ".middle .code")[0]
    page.click(".stages >> text=post-grad")
    page.click(".middle >> text=List")
    listed = page.locator(".node-list")
    assert listed.locator("summary").all_inner_texts()[0].startswith("block")
    listed.locator("summary", has_text="block").first.click()
    listed.locator("a", has_text="_softmax").click()
    page.wait_for_selector(".inspector h3:has-text('_softmax')")
    page.click(".middle >> text=Text")
    (row,) = _texts_once_drawn(page, ".middle .row.related")
    assert row.endswith("_softmax = aten._softmax.default(add)")
    page.click(".middle .row.linked >> text=aten.relu")
    page.wait_for_selector(".inspector h3:has-text('relu')")


def test_groups_open_and_close_by_click_and_by_key(show: Show) -> None:
    page = show("#graph")
    _wait_for_drawing(page)
    page.click("text=Close all")
    page.wait_for_selector('[data-key="block"][aria-expanded="false"]')
    assert page.locator('[data-key="node add"]').count() == 0
    page.click('[data-key="block"]')
    page.wait_for_selector('[data-key="block"][aria-expanded="true"]')
    page.wait_for_selector('[data-key="node add"]')
    page.focus('[data-key="block.linear"]')
    page.keyboard.press("Enter")
    page.wait_for_selector('[data-key="node mm"]')
    assert page.evaluate("document.activeElement.dataset.key") == "block.linear"
    page.keyboard.press("ArrowDown")
    assert page.evaluate("document.activeElement.dataset.key").startswith("node ")
    name = page.evaluate("document.activeElement.dataset.key").removeprefix("node ")
    page.keyboard.press("Enter")
    page.wait_for_selector(f".inspector h3:has-text('{name}')")
    page.keyboard.press("Escape")
    page.wait_for_selector(".graph:not(.selecting)")


def test_the_drawing_zooms_by_wheel_button_and_key(show: Show) -> None:
    page = show("#graph")
    _wait_for_drawing(page)

    def scale() -> float:
        return float(page.get_attribute(".graph", "data-scale"))

    start = scale()
    page.hover(".graph")
    page.mouse.wheel(0, -300)
    page.wait_for_function(f"Number(document.querySelector('.graph').dataset.scale) > {start} * 1.2")
    wheeled = scale()
    page.click('[aria-label^="Zoom out"]')
    assert scale() < wheeled
    page.focus(".graph")
    before = scale()
    page.keyboard.press("+")
    assert scale() > before
    page.keyboard.press("0")
    assert scale() <= before
    moved = page.get_attribute(".graph > g", "transform")
    page.keyboard.press("ArrowLeft")
    assert page.get_attribute(".graph > g", "transform") != moved


def test_search_finds_nodes_kernels_passes_and_lines_by_keys_alone(show: Show) -> None:
    page = show("#graph")
    _wait_for_drawing(page)
    page.keyboard.press("/")
    page.keyboard.type("softmax")
    assert page.inner_text("#search-said") == "2 results"  # the node, and the line of the source
    first = page.locator("#search-results [aria-selected=true]")
    assert "_softmax" in first.inner_text()
    page.keyboard.press("ArrowDown")
    assert "return torch.softmax" in first.inner_text()
    assert page.get_attribute("#search", "aria-activedescendant") == "result-1"
    page.keyboard.press("Enter")
    page.wait_for_selector(".inspector h3:has-text('model.py:12')")
    assert page.is_hidden("#search-results")
    page.fill("#search", "canonical")
    page.keyboard.press("Enter")
    page.wait_for_selector(".stepper h2:has-text('canonical')")
    page.fill("#search", "kernel1")
    page.keyboard.press("Enter")
    page.wait_for_selector(".kernel-detail h2:has-text('kernel1')")
    page.fill("#search", "nothing has this name")
    assert page.inner_text("#search-said") == "No results"
    page.keyboard.press("Escape")
    assert page.is_hidden("#search-results")


def test_passes_are_stepped_through_with_changes_marked(show: Show) -> None:
    page = show("#passes")
    assert page.locator(".stepper h2").inner_text() == "canonical"
    assert page.locator(".pass-list a").count() == 2
    row = page.locator(".diff tr.changed")
    assert row.count() == 1
    assert row.locator("del").inner_text() == "t"
    assert row.locator("ins").inner_text() == "permute"
    assert page.locator(".stepper button", has_text="Previous").is_disabled()
    page.click(".stepper button:has-text('Next')")
    page.wait_for_selector(".stepper h2:has-text('Nasty')")
    page.focus(".pass-list [aria-current]")
    page.keyboard.press("ArrowUp")
    page.wait_for_selector(".stepper h2:has-text('canonical')")
    page.wait_for_function("document.activeElement.textContent.includes('canonical')")
    page.uncheck(".passes input")
    page.wait_for_function("document.querySelectorAll('.pass-list a').length === 3")
    page.click(".pass-list >> text=normalize")
    page.wait_for_selector("text=This pass changed nothing.")


def test_lines_that_stayed_are_folded_and_open(show: Show) -> None:
    page = show("#passes?p=3", "large")
    assert page.locator(".diff tr.changed").count() == 10
    assert page.locator(".diff tr").count() < 120
    fold = page.locator(".diff .folded button").first
    count = int(fold.inner_text().split()[0])
    before = page.locator(".diff tr").count()
    fold.click()
    assert page.locator(".diff tr").count() == before + count - 1


def test_the_comparison_finds_the_lines_that_an_edit_left(show: Show) -> None:
    page = show()
    draw = random.Random(1)
    for _ in range(40):
        before = draw.sample(range(1000), draw.randrange(30))
        kept = [line for line in before if draw.random() < 0.7]
        after = [line for old in kept for line in (*draw.sample(range(1000, 9000), draw.randrange(3)), old)]
        pairs = page.evaluate("async ([a, b]) => (await import('report/diff.js')).sameLines(a, b)", [before, after])
        assert [before[i] for i, _ in pairs] == kept
        assert [after[j] for _, j in pairs] == kept


def test_the_comparison_of_lines_that_repeat_pairs_equal_lines_in_order(show: Show) -> None:
    page = show()
    draw = random.Random(2)
    for _ in range(40):
        a, b = ([draw.randrange(4) for _ in range(draw.randrange(15))] for _ in range(2))
        pairs = page.evaluate("async ([a, b]) => (await import('report/diff.js')).sameLines(a, b)", [a, b])
        assert all(a[i] == b[j] for i, j in pairs)
        assert all(i < k and j < m for (i, j), (k, m) in itertools.pairwise(pairs))
        assert bool(pairs) == bool(set(a) & set(b))


def test_the_roofline_puts_kernels_where_their_figures_say(show: Show) -> None:
    page = show("#kernels")
    script = "all => all.map(c => [c.dataset.key, +c.getAttribute('cx'), +c.getAttribute('cy')])"
    at = {key: (x, y) for key, x, y in page.eval_on_selector_all(".roofline circle", script)}
    # kernel0: 4.07 operations a byte, 40 GFLOP/s; sgemm: 10.67 and 65.5; kernel1 has no operations.
    assert set(at) == {"k:0", "c:0"}
    assert at["k:0"][0] < at["c:0"][0]
    assert at["k:0"][1] > at["c:0"][1]
    tables = page.locator(".kernel-detail").inner_text()
    assert "float32 matmuls go to BLAS" in tables
    # 4096 bytes in two launches at 9e10 bytes a second are 4.6 % of 1 µs.
    assert "4.6 % bandwidth" in tables
    page.click('.roofline [data-key="c:0"]')
    page.wait_for_selector(".kernel-detail h2:has-text('sgemm')")
    page.focus(".kernel-list [aria-current]")
    page.keyboard.press("ArrowDown")
    page.wait_for_selector(".kernel-detail h2:has-text('kernel0')")


def test_the_underline_of_a_name_is_below_its_underscores(show: Show) -> None:
    page = show("#graph?on=n:_softmax")
    link = ".inspector a.mono, .inspector .line-link .place"
    page.wait_for_selector(link)
    part = "parseFloat(style.textUnderlineOffset) / parseFloat(style.fontSize)"
    read = f"all => all.map(a => getComputedStyle(a)).map(style => {part})"
    offsets = page.eval_on_selector_all(link, read)
    assert offsets
    assert min(offsets) > 0.25  # of the font's size, where an underscore is
    assert page.eval_on_selector(".inspector a", "a => getComputedStyle(a).overflowWrap") == "anywhere"


def test_memory_fusions_and_capture_are_shown(show: Show) -> None:
    page = show("#memory")
    text = page.inner_text("#view")
    assert "A call takes 16.0 KiB at most, 8.00 KiB of it in the arena, which is taken for the whole call." in text
    assert page.get_attribute("#view svg", "aria-label").endswith("the most, 16.0 KiB, in step 2, kernel0")
    assert page.locator(".life").count() == 1
    page.keyboard.press("6")
    page.wait_for_selector("text=3 fusion decisions")
    assert "mm is a library call" in page.inner_text("#view")
    assert page.locator("td:text-is('not fused')").count() == 1
    page.click("text=2 fused")
    assert page.locator("td:text-is('inlined')").count() == 1
    assert "mm is a library call" not in page.inner_text("#view")
    page.click(".page a >> text=add")
    page.wait_for_selector(".inspector h3:has-text('add')")
    page.keyboard.press("7")
    page.wait_for_selector("text=1 graph break")
    text = page.inner_text("#view")
    assert "x.size(0) == 32" in text
    assert "the source of add differs" in text
    # The guards are rows of code, which the browser draws later.
    page.wait_for_function("document.querySelector('#view').innerText.includes('x.dtype == torch.float32')")
    page.select_option("#compilation", "1")
    page.wait_for_selector("text=0 inputs of graph 1 backward")


def test_a_graph_without_kernels_memory_or_passes_has_pages_that_say_so(show: Show) -> None:
    said = {
        "memory?c=1": "No memory plan was recorded",
        "memory?c=2": "A call takes 0 B at most",
        "kernels?c=1": "This graph runs eagerly: an operator is not known",
        "kernels?c=2": "This graph has no kernels and calls nothing.",
        "passes?c=2": "No pass was recorded",
        "fusion?c=2": "No fusion was considered",
    }
    page = show()
    for address, text in said.items():
        page.evaluate(f"location.hash = '{address}'")
        page.wait_for_selector(f"#view >> text={text}")


def test_markup_in_the_users_program_stays_text(show: Show) -> None:
    page = show()
    for view in ("overview", "graph?on=l:app/model.py:10", "passes?p=2", "fusion", "capture"):
        page.evaluate(f"location.hash = '{view}'")
        page.wait_for_selector(f".view-{view.partition('?')[0]}")
        page.wait_for_function("text => document.body.innerText.includes(text)", arg=NASTY)
    page.fill("#search", "<img src=x")
    assert NASTY in page.inner_text("#search-results")
    assert page.evaluate("window.broken") is None
    assert page.locator("img").count() == 0


# Texts and what is behind them, looked at in both schemes.
CONTRAST = """selector => {
  const canvas = document.createElement('canvas').getContext('2d', {willReadFrequently: true});
  const light = colour => {
    canvas.clearRect(0, 0, 1, 1);
    canvas.fillStyle = colour;
    canvas.fillRect(0, 0, 1, 1);
    const parts = [...canvas.getImageData(0, 0, 1, 1).data].slice(0, 3).map(v => v / 255);
    const [r, g, b] = parts.map(v => (v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4));
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const behind = e => {
    for (; e; e = e.parentElement) {
      const colour = getComputedStyle(e).backgroundColor;
      if (colour !== 'rgba(0, 0, 0, 0)') return colour;
    }
    return 'white';
  };
  return [...document.querySelectorAll(selector)].filter(e => e.checkVisibility() && e.textContent.trim()).map(e => {
    const pair = [light(getComputedStyle(e).color), light(behind(e))].sort((a, b) => b - a);
    return [(pair[0] + 0.05) / (pair[1] + 0.05), e.className + ' ' + e.textContent.slice(0, 30)];
  });
}"""


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_texts_can_be_read_in_both_colour_schemes(show: Show, scheme: str) -> None:
    page = show(scheme=scheme)
    background = page.evaluate("getComputedStyle(document.body).backgroundColor")
    assert (sum(map(int, background[4:-1].split(", "))) > 600) == (scheme == "light")
    looked_at = "h1, h2, h3, p, td, th, a, small, strong, span, label, button, dt, dd, del, ins, code"
    for view in VIEWS:
        page.evaluate(f"location.hash = '{view}'")
        page.wait_for_selector(f".view-{view}")
        found = page.evaluate(CONTRAST, looked_at)
        assert len(found) > 15
        assert [entry for entry in found if entry[0] < 4.5] == [], view


def test_the_choice_of_colours_wins_over_the_browser_in_all_pages(show: Show, browser: Any, tmp_path: Path) -> None:
    page = show(scheme="dark")
    dark = page.evaluate("getComputedStyle(document.body).backgroundColor")
    page.click(".scheme >> text=Light")
    light = page.evaluate("getComputedStyle(document.body).backgroundColor")
    assert light != dark
    plot = tmp_path / "plot.html"
    plot.write_text(html_plot([record("mish", {"eager": figures(8.0, 0.1), "kiln": figures(1.0, 2.0)})]))
    other = browser.new_page(color_scheme="light")
    other.goto(plot.as_uri())
    assert other.evaluate("getComputedStyle(document.body).backgroundColor") == light
    other.focus("#scheme-auto")
    other.keyboard.press("ArrowRight")
    other.keyboard.press("ArrowRight")
    assert other.evaluate("getComputedStyle(document.body).backgroundColor") == dark
    other.close()


def test_nothing_is_wider_than_a_phone(show: Show) -> None:
    page = show(width=375)
    for view in VIEWS:
        page.evaluate(f"location.hash = '{view}'")
        page.wait_for_selector(f".view-{view}")
        assert page.evaluate("document.documentElement.scrollWidth") <= 375, view
        assert page.evaluate("document.getElementById('view').scrollWidth") <= 375, view
    page.evaluate("location.hash = 'graph'")
    _wait_for_drawing(page)
    page.click('[data-key="node add"]')
    page.click(".phone >> text=Details")
    assert page.locator(".inspector h3").inner_text() == "add"
    assert page.is_hidden(".graph")
    page.click(".phone >> text=Source")
    assert _lit_lines(page) == ["12"]


NAMELESS = """() => {
  const parts = 'a, button, select, input, [role=button], [role=region], svg:not([aria-hidden])';
  const named = e => e.getAttribute('aria-label') || e.textContent.trim() || e.labels?.length;
  const met = e => e.checkVisibility() && !e.closest('[aria-hidden]');
  return [...document.querySelectorAll(parts)].filter(e => met(e) && !named(e)).map(e => e.outerHTML.slice(0, 90));
}"""


def test_a_screen_reader_finds_its_way(show: Show) -> None:
    page = show()
    for landmark in ("header", "main", "nav[aria-label]", "[role=search]", "h1"):
        assert page.locator(landmark).first.is_visible(), landmark
    for view in VIEWS:
        page.evaluate(f"location.hash = '{view}'")
        page.wait_for_selector(f".view-{view}")
        assert page.evaluate(NAMELESS) == [], view
        assert page.locator("nav [aria-current=page]").inner_text().lower() == view
    page.evaluate("location.hash = 'graph?on=n:add'")
    page.wait_for_function("document.getElementById('said').textContent === 'add: 1 node, 1 kernel or call, 2 lines'")


# The part of the page that has the focus, and whether one sees that it has.
FOCUS = """() => {
  const e = document.activeElement;
  const seen = e === document.body || e.matches('.box, .unseen') || getComputedStyle(e).outlineStyle !== 'none';
  return [e.closest('.frame-header, .source, .middle, .right')?.className, seen || e.outerHTML.slice(0, 200)];
}"""


def test_the_tab_key_reaches_every_part_and_its_focus_is_seen(show: Show) -> None:
    page = show("#graph?on=n:add")
    _wait_for_drawing(page)
    parts = set()
    for _ in range(60):
        page.keyboard.press("Tab")
        part, seen = page.evaluate(FOCUS)
        parts.add(part)
        assert seen is True
    assert {"frame-header", "pane source", "pane middle", "pane right"} <= parts
    page.keyboard.press("?")
    assert page.locator("dialog").is_visible()
    page.keyboard.press("Escape")
    assert not page.locator("dialog").is_visible()


OVERLAPS = """() => {
    const rows = [...document.querySelectorAll(".inspector li")];
    const bottom = (row) => Math.max(...[row, ...row.children].map((part) => part.getBoundingClientRect().bottom));
    return rows.slice(1).filter((row, k) => bottom(rows[k]) > row.getBoundingClientRect().top + 1).length;
}"""


def test_the_line_of_a_kernel_stands_beside_that_kernel_whatever_its_name(show: Show) -> None:
    page = show("#graph")
    page.wait_for_selector(".inspector li .where")
    assert page.locator(".inspector li .where").count() > 1
    page.add_style_tag(content=".inspector .where { height: 5rem }")  # as one that has no room beside a long name
    assert page.evaluate(OVERLAPS) == 0


@pytest.mark.parametrize("name", ["large", "flat"])
def test_5000_nodes_open_within_3_seconds_and_20_megabytes(show: Show, pages: dict[str, Path], name: str) -> None:
    assert pages[name].stat().st_size < 20e6
    page = show("#graph", name)
    assert int(page.get_attribute("html", "data-ready")) < 3000
    _wait_for_drawing(page)
    assert page.evaluate("performance.now()") < 3000
    assert 1 < page.locator(".graph .box").count() < 200
    page.fill("#search", "node_4321")
    page.keyboard.press("Enter")
    page.wait_for_selector('.graph .chosen[data-key="node node_4321"]')
    page.keyboard.press("Escape")
    page.click("text=Open all")
    page.wait_for_function("document.querySelectorAll('.graph .box').length > 500")
    assert page.locator(".graph .box").count() <= 1500
