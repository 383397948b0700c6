"""What a running pipeline tells those who watch it, and what they may ask of it.

Counterparts: ``headgate.spark.session`` produces, ``headgate.cli.progress`` shows, users call ``PipelineHandle``.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Protocol, Self, TypeAlias

from headgate.model.ids import CheckpointId, Generation, NodeName

NO_GENERATION = Generation(0)
"""Before the first generation."""


class _Path(Protocol):
    """What ``pathlib.Path`` is."""

    def __fspath__(self) -> str:
        """Return it as text."""
        ...


Location: TypeAlias = str | _Path
"""A path, or a URL."""


class PipelineState(Enum):
    """Where a pipeline is in its life."""

    STARTING = "starting"
    """Waiting for its workers to register and restore."""
    RUNNING = "running"
    RESTARTING = "restarting"
    """A generation failed; waiting for the delay of the restart strategy, or for new workers."""
    DRAINING = "draining"
    """Sources were told to end; what is in flight is processed."""
    STOPPING = "stopping"
    """Was asked to stop, or all input has ended; waiting for the last checkpoint."""
    FINISHED = "finished"
    """Nothing runs any more."""


@dataclass(frozen=True, slots=True)
class NodeProgress:
    """Counters of one operator over all its subtasks, in the current generation."""

    node: NodeName
    records_in: int = 0
    records_out: int = 0
    records_in_per_second: float = 0.0
    records_out_per_second: float = 0.0
    counters: tuple[tuple[str, int], ...] = ()
    """The operator's own counters, by name (for example ``late_records``)."""


@dataclass(frozen=True, slots=True)
class LoopProgress:
    """One loop over all its head subtasks, in the current generation.

    Attributes:
        queued_batches, queued_bytes: feedback that waits to go round again, in memory and on disk.
        queued_bytes_max: the most that ever waited; ``spilled_bytes`` is what waits on disk now.
        log_bytes: feedback kept for checkpoints under way.
        held_channels: feedback channels that wait for a barrier (L6).
        came_back: records that came back.
        throttled_ms: time in which regular input waited for the loop to drain (L25).
        trip_ms: the slowest head's time from the last barrier to its last sentinel: one trip under load.
        round_: the round under way once all input has ended, or -1.
    """

    loop: NodeName
    queued_batches: int = 0
    queued_bytes: int = 0
    queued_bytes_max: int = 0
    spilled_bytes: int = 0
    log_bytes: int = 0
    held_channels: int = 0
    came_back: int = 0
    throttled_ms: int = 0
    trip_ms: int = 0
    round_: int = -1


@dataclass(frozen=True, slots=True)
class CheckpointProgress:
    """A completed checkpoint. ``trigger_wall_ms`` is milliseconds since 1970."""

    checkpoint: CheckpointId
    duration_ms: int
    size_bytes: int
    trigger_wall_ms: int = 0
    generation: Generation = NO_GENERATION
    is_final: bool = False


@dataclass(frozen=True, slots=True)
class PendingCheckpoint:
    """A checkpoint under way. ``missing`` are the subtasks that have not acknowledged, as text (``window[1]``)."""

    checkpoint: CheckpointId
    age_ms: int
    missing: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Progress:
    """A snapshot of a pipeline's life, taken about once a second.

    Attributes:
        restarts: generations that followed the first one of this process.
        watermark_ms: the lowest watermark of all subtasks, milliseconds since 1970, or None before the first.
        busy: share of the time in which the busiest worker was not idle, 0 to 1.
        late_records: records dropped because their window was closed already.
        bad_records: records diverted.
        lost_outputs: pieces of output that a target denied and the pipeline went on without, in all its runs (K26).
    """

    state: PipelineState
    generation: Generation = NO_GENERATION
    restarts: int = 0
    nodes: tuple[NodeProgress, ...] = ()
    watermark_ms: int | None = None
    last_checkpoint: CheckpointProgress | None = None
    pending_checkpoint: PendingCheckpoint | None = None
    busy: float = 0.0
    late_records: int = 0
    bad_records: int = 0
    uptime_ms: int = 0
    loops: tuple[LoopProgress, ...] = ()
    lost_outputs: int = 0


class Continuation(str):
    """The note that says what a generation continues from: text for people, and what it says for whoever must know."""

    def __new__(cls, generation: Generation, checkpoint: CheckpointId, moved: str = "") -> Self:
        """``moved``: what is said of a change of the parallelism."""
        note = super().__new__(cls, f"generation {generation} continues from checkpoint {checkpoint}{moved}")
        note.generation, note.checkpoint = generation, checkpoint
        return note

    generation: Generation
    checkpoint: CheckpointId


