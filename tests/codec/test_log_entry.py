"""Log entries: what was written comes back, and no altered byte passes for an entry."""

from __future__ import annotations

import dataclasses
import json

import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from headgate.codec import log_entry
from headgate.codec.log_entry import decode_hint, decode_log_entry, encode_hint, encode_log_entry
from headgate.errors import CorruptionError
from headgate.model.checkpoint_options import Guarantee
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


COUNTED = dataclasses.replace(MANIFEST, totals={"source": {"records_out": 8_000_000}})


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


def test_a_manifest_of_version_0_1_has_no_rows_and_is_read() -> None:
    plain = dataclasses.replace(MANIFEST, entries=(SubtaskEntry(ENTRY.subtask, (SnapshotPart(3, 7, "", b"abc"),)),))
    fields = json.loads(encode_log_entry(plain).partition(b"\n")[2])
    (part,) = fields["entries"][0].pop("parts")
    fields["entries"][0]["handle"] = {name: part[name] for name in ("size_bytes", "checksum", "path", "inline")}
    old = json.dumps(fields).encode()
    head = b"headgate-log 1 manifest " + xxhash.xxh3_64_hexdigest(old).encode()
    assert decode_log_entry(head + b"\n" + old, "log/1") == plain


def test_a_claim_of_version_0_1_is_read() -> None:
    old = encode_log_entry(CLAIM).replace(b"headgate-log 2 ", b"headgate-log 1 ", 1)
    assert decode_log_entry(old, "log/1") == CLAIM


def test_a_newer_version_is_named_and_not_taken_for_damage() -> None:
    newer = encode_log_entry(CLAIM).replace(b"headgate-log 2 ", b"headgate-log 13 ", 1)
    with pytest.raises(CorruptionError, match="expected format version 12 or less, found 13"):
        decode_log_entry(newer, "log/1")


def test_a_manifest_with_records_in_flight_is_of_a_version_of_its_own() -> None:  # UA18
    part = SnapshotPart(3, 7, "", b"abc", section="in-flight/sum", name="a way")
    delays = SnapshotDelays(3, 4)
    held = dataclasses.replace(MANIFEST, entries=(SubtaskEntry(ENTRY.subtask, (part,), (), delays), ENTRY))
    data = encode_log_entry(held)
    assert data.startswith(b"headgate-log 3 manifest ")
    assert decode_log_entry(data, "log/1") == held
    assert encode_log_entry(MANIFEST).startswith(b"headgate-log 2 manifest ")
    for entry, found in ((held, b"2"), (MANIFEST, b"3")):
        head, _, body = encode_log_entry(entry).partition(b"\n")
        with pytest.raises(CorruptionError, match="expected format version"):
            decode_log_entry(head[:13] + found + head[14:] + b"\n" + body, "log/1")
    assert b"delays" not in encode_log_entry(MANIFEST), "what nobody measured is not there"


@pytest.mark.parametrize("where", ["entry", "carried"])
def test_a_manifest_with_output_in_pieces_is_of_a_version_of_its_own(where: str) -> None:  # SF14
    pieces = (SnapshotPart(3, 7, "chk-4/a"), SnapshotPart(4, 8, "chk-4/b"))
    output = Committable("out", CheckpointId(4), 1, Generation(3), b"2 pieces", None, pieces)
    own = (dataclasses.replace(ENTRY, committables=(output,), delays=SnapshotDelays(1, 2)),)
    held = (
        dataclasses.replace(MANIFEST, entries=own)
        if where == "entry"
        else dataclasses.replace(MANIFEST, carried=(output,))
    )
    held = dataclasses.replace(held, life=3)
    data = encode_log_entry(held)
    assert data.startswith(b"headgate-log 5 manifest ")
    assert decode_log_entry(data, "log/1") == held
    assert {piece.path for piece in pieces} <= held.files
    assert b"pieces" not in encode_log_entry(dataclasses.replace(MANIFEST, carried=ENTRY.committables))


