"""The ways attention is written out: how scores are scaled and masked, and in which precision softmax runs.

Each spelling is a row of :data:`SPELLINGS`. Its search function is put together from the parts it names; contiguous
and transposed inputs, any batch, and masks that broadcast need no rows of their own, since the matcher sees through
changes of layout. Causal masks do not either: see :mod:`torchkiln.passes.joint.attention.constant_masks`.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from torchkiln.passes.joint.attention.replacement import attend

_native_dropout = torch.ops.aten.native_dropout

# Values that appear nowhere else in a trace.
_SCALE, _FILL, _DROPOUT = 0.112358, -31415.9265, 0.271828


Product = Callable[[Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class Scaling:
    """How queries and keys become scores: ``scores(product, query, key, scale)``, and the factor that amounts to."""

    formula: str
    scores: Callable[[Product, Tensor, Tensor, Any], Tensor]
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

    ``hides`` is what a mask of truth values means: True for hidden, False for seen; None for a mask that is added.
    ``learned`` masks get a gradient, which is summed over the batch where ``learned`` is "broadcast". A mask that is
    added before scores are scaled, or in the product itself, gives ``scores(query, key, mask, scale)`` instead.
    """

    formula: str
    masked: Callable[[Tensor, tuple[Tensor, ...], Any], Tensor] = lambda x, m, f: x
    masks: int = 1
    hides: bool | None = None
    learned: str = ""
    scores: Callable[[Tensor, Tensor, Tensor, Any], Tensor] | None = None
    scaled_too: bool = False


def _where_tensor(scores: Tensor, masks: tuple[Tensor, ...], fill: float) -> Tensor:
    return torch.where(masks[0], scores, torch.full([], fill, dtype=scores.dtype, device=scores.device))


MASKINGS: Mapping[str, Masking] = {
    "none": Masking("{}", masks=0),
    "added": Masking("{} + mask", lambda x, m, f: x + m[0]),
    "added before scaling": Masking("(q @ kT + mask) * s", scores=lambda q, k, m, s: (q @ k + m) * s, scaled_too=True),
    "added in the product": Masking(
        "baddbmm(mask, q, kT, alpha=s)", scores=lambda q, k, m, s: torch.baddbmm(m, q, k, alpha=s)
    ),
    "added in the product, query scaled": Masking(
        "baddbmm(mask, q * s, kT)", scores=lambda q, k, m, s: torch.baddbmm(m, q * s, k)
    ),
    "two added": Masking("{} + bias + mask", lambda x, m, f: x + m[0] + m[1], masks=2),
    "filled": Masking("({}).masked_fill(hidden, fill)", lambda x, m, f: x.masked_fill(m[0], f), hides=True),
    "where": Masking("where(seen, {}, fill)", lambda x, m, f: torch.where(m[0], x, f), hides=False),
    "where a tensor": Masking("where(seen, {}, full([], fill))", _where_tensor, hides=False),
    "learned": Masking("{} + bias (learned)", lambda x, m, f: x + m[0], learned="whole"),
    "learned, one for the batch": Masking("{} + bias (learned)", lambda x, m, f: x + m[0], learned="broadcast"),
}


@dataclass(frozen=True)
class Layout:
    """Where heads are, and how the products are written.

    ``turned`` is the key as the first product takes it. For the replacement, ``heads_first`` brings the tensors named
    in ``turn`` into the order of batch, heads, positions; the result goes back where ``query`` is among them.
    """

    scores_formula: str = "q @ kT"
    result_formula: str = "{} @ v"
    rank: int = 4
    turned: Callable[[Tensor], Tensor] = lambda key: key.transpose(-2, -1)
    scores: Product = torch.matmul
    result: Product = torch.matmul
    turn: tuple[str, ...] = ()