class Observer(Protocol):
    """Watches one pipeline. Called from the session's threads, one call at a time; must return quickly."""

    def on_progress(self, progress: Progress) -> None:
        """A fresh snapshot, about once a second and at every change of state."""

    def on_restart(self, reason: str, delay_ms: int) -> None:
        """A generation failed for ``reason``; the next one is started after ``delay_ms``."""

    def on_note(self, text: str) -> None:
        """One sentence that the user should read (``Continuation``, damaged checkpoint skipped, …)."""

    def on_checkpoint(self, checkpoint: CheckpointId, duration_ms: int, size_bytes: int) -> None:
        """A checkpoint was completed."""


class SilentObserver:
    """An observer that ignores everything."""

    def on_progress(self, progress: Progress) -> None:
        """Ignore it."""

    def on_restart(self, reason: str, delay_ms: int) -> None:
        """Ignore it."""

    def on_note(self, text: str) -> None:
        """Ignore it."""

    def on_checkpoint(self, checkpoint: CheckpointId, duration_ms: int, size_bytes: int) -> None:
        """Ignore it."""


@dataclass(frozen=True, slots=True)
class RunResult:
    """How a run ended without failing.

    Attributes:
        is_finished: all input ended and everything is committed; False when it was stopped before.
        records_in: records that sources delivered in the last generation.
        records_out: records that reached sinks in the last generation.
        last_checkpoint: the newest completed checkpoint, or None.
        restarts: how often this run was restarted after a failure.
        is_drained: its sources were told to end; it is finished, too.
        savepoint: what came of the one that the run was to end with; None if none was asked for.
        has_removed_checkpoints: it was cancelled, and does not continue: ``Checkpointing(retain_on_cancel=False)``.
        is_removal_in_doubt: it was to remove them, and nobody can tell whether it did: the next start continues or
            begins anew.
    """

    is_finished: bool
    records_in: int = 0
    records_out: int = 0
    last_checkpoint: CheckpointId | None = None
    restarts: int = 0
    duration_ms: int = 0
    is_drained: bool = False
    savepoint: CheckpointOutcome | None = None
    has_removed_checkpoints: bool = False
    is_removal_in_doubt: bool = False


@dataclass(frozen=True, slots=True)
class CheckpointOutcome:
    """What came of a checkpoint that somebody asked for.

    Attributes:
        checkpoint: completed, and begun after it was asked for; None if there is none.
        reason: why there is none, as a clause.
        savepoint: where the savepoint is that was asked for.
        is_refused: nothing was begun.
    """

    checkpoint: CheckpointId | None
    reason: str = ""
    savepoint: str | None = None
    is_refused: bool = False


class PipelineHandle(Protocol):
    """A started pipeline."""

    @property
    def progress(self) -> Progress:
        """The latest snapshot."""

    def wait(self, timeout_s: float | None = None) -> RunResult | None:
        """Wait until the pipeline ended; None when ``timeout_s`` passed before.

        Raises:
            PipelineFailed: the restart strategy gave up.
            FencedError: another driver of the same pipeline took over.
        """

    def stop(
        self, timeout_s: float | None = None, *, drain: bool = False, savepoint: Location | None = None
    ) -> RunResult | None:
        """Take a last checkpoint, then stop; a later run of the same pipeline continues from it.

        With ``drain`` the sources end as if their input had ended: windows fire, everything in flight is processed,
        and the last checkpoint is final. A drained pipeline has finished: it does not continue.

        Args:
            timeout_s: how long to wait; None: until the end.
            drain: see above.
            savepoint: a place at which a savepoint of the last checkpoint is written; ``RunResult.savepoint`` says what
                came of it.

        Raises:
            UsageError: the savepoint cannot be there; the pipeline goes on.
        """

    def take_checkpoint(self, timeout_s: float | None = None) -> CheckpointOutcome | None:
        """Take a checkpoint now, without waiting for the interval or the pause, and wait for what comes of it.

        Returns:
            None when ``timeout_s`` passed before. The checkpoint may still complete.
        """

    def take_savepoint(self, path: Location, timeout_s: float | None = None) -> CheckpointOutcome | None:
        """Write a savepoint at ``path``, an empty directory or a URL, and wait for what comes of it.

        It holds the state of a checkpoint that is taken now. Nobody but its owner ever removes it.

        Returns:
            What came of it; ``savepoint`` is set if there is one. None when ``timeout_s`` passed before.

        Raises:
            UsageError: it cannot be there.
        """

    def answer_requests(self) -> None:
        """Take a checkpoint for whoever asks from another process, and tell them what came of it."""

    def cancel(self, *, retain: bool = False) -> None:
        """Stop at once, without a last checkpoint; a later run continues from the latest completed one.

        With ``Checkpointing(retain_on_cancel=False)`` the checkpoints are removed, unless ``retain`` is given.
        """

    def checkpoints(self) -> tuple[CheckpointProgress, ...]:
        """Return the completed checkpoints of this run, oldest first (bounded)."""

    def metrics(self) -> dict[str, dict[str, int | float]]:
        """Return ``node → metric → number`` of the latest snapshot."""
