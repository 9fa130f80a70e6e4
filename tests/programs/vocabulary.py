"""The operators programs are made of. Each function adds one statement to a growing program, or nothing."""

from __future__ import annotations

from collections.abc import Callable

import torch

from tests.programs.generate import FLOATS, Growth


def unary(g: Growth) -> None:
    a = g.floating()
    name = g.pick(("neg", "sin", "abs", "exp", "tanh", "sigmoid", "relu", "square", "cos", "rsqrt", "log1p", "sqrt",
                   "erf", "floor", "sign", "reciprocal", "expm1", "atan", "trunc", "round"))  # fmt: skip
    if a is None or (name in ("floor", "sign", "trunc", "round") and a not in g.exact):
        return
    forms = {
        "exp": f"{a}.clamp(-3, 3).exp()", "rsqrt": f"({a}.abs() + 1).rsqrt()", "log1p": f"{a}.abs().log1p()",
        "sqrt": f"({a}.abs() + 1).sqrt()", "reciprocal": f"({a}.abs() + 1).reciprocal()",
        "expm1": f"{a}.clamp(-3, 3).expm1()",
    }  # fmt: skip
    exact = name in ("neg", "abs", "relu", "floor", "sign", "trunc", "round")
    g.let(name, forms.get(name, f"{a}.{name}()"), a, exact=exact)


def activation(g: Growth) -> None:
    a = g.floating()
    name, call = g.pick((
        ("mul_scalar", "({} * 0.5 + 1)"), ("rsub", "(1 - {})"), ("gelu", "F.gelu({})"), ("silu", "F.silu({})"),
        ("leaky_relu", "F.leaky_relu({}, 0.1)"), ("softplus", "F.softplus({})"), ("hardtanh", "F.hardtanh({})"),
        ("elu", "F.elu({})"), ("gelu_tanh", "F.gelu({}, approximate='tanh')"), ("logsigmoid", "F.logsigmoid({})"),
        ("clamp", "{}.clamp(-0.5, 2)"), ("pow", "{} ** 2"), ("pow3", "{} ** 3"), ("hardswish", "F.hardswish({})"),
        ("lerp", "torch.lerp({0}, {0} * 2, 0.25)"), ("addcmul", "torch.addcmul({0}, {0}, {0}, value=0.5)"),
    ))  # fmt: skip
    if a is not None:
        g.let(name, call.format(a), a, exact=name in ("hardtanh", "clamp"))


def integer(g: Growth) -> None:
    a = g.value(lambda v: not v.dtype.is_floating_point, exact=True)
    name, call = g.pick((
        ("bitwise_not", "~{}"), ("add_scalar", "({} + 1)"), ("mul_scalar", "({} * 3)"), ("bitwise_and", "({} & 5)"),
        ("bitwise_or", "({} | 2)"), ("bitwise_xor", "({} ^ 1)"), ("abs", "{}.abs()"), ("floor_divide", "({} // 3)"),
        ("remainder", "({} % 4)"), ("clamp", "{}.clamp(1, 4)"), ("eq", "({} == 2)"), ("gt", "({} > 1)"),
        ("lshift", "({} << 2)"), ("rshift", "({} >> 1)"), ("neg", "-{}"), ("fmod", "torch.fmod({}, 3)"),
        ("trunc_divide", "torch.div({}, 3, rounding_mode='trunc')"), ("remainder_negative", "({} % -3)"),
        ("true_divide", "({} / 4)"), ("sign", "{}.sign()"), ("square", "{}.square()"),
    ))  # fmt: skip
    # Fake tensors refuse to shift a bool, which eager does.
    if a is not None and not (name.endswith("shift") and g[a].dtype == torch.bool):
        g.let(name, call.format(a), a, exact=name != "true_divide")


