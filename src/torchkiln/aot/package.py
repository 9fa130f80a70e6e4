"""A package in the process that runs it: loaded without a compiler, called as the model was."""

from __future__ import annotations

import json
import mmap
import os
import platform
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.utils import _pytree as pytree

from torchkiln import config
from torchkiln.aot.archive import Archive
from torchkiln.aot.arguments import ArgumentChecker
from torchkiln.aot.safetensors import StoredTensor, read_header, tensor_at
from torchkiln.aot.signature import ComputedResult, ConstantInput, Signature, Weight, signature_from_json
from torchkiln.artifact import CompiledFunction, SupportCode, decode_function, decode_support
from torchkiln.errors import ArgumentError, NotPreparedError, PackageError, shown
from torchkiln.runtime.direct_calls import inference_call, training_call
from torchkiln.runtime.executable import load as load_graph
from torchkiln.runtime.freed_memory import freed_memory
from torchkiln.runtime.plain_tensors import describe, is_plain
from torchkiln.runtime.prepared_weights import PreparedGraph
from torchkiln.runtime.support import provide
from torchkiln.target import read_target, runs_here

Function = Callable[[list[Any]], Any]


def load(path: str | os.PathLike[str], *, verify: bool = False) -> Package:
    """A package that :func:`torchkiln.aot_compile` wrote, ready to be called.

    Code and metadata are compared with their checksums before any of it is used, the weights only with ``verify``,
    which reads all of them. A package is native code: load those that you would run as a program.
    """
    with Archive(path) as archive:
        if verify:
            archive.verify()
        with archive.errors():
            contents = read_contents(archive)
            provide(contents.support)
            return Package(contents)


@dataclass(frozen=True, eq=False)
class Contents:
    """What a package holds for the processor of this process: data, of which nothing has run."""

    signature: Signature
    target: str
    function: CompiledFunction
    support: SupportCode
    weights: list[torch.Tensor]


def read_contents(archive: Archive) -> Contents:
    """Decode what the best target of a package needs; the weights are mapped."""
    signature = signature_from_json(archive.metadata["signature"])
    target = _best_target(archive.metadata["targets"], archive)
    function = decode_function(archive.read(f"{target}/function"))
    support = decode_support(archive.read(f"{target}/support"))
    _require_one_call(signature, function)
    return Contents(signature, target, function, support, _map_weights(archive, signature))


def _require_one_call(signature: Signature, function: CompiledFunction) -> None:
    inputs = len(signature.weights) + sum(not isinstance(given, ConstantInput) for given in signature.inputs)
    results = sum(isinstance(result, ComputedResult) for result in signature.results)
    if (inputs, results) != (function.convention.inputs, len(function.convention.results)):
        raise ValueError("the signature is not that of the code")


def _best_target(targets: Mapping[str, Any], archive: Archive) -> str:
    """The name of the one with the widest registers among those whose code runs here; what is first among equals."""
    machines = {name: read_target(json.dumps(target)) for name, target in targets.items()}
    usable = [name for name, machine in machines.items() if runs_here(machine)]
    if not usable:
        raise PackageError(
            f"The package {archive.path!r} has code for {', '.join(machines)}, none of which this processor"
            f" ({platform.machine()}) can run; compile it with a target that it can."
        )
    return max(usable, key=lambda name: machines[name].vector_bits)


