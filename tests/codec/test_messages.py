"""Control messages survive the wire; whatever else arrives is refused."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headgate.codec import messages as m
from headgate.codec.messages import TEXT_CHARS_MAX
from headgate.errors import ProtocolViolation
from headgate.model.config import CheckpointKind, CheckpointOptions
from headgate.model.failure import Failure, FailureKind
from headgate.model.ids import CheckpointId, Generation, SubtaskId, VertexId
from headgate.model.manifest import Committable, Copied, Place, SnapshotPart, SubtaskEntry
from headgate.model.progress import Sample
from headgate.protocol import loop_prober
from headgate.protocol.checkpoints.coordinator_events import (
    AbortReason,
    Acknowledged,
    Declined,
    FinishReported,
    SourceReadsOn,
)

HANDLE = SnapshotPart(10, (1 << 64) - 1, "3/a", b"x", {"window": {"sums": 3}})
SINK = SubtaskId(VertexId("sink"), 1)
ENTRY = SubtaskEntry(
    SINK,
    (SnapshotPart(3, 9, "", b"abc"),),
    (Committable("sink", CheckpointId(5), 1, Generation(2), b"p"),),
)
FROM_WORKER: list[m.FromWorker] = [
    m.Register(1, 2, 3, 0, m.Address("127.0.0.1", 65_535), 77, "abc"),
    m.Obituary(78, "was ended by SIGKILL", "out of paper"),
    m.Ready(1),
    m.Ready(1, is_listening=True),
    m.CompletionReport(1, 2),
    m.Acknowledge(Acknowledged(Generation(1), CheckpointId(2), ENTRY)),
    m.Acknowledge(Acknowledged(Generation(1), CheckpointId(2), ENTRY, Copied((HANDLE,)))),
    m.Acknowledge(Acknowledged(Generation(1), CheckpointId(2), ENTRY, Copied(problem="no space left"))),
    m.Decline(Declined(Generation(1), SINK, CheckpointId(2), AbortReason.SNAPSHOT_FAILED), "disk full"),
    m.ReadsOn(SourceReadsOn(Generation(1), SINK, (CheckpointId(2), CheckpointId(3)))),
    m.ReadsOn(SourceReadsOn(Generation(1), SINK, ())),
    m.Finished(FinishReported(Generation(1), SINK)),
    m.EntranceEnded(1, loop_prober.EntranceEnded(SINK, 3, 4)),
    m.EntranceEnded(1, loop_prober.EntranceEnded(SINK)),
    m.ProbeReturned(1, loop_prober.ProbeReturned(SINK, 2, 0, 5)),
    m.Failed(1, Failure(FailureKind.USER_CODE, "operator 'map': ValueError: 3", "Traceback")),
    m.Failed(1, Failure(FailureKind.LOST, "the data connection with worker 0 was lost"), 0),
    m.MetricsReport(1, [Sample("late", (("node", "map"),), 1)], [m.AlignmentMetrics("w", 1, 5, 6)]),
    m.Heartbeat(),
]
TO_WORKER: list[m.ToWorker] = [
    m.Deploy(4, [m.Address("h", 1)], [m.Restored(SubtaskId(VertexId("window"), 0), 2, (HANDLE,))], 1 << 22, 5, 20_480),
    m.Deploy(4, [m.Address("h", 1)], [], 1 << 22, 5, 20_480, place=Place("s3://me@bucket/here", "files-0a").text),
    m.TriggerCheckpoint(1, 2),
    m.TriggerCheckpoint(1, 2, CheckpointOptions(CheckpointKind.SAVEPOINT, target="/mnt/here")),
    m.Complete(1, 2),
    m.Abort(1, 2),
    m.Drain(1),
    m.StartProbe(1, "loop", loop_prober.Probe(3, 4, is_closing=True)),
    m.EndLoop(1, "loop"),
    m.Stop("finished", True),
    m.Refused("another plan"),
    m.HeartbeatReply(),
]


@pytest.mark.parametrize("message", FROM_WORKER, ids=lambda message: type(message).__name__)
def test_a_message_of_a_worker_survives_the_wire(message: m.FromWorker) -> None:
    assert m.decode_from_worker(m.encode_message(message)) == message


def test_a_place_survives_the_wire() -> None:
    place = Place("s3://me@bucket/here", "files-0a")
    assert Place.parse(place.text) == place


@pytest.mark.parametrize("message", TO_WORKER, ids=lambda message: type(message).__name__)
def test_a_message_to_a_worker_survives_the_wire(message: m.ToWorker) -> None:
    assert m.decode_to_worker(m.encode_message(message)) == message


def test_a_message_of_the_other_direction_is_refused() -> None:
    with pytest.raises(ProtocolViolation, match="malformed"):
        m.decode_from_worker(m.encode_message(m.Stop("now")))
    with pytest.raises(ProtocolViolation, match="malformed"):
        m.decode_to_worker(m.encode_message(m.Heartbeat()))


@given(st.binary(max_size=300))
def test_random_bytes_are_a_message_or_refused(raw: bytes) -> None:
    for decode in (m.decode_from_worker, m.decode_to_worker, m.decode_greeting):
        try:
            message = decode(raw)
        except ProtocolViolation:
            continue
        assert isinstance(message, msgspec.Struct)


@given(st.sampled_from(FROM_WORKER), st.data())
def test_damaged_messages_are_a_message_or_refused(message: m.FromWorker, data: st.DataObject) -> None:
    raw = bytearray(m.encode_message(message))
    raw[data.draw(st.integers(0, len(raw) - 1))] = data.draw(st.integers(0, 255))
    try:
        decoded = m.decode_from_worker(raw)
    except ProtocolViolation:
        return
    assert isinstance(decoded, msgspec.Struct)


@pytest.mark.parametrize(
    "fields",
    [
        {"type": "ready", "generation": -1},
        {"type": "ready", "generation": 1 << 63},
        {"type": "ready", "generation": "1"},
        {"type": "ready"},
        {"type": "failed", "generation": 1, "failure": {"kind": "it was silent", "reason": "x", "detail": ""}},
        {"type": "nobody"},
        [1, 2],
    ],
    ids=str,
)
def test_fields_out_of_bounds_are_refused(fields: object) -> None:
    with pytest.raises(ProtocolViolation, match="malformed"):
        m.decode_from_worker(msgspec.msgpack.encode(fields))


AT = {"vertex": "v", "index": 0}
LONG = {"vertex": "v" * 2_000, "index": 0}
BELOW = {"vertex": "v", "index": -1}
DECLINED = {"generation": 1, "checkpoint": 1, "subtask": AT, "reason": AbortReason.EXPIRED.value}
ENDED = {"subtask": AT, "started_round": 0, "highest_round": 0}
RETURNED = {"subtask": AT, "number": 1, "count": 0, "highest_round": 0}
ENTRY_FIELDS = {"subtask": AT, "parts": []}
ACKNOWLEDGED = {"generation": 1, "checkpoint": 1, "entry": ENTRY_FIELDS}


@pytest.mark.parametrize(
    ("kind", "event", "wrong"),
    [
        ("finished", {"generation": 1, "subtask": AT}, [{"generation": -1}, {"subtask": LONG}, {"subtask": BELOW}]),
        (
            "decline",
            DECLINED,
            [{"generation": 1 << 63}, {"checkpoint": -1}, {"subtask": LONG}, {"reason": "no"}, {"reason": None}],
        ),
        (
            "acknowledge",
            ACKNOWLEDGED,
            [
                {"generation": -1},
                {"checkpoint": 1 << 63},
                {"checkpoint": "1"},
                {"entry": None},
                {"entry": ENTRY_FIELDS | {"subtask": LONG}},
                {"entry": ENTRY_FIELDS | {"subtask": BELOW}},
            ],
        ),
        (
            "entrance-ended",
            ENDED,
            [{"started_round": -2}, {"highest_round": 1 << 30}, {"subtask": LONG}, {"subtask": "v[0]"}],
        ),
        (
            "probe-returned",
            RETURNED,
            [{"number": -1}, {"count": -1}, {"count": 1 << 63}, {"highest_round": -2}, {"subtask": BELOW}],
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_an_event_of_a_machine_is_as_bounded_as_any_field(
    kind: str, event: dict[str, object], wrong: list[dict[str, object]]
) -> None:
    raw = msgspec.msgpack.encode({"type": kind, "generation": 1, "event": event})
    m.decode_from_worker(raw)
    for fields in wrong:
        with pytest.raises(ProtocolViolation, match="malformed"):
            m.decode_from_worker(msgspec.msgpack.encode({"type": kind, "generation": 1, "event": event | fields}))


@pytest.mark.parametrize("wrong", [{}, {"number": -1}, {"round_": -2}, {"round_": 1 << 30}, {"is_closing": 1}], ids=str)
def test_a_probe_is_as_bounded_as_any_field(wrong: dict[str, object]) -> None:
    probe = {"number": 1, "round_": 0} | wrong
    raw = msgspec.msgpack.encode({"type": "start-probe", "generation": 1, "nest": "loop", "probe": probe})
    if not wrong:
        assert m.decode_to_worker(raw) == m.StartProbe(1, "loop", loop_prober.Probe(1, 0))
        return
    with pytest.raises(ProtocolViolation, match="malformed"):
        m.decode_to_worker(raw)


def test_nesting_without_end_is_refused() -> None:
    raw = msgspec.msgpack.encode({"type": "heartbeat"})
    deep = b"\x82" + raw[1:] + b"\xa1x" + b"\x91" * 100_000
    with pytest.raises(ProtocolViolation, match="malformed"):
        m.decode_from_worker(deep)


def test_lengths_that_lie_allocate_nothing() -> None:
    with pytest.raises(ProtocolViolation, match="malformed"):
        m.decode_from_worker(b"\xdf\xff\xff\xff\xff")
    with pytest.raises(ProtocolViolation, match="malformed"):
        m.decode_from_worker(b"\x81\xa4type\xdb\xff\xff\xff\xffabc")


def test_long_texts_of_a_failure_are_cut_so_that_it_can_be_reported() -> None:
    message = m.failed(Generation(1), Failure(FailureKind.LOST, "r" * 100_000, "t" * 99_999 + "end"))
    received = m.decode_from_worker(m.encode_message(message))
    assert isinstance(received, m.Failed)
    assert received.failure.kind is FailureKind.LOST
    assert len(received.failure.reason) == TEXT_CHARS_MAX
    assert len(received.failure.detail) == TEXT_CHARS_MAX
    assert received.failure.detail.endswith("end")


def test_a_message_beyond_the_limit_is_not_sent() -> None:
    entry = SubtaskEntry(ENTRY.subtask, (SnapshotPart(0, 0, "", bytes(m.MESSAGE_BYTES_MAX)),))
    with pytest.raises(ProtocolViolation, match="Acknowledge takes"):
        m.encode_message(m.Acknowledge(Acknowledged(Generation(1), CheckpointId(1), entry)))


def test_a_number_beyond_64_bits_is_not_sent() -> None:
    with pytest.raises(ProtocolViolation, match="cannot encode TriggerCheckpoint"):
        m.encode_message(m.TriggerCheckpoint(1, 1 << 64))
