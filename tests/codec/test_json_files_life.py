"""The bytes of a life: it comes back, it can be read by a person, and nothing damaged or foreign passes for one."""

from __future__ import annotations

import msgspec
import pytest
import xxhash

from headgate.codec.json_files import decode_life, encode_life
from headgate.errors import CorruptionError, UnknownFormat
from headgate.model.pipeline_identity import PipelineIdentity

LIFE = PipelineIdentity("0123abcd", "/data/checkpoints/ü", "host", 1_700_000_000_000)


@pytest.mark.parametrize("life", [LIFE, None])
def test_a_life_comes_back_and_so_does_that_it_was_forgotten(life: PipelineIdentity | None) -> None:
    assert decode_life(encode_life(life), "p/life") == life


def test_the_bytes_are_frozen() -> None:
    assert encode_life(None) == b"headgate-life 1 b785b6ec423c44e1\nnull"
    assert xxhash.xxh3_64_hexdigest(encode_life(LIFE)) == "9f0a88c3166e16c4"


@pytest.mark.parametrize("life", [LIFE, None])
def test_no_flipped_bit_and_no_truncation_passes(life: PipelineIdentity | None) -> None:
    data = encode_life(life)
    for at in range(len(data)):
        for bit in (1, 128):
            damaged = bytearray(data)
            damaged[at] ^= bit
            with pytest.raises(CorruptionError, match=r"p/life is (damaged at byte|not in a format)"):
                decode_life(bytes(damaged), "p/life")
        with pytest.raises(CorruptionError, match=r"p/life is (damaged at byte|not in a format)"):
            decode_life(data[:at], "p/life")


def test_another_version_is_named_and_not_taken_for_damage() -> None:
    data = encode_life(LIFE).replace(b"headgate-life 1 ", b"headgate-life 2 ", 1)
    with pytest.raises(UnknownFormat, match="expected format version 1, found 2"):
        decode_life(data, "p/life")


def test_a_foreign_file_is_not_called_damaged_and_a_cut_one_is() -> None:
    with pytest.raises(UnknownFormat, match="expected the life of a pipeline, found b'PAR1") as caught:
        decode_life(b"PAR1 and more", "p/life")
    assert "damaged" not in str(caught.value)
    with pytest.raises(CorruptionError, match="is damaged at byte 0"):
        decode_life(b"headga", "p/life")


@pytest.mark.parametrize("body", [b"{}", b"[]", b'{"id": 5}', b"nonsense"])
def test_other_fields_under_a_right_checksum_are_refused(body: bytes) -> None:
    data = b"headgate-life 1 %s\n%s" % (xxhash.xxh3_64_hexdigest(body).encode(), body)
    with pytest.raises(CorruptionError, match="expected the fields of this version"):
        decode_life(data, "p/life")


def test_a_life_of_a_later_release_may_say_more() -> None:
    body = msgspec.json.encode({**msgspec.to_builtins(LIFE), "more": 1})
    data = b"headgate-life 1 %s\n%s" % (xxhash.xxh3_64_hexdigest(body).encode(), body)
    assert decode_life(data, "p/life") == LIFE