class Package:
    """A compiled model: call it as the model. Safe to call from many threads, but for models that write to buffers.

    ``target`` is the one of the package's targets that this process runs.
    """

    def __init__(self, contents: Contents) -> None:
        self.signature = signature = contents.signature
        self.target = contents.target
        self._weights = contents.weights
        function = contents.function
        self._by_name = {name: k for k, weight in enumerate(signature.weights) for name in weight.names}
        self._unread = frozenset(signature.unread)
        named = enumerate(signature.weights)
        self._written = [(k, f"weight {weight.names[0]}") for k, weight in named if weight.mutated]
        self._arguments = ArgumentChecker(signature, trains=function.backward is not None)
        self._returned = len(function.convention.results)
        self._prepared, self._infer, self._train = _load_function(function)
        self._is_flat = all(isinstance(result, ComputedResult) for result in signature.results)

    @property
    def trains(self) -> bool:
        """Whether the package has a backward."""
        return self._train is not None

    @property
    def weights(self) -> Mapping[str, torch.Tensor]:
        """The weights under their first names: the tensors themselves, which the next call uses."""
        return {weight.names[0]: value for weight, value in zip(self.signature.weights, self._weights, strict=True)}

    def named_parameters(self) -> Iterator[tuple[str, torch.Tensor]]:
        """The weights that a package for training computes gradients of."""
        for weight, value in zip(self.signature.weights, self._weights, strict=True):
            if weight.trained:
                yield weight.names[0], value

    def parameters(self) -> Iterator[torch.Tensor]:
        """As :meth:`named_parameters`, for an optimizer."""
        return (value for _, value in self.named_parameters())

    def load_weights(self, weights: Mapping[str, torch.Tensor] | str | os.PathLike[str]) -> None:
        """Replace weights by name, from a mapping such as a ``state_dict`` or a safetensors file, which is mapped.

        Those not named stay, and those of the model that its code does not read are left out. Names, dtypes and shapes
        are checked before any is replaced, and so is whether both names of a tied weight have the same values, and
        whether the code can compute with them: not where a constant is folded into a weight that it makes overflow.
        Tensors of a mapping are used as they are where their strides are right and a call does not write to them,
        and copied otherwise.
        """
        if not isinstance(weights, (Mapping, str, os.PathLike)):
            raise ArgumentError(
                f"The weights must be a mapping of names to tensors or the path of a file, not {shown(weights)}."
            )
        given = weights if isinstance(weights, Mapping) else _tensors_of_file(weights)
        read = {name: value for name, value in given.items() if name not in self._unread}
        replaced = {self._position(name): self._replacement(name, value) for name, value in read.items()}
        self._reject_untied(read)
        if self._prepared is not None:
            self._prepare([replaced.get(position, value) for position, value in enumerate(self._weights)])
        for position, value in replaced.items():
            if self.signature.weights[position].trained:
                with torch.no_grad():
                    self._weights[position].copy_(value)  # an optimizer may hold the parameter
            else:
                self._weights[position] = value

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        given = self._arguments.flat(args, kwargs, [(name, self._weights[k]) for k, name in self._written])
        inputs = [*self._weights, *given]
        if self._train is not None and torch.is_grad_enabled():
            results = self._train(inputs)
        else:
            results = self._infer(inputs)
        return self._in_structure(results)

    def _in_structure(self, results: Sequence[Any]) -> Any:
        leaves = (
            list(results[: self._returned])
            if self._is_flat
            else [
                results[leaf.number] if isinstance(leaf, ComputedResult) else leaf.value
                for leaf in self.signature.results
            ]
        )
        return pytree.tree_unflatten(leaves, self.signature.returned)

    def _prepare(self, weights: list[torch.Tensor]) -> None:
        """What the next call would do with other weights; nothing is replaced by those that the code cannot take."""
        assert self._prepared is not None
        try:
            self._prepared.prepare(weights)
        except NotPreparedError as error:
            raise ArgumentError(
                f"The package cannot take these weights: {error.what}. Load those that belong together in one call,"
                " or compile a package with these weights or with prepare_weights=False."
            ) from error

    def _position(self, name: str) -> int:
        if name not in self._by_name:
            known = ", ".join(sorted(self._by_name))
            raise ArgumentError(f"The package has no weight {name!r}; it has: {known}.")
        return self._by_name[name]

    def _reject_untied(self, given: Mapping[str, torch.Tensor]) -> None:
        """Weights of a model whose tied weights are tied no more: the package has one for both names."""
        for weight in self.signature.weights:
            first, *others = [name for name in weight.names if name in given] or weight.names[:1]
            for other in others:
                if not _is_equal(given[first], given[other]):
                    raise ArgumentError(
                        f"The weights {first!r} and {other!r} are one in the package, and are given with different"
                        " values; give one of them, or compile a package of a model that has two."
                    )

    def _replacement(self, name: str, value: torch.Tensor) -> torch.Tensor:
        weight = self.signature.weights[self._position(name)]
        if not isinstance(value, torch.Tensor):
            raise ArgumentError(f"The weight {name!r} must be a tensor, not {shown(value)}.")
        if (value.dtype, tuple(value.shape), value.device.type) != (weight.dtype, weight.shape, "cpu"):
            raise ArgumentError(
                f"The weight {name!r} is {weight.dtype} of {list(weight.shape)} on the CPU, not {value.dtype} of"
                f" {list(value.shape)} on {value.device}."
            )
        value = value.detach().resolve_conj().resolve_neg()
        if not is_plain(value):
            raise ArgumentError(f"The weight {name!r} must be a strided tensor with memory, not {describe(value)}.")
        return value.clone() if weight.mutated else with_strides(value, weight.strides)


