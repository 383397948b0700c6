"""Sinks that users write: two for SQLite pass the conformance kit, and what the base classes promise."""

from __future__ import annotations

import itertools
import sqlite3
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from tests.conftest import IS_DEEP
from tests.support import sqlite_sinks
from tests.support.sqlite_sinks import SqliteLedgerSink, SqliteSink, connect

import headgate as hg
from headgate.connectors.base import SinkContext
from headgate.connectors.fenced_sink import OutputName
from headgate.model.ids import CheckpointId, Generation
from headgate.model.manifest import Committable
from headgate.protocol.checkpoints.commit import CommitPermit
from headgate.testing.sink_kit import check_sink
from headgate.testing.sinks.fake_pipeline import SCHEMA, Target

Kind = Callable[[str], Any]


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """No power is cut here, so nothing has to reach the disk."""
    monkeypatch.setattr(sqlite_sinks, "TABLES", f"pragma synchronous = off; {sqlite_sinks.TABLES}")


each = pytest.mark.parametrize("kind", [SqliteSink, SqliteLedgerSink], ids=["two phases", "ledger"])


def rows_in(path: str) -> list[dict[str, Any]]:
    with connect(path) as target:
        return [{"number": n, "text": t} for n, t in target.execute("select number, text from numbers")]


def waiting_in(path: str) -> list[str]:
    with connect(path) as target:
        return [name for (name,) in target.execute("select distinct name from waiting")]


def lose_waiting(path: str) -> None:
    with connect(path) as target:
        target.execute("delete from waiting")


def target_at(path: Path, kind: Kind) -> Target:
    file = str(path)
    loses = (lambda: lose_waiting(file)) if kind is SqliteSink else None
    return Target(kind(file), lambda: rows_in(file), lambda: waiting_in(file), loses, is_ordered=True)


@pytest.mark.long
@pytest.mark.usefixtures("some_interruptions")
@each
def test_the_sinks_of_the_guide_pass_the_conformance_kit(tmp_path: Path, kind: Kind) -> None:  # CS5
    numbers = itertools.count()
    rescales, rows = (((1, 1), (1, 2), (3, 2)), (0, 1, 12)) if IS_DEEP else (((3, 2),), (1,))
    check_sink(lambda: target_at(tmp_path / f"{next(numbers)}.db", kind), rescales=rescales, rows=rows)


def context(subtask: int = 0, generation: int = 1) -> SinkContext:
    return SinkContext("p", "out", subtask, 2, Generation(generation), SCHEMA)


def batch(*numbers: int) -> pa.RecordBatch:
    return pa.record_batch([list(numbers), [str(n) for n in numbers]], schema=SCHEMA)


def prepared(sink: Any, checkpoint: int, *numbers: int, subtask: int = 0, generation: int = 1) -> Committable:
    writer = sink.open(context(subtask, generation))
    writer.write(batch(*numbers))
    payload = writer.seal(CheckpointId(checkpoint)).prepare()
    assert payload is not None
    writer.close()
    return Committable("out", CheckpointId(checkpoint), subtask, Generation(generation), payload)


def committer(sink: Any, generation: int, keep: list[Committable]) -> Any:
    found = sink.open_committer("p", "out", Generation(generation))
    found.recover(keep)
    return found


def permit(checkpoint: int, generation: int = 1) -> CommitPermit:
    return CommitPermit(CheckpointId(checkpoint), Generation(generation))


@each
def test_output_beyond_the_permit_is_refused(tmp_path: Path, kind: Kind) -> None:
    sink = kind(str(tmp_path / "t.db"))
    newer = prepared(sink, 5, 1)
    with pytest.raises(hg.UsageError, match="checkpoint 5 must not be"):
        committer(sink, 1, [newer]).commit(permit(4), [newer])
    assert rows_in(sink.path) == []


@each
def test_a_checkpoint_without_records_begins_nothing(tmp_path: Path, kind: Kind) -> None:
    sink = kind(str(tmp_path / "t.db"))
    writer = sink.open(context())
    writer.write(batch())
    assert writer.seal(CheckpointId(1)).prepare() is None
    assert waiting_in(sink.path) == []


