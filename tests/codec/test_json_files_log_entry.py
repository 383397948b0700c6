"""Log entries: what was written comes back, and no altered byte passes for an entry."""

from __future__ import annotations

from dataclasses import replace

import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from headgate.codec.json_files import decode_hint, decode_log_entry, encode_hint, encode_log_entry
from headgate.errors import CorruptionError, UnknownFormat
from headgate.model.config import Guarantee
from headgate.model.ids import CheckpointId, Generation, SubtaskId, VertexId
from headgate.model.manifest import (
    Claim,
    Committable,
    HookState,
    Left,
    Manifest,
    SnapshotDelays,
    SnapshotPart,
    SubtaskEntry,
)

CLAIM = Claim(Generation(3), "process 1 on host ä", 1_700_000_000_000)
ENTRY = SubtaskEntry(
    SubtaskId(VertexId("source"), 1),
    (SnapshotPart(3, 7, "", b"abc", {"sum": {"accumulators": 250_000}}),),
    (Committable("out", CheckpointId(4), 1, Generation(3), b"\x00\xff"),),
)
MANIFEST = Manifest(CheckpointId(4), Generation(3), 2, 128, (ENTRY,), (), {"source": "rows"}, False, 5, 6)


COUNTED = replace(MANIFEST, totals={"source": {"records_out": 8_000_000}})


@pytest.mark.parametrize("entry", [CLAIM, MANIFEST, COUNTED], ids=["claim", "manifest", "counted"])
def test_an_entry_comes_back_as_it_was(entry: Claim | Manifest) -> None:
    assert decode_log_entry(encode_log_entry(entry), "log/1") == entry


def test_an_entry_can_be_read_by_a_person() -> None:
    head, _, body = encode_log_entry(CLAIM).partition(b"\n")
    assert head.startswith(b"headgate-log ")
    assert b"process 1 on host" in body


@given(st.sampled_from([CLAIM, MANIFEST]), st.data())
def test_a_flipped_bit_is_always_detected_and_the_file_named(entry: Claim | Manifest, data: st.DataObject) -> None:
    altered = bytearray(encode_log_entry(entry))
    at = data.draw(st.integers(0, len(altered) - 1))
    altered[at] ^= 1 << data.draw(st.integers(0, 7))
    with pytest.raises(CorruptionError) as found:
        decode_log_entry(bytes(altered), "log/0000000009")
    assert found.value.path == "log/0000000009"


@given(st.sampled_from([CLAIM, MANIFEST]), st.data())
def test_a_truncated_entry_is_always_detected(entry: Claim | Manifest, data: st.DataObject) -> None:
    whole = encode_log_entry(entry)
    with pytest.raises(CorruptionError):
        decode_log_entry(whole[: data.draw(st.integers(0, len(whole) - 1))], "log/1")


@given(st.binary(max_size=200))
def test_foreign_bytes_are_never_an_entry(data: bytes) -> None:
    with pytest.raises(CorruptionError):
        decode_log_entry(data, "log/1")


def test_another_version_is_named_and_not_taken_for_damage() -> None:
    newer = encode_log_entry(CLAIM).replace(b"headgate-log 1 ", b"headgate-log 2 ", 1)
    with pytest.raises(UnknownFormat, match="expected format version 1, found 2"):
        decode_log_entry(newer, "log/1")


PIECES = (SnapshotPart(3, 7, "chk-4/a"), SnapshotPart(4, 8, "chk-4/b"))
OUTPUT = Committable("out", CheckpointId(4), 1, Generation(3), b"2 pieces", None, PIECES)
IN_FLIGHT = SnapshotPart(3, 7, "", b"abc", section="in-flight/sum", name="a way")
HOOKS = (HookState("shop", b"\x00\xff"), HookState("silent"), HookState("bank", b"y", CheckpointId(2)))


@pytest.mark.parametrize(
    "entry",
    [
        pytest.param(
            replace(MANIFEST, entries=(SubtaskEntry(ENTRY.subtask, (IN_FLIGHT,), (), SnapshotDelays(3, 4)), ENTRY)),
            id="records in flight",
        ),
        pytest.param(replace(MANIFEST, entries=(replace(ENTRY, committables=(OUTPUT,)),)), id="pieces"),
        pytest.param(replace(MANIFEST, carried=(OUTPUT,), life=3), id="carried pieces of a later life"),  # LV7
        pytest.param(replace(MANIFEST, left=(Left(CheckpointId(1), CheckpointId(3)),)), id="left"),  # SV26
        pytest.param(replace(MANIFEST, left=(Left(CheckpointId(1), CheckpointId(3), "out"),)), id="left by a sink"),
        pytest.param(replace(CLAIM, follows=0, life=5, order="5eed"), id="an order to start over"),  # SO9
        pytest.param(replace(MANIFEST, mode=Guarantee.AT_LEAST_ONCE), id="at least once"),
        pytest.param(replace(MANIFEST, hooks=HOOKS), id="hooks"),  # EI4
    ],
)
def test_everything_that_an_entry_may_say_comes_back(entry: Claim | Manifest) -> None:
    # EI4, SV26, SO9
    assert decode_log_entry(encode_log_entry(entry), "log/1") == entry


@given(st.integers(0, 10**12))
def test_a_hint_comes_back_and_no_altered_digit_passes(sequence: int) -> None:
    data = encode_hint(sequence)
    assert decode_hint(data, "log-hint") == sequence
    with pytest.raises(CorruptionError, match="log-hint"):
        decode_hint(bytes([data[0] ^ 1]) + data[1:], "log-hint")


def test_a_damaged_hint_is_refused() -> None:
    for damaged in (
        b"17",
        b"",
        b"\xb2",
        b"1\xb9",
    ):  # the last two: one bit of a digit is another one
        with pytest.raises(CorruptionError):
            decode_hint(damaged, "log-hint")


@pytest.mark.parametrize("kind", ["claim", "manifest"])
@pytest.mark.parametrize("body", [b"{}", b"[]", b"nonsense"])
def test_other_fields_under_a_right_checksum_are_refused(kind: str, body: bytes) -> None:
    head = encode_log_entry(CLAIM if kind == "claim" else MANIFEST).partition(b"\n")[0].split(b" ")
    data = b" ".join([*head[:3], xxhash.xxh3_64_hexdigest(body).encode()]) + b"\n" + body
    with pytest.raises(CorruptionError, match=r"log/1 is damaged at byte \d+: expected the fields of this version"):
        decode_log_entry(data, "log/1")
