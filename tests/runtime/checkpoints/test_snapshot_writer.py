"""The snapshot writer: order, retries, and storage faults in any operation of any kind of state."""

from __future__ import annotations

import dataclasses
import itertools
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest
from tests.conftest import IS_DEEP
from tests.runtime.checkpoints.frozen_cases import CASES, Live, joined, small
from tests.runtime.checkpoints.frozen_cases import made as made_faults
from tests.storage.faulty import Fault, FaultKind, FaultyStorage

from headgate.codec.snapshot import UNION_PREFIX, Buffer, output_path
from headgate.connectors.base import SealedTransaction
from headgate.environment import ThreadEnded
from headgate.errors import CorruptionError, StorageError, UsageError
from headgate.model.ids import CheckpointId, Generation, SubtaskId, VertexId
from headgate.model.manifest import KeyGroups, Manifest, Place, SnapshotPart, SubtaskEntry
from headgate.protocol.subtasks.subtask import SnapshotFailed, SnapshotWritten
from headgate.runtime.checkpoints import snapshot_writer
from headgate.runtime.checkpoints.log import CheckpointLog
from headgate.runtime.checkpoints.snapshot_files import SnapshotFiles, read_part
from headgate.runtime.checkpoints.snapshot_writer import (
    SavepointPart,
    SnapshotDestination,
    SnapshotWriter,
    SubtaskSnapshot,
)
from headgate.state.rocksdb import database_snapshot
from headgate.state.snapshot import FrozenState, OwnedKeys, StoredFiles
from headgate.state.worker_backends import portable_rows
from headgate.storage.base import Bytes
from headgate.storage.memory import MemoryStorage


class Sealed(SealedTransaction):
    """A transaction whose ``prepare`` first raises the given errors."""

    def __init__(
        self,
        payload: bytes | None,
        *errors: BaseException,
        gate: threading.Event | None = None,
        pieces: Sequence[bytes] = (),
    ) -> None:
        self._payload, self._errors, self._gate, self._pieces = payload, list(errors), gate, pieces
        self.entered = threading.Event()

    @property
    def pieces_count(self) -> int:
        return len(self._pieces)

    def piece(self, index: int) -> bytes:
        return self._pieces[index]

    def prepare(self) -> bytes | None:
        self.entered.set()
        if self._gate is not None:
            assert self._gate.wait(120)
        if self._errors:
            raise self._errors.pop(0)
        return self._payload


class Uploads:
    """A writer with one pool thread; ``events`` are what it reported."""

    def __init__(self) -> None:
        self.storage = FaultyStorage(MemoryStorage())
        self.events: list[SnapshotWritten | SnapshotFailed] = []
        self.texts: list[str] = []
        self.on_report: Callable[[], object] = bool
        self.errors: list[BaseException] = []
        self._pool = ThreadPoolExecutor(1)
        to = SnapshotDestination(self.storage, "p", Generation(2), 0)
        self.writer = SnapshotWriter(SubtaskId(VertexId("v"), 1), to, self._pool, self._report, self.errors.append)

    def _report(self, event: SnapshotWritten | SnapshotFailed, text: str) -> None:
        self.events.append(event)
        self.texts.append(text)
        self.on_report()

    def start(
        self,
        checkpoint: int,
        sealed: Sealed | None = None,
        states: Mapping[str, FrozenState] = MappingProxyType({}),
        savepoint: SavepointPart | None = None,
        lists: Mapping[tuple[str, str], FrozenState] = MappingProxyType({}),
    ) -> None:
        transactions = [] if sealed is None else [("out", sealed)]
        plain = {"flag": b"x"}
        self.writer.start(
            SubtaskSnapshot(CheckpointId(checkpoint), states, plain, transactions, lists, savepoint=savepoint)
        )

    def finish(self) -> list[tuple[int, list[int] | None]]:
        """Return ``(checkpoint, checkpoints of its committables; None for a failure)``."""
        self._pool.shutdown()
        return [
            (e.checkpoint, [c.checkpoint for c in e.entry.committables] if isinstance(e, SnapshotWritten) else None)
            for e in self.events
        ]


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> Uploads:
    monkeypatch.setattr(snapshot_writer, "RETRY_PAUSES_S", (0.0, 0.0))
    return Uploads()


