"""Entries: they come back as they went in, and no other bytes do."""

from __future__ import annotations

import contextlib
import hashlib
import json
import struct

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.cache.keys import key, payload
from torchkiln.cache import CacheKey
from torchkiln.cache.entry import FORMAT, PREFIX_BYTES, head_bytes, pack, unpack, unpack_head
from torchkiln.errors import CacheEntryError

SECRET = b"a secret of thirty-two bytes .."
WHOLE = {secret: pack(key(), payload(size=64), secret) for secret in (None, SECRET)}
KEYS = st.builds(CacheKey, st.text(), st.dictionaries(st.text(), st.text(), max_size=4))


@given(KEYS, st.binary(), st.sampled_from([None, SECRET]))
def test_what_is_packed_comes_back(given_key: CacheKey, content: bytes, secret: bytes | None) -> None:
    entry = unpack(pack(given_key, content, secret), given_key.digest, secret)
    assert entry.payload == content
    assert entry.key == given_key
    assert entry.origin.created > 0


@given(st.data(), st.sampled_from([None, SECRET]))
def test_a_flipped_bit_anywhere_is_refused(data: st.DataObject, secret: bytes | None) -> None:
    whole = bytearray(WHOLE[secret])
    bit = data.draw(st.integers(0, 8 * len(whole) - 1))
    whole[bit // 8] ^= 1 << bit % 8
    with pytest.raises(CacheEntryError):
        unpack(bytes(whole), key().digest, secret)


@given(st.data())
def test_an_entry_cut_off_or_continued_is_refused(data: st.DataObject) -> None:
    whole = WHOLE[None]
    with pytest.raises(CacheEntryError):
        unpack(whole[: data.draw(st.integers(0, len(whole) - 1))], key().digest)
    with pytest.raises(CacheEntryError):
        unpack(whole + data.draw(st.binary(min_size=1)), key().digest)


@settings(max_examples=300)
@given(st.binary(max_size=300), st.booleans())
def test_any_bytes_are_refused_with_one_error(content: bytes, with_a_good_start: bool) -> None:
    data = pack(key(), b"")[: PREFIX_BYTES // 2] + content if with_a_good_start else content
    for parse in (unpack, unpack_head):
        with pytest.raises(CacheEntryError):
            parse(data, key().digest)
    with contextlib.suppress(CacheEntryError):
        assert head_bytes(data) >= PREFIX_BYTES


def _with_checksum(key_content: bytes, header: bytes) -> bytes:
    """An entry made by hand, after the description in the module."""
    start = struct.pack("<8sII", b"kilncach", FORMAT, 0)
    rest = struct.pack("<IIQ", len(key_content), len(header), 1) + key_content + header + b"p"
    return start + bytes(32) + hashlib.sha256(start + rest).digest() + rest


def test_the_format_is_the_one_described() -> None:
    header = json.dumps({"created": 5.0, "torchkiln": "1.2"}).encode()
    entry = unpack(_with_checksum(key().content, header), key().digest)
    assert (entry.payload, entry.key, entry.origin.created, entry.origin.version) == (b"p", key(), 5.0, "1.2")


@pytest.mark.parametrize(
    "content",
    [b"", b"[]", b'["graph"]', b'["graph", [["a"]]]', b'["graph",[["a",1]]]', b"[" * 100_000, b'["b", []]', b"\xff"],
)
def test_a_key_that_is_written_otherwise_is_refused_when_it_is_read(content: bytes) -> None:
    entry = unpack(_with_checksum(content, b"{}"), hashlib.sha256(content).hexdigest())
    with pytest.raises(CacheEntryError):
        entry.key  # noqa: B018


@pytest.mark.parametrize(
    "header", [b"", b"[]", b"{}", b'{"created": 1, "torchkiln": "1"}', b'{"created": NaN, "torchkiln": "1"}', b"\x00"]
)
def test_a_header_that_is_none_is_refused_when_it_is_read(header: bytes) -> None:
    entry = unpack(_with_checksum(key().content, header), key().digest)
    with pytest.raises(CacheEntryError):
        entry.origin  # noqa: B018


def test_an_entry_under_the_name_of_another_key_is_refused() -> None:
    with pytest.raises(CacheEntryError, match="another key"):
        unpack(pack(key(1), payload(1)), key(2).digest)


def test_with_a_secret_only_what_it_signed_is_used() -> None:
    unpack(pack(key(), payload(), SECRET), key().digest, SECRET)
    unpack(pack(key(), payload(), SECRET), key().digest, None)
    for other in (None, b"another secret"):
        with pytest.raises(CacheEntryError, match="sign") as refused:
            unpack(pack(key(), payload(), other), key().digest, SECRET)
        assert not refused.value.damaged


def test_a_tampered_entry_with_a_new_checksum_has_a_wrong_signature() -> None:
    signed, forged = pack(key(), b"good", SECRET), pack(key(), b"evil", b"")
    signature = slice(16, 48)
    tampered = forged[: signature.start] + signed[signature] + forged[signature.stop :]
    assert unpack(tampered, key().digest).payload == b"evil"  # its checksum is right
    with pytest.raises(CacheEntryError, match="signature"):
        unpack(tampered, key().digest, SECRET)


def test_the_head_of_an_entry_is_enough_for_its_key() -> None:
    whole = pack(key(), payload())
    head = whole[: head_bytes(whole[:PREFIX_BYTES])]
    assert len(head) == len(whole) - len(payload())
    assert unpack_head(head, key().digest).key == key()
    with pytest.raises(CacheEntryError):
        unpack_head(head[:-1], key().digest)