def binary(g: Growth) -> None:
    a, b = g.value(), g.value()
    assert a is not None
    assert b is not None
    name, call = g.pick((
        ("add", "{} + {}"), ("mul", "{} * {}"), ("sub", "{} - {}"), ("maximum", "torch.maximum({}, {})"),
        ("minimum", "torch.minimum({}, {})"), ("div", "{} / ({}.abs() + 1)"),
        ("add_alpha", "torch.add({}, {}, alpha=2)"), ("atan2", "torch.atan2({}, {}.abs() + 1)"),
        ("copysign", "torch.copysign({}, {})"), ("fmax", "torch.fmax({}, {})"),
        ("floor_divide", "{} // ({}.abs().clamp(0, 5) + 1)"), ("remainder", "{} % ({}.abs().clamp(0, 5) + 1)"),
    ))  # fmt: skip
    floats = [g[n].dtype.is_floating_point for n in (a, b)]
    picks = name in ("maximum", "minimum", "fmax", "copysign")
    if name in ("floor_divide", "remainder", "copysign") and (any(floats) or not {a, b} <= g.exact):
        return
    # Maximum of a mixture converts the integers, which may round.
    exact = all(floats) or not any(floats) if picks else not any(floats)
    g.let(name, call.format(a, b), a, b, exact=exact and name not in ("div", "atan2", "copysign"))


def choice(g: Growth) -> None:
    a, b = g.value(exact=True), g.value()
    if a is None or b is None:
        return
    name, call = g.pick((
        ("where", "torch.where({0} > 0, {1}, 0)"), ("where", "torch.where({0} <= 1, {1}, {2})"),
        ("masked_fill", "{1}.masked_fill({0} > 0, 1)"), ("where", "torch.where({0} != {0}, {2}, {1})"),
        ("compare", "({0} >= {0}.flip(0))"), ("isnan", "torch.isnan({0})"),
        ("logical_and", "torch.logical_and({0}, {0} > 1)"),
    ))  # fmt: skip
    c = b if g.chance(3) else a
    g.let(name, call.format(a, b, c), *((a, b, c) if name in ("where", "masked_fill") else (a,)), exact=True)


def reduction(g: Growth) -> None:
    a = g.value(lambda v: v.dim() > 0)
    if a is None:
        return
    dims, keep = g.dimensions(a), g.pick((False, True))
    meaning = None
    if g[a].dtype.is_floating_point:
        name = g.pick(("sum", "mean", "amax", "amin", "var", "logsumexp", "norm", "sum_all", "std_mean", "prod"))
        text = {
            "sum": f"{a}.sum({dims}, keepdim={keep}) * 0.1",
            "var": f"{a}.var({dims}, correction=0, keepdim={keep})",
            "norm": f"torch.linalg.vector_norm({a}, dim={dims}, keepdim={keep})",
            "sum_all": f"{a}.sum() * 0.01",
            "std_mean": f"torch.var_mean({a}, {dims}, correction=0, keepdim={keep})[1]",
            "prod": f"{a}.tanh().prod({dims[0]}, keepdim={keep})",
        }.get(name, f"{a}.{name}({dims}, keepdim={keep})")
        if name == "std_mean":  # eager's is NaN in place of an infinity, but for one in the last element it looks at
            meaning = f"{a}.mean({dims}, keepdim={keep})"
    else:
        name = g.pick(("sum", "amax", "any", "all", "prod", "amin", "count_nonzero"))
        text = f"{a}.{name}({dims[0]}, keepdim={keep})" if name != "count_nonzero" else f"{a}.count_nonzero({dims[0]})"
    exact = name in ("amax", "amin", "any", "all") or not g[a].dtype.is_floating_point
    g.let(name, text, a, exact=exact, meaning=meaning)


def ranking(g: Growth) -> None:
    a = g.value(lambda v: v.dim() > 0 and v.dtype != torch.bool, exact=True)
    if a is None:
        return
    name, call = g.pick((
        ("argmax", "{}.argmax({})"), ("argmin", "{}.argmin({})"), ("max_index", "{}.max({})[1]"),
        ("min_values", "{}.min({}).values"), ("cumsum", "{}.cumsum({})"), ("sort", "{}.sort({}, stable=True).values"),
        ("argsort", "{}.argsort({}, stable=True)"), ("cumprod", "{}.clamp(-1, 1).cumprod({})"),
    ))  # fmt: skip
    exact = not name.startswith("cum") or not g[a].dtype.is_floating_point
    # Which of equal values is chosen for `values` does not show; for an index it does where torch leaves it open.
    if name in ("argmax", "argmin", "max_index") and a in g.special:
        return
    g.let(name, call.format(a, g.dimension(a)), a, exact=exact)


