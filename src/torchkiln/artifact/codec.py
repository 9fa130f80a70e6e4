"""Artifacts as bytes and back: a header of JSON text, then the code and the memory of constants as they are.

    "KILN" | version, 4 bytes | length of the header, 8 bytes | header | blobs

The header holds the structure and the length of every blob. Numbers before it are little-endian. Decoding makes values
of the types listed here and of no others; nothing in the bytes is evaluated. What does not follow the format raises
:class:`ArtifactError`.
"""

from __future__ import annotations

import dataclasses
import json
import struct
from collections.abc import Sequence
from typing import Any, TypeVar

import torch
from torch.utils import _pytree as pytree

from torchkiln.artifact.artifact import Artifact, CardInfo, EntryInfo, GraphSummary, OutputSource, TimedStep
from torchkiln.artifact.calls import Body, HigherOrderCall, NumberArgument, OperatorCall, TensorArgument
from torchkiln.artifact.convention import CallingConvention, CompiledFunction, Result, StoredFunction, Tangent
from torchkiln.artifact.precompiled import PrecompiledFunction
from torchkiln.artifact.support import SupportCode, SupportModule
from torchkiln.artifact.texts import Description
from torchkiln.errors import ArtifactError
from torchkiln.native.tensor_classes import is_no_subclass

VERSION = 7
_MAGIC = b"KILN"
_PREFIX = struct.Struct("<4sIQ")

_TYPES = {
    kind.__name__: kind
    for kind in (
        *(Artifact, CardInfo, EntryInfo, OutputSource, TimedStep, Description, GraphSummary),
        *(OperatorCall, HigherOrderCall, Body, TensorArgument, NumberArgument),
        *(StoredFunction, CompiledFunction, CallingConvention, Result, Tangent),
        *(SupportCode, SupportModule, PrecompiledFunction),
    )
}
_DTYPES = {str(value).removeprefix("torch."): value for value in vars(torch).values() if type(value) is torch.dtype}
_LAYOUTS = {str(value): value for value in vars(torch).values() if type(value) is torch.layout}
_FORMATS = {str(value): value for value in vars(torch).values() if type(value) is torch.memory_format}


_Stored = TypeVar("_Stored", Artifact, CompiledFunction, StoredFunction, SupportCode, PrecompiledFunction)


def encode(artifact: Artifact | CompiledFunction | StoredFunction | SupportCode | PrecompiledFunction) -> bytes:
    """The artifact as bytes; :class:`ArtifactError` where it holds something that is no plain data."""
    writer = _Writer()
    tree = writer.tree(artifact)
    content = {"blobs": [len(blob) for blob in writer.blobs], "bodies": writer.bodies, "artifact": tree}
    header = json.dumps(content, separators=(",", ":")).encode()
    return b"".join((_PREFIX.pack(_MAGIC, VERSION, len(header)), header, *writer.blobs))


def decode(data: bytes) -> Artifact:
    """The artifact that :func:`encode` made these bytes of."""
    return decode_as(data, Artifact)


def decode_function(data: bytes) -> CompiledFunction:
    """The compiled captured graph that :func:`encode` made these bytes of."""
    return decode_as(data, CompiledFunction)


def decode_support(data: bytes) -> SupportCode:
    """The support functions that :func:`encode` made these bytes of."""
    return decode_as(data, SupportCode)


def decode_as(data: bytes, kind: type[_Stored]) -> _Stored:
    """What :func:`encode` made these bytes of, which is a ``kind``."""
    try:
        magic, version, length = _PREFIX.unpack_from(data)
    except struct.error as error:
        raise ArtifactError("These bytes are too short for a compiled graph.") from error
    if magic != _MAGIC:
        raise ArtifactError("These bytes are no compiled graph of torchkiln.")
    if version != VERSION:
        raise ArtifactError(
            f"This compiled graph has format {version}, this version of torchkiln reads {VERSION}; compile it again."
        )
    try:
        header = json.loads(data[_PREFIX.size : _PREFIX.size + length])
        reader = _Reader(data, _PREFIX.size + length, header["blobs"])
        for body in header["bodies"]:  # after those inside it
            reader.bodies.append(reader.value(body))
        found = reader.value(header["artifact"])
    except (ValueError, TypeError, LookupError, AttributeError, RuntimeError, OverflowError) as e:
        raise ArtifactError(f"This compiled graph is damaged ({type(e).__name__}: {e}); compile it again.") from e
    if not isinstance(found, kind):
        raise ArtifactError(f"These bytes hold something else than {kind.__name__}.")
    return found


