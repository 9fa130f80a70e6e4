"""The plot: one point for each cell and backend, where it belongs, as a picture and as a page without scripts."""

from __future__ import annotations

import re
import sys
from xml.etree import ElementTree

import pytest

from tests.bench.made_up import figures, record
from torchkiln.bench.html_plot import html_plot
from torchkiln.bench.plot import backends, limits, picture, points, ticks
from torchkiln.bench.records import Figures
from torchkiln.errors import KilnError

MISH = {"eager": figures(8.0, 0.1), "inductor": figures(4.0, 10.0), "kiln": figures(1.0, 2.0)}
ROPE = {"eager": figures(1.0, 0.1), "inductor": Figures(failure="<b>no compiler</b>"), "kiln": figures(2.0, 3.0)}
RECORDS = [record("mish", MISH), record("rope", ROPE)]


def test_a_point_for_each_cell_and_backend_but_eager() -> None:
    found = {(p.cell.entry, p.backend): (p.first_seconds, p.speedup) for p in points(RECORDS)}
    assert found == {
        ("mish", "inductor"): (10.0, 2.0),
        ("mish", "kiln"): (2.0, 8.0),
        ("rope", "kiln"): (3.0, 0.5),
    }
    assert backends(points(RECORDS)) == ["kiln", "inductor"]


def test_no_points_without_eager() -> None:
    assert points([record("mish", {"kiln": figures(1.0)})]) == []


def test_ticks_of_a_logarithmic_axis() -> None:
    assert list(ticks(0.4, 12.0)) == [0.5, 1.0, 2.0, 5.0, 10.0]
    low, high = limits([0.5, 8.0])
    assert low < 0.5
    assert high > 8.0
    assert limits([2.0])[0] < 1.0 < limits([0.5])[1]


def test_the_picture_is_a_png() -> None:
    for records in (RECORDS, []):
        assert picture(records).startswith(b"\x89PNG\r\n\x1a\n")


def test_without_matplotlib_one_sentence_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(KilnError, match=r"pip install 'torchkiln\[bench\]', or leave it out with: --no-plot") as caught:
        picture(RECORDS)
    assert "\n" not in str(caught.value)


def test_the_page_shows_each_point_where_it_belongs_and_says_what_it_is() -> None:
    text = html_plot(RECORDS)
    circles = re.findall(r'<circle cx="([\d.]+)" cy="([\d.]+)"[^>]*><title>([^<]*)</title>', text)
    at = {title.partition(":")[0]: (float(x), float(y)) for x, y, title in circles}
    assert len(circles) == 3
    inductor, ours = at["mish inference float32 static, inductor"], at["mish inference float32 static, kiln"]
    slower = at["rope inference float32 static, kiln"]
    assert ours[0] < slower[0] < inductor[0]
    assert ours[1] < inductor[1] < slower[1]
    assert any("8.00 × eager, 1.000 ms a step, first call 2.00 s" in title for _, _, title in circles)
    assert "A processor, 2 cores; 2026-01-02" in text


def test_the_page_loads_nothing_and_runs_no_script() -> None:
    text = html_plot([record("<script>", MISH)])
    assert "<script" not in text
    assert not re.search(r"\b(src|href)=|https?:|url\(|@import", text)
    ElementTree.fromstring(text.removeprefix("<!DOCTYPE html>"))


def test_a_page_of_nothing_is_a_page() -> None:
    ElementTree.fromstring(html_plot([]).removeprefix("<!DOCTYPE html>"))
