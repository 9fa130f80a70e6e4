"""Entries: a payload with its whole key, a checksum and, where a secret is configured, a signature, as bytes.

::

    magic      8 bytes
    version    4      of this format
    flags      4      1: signed
    signature  32     HMAC-SHA256 of magic, version, flags and checksum; zeros where not signed
    checksum   32     SHA-256 of all but itself and the signature
    lengths    16     of key, header and payload
    key               its content, whose digest is the name of the entry
    header            JSON: when it was made, by which torchkiln
    payload

Nothing is used before it was verified. Any bytes whatsoever give an entry or a :class:`CacheEntryError`.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import math
import struct
import time
from dataclasses import dataclass
from functools import cached_property

import torchkiln
from torchkiln.cache.key import CacheKey, digest_of
from torchkiln.errors import CacheEntryError

FORMAT = 1
# Beyond what any graph compiles to; longer bytes are not even read.
MOST_BYTES = 1 << 30

_MAGIC = b"kilncach"
_SIGNED = 1
_START = struct.Struct("<8sII")
_PREFIX = struct.Struct("<8sII32s32sIIQ")
_CHECKED_FROM = _START.size + 32 + 32
_NO_SIGNATURE = bytes(32)
PREFIX_BYTES = _PREFIX.size


@dataclass(frozen=True)
class Entry:
    """An entry as it was stored; ``key`` and ``origin`` read the parts that a lookup does not need."""

    key_content: bytes
    header: bytes
    payload: bytes

    @cached_property
    def key(self) -> CacheKey:
        return _parsed_key(self.key_content)

    @cached_property
    def origin(self) -> Origin:
        return _parsed_origin(self.header)


@dataclass(frozen=True)
class Origin:
    """When an entry was made, in seconds since 1970, and by which version of torchkiln."""

    created: float
    version: str


@dataclass(frozen=True)
class _Prefix:
    """The part of fixed size."""

    start: bytes
    signed: bool
    signature: bytes
    checksum: bytes
    key_bytes: int
    header_bytes: int
    payload_bytes: int

    @property
    def entry_bytes(self) -> int:
        return PREFIX_BYTES + self.key_bytes + self.header_bytes + self.payload_bytes


def pack(key: CacheKey, payload: bytes, secret: bytes | None = None) -> bytes:
    """The entry of ``payload`` under ``key``, signed if there is a ``secret``."""
    header = json.dumps({"created": time.time(), "torchkiln": torchkiln.__version__}).encode()
    start = _START.pack(_MAGIC, FORMAT, 0 if secret is None else _SIGNED)
    lengths = struct.pack("<IIQ", len(key.content), len(header), len(payload))
    rest = b"".join((lengths, key.content, header, payload))
    checksum = _checksum(start, rest)
    signature = _NO_SIGNATURE if secret is None else _signature(start, checksum, secret)
    return b"".join((start, signature, checksum, rest))


def unpack(data: bytes, digest: str, secret: bytes | None = None) -> Entry:
    """The verified entry in ``data``, which must be that of the key with this digest.

    With a ``secret``, it must be signed with it.
    """
    prefix = _prefix(data)
    if prefix.entry_bytes != len(data):
        raise CacheEntryError(f"an entry of {prefix.entry_bytes} bytes has {len(data)}")
    view = memoryview(data)
    if not hmac.compare_digest(_checksum(prefix.start, view[_CHECKED_FROM:]), prefix.checksum):
        raise CacheEntryError("the checksum is not that of the content")
    _check_signature(prefix, secret)
    return _split(prefix, data, digest)


def unpack_head(data: bytes, digest: str) -> Entry:
    """Key and header of an entry from its first bytes, for tables: the payload stays empty, nothing else is verified.

    ``data`` must reach to the end of the header (:func:`head_bytes`).
    """
    prefix = _prefix(data)
    if len(data) < prefix.entry_bytes - prefix.payload_bytes:
        raise CacheEntryError("an entry ends within its header")
    return _split(prefix, data[: prefix.entry_bytes - prefix.payload_bytes], digest)


def head_bytes(prefix: bytes) -> int:
    """How many bytes :func:`unpack_head` needs of the entry that begins with these :data:`PREFIX_BYTES`."""
    found = _prefix(prefix)
    return found.entry_bytes - found.payload_bytes


def _prefix(data: bytes) -> _Prefix:
    if len(data) < PREFIX_BYTES:
        raise CacheEntryError(f"an entry has at least {PREFIX_BYTES} bytes, not {len(data)}")
    magic, version, flags, signature, checksum, *lengths = _PREFIX.unpack_from(data)
    if magic != _MAGIC:
        raise CacheEntryError("this is no entry of the cache")
    if version != FORMAT:
        raise CacheEntryError(f"an entry of format {version}, not {FORMAT}", damaged=False)
    if flags not in (0, _SIGNED) or (not flags and signature != _NO_SIGNATURE):
        raise CacheEntryError("the flags of an entry are unknown")
    prefix = _Prefix(data[: _START.size], bool(flags), signature, checksum, *lengths)
    if prefix.entry_bytes > MOST_BYTES:
        raise CacheEntryError(f"an entry has at most {MOST_BYTES} bytes")
    return prefix


def _split(prefix: _Prefix, data: bytes, digest: str) -> Entry:
    key_end = PREFIX_BYTES + prefix.key_bytes
    header_end = key_end + prefix.header_bytes
    key_content = data[PREFIX_BYTES:key_end]
    if digest_of(key_content) != digest:
        raise CacheEntryError("an entry is stored under the name of another key")
    return Entry(key_content, data[key_end:header_end], data[header_end:])


def _checksum(start: bytes, rest: bytes | memoryview) -> bytes:
    checksum = hashlib.sha256(start)
    checksum.update(rest)
    return checksum.digest()


def _signature(start: bytes, checksum: bytes, secret: bytes) -> bytes:
    return hmac.digest(secret, start + checksum, "sha256")


def _check_signature(prefix: _Prefix, secret: bytes | None) -> None:
    if secret is None:
        return
    if not prefix.signed:
        raise CacheEntryError("an entry is not signed", damaged=False)
    if not hmac.compare_digest(_signature(prefix.start, prefix.checksum, secret), prefix.signature):
        raise CacheEntryError("the signature of an entry is not by this secret", damaged=False)


def _parsed_key(content: bytes) -> CacheKey:
    match _json(content):
        case [str(kind), list(pairs)] if all(_is_pair_of_text(pair) for pair in pairs):
            key = CacheKey(kind, dict(pairs))
            if key.content == content:
                return key
    raise CacheEntryError("the key of an entry is not written as keys are")


def _is_pair_of_text(pair: object) -> bool:
    return isinstance(pair, list) and len(pair) == 2 and all(isinstance(part, str) for part in pair)


def _parsed_origin(header: bytes) -> Origin:
    match _json(header):
        case {"created": float(created), "torchkiln": str(version)} if math.isfinite(created):
            return Origin(created, version)
    raise CacheEntryError("the header of an entry is not written as headers are")


def _json(content: bytes) -> object:
    try:
        found: object = json.loads(content)
    except (ValueError, RecursionError) as error:
        raise CacheEntryError("a part of an entry is no JSON") from error
    return found
