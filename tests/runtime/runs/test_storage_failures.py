"""Storage and sinks that fail under real drivers and workers: told, waited out, nothing lost and nothing twice."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.conftest import few
from tests.runtime.running import definition_of
from tests.runtime.runs.test_results import generator, recounted, same, windowed
from tests.storage.faulty import Fault, FaultKind, FaultyStorage

from headgate.connectors.files.file_committer import FileCommitter, read_committed
from headgate.errors import CorruptionError, PipelineFailed, StorageError
from headgate.runtime.driver import driver as driver_module

Start = Any
SOURCE = generator(2_500, 2_500, batch=50)


@pytest.fixture
def driver_storage(monkeypatch: pytest.MonkeyPatch) -> list[FaultyStorage]:
    """Put a faulty storage between the driver and its checkpoints; it is in the list once the driver was made."""
    made: list[FaultyStorage] = []
    open_storage = driver_module.open_storage

    def faulty(url: str) -> FaultyStorage:
        made.append(FaultyStorage(open_storage(url)))
        return made[-1]

    monkeypatch.setattr(driver_module, "open_storage", faulty)
    return made


def finish(run: Any, root: Path) -> Any:
    result = run.result()
    assert result.is_finished
    same(read_committed(str(root / "out")), recounted(SOURCE))
    return result


def test_a_checkpoint_whose_state_cannot_be_written_is_declined_and_later_ones_complete(
    start: Start, tmp_path: Path
) -> None:
    full = Fault(FaultKind.NO_SPACE, operation="put", path_part="chk-0000000003", times=1_000)
    definition = definition_of(windowed(tmp_path, SOURCE, tolerable_failures=1), inline_bytes_max=0)
    run = start(definition, faults=[full])
    run.wait(lambda: any("checkpoint 3 was aborted" in note for note in run.notes), "a checkpoint without its state")
    run.wait_checkpoints(1)
    assert finish(run, tmp_path).restarts == 0
    assert 3 not in run.checkpoints
    assert any("checkpoint 3 was aborted" in note for note in run.notes)
    assert any("declined" in note and "No space left" in note for note in run.notes)


def test_more_failures_than_are_tolerable_restart_the_pipeline(start: Start, tmp_path: Path) -> None:
    full = Fault(FaultKind.NO_SPACE, operation="put", path_part="chk-0000000003", times=1_000)
    run = start(definition_of(windowed(tmp_path, SOURCE), inline_bytes_max=0), faults=[full])
    run.wait_restarts(1)
    assert finish(run, tmp_path).restarts == 1
    assert run.restarts[0].startswith("checkpoint 3 failed: a subtask could not write its snapshot: ")
    assert "No space left" in run.restarts[0]


def test_a_manifest_that_failed_for_sure_costs_one_checkpoint(
    start: Start, tmp_path: Path, driver_storage: list[FaultyStorage]
) -> None:
    run = start(definition_of(windowed(tmp_path, SOURCE, tolerable_failures=1)))
    run.wait_checkpoints(2)
    driver_storage[0].inject(Fault(FaultKind.NO_SPACE, operation="put_if_absent", path_part="/log/"))
    run.wait(lambda: any("was aborted" in note for note in run.notes), "a checkpoint without its manifest")
    assert finish(run, tmp_path).restarts == 0
    assert sum("was aborted" in note for note in run.notes) == 1


def test_a_manifest_of_which_nobody_knows_restarts_the_pipeline(
    start: Start, tmp_path: Path, driver_storage: list[FaultyStorage]
) -> None:
    run = start(definition_of(windowed(tmp_path, SOURCE)))
    run.wait_checkpoints(2)
    driver_storage[0].inject(Fault(FaultKind.IO_ERROR, operation="get", path_part="/log/"))
    driver_storage[0].inject(Fault(FaultKind.TIMEOUT_AFTER_EFFECT, operation="put_if_absent", path_part="/log/"))
    assert finish(run, tmp_path).restarts <= 1


def test_ids_that_cannot_be_reserved_are_tried_again(
    start: Start, tmp_path: Path, driver_storage: list[FaultyStorage]
) -> None:
    run = start(definition_of(windowed(tmp_path, SOURCE, tolerable_failures=5)))
    run.wait_checkpoints(1)
    driver_storage[0].inject(Fault(FaultKind.IO_ERROR, operation="put_if_absent", path_part="/ids/", times=3))
    run.wait(lambda: sum("cannot begin checkpoint" in note for note in run.notes) == 3, "three failures")
    assert finish(run, tmp_path).restarts == 0
    assert sum("cannot begin checkpoint" in note for note in run.notes) == 3


def test_slow_storage_costs_time_and_nothing_else(
    start: Start, tmp_path: Path, driver_storage: list[FaultyStorage]
) -> None:  # F8
    def slow() -> Fault:
        return Fault(FaultKind.SLOW, times=1_000_000, delay_ms=3)

    run = start(definition_of(windowed(tmp_path, SOURCE), inline_bytes_max=0), faults=[slow()])
    driver_storage[0].inject(slow())
    run.wait_checkpoints(1)
    run.kill(0)
    run.wait_restarts(1)
    run.wait_checkpoints(1)
    assert finish(run, tmp_path).restarts == 1
    assert not any("was aborted" in note for note in run.notes)


def failing_commits(monkeypatch: pytest.MonkeyPatch, fail: Callable[[int], Exception | None]) -> None:
    commit, calls = FileCommitter.commit, []

    def sometimes(self: FileCommitter, *args: Any) -> None:
        calls.append(1)
        error = fail(len(calls))
        if error is not None:
            raise error
        commit(self, *args)

    monkeypatch.setattr(FileCommitter, "commit", sometimes)


def test_commits_that_fail_for_a_while_are_repeated_until_they_succeed(
    start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    failing_commits(monkeypatch, lambda call: StorageError("commit", "out", "busy") if call % 2 else None)
    run = start(definition_of(windowed(tmp_path, SOURCE)))
    run.wait(lambda: any("busy" in note for note in run.notes), "a commit that fails")
    assert finish(run, tmp_path).restarts == 0
    assert any("busy" in note for note in run.notes)


def test_output_that_can_never_be_committed_stops_the_pipeline(
    start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lost = CorruptionError("out/part-1", 0, "a prepared file", "nothing")
    failing_commits(monkeypatch, lambda call: lost)  # the first one: on a slow machine there may be no second
    run = start(definition_of(windowed(tmp_path, SOURCE)))
    run.wait(run.driver.result.done, "the end, while there is input")
    with pytest.raises(PipelineFailed, match=r"cannot commit checkpoint \d+: sink 'out': out/part-1 is damaged"):
        run.result()
    assert run.restarts == []


def test_output_that_is_denied_in_recovery_stops_the_pipeline_for_good(
    start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # K5: the first generation cannot commit, and what it promised is gone when the second one wants to
    commit = FileCommitter.commit

    def not_in_the_first(self: FileCommitter, *args: Any) -> None:
        if self._generation == 1:
            raise StorageError("commit", "out", "busy")
        commit(self, *args)

    monkeypatch.setattr(FileCommitter, "commit", not_in_the_first)
    definition = definition_of(windowed(tmp_path, SOURCE))
    run = start(definition)
    staged = lambda: list(tmp_path.glob("out/_staging/*/*"))  # noqa: E731
    run.wait(lambda: len(run.checkpoints) >= 2 and bool(staged()), "promised output")
    run.wait_checkpoints(1)
    for path in staged():
        path.unlink(missing_ok=True)
    run.kill(0)
    with pytest.raises(PipelineFailed, match=r"neither it nor its staged form; starting again cannot help"):
        run.result()
    assert len(run.restarts) == 1  # of the worker that was killed; none of the recovery that was denied
    assert run.driver.running_generation is None


def test_a_target_that_cannot_say_whose_it_is_stops_the_pipeline_for_good(start: Start, tmp_path: Path) -> None:
    # K5: it is damaged while a generation runs; the next one would be refused again and again
    definition = definition_of(windowed(tmp_path, SOURCE))
    run = start(definition)
    run.wait_checkpoints(1)
    for path in tmp_path.glob("out/_owners/*/*"):
        path.write_bytes(b"noise")
    run.kill(0)
    for restarts in (1, 0):  # of the worker that was killed; a first start
        with pytest.raises(
            PipelineFailed, match=r"cannot name the owner of its target: .* not in a format .*; starting"
        ) as end:
            run.result()
        assert end.value.is_for_good  # else a supervisor would start it again and again
        assert len(run.restarts) == restarts
        run = start(definition) if restarts else run


@pytest.mark.parametrize("retained", few([3, 1], 1))
def test_exactly_the_retained_checkpoints_are_left_and_the_log_is_pruned(
    start: Start, tmp_path: Path, retained: int
) -> None:
    run = start(definition_of(windowed(tmp_path, SOURCE, retained=retained), inline_bytes_max=0))
    run.wait_checkpoints(retained + 2)
    finish(run, tmp_path)
    directory = tmp_path / "checkpoints" / "p"
    newest = [f"chk-{checkpoint:010d}" for checkpoint in run.checkpoints[-retained:]]
    assert sorted(path.name for path in directory.glob("chk-*") if any(path.iterdir())) == newest
    assert len(list((directory / "log").iterdir())) == retained
    assert len(list((directory / "ids").iterdir())) == 1
