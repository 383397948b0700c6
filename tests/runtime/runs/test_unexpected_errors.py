"""Whatever a user's code raises where somebody waits for it, and whatever a bug raises in the driver: the run ends."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import product
from pathlib import Path
from typing import Any

import pytest
from tests.conftest import few
from tests.mutants.harness import patched
from tests.sqlite_sinks import SqliteSink

import headgate as hg
from headgate import testing
from headgate.connectors.base import CoordinatorHook
from headgate.protocol.checkpoints import coordinator_events
from headgate.protocol.checkpoints.coordinator import Coordinator
from headgate.protocol.supervision import supervisor_events
from headgate.protocol.supervision.supervisor import Supervisor

SECONDS = 60.0
HOOK_TIMEOUT = "60s"


class PanicException(BaseException):
    """What native libraries in Rust call theirs, which is no ``Exception``."""


UNUSUAL = [SystemExit("by a client that ends its process"), PanicException("index out of bounds")]


def run(root: Path, sink: Any = None, hook: CoordinatorHook | None = None) -> hg.RunResult:
    checkpointing = hg.Checkpointing(interval="20ms", dir=root / "checkpoints")
    pipeline = hg.Pipeline("p", checkpointing=checkpointing, restart=hg.FixedDelay(attempts=1, delay="1ms"))
    rows = [{"number": n, "text": str(n)} for n in range(40)]
    pipeline.source(hg.FromRows(rows, splits=2, batch_rows=5)).key_by("number").reduce(lambda a, b: b).sink(
        hg.Discard() if sink is None else sink, name="out"
    )
    if hook is not None:
        pipeline.add_hook("outside", hook, timeout=HOOK_TIMEOUT)
    return testing.run(pipeline, timeout_s=SECONDS)


@contextmanager
def raising(owner: type, method: str, error: BaseException) -> Iterator[None]:
    def fails(*arguments: Any) -> None:
        raise error

    with patched(owner, method, fails):
        yield


def check_sink_method(root: Path, method: str, error: BaseException) -> None:
    with (
        raising(SqliteSink, method, error),
        pytest.raises(hg.PipelineFailed, match=f"{type(error).__name__}: {error}"),
    ):
        run(root, SqliteSink(str(root / "target.db")))


@pytest.mark.parametrize(
    ("method", "error"), few(list(product(["claimed", "claim", "prepared", "commit", "prepare"], UNUSUAL)), 5)
)
def test_whatever_a_method_of_a_sink_raises_ends_the_run(tmp_path: Path, method: str, error: BaseException) -> None:
    check_sink_method(tmp_path, method, error)


class Outside(CoordinatorHook):
    """An external system whose client fails."""

    def trigger(self, checkpoint_id: int) -> bytes | None:
        return None

    def restore(self, checkpoint_id: int, data: bytes | None) -> None:
        return

    def reset(self) -> None:
        return


def check_hook_method(root: Path, method: str, error: BaseException) -> None:
    told = rf"cannot call reset\(\) of hook 'outside': {type(error).__name__}: {error}"
    with raising(Outside, method, error), pytest.raises(hg.PipelineFailed, match=told):
        run(root, hook=Outside())


@pytest.mark.parametrize("error", UNUSUAL, ids=["exit", "panic"])
def test_whatever_a_hook_raises_ends_the_run(tmp_path: Path, error: BaseException) -> None:
    check_hook_method(tmp_path, "reset", error)


class Listening(hg.CheckpointListener):
    """Passes records on, and hears of checkpoints."""

    def __init__(self, error: BaseException) -> None:
        self._error = error

    def __call__(self, row: dict[str, Any]) -> dict[str, Any]:
        return row

    def notify_checkpoint_complete(self, checkpoint_id: int) -> None:
        raise self._error

    def notify_checkpoint_aborted(self, checkpoint_id: int) -> None:
        return


def failure_of_function(root: Path, function: Any) -> str:
    """Return how a pipeline fails."""
    checkpointing = hg.Checkpointing(interval="20ms", dir=root / "checkpoints")
    pipeline = hg.Pipeline("p", checkpointing=checkpointing, restart=hg.FixedDelay(attempts=3, delay="1ms"))
    pipeline.source(hg.FromRows([{"number": n} for n in range(40)])).map(function, name="mine").sink(hg.Discard())
    with pytest.raises(hg.PipelineFailed) as failed:
        testing.run(pipeline, timeout_s=SECONDS)
    return str(failed.value)


@pytest.mark.parametrize("error", UNUSUAL, ids=["exit", "panic"])
def test_whatever_a_listener_raises_is_its_own_and_may_pass(tmp_path: Path, error: BaseException) -> None:
    said = failure_of_function(tmp_path, Listening(error))
    assert "of operator 'mine' failed; it failed 4 times, and 3 restarts were allowed" in said
    assert f"{type(error).__name__}: {error}" in said


@pytest.mark.parametrize("error", UNUSUAL, ids=["exit", "panic"])
def test_whatever_a_function_raises_the_operator_is_named(tmp_path: Path, error: BaseException) -> None:
    def function(row: dict[str, Any]) -> dict[str, Any]:
        raise error

    assert failure_of_function(tmp_path, function).startswith(f"operator 'mine': {type(error).__name__}: {error}")


BUGS: list[tuple[type, type]] = [
    (Supervisor, supervisor_events.GenerationReady),
    (Supervisor, supervisor_events.WorkerRegistered),
    (Supervisor, supervisor_events.WorkerReady),
    (Supervisor, supervisor_events.GenerationDone),
    (Supervisor, supervisor_events.JobEnded),
    (Coordinator, coordinator_events.Started),
    (Coordinator, coordinator_events.IdReserved),
    (Coordinator, coordinator_events.ManifestWritten),
    (Coordinator, coordinator_events.CommitSucceeded),
]


@pytest.mark.parametrize(("machine", "kind"), few(BUGS, 3))
def test_a_bug_in_the_thread_that_decides_ends_the_run(tmp_path: Path, machine: Any, kind: type) -> None:
    check_bug(tmp_path, machine, kind)


def check_bug(root: Path, machine: Any, kind: type) -> None:
    handle = machine.handle

    def broken(self: Any, event: Any) -> Any:
        if isinstance(event, kind):
            raise AssertionError("a bug")
        return handle(self, event)

    with patched(machine, "handle", broken), pytest.raises(AssertionError, match="a bug"):
        run(root, SqliteSink(str(root / "target.db")))
    assert run(root, SqliteSink(str(root / "target.db"))).is_finished, "nobody holds the pipeline"
