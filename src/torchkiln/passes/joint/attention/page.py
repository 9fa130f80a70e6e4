"""Writes the table of forms of attention: ``python -m torchkiln.passes.joint.attention.page [--check]``."""

from __future__ import annotations

import sys
from pathlib import Path

from torchkiln.passes.joint.attention.forms import FORMS, AttentionForm

PAGE = Path(__file__).parents[5] / "docs" / "patterns.md"

_HEAD = """\
<!-- Written by `python -m torchkiln.passes.joint.attention.page`; a test checks that it is current. -->

# Attention patterns

Attention written out becomes one `scaled_dot_product_attention`, in inference and, through the joint graph of forward
and backward, in training. Each row below is a rewrite of `torchkiln.passes.joint.attention`. `q`, `k` and `v` stand for
values of any layout: heads split off by views and transposes, masks that broadcast, any batch. A mask made of constants
alone is looked at while compiling: a causal one, however it is made, becomes the flag `is_causal`, and one that hides
nothing goes.

Where a query sees no key, the result is what softmax gives: NaN where scores are minus infinity, the mean of all values
where they are a large negative number. So are the gradients, with one exception: where a filled mask hides all keys of
a query with minus infinity, eager's gradient of the values is NaN, and here that of the keys is NaN too.

NaN and infinities are those of the fused operator. Scores that are filled are computed, and their mask is added: a NaN
or an infinity in a key that is hidden makes NaN of what eager keeps out. On the CPU, a query that is NaN would give
zeros where there are fewer than 16 keys, so such attention stays as it is written; where the number of keys is
symbolic, it is fused, and a call with so few keys and no mask gives those zeros.

A rewrite stays away where no fused kernel would serve, and `torchkiln.explain_match` says so: on the CPU with dropout
in training, with a learned bias in training, with values of another width than keys, with fewer than 16 keys, and where
sizes are so small that it would not be faster (the figures are in `checks.py`). *GPU* means that the rewrite is
registered for devices with a fused kernel of that kind; it has not been run on one.

Under *found in*, models that the tests take from `transformers` are BERT, DistilBERT, GPT-2, Llama, T5 and ViT; the
others are named for orientation.

| form | written as | found in | inference | training |
|---|---|---|---|---|
"""


def main(arguments: list[str]) -> int:
    content = page()
    current = PAGE.exists() and PAGE.read_text(encoding="utf-8") == content
    if "--check" in arguments:
        if not current:
            print(f"{PAGE.name} is out of date; run python -m torchkiln.passes.joint.attention.page", file=sys.stderr)
        return 0 if current else 1
    PAGE.write_text(content, encoding="utf-8")
    return 0


def page() -> str:
    """What docs/patterns.md should hold."""
    return _HEAD + "".join(map(_row, FORMS))


def _row(form: AttentionForm) -> str:
    formula = form.formula.replace("|", "\\|")
    inference = "yes" if form.inference else "-"
    training = "GPU" if form.learned or form.dropout else "yes"
    return f"| {form.name} | `{formula}` | {form.models} | {inference} | {training} |\n"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
