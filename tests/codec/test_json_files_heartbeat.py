"""The bytes of heartbeats: what was told is heard, and nothing damaged or foreign passes for a sign of life."""

from __future__ import annotations

from dataclasses import replace

import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from headgate.codec.json_files import beat_path, decode_beat, encode_beat, end_path, generation_of, mark_of
from headgate.model.heartbeat import Beat, Course
from headgate.model.ids import CheckpointId, Generation

BEAT = Beat(Generation(3), "process 7 on ä", 41)
END = Beat(Generation(3), "process 7 on ä", 42, Course.FAILED, CheckpointId(9), "no space")


@pytest.mark.parametrize("beat", [BEAT, END, replace(END, was_draining=True)])
def test_a_beat_comes_back(beat: Beat) -> None:
    assert decode_beat(encode_beat(beat)) == beat


def test_the_bytes_of_a_beat_are_frozen() -> None:
    assert xxhash.xxh3_64_hexdigest(encode_beat(END)) == "723d112aabd3b6b7"


@pytest.mark.parametrize("beat", [BEAT, END])
def test_no_flipped_bit_and_no_truncation_is_a_beat(beat: Beat) -> None:
    data = encode_beat(beat)
    for at in range(len(data)):
        for bit in range(8):
            damaged = bytearray(data)
            damaged[at] ^= 1 << bit
            assert decode_beat(bytes(damaged)) is None
        assert decode_beat(data[:at]) is None


@pytest.mark.parametrize("body", [b"{}", b"[]", b"nonsense\n", b'{"generation": "x"}'])
def test_other_fields_under_a_right_checksum_say_nothing(body: bytes) -> None:
    checksum = xxhash.xxh3_64_hexdigest(body).encode()
    assert decode_beat(b"headgate-heartbeat 1 %s\n%s" % (checksum, body)) is None


def test_another_version_says_nothing_but_still_differs_from_beat_to_beat() -> None:
    """A standby of this version waits beside a driver of a later one, and sees that it lives."""
    later = [encode_beat(beat).replace(b"heartbeat 1", b"heartbeat 2", 1) for beat in (BEAT, END)]
    assert [decode_beat(data) for data in later] == [None, None]
    assert mark_of(later[0]) != mark_of(later[1])


@given(st.integers(1, 10**12), st.from_regex(r"[a-z][a-z0-9-]*", fullmatch=True))
def test_whose_a_heartbeat_is_can_be_read_from_its_name(generation: int, pipeline: str) -> None:
    for path in (beat_path(pipeline, generation), end_path(pipeline, generation)):
        assert path.startswith(f"{pipeline}/heartbeats/")
        assert generation_of(path.rpartition("/")[2]) == generation


@pytest.mark.parametrize(
    "name", ["", "7", "0000000007.bak", "000000000²", "0000000007-ended-ended", ".hg-probe", "README"]
)
def test_other_names_are_nobodys(name: str) -> None:
    assert generation_of(name) is None
