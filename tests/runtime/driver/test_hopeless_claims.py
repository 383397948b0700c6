"""What a repetition cannot cure when a generation begins stops the pipeline for good; what may pass does not (K5)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from tests.runtime.driver.test_owning import begin

import headgate as hg
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
from headgate.model.failure import Failure, FailureKind
from headgate.model.ids import Generation
from headgate.model.pipeline_identity import Life, Owner
from headgate.runtime.checkpoints.log import CheckpointLog
from headgate.runtime.driver import restart, supervisor_host
from headgate.runtime.driver.driver import error_of


class Broken(hg.FileSink):
    """A file sink one of whose calls fails."""

    fails = ""
    error: Exception

    def owner(self, pipeline: str, node: str) -> Owner:
        self._perhaps_fail("owner")
        return super().owner(pipeline, node)

    def own(self, pipeline: str, node: str, life: Life) -> Owner:
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

CALLS = ["owner", "own", "make_target", "open_committer"]


def failed(home: Path, sink: Any) -> Exception:
    """Begin a generation; return with what it fails."""
    with pytest.raises(Exception, match="the thing") as caught:
        begin(home, out=sink)
    return caught.value


@pytest.mark.parametrize("error", [DAMAGE, RIGHTS], ids=["damage", "rights"])
@pytest.mark.parametrize("where", CALLS)
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
) -> None:  # K5, LV1
    def fails(*_: object) -> Life:
        raise error

    monkeypatch.setattr(CheckpointLog, "life", fails)
    failure = supervisor_host.claim_failure(failed(tmp_path / "home", hg.Discard()))
    assert failure.kind is FailureKind.DETERMINISTIC
    assert f"pipeline 'p' cannot tell which life of it {tmp_path}/home/p holds: " in failure.reason


@pytest.mark.parametrize("where", CALLS)
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
    # A hook is left to the restart strategy, whatever it raises (EI8).
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
