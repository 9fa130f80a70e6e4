"""Settings: every knob of the compiler, with its default, its valid values and what it does.

A setting is given, in this order of priority, by ``torch.compile(..., options={...})``, by the context manager
:func:`settings`, by the environment variable ``KILN_<NAME>``, or by its default. They are read when a graph is
compiled; code that exists already keeps the settings it was compiled with.
"""

from __future__ import annotations

import hashlib
import math
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


def _one_of(*names: str) -> Kind:
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


def _check_text(value: object) -> str:
    if not isinstance(value, str):
        raise ValueError
    return value.strip()


TEXT = Kind("text", _check_text, str)


def _check_path(value: object) -> str | None:
    if value is None or value == "":
        return None
    if not isinstance(value, (str, os.PathLike)):
        raise ValueError
    return os.path.expanduser(os.fspath(value))


PATH = Kind("a path or None", _check_path, str)


def _check_bytes(value: object) -> str:
    if not isinstance(value, str) or bytes_of(value) < 1:
        raise ValueError
    return value.strip()


BYTES = Kind("bytes as text such as '4GiB' (B, KiB, MiB, GiB or TiB)", _check_bytes, str)


def _check_seconds(value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < math.inf:
        raise ValueError
    return float(value)


SECONDS = Kind("a number of seconds above 0", _check_seconds, float)


def _setting(default: Any, kind: Kind, doc: str, *, shapes_code: bool = True) -> Any:
    """``shapes_code`` is False for a setting that cannot change the compiled result, so caches may ignore it."""
    return field(default=default, metadata={"kind": kind, "doc": doc, "shapes_code": shapes_code})


def _flag(default: bool, doc: str, *, shapes_code: bool = True) -> Any:
    return _setting(default, FLAG, doc, shapes_code=shapes_code)


@dataclass(frozen=True)
class Settings:
    """All settings of one compilation. Values are checked on construction; see :func:`describe` for a table."""

    fallback: bool = _flag(
        True,
        "Run a graph eagerly, after one warning, when compiling it fails; when off, raise CompileError.",
        shapes_code=False,
    )
    adaptive: bool = _flag(
        True,
        "Time a graph compiled and eagerly, once, and run it eagerly where that is faster; needs `fallback`.",
        shapes_code=False,
    )
    cuda_graphs: bool = _flag(
        False,
        "Capture the launches of a graph with a card once and replay them; `mode=\"reduce-overhead\"` turns it on.",
        shapes_code=False,
    )
    keep_memory: bool = _flag(
        True,
        "Let the C library keep freed memory, up to twice what a graph's outputs take, for the next step.",
        shapes_code=False,
    )
    threads: int | None = _setting(
        None,
        _integer(1, optional=True),
        "Threads a kernel may use; `None` takes `torch.get_num_threads()` at each run.",
    )
    precision: Literal["default", "eager"] = _setting(
        "default",
        _one_of("default", "eager"),
        "`'default'` keeps chains of half-precision operations in float32; `'eager'` rounds after each one.",
    )
    rng: Literal["fused", "eager"] = _setting(
        "fused",
        _one_of("fused", "eager"),
        "`'fused'` computes random numbers inside kernels from a seed drawn per call; `'eager'` draws eager's numbers.",
    )
    fuse: bool = _flag(True, "Fuse operations into shared kernels; when off, each is its own kernel (to find a bug).")
    vector_bits: int | None = _setting(
        None,
        _integer(128, optional=True, among=(128, 256, 512)),
        "Width of the vector registers to compile for; `None` takes the widest of this machine.",
    )
    # 131072 was tried: rotary embedding of 98,304 elements fell from 1.54 to 1.28 x inductor, nothing gained.
    parallel_threshold: int = _setting(16384, _integer(1), "Pointwise operations that are worth one more thread.")
    inline_limit: int = _setting(
        64,
        _integer(0),
        "Largest expression, in nodes, that is inlined into its consumer; larger ones keep their loop until fusion.",
    )
    group_layer_norms: bool = _flag(
        False, "Compute parallel layer norms of one shape as one; slower on the CPUs measured."
    )
    pad_matmuls: Literal["off", "gpu", "all"] = _setting(
        "gpu",
        _one_of("off", "gpu", "all"),
        "Where to pad badly aligned matmuls if a measurement says that it pays: `'off'`, `'gpu'`, or `'all'` for the"
        " CPU too. Times are kept in the cache.",
    )
    memory_budget: float | str = _setting(
        1.0,
        MEMORY_BUDGET,
        "How much forward may save for backward: a share, from 1 (fastest) to 0 (as little as possible), or bytes such"
        " as `'2GiB'` that the activations of forward and backward together must stay under.",
    )
    budget_solver: Literal["exact", "dynamic", "greedy"] = _setting(
        "exact",
        _one_of("exact", "dynamic", "greedy"),
        "How values are chosen under a memory budget: by a mixed-integer program, dynamic programming or greedily.",
    )
    recomputation_costs: Literal["estimated", "profiled"] = _setting(
        "estimated",
        _one_of("estimated", "profiled"),
        "Where run times of recomputed operators come from: FLOPs and bytes at this machine's rates, or running each"
        " operator once while compiling.",
    )
    aggressive_recomputation: bool = _flag(
        False,
        "Recompute all but matmuls and values used far apart: turns off `save_reductions`,"
        " `save_unlisted`, `save_long_chains` and `save_materialized`.",
    )
    save_matmuls: bool = _flag(True, "Do not recompute matmuls, convolutions and attention in backward.")
    save_reductions: bool = _flag(
        True, "Do not recompute sums, means, softmax, normalizations and other reductions in backward."
    )
    save_unlisted: bool = _flag(
        True,
        "Do not recompute operators in backward that are not known to be cheap: only pointwise ones and data movement"
        " are.",
    )
    save_random: bool = _flag(
        False,
        "Save random numbers rather than recompute them from their seed in backward (those of `rng='eager'` are always"
        " saved).",
    )
    save_far_used: bool = _flag(
        True, "Do not recompute values in backward that forward uses far apart, such as residual connections."
    )
    save_long_chains: bool = _flag(
        True, "Recompute at most twenty operators of a long chain of pointwise ones in backward."
    )
    save_materialized: bool = _flag(
        True, "Do not recompute values in backward that a library call there needs in memory."
    )
    save_views: bool = _flag(
        False, "Save views themselves for backward instead of recomputing them from their base, which is free."
    )
    prepare_weights: bool = _flag(
        True,
        "In inference, compute what depends on parameters and buffers alone once, and again when one of them changes.",
    )
    freezing: bool = _flag(
        False, "Compile for inference alone: refuse calls that ask for gradients (see `torchkiln.freeze`)."
    )
    prepared_limit: str = _setting(
        "2GiB",
        BYTES,
        "In inference, how much memory packed copies of the weights of linear layers may take: the weights stay beside"
        " them, unless `freezing` drops them, which knows no limit.",
    )
    passes_skip: tuple[str | int, ...] = _setting(
        (),
        PASS_SELECTION,
        "Graph passes not to run: by name (`'no_ops'`), by stage and name (`'joint/no_ops'`), or by number.",
    )
    passes_limit: int | None = _setting(
        None,
        _integer(0, optional=True),
        "Run only graph passes numbered up to this one; bisecting it finds the pass that breaks a model.",
    )
    compilations_limit: int | None = _setting(
        None,
        _integer(0, optional=True),
        "Compile only captured graphs numbered up to this one, in a process; others run eagerly.",
    )
    rewrites_limit: int | None = _setting(
        None,
        _integer(0, optional=True),
        "Let graph passes rewrite only places numbered up to this one.",
    )
    fusions_limit: int | None = _setting(
        None,
        _integer(0, optional=True),
        "Inline and fuse loops only up to this number of times.",
    )
    calls_limit: int | None = _setting(
        None,
        _integer(0, optional=True),
        "Compile only operators numbered up to this one; torch is asked, through Python, for what the others compute.",
    )
    profile: bool = _flag(
        False, "Time every kernel and library call, for `kiln bench --profile`; costs about 50 ns for each."
    )
    record_passes: bool = _flag(
        False,
        "Keep a record of every pass in `stats().passes`, with the text of the graph before and after it.",
        shapes_code=False,
    )
    checks: bool = _flag(
        False,
        "Lint the graph and propagate fake tensors after every pass that changed it; verify the program and the plan.",
        shapes_code=False,
    )
    check_numerics: bool = _flag(
        False,
        "Run the graph before and after every pass that changed it, on the example inputs, and compare the results.",
        shapes_code=False,
    )
    reproductions: str | None = _setting(
        None,
        PATH,
        "Folder where a failed compilation leaves a file that reproduces it; `None` takes `torchkiln/reproductions` in"
        " the user's cache folder where `cache` is on, and a temporary folder otherwise; with `/dev/null` there is no"
        " file.",
        shapes_code=False,
    )
    cache: bool = _flag(True, "Keep compiled graphs and measurements from one process to the next.", shapes_code=False)
    cache_dir: str | None = _setting(
        None,
        PATH,
        "Folder of the cache; `None` takes `torchkiln/compiled` in the user's cache folder (XDG).",
        shapes_code=False,
    )
    cache_limit: str = _setting(
        "4GiB",
        BYTES,
        "Size up to which the folder grows; beyond it, what was not used for longest is removed.",
        shapes_code=False,
    )
    cache_remote: str = _setting(
        "",
        TEXT,
        "A second cache to share between machines: an fsspec URL (`file://`, `s3://`, ...) or `redis://`; empty for"
        " none.",
        shapes_code=False,
    )
    cache_secret_file: str | None = _setting(
        None,
        PATH,
        "File whose content signs entries (HMAC-SHA256); with it, entries that are not signed so are refused.",
        shapes_code=False,
    )
    cache_timeout: float = _setting(
        2.0,
        SECONDS,
        "Seconds that one lookup in the remote cache may take; then the graph is compiled.",
        shapes_code=False,
    )

    def __post_init__(self) -> None:
        for item in fields(self):
            object.__setattr__(self, item.name, _checked(item.name, getattr(self, item.name)))

    def fingerprint(self) -> str:
        """Hex digest of every setting that can change the compiled result; equal across processes and machines."""
        parts = [f"{name}={value}" for name, value in self.code_settings()]
        return hashlib.sha256("\n".join(parts).encode()).hexdigest()

    def code_settings(self) -> list[tuple[str, str]]:
        """Name and value of every setting that can change the compiled result."""
        return [(f.name, repr(getattr(self, f.name))) for f in fields(self) if f.metadata["shapes_code"]]


_FIELDS = MappingProxyType({item.name: item for item in fields(Settings)})
_overrides: ContextVar[Mapping[str, object]] = ContextVar("torchkiln_settings", default=MappingProxyType({}))


# Of the process, and no settings of a compilation (see docs/debug.md).
OTHER_VARIABLES = ("KILN_TRACE", "KILN_TRACE_VALUES")


def environment_name(setting: str) -> str:
    """The environment variable that gives ``setting``."""
    return f"KILN_{setting.upper()}"


def describe() -> str:
    """All settings as a table in Markdown: name, default and what it does (docs/settings.md holds it)."""
    rows = [f"| `{name}` | `{item.default!r}` | {item.metadata['doc']} |" for name, item in _FIELDS.items()]
    return "\n".join(("| setting | default | what it does |", "|---|---|---|", *rows))


def resolve(options: Mapping[str, object] | None = None) -> Settings:
    """The settings in force here: ``options`` over the context manager over the environment over the defaults."""
    values = {**_from_environment(os.environ), **_overrides.get(), **_all_checked(options or {})}
    return Settings(**values)  # type: ignore[arg-type]  # __post_init__ checks every value


@contextmanager
def settings(**values: object) -> Iterator[Settings]:
    """Use these settings for graphs compiled inside the ``with`` block, in this thread or task only.

    Blocks nest: an inner one adds to and overrides an outer one. Yields what :func:`resolve` gives inside.
    """
    token = _overrides.set(MappingProxyType({**_overrides.get(), **_all_checked(values)}))
    try:
        yield resolve()
    finally:
        _overrides.reset(token)


def _all_checked(values: Mapping[str, object]) -> dict[str, object]:
    for name in values:
        if name not in _FIELDS:
            raise OptionError.unknown("option", name, _FIELDS)
    return {name: _checked(name, value) for name, value in values.items()}


def _checked(name: str, value: object, variable: str = "") -> object:
    """The value to keep for a setting; ``value`` is text where an environment variable gave it."""
    kind: Kind = _FIELDS[name].metadata["kind"]
    try:
        return kind.check(kind.parse(str(value)) if variable else value)
    except ValueError:
        raise OptionError.bad_value(name, value, kind.valid, where=variable) from None


@cache
def _warn_of_unknown(variable: str) -> None:
    """Warn, once in a process, of a variable that sets nothing."""
    known = [*(environment_name(name) for name in _FIELDS), *OTHER_VARIABLES]
    near = get_close_matches(variable, known, n=1)
    hint = f" (did you mean {near[0]}?)" if near else ""
    warn_user(
        f"The environment variable {variable} sets nothing{hint}; the ones that do are: {', '.join(known)}.",
        SettingWarning,
    )


def _from_environment(environment: Mapping[str, str]) -> dict[str, object]:
    variables = {environment_name(name): name for name in _FIELDS}
    for variable in environment:
        if variable.startswith("KILN_") and variable not in (*variables, *OTHER_VARIABLES):
            _warn_of_unknown(variable)
    return {name: _checked(name, environment[var], var) for var, name in variables.items() if var in environment}
