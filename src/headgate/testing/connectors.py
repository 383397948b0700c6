"""A source that follows a script (records, pauses, one failure, the end); a sink that shows what it committed."""

from __future__ import annotations

import struct
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any, TypeAlias

import pyarrow as pa

from headgate.codec.exact_values import MisfitError, exact_array
from headgate.connectors.base import Source, SourceBatch, SourceContext, SourceReader
from headgate.connectors.files.file_committer import read_committed
from headgate.connectors.files.file_sink import FileSink
from headgate.errors import UsageError
from headgate.operators.schemas import SchemaLike, arrow_schema, canonical_schema


class Collect(FileSink):
    """A sink for tests that keeps committed records in a directory. They are Parquet files, so types are preserved."""

    def __init__(self, path: str | Path) -> None:
        """Configure; ``path`` is a directory that every worker can reach."""
        super().__init__(path, "parquet", prefix="collected", roll_interval=0)

    def rows(self) -> list[dict[str, Any]]:
        """Return the records of completed checkpoints, in the order of checkpoints and subtasks."""
        return read_committed(self.url).to_dicts()


_POSITION = struct.Struct("<Q")


class Mark(Enum):
    """Items of a script that are no records."""

    EOF = "end of input"
    PAUSE = "nothing for pause_ms"


EOF = Mark.EOF
"""An item of a script: the source ends here. Without it the source never ends."""

PAUSE = Mark.PAUSE
"""An item of a script: the source delivers nothing for a while, so that checkpoints can complete."""


@dataclass(frozen=True, slots=True)
class FailOnce:
    """An item of a script: the reader raises here, unless the file ``marker`` shows that it has raised before."""

    marker: Path | str


Item: TypeAlias = Mapping[str, Any] | Sequence[Mapping[str, Any]] | Mark | FailOnce


class ScriptedFailure(Exception):  # noqa: N818 - reads as what happened
    """The failure that a script asked for."""


class ScriptedSource(Source):
    """A source for tests that delivers the items of a script, one per poll.

    Subtask i follows script i. Subtasks without a script end at once.
    """

    def __init__(
        self,
        *scripts: Sequence[Item],
        schema: SchemaLike,
        pause_ms: int = 50,
    ) -> None:
        """Configure.

        Args:
            scripts: one script for each split. An item is a row, a list of rows (one batch), ``PAUSE``, ``FailOnce`` or
                ``EOF``.
            schema: the types of the rows.
            pause_ms: the length of a ``PAUSE`` in milliseconds.

        Raises:
            UsageError: an item follows ``EOF``.
        """
        for script in scripts:
            if EOF in script[:-1]:
                raise UsageError("a script goes on after EOF; make EOF its last item")
        self._scripts = [list(script) for script in scripts]
        self._schema = canonical_schema(arrow_schema(schema))
        self._pause_ms = pause_ms

    def schema(self) -> pa.Schema:
        """Return the rows' schema."""
        return self._schema

    def identity(self) -> str:
        """Positions are item numbers."""
        return "script, version 1"

    def open(self, context: SourceContext) -> SourceReader:
        """Return a reader of the scripts that this subtask owns."""
        return _ScriptReader(self._scripts, self._schema, self._pause_ms, context)


class _ScriptReader(SourceReader):
    def __init__(self, scripts: list[list[Item]], schema: pa.Schema, pause_ms: int, context: SourceContext) -> None:
        positions = context.positions or {}
        self._scripts, self._schema, self._pause_ms = scripts, schema, pause_ms
        own = range(context.subtask_index, len(scripts), context.parallelism)
        self._next = {i: int(_POSITION.unpack(positions.get(str(i), bytes(8)))[0]) for i in own}
        self._ended: set[int] = {i for i, item in self._next.items() if self._is_over(i, item)}
        self._paused_until = 0.0
        self._turn = 0

    def _is_over(self, index: int, item: int) -> bool:
        script = self._scripts[index]
        return bool(script) and script[-1] is EOF and item >= len(script)

    def splits(self) -> Sequence[str]:
        return [str(index) for index in self._next if index not in self._ended]

    def is_finished(self) -> bool:
        return len(self._ended) == len(self._next)

    def positions(self) -> dict[str, bytes]:
        return {str(index): _POSITION.pack(item) for index, item in self._next.items()}

    def wakeup_ms(self) -> int:
        return 1

    def close(self) -> None:
        """Nothing is open."""

    def poll(self) -> SourceBatch | None:
        if time.monotonic() < self._paused_until:
            return None
        own = list(self._next)
        for _ in own:
            index = own[self._turn % len(own)]
            self._turn += 1
            if self._next[index] < len(self._scripts[index]):
                return self._run(index, self._scripts[index][self._next[index]])
        return None

    def _run(self, index: int, item: Item) -> SourceBatch | None:
        if isinstance(item, FailOnce):
            marker = Path(item.marker)
            if not marker.exists():
                marker.touch()
                raise ScriptedFailure(f"the script of split {index} fails at item {self._next[index]}")
        self._next[index] += 1
        if isinstance(item, Mapping):
            return self._batch(index, [item])
        if item is EOF:
            self._ended.add(index)
            return self._batch(index, [])
        if item is PAUSE:
            self._paused_until = time.monotonic() + self._pause_ms / 1_000
        if isinstance(item, FailOnce | Mark):
            return None
        return self._batch(index, item)

    def _batch(self, index: int, rows: Sequence[Mapping[str, Any]]) -> SourceBatch:
        columns = [_column([row.get(field.name) for row in rows], field) for field in self._schema]
        batch = pa.RecordBatch.from_arrays(columns, schema=self._schema)
        return SourceBatch(str(index), batch, is_split_finished=index in self._ended)


def _column(values: list[Any], field: pa.Field) -> pa.Array:
    try:
        return exact_array(values, field.type)
    except MisfitError as error:
        raise UsageError(f"a row of the script does not fit: column {error.within(field.name)}") from None
