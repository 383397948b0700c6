"""The bytes of a lock file: what does not verify says nothing, because it may just be being written."""

from __future__ import annotations

import pytest
import xxhash

from headgate.codec.json_files import Ending, LockHolder, decode_holder, encode_holder

HOLDERS = [
    LockHolder("process 7 of ü", "host", 7, "nonce"),
    LockHolder("o", "h", 1, "n", True, Ending.FAILED, 12, "storage\nis full"),
    LockHolder("o", "h", 1, "n", claimant="supervisor 7 on h, driver 12"),
    *(LockHolder("o", "h", 1, "n", ending=ending) for ending in Ending),
]


@pytest.mark.parametrize("holder", HOLDERS, ids=repr)
def test_a_holder_comes_back_and_can_be_read_by_a_person(holder: LockHolder) -> None:
    data = encode_holder(holder)
    assert decode_holder(data) == holder
    assert data.startswith(b"headgate-lock 1 ")
    assert b'"pid":%d' % holder.pid in data


@pytest.mark.parametrize("holder", HOLDERS[:2], ids=repr)
def test_a_holder_that_is_half_written_or_changed_says_nothing(holder: LockHolder) -> None:
    data = encode_holder(holder)
    for at in range(len(data)):
        damaged = bytearray(data)
        damaged[at] ^= 1
        assert decode_holder(bytes(damaged)) is None
        assert decode_holder(data[:at]) is None
    assert decode_holder(data + b"!") is None


@pytest.mark.parametrize("body", [b"{}\n", b'{"owner":"o","host":"h","pid":"x","nonce":"n"}\n', b"nonsense\n"])
def test_other_fields_under_a_right_checksum_say_nothing(body: bytes) -> None:
    assert decode_holder(b"headgate-lock 1 %s\n%s" % (xxhash.xxh3_64_hexdigest(body).encode(), body)) is None


def test_an_ending_that_this_release_does_not_know_says_nothing() -> None:
    body = b'{"owner":"o","host":"h","pid":1,"nonce":"n","ending":"vanished"}\n'
    assert decode_holder(b"headgate-lock 1 %s\n%s" % (xxhash.xxh3_64_hexdigest(body).encode(), body)) is None


def test_a_holder_that_does_not_say_who_claims_is_read() -> None:
    body = b'{"owner":"o","host":"h","pid":1,"nonce":"n","supervisor_pid":7}\n'
    data = b"headgate-lock 1 %s\n%s" % (xxhash.xxh3_64_hexdigest(body).encode(), body)
    assert decode_holder(data) == LockHolder("o", "h", 1, "n", supervisor_pid=7)


def test_another_version_says_nothing() -> None:
    assert decode_holder(encode_holder(HOLDERS[0]).replace(b"lock 1", b"lock 2", 1)) is None
