"""Settings: every knob of the compiler, with its default, its valid values and what it does.

A setting is given, in this order of priority, by ``torch.compile(..., options={...})``, by the context manager
:func:`settings`, by the environment variable ``KILN_<NAME>``, or by its default. They are read when a graph is
compiled; code that exists already keeps the settings it was compiled with.
"""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field, fields
from difflib import get_close_matches
from functools import cache
from types import MappingProxyType
from typing import Any, Literal

from torchkiln.errors import OptionError, SettingWarning, warn_user

Precision = Literal["default", "eager"]
RandomNumbers = Literal["fused", "eager"]
PaddedProducts = Literal["off", "gpu", "all"]
BudgetSolver = Literal["exact", "dynamic", "greedy"]
RecomputationCosts = Literal["estimated", "profiled"]


@dataclass(frozen=True)
class Kind:
    """What values a setting takes: ``check`` returns the value to keep or raises ValueError, ``parse`` reads text."""

    valid: str
    check: Callable[[object], object]
    parse: Callable[[str], object]


def _check_flag(value: object) -> bool:
    if not isinstance(value, bool):
        raise ValueError
    return value


def _parse_flag(text: str) -> bool:
    word = text.strip().lower()
    if word in ("1", "true", "yes", "on"):
        return True
    if word in ("0", "false", "no", "off"):
        return False
    raise ValueError


FLAG = Kind("True or False (1 or 0 in the environment)", _check_flag, _parse_flag)


def _integer(low: int, *, optional: bool = False, among: tuple[int, ...] | None = None) -> Kind:
    def check(value: object) -> int | None:
        if value is None and optional:
            return None
        if isinstance(value, bool) or not isinstance(value, int) or value < low:
            raise ValueError
        if among is not None and value not in among:
            raise ValueError
        return value

    def parse(text: str) -> int | None:
        return None if optional and text.strip().lower() in ("", "none") else int(text)

    valid = f"one of {', '.join(map(str, among))}" if among else f"an integer of at least {low}"
    return Kind(valid + (" or None" if optional else ""), check, parse)


def _choice(*names: str) -> Kind:
    def check(value: object) -> str:
        if not isinstance(value, str) or value not in names:
            raise ValueError
        return value

    return Kind(f"one of {', '.join(map(repr, names))}", check, str.strip)


def _parse_pass_selection(text: str) -> tuple[str | int, ...]:
    words = [word.strip() for word in text.split(",")]
    return tuple(int(word) if word.isdigit() else word for word in words if word)


def _check_pass_selection(value: object) -> tuple[str | int, ...]:
    if isinstance(value, str):
        value = _parse_pass_selection(value)
    if not isinstance(value, (tuple, list, set, frozenset)):
        raise ValueError
    if any(isinstance(item, bool) or not isinstance(item, (str, int)) for item in value):
        raise ValueError
    return tuple(sorted(value, key=str) if isinstance(value, (set, frozenset)) else value)


PASS_SELECTION = Kind(
    "pass names and numbers (a list, or text with commas)", _check_pass_selection, _parse_pass_selection
)


_UNITS = {"b": 0, "kib": 10, "mib": 20, "gib": 30, "tib": 40}
_BYTES = re.compile(r"(\d+(?:\.\d+)?)\s*([kmgt]ib|b)", re.IGNORECASE)


def bytes_of(text: str) -> int:
    """``"2GiB"`` as a number of bytes; raises ValueError for text that is none."""
    match = _BYTES.fullmatch(text.strip())
    if match is None:
        raise ValueError
    return int(float(match[1]) * 2 ** _UNITS[match[2].lower()])


def _check_memory_budget(value: object) -> float | str:
    if isinstance(value, str):
        bytes_of(value)
        return value.strip()
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value <= 1:
        raise ValueError
    return float(value)


def _parse_memory_budget(text: str) -> float | str:
    return text if _BYTES.fullmatch(text.strip()) else float(text)


MEMORY_BUDGET = Kind(
    "a number from 0 to 1, or bytes as text such as '2GiB' (B, KiB, MiB, GiB or TiB)",
    _check_memory_budget,
    _parse_memory_budget,
)


def _setting(default: Any, kind: Kind, doc: str, *, shapes_code: bool = True) -> Any:
    """``shapes_code`` is False for a setting that cannot change the compiled result, so caches may ignore it."""
    return field(default=default, metadata={"kind": kind, "doc": doc, "shapes_code": shapes_code})


