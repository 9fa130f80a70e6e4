"""The forms in which programs write attention: how scores are scaled and masked, and in which precision softmax runs.

Each form is a row of :data:`FORMS`, put together from the parts it names. Contiguous and transposed inputs, any batch,
and masks that broadcast need no rows of their own, since the matcher sees through changes of layout. Causal masks do
not either: see :mod:`torchkiln.passes.joint.attention.constant_masks`.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from torchkiln.passes.joint.attention.replacement import attend

# Values that appear nowhere else in a trace.
_SCALARS = {"scale": 0.112358, "fill": -31415.9265, "dropout_p": 0.271828}

Matmul = Callable[[Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class Scaling:
    """How queries and keys become scores: ``scores(matmul, query, key, scale)``, and the factor that amounts to."""

    formula: str
    scores: Callable[[Matmul, Tensor, Tensor, Any], Tensor]
    factor: Callable[[float], float] | None


SCALINGS: Mapping[str, Scaling] = {
    "multiplied": Scaling("(q @ kT) * s", lambda x, q, k, s: x(q, k) * s, lambda s: s),
    "divided": Scaling("(q @ kT) / s", lambda x, q, k, s: x(q, k) / s, lambda s: 1 / s),
    "query multiplied": Scaling("(q * s) @ kT", lambda x, q, k, s: x(q * s, k), lambda s: s),
    "query divided": Scaling("(q / s) @ kT", lambda x, q, k, s: x(q / s, k), lambda s: 1 / s),
    "key multiplied": Scaling("q @ (kT * s)", lambda x, q, k, s: x(q, k * s), lambda s: s),
    "key divided": Scaling("q @ (kT / s)", lambda x, q, k, s: x(q, k / s), lambda s: 1 / s),
    "both multiplied": Scaling("(q * s) @ (kT * s)", lambda x, q, k, s: x(q * s, k * s), lambda s: s * s),
    "both divided": Scaling("(q / s) @ (kT / s)", lambda x, q, k, s: x(q / s, k / s), lambda s: 1 / (s * s)),
    "unscaled": Scaling("q @ kT", lambda x, q, k, s: x(q, k), None),
    "baddbmm": Scaling(
        "baddbmm(empty, q, kT, beta=0, alpha=s)",
        lambda x, q, k, s: torch.baddbmm(
            torch.empty(q.size(0), q.size(1), k.size(2), dtype=q.dtype, device=q.device), q, k, beta=0, alpha=s
        ),
        lambda s: s,
    ),
}


@dataclass(frozen=True)
class Masking:
    """How scores are masked: ``masked(scores, masks, fill)``.

    ``hides`` is the meaning of a boolean mask: True for hidden, False for seen; None for a mask that is added.
    ``learned`` masks get a gradient, which is summed over the batch where ``learned`` is "broadcast". A mask that is
    added before scores are scaled, or in the matmul itself, gives ``scores(query, key, mask, scale)`` instead.
    """

    formula: str
    masked: Callable[[Tensor, tuple[Tensor, ...], Any], Tensor] = lambda x, m, f: x
    masks: tuple[str, ...] = ("mask",)
    hides: bool | None = None
    learned: str = ""
    scores: Callable[[Tensor, Tensor, Tensor, Any], Tensor] | None = None
    scaled_too: bool = False


def _where_tensor(scores: Tensor, masks: tuple[Tensor, ...], fill: float) -> Tensor:
    return torch.where(masks[0], scores, torch.full([], fill, dtype=scores.dtype, device=scores.device))


MASKINGS: Mapping[str, Masking] = {
    "none": Masking("{}", masks=()),
    "added": Masking("{} + mask", lambda x, m, f: x + m[0]),
    "added before scaling": Masking("(q @ kT + mask) * s", scores=lambda q, k, m, s: (q @ k + m) * s, scaled_too=True),
    "added in the matmul": Masking(
        "baddbmm(mask, q, kT, alpha=s)", scores=lambda q, k, m, s: torch.baddbmm(m, q, k, alpha=s)
    ),
    "added in the matmul, query scaled": Masking(
        "baddbmm(mask, q * s, kT)", scores=lambda q, k, m, s: torch.baddbmm(m, q * s, k)
    ),
    "two added": Masking("{} + bias + mask", lambda x, m, f: x + m[0] + m[1], masks=("bias", "mask")),
    "filled": Masking("({}).masked_fill(hidden, fill)", lambda x, m, f: x.masked_fill(m[0], f), hides=True),
    "where": Masking("where(seen, {}, fill)", lambda x, m, f: torch.where(m[0], x, f), hides=False),
    "where a tensor": Masking("where(seen, {}, full([], fill))", _where_tensor, hides=False),
    "learned": Masking("{} + bias (learned)", lambda x, m, f: x + m[0], learned="whole"),
    "learned, one for the batch": Masking("{} + bias (learned)", lambda x, m, f: x + m[0], learned="broadcast"),
}


@dataclass(frozen=True)
class Layout:
    """Where heads are, and how the matmuls are written.

    ``transposed`` is the key as the first matmul takes it. The tensors named in ``positions_first`` have positions
    before heads; the result has where ``query`` is among them.
    """

    scores_formula: str = "q @ kT"
    result_formula: str = "{} @ v"
    rank: int = 4
    transposed: Callable[[Tensor], Tensor] = lambda key: key.transpose(-2, -1)
    scores: Matmul = torch.matmul
    result: Matmul = torch.matmul
    positions_first: tuple[str, ...] = ()


LAYOUTS: Mapping[str, Layout] = {
    "": Layout(),
    "heads without a batch": Layout(result_formula="bmm({}, v)", rank=3, result=torch.bmm),
    "key permuted": Layout(
        scores_formula="q @ k.permute(0, 2, 3, 1)",
        transposed=lambda key: key.permute(0, 2, 3, 1),
        positions_first=("key",),
    ),
    "einsum": Layout(
        scores_formula="einsum('bhqd,bhkd->bhqk', q, k)",
        result_formula="einsum('bhqk,bhkd->bhqd', {}, v)",
        transposed=lambda key: key,
        scores=lambda q, k: torch.einsum("bhqd,bhkd->bhqk", q, k),
        result=lambda w, v: torch.einsum("bhqk,bhkd->bhqd", w, v),
    ),
    "einsum, positions first": Layout(
        scores_formula="einsum('bqhd,bkhd->bhqk', q, k)",
        result_formula="einsum('bhqk,bkhd->bqhd', {}, v)",
        transposed=lambda key: key,
        scores=lambda q, k: torch.einsum("bqhd,bkhd->bhqk", q, k),
        result=lambda w, v: torch.einsum("bhqk,bkhd->bqhd", w, v),
        positions_first=("query", "key", "value"),
    ),
}

SOFTMAXES: Mapping[str, tuple[str, Callable[[Tensor], Tensor]]] = {
    "as is": ("softmax({}, -1)", lambda x: x.softmax(-1)),
    "in float32": ("softmax({}, -1, dtype=float32).to(q.dtype)", lambda x: x.softmax(-1, dtype=torch.float32)),
}


@dataclass(frozen=True)
class AttentionForm:
    """One form of attention, by the names of its parts, and the ``models`` that have it.

    ``grouped`` heads of keys serve several heads of queries each; ``upcast`` scores are computed in float32.
    """

    models: str
    scaled: str
    masked: str = "none"
    softmax: str = "as is"
    layout: str = ""
    grouped: bool = False
    dropout: bool = False
    upcast: bool = False

    @property
    def name(self) -> str:
        words = {
            self.scaled: True,
            f"mask {self.masked}": self.masked != "none",
            self.layout: bool(self.layout),
            f"softmax {self.softmax}": self.softmax != "as is",
            "grouped heads": self.grouped,
            "upcast": self.upcast,
            "dropout": self.dropout,
        }
        return ", ".join(word for word, said in words.items() if said)

    @property
    def formula(self) -> str:
        layout = LAYOUTS[self.layout]
        scores = MASKINGS[self.masked].formula.format(SCALINGS[self.scaled].formula)
        if layout.scores_formula != "q @ kT":
            scores = scores.replace("(q @ kT)", "q @ kT").replace("q @ kT", layout.scores_formula)
        if self.grouped:
            scores = scores.replace("kT", "repeat_kv(k).T")
        if self.upcast:
            scores = scores.replace("q @ kT", "q.float() @ kT.float()")
        weights = SOFTMAXES[self.softmax][0].format(scores) + (".to(v.dtype)" if self.upcast else "")
        if self.dropout:
            weights = f"dropout({weights}, p)"
        return layout.result_formula.format(weights).replace("@ v", "@ repeat_kv(v)" if self.grouped else "@ v")

    @property
    def inference(self) -> bool:
        """Whether the form is found in inference; all are found in training."""
        return not self.dropout and not self.learned

    @property
    def learned(self) -> bool:
        return bool(MASKINGS[self.masked].learned)

    @property
    def positions_first(self) -> tuple[str, ...]:
        return LAYOUTS[self.layout].positions_first

    @property
    def priority(self) -> int:
        """Specific forms first: a scaled query is a query like any other, and repeated heads are heads."""
        return 0 if self.grouped else 2 if SCALINGS[self.scaled].factor is None else 1

    @property
    def scalars(self) -> dict[str, float]:
        """The arguments that are numbers, with values for the example."""
        has = (SCALINGS[self.scaled].factor is not None, MASKINGS[self.masked].hides is not None, self.dropout)
        return {name: value for (name, value), given in zip(_SCALARS.items(), has, strict=True) if given}

    @property
    def search(self) -> Callable[..., Tensor]:
        """The form as a function of its tensors and numbers."""
        return self._with_signature(self._search)

    @property
    def replace(self) -> Callable[..., Tensor]:
        """What replaces it, as a function of the same arguments."""
        return self._with_signature(self._replace)

    def _with_signature(self, function: Callable[[dict[str, Any]], Tensor]) -> Callable[..., Tensor]:
        """``function`` of a dictionary as a function of arguments with the names of this form."""
        names = ("query", "key", "value", *MASKINGS[self.masked].masks, *self.scalars)

        def called(*values: Any) -> Tensor:
            return function(dict(zip(names, values, strict=True)))

        called.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
            [inspect.Parameter(name, inspect.Parameter.POSITIONAL_OR_KEYWORD) for name in names]
        )
        return called

    def _search(self, given: dict[str, Any]) -> Tensor:
        scaling, masking, layout = SCALINGS[self.scaled], MASKINGS[self.masked], LAYOUTS[self.layout]
        query, key, value = given["query"], given["key"], given["value"]
        masks = tuple(given[name] for name in masking.masks)
        _reject_other_shapes(layout.rank, query, key, value, masks)
        if self.grouped:
            key, value = _grouped(query, key, value)
        scale = given.get("scale")
        key = layout.transposed(key)
        if self.upcast:
            query, key = query.float(), key.float()
        if masking.scores is not None:
            scores = masking.scores(query, key, masks[0], scale)
        else:
            scores = masking.masked(scaling.scores(layout.scores, query, key, scale), masks, given.get("fill"))
        weights = SOFTMAXES[self.softmax][1](scores)
        if weights.dtype != value.dtype:
            weights = weights.to(value.dtype)
        if self.dropout:
            weights = torch.ops.aten.native_dropout(weights, given["dropout_p"], True)[0]
        return layout.result(weights, value)

    def _replace(self, given: dict[str, Any]) -> Tensor:
        masking, factor = MASKINGS[self.masked], SCALINGS[self.scaled].factor
        scale = 1.0 if factor is None else factor(given["scale"])
        options: dict[str, Any] = {"scale": scale, "grouped": self.grouped}
        if self.dropout:
            options["dropout_p"] = given["dropout_p"]
        mask = given.get("mask")
        if masking.hides is not None:
            hidden = given["mask"] if masking.hides else given["mask"].logical_not()
            options.update(hidden=hidden, fill=given["fill"])
        elif mask is not None:
            mask = mask * scale if masking.scaled_too else mask
            options["mask"] = given["bias"] + mask if "bias" in given else mask
        swapped = self.positions_first
        tensors = [
            given[name].transpose(1, 2) if name in swapped else given[name] for name in ("query", "key", "value")
        ]
        result = attend(*tensors, **options)
        return result.transpose(1, 2) if "query" in swapped else result

    def inputs(self) -> tuple[Tensor, ...]:
        """Example tensors to trace with."""
        masking, rank = MASKINGS[self.masked], LAYOUTS[self.layout].rank
        dtype = torch.bfloat16 if self.softmax != "as is" or self.upcast else torch.float32

        def tensor(name: str, heads: int, length: int) -> Tensor:
            sizes = (2, length, heads, 8) if name in self.positions_first else (2, heads, length, 8)
            return torch.empty(sizes[-rank:], dtype=dtype, requires_grad=True)

        query = tensor("query", 4, 6)
        key, value = (tensor(name, 2 if self.grouped else 4, 10) for name in ("key", "value"))
        sizes = (1 if masking.learned == "broadcast" else 2, 4, 6, 10)[-rank:]
        mask_dtype = dtype if masking.hides is None else torch.bool
        masks = [torch.empty(sizes, dtype=mask_dtype, requires_grad=bool(masking.learned)) for _ in masking.masks]
        return (query, key, value, *masks)


def _grouped(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, ...]:
    """Keys and values repeated for every query of their group. An error where there are no groups."""
    if key.size(1) != value.size(1) or key.size(1) == query.size(1):
        raise ValueError("no groups of heads")
    times = query.size(1) // key.size(1)
    return tuple(
        tensor[:, :, None].expand(batch, heads, times, length, width).reshape(batch, heads * times, length, width)
        for tensor in (key, value)
        for batch, heads, length, width in [tensor.shape]
    )


def _reject_other_shapes(rank: int, query: Any, key: Any, value: Any, masks: tuple[Any, ...]) -> None:
    """An error, before anything is traced, where these cannot be what attention is computed from."""
    if not all(isinstance(tensor, Tensor) for tensor in (query, key, value, *masks)):
        raise ValueError("a number where attention has a tensor")
    ranks = {query.dim(), key.dim(), value.dim()}
    if ranks != {rank} or any(mask.dim() > rank for mask in masks):
        raise ValueError("not the ranks of attention")


def _forms(*rows: tuple[Any, ...], **options: Any) -> list[AttentionForm]:
    return [AttentionForm(*row, **options) for row in rows]


_BERT = "BERT, DistilBERT, ELECTRA, RoBERTa (transformers)"
_LLAMA = "Llama, Mistral, Qwen (transformers)"

FORMS: tuple[AttentionForm, ...] = (
    *_forms(
        ("ViT, DeiT, Whisper encoder (transformers)", "multiplied"),
        ("textbook", "divided"),
        ("BART, Whisper before transformers 4.50", "query multiplied"),
        ("DistilBERT before transformers 4.48", "query divided"),
        ("textbook", "key multiplied"),
        ("textbook", "key divided"),
        ("Whisper (OpenAI): both by the fourth root of the width", "both multiplied"),
        ("textbook", "both divided"),
        ("T5 without bias; queries scaled by a projection", "unscaled"),
        (f"{_BERT}, GPT-2, Whisper decoder, Swin", "multiplied", "added"),
        ("BERT, ViT before transformers 4.48", "divided", "added"),
        ("BART, OPT before transformers 4.48", "query multiplied", "added"),
        ("textbook", "query divided", "added"),
        ("textbook", "key multiplied", "added"),
        ("textbook", "both multiplied", "added"),
        ("T5 without padding", "unscaled", "added"),
        ("T5, mT5, LongT5", "multiplied", "two added"),
        ("T5, mT5, Pop2Piano", "unscaled", "two added"),
        ("Falcon with ALiBi", "multiplied", "added before scaling"),
        ("nanoGPT, minGPT", "multiplied", "filled"),
        ("Annotated Transformer", "divided", "filled"),
        ("textbook", "query multiplied", "filled"),
        ("DistilBERT before transformers 4.48", "query divided", "filled"),
        ("textbook", "unscaled", "filled"),
        ("textbook", "multiplied", "where"),
        ("textbook", "divided", "where"),
        ("textbook", "unscaled", "where"),
        ("GPT-Neo", "unscaled", "where a tensor"),
        ("GPT-2 before transformers 4.48", "divided", "where a tensor"),
        ("textbook", "multiplied", "where a tensor"),
        ("ViT, SigLIP in half precision (transformers)", "multiplied", "none", "in float32"),
        ("textbook", "divided", "none", "in float32"),
        ("textbook", "query multiplied", "none", "in float32"),
        (f"{_LLAMA} in half precision", "multiplied", "added", "in float32"),
        ("Llama (reference), Llama before transformers 4.48, in half precision", "divided", "added", "in float32"),
        ("OPT in half precision", "query multiplied", "added", "in float32"),
        ("T5 in half precision", "unscaled", "added", "in float32"),
        ("T5 in half precision", "unscaled", "two added", "in float32"),
        ("textbook", "multiplied", "filled", "in float32"),
        ("textbook", "divided", "filled", "in float32"),
        ("textbook", "divided", "where a tensor", "in float32"),
        ("textbook", "multiplied", "where a tensor", "in float32"),
    ),
    *_forms(
        ("GPT-J in half precision", "divided", "added"),
        ("GPT-J in half precision", "multiplied", "added"),
        ("GPT-Neo in half precision", "unscaled", "where a tensor"),
        upcast=True,
    ),
    *_forms(
        ("textbook, a single head", "multiplied"),
        ("textbook", "divided"),
        ("MultiheadAttention with weights, BART before transformers 4.48", "query multiplied"),
        ("MultiheadAttention with weights, heads scaled by a projection", "unscaled"),
        ("textbook", "multiplied", "added"),
        ("OPT, BART before transformers 4.48", "unscaled", "added"),
        ("textbook, a single head", "divided", "filled"),
        ("textbook", "multiplied", "filled"),
        ("Stable Diffusion (diffusers)", "baddbmm"),
        ("BLOOM with ALiBi", "multiplied", "added in the matmul"),
        ("MultiheadAttention with weights and a mask", "query multiplied", "added in the matmul, query scaled"),
        layout="heads without a batch",
    ),
    *_forms(
        ("heads split as in GPT (2018)", "divided"),
        ("heads split as in GPT (2018)", "multiplied"),
        ("heads split as in GPT (2018)", "divided", "added"),
        ("heads split as in GPT (2018)", "multiplied", "added"),
        ("heads split as in GPT (2018)", "multiplied", "filled"),
        layout="key permuted",
    ),
    *_forms(
        ("x-transformers", "multiplied"),
        ("x-transformers", "query multiplied"),
        ("x-transformers", "multiplied", "filled"),
        ("x-transformers", "multiplied", "added"),
        layout="einsum",
    ),
    *_forms(
        ("ports from Flax", "unscaled", "added"),
        ("ports from Flax", "multiplied"),
        ("textbook", "divided", "filled"),
        ("textbook", "multiplied", "filled"),
        layout="einsum, positions first",
    ),
    *_forms(
        (_LLAMA, "multiplied"),
        (_LLAMA, "multiplied", "added"),
        (_LLAMA, "multiplied", "none", "in float32"),
        (_LLAMA, "multiplied", "added", "in float32"),
        ("Llama before transformers 4.48", "divided", "added"),
        grouped=True,
    ),
    *_forms(
        ("Swin, BEiT in training", "multiplied", "learned"),
        ("T5 in training", "unscaled", "learned, one for the batch"),
    ),
    *_forms(
        ("ViT in training with dropout", "multiplied"),
        ("textbook in training with dropout", "divided"),
        ("BART in training with dropout", "query multiplied"),
        ("textbook in training with dropout", "unscaled"),
        (f"{_BERT}, GPT-2 in training with dropout", "multiplied", "added"),
        ("BERT before transformers 4.48 in training with dropout", "divided", "added"),
        ("Annotated Transformer in training with dropout", "divided", "filled"),
        ("nanoGPT, minGPT in training with dropout", "multiplied", "filled"),
        ("T5 in training with dropout", "unscaled", "added"),
        ("ViT in half precision, with dropout", "multiplied", "none", "in float32"),
        (f"{_LLAMA} in half precision, with dropout", "multiplied", "added", "in float32"),
        dropout=True,
    ),
)