def row(g: Growth) -> None:
    a = g.floating(least=1)
    if a is None:
        return
    dim = g.dimension(a)
    name, text = g.pick((
        ("softmax", f"F.softmax({a}, {dim})"), ("layer_norm", f"F.layer_norm({a}, {a}.shape[{dim}:])"),
        ("log_softmax", f"F.log_softmax({a}, {dim})"), ("center", f"{a} - {a}.mean({dim}, keepdim=True)"),
        ("rms_norm", f"{a} * torch.rsqrt({a}.square().mean(-1, keepdim=True) + 1e-3)"),
        ("scale_rows", f"{a} / ({a}.abs().amax({dim}, keepdim=True) + 1)"),
        ("normalize", f"F.normalize({a} + 2, dim={dim})"),
    ))  # fmt: skip
    # The softmax of rows of minus infinity, or a layer norm of one element, is all cancellation.
    if name == "layer_norm" and min(s[a].shape[dim:].numel() for s in g.scopes) < 2:
        return
    g.let(name, text, a)


def view(g: Growth) -> None:
    a = g.value()
    assert a is not None
    value = g[a]
    rank = value.dim()
    kinds = ["unsqueeze", "flatten", "reshape", "squeeze"]
    if rank:
        kinds = ["slice", "permute", "select", "flip", "expand", "unbind", "roll", "repeat", "chunk", "unfold", *kinds]
    if rank > 1:
        kinds += ["transpose", "diagonal", "tril", "triu", "swap_flatten"]
    kind = g.pick(kinds)
    dim = g.dimension(a) if rank else 0
    size = value.shape[dim] if rank else 1
    if kind == "reshape":
        leading = g.pick((1, 2, 3, 4, 5, 7, 8, 16))
        text = g.pick((f"{a}.reshape({leading}, -1)", f"{a}.reshape(-1, {leading})", f"{a}.reshape(-1)"))
    elif kind == "unsqueeze":
        text = f"{a}.unsqueeze({g.number(0, rank)})"
    elif kind in ("squeeze", "flatten"):
        text = f"{a}.{kind}()"
    elif kind == "slice":
        start, step = g.number(-size, size), g.pick((1, 2, 3))
        end = g.pick(("", str(g.number(-size, size))))
        text = f"{a}[{':, ' * dim}{start}:{end}:{step}]"
    elif kind == "select":
        text = f"{a}.select({dim}, {g.number(-size, size - 1) if size else 0})"
    elif kind == "flip":
        text = f"{a}.flip({g.dimensions(a)})"
    elif kind == "permute":
        text = f"{a}.permute({g.permutation(rank)})"
    elif kind == "expand":
        text = f"{a}.expand(2, {', '.join('-1' for _ in range(rank))})"
    elif kind == "unbind":
        if max(scope[a].shape[dim] for scope in g.scopes) > 40:
            return  # capturing a thousand views of symbolic sizes takes Dynamo minutes
        text = f"{a}.unbind({dim})[-1]"
    elif kind == "chunk":
        text = f"{a}.chunk(2, {dim})[-1]"
    elif kind == "unfold":
        text = f"{a}.unfold({dim}, 2, 1)"
    elif kind == "roll":
        text = f"{a}.roll({g.number(-3, 3)}, {dim})"
    elif kind == "repeat":
        text = f"{a}.repeat({tuple(g.pick((1, 2)) for _ in range(rank))})"
    elif kind == "transpose":
        text = f"{a}.transpose({dim}, {g.number(0, rank - 1)})"
    elif kind == "swap_flatten":
        text = f"{a}.transpose(0, -1).flatten(0, 1)"
    elif kind in ("tril", "triu"):
        text = f"{a}.{kind}({g.number(-2, 2)})"
    else:
        one, two = g.permutation(rank)[:2]
        text = f"{a}.diagonal({g.number(-2, 2)}, {one}, {two})"
    g.let(kind, text, a, exact=True)


