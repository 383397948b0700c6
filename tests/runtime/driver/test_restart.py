"""How a generation begins: every choice of recovery, with a real log, recorded sinks and hooks."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from tests.runtime.checkpoints.writing import write_snapshot
from tests.runtime.driver.test_connectors_ownership import begin
from tests.runtime.running import definition_of, pipeline_at
from tests.storage.faulty import Fault, FaultKind, FaultyStorage

import headgate as hg
from headgate.codec.json_files import decode_log_entry
from headgate.connectors.base import Committer
from headgate.environment import cancellable
from headgate.errors import (
    BringOutputBack,
    CorruptionError,
    FencedError,
    LeaveBehind,
    OutputDenied,
    StorageError,
    UsageError,
    with_remedy,
)
from headgate.model.config import DamagedCheckpoint
from headgate.model.failure import Failure, FailureKind
from headgate.model.ids import CheckpointId, Generation, SubtaskId
from headgate.model.manifest import Committable, HookState, Manifest, SubtaskEntry
from headgate.model.pipeline_identity import Owner, PipelineIdentity
from headgate.model.plan import HookSpec, PipelineDefinition
from headgate.protocol.checkpoints.recovery import ObservedLog, candidates
from headgate.runtime.checkpoints.log import CheckpointLog
from headgate.runtime.driver import restart, supervisor_host
from headgate.runtime.driver.driver import error_of
from headgate.runtime.driver.hook_calls import HookCalls
from headgate.runtime.driver.restart import Finished, NewGeneration, begin_generation
from headgate.runtime.surroundings import PROCESS
from headgate.storage.memory import MemoryStorage

CALLS: list[tuple[str, list[int]]] = []


class RecordedSink(hg.Discard, Committer):
    def open_committer(self, pipeline: str, node: str, generation: Generation) -> Any:
        return self

    def recover(self, keep: Any) -> None:
        CALLS.append(("recover", [c.checkpoint for c in keep]))

    def commit(self, permit: Any, committables: Any) -> None:
        CALLS.append((f"commit {permit.checkpoint} as {permit.generation}", [c.checkpoint for c in committables]))

    def close(self) -> None:
        CALLS.append(("close", []))


class Place:
    """One pipeline with its log; ``complete`` writes a checkpoint as the newest generation."""

    def __init__(self, root: Path) -> None:
        CALLS.clear()
        pipeline = pipeline_at(root, parallelism=1)
        pipeline.source(hg.FromRows([{"id": 1}])).sink(RecordedSink(), name="out")
        self.definition: PipelineDefinition = definition_of(pipeline)
        self.storage = FaultyStorage(MemoryStorage())
        self.notes: list[str] = []
        self.log = CheckpointLog(self.storage, "p")

    def begin(self, definition: PipelineDefinition | None = None) -> NewGeneration | Finished:
        self.log = CheckpointLog(self.storage, "p")
        return begin_generation(definition or self.definition, self.log, "test", self.notes.append)

    def complete(
        self,
        checkpoint: int,
        generation: int,
        *,
        is_final: bool = False,
        parallelism: int = 1,
        max_parallelism: int = 0,
    ) -> Manifest:
        plan = replace(self.definition.plan, parallelism=parallelism)
        entries = tuple(self.entry(subtask, checkpoint, generation) for subtask in plan.subtasks())
        made = Manifest(
            CheckpointId(checkpoint),
            Generation(generation),
            parallelism,
            max_parallelism or plan.max_parallelism,
            entries,
            (),
            plan.state_texts(),
            is_final,
            0,
            0,
        )
        self.log.append(made)
        return made

    def entry(self, subtask: SubtaskId, checkpoint: int, generation: int) -> SubtaskEntry:
        found = Committable("out", CheckpointId(checkpoint), subtask.index, Generation(generation), b"x")
        handle = write_snapshot(
            self.storage, "p", subtask, CheckpointId(checkpoint), Generation(generation), [b"state"], 0
        )
        return SubtaskEntry(subtask, (handle,), (found,))

    def damage(self, manifest: Manifest) -> None:
        self.storage.put(f"p/{manifest.entries[0].parts[0].path}", [b"garbage"])


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Place:
    monkeypatch.setattr(restart, "RETRY_PAUSES_S", (0.0, 0.0))
    return Place(tmp_path)


def begun(found: NewGeneration | Finished) -> NewGeneration:
    assert isinstance(found, NewGeneration)
    return found


def test_a_sink_that_cannot_be_closed_does_not_hide_why_the_generation_cannot_begin(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    def recover(sink: RecordedSink, keep: Any) -> None:
        raise UsageError("the ledger is damaged")

    def close(sink: RecordedSink) -> None:
        raise SystemExit("no connection")

    monkeypatch.setattr(RecordedSink, "recover", recover)
    monkeypatch.setattr(RecordedSink, "close", close)
    with pytest.raises(OutputDenied, match="the ledger is damaged") as raised:
        place.begin()
    assert raised.value.__notes__ == ["and closing a sink failed: no connection"]


def test_a_first_start_aborts_whatever_is_prepared(place: Place) -> None:
    found = begun(place.begin())
    assert (found.generation, found.first_checkpoint, found.restored, found.retained) == (1, 1, None, ())
    assert CALLS == [("recover", [])]


def test_a_restart_recovers_the_sinks_and_commits_what_the_newest_checkpoint_promises(place: Place) -> None:
    place.begin()
    place.complete(1, 1)
    place.complete(2, 1)
    CALLS.clear()
    found = begun(place.begin())
    assert found.restored is not None
    assert (found.generation, found.first_checkpoint, found.restored.checkpoint) == (2, 3, 2)
    assert found.retained == (1, 2)
    assert CALLS == [("recover", [2]), ("commit 2 as 2", [2])]


def test_a_finished_pipeline_commits_its_last_output_again_and_is_over(place: Place) -> None:
    place.begin()
    place.complete(1, 1, is_final=True)
    CALLS.clear()
    assert isinstance(place.begin(), Finished)
    assert CALLS == [("recover", [1]), ("commit 1 as 2", [1]), ("close", [])]


class BadOnce(MemoryStorage):
    """Reads of some files are bad, now and then."""

    def __init__(self, times: int) -> None:
        super().__init__("bad")
        self.times, self.part, self.reads = times, "/never/", 0

    def get(self, path: str) -> bytes:
        data = super().get(path)
        if self.part not in path:
            return data
        self.reads += 1
        return data[:-1] if self.reads <= self.times else data


@pytest.mark.parametrize("part", ["/chk-", "/log/0000000003", "/life"])
def test_one_bad_read_destroys_nothing(place: Place, part: str) -> None:
    bad = BadOnce(times=2)
    place.storage = FaultyStorage(bad)
    place.begin()
    place.complete(1, 1)
    place.complete(2, 1)
    files = set(place.storage.list("p"))
    bad.part = part
    found = begun(place.begin())
    assert found.restored is not None
    assert found.restored.checkpoint == 2
    assert files <= set(place.storage.list("p"))
    assert not [note for note in place.notes if "cannot be used" in note]


def test_what_a_start_goes_back_past_is_kept_until_somebody_removes_it(place: Place) -> None:  # R51
    place.begin()
    older = place.complete(1, 1)
    newest = place.complete(2, 1)
    damaged = {f"p/{entry.parts[0].path}" for entry in newest.entries}
    place.damage(newest)
    for _ in range(3):  # a start that goes back again keeps nothing twice
        place.begin()
        assert damaged <= set(place.storage.list("p"))
    asides = place.log.files.aside()
    assert [(aside.above, aside.below) for aside in asides] == [(1, 3)]
    assert "chk-0000000002" in asides[0].why
    kept = [path for path in place.storage.list("p/aside") if "/log-" in path]
    entry = decode_log_entry(place.storage.get(kept[0]), "kept")
    assert isinstance(entry, Manifest)
    assert (entry.checkpoint, entry.entries) == (2, newest.entries)

    place.complete(3, 4)
    place.complete(4, 4)
    place.log.drop(CheckpointId(3), CheckpointId(4))
    assert damaged <= set(place.storage.list("p")), "pruning leaves it alone"
    stayed = {f"p/{entry.parts[0].path}" for entry in older.entries}  # the damaged one might have shared it
    assert stayed <= set(place.storage.list("p"))
    assert place.log.discard_aside() == len(damaged | stayed)
    assert not (damaged | stayed) & set(place.storage.list("p"))
    assert place.log.files.aside() == []
    assert [m.checkpoint for m in candidates(place.log.observe())] == [4]


def test_discarding_beside_a_pipeline_takes_nothing_that_it_completes_meanwhile(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:  # SF7
    place.begin()
    place.complete(1, 1)
    place.damage(place.complete(2, 1))
    place.begin()
    observe, completed = place.log.observe, []

    def and_meanwhile() -> ObservedLog:
        found = observe()
        monkeypatch.setattr(place.log, "observe", observe)
        completed.append(place.complete(3, 2))
        place.damage(place.complete(4, 2))
        place.begin()  # back to checkpoint 3: what is set aside now ends behind it
        return found

    monkeypatch.setattr(place.log, "observe", and_meanwhile)
    place.log.discard_aside()
    assert [place.log.files.verify(manifest) for manifest in completed] == [[]]


def test_snapshots_of_an_older_checkpoint_whose_entry_is_unreadable_are_kept(place: Place) -> None:  # R51
    place.begin()
    torn = place.complete(2, 1)
    whole = {path: place.storage.get(path) for path in place.storage.list("p/log")}
    torn_path = max(whole)
    place.complete(3, 1)
    place.complete(5, 1)
    place.storage.put(torn_path, [whole[torn_path][:-1]])
    snapshots = {f"p/{entry.parts[0].path}" for entry in torn.entries}
    for _ in range(2):
        found = begun(place.begin())
        assert found.restored is not None
        assert (found.restored.checkpoint, found.retained) == (5, (3, 5))
        assert snapshots <= set(place.storage.list("p")), "whoever repairs the entry needs them"
    assert [(aside.above, aside.below) for aside in place.log.files.aside()] == [(0, 3)]
    assert any("it is older than checkpoint 5, which is used" in note for note in place.notes)

    place.storage.put(torn_path, [whole[torn_path]])  # the user has a copy
    assert begun(place.begin()).retained == (2, 3, 5)
    assert place.log.files.verify(torn) == []


def test_a_finished_pipeline_keeps_no_more_checkpoints_than_it_retains(place: Place) -> None:  # C31, I6
    """The driver that completed the last one died before it had dropped the oldest."""
    place.begin()
    retained = place.definition.config.checkpoints.retained
    for checkpoint in range(1, retained + 3):
        place.complete(checkpoint, 1, is_final=checkpoint == retained + 2)
    assert isinstance(place.begin(), Finished)
    kept = [manifest.checkpoint for manifest in candidates(place.log.observe())]
    assert kept == list(range(retained + 2, 2, -1))
    assert {path.split("/")[1] for path in place.storage.list("p") if "/chk-" in path} == {
        f"chk-{c:010d}" for c in kept
    }
    assert place.log.observe().lost() == ()


def test_a_finished_pipeline_keeps_older_damage_aside(place: Place) -> None:  # R51
    place.begin()
    torn = place.complete(1, 1)
    torn_path = max(place.storage.list("p/log"))
    place.complete(2, 1, is_final=True)
    place.storage.put(torn_path, [b"torn"])
    assert isinstance(place.begin(), Finished)
    assert place.log.files.verify(torn) == []


def test_prepared_output_of_a_skipped_checkpoint_is_not_aborted_without_a_word(place: Place) -> None:  # R51, K18
    place.begin()
    place.complete(1, 1)
    place.damage(place.complete(2, 1))
    place.begin()
    assert any("had prepared and not committed yet is aborted, and produced again" in note for note in place.notes)


def test_a_damaged_newest_checkpoint_is_told_and_the_one_before_restored(place: Place) -> None:
    place.begin()
    place.complete(1, 1)
    newest = place.complete(2, 1)
    place.damage(newest)
    found = begun(place.begin())
    assert found.restored is not None
    assert found.restored.checkpoint == 1
    assert found.first_checkpoint == 3, "an id is never used twice"
    assert str(newest.entries[0].parts[0].path) in place.notes[0]
    assert "output that checkpoint 2 committed will be produced again" in place.notes[1]


def test_a_damaged_checkpoint_is_refused_if_the_user_wants_that(place: Place) -> None:
    place.begin()
    place.complete(1, 1)
    place.damage(place.complete(2, 1))
    config = replace(place.definition.config, on_damaged=DamagedCheckpoint.FAIL)
    CALLS.clear()
    with pytest.raises(UsageError, match="cannot be restored"):
        place.begin(replace(place.definition, config=config))
    assert CALLS == [], "no sink is touched"


def test_nothing_starts_empty_when_every_checkpoint_is_damaged(place: Place) -> None:
    place.begin()
    place.damage(place.complete(1, 1))
    CALLS.clear()
    with pytest.raises(UsageError, match="no sound checkpoint is left"):
        place.begin()
    assert CALLS == []


def test_another_max_parallelism_is_refused_before_any_sink_is_touched(place: Place) -> None:  # R12
    place.begin()
    place.complete(1, 1, max_parallelism=3)
    CALLS.clear()
    with pytest.raises(UsageError, match="max_parallelism 3, this pipeline has 128; set it back"):
        place.begin()
    assert CALLS == []


def test_output_prepared_at_another_parallelism_is_kept(place: Place) -> None:
    place.begin()
    place.complete(1, 1, parallelism=3)
    CALLS.clear()
    found = begun(place.begin())
    assert found.restored is not None
    assert found.restored.parallelism == 3
    assert CALLS == [("recover", [1, 1, 1]), ("commit 1 as 2", [1, 1, 1])]


@pytest.mark.parametrize("operation", ["list", "get", "put_if_absent"])
def test_transient_faults_of_storage_are_waited_out(place: Place, operation: str) -> None:
    place.begin()
    place.complete(1, 1)
    place.storage.inject(Fault(FaultKind.IO_ERROR, operation=operation, times=2))
    found = begun(place.begin())
    assert found.restored is not None
    assert found.restored.checkpoint == 1


def test_what_is_called_off_is_not_tried_again() -> None:
    off, tries = threading.Event(), list[int]()

    def call() -> None:
        tries.append(1)
        off.set()
        raise StorageError("reach", "it", "it is away")

    with pytest.raises(StorageError, match="it is away"):
        cancellable(off, lambda: restart.retry_transient(call, PROCESS))()
    assert tries == [1]


def test_a_storage_that_stays_away_is_reported(place: Place) -> None:
    place.storage.inject(Fault(FaultKind.IO_ERROR, times=1_000))
    with pytest.raises(StorageError):
        place.begin()


def test_leftovers_of_dead_generations_are_swept(place: Place) -> None:
    place.begin()
    kept = place.complete(1, 1)
    place.log.reserve(CheckpointId(2))
    place.entry(place.definition.plan.subtasks()[0], 2, 1)  # written, never completed
    place.begin()
    files = [path for path in place.storage.list("p") if "/chk-" in path]
    assert files == sorted(f"p/{entry.parts[0].path}" for entry in kept.entries)


# -- how a generation begins for hooks -----


class Recorded(hg.CoordinatorHook):
    """Notes its calls where the sinks note theirs."""

    def __init__(self, failures: int = 0, *, is_transient: bool = True) -> None:
        self.failures, self.is_transient = failures, is_transient

    def trigger(self, checkpoint_id: int) -> None:
        return None

    def restore(self, checkpoint_id: int, data: bytes | None) -> None:
        self._note(f"restore {checkpoint_id} {data!r}")

    def reset(self) -> None:
        self._note("reset")

    def _note(self, call: str) -> None:
        CALLS.append((call, []))
        if self.failures:
            self.failures -= 1
            raise StorageError("reach", "the shop", "closed", is_transient=self.is_transient)


class HookedPlace(Place):
    """A pipeline with a hook, whose checkpoints hold something of it."""

    def __init__(self, root: Path, hook: Recorded) -> None:
        super().__init__(root)
        self.definition = replace(self.definition, hooks=(HookSpec("shop", hook, 60_000),))
        self.calls = HookCalls(self.definition.hooks)

    def begin_with_hooks(self) -> NewGeneration | Finished:
        return begin_generation(self.definition, self.log, "test", self.notes.append, None, hooks=self.calls)

    def complete_with(self, checkpoint: int, *states: HookState, is_final: bool = False) -> None:
        append = self.log.append
        self.log.append = lambda made: append(replace(made, hooks=states))  # type: ignore[method-assign]
        self.complete(checkpoint, 1, is_final=is_final)
        self.log.append = append  # type: ignore[method-assign]


@pytest.fixture
def hook() -> Recorded:
    return Recorded()


@pytest.fixture
def hooked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, hook: Recorded) -> Iterator[HookedPlace]:
    monkeypatch.setattr(restart, "RETRY_PAUSES_S", (0.0, 0.0))
    made = HookedPlace(tmp_path, hook)
    yield made
    made.calls.close()


def test_hooks_go_back_past_the_sinks(hooked: HookedPlace) -> None:
    hooked.begin_with_hooks()
    assert CALLS == [("recover", []), ("reset", [])]
    hooked.complete_with(1, HookState("shop", b"at 1"))
    CALLS.clear()
    assert isinstance(hooked.begin_with_hooks(), NewGeneration)
    assert CALLS == [("recover", [1]), ("commit 1 as 2", [1]), ("restore 1 b'at 1'", [])]


def test_a_hook_that_a_checkpoint_does_not_know_is_restored_with_nothing(hooked: HookedPlace) -> None:
    hooked.begin_with_hooks()
    hooked.complete(1, 1)
    hooked.begin_with_hooks()
    assert CALLS[-1] == ("restore 1 None", [])


def test_a_finished_pipeline_calls_no_hook(hooked: HookedPlace) -> None:
    hooked.begin_with_hooks()
    hooked.complete_with(1, HookState("shop", b"at 1"), is_final=True)
    CALLS.clear()
    assert isinstance(hooked.begin_with_hooks(), Finished)
    assert [call for call, _ in CALLS] == ["recover", "commit 1 as 2", "close"]


def test_a_hook_that_may_pass_is_tried_again_and_one_that_does_not_fails_the_claim(
    hooked: HookedPlace, hook: Recorded
) -> None:
    hook.failures = 2
    assert isinstance(hooked.begin_with_hooks(), NewGeneration)
    assert CALLS.count(("reset", [])) == 3
    hook.failures, hook.is_transient = 1, False
    CALLS.clear()
    with pytest.raises(StorageError, match="cannot reach the shop: closed"):
        hooked.begin_with_hooks()
    assert CALLS[-1] == ("close", []), "committers are not left open"


def test_data_that_nobody_takes_back_is_refused_before_a_sink_is_touched(hooked: HookedPlace) -> None:  # EI9
    hooked.begin_with_hooks()
    hooked.complete_with(1, HookState("shop", b"at 1"), HookState("bank", b"12"))
    CALLS.clear()
    with pytest.raises(UsageError, match=r"holds 2 bytes of hook 'bank'.*say so with pipeline\.forget_hook\('bank'\)"):
        hooked.begin_with_hooks()
    assert CALLS == []
    hooked.definition = replace(hooked.definition, forgotten_hooks=frozenset({"bank"}))
    assert isinstance(hooked.begin_with_hooks(), NewGeneration)


def test_a_manifest_holds_what_was_given(hooked: HookedPlace) -> None:  # EI4
    hooked.begin_with_hooks()
    hooked.complete_with(1, HookState("shop", b"at 1"))
    found = [e.content for e in hooked.log.observe().entries if isinstance(e.content, Manifest)]
    assert found[0].hooks == (HookState("shop", b"at 1"),)


# -- what a repetition cannot cure when a generation begins stops the pipeline for good; what may pass do -----


class Broken(hg.FileSink):
    """A file sink one of whose calls fails."""

    fails = ""
    error: Exception

    def owner(self, pipeline: str, node: str) -> Owner:
        self._perhaps_fail("owner")
        return super().owner(pipeline, node)

    def own(self, pipeline: str, node: str, life: PipelineIdentity) -> Owner:
        self._perhaps_fail("own")
        return super().own(pipeline, node, life)

    def make_target(self, schema: pa.Schema) -> None:
        self._perhaps_fail("make_target")
        super().make_target(schema)

    def open_committer(self, pipeline: str, node: str, generation: Generation) -> Any:
        self._perhaps_fail("open_committer")
        return super().open_committer(pipeline, node, generation)

    def _perhaps_fail(self, where: str) -> None:
        if where == self.fails:
            raise self.error


DAMAGE = CorruptionError("the thing", 0, "something", "noise")
RIGHTS = StorageError("get", "the thing", "permission denied", is_transient=False)
AWAY = StorageError("get", "the thing", "no answer")

CALLS_CLAIMS = ["owner", "own", "make_target", "open_committer"]


def failed(home: Path, sink: Any) -> Exception:
    """Begin a generation; return with what it fails."""
    with pytest.raises(Exception, match="the thing") as caught:
        begin(home, out=sink)
    return caught.value


@pytest.mark.parametrize("error", [DAMAGE, RIGHTS], ids=["damage", "rights"])
@pytest.mark.parametrize("where", CALLS_CLAIMS)
def test_what_a_repetition_does_not_cure_at_a_target_stops_the_pipeline(
    tmp_path: Path, where: str, error: Exception
) -> None:  # K5
    sink = Broken(str(tmp_path / "out"))
    sink.fails, sink.error = where, error
    failure = supervisor_host.claim_failure(failed(tmp_path / "home", sink))
    assert failure.kind is FailureKind.DETERMINISTIC
    assert "'out'" in failure.reason
    assert failure.reason.endswith(f"{error}; starting again cannot help before that is mended")
    sink.fails = ""
    begin(tmp_path / "home", out=sink)


@pytest.mark.parametrize("error", [DAMAGE, RIGHTS], ids=["damage", "rights"])
def test_a_life_that_cannot_be_read_stops_the_pipeline(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:  # K5
    def fails(*_: object) -> PipelineIdentity:
        raise error

    monkeypatch.setattr(CheckpointLog, "identity", fails)
    failure = supervisor_host.claim_failure(failed(tmp_path / "home", hg.Discard()))
    assert failure.kind is FailureKind.DETERMINISTIC
    assert f"pipeline 'p' cannot tell which life of it {tmp_path}/home/p holds: " in failure.reason


@pytest.mark.parametrize("where", CALLS_CLAIMS)
def test_what_may_pass_at_a_target_is_worth_another_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:  # F11
    monkeypatch.setattr(restart, "RETRY_PAUSES_S", ())
    sink = Broken(str(tmp_path / "out"))
    sink.fails, sink.error = where, AWAY
    assert supervisor_host.claim_failure(failed(tmp_path / "home", sink)).kind is FailureKind.LOST


FAILURES = {
    FailureKind.DETERMINISTIC: [UsageError("no"), OutputDenied("out", 3, "unknown"), ValueError("a bug")],
    FailureKind.REPLACED: [FencedError("it", 1, 2)],
    # A hook is left to the restart strategy, whatever it raises.
    FailureKind.LOST: [AWAY, StorageError("call begin of", "hook 'h'", "no", is_transient=False)],
}


def test_how_a_claim_failed_says_what_may_be_done() -> None:  # K5, F11
    for kind, errors in FAILURES.items():
        assert [supervisor_host.claim_failure(error).kind for error in errors] == [kind] * len(errors)


def test_a_run_that_failed_says_what_its_claim_said_the_user_can_do() -> None:
    refused = with_remedy(UsageError("no"), LeaveBehind("sum"))
    assert error_of(supervisor_host.claim_failure(refused)).remedy == LeaveBehind("sum")
    assert error_of(supervisor_host.claim_failure(OutputDenied("out", 3, "unknown"))).remedy == BringOutputBack()
    assert error_of(Failure(FailureKind.DENIED, "unknown")).remedy == BringOutputBack(), "while it ran"
    assert error_of(supervisor_host.claim_failure(ValueError("a bug"))).remedy is None