def test_snapshots_are_written_in_order_and_carry_their_own_output(made: Uploads) -> None:
    for checkpoint in (1, 2, 3):
        made.start(checkpoint, Sealed(b"rows" if checkpoint != 2 else None))
    assert made.finish() == [(1, [1]), (2, []), (3, [3])]
    assert made.errors == []


def test_transient_faults_are_retried(made: Uploads) -> None:
    made.storage.inject(Fault(FaultKind.NO_SPACE, operation="put"))
    made.start(1, Sealed(b"rows", StorageError("prepare", "x", "busy"), StorageError("prepare", "x", "busy")))
    assert made.finish() == [(1, [1])]


def test_a_fault_that_waiting_cannot_mend_is_reported_at_once(made: Uploads) -> None:
    made.start(1, Sealed(b"rows", StorageError("prepare", "x", "denied", is_transient=False)))
    made.start(2)
    assert made.finish() == [(1, None), (2, [1])]
    assert "denied" in made.texts[0]


def test_a_state_that_cannot_be_written_leaves_prepared_output_to_the_next_snapshot(made: Uploads) -> None:
    made.storage.inject(Fault(FaultKind.NO_SPACE, operation="put", path_part="chk-0000000001", times=9))
    made.start(1, Sealed(b"rows"))
    made.start(2, Sealed(b"more"))
    assert made.finish() == [(1, None), (2, [1, 2])]


def test_a_cancelled_write_reports_nothing_and_leaves_its_output_to_the_next_one(made: Uploads) -> None:
    gate = threading.Event()
    first = Sealed(b"a", gate=gate)
    made.start(1, first)
    assert first.entered.wait(120)
    made.start(2, Sealed(b"b"))
    made.start(3, Sealed(b"c"))
    made.writer.cancel(CheckpointId(1))
    made.writer.cancel(CheckpointId(2))
    gate.set()
    assert made.finish() == [(3, [1, 2, 3])]
    assert [path for operation, path in made.storage.calls if operation == "put"] == ["p/chk-0000000003/v-1.g2"]


def test_cancelled_ids_are_forgotten(made: Uploads) -> None:
    for checkpoint in range(1, 50):
        made.writer.cancel(CheckpointId(checkpoint))
    made.start(50)
    assert made.finish() == [(50, [])]
    assert made.writer._cancelled == set()


def test_what_no_checkpoint_can_survive_is_handed_on(made: Uploads) -> None:
    bug = ValueError("a bug")
    made.start(1, Sealed(b"x", bug))
    assert made.finish() == []
    assert made.errors == [bug]


def test_a_thread_that_ends_writes_no_other_snapshot_and_reports_nothing(made: Uploads) -> None:
    made.start(1, Sealed(b"x", ThreadEnded()))  # type: ignore[arg-type]
    made.start(2)
    assert made.finish() == []
    assert made.errors == []


def test_operator_lists_are_written_beside_states_of_keys(made: Uploads) -> None:
    frozen, lists = made_faults("reduce").freeze(), made_faults("operator-lists").freeze()
    expected = {"state/node": joined(frozen.encode()), "union/node": joined(lists.encode())}
    made.start(1, states={"node": frozen}, lists={(UNION_PREFIX, "node"): lists})
    assert made.finish() == [(1, [])]
    (event,) = made.events
    assert isinstance(event, SnapshotWritten)
    found = {part.section: bytes(read_part(made.storage, "p", part)) for part in event.entry.parts}
    assert {section: found[section] for section in expected} == expected
    assert lists.is_released