def join(g: Growth) -> None:
    a = g.value(lambda v: v.dim() > 0)
    if a is None:
        return
    dim = g.dimension(a)
    same = g.value(lambda v: v.shape == g[a].shape) or a
    name, text = g.pick((
        ("cat", f"torch.cat([{a}, {same}], {dim})"), ("stack", f"torch.stack([{a}, {same}], {dim})"),
        ("cat_narrow", f"torch.cat([{same}, {a}, {a}.narrow({dim}, 0, {a}.shape[{dim}] // 2)], {dim})"),
        ("pad", f"F.pad({a}, ({g.number(-1, 2)}, {g.number(-1, 3)}), value={g.pick((0, 1))})"),
        ("slice_scatter", f"torch.slice_scatter({a}, {a}.narrow({dim}, 0, 1) * 1, {dim}, 0, 1)"),
        ("select_scatter", f"torch.select_scatter({a}, {a}.select({dim}, 0), {dim}, -1)"),
    ))  # fmt: skip
    mixed = g[a].dtype != g[same].dtype  # integers beside floats are converted, which may round
    g.let(name, text, a, same, exact=not mixed)


def product(g: Growth) -> None:
    a = g.floating(least=2)
    if a is None:
        return
    value = g[a]
    other = g.value(lambda v: v.dtype == value.dtype and v.dim() == 2 and v.shape[0] == value.shape[-1])
    alike = g.value(lambda v: v.dtype == value.dtype and v.shape == value.shape) or a
    forms = [("matmul_transposed", f"{a} @ {alike}.transpose(-1, -2)", alike)]
    if other is not None:
        forms += [("matmul", f"{a} @ {other}", other), ("linear", f"F.linear({a}, {other}.t())", other)]
        if value.dim() == 2:
            forms.append(("mm", f"torch.mm({a}, {other})", other))
            forms.append(("addmm", f"torch.addmm({other}[0], {a}, {other})", other))
    if value.dim() == 2:
        forms.append(("linear_bias", f"F.linear({a}, {alike}, {alike}[:, 0])", alike))
        forms.append(("mv", f"torch.mv({a}, {alike}[0])", alike))
    if value.dim() == 3:
        forms.append(("bmm", f"torch.bmm({a}, {alike}.mT)", alike))
        forms.append(("baddbmm", f"torch.baddbmm({a}.sum(), {a}, {alike}.mT)", alike))
    if value.dim() == 4:
        forms.append(("attention", f"F.scaled_dot_product_attention({a}, {alike}, {alike})", alike))
    name, text, second = g.pick(forms)
    if not g.special & {a, second}:
        g.let(name, f"({text}) * 0.1", a, second)


def index(g: Growth) -> None:
    a = g.value(lambda v: v.dim() > 0)
    if a is None:
        return
    dim = g.dimension(a)
    places = g.value(
        lambda v: not v.dtype.is_floating_point and v.dtype not in (torch.bool, torch.uint8) and v.dim() > 0, exact=True
    )
    start = f"({places} % {a}.shape[{dim}]).long()" if places is not None else f"(torch.arange(7) % {a}.shape[{dim}])"
    first = f"({places} % {a}.shape[0]).long()" if places is not None else f"(torch.arange(3) % {a}.shape[0])"
    name, text = g.pick((
        ("index_select", f"{a}.index_select({dim}, {start}.flatten())"),
        ("index", f"{a}[{':, ' * dim}{start}]"), ("index_negative", f"{a}[{':, ' * dim}{start} - {a}.shape[{dim}]]"),
        ("index_two", f"{a}[{first}, ..., torch.tensor(0)]"),
        ("gather", f"{a}.gather({dim}, torch.zeros_like({a}, dtype=torch.int64))"),
        ("take_along", f"torch.take_along_dim({a}, {a}.argsort({dim}, stable=True), {dim})"),
        ("embedding", f"F.embedding({first}, {a})"),
        ("index_add", f"{a}.index_add(0, {first}.flatten(), {a}[{first}.flatten()])"),
        ("index_put", f"{a}.index_put(({first}.flatten(),), {a}[0])"),
        ("scatter", f"{a}.scatter({dim}, {a}.argsort({dim}, stable=True), {a})"),
        ("scatter_add", f"{a}.scatter_add({dim}, torch.zeros_like({a}, dtype=torch.int64), {a})"),
    ))  # fmt: skip
    if name in ("take_along", "scatter") and a not in g.exact:
        return
    adds = name in ("index_add", "scatter_add") and g[a].dtype.is_floating_point
    # Fake tensors do not foresee the layout that eager gives the rows of a tensor that is not contiguous.
    g.let(name, f"{text}.contiguous()", a, places, exact=not adds)