LAYOUTS: Mapping[str, Layout] = {
    "": Layout(),
    "heads without a batch": Layout(result_formula="bmm({}, v)", rank=3, result=torch.bmm),
    "key turned at once": Layout(
        scores_formula="q @ k.permute(0, 2, 3, 1)", turned=lambda key: key.permute(0, 2, 3, 1), turn=("key",)
    ),
    "einsum": Layout(
        scores_formula="einsum('bhqd,bhkd->bhqk', q, k)",
        result_formula="einsum('bhqk,bhkd->bhqd', {}, v)",
        turned=lambda key: key,
        scores=lambda q, k: torch.einsum("bhqd,bhkd->bhqk", q, k),
        result=lambda w, v: torch.einsum("bhqk,bhkd->bhqd", w, v),
    ),
    "einsum, positions first": Layout(
        scores_formula="einsum('bqhd,bkhd->bhqk', q, k)",
        result_formula="einsum('bhqk,bkhd->bqhd', {}, v)",
        turned=lambda key: key,
        scores=lambda q, k: torch.einsum("bqhd,bkhd->bhqk", q, k),
        result=lambda w, v: torch.einsum("bhqk,bkhd->bqhd", w, v),
        turn=("query", "key", "value"),
    ),
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
    learned: bool = False
    turn: tuple[str, ...] = ()


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
    scaling: Scaling,
    masking: Masking,
    softmax: Softmax,
    layout: Layout,
    *,
    grouped: bool,
    dropout: bool,
    upcast: bool,
) -> Callable[[dict[str, Any]], Tensor]:
    # Each by itself, so that a digest of the function sees the source of its parts.
    scores_of, masked, masked_scores = scaling.scores, masking.masked, masking.scores
    turned, first, second, rank = layout.turned, layout.scores, layout.result, layout.rank

    def search(given: dict[str, Any]) -> Tensor:
        query, key, value = given["query"], given["key"], given["value"]
        masks = tuple(given[name] for name in ("bias", "mask") if name in given)
        _reject_other_shapes(rank, query, key, value, masks)
        if grouped:
            key, value = _grouped(query, key, value)
        scale = given.get("scale")
        key = turned(key)
        if upcast:
            query, key = query.float(), key.float()
        if masked_scores is not None:
            scores = masked_scores(query, key, masks[0], scale)
        else:
            scores = masked(scores_of(first, query, key, scale), masks, given.get("fill"))
        weights = softmax(scores)
        if weights.dtype != value.dtype:
            weights = weights.to(value.dtype)
        if dropout:
            weights = _native_dropout(weights, given["dropout_p"], True)[0]
        return second(weights, value)

    return search


def _reject_other_shapes(rank: int, query: Any, key: Any, value: Any, masks: tuple[Any, ...]) -> None:
    """An error, before anything is traced, where these cannot be what attention is computed from."""
    if not all(isinstance(tensor, Tensor) for tensor in (query, key, value, *masks)):
        raise ValueError("a number where attention has a tensor")
    ranks = {query.dim(), key.dim(), value.dim()}
    if ranks != {rank} or any(mask.dim() > rank for mask in masks):
        raise ValueError("not the ranks of attention")


def _replaced(
    scaling: Scaling, masking: Masking, layout: Layout, *, grouped: bool, dropout: bool
) -> Callable[[dict[str, Any]], Tensor]:
    factor, hides, scaled_too, turn = scaling.factor, masking.hides, masking.scaled_too, layout.turn

    def replace(given: dict[str, Any]) -> Tensor:
        scale = 1.0 if factor is None else factor(given["scale"])
        options: dict[str, Any] = {"scale": scale, "grouped": grouped}
        if dropout:
            options["dropout_p"] = given["dropout_p"]
        mask = given.get("mask")
        if hides is not None:
            hidden = given["mask"] if hides else given["mask"].logical_not()
            options.update(hidden=hidden, fill=given["fill"])
        elif mask is not None:
            mask = mask * scale if scaled_too else mask
            options["mask"] = given["bias"] + mask if "bias" in given else mask
        tensors = [given[name].transpose(1, 2) if name in turn else given[name] for name in ("query", "key", "value")]
        result = attend(*tensors, **options)
        return result.transpose(1, 2) if "query" in turn else result

    return replace


