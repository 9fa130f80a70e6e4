"""Compiled operators for eager calls: one package for each combination of input types, sizes and values.

    cache folder/eager/NAMESPACE/DEVICE/OPERATOR/DIGEST.json    inputs, modes of torch, checksum of the package
    cache folder/eager/NAMESPACE/DEVICE/OPERATOR/DIGEST.kiln    the package

An entry that is damaged, or of another torch, is one that is not there.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import stat
import threading
import warnings
import weakref
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Union

import torch

from torchkiln.aot.package import Package, load
from torchkiln.errors import ArgumentError, KilnError, NotPlainError, OptionError, PackageError, shown
from torchkiln.user_files import cache_folder, write_whole

_CPU = "cpu"
_FORMAT = 2

# An input by which entries are told apart: of a tensor its dtype, sizes and strides, of others type and value.
Input = tuple[Union[str, int, float, bool, tuple[int, ...], None], ...]
InputKey = tuple[Input, ...]
# What an operator depends on beside its inputs: the default dtype, and what the user allows of its kernels.
Modes = tuple[str, ...]
EntryKey = tuple[InputKey, Modes]


@dataclass(frozen=True)
class CompiledOperator:
    """A stored entry: what its inputs are, in the order of the operator's schema, in which modes, and its package."""

    inputs: InputKey
    modes: Modes
    path: Path
    sha256: str

    @cached_property
    def package(self) -> Package | None:
        """The package, loaded when it is first asked for; None where it cannot be used here."""
        try:
            if hashlib.sha256(self.path.read_bytes()).hexdigest() != self.sha256:
                return None
            return load(self.path)
        except (OSError, KilnError):
            return None


def compile_op_with_persistent_cache(
    ns: str,
    op: str,
    device_type: str,
    dynamic: bool,
    f: Callable[..., Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any] | None,
    *,
    options: Mapping[str, object] | None = None,
) -> CompiledOperator:
    """Compile ``f``, which computes the operator ``ns::op``, for these inputs, and store it for other processes.

    ``op`` has an overload where that is not the default one ("add.Tensor"). Sizes are static: the entry serves calls
    with tensors of the same dtype, sizes and strides, and with equal other arguments, while the default dtype and the
    modes of torch are those of now. ``options`` are settings, as those of ``torch.compile``.
    """
    from torchkiln import config  # the compiler is imported where something is compiled
    from torchkiln.aot.compilation import aot_compile

    if dynamic:
        raise OptionError("Compiled operators have static sizes: dynamic must be False; compile one for each size.")
    overload, folder = _overload(ns, op), _folder(ns, op, device_type)
    if folder is None:
        raise PackageError("Compiled operators are stored in the user's cache folder, and there is none; set HOME.")
    values = _in_schema_order(overload, args, kwargs or {})
    inputs = tuple(_input_key(name, value) for name, value in values.items())
    modes = _modes()
    digest = hashlib.sha256(json.dumps((inputs, modes)).encode()).hexdigest()[:32]
    _make_private(folder)
    path = folder / f"{digest}.kiln"
    tensors = [value for value in values.values() if isinstance(value, torch.Tensor)]
    with _without_compiled_operators():
        aot_compile(_Call(f, args, kwargs or {}), tensors, settings=config.resolve(options), path=path)
    sha256 = hashlib.sha256(path.read_bytes()).hexdigest()
    described = [{"name": name, **_described(value)} for name, value in values.items()]
    content = {"format": _FORMAT, "operator": f"{ns}::{op}", "inputs": described, "modes": modes, "sha256": sha256}
    write_whole(path.with_suffix(".json"), json.dumps(content, indent=1).encode())
    entry = CompiledOperator(inputs, modes, path, sha256)
    for table in list(_tables.get((ns, op), ())):
        table.entries[inputs, modes] = entry
    return entry


def load_eager_op_cache(ns: str, op: str, device_type: str) -> list[CompiledOperator]:
    """What is stored of the operator ``ns::op``. Packages are loaded when they are first called."""
    folder = _folder(ns, op, device_type)
    if folder is None or not _is_private(folder):
        return []
    found = (_read_entry(path, f"{ns}::{op}") for path in sorted(folder.glob("*.json")))
    return [entry for entry in found if entry is not None]


class RegisteredOperators:
    """Operators that are overridden for eager calls until :meth:`remove`."""

    def __init__(self, library: torch.library.Library) -> None:
        self._library = library
        self._tables: list[tuple[tuple[str, str], _Table]] = []

    def remove(self) -> None:
        """Give the operators back to torch."""
        for name, table in self._tables:
            _tables[name].discard(table)
        self._library._destroy()

    def _add(self, ns: str, op: str) -> None:
        overload = _overload(ns, op)
        entries = {(entry.inputs, entry.modes): entry for entry in load_eager_op_cache(ns, op, _CPU)}
        table = _Table(overload, entries)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch warns that a kernel is overridden, which is what was asked for
            self._library.impl(op, table, "CPU", with_keyset=True, allow_override=True)
        self._tables.append(((ns, op), table))
        _tables.setdefault((ns, op), weakref.WeakSet()).add(table)