@pytest.mark.parametrize(
    "said", [CorruptionError("transaction 't'", 0, "one to prepare", "committed"), UsageError("the stream is sealed")]
)
def test_output_that_the_target_refuses_is_never_left_to_the_next_snapshot(made: Uploads, said: Exception) -> None:
    made.start(1, Sealed(b"1", said))
    assert made.finish() == []
    (error,) = made.errors
    assert isinstance(error, snapshot_writer.PrepareRefused)
    assert str(error).startswith(f"sink 'out' cannot prepare the output of checkpoint 1: {said}; starting again cannot")


def test_pieces_are_written_once_each_and_large_output_is_a_file(
    made: Uploads, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(snapshot_writer, "PAYLOAD_BYTES_MAX", 4)
    made.storage.inject(Fault(FaultKind.NO_SPACE, operation="put", first=2, times=3))  # the second piece
    made.start(1, Sealed(b"rows", pieces=[b"piece 1", b"piece 2"]))
    made.start(2, Sealed(b"large"))
    made.start(3, Sealed(b"tiny"))
    assert made.finish() == [(1, None), (2, [1, 2]), (3, [3])]
    (first, large), (tiny,) = (e.entry.committables for e in made.events if isinstance(e, SnapshotWritten))
    assert (first.payload, tiny.payload, tiny.stored, large.payload) == (b"rows", b"tiny", None, b"")
    assert [bytes(read_part(made.storage, "p", piece)) for piece in first.pieces] == [b"piece 1", b"piece 2"]
    assert large.stored is not None
    assert read_part(made.storage, "p", large.stored) == b"large"
    paths = [*(piece.path for piece in first.pieces), large.stored.path]
    puts = [path for operation, path in made.storage.calls if operation == "put"]
    assert [puts.count(f"p/{path}") for path in paths] == [1, 4, 1], "the second piece was tried again"
    assert large.pieces == tiny.pieces == ()
    numbers = ((1, 1), (1, 2), (2, 3))
    subtask = SubtaskId(VertexId("v"), 1)
    assert paths == [output_path(CheckpointId(of), subtask, Generation(2), number) for of, number in numbers]


def test_a_state_is_released_before_its_snapshot_is_reported(made: Uploads) -> None:
    frozen = made_faults("reduce").freeze()
    seen: list[bool] = []
    made.on_report = lambda: seen.append(frozen.is_released)
    made.start(1, states={"node": frozen})
    assert made.finish() == [(1, [])]
    assert seen == [True], "the next barrier may come at once, and finds the state in one piece"


def test_a_savepoint_is_a_copy_and_what_is_wrong_there_is_wrong_there_alone(  # SV1, SV7
    made: Uploads, tmp_path: Path
) -> None:
    frozen = made_faults("reduce").freeze()
    expected = joined(frozen.encode())
    place = Place(str(tmp_path / "there"), "files-0")
    made.start(1, states={"node": frozen}, savepoint=SavepointPart(place.text, {"end": b"y"}))
    (tmp_path / "file").touch()
    made.start(2, savepoint=SavepointPart(Place(str(tmp_path / "file"), "files-1").text, {}))
    made.start(3)
    assert made.finish() == [(1, []), (2, []), (3, [])]
    first, second, third = (e.copied for e in made.events if isinstance(e, SnapshotWritten))
    assert first is not None
    assert first.problem == ""
    sections = SnapshotFiles(MemoryStorage("else"), "p").sections(SubtaskEntry(SUBTASK, first.parts), place)
    assert {name: [bytes(part) for part in parts] for name, parts in sections.items()} == {
        "end": [b"y"],
        "state/node": [expected],
    }
    assert second is not None
    assert second.parts == ()
    assert "file" in second.problem
    assert third is None


def test_closing_gives_up_waiting_for_retries(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(snapshot_writer, "RETRY_PAUSES_S", (1_000.0,))
    made = Uploads()
    sealed = Sealed(b"x", StorageError("prepare", "x", "busy"))
    made.start(1, sealed)
    assert sealed.entered.wait(120)
    made.writer.close()
    assert made.finish() == [(1, None)]


# -- a storage fault in any operation of any kind of state -----


FAULTS = [kind for kind in FaultKind if kind is not FaultKind.SLOW]
SUBTASK = SubtaskId(VertexId("v"), 0)


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(snapshot_writer, "RETRY_PAUSES_S", (0.0, 0.0, 0.0))
    with small():
        yield


class BusyStorage(FaultyStorage):
    """While anything is written, processing goes on."""

    live: Live | None = None

    def put(self, path: str, parts: Sequence[Bytes]) -> None:
        if self.live is not None:
            self.live.change()
        super().put(path, parts)


class Observed(FrozenState):
    """A frozen state that counts; its encoding may fail ``failures`` times, half way or before."""

    def __init__(self, inner: FrozenState, failures: int = 0) -> None:
        super().__init__()
        self.inner, self.failures = inner, failures
        self.encoded = self.forgotten = 0

    def _rows(self) -> Any:
        return self.inner.rows()

    def _encode(self) -> Sequence[Buffer]:
        self.encoded += 1
        found = self.inner.encode()
        if self.encoded <= self.failures:
            raise StorageError("encode", "spill file", "injected")
        return found

    def _forget(self) -> None:
        self.forgotten += 1
        self.inner.release()


class Writing:
    """A snapshot writer on faulty storage; ``events`` are its reports."""

    def __init__(self, keys: OwnedKeys | None = None) -> None:
        """``keys``: of whoever writes files of a database."""
        self.storage = BusyStorage(MemoryStorage())
        self.events: list[SnapshotWritten | SnapshotFailed] = []
        self.errors: list[BaseException] = []
        self._pool = ThreadPoolExecutor(1)
        to = SnapshotDestination(self.storage, "p", Generation(1), 0, keys)
        self.writer = SnapshotWriter(SUBTASK, to, self._pool, lambda e, _: self.events.append(e), self.errors.append)

    def start(self, checkpoint: int, state: FrozenState, sealed: Sequence[Any] = ()) -> None:
        self.writer.start(SubtaskSnapshot(CheckpointId(checkpoint), {"node": state}, {"flag": b"x"}, sealed))

    def wait(self) -> None:
        """Wait until everything that was started is written."""
        self._pool.submit(int).result()

    def finish(self) -> list[SnapshotWritten | SnapshotFailed]:
        self._pool.shutdown()
        assert self.errors == []
        return self.events

    def state_of(self, event: SnapshotWritten | SnapshotFailed) -> bytes:
        return b"".join(read_part(self.storage, "p", part) for part in state_parts(event))


def state_parts(event: SnapshotWritten | SnapshotFailed) -> list[SnapshotPart]:
    assert isinstance(event, SnapshotWritten)
    return [part for part in event.entry.parts if part.section == "state/node"]


def check_written(name: str, faults: Sequence[Fault], failures: int = 0) -> list[tuple[str, str]]:
    """Write the state of ``name`` under ``faults``; return the storage operations that it took."""
    live, writing = made_faults(name), Writing()
    frozen = Observed(live.freeze(), failures)
    expected, rows = joined(frozen.inner.encode()), dict(frozen.inner.rows())
    contents = live.contents(expected)
    assert contents
    writing.storage.live = live
    for fault in faults:
        writing.storage.inject(fault)
    writing.start(7, frozen)
    (event,) = writing.finish()
    calls = list(writing.storage.calls)
    writing.storage.heal()
    assert live.contents(writing.state_of(event)) == contents
    assert isinstance(event, SnapshotWritten)
    assert event.entry.rows == {"node": rows}
    assert frozen.forgotten == 1
    live.change()
    assert not live.is_holding()
    return calls


@pytest.mark.parametrize("name", CASES)
def test_a_transient_fault_in_any_storage_operation_changes_nothing_of_the_state(name: str) -> None:
    operations = check_written(name, [])
    assert operations
    for number, (place, kind), times in itertools.product(range(1, len(operations) + 1), enumerate(FAULTS), (1, 3)):
        if not IS_DEEP and (times == 1) is bool((number + place) % 2):
            continue
        repeated = check_written(name, [Fault(kind, first=number, times=times)])
        assert len(repeated) == len(operations) + times


@pytest.mark.parametrize("name", CASES)
def test_a_state_whose_encoding_failed_is_encoded_again(name: str) -> None:
    check_written(name, [], failures=3)


FILES = [f"rocksdb-{name}" for name in ("by-row-list", "by-batch-map", "reduce")]
"""State in a database that is written as its files, once they are large enough."""


def check_files_written(name: str, faults: Sequence[Fault], monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, str]]:
    """Write the files of ``name`` under ``faults``, behind a checkpoint that has some of them."""
    monkeypatch.setattr(database_snapshot, "SIZE_BYTES_MIN", 0)
    groups = KeyGroups(0, 128)
    live, writing = made_faults(name), Writing(OwnedKeys(groups, groups.count))
    writing.start(1, live.freeze())
    writing.wait()
    writing.writer.completed(CheckpointId(1))
    live.change()
    frozen = live.freeze()
    contents, rows = live.contents(joined(frozen.encode())), dict(frozen.rows())
    before = len(writing.storage.calls)
    writing.storage.live = live
    for fault in faults:
        writing.storage.inject(fault)
    writing.start(7, frozen)
    _, event = writing.finish()
    calls = list(writing.storage.calls)[before:]
    writing.storage.heal()
    assert isinstance(event, SnapshotWritten)
    assert frozen.is_released
    parts = [part for part in event.entry.parts if part.section == "files/node"]
    own = [part for part in parts if part.path.startswith("chk-0000000007")]
    assert len(own) < len(parts), "some are shared"
    assert event.entry.rows == {"node": rows}
    stored = StoredFiles(parts, partial(read_part, writing.storage, "p"), "files of 'node'", "p")
    (read,) = portable_rows(stored, None, groups)
    assert live.contents(bytes(read())) == contents
    return calls


@pytest.mark.parametrize("name", FILES)
def test_a_transient_fault_in_any_storage_operation_changes_nothing_of_files(  # SF15
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    operations = check_files_written(name, [], monkeypatch)
    assert len(operations) > 1, "a file, and what all of them are"
    for number, kind in itertools.product(range(1, len(operations) + 1), FAULTS):
        repeated = check_files_written(name, [Fault(kind, first=number, times=1)], monkeypatch)
        assert len(repeated) > len(operations)


def test_files_that_fail_several_times_are_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    for kind in FAULTS:
        check_files_written("rocksdb-reduce", [Fault(kind, first=2, times=3)], monkeypatch)


@pytest.mark.parametrize("name", CASES)
def test_a_state_that_cannot_be_written_is_given_up_and_the_next_one_is_whole(name: str) -> None:
    live, writing = made_faults(name), Writing()
    first = Observed(live.freeze())
    live.change()
    writing.storage.inject(Fault(FaultKind.NO_SPACE, path_part="chk-0000000001", times=100))
    second = Observed(live.freeze())
    expected = joined(second.inner.encode())
    writing.storage.live = live
    writing.start(1, first)
    writing.start(2, second)
    failed, written = writing.finish()
    assert failed == SnapshotFailed(CheckpointId(1))
    assert live.contents(writing.state_of(written)) == live.contents(expected)
    assert (first.forgotten, second.forgotten) == (1, 1)
    live.change()
    assert not live.is_holding()


class Refusing:
    """Sealed output that cannot be prepared."""

    def __init__(self, error: Exception) -> None:
        self.error = error

    def prepare(self) -> bytes:
        raise self.error


@pytest.mark.parametrize("error", [StorageError("prepare", "x", "denied", is_transient=False), ValueError("a bug")])
def test_a_state_is_released_whatever_ends_its_write(error: Exception) -> None:
    live, writing = made_faults("reduce"), Writing()
    frozen = Observed(live.freeze())
    writing.start(1, frozen, [("out", Refusing(error))])
    writing._pool.shutdown()
    assert (frozen.encoded, frozen.forgotten) == (0, 1)


def test_a_cancelled_write_releases_its_state_without_encoding_it() -> None:
    live, writing = made_faults("reduce"), Writing()
    frozen = [Observed(live.freeze()) for _ in range(3)]
    writing.writer.cancel(CheckpointId(1))
    writing.writer.cancel(CheckpointId(2))
    for checkpoint, state in enumerate(frozen, 1):
        writing.start(checkpoint, state)
    (event,) = writing.finish()
    assert event.checkpoint == 3
    assert [(state.encoded, state.forgotten) for state in frozen] == [(0, 1), (0, 1), (1, 1)]


class Losing(FrozenState):
    """Encodes another state than it froze, as one that was released half way would."""

    def __init__(self, inner: FrozenState, other: FrozenState) -> None:
        super().__init__()
        self.inner, self.other = inner, other

    def _rows(self) -> Any:
        return self.inner.rows()

    def _encode(self) -> Sequence[Buffer]:
        return self.other.encode()

    def _forget(self) -> None: ...


@pytest.mark.parametrize("name", [name for name in CASES if name != "with-timestamps"])
def test_a_snapshot_with_other_rows_than_were_frozen_is_not_acknowledged(name: str) -> None:
    writing = Writing()
    writing.start(1, Losing(made_faults(name).freeze(), CASES[name]().freeze()))
    writing._pool.shutdown()
    assert writing.events == []
    assert [path for operation, path in writing.storage.calls if operation == "put"] == []
    assert "of operator 'node' must have" in str(writing.errors[0])
    assert "but has" in str(writing.errors[0])


def written(name: str) -> tuple[Writing, SnapshotWritten]:
    writing = Writing()
    writing.start(1, made_faults(name).freeze())
    (event,) = writing.finish()
    assert isinstance(event, SnapshotWritten)
    return writing, event


@pytest.mark.parametrize("name", CASES)
def test_a_restore_that_finds_other_rows_than_the_manifest_says_refuses(name: str) -> None:
    writing, event = written(name)
    part = state_parts(event)[0]
    assert part.rows is not None
    state, rows = next(iter(part.rows["node"].items()))
    for said in (rows - 1, rows + 1):
        lying = dataclasses.replace(part, rows={"node": {**part.rows["node"], state: said}})
        with pytest.raises(CorruptionError) as caught:
            read_part(writing.storage, "p", lying)
        assert str(caught.value) == (
            f"p/{lying.path} is damaged at byte 0: expected {said} rows of state '{state}' of operator 'node', "
            f"as its manifest says, found {rows} rows"
        )
        manifest = Manifest(CheckpointId(1), Generation(1), 1, 128, (SubtaskEntry(SUBTASK, (lying,)),))
        (damage,) = CheckpointLog(writing.storage, "p").files.verify(manifest)
        assert f"expected {said} rows" in damage.problem


def test_a_restore_without_an_operator_that_the_manifest_names_refuses() -> None:
    writing, event = written("reduce")
    lying = dataclasses.replace(state_parts(event)[0], rows={"gone": {"accumulators": 3}})
    with pytest.raises(CorruptionError, match="expected 3 rows of state 'accumulators' of operator 'gone'"):
        read_part(writing.storage, "p", lying)


def test_a_snapshot_of_version_0_1_has_no_rows_in_its_manifest_and_restores() -> None:
    writing, event = written("reduce")
    part = state_parts(event)[0]
    old = dataclasses.replace(part, rows=None)
    assert read_part(writing.storage, "p", old) == read_part(writing.storage, "p", part)
