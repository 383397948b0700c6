"""Outcomes of transactions do not pile up at a target, however short the runs are (K25)."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from tests.protocol.checkpoints.test_recovery import TORN, claim, log
from tests.runtime.checkpoints.writing import write_snapshot
from tests.testing.staged import ForgettingSink
from tests.testing.staged import Place as Target

import headgate as hg
from headgate.connectors.base import Committer, SinkContext
from headgate.errors import FencedError, StorageError
from headgate.model.ids import CheckpointId, Generation
from headgate.model.manifest import Committable, LogEntry, Manifest, SubtaskEntry
from headgate.protocol.checkpoints.commit import CommitPermit, forgettable_before
from headgate.protocol.checkpoints.recovery import Damage
from headgate.runtime.checkpoints.log import CheckpointLog
from headgate.runtime.driver import restart
from headgate.runtime.driver.restart import NewGeneration, begin_generation
from headgate.storage.memory import MemoryStorage
from headgate.store.store import Store

SCHEMA = pa.schema([("id", pa.int64())])
RUNS = 12


class Place:
    """One pipeline; ``run`` is a life of its driver that completes one checkpoint and ends."""

    def __init__(self, root: Path, sink: Any) -> None:
        pipeline = hg.Pipeline("p", parallelism=1, checkpointing=hg.Checkpointing(interval=None, dir=root))
        pipeline.source(hg.FromRows([{"id": 1}])).sink(sink, name="out")
        self.definition = pipeline.definition()
        self.sink = sink
        self.storage = MemoryStorage()
        self.notes: list[str] = []

    def begin(self) -> tuple[CheckpointLog, NewGeneration]:
        log = CheckpointLog(self.storage, "p")
        found = begin_generation(self.definition, log, "test", self.notes.append)
        assert isinstance(found, NewGeneration)
        return log, found

    def run(self, *, retained: int = 1) -> None:
        log, begun = self.begin()
        here = begun.first_checkpoint
        log.reserve(here)
        output = self.prepared(here, begun.generation)
        manifest = self.manifest(here, begun.generation, output)
        oldest = [*begun.retained, here][-retained:][0]
        log.append(manifest, oldest)
        begun.commits.commit(CommitPermit(here, begun.generation), output)
        log.drop(CheckpointId(oldest - 1), oldest)
        begun.commits.close()

    def prepared(self, checkpoint: CheckpointId, generation: Generation) -> Sequence[Committable]:
        writer = self.sink.open(SinkContext("p", "out", 0, 1, generation, SCHEMA))
        writer.write(pa.record_batch([[checkpoint]], schema=SCHEMA))
        payload = writer.seal(checkpoint).prepare()
        return [Committable("out", checkpoint, 0, generation, payload)] if payload else []

    def manifest(self, checkpoint: CheckpointId, generation: Generation, output: Sequence[Committable]) -> Manifest:
        subtasks, plan = self.definition.plan.subtasks(), self.definition.plan
        parts = [write_snapshot(self.storage, "p", s, checkpoint, generation, [b"state"], 0) for s in subtasks]
        entries = tuple(SubtaskEntry(s, (part,), tuple(output)) for s, part in zip(subtasks, parts, strict=True))
        return Manifest(checkpoint, generation, 1, plan.max_parallelism, entries, state_texts=plan.state_texts())


@pytest.fixture(autouse=True)
def _no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(restart, "RETRY_PAUSES_S", (0.0, 0.0))


@pytest.mark.parametrize("retained", [1, 3])
def test_runs_of_one_checkpoint_each_leave_few_outcomes(tmp_path: Path, retained: int) -> None:  # K25
    place = Place(tmp_path / "checkpoints", hg.StreamSink("s", store=tmp_path / "store"))
    for _ in range(RUNS):
        place.run(retained=retained)
    with Store.open(tmp_path / "store") as store:
        assert store.describe("s").events_count == RUNS
        assert len(store.list_transactions(owner="p/out")) <= retained + 1
    place.begin()  # and what the retained checkpoints promise is known: nothing is denied
    assert place.notes == []


def test_nothing_is_forgotten_that_a_damaged_checkpoint_may_ask_for(tmp_path: Path) -> None:  # K20, K25
    """Somebody may restore it from a copy."""
    place = Place(tmp_path / "checkpoints", hg.StreamSink("s", store=tmp_path / "store"))
    for _ in range(3):
        place.run(retained=3)
    oldest = next(path for path in place.storage.list("p/log") if b"checkpoint" in place.storage.get(path))
    place.storage.put(oldest, [b"torn"])
    place.begin()
    with Store.open(tmp_path / "store") as store:
        assert len(store.list_transactions(owner="p/out")) == 3


@pytest.mark.parametrize(
    ("entries", "hint", "expected"),
    [
        ({}, 0, None),
        ({1: claim(1)}, 0, None),
        ({1: claim(1), 2: "manifest"}, 0, 7),
        ({1: claim(1), 2: "manifest", 3: TORN}, 0, None),
        ({1: claim(1), 2: "manifest"}, 3, None),
        ({1: claim(1), 3: "manifest"}, 0, None),
    ],
)
def test_what_cannot_be_read_or_is_lost_may_ask_for_anything(  # K20
    entries: dict[int, LogEntry | Damage | str], hint: int, expected: int | None
) -> None:
    manifest = Manifest(CheckpointId(7), Generation(1), 1, 128, ())
    found = {at: manifest if isinstance(entry, str) else entry for at, entry in entries.items()}
    assert forgettable_before(log(found, hint=hint)) == expected


class Outcomes(ForgettingSink):
    """A sink with two phases, which a user wrote."""

    transaction_timeout = None
    error: Exception | None = None

    def forget(self, names: Sequence[str]) -> None:
        if self.error is not None:
            raise self.error
        super().forget(names)


@pytest.mark.parametrize("retained", [1, 3])
def test_runs_of_one_checkpoint_each_leave_few_outcomes_of_a_users_sink(tmp_path: Path, retained: int) -> None:
    # K25, CS24
    target = Target(limit_ms=None)
    place = Place(tmp_path / "checkpoints", Outcomes(target))
    for _ in range(RUNS):
        place.run(retained=retained)
    assert len(target.shown) == RUNS
    assert len(target.ledger) <= retained + 1
    place.begin()
    assert place.notes == []


def test_a_users_sink_that_cannot_forget_is_told_again_and_fails_nothing(tmp_path: Path) -> None:  # K25, CS24
    target = Target(limit_ms=None)
    sink = Outcomes(target)
    place = Place(tmp_path / "checkpoints", sink)
    sink.error = TypeError("what is that?")
    for _ in range(3):
        place.run()
    assert [note.partition(":")[0] for note in place.notes] == [
        f"could not let the sinks forget what was decided before checkpoint {n}" for n in (2,)
    ]
    assert len(target.ledger) == 3
    sink.error = None
    place.run()
    assert len(target.ledger) == 2, "that of the retained checkpoint, and what it was run for"


def test_nothing_of_a_users_sink_is_forgotten_while_a_checkpoint_is_damaged(tmp_path: Path) -> None:  # K20, CS24
    target = Target(limit_ms=None)
    place = Place(tmp_path / "checkpoints", Outcomes(target))
    for _ in range(3):
        place.run(retained=3)
    oldest = next(path for path in place.storage.list("p/log") if b"checkpoint" in place.storage.get(path))
    place.storage.put(oldest, [b"torn"])
    place.begin()
    assert len(target.ledger) == 3


class Forgetful(hg.Discard, Committer):
    """A sink of a user, whose target fails to forget."""

    can_forget = True

    def __init__(self, error: Exception) -> None:
        self.error = error

    def open_committer(self, pipeline: str, node: str, generation: Generation) -> Any:
        return self

    def recover(self, keep: Any) -> None:
        pass

    def commit(self, permit: Any, committables: Any) -> None:
        pass

    def forget(self, before: CheckpointId, promised: Any) -> None:
        raise self.error

    def close(self) -> None:
        pass


@pytest.mark.parametrize("error", [StorageError("forget", "db", "busy"), TypeError("what is that?")])
def test_a_target_that_cannot_forget_does_not_end_a_start(tmp_path: Path, error: Exception) -> None:  # K25
    place = Place(tmp_path, Forgetful(error))
    for _ in range(2):
        place.run()
    (note,) = place.notes
    assert note == f"could not let the sinks forget what was decided before checkpoint 1: {error}"


def test_a_target_that_knows_a_newer_generation_ends_it(tmp_path: Path) -> None:  # K25
    place = Place(tmp_path, Forgetful(FencedError("sink", 2, 3)))
    place.run()
    with pytest.raises(FencedError):
        place.run()
