"""Tensors as a file of the safetensors format: a header of JSON text, then their memory, to be mapped.

    length of the header, 8 bytes, little-endian | header | tensors without gaps
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import prod
from typing import Any

import torch

from torchkiln.errors import PackageError

_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "C64": torch.complex64,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U64": torch.uint64,
    "U32": torch.uint32,
    "U16": torch.uint16,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
_NAMES = {dtype: name for name, dtype in _DTYPES.items()}
_LENGTH = struct.Struct("<Q")
# More than any file has, and little enough for torch to multiply a few of them.
_MOST = 2**48
# What vectors and the allocator of torch are aligned to.
_ALIGNMENT = 64


@dataclass(frozen=True)
class StoredTensor:
    """Where the memory of a tensor lies in the file."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    begin: int
    end: int


def parts(tensors: Mapping[str, torch.Tensor]) -> Iterator[bytes | memoryview]:
    """The content of a file with these tensors, part by part.

    Those whose length keeps the next one aligned come first: the format has no gaps.
    """
    names = sorted(tensors, key=lambda name: tensors[name].nbytes % _ALIGNMENT != 0)
    header: dict[str, Any] = {}
    end = 0
    for name in names:
        tensor = tensors[name]
        if tensor.dtype not in _NAMES:
            raise PackageError(f"The weight {name!r} has {tensor.dtype}, which safetensors cannot store: convert it.")
        begin, end = end, end + tensor.nbytes
        header[name] = {"dtype": _NAMES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [begin, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-(_LENGTH.size + len(text)) % _ALIGNMENT)
    yield _LENGTH.pack(len(text)) + text
    for name in names:
        yield _memory(tensors[name])


def _memory(tensor: torch.Tensor) -> memoryview:
    flat = tensor.detach().contiguous().view(-1)
    return flat.view(torch.uint8).numpy().data if flat.numel() else memoryview(b"")


def read_header(content: memoryview) -> dict[str, StoredTensor]:
    """Where the tensors of a file lie; ValueError, TypeError, LookupError or RecursionError for other bytes."""
    start = _LENGTH.size
    if start <= len(content):
        start += _LENGTH.unpack(content[:start])[0]
    if start > len(content):
        raise ValueError("the header is cut off")
    header = json.loads(bytes(content[_LENGTH.size : start]))
    if not isinstance(header, dict):
        raise TypeError("the header is no JSON object")
    header.pop("__metadata__", None)
    found = {name: _stored(entry, start) for name, entry in header.items()}
    for name, tensor in found.items():
        if not start <= tensor.begin <= tensor.end <= len(content):
            raise ValueError(f"{name} lies outside of the file")
        if tensor.end - tensor.begin != prod(tensor.shape) * tensor.dtype.itemsize:
            raise ValueError(f"{name} has another length than its shape and dtype say")
    return found


def _stored(entry: Any, start: int) -> StoredTensor:
    shape, (begin, end) = tuple(entry["shape"]), entry["data_offsets"]
    if not all(type(number) is int and 0 <= number < _MOST for number in (*shape, begin, end)):
        raise ValueError("sizes and places are not all whole numbers of a possible size")
    return StoredTensor(_DTYPES[entry["dtype"]], shape, start + begin, start + end)


def tensor_at(content: Any, stored: StoredTensor) -> torch.Tensor:
    """A tensor over the memory of ``content``, which has a writable buffer."""
    if stored.begin == stored.end:
        return torch.empty(stored.shape, dtype=stored.dtype)
    count = prod(stored.shape)
    return torch.frombuffer(content, dtype=stored.dtype, count=count, offset=stored.begin).view(stored.shape)
