"""Files of JSON: entries of the log, lives, savepoints, holders of locks and heartbeats, also damaged."""

from __future__ import annotations

from dataclasses import replace

import msgspec
import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from headgate.codec.json_files import (
    Ending,
    LockHolder,
    beat_path,
    decode_beat,
    decode_hint,
    decode_holder,
    decode_life,
    decode_log_entry,
    decode_savepoint,
    encode_beat,
    encode_hint,
    encode_holder,
    encode_life,
    encode_log_entry,
    encode_savepoint,
    end_path,
    generation_of,
    mark_of,
)
from headgate.errors import CorruptionError, UnknownFormat
from headgate.model.config import Guarantee
from headgate.model.ids import CheckpointId, Generation, SubtaskId, VertexId
from headgate.model.manifest import (
    Claim,
    Committable,
    HookState,
    Left,
    Manifest,
    Savepoint,
    SnapshotDelays,
    SnapshotPart,
    SubtaskEntry,
)
from headgate.model.pipeline_identity import Beat, Course, PipelineIdentity

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


def test_another_version_of_a_life_is_named_and_not_taken_for_damage() -> None:
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
def test_other_fields_of_a_life_under_a_right_checksum_are_refused(body: bytes) -> None:
    data = b"headgate-life 1 %s\n%s" % (xxhash.xxh3_64_hexdigest(body).encode(), body)
    with pytest.raises(CorruptionError, match="expected the fields of this version"):
        decode_life(data, "p/life")


def test_a_life_of_a_later_release_may_say_more() -> None:
    body = msgspec.json.encode({**msgspec.to_builtins(LIFE), "more": 1})
    data = b"headgate-life 1 %s\n%s" % (xxhash.xxh3_64_hexdigest(body).encode(), body)
    assert decode_life(data, "p/life") == LIFE


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
def test_other_fields_of_a_heartbeat_under_a_right_checksum_say_nothing(body: bytes) -> None:
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


SUBTASK_ENTRY = SubtaskEntry(SubtaskId(VertexId("sums"), 1), (SnapshotPart(3, 7, "", b"abc"),), ())
SAVED_MANIFEST = Manifest(CheckpointId(4), Generation(3), 2, 128, (SUBTASK_ENTRY,), (), {"source": "rows"}, False, 5, 6)
SAVEPOINT = Savepoint("0123abcd", "orders ä", 1_700_000_000_000, "files-0123abcd", SAVED_MANIFEST)


def test_a_savepoint_comes_back() -> None:
    assert decode_savepoint(encode_savepoint(SAVEPOINT), "here") == SAVEPOINT


def test_a_person_can_read_whose_it_is() -> None:
    head, _, body = encode_savepoint(SAVEPOINT).partition(b"\n")
    assert head.startswith(b"headgate-savepoint 1 ")
    assert '"pipeline": "orders ä"'.encode() in body
    assert body.count(b"\n") > 10


def test_no_flipped_bit_and_no_truncation_is_a_savepoint() -> None:
    data = encode_savepoint(SAVEPOINT)
    for at in range(len(data)):
        damaged = bytearray(data)
        damaged[at] ^= 1
        with pytest.raises(CorruptionError, match=r"here is (damaged at byte|not in a format)"):
            decode_savepoint(bytes(damaged), "here")
        with pytest.raises(CorruptionError, match=r"here is (damaged at byte|not in a format)"):
            decode_savepoint(data[:at], "here")


@pytest.mark.parametrize("version", [b"0", b"2", b"x"])
def test_another_version_of_a_savepoint_is_named(version: bytes) -> None:
    data = encode_savepoint(SAVEPOINT).replace(b"headgate-savepoint 1", b"headgate-savepoint " + version, 1)
    with pytest.raises(CorruptionError, match=f"expected format version 1, found {version.decode()}"):
        decode_savepoint(data, "here")


@pytest.mark.parametrize("body", [b"{}", b"[]", b"nonsense", b'{"id": 5}'])
def test_a_savepoint_with_other_fields_is_refused(body: bytes) -> None:
    data = b"headgate-savepoint 1 %s\n%s" % (xxhash.xxh3_64_hexdigest(body).encode(), body)
    with pytest.raises(CorruptionError, match="expected the fields of this version"):
        decode_savepoint(data, "here")