class _Writer:
    def __init__(self) -> None:
        self.blobs: list[bytes] = []
        self._storages: dict[int, int] = {}
        self._bodies: dict[int, int] = {}
        self.bodies: list[Any] = []

    def tree(self, value: Any) -> Any:
        if value is None or type(value) in (bool, int, str):
            return value
        if isinstance(value, tuple):
            return [self.tree(item) for item in value]
        if isinstance(value, Body):  # several calls may share one
            if id(value) not in self._bodies:
                written = self._fields(value)
                self._bodies[id(value)] = len(self.bodies)
                self.bodies.append(written)
            return {"body": self._bodies[id(value)]}
        if type(value).__name__ in _TYPES and isinstance(value, _TYPES[type(value).__name__]):
            return self._fields(value)
        return self._tagged(value)

    def _fields(self, value: Any) -> dict[str, Any]:
        fields = {f.name: self.tree(getattr(value, f.name)) for f in dataclasses.fields(value)}
        return {"type": type(value).__name__, **fields}

    def _tagged(self, value: Any) -> dict[str, Any]:
        if type(value) is float:
            return {"float": value.hex()}
        if type(value) is complex:
            return {"complex": [value.real.hex(), value.imag.hex()]}
        if type(value) is bytes:
            return {"bytes": self._blob(value)}
        if type(value) is torch.dtype:
            return {"dtype": str(value).removeprefix("torch.")}
        if type(value) is torch.device:
            return {"device": str(value)}
        if type(value) is torch.layout:
            return {"layout": str(value)}
        if type(value) is torch.memory_format:
            return {"memory_format": str(value)}
        if isinstance(value, pytree.TreeSpec):
            return {"structure": self._nest(pytree.tree_unflatten([None] * value.num_leaves, value))}
        if is_no_subclass(value):
            return {"tensor": self._tensor(value)}
        raise ArtifactError(f"A compiled graph that holds {_described(value)} cannot be stored.")

    def _nest(self, value: Any) -> Any:
        """Nested tuples, lists and dictionaries of None."""
        if value is None:
            return None
        if type(value) in (tuple, list):
            return {type(value).__name__: [self._nest(item) for item in value]}
        if type(value) is dict and all(type(key) in (str, int) for key in value):
            return {"dict": [[key, self._nest(item)] for key, item in value.items()]}
        raise ArtifactError(f"A compiled graph that returns {_described(value)} cannot be stored.")

    def _blob(self, data: bytes) -> int:
        self.blobs.append(data)
        return len(self.blobs) - 1

    def _tensor(self, tensor: torch.Tensor) -> dict[str, Any]:
        plain = tensor.layout is torch.strided and tensor.device.type == "cpu" and not tensor.is_quantized
        if not plain or tensor.is_conj() or tensor.is_neg() or tensor._is_zerotensor():
            raise ArtifactError(f"A compiled graph that holds {_described(tensor)} cannot be stored.")
        storage = tensor.untyped_storage()
        # Constants that share memory share it again when they are loaded.
        if storage._cdata not in self._storages:
            whole = torch.empty(0, dtype=torch.uint8).set_(storage)
            self._storages[storage._cdata] = self._blob(whole.numpy().tobytes())
        return {
            "storage": self._storages[storage._cdata],
            "dtype": str(tensor.dtype).removeprefix("torch."),
            "shape": list(tensor.shape),
            "strides": list(tensor.stride()),
            "offset": tensor.storage_offset(),
        }


def _described(value: object) -> str:
    if isinstance(value, torch.Tensor):
        return f"a constant tensor that is {value.layout} on {value.device}, {value.dtype}"
    return f"a {type(value).__module__}.{type(value).__qualname__}"


class _Reader:
    def __init__(self, data: bytes, start: int, lengths: Sequence[int]) -> None:
        self._blobs: list[memoryview] = []
        self._storages: dict[int, torch.UntypedStorage] = {}
        self.bodies: list[Any] = []
        for length in lengths:
            if type(length) is not int or length < 0 or start + length > len(data):
                raise ValueError("a part lies outside of the file")
            self._blobs.append(memoryview(data)[start : start + length])
            start += length
        if start != len(data):
            raise ValueError("there is more than the parts named")

    def value(self, tree: Any) -> Any:
        if tree is None or type(tree) in (bool, int, str):
            return tree
        if isinstance(tree, list):
            return tuple(self.value(item) for item in tree)
        if "type" in tree:
            fields = {name: self.value(item) for name, item in tree.items() if name != "type"}
            return _TYPES[tree["type"]](**fields)
        ((tag, content),) = tree.items()
        return getattr(self, f"_read_{tag}")(content)

    def _read_body(self, number: int) -> Any:
        return self.bodies[number]

    def _read_float(self, text: str) -> float:
        return float.fromhex(text)

    def _read_complex(self, parts: list[str]) -> complex:
        real, imaginary = parts
        return complex(float.fromhex(real), float.fromhex(imaginary))

    def _read_bytes(self, blob: int) -> bytes:
        return bytes(self._blobs[blob])

    def _read_dtype(self, name: str) -> torch.dtype:
        return _DTYPES[name]

    def _read_device(self, name: str) -> torch.device:
        return torch.device(name)

    def _read_layout(self, name: str) -> torch.layout:
        return _LAYOUTS[name]

    def _read_memory_format(self, name: str) -> torch.memory_format:
        return _FORMATS[name]

    def _read_structure(self, nest: Any) -> pytree.TreeSpec:
        return pytree.tree_structure(_read_nest(nest))

    def _read_tensor(self, tree: dict[str, Any]) -> torch.Tensor:
        storage = self._storages.get(tree["storage"])
        if storage is None:
            blob = self._blobs[tree["storage"]]
            memory = torch.empty(len(blob), dtype=torch.uint8)
            if len(blob):
                memory.numpy()[:] = memoryview(blob)
            storage = self._storages[tree["storage"]] = memory.untyped_storage()
        shape, strides, offset = tree["shape"], tree["strides"], tree["offset"]
        # torch compares these with the storage.
        return torch.empty(0, dtype=_DTYPES[tree["dtype"]]).set_(storage, offset, shape, strides)


def _read_nest(nest: Any) -> Any:
    if nest is None:
        return None
    ((kind, items),) = nest.items()
    if kind == "dict":
        return {key: _read_nest(item) for key, item in items}
    return {"tuple": tuple, "list": list}[kind](_read_nest(item) for item in items)