@dataclass(frozen=True)
class Settings:
    """All settings of one compilation. Values are checked on construction; see :func:`describe` for a table."""

    fallback: bool = _setting(
        True,
        FLAG,
        "Run a graph eagerly, after one warning, when compiling it fails; when off, raise CompileError.",
        shapes_code=False,
    )
    adaptive: bool = _setting(
        True,
        FLAG,
        "Time a graph compiled and eagerly, once, and run it eagerly where that is faster; off where fallback is.",
        shapes_code=False,
    )
    keep_memory: bool = _setting(
        True,
        FLAG,
        "Let the C library keep freed memory of up to twice what a graph hands out, for the next step to use.",
        shapes_code=False,
    )
    threads: int | None = _setting(
        None,
        _integer(1, optional=True),
        "Threads a kernel may use; None takes torch.get_num_threads() at each run.",
    )
    precision: Precision = _setting(  # noqa: RUF009 (the other fields pass, this type is unknown to the rule)
        "default",
        _choice("default", "eager"),
        "'default' keeps chains of half-precision operations in float32; 'eager' rounds after each one as eager does.",
    )
    rng: RandomNumbers = _setting(  # noqa: RUF009 (as above)
        "fused",
        _choice("fused", "eager"),
        "'fused' makes random numbers inside kernels from a seed drawn per call; 'eager' draws those eager would draw.",
    )
    fuse: bool = _setting(
        True,
        FLAG,
        "Merge operations into shared kernels; when off, every operation is a kernel of its own (to find a bug).",
    )
    vector_bits: int | None = _setting(
        None,
        _integer(128, optional=True, among=(128, 256, 512)),
        "Width of the vector registers to compile for; None takes the widest of this machine.",
    )
    # 131072 was tried: rotary embedding of 98,304 elements fell from 1.54 to 1.28 x inductor, nothing gained.
    parallel_threshold: int = _setting(
        16384,
        _integer(1),
        "Simple operations on single elements that make it worth using one more thread.",
    )
    inline_limit: int = _setting(
        64,
        _integer(0),
        "Largest expression, in nodes, that is moved into its reader; larger ones keep their own loop until fusion.",
    )
    group_layer_norms: bool = _setting(
        False,
        FLAG,
        "Compute parallel layer norms of one shape as one; slower on the CPUs measured.",
    )
    pad_matmuls: PaddedProducts = _setting(  # noqa: RUF009 (as above)
        "gpu",
        _choice("off", "gpu", "all"),
        "Where to pad badly aligned matrix products if a measurement, kept in the cache folder, says that it pays.",
    )
    memory_budget: float | str = _setting(
        1.0,
        MEMORY_BUDGET,
        "How much forward may save for backward: a share of what is best for speed (1) down to as little as can be (0),"
        " or bytes such as '2GiB' that the activations of forward and backward together must stay under.",
    )
    budget_solver: BudgetSolver = _setting(  # noqa: RUF009 (as above)
        "exact",
        _choice("exact", "dynamic", "greedy"),
        "How values are chosen under a memory budget: by a mixed-integer program, dynamic programming or greedily.",
    )
    recomputation_costs: RecomputationCosts = _setting(  # noqa: RUF009 (as above)
        "estimated",
        _choice("estimated", "profiled"),
        "Where the run time of what is computed again comes from: arithmetic and bytes with this machine's rates, or"
        " running every operator once while compiling.",
    )
    aggressive_recomputation: bool = _setting(
        False,
        FLAG,
        "Compute everything again in backward that is not a product, random or used far apart: turns off"
        " save_reductions, save_unlisted, save_long_chains and save_materialized.",
    )
    save_products: bool = _setting(
        True,
        FLAG,
        "Do not compute matrix products, convolutions and attention again in backward.",
    )
    save_reductions: bool = _setting(
        True,
        FLAG,
        "Do not compute sums, means, softmax, normalizations and other reductions again in backward.",
    )
    save_unlisted: bool = _setting(
        True,
        FLAG,
        "Do not compute operators again in backward that are not known to be cheap: only those on single elements and"
        " those that move elements are.",
    )
    save_random: bool = _setting(
        False,
        FLAG,
        "Do not make random numbers again from their seed in backward (numbers of rng='eager' never are).",
    )
    save_far_used: bool = _setting(
        True,
        FLAG,
        "Do not compute values again in backward that forward reads over a long way, such as residual connections.",
    )
    save_long_chains: bool = _setting(
        True,
        FLAG,
        "In a long row of operators on single elements, do not compute more than twenty again in backward.",
    )
    save_materialized: bool = _setting(
        True,
        FLAG,
        "Do not compute values again in backward that a library call there needs in memory.",
    )
    save_views: bool = _setting(
        False,
        FLAG,
        "Hand views over to backward themselves instead of making them again from the memory they show, which is free.",
    )
    passes_skip: tuple[str | int, ...] = _setting(
        (),
        PASS_SELECTION,
        "Graph passes not to run: by name ('no_ops'), by stage and name ('joint/no_ops'), or by number.",
    )
    passes_limit: int | None = _setting(
        None,
        _integer(0, optional=True),
        "Run only graph passes numbered up to this one; halving it finds the pass that breaks a model.",
    )
    profile: bool = _setting(
        False,
        FLAG,
        "Keep the time of every kernel and library call, for 'kiln bench --profile'; costs about 50 ns for each.",
    )
    record_passes: bool = _setting(
        False,
        FLAG,
        "Keep the text of the graph before and after every pass that changed it.",
        shapes_code=False,
    )
    checks: bool = _setting(
        False,
        FLAG,
        "After every pass that changed a graph, lint it and propagate fake tensors through it again.",
        shapes_code=False,
    )
    check_numerics: bool = _setting(
        False,
        FLAG,
        "Run the graph before and after every pass that changed it, on the example inputs, and compare the results.",
        shapes_code=False,
    )

    def __post_init__(self) -> None:
        for item in fields(self):
            value = getattr(self, item.name)
            kind: Kind = item.metadata["kind"]
            try:
                object.__setattr__(self, item.name, kind.check(value))
            except ValueError:
                raise OptionError.bad_value(item.name, value, kind.valid) from None

    def fingerprint(self) -> str:
        """Hex digest of every setting that can change the compiled result; equal across processes and machines."""
        parts = [f"{f.name}={getattr(self, f.name)!r}" for f in fields(self) if f.metadata["shapes_code"]]
        return hashlib.sha256("\n".join(parts).encode()).hexdigest()