def conversion(g: Growth) -> None:
    a = g.value()
    assert a is not None
    target = g.pick((*FLOATS, torch.int64, torch.int32, torch.uint8, torch.bool))
    source = g[a].dtype
    if source.is_floating_point and not target.is_floating_point and (a not in g.exact or a in g.special):
        return
    if target == torch.uint8 and source.is_floating_point:
        g.let("to_uint8", f"{a}.abs().to(torch.uint8)", a, exact=True)
        return
    widens = not target.is_floating_point or source == target or (
        source.is_floating_point and target.itemsize > source.itemsize
    )  # fmt: skip
    # Another dtype is other memory: float64 in place of both would be one.
    meaning = f"{a}.to({target}, copy=True)" if source != target else None
    name = f"to_{str(target).removeprefix('torch.')}"
    g.let(name, f"{a}.to({target})", a, exact=widens or source == torch.bool, meaning=meaning)


def creation(g: Growth) -> None:
    a = g.value(lambda v: v.dim() > 0)
    if a is None:
        return
    name, call = g.pick((
        ("arange", "{0} + torch.arange({0}.shape[-1])"), ("ones_like", "{0} * torch.ones_like({0})"),
        ("full", "{0} + torch.full(({0}.shape[-1],), 0.5)"),
        ("where_arange", "torch.where(torch.arange({0}.shape[-1]) % 2 == 0, {0}, 0)"),
        ("new_zeros", "{0}.new_zeros({0}.shape) + {0}"), ("linspace", "{0} * torch.linspace(0, 1, {0}.shape[-1])"),
        ("size_scalar", "{0} * {0}.shape[-1]"),
    ))  # fmt: skip
    g.let(name, call.format(a), a, exact=not g[a].dtype.is_floating_point and name in ("arange", "size_scalar"))


_IN_PLACE = (
    ("mul_", "{0}.mul_(2)", True), ("slice_add_", "{0}[..., 1:] += 1", False),
    ("slice_fill_", "{0}[..., ::2] = 0", True), ("row_fill_", "{0}[0] = 1", True),
    ("shift_", "{0}[..., 1:].copy_({0}[..., :-1].clone())", True), ("neg_", "{0}[..., 1:].neg_()", True),
    ("flip_copy_", "{0}.copy_({0}.flip(0))", True), ("zero_", "{0}.zero_()", True),
    ("transpose_add_", "{0}.transpose(0, -1).add_(1)", False), ("clamp_", "{0}.clamp_(-1, 1)", True),
    ("add_self_", "{0}.add_({0})", False), ("square_", "{0}.square_()", False),
    ("swap_add_", "{0} += {0}.flip(-1)", False),
)  # fmt: skip


def mutation(g: Growth) -> None:
    """A copy is changed in place."""
    a = g.value(lambda v: v.dim() > 0)
    if a is None:
        return
    name, text, exact = g.pick(_IN_PLACE)
    copy = g.let("clone", f"{a}.clone()", a, exact=True)
    if copy is not None:
        g.update(name, text.format(copy), copy, exact=exact or not g[copy].dtype.is_floating_point)


def mutation_of_anything(g: Growth) -> None:
    """An input, an intermediate or a view of one is changed in place."""
    a, b = g.value(lambda v: v.dim() > 0), g.value()
    if a is None or b is None:
        return
    whole = not g[a].dtype.is_floating_point and not g[b].dtype.is_floating_point
    if g.chance(3):
        g.update("add_other_", f"{a}.add_({b})", a, b, exact=whole)
    else:
        name, text, exact = g.pick(_IN_PLACE)
        g.update(name, text.format(a), a, exact=exact or whole)


