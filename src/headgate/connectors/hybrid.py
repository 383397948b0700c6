"""``Hybrid``: several sources one after the other, such as files with history and then a topic, as one source.

A source begins when all subtasks have read the one before it to its end. The driver says when, so that all of them open
it between the same two checkpoints (docs/spec/connectors.md). Modelled on Flink's ``HybridSource``.
"""

from __future__ import annotations

import copy
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace

import pyarrow as pa

from headgate.connectors.base import (
    AnyReader,
    FailStopReader,
    HoldContext,
    PausableReader,
    Source,
    SourceBatch,
    SourceContext,
    SplitPosition,
    check_is_source,
)
from headgate.errors import UsageError
from headgate.model.ids import CheckpointId
from headgate.operators.schemas import canonical_schema, schema_text

_BEGUN = "begun/"
"""In front of the number of a subtask: the position of this split is which source the subtask was reading."""


class Hybrid(Source):
    """Reads bounded sources one after the other, and then the last one, which may have no end.

    A source begins when all subtasks have read the one before it to its end. All of it is one source with one position.
    Where the last source begins is its own ``start``: choose it so that it continues where the files end.
    """

    def __init__(self, *sources: Source) -> None:
        """Configure.

        Args:
            sources: two sources or more, in the order in which they are read; a Hybrid stands for its own. All but the
                last one must end. A checkpoint can be continued only with the same sources.

        Raises:
            UsageError: there is only one, one that another follows has no end, or one sets markers of checkpoints.
        """
        if len(sources) < 2:
            raise UsageError(
                "Hybrid takes two sources or more, such as Hybrid(TextFiles('old/'), Kafka(brokers, topic))"
            )
        parts: list[Source] = [part for one in sources for part in (one.sources if isinstance(one, Hybrid) else (one,))]
        for number, source in enumerate(parts, 1):
            check_is_source(source)
            end = source.how_to_end()
            if number < len(parts) and end is not None:
                raise UsageError(f"source {number} of Hybrid never ends, so the next one would never be read; {end}")
            if source.coordinator_hook() is not None:
                raise UsageError(f"source {number} of Hybrid brings a hook along; read it with a source() of its own")
        self.sources: tuple[Source, ...] = tuple(parts)

    def schema(self) -> pa.Schema:
        """Return the schema of all sources.

        Raises:
            UsageError: their schemas differ, or one cannot be read.
        """
        schemas = [canonical_schema(source.schema()) for source in self.sources]
        for number, schema in enumerate(schemas[1:], 2):
            if not schema.equals(schemas[0]):
                raise UsageError(
                    f"the sources of Hybrid need equal schemas: source 1 has {schema_text(schemas[0])}, source "
                    f"{number} has {schema_text(schema)}; give each the same schema="
                )
        return schemas[0]

    def identity(self) -> str:
        """Positions mean the same while all sources are the same and at the same places."""
        names = []
        for source in self.sources:
            places = ", ".join(place.real for place in source.locations() or ())
            names.append(f"{source.identity()} ({places})" if places else source.identity())
        return f"hybrid: {'; then '.join(names)}"

    def how_to_end(self) -> str | None:
        return self.sources[-1].how_to_end()

    def open(self, context: SourceContext) -> AnyReader:
        """Return a reader of the splits that this subtask owns."""
        return HybridReader(self.sources, context)

    @property
    def holds(self) -> bool:
        return any(source.holds for source in self.sources)

    def hold(self, context: HoldContext, needed: Sequence[Mapping[str, bytes]]) -> None:
        """Keep the input of each source that has not been read; see ``Source``."""
        begun = [_begun(positions) for positions in needed]
        for number, source in enumerate(self.sources):
            if not source.holds:
                continue
            own = [_of(positions, number) for positions, at in zip(needed, begun, strict=True) if at == number]
            is_all_needed = not needed or any(at < number for at in begun)
            if own or is_all_needed:
                source.hold(context, [] if is_all_needed else own)

    @property
    def publishes(self) -> bool:
        return any(source.publishes for source in self.sources)

    def publish(
        self, context: HoldContext, checkpoint: CheckpointId | None, positions: Mapping[str, bytes], *, begins: bool
    ) -> None:
        """Publish for the source that is read, and for those to come when a generation begins; see ``Source``."""
        at = _begun(positions)
        for number, source in enumerate(self.sources):
            if source.publishes and (number == at or (begins and number > at)):
                source.publish(context, checkpoint, _of(positions, number), begins=begins)

    def without_hook(self) -> Hybrid:
        """See ``Source``: of each source."""
        look = copy.copy(self)
        look.sources = tuple(source.without_hook() for source in self.sources)
        return look