def _examples(masking: Masking, layout: Layout, *, grouped: bool, half: bool) -> Callable[[], tuple[Tensor, ...]]:
    def inputs() -> tuple[Tensor, ...]:
        dtype = torch.bfloat16 if half else torch.float32

        def tensor(name: str, heads: int, length: int) -> Tensor:
            sizes = (2, length, heads, 8) if name in layout.turn else (2, heads, length, 8)
            return torch.empty(sizes[-layout.rank :], dtype=dtype, requires_grad=True)

        query = tensor("query", 4, 6)
        key, value = (tensor(name, 2 if grouped else 4, 10) for name in ("key", "value"))
        sizes = (1 if masking.learned == "broadcast" else 2, 4, 6, 10)[-layout.rank :]
        mask_dtype = dtype if masking.hides is None else torch.bool
        masks = [torch.empty(sizes, dtype=mask_dtype) for _ in range(masking.masks)]
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
    written: str = "",
    grouped: bool = False,
    dropout: bool = False,
    upcast: bool = False,
) -> Spelling:
    """The spelling made of these parts."""
    scaling, masking, layout = SCALINGS[scaled], MASKINGS[masked], LAYOUTS[written]
    formula, normalize = SOFTMAXES[softmax]
    names = _arguments(masking, scaled=scaling.factor is not None, dropout=dropout)
    scalars = {"scale": _SCALE, "fill": _FILL, "dropout_p": _DROPOUT}
    words = [scaled, *(() if masked == "none" else (f"mask {masked}",)), *((written,) if written else ())]
    words += [f"softmax {softmax}"] * (softmax != "as is") + ["grouped heads"] * grouped
    words += ["upcast"] * upcast + ["dropout"] * dropout
    return Spelling(
        name=", ".join(words),
        formula=_formula(scaling, masking, formula, layout, grouped=grouped, dropout=dropout, upcast=upcast),
        models=models,
        search=_signed(
            _searched(scaling, masking, normalize, layout, grouped=grouped, dropout=dropout, upcast=upcast), names
        ),
        replace=_signed(_replaced(scaling, masking, layout, grouped=grouped, dropout=dropout), names),
        inputs=_examples(masking, layout, grouped=grouped, half=softmax != "as is" or upcast),
        scalars={name: scalars[name] for name in names if name in scalars},
        # A query scaled beforehand is a query like any other, and repeated heads are heads: the rows that know better
        # come first.
        priority=0 if grouped else 2 if scaling.factor is None else 1,
        inference=not dropout and not masking.learned,
        learned=bool(masking.learned),
        turn=layout.turn,
    )


def _formula(
    scaling: Scaling, masking: Masking, softmax: str, layout: Layout, *, grouped: bool, dropout: bool, upcast: bool
) -> str:
    scores = masking.formula.format(scaling.formula)
    if layout.scores_formula != "q @ kT":
        scores = scores.replace("(q @ kT)", "q @ kT").replace("q @ kT", layout.scores_formula)
    if grouped:
        scores = scores.replace("kT", "repeat_kv(k).T")
    if upcast:
        scores = scores.replace("q @ kT", "q.float() @ kT.float()")
    weights = softmax.format(scores) + (".to(v.dtype)" if upcast else "")
    if dropout:
        weights = f"dropout({weights}, p)"
    return layout.result_formula.format(weights).replace("@ v", "@ repeat_kv(v)" if grouped else "@ v")


_BERT = "BERT, DistilBERT, ELECTRA, RoBERTa (transformers)"
_LLAMA = "Llama, Mistral, Qwen (transformers)"

