"""``LoopHead``: what the head of a loop does to batches. Rounds are counted here (L35 of docs/spec/loops.md).

Counterpart: ``runtime.worker.loop_head`` decides when records enter, come back or are replayed; this file never
does.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from headgate.dataclass import dataclass
from headgate.errors import UsageError
from headgate.model.state_schema import name_text
from headgate.operators.base import Operator
from headgate.state.descriptors import schema_identity

NO_ROUND = -1
"""The highest round of a batch that has none."""


@dataclass(frozen=True)
class LoopHeadSpec:
    """Where a loop's records enter and come back.

    Attributes:
        keys: of a keyed loop; records come back to the subtask that owns their key.
        schema: of the loop stream (canonical), with the round column, which is the last.
        round_column: int64, 0 on entry and one more each time a record comes back; None: rounds are not counted.
        max_rounds: a record that comes back with this round is dropped.
        on_round: called in the driver when a round is globally finished. Does not travel to the workers.
    """

    keys: tuple[str, ...]
    schema: pa.Schema
    round_column: str | None = None
    max_rounds: int | None = None
    on_round: Callable[[int], object] | None = None

    def build(self) -> LoopHeadOperator:
        return LoopHeadOperator(self)

    def output_schema(self, schema: pa.Schema, node: str) -> pa.Schema:
        """Return the schema of the loop stream."""
        return self.schema

    def state_text(self) -> str:
        """See ``specs.state_text``. Rounds may be limited differently after a restore, but not begin to exist."""
        keys = f"keys {', '.join(map(name_text, self.keys))}; " if self.keys else ""
        rounds = "" if self.round_column is None else f"round column {name_text(self.round_column)}; "
        return f"loop({keys}columns {schema_identity(self.schema)}; {rounds}log 1)"

    def __getstate__(self) -> dict[str, Any]:
        """Leave the callback out: it is the driver's, and often holds what cannot travel."""
        return {**self.__dict__, "on_round": None}


class LoopHeadOperator(Operator):
    """Passes records on, with their round."""

    def __init__(self, spec: LoopHeadSpec) -> None:
        self._spec = spec
        self._round_at = -1 if spec.round_column is None else spec.schema.get_field_index(spec.round_column)

    @property
    def counts_rounds(self) -> bool:
        """Whether records that come back are changed: they get their next round."""
        return self._spec.round_column is not None

    def process(self, batch: pa.RecordBatch) -> None:
        """See ``Operator``. For records that enter."""
        self.output.emit(self.entering(batch))

    def forward(self, batch: pa.RecordBatch) -> None:
        """Emit records that came back, as ``returning`` made them."""
        self.output.emit(batch)

    def entering(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        """Return records that enter, in round 0."""
        if self._spec.round_column is None:
            return batch
        zeros = pa.repeat(pa.scalar(0, pa.int64()), batch.num_rows)
        return pa.RecordBatch.from_arrays([*batch.columns, zeros], schema=self._spec.schema)

    def returning(self, batch: pa.RecordBatch) -> tuple[pa.RecordBatch, int]:
        """Return records that came back in their next round, without those that had their last, and the highest round.

        Raises:
            UsageError: the body made a round null.
        """
        if self._spec.round_column is None:
            return batch, NO_ROUND
        if batch.column(self._round_at).null_count:
            raise UsageError(
                f"operator '{self.context.node}': a record came back without a round; the body of the loop must pass "
                f"column '{self._spec.round_column}' on as it is"
            )
        rounds = pc.add(batch.column(self._round_at), 1)
        batch = batch.set_column(self._round_at, self._spec.schema.field(self._round_at), rounds)
        highest = self.highest_round(batch)
        if self._spec.max_rounds is not None and highest >= self._spec.max_rounds:
            batch = batch.filter(pc.less(rounds, self._spec.max_rounds))
            highest = self.highest_round(batch)
        return batch, highest

    def highest_round(self, batch: pa.RecordBatch) -> int:
        """Return the highest round of records that ``returning`` made, or -1."""
        if self._spec.round_column is None or batch.num_rows == 0:
            return NO_ROUND
        highest: int = pc.max(batch.column(self._round_at)).as_py()
        return highest