@pytest.mark.parametrize("sink", [None, "out"])
def test_a_manifest_that_says_what_was_left_is_of_a_version_of_its_own(  # SV26
    sink: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Who does not read that would take output for committed that nobody has committed."""
    entry = dataclasses.replace(MANIFEST, left=(Left(CheckpointId(1), CheckpointId(3), sink),))
    data = encode_log_entry(entry)
    assert decode_log_entry(data, "log/1") == entry
    assert data.startswith(b"headgate-log 8 manifest ")
    assert encode_log_entry(MANIFEST).startswith(b"headgate-log 2 manifest ")
    known = {version: number for version, number in log_entry._VERSIONS.items() if number < 8}
    monkeypatch.setattr(log_entry, "_VERSIONS", known)
    with pytest.raises(CorruptionError, match=r"format version .* found 8"):
        decode_log_entry(data, "log/1")


def test_a_claim_that_orders_to_start_over_is_of_a_version_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:  # SO9
    later = dataclasses.replace(CLAIM, follows=0, life=5)
    order = dataclasses.replace(later, order="5eed")
    data = encode_log_entry(order)
    assert data.startswith(b"headgate-log 7 claim ")
    assert decode_log_entry(data, "log/5") == order
    for entry, version in ((CLAIM, 2), (later, 4)):
        assert encode_log_entry(entry).startswith(b"headgate-log %d claim " % version)
        assert b"order" not in encode_log_entry(entry), "all other claims are what they were"
    known = {version: number for version, number in log_entry._VERSIONS.items() if number < 7}
    monkeypatch.setattr(log_entry, "_VERSIONS", known)
    with pytest.raises(CorruptionError, match=r"format version .* found 7"):
        decode_log_entry(data, "log/5")


@given(st.integers(0, 10**12))
def test_a_hint_comes_back_and_no_altered_digit_passes(sequence: int) -> None:
    data = encode_hint(sequence)
    assert decode_hint(data, "log-hint") == sequence
    with pytest.raises(CorruptionError, match="log-hint"):
        decode_hint(bytes([data[0] ^ 1]) + data[1:], "log-hint")


def test_hints_of_version_0_1_are_read() -> None:
    assert decode_hint(b"17", "log-hint") == 17
    for damaged in (b"", b"\xb2", b"1\xb9"):  # one bit of "2" or "9" is another one: a digit to Python, but no number
        with pytest.raises(CorruptionError):
            decode_hint(damaged, "log-hint")


@pytest.mark.parametrize("kind", ["claim", "manifest"])
@pytest.mark.parametrize("body", [b"{}", b"[]", b"nonsense"])
def test_other_fields_under_a_right_checksum_are_refused(kind: str, body: bytes) -> None:
    head = encode_log_entry(CLAIM if kind == "claim" else MANIFEST).partition(b"\n")[0].split(b" ")
    data = b" ".join([*head[:3], xxhash.xxh3_64_hexdigest(body).encode()]) + b"\n" + body
    with pytest.raises(CorruptionError, match=r"log/1 is damaged at byte \d+: expected the fields of this version"):
        decode_log_entry(data, "log/1")


# GM4
def test_a_manifest_without_a_mode_was_exactly_once() -> None:
    lax = dataclasses.replace(MANIFEST, mode=Guarantee.AT_LEAST_ONCE)
    written = encode_log_entry(lax)
    assert decode_log_entry(written, "log/1") == lax
    fields = json.loads(written.partition(b"\n")[2])
    assert fields.pop("mode") == "at_least_once"
    old = json.dumps(fields).encode()
    head = b"headgate-log 2 manifest " + xxhash.xxh3_64_hexdigest(old).encode()
    assert decode_log_entry(head + b"\n" + old, "log/1") == MANIFEST


def test_only_what_was_restored_by_name_says_for_which_checkpoint_a_hook_was_called() -> None:  # EI38
    held = dataclasses.replace(MANIFEST, hooks=(HookState("shop", b"x"), HookState("bank", b"y", CheckpointId(2))))
    written = encode_log_entry(held)
    assert decode_log_entry(written, "m") == held
    shop, bank = json.loads(written.partition(b"\n")[2])["hooks"]
    assert "checkpoint" not in shop, "as manifests were before"
    assert bank["checkpoint"] == 2


def test_a_manifest_from_before_hooks_holds_none() -> None:  # EI4
    held = dataclasses.replace(MANIFEST, hooks=(HookState("shop", b"\x00\xff"), HookState("silent")))
    assert decode_log_entry(encode_log_entry(held), "m") == held
    body = encode_log_entry(held).partition(b"\n")[2]
    fields = json.loads(body)
    assert len(fields.pop("hooks")) == 2
    old = json.dumps(fields).encode()
    data = b"headgate-log 2 manifest %s\n%s" % (xxhash.xxh3_64_hexdigest(old).encode(), old)
    assert decode_log_entry(data, "m") == dataclasses.replace(MANIFEST, hooks=())
