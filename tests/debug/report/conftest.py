"""A browser for the tests of pages: Debian's chromium, once per process."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.debug.report.made_up import large, small
from torchkiln.debug.report import report_page

SWITCHES = (
    *("--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking"),
    *("--disable-component-update", "--disable-sync"),
)


@pytest.fixture(scope="session")
def browser() -> Iterator[Any]:
    found = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if found is None:
        pytest.skip("needs a browser: apt-get install chromium")
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        started = playwright.chromium.launch(executable_path=found, headless=True, args=list(SWITCHES))
        yield started
        started.close()


@pytest.fixture(scope="session")
def pages(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Files with the report of a small recording, and of large ones in modules and without."""
    folder = tmp_path_factory.mktemp("report")
    recordings = {"small": small(), "large": large(5000), "flat": large(5000, modules=False)}
    for name, recording in recordings.items():
        (folder / f"{name}.html").write_text(report_page(recording), encoding="utf-8")
    return {name: folder / f"{name}.html" for name in recordings}


@pytest.fixture
def show(browser: Any, pages: dict[str, Path]) -> Iterator[Callable[..., Any]]:
    """Opens a report; a script that fails fails the test."""
    contexts: list[Any] = []
    failures: list[str] = []
    asked: list[str] = []

    def open_page(address: str = "", name: str = "small", width: int = 1300, scheme: str = "light") -> Any:
        context = browser.new_context(viewport={"width": width, "height": 850}, color_scheme=scheme)
        contexts.append(context)
        page = context.new_page()
        page.set_default_timeout(20_000)
        page.on("pageerror", lambda error: failures.append(str(error)))
        page.on("console", lambda message: failures.append(message.text) if message.type == "error" else None)
        page.on("request", lambda request: asked.append(request.url))
        page.goto(f"{pages[name].as_uri()}{address}")
        page.wait_for_selector("html[data-ready]")
        return page

    yield open_page
    for context in contexts:
        context.close()
    assert failures == []
    assert [url for url in asked if url.partition(":")[0] not in ("file", "data", "blob")] == []
