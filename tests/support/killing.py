"""Runs in this process with input until a test has done to them what it wants to, on slow and on fast machines."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import headgate as hg
from headgate import testing
from headgate.connectors.base import AnyReader, Source, SourceBatch, SourceContext
from headgate.model.ids import CheckpointId
from headgate.model.plan import PipelineDefinition
from headgate.model.progress import Progress, RunResult, SilentObserver

RUN_S_MAX = 300.0


def run_killing(pipeline: hg.Pipeline, kills: int | Sequence[int], **options: Any) -> RunResult:
    """Run a pipeline and kill a worker after so many checkpoints: ``testing.run``, whose input ends only after that."""
    last = kills if isinstance(kills, int) else max(kills)
    result = run_long(pipeline, last, kill_worker_after_checkpoint=kills, **options)
    assert result.restarts >= 1, "no worker was killed"
    return result


def run_long(
    pipeline: hg.Pipeline, checkpoints: int, *, observer: Any = None, timeout_s: float = RUN_S_MAX, **options: Any
) -> RunResult:
    """Run a pipeline whose input ends only after more checkpoints than ``checkpoints``: ``testing.run``."""
    with tempfile.TemporaryDirectory(prefix="headgate-test-") as directory:
        gate = Path(directory) / "gate"
        watching = _Opening(observer or SilentObserver(), checkpoints, gate)
        return testing.run(held_pipeline(pipeline, gate), observer=watching, timeout_s=timeout_s, **options)


def held_pipeline(pipeline: hg.Pipeline, gate: Path) -> Any:
    """Return ``pipeline`` as ``testing`` runs it, but that its sources do not end before ``gate``, a file, is there."""
    return _HeldPipeline(pipeline, gate)


class _Opening(SilentObserver):
    """Opens the gate after the last checkpoint that matters, and what it led to."""

    def __init__(self, inner: Any, last: int, gate: Path) -> None:
        self._inner, self._last, self._gate, self._checkpoints_count = inner, last, gate, 0

    def on_progress(self, progress: Progress) -> None:
        self._inner.on_progress(progress)

    def on_note(self, text: str) -> None:
        self._inner.on_note(text)

    def on_restart(self, reason: str, delay_ms: int) -> None:
        self._inner.on_restart(reason, delay_ms)
        if self._checkpoints_count >= self._last:
            self._gate.touch()

    def on_checkpoint(self, checkpoint: CheckpointId, duration_ms: int, size_bytes: int) -> None:
        self._inner.on_checkpoint(checkpoint, duration_ms, size_bytes)
        self._checkpoints_count += 1
        if self._checkpoints_count > self._last:
            self._gate.touch()


class _HeldPipeline:
    """A pipeline whose sources do not end before the gate is there."""

    def __init__(self, pipeline: hg.Pipeline, gate: Path) -> None:
        self._pipeline, self._gate, self.name = pipeline, gate, pipeline.name

    def start_with(self, starter: Callable[[PipelineDefinition, Any], Any], **options: Any) -> Any:
        return self._pipeline.start_with(lambda made, watcher: starter(self._held(made), watcher), **options)

    def _held(self, definition: PipelineDefinition) -> PipelineDefinition:
        vertices = tuple(
            replace(vertex, nodes=tuple(self._held_node(node) for node in vertex.nodes))
            for vertex in definition.plan.vertices
        )
        return replace(definition, plan=replace(definition.plan, vertices=vertices))

    def _held_node(self, node: Any) -> Any:
        return replace(node, spec=_Held(node.spec, self._gate)) if isinstance(node.spec, Source) else node


@dataclass(frozen=True)
class _Held(Source):
    """A source that is ``inner``, but for its end."""

    inner: Source
    gate: Path

    def schema(self) -> Any:
        return self.inner.schema()

    def identity(self) -> str:
        return self.inner.identity()

    def locations(self) -> Any:
        return self.inner.locations()

    def open(self, context: SourceContext) -> AnyReader:
        reader: Any = _HeldReader(self.inner.open(context), self.gate)
        return reader  # type: ignore[no-any-return]


class _HeldReader:
    """Keeps back what brings the last of its splits to the end."""

    def __init__(self, inner: Any, gate: Path) -> None:
        self._inner, self._gate = inner, gate
        self._before: tuple[Sequence[str], dict[str, bytes]] | None = None
        """Splits and positions without what is kept back."""
        self._kept: SourceBatch | None = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def poll(self) -> Any:
        if self._before is None:
            before = self._inner.splits(), self._inner.positions()
            found = self._inner.poll()
            if not before[0] or not self._inner.is_finished() or self._gate.exists():
                return found
            self._before, self._kept = before, found
        if not self._gate.exists():
            return None
        self._before, kept, self._kept = None, self._kept, None
        return kept

    def splits(self) -> Sequence[str]:
        return self._inner.splits() if self._before is None else self._before[0]

    def positions(self) -> dict[str, bytes]:
        return self._inner.positions() if self._before is None else self._before[1]

    def is_finished(self) -> bool:
        return self._before is None and self._inner.is_finished()

    def wakeup_ms(self) -> int:
        return self._inner.wakeup_ms() if self._before is None else 5