@each
def test_what_may_pass_is_tried_again_and_what_is_a_bug_is_not(tmp_path: Path, kind: Kind) -> None:  # CS5
    sink = kind(str(tmp_path / "t.db"))
    one = prepared(sink, 1, 7)
    begun = committer(sink, 1, [one])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            sink, "publish" if kind is SqliteLedgerSink else "commit", raises(sqlite3.OperationalError("locked"))
        )
        with pytest.raises(hg.StorageError, match="OperationalError: locked") as caught:
            begun.commit(permit(1), [one])
        assert caught.value.is_transient
        patch.setattr(sink, "publish" if kind is SqliteLedgerSink else "commit", raises(TypeError("a bug")))
        with pytest.raises(TypeError, match="a bug"):
            begun.commit(permit(1), [one])
    begun.commit(permit(1), [one])
    assert rows_in(sink.path) == [{"number": 7, "text": "7"}]


def raises(error: Exception) -> Callable[..., None]:
    def call(*_: object) -> None:
        raise error

    return call


def test_what_an_heir_prepared_is_not_aborted(tmp_path: Path) -> None:
    sink = SqliteSink(str(tmp_path / "t.db"))
    old = sink.open_committer("p", "out", Generation(1))
    prepared(sink, 3, 1, generation=2)
    old.recover([])
    assert len(waiting_in(sink.path)) == 1


def test_a_driver_that_is_replaced_in_its_recovery_aborts_nothing(tmp_path: Path) -> None:
    sink = SqliteSink(str(tmp_path / "t.db"))
    prepared(sink, 3, 1)
    listed = sink.prepared
    with pytest.MonkeyPatch.context() as patch:

        def replaced_meanwhile(owner: str) -> list[str]:
            names = list(listed(owner))
            sink.claim(hg.Fence(owner, 3))  # who keeps what is there
            return names

        patch.setattr(sink, "prepared", replaced_meanwhile)
        with pytest.raises(hg.FencedError):
            sink.open_committer("p", "out", Generation(2)).recover([])
    assert len(waiting_in(sink.path)) == 1


def test_another_sink_of_the_target_is_left_alone(tmp_path: Path) -> None:
    sink = SqliteSink(str(tmp_path / "t.db"))
    writer = sink.open(SinkContext("p", "out2", 0, 1, Generation(1), SCHEMA))
    writer.write(batch(1))
    writer.seal(CheckpointId(1)).prepare()
    committer(sink, 5, [])
    assert len(waiting_in(sink.path)) == 1


def test_a_ledger_forgets_what_nobody_asks_for(tmp_path: Path) -> None:
    sink = SqliteLedgerSink(str(tmp_path / "t.db"))
    begun = committer(sink, 1, [])
    outputs = [prepared(sink, checkpoint, checkpoint) for checkpoint in (1, 2, 3)]
    begun.commit(permit(3), outputs)
    begun.forget(CheckpointId(3), list)
    with connect(sink.path) as target:
        left = [hg.output_checkpoint(name) for (name,) in target.execute("select name from ledger")]
    assert left == [3]
    assert [row["number"] for row in rows_in(sink.path)] == [1, 2, 3]


def ledger_of(path: str) -> list[str]:
    with connect(path) as target:
        return sorted(name for (name,) in target.execute("select name from ledger"))


def numbers_of(names: list[str]) -> list[tuple[int, int]]:
    """Generation and number of each."""
    parts = [OutputName.parse(name) for name in names]
    return sorted((part.generation, part.number) for part in parts if part is not None)


def committed_one_by_one(sink: Any, generation: int, *checkpoints: int) -> tuple[Any, list[Committable]]:
    """A generation that commits a transaction with each checkpoint."""
    writer = sink.open(context(generation=generation))
    begun = committer(sink, generation, [])
    outputs = []
    for checkpoint in checkpoints:
        writer.write(batch(checkpoint))
        payload = writer.seal(CheckpointId(checkpoint)).prepare()
        outputs.append(Committable("out", CheckpointId(checkpoint), 0, Generation(generation), payload))
        begun.commit(permit(checkpoint, generation), outputs[-1:])
    return begun, outputs