SPELLINGS: tuple[Spelling, ...] = (
    spelling("ViT, DeiT, Whisper encoder (transformers)", "multiplied"),
    spelling("textbook", "divided"),
    spelling("BART, Whisper before transformers 4.50", "query multiplied"),
    spelling("DistilBERT before transformers 4.48", "query divided"),
    spelling("textbook", "key multiplied"),
    spelling("textbook", "key divided"),
    spelling("Whisper (OpenAI): both by the fourth root of the width", "both multiplied"),
    spelling("textbook", "both divided"),
    spelling("T5 without bias; queries scaled by a projection", "unscaled"),
    spelling(f"{_BERT}, GPT-2, Whisper decoder, Swin", "multiplied", "added"),
    spelling("BERT, ViT before transformers 4.48", "divided", "added"),
    spelling("BART, OPT before transformers 4.48", "query multiplied", "added"),
    spelling("textbook", "query divided", "added"),
    spelling("textbook", "key multiplied", "added"),
    spelling("textbook", "both multiplied", "added"),
    spelling("T5 without padding", "unscaled", "added"),
    spelling("T5, mT5, LongT5", "multiplied", "two added"),
    spelling("T5, mT5, Pop2Piano", "unscaled", "two added"),
    spelling("Falcon with ALiBi", "multiplied", "added before scaling"),
    spelling("nanoGPT, minGPT", "multiplied", "filled"),
    spelling("Annotated Transformer", "divided", "filled"),
    spelling("textbook", "query multiplied", "filled"),
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
    spelling("Llama (reference), Llama before transformers 4.48, in half precision", "divided", "added", "in float32"),
    spelling("OPT in half precision", "query multiplied", "added", "in float32"),
    spelling("T5 in half precision", "unscaled", "added", "in float32"),
    spelling("T5 in half precision", "unscaled", "two added", "in float32"),
    spelling("textbook", "multiplied", "filled", "in float32"),
    spelling("textbook", "divided", "filled", "in float32"),
    spelling("textbook", "divided", "where a tensor", "in float32"),
    spelling("textbook", "multiplied", "where a tensor", "in float32"),
    spelling("GPT-J in half precision", "divided", "added", upcast=True),
    spelling("GPT-J in half precision", "multiplied", "added", upcast=True),
    spelling("GPT-Neo in half precision", "unscaled", "where a tensor", upcast=True),
    spelling("textbook, a single head", "multiplied", written="heads without a batch"),
    spelling("textbook", "divided", written="heads without a batch"),
    spelling(
        "MultiheadAttention with weights, BART before transformers 4.48",
        "query multiplied",
        written="heads without a batch",
    ),
    spelling(
        "MultiheadAttention with weights, heads scaled by a projection", "unscaled", written="heads without a batch"
    ),
    spelling("textbook", "multiplied", "added", written="heads without a batch"),
    spelling("OPT, BART before transformers 4.48", "unscaled", "added", written="heads without a batch"),
    spelling("textbook, a single head", "divided", "filled", written="heads without a batch"),
    spelling("textbook", "multiplied", "filled", written="heads without a batch"),
    spelling("Stable Diffusion (diffusers)", "baddbmm", written="heads without a batch"),
    spelling("BLOOM with ALiBi", "multiplied", "added in the product", written="heads without a batch"),
    spelling(
        "MultiheadAttention with weights and a mask",
        "query multiplied",
        "added in the product, query scaled",
        written="heads without a batch",
    ),
    spelling("heads split as in GPT (2018)", "divided", written="key turned at once"),
    spelling("heads split as in GPT (2018)", "multiplied", written="key turned at once"),
    spelling("heads split as in GPT (2018)", "divided", "added", written="key turned at once"),
    spelling("heads split as in GPT (2018)", "multiplied", "added", written="key turned at once"),
    spelling("heads split as in GPT (2018)", "multiplied", "filled", written="key turned at once"),
    spelling("x-transformers", "multiplied", written="einsum"),
    spelling("x-transformers", "query multiplied", written="einsum"),
    spelling("x-transformers", "multiplied", "filled", written="einsum"),
    spelling("x-transformers", "multiplied", "added", written="einsum"),
    spelling("ports from Flax", "unscaled", "added", written="einsum, positions first"),
    spelling("ports from Flax", "multiplied", written="einsum, positions first"),
    spelling("textbook", "divided", "filled", written="einsum, positions first"),
    spelling("textbook", "multiplied", "filled", written="einsum, positions first"),
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
    spelling("Annotated Transformer in training with dropout", "divided", "filled", dropout=True),
    spelling("nanoGPT, minGPT in training with dropout", "multiplied", "filled", dropout=True),
    spelling("T5 in training with dropout", "unscaled", "added", dropout=True),
    spelling("ViT in half precision, with dropout", "multiplied", "none", "in float32", dropout=True),
    spelling(f"{_LLAMA} in half precision, with dropout", "multiplied", "added", "in float32", dropout=True),
)