def _is_equal(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two weights of the same dtype and shape have the same elements; a NaN is one like another."""
    return one is other or bool(torch.eq(one, other).logical_or(one.ne(one) & other.ne(other)).all())


def _load_function(function: CompiledFunction) -> tuple[PreparedGraph | None, Function, Function | None]:
    """What prepares weights, and functions of one list of inputs, without gradients and with them."""
    convention = function.convention
    if convention.wrapped:
        raise PackageError("The compiled function of this package cannot be called by itself; compile it again.")
    function.reject_incomplete()
    summary = function.forward.summary
    if summary is not None and config.resolve().keep_memory:
        freed_memory().keep(summary.allocated_bytes)
    forward = load_graph(function.forward)
    if function.weights is not None:
        prepared = PreparedGraph(load_graph(function.weights), forward, convention.weights)
        return prepared, inference_call(convention, prepared), None
    infer = inference_call(convention, forward)
    if function.backward is None:
        return None, infer, None
    return None, infer, training_call(convention, forward, load_graph(function.backward))


def _map_weights(archive: Archive, signature: Signature) -> list[torch.Tensor]:
    mapped, begin, length = archive.map_weights()
    content = memoryview(mapped)[begin : begin + length]
    header = read_header(content)
    found = []
    for weight in signature.weights:
        stored = header[weight.names[0]]
        _require_same(weight, stored)
        tensor = with_strides(tensor_at(content, stored), weight.strides)
        found.append(tensor.requires_grad_() if weight.trained else tensor)
    return found


def _require_same(weight: Weight, stored: StoredTensor) -> None:
    if (weight.dtype, weight.shape) != (stored.dtype, stored.shape):
        raise ValueError(f"the weight {weight.names[0]} is not stored as the signature says")


def with_strides(value: torch.Tensor, strides: tuple[int, ...]) -> torch.Tensor:
    """The tensor itself, or a copy with the strides that the code was compiled for."""
    shape = value.shape
    if value.stride() == strides or value.numel() == 0:
        return value
    for dim, stride in enumerate(strides):
        if stride == 0:
            value = value.narrow(dim, 0, 1)  # expanded: one element is there for all
    return torch.empty_strided(value.shape, strides, dtype=value.dtype).copy_(value).expand(shape)


def _tensors_of_file(path: str | os.PathLike[str]) -> dict[str, torch.Tensor]:
    try:
        with Path(path).open("rb") as file:
            mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
        content = memoryview(mapped)
        return {name: tensor_at(content, stored) for name, stored in read_header(content).items()}
    except OSError as error:
        raise PackageError(f"The weights in {os.fspath(path)!r} cannot be read: {error.strerror}.") from error
    except Exception as error:
        raise PackageError(
            f"The file {os.fspath(path)!r} is no safetensors file ({type(error).__name__}: {error})."
        ) from error
