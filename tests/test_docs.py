"""The pages of docs: links lead somewhere, files that are named exist, and the examples of docs/extend.md run."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
import torch

from torchkiln.graph import manager
from torchkiln.recorder import listen

ROOT = Path(__file__).parent.parent
SOURCE = ROOT / "src" / "torchkiln"
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]


def _anchors(page: Path) -> set[str]:
    """What a heading is called in an address."""
    headings = re.findall(r"^#+ (.+)$", page.read_text(encoding="utf-8"), re.M)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)\s]+)\)", page.read_text(encoding="utf-8")):
        if target.startswith("https://"):
            continue
        path, _, anchor = target.partition("#")
        found = page.parent / path if path else page
        assert found.exists(), target
        assert not anchor or anchor in _anchors(found), target


def test_every_page_is_linked_from_the_readme() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    for page in PAGES[2:]:
        assert f"](docs/{page.name})" in text, page.name


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_files_that_a_page_names_exist(page: Path) -> None:
    folders = ("src", "tests", "benchmarks", "conformance")
    known = [str(path.relative_to(ROOT)) for folder in folders for path in (ROOT / folder).rglob("*.py")]
    for name in re.findall(r"`([\w/]+\.py)`", page.read_text(encoding="utf-8")):
        assert any(f"/{path}".endswith(f"/{name}") for path in known), name


# Names in docs/architecture.md of torch, Python, LLVM and BLAS, and of the program it follows.
OTHERS = {
    *("PyCFunction", "hessian", "ninf", "parallel_for", "sgemm", "torch.relu_"),
    *("kernel0", "kernel1", "red0", "red2", "x3"),
}


def test_names_that_the_architecture_mentions_are_in_the_sources() -> None:
    text = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    prose = re.sub(r"```.*?```", "", text, flags=re.S)
    known = {word for path in SOURCE.rglob("*.py") for word in re.findall(r"\w+", path.read_text(encoding="utf-8"))}
    names = {name for name in re.findall(r"`([A-Za-z_][\w.]*)(?:\(.*?\))?`", prose) if not name.endswith(".py")}
    assert len(names) > 100
    assert {name for name in names if name.rpartition(".")[2] not in known} == OTHERS


def test_functions_and_types_are_in_the_files_that_the_architecture_names() -> None:
    text = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    section = text.partition("## One program, all the way")[2].partition("\n## ")[0]
    steps = re.findall(r"`([\w/]+\.py)` `([\w.]+)`", section)
    types = [(file, name) for name, file in re.findall(r"^\| `(\w+)` \| `([\w/]+\.py)` \|", text, re.M)]
    assert len(steps) > 20
    assert len(types) > 5
    for name, function in (*steps, *types):
        source = (SOURCE / name).read_text(encoding="utf-8")
        assert re.search(rf"^\s*(def|class) {function.split('.')[-1]}\b", source, re.M), f"{name} {function}"


def test_the_plan_of_that_program_is_the_one_that_is_shown() -> None:
    plans: list[str] = []
    x, w, b = torch.randn(32, 64), torch.randn(64, 128, requires_grad=True), torch.randn(128, requires_grad=True)
    options = {"fallback": False, "vector_bits": 512}
    compiled = torch.compile(lambda x, w, b: torch.softmax(x @ w + b, -1), backend="kiln", options=options)
    with listen(lambda record: plans.append(str(record.value)) if record.stage == "plan" else None):
        compiled(x, w, b)
    assert f"```\n{plans[0]}\n```" in (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")


@pytest.fixture
def _registry_as_before() -> Iterator[None]:
    before = dict(manager._registered)
    yield
    manager._registered.clear()
    manager._registered.update(before)


@pytest.mark.usefixtures("_registry_as_before")
def test_the_examples_of_extending_it_run(monkeypatch: pytest.MonkeyPatch) -> None:
    path = ROOT / "docs" / "extend.md"
    blocks = re.findall(r"^```python\n(.*?)^```", path.read_text(encoding="utf-8"), re.M | re.S)
    assert len(blocks) > 5
    module = ModuleType("extend")
    monkeypatch.setitem(sys.modules, "extend", module)  # Dynamo of torch 2.11 imports the module of a function
    for number, block in enumerate(blocks):
        exec(compile(block, f"{path.name} example {number + 1}", "exec"), vars(module))