def register_compiled_ops(ns: str, ops: Collection[str]) -> RegisteredOperators:
    """Override these operators for eager calls on the CPU: stored entries serve the calls that they fit.

    Other calls fall through to torch's kernel. Entries that this process compiles later are served too.
    """
    if isinstance(ops, str):
        raise OptionError(f"The operators must be a set, as in {{{ops!r}}}, not text.")
    registered = RegisteredOperators(torch.library.Library(ns, "IMPL"))
    for op in sorted(ops):
        registered._add(ns, op)
    return registered


# The tables of registered operators, to which entries are added that are compiled later.
_tables: dict[tuple[str, str], weakref.WeakSet[_Table]] = {}
_state = threading.local()


@contextmanager
def _without_compiled_operators() -> Iterator[None]:
    """Operators that are called inside, in this thread, are torch's: a compiled one may call itself."""
    outer = getattr(_state, "off", False)
    _state.off = True
    try:
        yield
    finally:
        _state.off = outer


class _Table:
    """What runs in place of torch's kernel for one operator."""

    def __init__(self, overload: torch._ops.OpOverload, entries: dict[EntryKey, CompiledOperator]) -> None:
        self._overload = overload
        self._kernel = torch.library.get_kernel(overload, "CPU")
        self.entries = entries
        self.__name__ = str(overload)

    def __call__(self, keys: torch.DispatchKeySet, *args: Any, **kwargs: Any) -> Any:
        entry = None if getattr(_state, "off", False) else self._fitting(args, kwargs)
        package = entry.package if entry is not None else None
        if package is None:
            return self._call_torch(keys, args, kwargs)
        values = _in_schema_order(self._overload, args, kwargs).values()
        try:
            with _without_compiled_operators():
                return package(*(value for value in values if isinstance(value, torch.Tensor)))
        except (NotPlainError, ArgumentError):  # nothing has run: only torch serves such tensors, or those that overlap
            return self._call_torch(keys, args, kwargs)

    def _fitting(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> CompiledOperator | None:
        try:
            values = _in_schema_order(self._overload, args, kwargs)
            inputs = tuple(_input_key(name, value) for name, value in values.items())
            return self.entries.get((inputs, _modes()))
        except OptionError:  # a kind of input that entries do not have
            return None

    def _call_torch(self, keys: torch.DispatchKeySet, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        values = _in_schema_order(self._overload, args, kwargs)
        given = _numbers_as_tensors(self._overload, values)
        keywords = {a.name: given.pop(a.name) for a in self._overload._schema.arguments if a.kwarg_only}
        return self._kernel.call_boxed(keys, *given.values(), **keywords)


class _Call(torch.nn.Module):
    """``f`` as a function of the tensors among its arguments."""

    def __init__(self, f: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        super().__init__()
        self._f, self._args, self._kwargs = f, args, kwargs

    def forward(self, *tensors: torch.Tensor) -> Any:
        given = iter(tensors)
        args = [next(given) if isinstance(value, torch.Tensor) else value for value in self._args]
        kwargs = {k: next(given) if isinstance(v, torch.Tensor) else v for k, v in self._kwargs.items()}
        return self._f(*args, **kwargs)


def _overload(ns: str, op: str) -> torch._ops.OpOverload:
    name, _, overload = op.partition(".")
    packet = getattr(getattr(torch.ops, ns), name, None)
    # Some have other overloads for TorchScript alone, as aten::add for lists.
    known = [found for found in packet.overloads() if _has_kernel(getattr(packet, found))] if packet is not None else []
    if (overload or "default") in known:
        found: torch._ops.OpOverload = getattr(packet, overload or "default")
        return found
    names = ", ".join(f"{name}.{found}" for found in known) or "none of this name"
    raise OptionError(f"There is no operator {ns}::{op}; name it as torch.ops does, with its overload: {names}.")


def _has_kernel(overload: torch._ops.OpOverload) -> bool:
    return torch._C._dispatch_has_kernel(overload.name())


def _in_schema_order(
    overload: torch._ops.OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> dict[str, Any]:
    """All arguments by name, with the defaults of those not given."""
    arguments = overload._schema.arguments
    known = {argument.name for argument in arguments}
    if len(args) > len(arguments) or not kwargs.keys() <= known:
        raise OptionError(f"The operator {overload} takes {', '.join(known)}; give no other arguments.")
    given = dict(zip((argument.name for argument in arguments), args, strict=False)) | dict(kwargs)
    missing = [a.name for a in arguments if a.name not in given and not a.has_default_value()]
    if missing:
        raise OptionError(f"The operator {overload} needs the argument {missing[0]!r}; give it.")
    return {a.name: given.get(a.name, a.default_value) for a in arguments}


def _input_key(name: str, value: Any) -> Input:
    if isinstance(value, torch.Tensor):
        if value.device.type != _CPU or value.layout is not torch.strided:
            raise OptionError(f"The input {name!r} is {value.layout} on {value.device}; give a strided CPU tensor.")
        return ("tensor", str(value.dtype), tuple(value.shape), tuple(value.stride()))
    if value is None or type(value) in (bool, int, str):
        return (type(value).__name__, value)
    if type(value) is float:
        return ("float", value.hex())
    if isinstance(value, (torch.dtype, torch.device, torch.layout)):
        return (type(value).__name__, str(value))
    raise OptionError(
        f"The input {name!r} is {shown(value)}; compiled operators take tensors, bool, int, float, str, dtype, device,"
        " layout and None."
    )


def _modes() -> Modes:
    """Those of this thread now."""
    return (
        str(torch.get_default_dtype()),
        f"deterministic {torch.are_deterministic_algorithms_enabled()}",
        f"float32 matmul {torch.backends.mkldnn.matmul.fp32_precision}",  # type: ignore[attr-defined]
        f"oneDNN {torch.backends.mkldnn.enabled}",
    )


def _described(value: Any) -> dict[str, Any]:
    """An input as the metadata file has it."""
    kind, *content = _input_key("", value)
    if kind == "tensor":
        dtype, sizes, strides = content
        return {"kind": kind, "dtype": dtype, "sizes": sizes, "strides": strides, "device": _CPU}
    return {"kind": kind, "value": content[0]}


def _key_described(tree: Any) -> Input:
    """The key of an input in a metadata file; ValueError, TypeError or LookupError where it is none."""
    if tree["kind"] != "tensor":
        return (str(tree["kind"]), tree["value"])
    return ("tensor", str(tree["dtype"]), tuple(map(int, tree["sizes"])), tuple(map(int, tree["strides"])))


def _read_entry(path: Path, operator: str) -> CompiledOperator | None:
    try:
        content = json.loads(path.read_bytes())
        if content["format"] != _FORMAT or content["operator"] != operator:
            return None
        inputs = tuple(_key_described(described) for described in content["inputs"])
        modes = tuple(map(str, content["modes"]))
        hash(inputs)  # a damaged file may hold lists where values belong
        return CompiledOperator(inputs, modes, path.with_suffix(".kiln"), str(content["sha256"]))
    except (OSError, ValueError, TypeError, LookupError, AttributeError, RecursionError):
        return None


def _numbers_as_tensors(overload: torch._ops.OpOverload, values: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments with tensors in place of the numbers that torch hands to Python for the tensors it made of them.

    They take part in type promotion as numbers do: they change no dtype where there is a tensor of their kind.
    """
    tensors = [value for value in values.values() if isinstance(value, torch.Tensor)]
    number_slots = {
        argument.name
        for argument in overload._schema.arguments
        if argument.type.kind() == "TensorType" and isinstance(values[argument.name], (bool, int, float, complex))
    }
    return {name: _number_tensor(value, tensors) if name in number_slots else value for name, value in values.items()}


def _number_tensor(value: complex, tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    if any(tensor.dim() for tensor in tensors) or not tensors:
        return torch.tensor(value)
    return torch.tensor(value, dtype=torch.result_type(tensors[0], value))


def _folder(ns: str, op: str, device_type: str) -> Path | None:
    """Where entries of an operator are; None for a user without a cache folder."""
    if device_type != _CPU:
        raise OptionError(f"Operators are compiled for the device 'cpu', not for {shown(device_type)}.")
    if not all(re.fullmatch(r"[A-Za-z_][\w.]*", name) for name in (ns, op)):
        named = shown(f"{ns}::{op}")
        raise OptionError(f"The operator {named} has no name of torch's; give one such as 'aten' and 'add.Tensor'.")
    base = cache_folder()
    return None if base is None else base / "eager" / ns / device_type / op


def _make_private(folder: Path) -> None:
    """Make a folder of the user alone; entries are code, which nobody else may put there."""
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise PackageError(
            f"The folder {str(folder)!r} cannot be made ({error.strerror}); set XDG_CACHE_HOME to one of yours."
        ) from error
    if not _is_private(folder):
        raise PackageError(
            f"The folder {str(folder)!r} belongs to another user or is writable by others; remove it or chmod 700 it."
        )


def _is_private(folder: Path) -> bool:
    try:
        found = os.stat(folder)
    except OSError:
        return False
    return stat.S_ISDIR(found.st_mode) and found.st_uid == os.getuid() and not found.st_mode & 0o022