_FIELDS = MappingProxyType({item.name: item for item in fields(Settings)})
_overrides: ContextVar[Mapping[str, object]] = ContextVar("torchkiln_settings", default=MappingProxyType({}))


def names() -> tuple[str, ...]:
    """Every setting, in the order of the class."""
    return tuple(_FIELDS)


def environment_name(setting: str) -> str:
    """The environment variable that gives ``setting``."""
    return f"KILN_{setting.upper()}"


def describe() -> str:
    """One paragraph per setting: name, default, environment variable and what it does."""
    lines = []
    for name, item in _FIELDS.items():
        lines.append(f"{name} = {item.default!r}   [{environment_name(name)}]")
        lines.append(f"    {item.metadata['doc']}")
    return "\n".join(lines)


def resolve(options: Mapping[str, object] | None = None) -> Settings:
    """The settings in force here: ``options`` over the context manager over the environment over the defaults."""
    values = {**_from_environment(os.environ), **_overrides.get(), **_checked(options or {})}
    return Settings(**values)  # type: ignore[arg-type]  # __post_init__ checks every value


@contextmanager
def settings(**values: object) -> Iterator[Settings]:
    """Use these settings for graphs compiled inside the ``with`` block, in this thread or task only.

    Blocks nest: an inner one adds to and overrides an outer one. Yields what :func:`resolve` gives inside.
    """
    token = _overrides.set(MappingProxyType({**_overrides.get(), **_checked(values)}))
    try:
        yield resolve()
    finally:
        _overrides.reset(token)


def _checked(values: Mapping[str, object]) -> dict[str, object]:
    checked: dict[str, object] = {}
    for name, value in values.items():
        item = _FIELDS.get(name)
        if item is None:
            raise OptionError.unknown("option", name, _FIELDS)
        try:
            checked[name] = item.metadata["kind"].check(value)
        except ValueError:
            raise OptionError.bad_value(name, value, item.metadata["kind"].valid) from None
    return checked


@cache
def _warn_of_unknown(variable: str) -> None:
    """Warn, once in a process, of a variable that sets nothing."""
    known = [environment_name(name) for name in _FIELDS]
    near = get_close_matches(variable, known, n=1)
    hint = f" (did you mean {near[0]}?)" if near else ""
    warn_user(
        f"The environment variable {variable} sets nothing{hint}; the ones that do are: {', '.join(known)}.",
        SettingWarning,
    )


def _from_environment(environment: Mapping[str, str]) -> dict[str, object]:
    values: dict[str, object] = {}
    for variable in environment:
        if variable.startswith("KILN_") and variable.removeprefix("KILN_").lower() not in _FIELDS:
            _warn_of_unknown(variable)
    for name, item in _FIELDS.items():
        variable = environment_name(name)
        text = environment.get(variable)
        if text is None:
            continue
        kind: Kind = item.metadata["kind"]
        try:
            values[name] = kind.check(kind.parse(text))
        except ValueError:
            raise OptionError.bad_value(name, text, kind.valid, where=variable) from None
    return values
