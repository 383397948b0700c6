"""The coordinator alone, with up to 10,000 simulated subtasks: its processor time for one checkpoint.

The product's own ``Coordination``, its log included, with the storage in memory and everything in this thread. One
subtask in ten is a sink with prepared output. Measured is from the trigger to the removal of the checkpoint that is not
kept any more: every acknowledgement, the manifest, the commit, and what is said to the workers. What it takes to decode
the acknowledgements, which are messages in a run, and the machine alone, without a log, stand beside it.
Settings: ``subtasks`` (list), ``checkpoints`` (of each).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import headgate as hg
from bench.harness import Options, Result, at_most, median, spread
from headgate.codec.messages import Acknowledge, ToWorker, decode_from_worker, encode_message
from headgate.model.config import CheckpointConfig
from headgate.model.ids import CheckpointId, Generation, SubtaskId
from headgate.model.manifest import Committable, KeyGroups, Manifest, SnapshotPart, SubtaskEntry
from headgate.model.plan import PipelineDefinition
from headgate.model.progress import CheckpointProgress
from headgate.protocol.checkpoints import coordinator as machine
from headgate.protocol.checkpoints import coordinator_events
from headgate.protocol.checkpoints.commit import CommitPermit
from headgate.runtime.checkpoints.log import CheckpointLog
from headgate.runtime.driver.coordinator_host import CoordinatorHost, Pools
from headgate.runtime.driver.restart import NewGeneration
from headgate.storage.memory import MemoryStorage

NAME = "coordinator"

SUBTASKS = (1_000, 2_000, 5_000, 10_000)
CPU_MS_MAX = 100.0
GROWTH_MAX = 1.5
"""How much more a subtask of the largest run may cost than one of the smallest: caches hold less of it."""

VERTICES = 10
GENERATION = Generation(1)


def run(options: Options) -> Result:
    """Measure every number of subtasks."""
    checkpoints = int(options.number("checkpoints", 15, quick=7))
    counts = sorted(options.numbers("subtasks", SUBTASKS))
    measured = {count: measure(count, checkpoints) for count in counts}
    most, least = counts[-1], counts[0]
    per_subtask = {count: found["cpu_ms"] / count for count, found in measured.items()}
    figures: dict[str, Any] = {
        f"cpu_ms_{most}_subtasks": measured[most]["cpu_ms"],
        "growth_per_subtask": per_subtask[most] / per_subtask[least],
        "by_subtasks": {str(count): found for count, found in measured.items()},
    }
    targets = {f"cpu_ms_{most}_subtasks": at_most(CPU_MS_MAX), "growth_per_subtask": at_most(GROWTH_MAX)}
    return Result(figures, targets)


def measure(count: int, checkpoints: int) -> dict[str, float]:
    """Return the processor time of one checkpoint of ``count`` subtasks, in milliseconds: medians."""
    subtasks = definition_of(count).plan.subtasks()
    run_ = Run(definition_of(count))
    whole, alone, decoding = [], [], []
    for number in range(1, checkpoints + 1):
        checkpoint = CheckpointId(number)
        acks = acknowledgements(subtasks, checkpoint)
        whole.append(_cpu_ms(lambda c=checkpoint, a=acks: run_.checkpoint(c, a)))  # type: ignore[misc]
        alone.append(_cpu_ms(lambda a=acks: machine_alone(subtasks, a)))  # type: ignore[misc]
        raw = [encode_message(Acknowledge(ack)) for ack in acks]
        decoding.append(_cpu_ms(lambda r=raw: [decode_from_worker(one) for one in r]))  # type: ignore[misc]
    return {
        "cpu_ms": median(whole),
        "cpu_ms_spread": spread(whole),
        "machine_ms": median(alone),
        "decoding_ms": median(decoding),
        "manifest_bytes": float(run_.manifest_bytes()),
    }


def _cpu_ms(call: Callable[[], object]) -> float:
    begun = time.thread_time()
    call()
    return (time.thread_time() - begun) * 1_000


def definition_of(count: int) -> PipelineDefinition:
    """Return a pipeline of ``count`` subtasks."""
    parallelism = count // VERTICES
    checkpointing = hg.Checkpointing(interval=None, dir="memory://bench", retained=2)
    p = hg.Pipeline(
        "coordinator", parallelism=parallelism, max_parallelism=max(parallelism, 128), checkpointing=checkpointing
    )
    stream = p.source(hg.Generator())
    for number in range(VERTICES - 1):
        stream = stream.rebalance().select("key", "value", name=f"step-{number}")
    stream.sink(hg.Discard(), name="sink")
    return p.definition()


def acknowledgements(subtasks: Sequence[SubtaskId], checkpoint: CheckpointId) -> list[coordinator_events.Acknowledged]:
    """Return what every subtask says: a part of a file each, and some of them prepared output."""
    last = max(subtask.vertex for subtask in subtasks)
    return [_acknowledged(subtask, checkpoint, is_sink=subtask.vertex == last) for subtask in subtasks]


def _acknowledged(subtask: SubtaskId, checkpoint: CheckpointId, *, is_sink: bool) -> coordinator_events.Acknowledged:
    path = f"chk-{checkpoint:010d}/{subtask.vertex}-{subtask.index}.g{GENERATION}"
    rows = {str(subtask.vertex): {"totals": 1_000}}
    part = SnapshotPart(40_000, 0x9E3779B97F4A7C15, path, b"", rows, f"state/{subtask.vertex}", KeyGroups(0, 1))
    output = Committable("sink", checkpoint, subtask.index, GENERATION, b"x" * 100)
    entry = SubtaskEntry(subtask, (part,), (output,) if is_sink else ())
    return coordinator_events.Acknowledged(GENERATION, checkpoint, entry)


def machine_alone(subtasks: tuple[SubtaskId, ...], acks: Sequence[coordinator_events.Acknowledged]) -> None:
    """Give the machine, without interpreter and log, the events of one checkpoint."""
    checkpoint = acks[0].checkpoint
    made = machine.Coordinator(GENERATION, subtasks, CheckpointConfig(interval_ms=0), checkpoint)
    begin: list[coordinator_events.Event] = [
        coordinator_events.Started(0),
        coordinator_events.CheckpointRequested(),
        coordinator_events.IdReserved(checkpoint),
    ]
    end: list[coordinator_events.Event] = [
        coordinator_events.ManifestWritten(checkpoint),
        coordinator_events.CommitSucceeded(checkpoint),
    ]
    for event in (*begin, *acks, *end):
        made.handle(event)
    assert made.last_completed == checkpoint


class Run:
    """A coordination whose pools and timers are this thread."""

    def __init__(self, definition: PipelineDefinition) -> None:
        self._storage = MemoryStorage("bench")
        log = CheckpointLog(self._storage, definition.config.name)
        claimed = log.claim("bench", 0)
        begun = NewGeneration(claimed.next.generation, claimed.first_checkpoint, None, (), _Visible())  # type: ignore[arg-type]
        assert begun.generation == GENERATION
        self._thread = _Here()
        self._outcomes = _Outcomes()
        pools = Pools(self._thread, self._thread, self._thread)
        self._coordination = CoordinatorHost(
            definition, begun, log, self._thread, self._outcomes, self._outcomes, pools
        )
        self._coordination.start(0)
        self._thread.run()

    def checkpoint(self, checkpoint: CheckpointId, acks: Sequence[coordinator_events.Acknowledged]) -> None:
        """Take one."""
        self._coordination.handle(coordinator_events.CheckpointRequested())
        self._thread.run()
        for ack in acks:
            self._coordination.handle(ack)
        self._thread.run()
        assert self._outcomes.completed == checkpoint, self._outcomes.notes

    def manifest_bytes(self) -> int:
        """Return how large the newest entry of the log is."""
        return len(self._storage.get(max(self._storage.list("coordinator/log"))))


class _Here:
    """Pool and timers: what was submitted or posted runs when ``run`` is called; no timer ever fires."""

    def __init__(self) -> None:
        self._calls: list[Callable[[], object]] = []

    def run(self) -> None:
        while self._calls:
            calls, self._calls = self._calls, []
            for call in calls:
                call()

    def submit(self, call: Callable[..., object], /, *arguments: Any) -> None:
        self._calls.append(lambda: call(*arguments))

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        self._calls.clear()

    def post(self, call: Callable[[], None]) -> None:
        self._calls.append(call)

    def arm(self, timer: object, after_ms: int, fire: Callable[[], None]) -> None:
        return

    def cancel_timer(self, timer: object) -> None:
        return


class _Visible:
    """The targets: everything is visible at once."""

    def commit(self, permit: CommitPermit, committables: Sequence[Committable]) -> None:
        assert committables

    def forget(self, before: CheckpointId) -> None:
        return

    def close(self) -> None:
        return


class _Outcomes:
    """Who is told."""

    def __init__(self) -> None:
        self.completed = CheckpointId(0)
        self.notes: list[str] = []

    def broadcast(self, message: ToWorker) -> None:
        encode_message(message)

    def checkpoint_completed(self, progress: CheckpointProgress, manifest: Manifest) -> None:
        self.completed = progress.checkpoint

    def note(self, text: str) -> None:
        self.notes.append(text)

    def request_answered(self, effect: coordinator_events.AnswerRequest) -> None:
        return

    def generation_failed(self, effect: coordinator_events.FailGeneration) -> None:
        raise RuntimeError(effect.failure.reason)

    def generation_done(self, effect: coordinator_events.ConcludeGeneration) -> None:
        return