def test_a_sink_of_two_phases_forgets_what_no_retained_checkpoint_promises(tmp_path: Path) -> None:  # K20
    sink = SqliteSink(str(tmp_path / "t.db"))
    _, former = committed_one_by_one(sink, 1, 1, 2, 3)
    begun, mine = committed_one_by_one(sink, 2, 4, 5, 6)
    begun.forget(CheckpointId(3), lambda: [former[2], *mine[:1]])
    assert numbers_of(ledger_of(sink.path)) == [(1, 3), (2, 1), (2, 2), (2, 3)], "5 and 6 completed meanwhile"
    begun.forget(CheckpointId(6), lambda: mine[2:])
    begun.forget(CheckpointId(6), lambda: mine[2:])
    assert numbers_of(ledger_of(sink.path)) == [(2, 3)]
    begun.commit(permit(6, 2), mine[2:])
    assert [row["number"] for row in rows_in(sink.path)] == [1, 2, 3, 4, 5, 6]


def test_what_an_heir_has_committed_is_not_forgotten_by_whom_it_replaced(tmp_path: Path) -> None:
    """The dead driver completed a checkpoint after it had looked what is promised; its heir committed that."""
    sink = SqliteSink(str(tmp_path / "t.db"))
    old, outputs = committed_one_by_one(sink, 1, 1, 2)
    late = prepared(sink, 3, 3, subtask=1)
    heir = committer(sink, 2, [outputs[1], late])
    heir.commit(permit(3, 2), [outputs[1], late])
    prepared_by_heir = prepared(sink, 4, 4, generation=2)
    heir.commit(permit(4, 2), [prepared_by_heir])
    old.forget(CheckpointId(2), lambda: outputs[1:])
    assert numbers_of(ledger_of(sink.path)) == [(1, 1), (1, 2), (2, 1)]
    committer(sink, 3, [outputs[1], late]).commit(permit(3, 3), [outputs[1], late])


def test_other_sinks_at_the_target_forget_for_themselves(tmp_path: Path) -> None:
    sink = SqliteSink(str(tmp_path / "t.db"))
    committed_one_by_one(sink, 1, 1)
    another = sink.open_committer("p", "out2", Generation(5))
    another.recover([])
    another.forget(CheckpointId(9), list)
    assert len(ledger_of(sink.path)) == 1


class ListsOnly(SqliteSink):
    forget = hg.TwoPhaseSink.forget  # type: ignore[assignment]


class ForgetsOnly(SqliteSink):
    committed = hg.TwoPhaseSink.committed  # type: ignore[assignment]


@pytest.mark.parametrize(
    ("kind", "there", "missing"), [(ListsOnly, "committed", "forget"), (ForgetsOnly, "forget", "committed")]
)
def test_a_sink_with_half_of_what_forgetting_takes_is_told_so(
    tmp_path: Path, kind: Kind, there: str, missing: str
) -> None:
    with pytest.raises(hg.UsageError, match=f"{kind.__name__} has a method {there}, but not {missing}"):  # type: ignore[attr-defined]
        kind(str(tmp_path / "t.db")).open_committer("p", "out", Generation(1))


def test_names_say_what_they_are_and_nothing_else_is_one() -> None:
    name = OutputName("p:out", 7, 2, 12)
    assert str(name) == "p:out-0000000007-00002-0000000012"
    assert OutputName.parse(str(name)) == name
    assert OutputName.parse("p:out-7-2-12") is None
    with pytest.raises(hg.UsageError, match="is no name of published output"):
        hg.output_checkpoint("elsewhere")


@pytest.mark.parametrize("payload", [b"", b"9\nname", b"1\nname without an end"])
@each
def test_a_committable_of_another_form_is_refused(tmp_path: Path, kind: Kind, payload: bytes) -> None:
    if kind is SqliteSink and payload.startswith(b"1\n"):
        return
    sink = kind(str(tmp_path / "t.db"))
    strange = Committable("out", CheckpointId(1), 0, Generation(1), payload)
    with pytest.raises(hg.CorruptionError, match="committable of sink 'out' for checkpoint 1"):
        committer(sink, 1, []).commit(permit(1), [strange])
