"""The ways attention is written out: how scores are scaled and masked, and in which precision softmax runs.

Each spelling is a row of :data:`SPELLINGS`. Its search function is put together from the parts it names; contiguous
and transposed inputs, any batch, and masks that broadcast need no rows of their own, since the matcher sees through
changes of layout. Causal masks do not either: see :mod:`torchkiln.passes.joint.attention.constant_masks`.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from torchkiln.passes.joint.attention.replacement import attend

_native_dropout = torch.ops.aten.native_dropout

# Values that appear nowhere else in a trace.
_SCALE, _FILL, _DROPOUT = 0.112358, -31415.9265, 0.271828


@dataclass(frozen=True)
class Scaling:
    """How queries and keys become scores: ``scores(query, turned_key, scale)``, and the factor that amounts to."""

    formula: str
    scores: Callable[[Tensor, Tensor, Any], Tensor]
    factor: Callable[[float], float] | None


SCALINGS: Mapping[str, Scaling] = {
    "multiplied": Scaling("(q @ kT) * s", lambda q, k, s: (q @ k) * s, lambda s: s),
    "divided": Scaling("(q @ kT) / s", lambda q, k, s: (q @ k) / s, lambda s: 1 / s),
    "query multiplied": Scaling("(q * s) @ kT", lambda q, k, s: (q * s) @ k, lambda s: s),
    "query divided": Scaling("(q / s) @ kT", lambda q, k, s: (q / s) @ k, lambda s: 1 / s),
    "key multiplied": Scaling("q @ (kT * s)", lambda q, k, s: q @ (k * s), lambda s: s),
    "key divided": Scaling("q @ (kT / s)", lambda q, k, s: q @ (k / s), lambda s: 1 / s),
    "both multiplied": Scaling("(q * s) @ (kT * s)", lambda q, k, s: (q * s) @ (k * s), lambda s: s * s),
    "both divided": Scaling("(q / s) @ (kT / s)", lambda q, k, s: (q / s) @ (k / s), lambda s: 1 / (s * s)),
    "unscaled": Scaling("q @ kT", lambda q, k, s: q @ k, None),
}


@dataclass(frozen=True)
class Masking:
    """How scores are masked: ``masked(scores, masks, fill)``.

    ``hides`` is what a mask of truth values means: True for hidden, False for seen; None for a mask that is added.
    ``learned`` masks get a gradient, which is summed over the batch where ``learned`` is "broadcast".
    """

    formula: str
    masked: Callable[[Tensor, tuple[Tensor, ...], Any], Tensor]
    masks: int = 1
    hides: bool | None = None
    learned: str = ""
    before_scaling: bool = False


def _where_tensor(scores: Tensor, masks: tuple[Tensor, ...], fill: float) -> Tensor:
    return torch.where(masks[0], scores, torch.full([], fill, dtype=scores.dtype, device=scores.device))


MASKINGS: Mapping[str, Masking] = {
    "none": Masking("{}", lambda x, m, f: x, masks=0),
    "added": Masking("{} + mask", lambda x, m, f: x + m[0]),
    "added before scaling": Masking("{} + mask", lambda x, m, f: x + m[0], before_scaling=True),
    "two added": Masking("{} + bias + mask", lambda x, m, f: x + m[0] + m[1], masks=2),
    "filled": Masking("({}).masked_fill(hidden, fill)", lambda x, m, f: x.masked_fill(m[0], f), hides=True),
    "where": Masking("where(seen, {}, fill)", lambda x, m, f: torch.where(m[0], x, f), hides=False),
    "where a tensor": Masking("where(seen, {}, full([], fill))", _where_tensor, hides=False),
    "learned": Masking("{} + bias (learned)", lambda x, m, f: x + m[0], learned="whole"),
    "learned, one for the batch": Masking("{} + bias (learned)", lambda x, m, f: x + m[0], learned="broadcast"),
}

Softmax = Callable[[Tensor], Tensor]
SOFTMAXES: Mapping[str, tuple[str, Softmax]] = {
    "as is": ("softmax({}, -1)", lambda x: x.softmax(-1)),
    "in float32": ("softmax({}, -1, dtype=float32).to(q.dtype)", lambda x: x.softmax(-1, dtype=torch.float32)),
}


@dataclass(frozen=True)
class Spelling:
    """One way to write attention, and where it is found."""

    name: str
    formula: str
    models: str
    search: Callable[..., Tensor]
    replace: Callable[..., Tensor]
    inputs: Callable[[], tuple[Tensor, ...]]
    scalars: Mapping[str, float]
    priority: int = 0
    training: bool = True
    inference: bool = True
    argument_names: tuple[str, ...] = field(default=())


def _arguments(masking: Masking, *, scaled: bool, dropout: bool) -> tuple[str, ...]:
    masks = ("bias", "mask")[-masking.masks :] if masking.masks else ()
    numbers = (("scale",) if scaled else ()) + (("fill",) if masking.hides is not None else ())
    return ("query", "key", "value", *masks, *numbers, *(("dropout_p",) if dropout else ()))


def _signed(function: Callable[..., Tensor], names: tuple[str, ...]) -> Callable[..., Tensor]:
    """``function`` of a dictionary as a function of arguments with these names."""

    def called(*values: Any) -> Tensor:
        return function(dict(zip(names, values, strict=True)))

    called.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
        [inspect.Parameter(name, inspect.Parameter.POSITIONAL_OR_KEYWORD) for name in names]
    )
    return called


def repeated_heads(tensor: Tensor, times: int) -> Tensor:
    batch, heads, length, width = tensor.shape
    return tensor[:, :, None].expand(batch, heads, times, length, width).reshape(batch, heads * times, length, width)


def _grouped(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    """Keys and values repeated for every query of their group. An error where there are no groups."""
    if query.dim() != 4 or key.dim() != 4 or value.dim() != 4:
        raise ValueError("groups of heads are a dimension of four")
    if key.size(1) != value.size(1) or key.size(1) == query.size(1):
        raise ValueError("no groups of heads")
    times = query.size(1) // key.size(1)
    return repeated_heads(key, times), repeated_heads(value, times)


def _searched(
    scaling: Scaling, masking: Masking, softmax: Softmax, *, grouped: bool, dropout: bool, upcast: bool
) -> Callable[[dict[str, Any]], Tensor]:
    scores_of, masked, before = scaling.scores, masking.masked, masking.before_scaling

    def search(given: dict[str, Any]) -> Tensor:
        query, key, value = given["query"], given["key"], given["value"]
        masks = tuple(given[name] for name in ("bias", "mask") if name in given)
        _reject_other_shapes(query, key, value, masks)
        if grouped:
            key, value = _grouped(query, key, value)
        scale = given.get("scale")
        turned = key.transpose(-2, -1)
        if upcast:
            query, turned = query.float(), turned.float()
        if before:
            scores = masked(query @ turned, masks, None) * scale
        else:
            scores = masked(scores_of(query, turned, scale), masks, given.get("fill"))
        weights = softmax(scores)
        if weights.dtype != value.dtype:
            weights = weights.to(value.dtype)
        if dropout:
            weights = _native_dropout(weights, given["dropout_p"], True)[0]
        return weights @ value

    return search


def _reject_other_shapes(query: Tensor, key: Tensor, value: Tensor, masks: tuple[Tensor, ...]) -> None:
    """An error, before anything is traced, where these cannot be what attention is computed from."""
    rank = query.dim()
    if rank not in (3, 4) or key.dim() != rank or value.dim() != rank or any(mask.dim() > rank for mask in masks):
        raise ValueError("not the ranks of attention")


def _replaced(
    scaling: Scaling, masking: Masking, *, grouped: bool, dropout: bool
) -> Callable[[dict[str, Any]], Tensor]:
    factor, hides, before = scaling.factor, masking.hides, masking.before_scaling

    def replace(given: dict[str, Any]) -> Tensor:
        scale = 1.0 if factor is None else factor(given["scale"])
        options: dict[str, Any] = {"scale": scale, "grouped": grouped}
        if dropout:
            options["dropout_p"] = given["dropout_p"]
        mask = given.get("mask")
        if hides is not None:
            options.update(hidden=mask if hides else mask.logical_not(), fill=given["fill"])
        elif mask is not None:
            mask = mask * scale if before else mask
            options["mask"] = given["bias"] + mask if "bias" in given else mask
        return attend(given["query"], given["key"], given["value"], **options)

    return replace


def _examples(masking: Masking, *, grouped: bool, half: bool) -> Callable[[], tuple[Tensor, ...]]:
    def inputs() -> tuple[Tensor, ...]:
        dtype = torch.bfloat16 if half else torch.float32
        heads = 2 if grouped else 4
        query = torch.empty(2, 4, 6, 8, dtype=dtype, requires_grad=True)
        key, value = (torch.empty(2, heads, 10, 8, dtype=dtype, requires_grad=True) for _ in range(2))
        batch = 1 if masking.learned == "broadcast" else 2
        mask_dtype = dtype if masking.hides is None else torch.bool
        masks = [torch.empty(batch, 4, 6, 10, dtype=mask_dtype) for _ in range(masking.masks)]
        if masking.learned:
            masks[0].requires_grad_()
        return (query, key, value, *masks)

    return inputs


def spelling(
    models: str,
    scaled: str,
    masked: str = "none",
    softmax: str = "as is",
    *,
    grouped: bool = False,
    dropout: bool = False,
    upcast: bool = False,
) -> Spelling:
    """The spelling made of these parts."""
    scaling, masking = SCALINGS[scaled], MASKINGS[masked]
    formula, normalize = SOFTMAXES[softmax]
    names = _arguments(masking, scaled=scaling.factor is not None, dropout=dropout)
    scalars = {"scale": _SCALE, "fill": _FILL, "dropout_p": _DROPOUT}
    words = [scaled, *(() if masked == "none" else (f"mask {masked}",))]
    words += [f"softmax {softmax}"] * (softmax != "as is") + ["grouped heads"] * grouped
    words += ["upcast"] * upcast + ["dropout"] * dropout
    return Spelling(
        name=", ".join(words),
        formula=_formula(scaling, masking, formula, grouped=grouped, dropout=dropout, upcast=upcast),
        models=models,
        search=_signed(
            _searched(scaling, masking, normalize, grouped=grouped, dropout=dropout, upcast=upcast), names
        ),
        replace=_signed(_replaced(scaling, masking, grouped=grouped, dropout=dropout), names),
        inputs=_examples(masking, grouped=grouped, half=softmax != "as is" or upcast),
        scalars={name: scalars[name] for name in names if name in scalars},
        # A query scaled beforehand is a query like any other, and repeated heads are heads: the rows that know better
        # come first.
        priority=0 if grouped else 2 if scaling.factor is None else 1,
        inference=not dropout and not masking.learned,
        argument_names=names,
    )


def _formula(
    scaling: Scaling, masking: Masking, softmax: str, *, grouped: bool, dropout: bool, upcast: bool
) -> str:
    scores = scaling.formula
    if masking.before_scaling:
        scores = f"({masking.formula.format('q @ kT')}) * s"
    else:
        scores = masking.formula.format(scores)
    if grouped:
        scores = scores.replace("kT", "repeat_kv(k).T")
    if upcast:
        scores = scores.replace("q @ kT", "q.float() @ kT.float()")
    weights = softmax.format(scores) + (".to(v.dtype)" if upcast else "")
    if dropout:
        weights = f"dropout({weights}, p)"
    return f"{weights} @ {'repeat_kv(v)' if grouped else 'v'}"


_BERT = "BERT, DistilBERT, ELECTRA, RoBERTa (transformers)"
_LLAMA = "Llama, Mistral, Qwen (transformers)"

SPELLINGS: tuple[Spelling, ...] = (
    spelling("ViT, DeiT, Whisper encoder (transformers)", "multiplied"),
    spelling("textbook", "divided"),
    spelling("BART, Whisper before transformers 4.50", "query multiplied"),
    spelling("DistilBERT before transformers 4.48", "query divided"),
    spelling("textbook", "key multiplied"),
    spelling("textbook", "key divided"),
    spelling("Stable Diffusion, GLIDE: both by the fourth root", "both multiplied"),
    spelling("Megatron style: both by the fourth root", "both divided"),
    spelling("T5 without bias; queries scaled by a projection", "unscaled"),
    spelling(f"{_BERT}, GPT-2, Whisper decoder, Swin", "multiplied", "added"),
    spelling("BERT, ViT before transformers 4.48", "divided", "added"),
    spelling("BART, OPT before transformers 4.48", "query multiplied", "added"),
    spelling("CLIP-like with scaled queries", "query divided", "added"),
    spelling("textbook", "key multiplied", "added"),
    spelling("textbook", "both multiplied", "added"),
    spelling("T5 without padding", "unscaled", "added"),
    spelling("T5, mT5, LongT5", "multiplied", "two added"),
    spelling("T5, mT5, Pop2Piano", "unscaled", "two added"),
    spelling("Falcon with ALiBi", "multiplied", "added before scaling"),
    spelling("textbook", "multiplied", "filled"),
    spelling("nanoGPT, minGPT, Annotated Transformer", "divided", "filled"),
    spelling("fairseq", "query multiplied", "filled"),
    spelling("DistilBERT before transformers 4.48", "query divided", "filled"),
    spelling("textbook", "unscaled", "filled"),
    spelling("textbook", "multiplied", "where"),
    spelling("textbook", "divided", "where"),
    spelling("textbook", "unscaled", "where"),
    spelling("GPT-Neo", "unscaled", "where a tensor"),
    spelling("GPT-2 before transformers 4.48", "divided", "where a tensor"),
    spelling("textbook", "multiplied", "where a tensor"),
    spelling("ViT, SigLIP in half precision (transformers)", "multiplied", "none", "in float32"),
    spelling("textbook", "divided", "none", "in float32"),
    spelling("textbook", "query multiplied", "none", "in float32"),
    spelling(f"{_LLAMA} in half precision", "multiplied", "added", "in float32"),
    spelling("Llama before transformers 4.48 in half precision", "divided", "added", "in float32"),
    spelling("OPT in half precision", "query multiplied", "added", "in float32"),
    spelling("T5 in half precision", "unscaled", "added", "in float32"),
    spelling("T5 in half precision", "unscaled", "two added", "in float32"),
    spelling("Megatron, GPT-BigCode in half precision", "multiplied", "filled", "in float32"),
    spelling("textbook", "divided", "filled", "in float32"),
    spelling("textbook", "divided", "where a tensor", "in float32"),
    spelling("GPT-J in half precision", "divided", "added", upcast=True),
    spelling("GPT-Neo in half precision", "unscaled", "where a tensor", upcast=True),
    spelling(_LLAMA, "multiplied", grouped=True),
    spelling(_LLAMA, "multiplied", "added", grouped=True),
    spelling(_LLAMA, "multiplied", "none", "in float32", grouped=True),
    spelling(_LLAMA, "multiplied", "added", "in float32", grouped=True),
    spelling("Llama before transformers 4.48", "divided", "added", grouped=True),
    spelling("Swin, BEiT in training", "multiplied", "learned"),
    spelling("T5 in training", "unscaled", "learned, one for the batch"),
    spelling("ViT in training with dropout", "multiplied", dropout=True),
    spelling("textbook in training with dropout", "divided", dropout=True),
    spelling("BART in training with dropout", "query multiplied", dropout=True),
    spelling("textbook in training with dropout", "unscaled", dropout=True),
    spelling(f"{_BERT}, GPT-2 in training with dropout", "multiplied", "added", dropout=True),
    spelling("BERT before transformers 4.48 in training with dropout", "divided", "added", dropout=True),
    spelling("nanoGPT, minGPT in training with dropout", "divided", "filled", dropout=True),
    spelling("T5 in training with dropout", "unscaled", "added", dropout=True),
    spelling("ViT in half precision, with dropout", "multiplied", "none", "in float32", dropout=True),
    spelling(f"{_LLAMA} in half precision, with dropout", "multiplied", "added", "in float32", dropout=True),
)
