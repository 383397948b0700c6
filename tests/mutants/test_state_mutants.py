"""Planted bugs of keyed state, timers, expiry and broadcast sides.

Each is a patch of the product, a run of the simulator, and a seed that finds it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import Any

import pyarrow as pa
import pytest
from tests.conftest import few
from tests.mutants.harness import Mutant, all_of, patched, skipped
from tests.mutants.seeds import Finder, assert_found, found_by, plain

from headgate.model.manifest import SnapshotPart
from headgate.operators.process.broadcast_state import BroadcastSide
from headgate.operators.process.row_process import ProcessOperator
from headgate.operators.windows.aligned_windows import WindowCombineOperator
from headgate.protocol.checkpoints.retention import SharedFiles
from headgate.runtime.checkpoints import restore as restore_module
from headgate.state import backend
from headgate.state.backend import TIMERS
from headgate.state.memory import column_backend, row_backend
from headgate.state.memory.change_tracking import KeyChanges
from headgate.state.memory.incremental_snapshot import ChunkLog
from headgate.state.memory.timers import MemoryColumnTimers, MemoryRowTimers
from headgate.state.rocksdb.database import Changes
from headgate.state.ttl import EXPIRES_COLUMN, NEVER_MS, TTL, as_declared


def state_of_functions_is_not_restored() -> AbstractContextManager[None]:
    return patched(ProcessOperator, "restore", lambda self, states: None)


def watermarks_overtake_partial_windows() -> AbstractContextManager[None]:
    return patched(
        WindowCombineOperator, "on_watermark", lambda self, watermark_ms: self.output.emit_watermark(watermark_ms)
    )


def only_keys_of_the_last_interval_are_written() -> AbstractContextManager[None]:
    return patched(KeyChanges, "after", lambda self, _: self.by_interval[-1][1] if self.by_interval else {})


def chunks_that_may_go_are_referred_to() -> AbstractContextManager[None]:
    original = ChunkLog.chain
    return patched(ChunkLog, "chain", lambda self, _: original(self, {f.name: f for c in self._known for f in c.files}))


def what_is_deleted_stays() -> AbstractContextManager[None]:
    return skipped(Changes, "delete")


def files_of_checkpoints_that_may_fail_are_shared() -> AbstractContextManager[None]:  # SF15
    def shareable(self: SharedFiles) -> tuple[SnapshotPart, ...]:
        return tuple(self._snapshots[max(self._snapshots)].values())

    return patched(SharedFiles, "shareable", shareable)


def others_are_not_given_the_copy_of_the_first_one() -> AbstractContextManager[None]:
    return patched(restore_module, "is_for_all_workers", lambda part, writer: part.section.startswith("union/"))


def nobody_restores_broadcast_state() -> AbstractContextManager[None]:
    return skipped(BroadcastSide, "restore")


Patch = AbstractContextManager[None]


def timers_are_lost_at_a_restore() -> Patch:
    restore = {cls: cls.restore for cls in (row_backend.MemoryRowBackend, column_backend.MemoryColumnBackend)}

    def without(cls: Any) -> Callable[..., None]:
        def restored(self: Any, sections: Mapping[str, memoryview], path: str, owner: Any) -> None:
            restore[cls](self, {name: data for name, data in sections.items() if name != TIMERS}, path, owner)

        return restored

    return all_of(*(patched(cls, "restore", without(cls)) for cls in restore))


def deleted_timers_stay() -> Patch:
    nothing = lambda self, *a: None  # noqa: E731
    return all_of(patched(MemoryRowTimers, "delete", nothing), patched(MemoryColumnTimers, "delete", nothing))


Patch = AbstractContextManager[None]


def everything_is_new_again_at_a_restore() -> Patch:
    def forgotten(batch: pa.RecordBatch, schema: pa.Schema) -> pa.RecordBatch:
        found = as_declared(batch, schema)
        if found.schema.names[-1] != EXPIRES_COLUMN:
            return found
        never = pa.repeat(pa.scalar(NEVER_MS), found.num_rows)
        return pa.RecordBatch.from_arrays([*found.columns[:-1], never], schema=schema)

    return patched(backend, "as_declared", forgotten)


def reads_renew_nothing() -> Patch:
    return patched(TTL, "is_renewed_by_reads", False)


MUTANTS: list[tuple[Mutant, Finder, int]] = [
    (state_of_functions_is_not_restored, plain, 49),
    (watermarks_overtake_partial_windows, plain, 3),
    (only_keys_of_the_last_interval_are_written, found_by("memory-chunks"), 0),
    (chunks_that_may_go_are_referred_to, found_by("memory-chunks"), 18),
    (timers_are_lost_at_a_restore, found_by("timers"), 0),
    (files_of_checkpoints_that_may_fail_are_shared, found_by("rocksdb"), 138),
    (others_are_not_given_the_copy_of_the_first_one, found_by("broadcast"), 5),
    (nobody_restores_broadcast_state, found_by("broadcast"), 13),
    (what_is_deleted_stays, found_by("rocksdb"), 4),
    (deleted_timers_stay, found_by("timers"), 0),
    (everything_is_new_again_at_a_restore, found_by("ttl"), 5),
    (reads_renew_nothing, found_by("ttl"), 2),
]


@pytest.mark.parametrize(("mutant", "run", "seed"), few(MUTANTS, 4), ids=[mutant.__name__ for mutant, _, _ in MUTANTS])
def test_a_planted_bug_of_state_is_found(mutant: Mutant, run: Finder, seed: int) -> None:
    assert_found(mutant, run, seed)