def _begun(positions: Mapping[str, bytes]) -> int:
    """Return which source was read; all subtasks switch in the same checkpoint."""
    return max((int(data) for split, data in positions.items() if split.startswith(_BEGUN)), default=0)


def _of(positions: Mapping[str, bytes], number: int) -> dict[str, bytes]:
    """Return the positions in source ``number``, by the names of its own splits."""
    prefix = f"{number}/"
    return {split.removeprefix(prefix): data for split, data in positions.items() if split.startswith(prefix)}


class HybridReader(FailStopReader):
    """Reads one source at a time (see ``connectors.base.PartsReader``). Splits have its number in front."""

    def __init__(self, sources: Sequence[Source], context: SourceContext) -> None:
        self._sources, self._context = sources, context
        stored = context.positions
        self._number = 0 if stored is None else _begun(stored)
        if self._number >= len(sources):
            raise UsageError(
                f"the restored position is in source {self._number + 1} of Hybrid, which has {len(sources)}"
            )
        self._open(None if stored is None else _of(stored, self._number))

    def _open(self, positions: dict[str, bytes] | None) -> None:
        source = self._sources[self._number]
        # What the program reads now is in the identity, so no place has moved.
        self._reader = source.open(replace(self._context, positions=positions, relocation=None))

    @property
    def ended_parts(self) -> int:
        """How many of the sources this subtask has read to their end."""
        return self._number + (1 if self._reader.is_finished() else 0)

    def begin_part(self, number: int) -> None:
        """All subtasks have read the sources in front of ``number`` to their end."""
        if self._number < number < len(self._sources):
            assert self._number + 1 == number == self.ended_parts, "sources are read one after the other"
            self._reader.close()
            self._number = number
            self._open(None)

    def splits(self) -> Sequence[str]:
        return [self._named(split) for split in self._reader.splits()]

    def _named(self, split: str) -> str:
        return f"{self._number}/{split}"

    def _poll(self) -> SourceBatch | None:
        polled = self._reader.poll()
        if polled is None:
            return None
        assert isinstance(polled, SourceBatch), "sources with markers are refused"
        return replace(polled, split=self._named(polled.split))

    def _has_ended(self) -> bool:
        return self._number == len(self._sources) - 1 and self._reader.is_finished()

    def _positions(self) -> dict[str, bytes]:
        own = {self._named(split): data for split, data in self._reader.positions().items()}
        return {**own, f"{_BEGUN}{self._context.subtask_index}": b"%d" % self._number}

    def progress(self) -> Mapping[str, SplitPosition]:
        found: Mapping[str, SplitPosition] = getattr(self._reader, "progress", dict)()
        return {self._named(split): position for split, position in found.items()}

    def pause(self, splits: Collection[str]) -> None:
        """See ``PausableReader``. A reader that cannot pause reads on."""
        if isinstance(self._reader, PausableReader):
            self._reader.pause([split.partition("/")[2] for split in splits if split.startswith(f"{self._number}/")])

    def is_behind(self, split: str) -> bool:
        reader = self._reader
        return isinstance(reader, PausableReader) and reader.is_behind(split.partition("/")[2])

    def wakeup_ms(self) -> int:
        return 100 if self._reader.is_finished() else self._reader.wakeup_ms()

    def close(self) -> None:
        self._reader.close()
