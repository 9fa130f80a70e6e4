"""docs/patterns.md: its table of the forms of attention."""

from __future__ import annotations

from pathlib import Path

from torchkiln.passes.joint.attention.forms import FORMS, AttentionForm

PAGE = Path(__file__).parents[5] / "docs" / "patterns.md"

_HEAD = "| form | written as | found in | inference | training |\n|---|---|---|---|---|\n"


def page() -> str:
    """What docs/patterns.md should hold: the text before its table, and a row for each form."""
    text, _, _ = PAGE.read_text(encoding="utf-8").partition(_HEAD)
    return text + _HEAD + "".join(map(_row, FORMS))


def _row(form: AttentionForm) -> str:
    formula = form.formula.replace("|", "\\|")
    inference = "yes" if form.inference else "-"
    training = "GPU" if form.learned or form.dropout else "yes"
    return f"| {form.name} | `{formula}` | {form.models} | {inference} | {training} |\n"