def library(g: Growth) -> None:
    """An operator that torch's library computes, with kernels of ours before and after it."""
    a = g.floating(least=2)
    if a is None or a in g.special:
        return
    rank, dim = g[a].dim(), g.dimension(a)
    square = f"({a} @ {a}.mT * 0.01 + torch.eye({a}.shape[-2], dtype={a}.dtype))"
    forms = [
        ("logcumsumexp", f"{a}.logcumsumexp({dim})"), ("cummax", f"{a}.cummax({dim}).values"),
        ("topk", f"{a}.topk(2, {dim}).values"), ("kthvalue", f"{a}.kthvalue(1, {dim}).values"),
        ("renorm", f"torch.renorm({a}, 2, {dim}, 3.0)"), ("rfft", f"torch.fft.rfft({a}, dim={dim}).real * 0.1"),
        ("inv", f"torch.linalg.inv({square})"), ("cholesky", f"torch.linalg.cholesky({square})"),
        ("einsum", f"torch.einsum('...ij,...kj->...ki', {a}, {a}) * 0.1"),
        ("searchsorted", f"torch.searchsorted(torch.linspace(-2, 2, 9, dtype={a}.dtype), {a})"),
        ("cosine", f"F.cosine_similarity({a} + 2, {a}.flip(0) + 3, dim={dim})"),
    ]  # fmt: skip
    if rank == 2:
        forms.append(("embedding_bag", f"F.embedding_bag(torch.arange(4).view(2, 2) % {a}.shape[0], {a}, mode='mean')"))
    if rank in (3, 4):
        ends = f"{':2, ' * (rank - 2)}".removesuffix(", ")
        forms += [
            (f"conv{rank - 2}d", f"F.conv{rank - 2}d({a}, {a}[:2, :, {ends}]) * 0.1"),
            (f"conv_padded{rank - 2}d", f"F.conv{rank - 2}d({a}, {a}[:3, :, {ends}], stride=2, padding=1) * 0.1"),
            (f"conv_transpose{rank - 2}d",
             f"F.conv_transpose{rank - 2}d({a}, {a}[:1, :, {ends}].transpose(0, 1)) * 0.1"),
            (f"conv_depthwise{rank - 2}d",
             f"F.conv{rank - 2}d({a}, {a}[:1, :, {ends}].transpose(0, 1), groups={a}.shape[1]) * 0.1"),
            ("avg_pool", f"F.avg_pool{rank - 2}d({a}, 2, 1)"), ("max_pool", f"F.max_pool{rank - 2}d({a}, 2, 1)"),
            ("adaptive_pool", f"F.adaptive_avg_pool{rank - 2}d({a}, 2)"),
            ("interpolate", f"F.interpolate({a}, scale_factor=2, mode='{'linear' if rank == 3 else 'bilinear'}')"),
            ("nearest", f"F.interpolate({a}, scale_factor=2)"), ("group_norm", f"F.group_norm({a}, 1)"),
            ("batch_norm", f"F.batch_norm({a}, None, None, training=True)"),
        ]  # fmt: skip
    if rank == 4:
        forms += [
            ("bicubic", f"F.interpolate({a}, scale_factor=2, mode='bicubic')"),
            ("grid_sample", f"F.grid_sample({a}, torch.full(({a}.shape[0], 3, 3, 2), 0.3, dtype={a}.dtype))"),
            ("unfold_windows", f"F.fold(F.unfold({a}, 2), {a}.shape[2:], 2) * 0.1"),
            ("to_channels_last", f"{a}.contiguous(memory_format=torch.channels_last)"),
        ]  # fmt: skip
    name, text = g.pick(forms)
    exact = name in ("cummax", "topk", "kthvalue", "searchsorted", "max_pool", "nearest", "to_channels_last")
    if name == "searchsorted" and a not in g.exact:
        return
    # Variances of next to nothing divide by next to nothing.
    if name in ("group_norm", "batch_norm") and min(s[a][:1].numel() for s in g.scopes) < 4:
        return
    g.let(name, text, a, exact=exact)


Adds = Callable[[Growth], None]
_WEIGHTS: tuple[tuple[Adds, int], ...] = (
    (unary, 4), (binary, 6), (view, 7), (reduction, 5), (activation, 3), (integer, 3), (choice, 3), (row, 3),
    (join, 3), (product, 3), (index, 3), (conversion, 2), (mutation, 2), (creation, 1), (ranking, 1),
    (mutation_of_anything, 2), (library, 4),
)  # fmt: skip
OPERATORS: tuple[Adds, ...] = tuple(adds for adds, weight in _WEIGHTS for _ in range(weight))
