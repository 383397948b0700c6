"""Ways to lose or repeat output over a damaged checkpoint that was not (R14, R50–R52)."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest
from tests.mutants.harness import assert_caught, patched
from tests.runtime.checkpoints.writing import write_snapshot

from headgate import FileSink, FromRows, Pipeline
from headgate.api import pipeline as pipeline_module
from headgate.errors import UsageError
from headgate.model.config import DamagedCheckpoint
from headgate.model.ids import CheckpointId, Generation, SubtaskId, VertexId
from headgate.model.manifest import Manifest, SubtaskEntry
from headgate.protocol.checkpoints import recovery
from headgate.runtime.checkpoints import snapshot_files
from headgate.runtime.checkpoints.log import CheckpointLog
from headgate.storage import reading
from headgate.storage.memory import MemoryStorage


class BadReads(MemoryStorage):
    """The first ``times`` reads of snapshots are bad."""

    times = 0

    def get_range(self, path: str, offset: int, size_bytes: int) -> bytes:
        data = super().get_range(path, offset, size_bytes)
        if "/chk-" in path and self.times:
            self.times -= 1
            return data[:-1]
        return data


def checkpoint_of(storage: MemoryStorage, log: CheckpointLog, number: int) -> Manifest:
    subtask, checkpoint = SubtaskId(VertexId("v"), 0), CheckpointId(number)
    handle = write_snapshot(storage, "p", subtask, checkpoint, Generation(1), [b"state"], 0)
    log.append(Manifest(checkpoint, Generation(1), 1, 128, (SubtaskEntry(subtask, (handle,)),)))
    return recovery.candidates(log.observe())[0]


def a_bad_read_is_survived() -> None:
    storage = BadReads("bad reads")
    log = CheckpointLog(storage, "p")
    log.claim("test", 0)
    made = checkpoint_of(storage, log, 1)
    storage.times = 2
    assert log.files.verify(made) == []


def what_is_aside_stays() -> None:
    storage = MemoryStorage("aside")
    log = CheckpointLog(storage, "p")
    log.claim("test", 0)
    first, second = (checkpoint_of(storage, log, number) for number in (1, 2))
    found = recovery.gaps(log.observe(), first, CheckpointId(3), [recovery.Damage("x", "torn")])
    log.files.set_aside(log.observe(), found)
    log.claim("test", 0)
    log.restored([CheckpointId(1)])
    log.files.sweep()
    assert log.files.verify(second) == []


def what_an_unreadable_entry_may_need_stays() -> None:
    storage = MemoryStorage("older")
    log = CheckpointLog(storage, "p")
    log.claim("test", 0)
    first, second = (checkpoint_of(storage, log, number) for number in (1, 2))
    storage.put("p/log/0000000002", [b"garbage"])
    log.claim("test", 0)
    log.files.set_aside(log.observe(), recovery.gaps(log.observe(), second, CheckpointId(3)))
    log.files.sweep()
    assert log.files.verify(first) == []


def damage_newer_than_what_is_sound_is_refused() -> None:
    storage = MemoryStorage("refused")
    log = CheckpointLog(storage, "p")
    log.claim("test", 0)
    for number in (1, 2):
        checkpoint_of(storage, log, number)
    storage.put("p/log/0000000003", [b"garbage"])
    observed = log.observe()
    sound: dict[CheckpointId, list[recovery.Damage]] = {CheckpointId(1): []}
    if not isinstance(recovery.choose(observed, sound, DamagedCheckpoint.FAIL), recovery.Refuse):
        raise UsageError("it goes back unasked")


def a_sink_with_transactions_matters() -> None:
    pipeline = Pipeline("p")
    pipeline.source(FromRows([{"n": 1}])).sink(FileSink("memory://files"))
    assert pipeline.definition().config.on_damaged is DamagedCheckpoint.FAIL


real_gaps = recovery.gaps


def only_the_newest(log: recovery.ObservedLog, restored: Manifest, *more: Any) -> tuple[recovery.Gap, ...]:
    return tuple(gap for gap in real_gaps(log, restored, *more) if gap.above == restored.checkpoint)


MUTANTS: list[tuple[Callable[[], AbstractContextManager[None]], Callable[[], None]]] = [
    (lambda: patched(reading, "READS_MAX", 1), a_bad_read_is_survived),
    (lambda: patched(snapshot_files, "_ranges_aside", lambda paths: set()), what_is_aside_stays),
    (lambda: patched(recovery, "gaps", lambda *of: only_the_newest(*of)), what_an_unreadable_entry_may_need_stays),
    (
        lambda: patched(recovery, "damage_behind", lambda log, manifest: ()),
        damage_newer_than_what_is_sound_is_refused,
    ),
]


@pytest.mark.parametrize(("mutant", "test"), MUTANTS)
def test_a_mutant_of_damage_is_caught(
    mutant: Callable[[], AbstractContextManager[None]], test: Callable[[], None], tmp_path: Path
) -> None:
    test()
    assert_caught(mutant, test)


def test_going_back_unasked_is_caught() -> None:
    a_sink_with_transactions_matters()
    assert_caught(
        lambda: patched(pipeline_module, "policy_for", lambda graph, mode: DamagedCheckpoint.PREVIOUS),
        a_sink_with_transactions_matters,
    )
