"""How a run ends: its result for those who wait, and the word that is left in the pipeline's lock.

Counterparts: ``spark.session`` hands the result out, ``runtime.driver.stopping`` reads the word from another process.
"""

from __future__ import annotations

from concurrent.futures import Future
from dataclasses import replace

from headgate.codec.lock_holder import Ending
from headgate.errors import FencedError, HeadgateError, PipelineFailed, with_remedy
from headgate.model.definition import PipelineDefinition
from headgate.model.failure import Failure, FailureKind, Refusal
from headgate.model.graph import Role
from headgate.model.ids import CheckpointId
from headgate.model.progress import Progress, RunResult
from headgate.remedies import BringOutputBack, Remedy
from headgate.runtime.driver.pipeline_lock import PipelineLock
from headgate.runtime.surroundings import Surroundings


class RunEnd:
    """The outcome of one run, decided once."""

    def __init__(self, definition: PipelineDefinition, lock: PipelineLock, around: Surroundings) -> None:
        self._roles = {node.name: node.role for node in definition.graph.nodes}
        self._lock = lock
        self._around = around
        self._begun_ms = around.monotonic_ms()
        self.result: Future[RunResult] = Future()

    @property
    def is_over(self) -> bool:
        """Whether the run has an outcome."""
        return self.result.done()

    def fail(self, error: BaseException) -> None:
        """End with ``error``, unless the run is over."""
        if not self.is_over:
            self.result.set_exception(error)

    def succeed(
        self,
        progress: Progress,
        last_checkpoint: CheckpointId | None,
        how: RunResult,
    ) -> None:
        """End well, unless the run is over. ``how`` says all but the numbers."""
        if self.is_over:
            return
        records_in = sum(n.records_out for n in progress.nodes if self._roles.get(n.node) is Role.SOURCE)
        records_out = sum(n.records_in for n in progress.nodes if self._roles.get(n.node) is Role.SINK)
        took_ms = self._around.monotonic_ms() - self._begun_ms
        found = replace(
            how,
            records_in=records_in,
            records_out=records_out,
            last_checkpoint=None if how.has_removed_checkpoints else last_checkpoint,
            restarts=progress.restarts,
            duration_ms=took_ms,
        )
        self.result.set_result(found)

    def release_lock(self) -> None:
        """Leave word for those who wait for the end of this run, and let others run the pipeline."""
        error = self.result.exception()
        if error is not None:
            self._lock.release(Ending.FAILED, None, str(error))
            return
        result = self.result.result()
        self._lock.release(_ending_of(result), result.last_checkpoint, "", is_in_doubt=result.is_removal_in_doubt)


def _ending_of(result: RunResult) -> Ending:
    if result.has_removed_checkpoints:
        return Ending.CANCELLED
    return Ending.DRAINED if result.is_drained else Ending.FINISHED if result.is_finished else Ending.STOPPED


def error_of(failure: Failure) -> HeadgateError:
    """Return what is raised for a run that ended with ``failure``."""
    if failure.kind is FailureKind.REPLACED:
        return FencedError(failure.reason)
    is_for_good = failure.is_hopeless or failure.kind is FailureKind.USER_CODE  # KR4
    return with_remedy(PipelineFailed(failure.reason, failure.detail, is_for_good), _remedy_of(failure))


def _remedy_of(failure: Failure) -> Remedy | None:
    if isinstance(failure, Refusal):
        return failure.remedy
    return BringOutputBack() if failure.kind is FailureKind.DENIED else None
