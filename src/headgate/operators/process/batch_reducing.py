"""How a batch function's ``open`` declares state, and reducing state by batch (ST19).

Counterparts: ``batch_states`` and ``batch_aggregating``, which have the other kinds; ``combining``, the same by row.
"""

from __future__ import annotations

from typing import Any

import polars as pl

from headgate.operators.process.batch_aggregating import (
    BatchAggregateFunction,
    BatchAggregatingState,
    refuse_no_function,
)
from headgate.operators.process.batch_states import BatchListState, BatchMapState, BatchValueState, How, Keys
from headgate.operators.process.broadcast_states import BatchBroadcastState
from headgate.operators.process.declaring import Declarations
from headgate.state.evolution import NO_EVOLUTION, Evolution
from headgate.state.ttl import TTL


class BatchReducingState:
    """A value per key: the first that was added, combined with each later one."""

    def __init__(self, value: BatchValueState, how: How) -> None:
        """For Headgate only; declare states with ``BatchStateHandle``."""
        self._value = value
        self._how = how

    def add(self, values: Any, where: pl.Series | None = None, *, keys: Keys | None = None) -> pl.Series:
        """Combine each row's value with what its key has, row after row. Rows with a null do nothing.

        Args:
            values: a Series as long as the rows, or one value for all of them.
            where: only these rows.
            keys: of other rows than the batch's.

        Returns:
            True at one row of each key whose combined value is another one than before.
        """
        return self._value.update(values, self._how, where, keys=keys)

    def get(self, *, keys: Keys | None = None) -> pl.Series:
        """Return the combined value of each row's key; null where nothing was added."""
        return self._value.get(keys=keys)

    def exists(self, *, keys: Keys | None = None) -> pl.Series:
        """Return which rows' keys have a value."""
        return self._value.exists(keys=keys)

    def clear(self, where: pl.Series | None = None, *, keys: Keys | None = None) -> None:
        """Forget what the rows' keys have; nothing of it remains in snapshots."""
        self._value.clear(where, keys=keys)


class BatchStateHandle(Declarations[BatchValueState, BatchListState, BatchMapState]):
    """What ``BatchProcessFunction.open`` declares its state with."""

    def broadcast(
        self, name: str, key_type: Any, type: Any, *, evolution: Evolution = NO_EVOLUTION
    ) -> BatchBroadcastState:
        """Declare a map that is the same in every subtask, from ``key_type`` to ``type``.

        Raises:
            UsageError: the function has no broadcast side.
        """
        return BatchBroadcastState(self._node, *self._declared_broadcast(name, key_type, type, evolution))

    def reducing(
        self, name: str, type: Any, how: How, *, ttl: TTL | None = None, evolution: Evolution = NO_EVOLUTION
    ) -> BatchReducingState:
        """Declare one value per key with which what is added is combined.

        ``how`` is ``"add"``, ``"min"``, ``"max"`` or ``"last"``. To a checkpoint it is a value: a function may change
        between the two, and from one ``how`` to another.

        Raises:
            UsageError: the type cannot be combined so.
        """
        value = self.value(name, type, ttl=ttl, evolution=evolution)
        value.check_how(how)
        return BatchReducingState(value, how)

    def aggregating(
        self,
        name: str,
        type: Any,
        function: BatchAggregateFunction,
        *,
        ttl: TTL | None = None,
        evolution: Evolution = NO_EVOLUTION,
    ) -> BatchAggregatingState:
        """Declare one accumulator of ``type`` per key, to which ``function`` adds and of which it makes a result.

        To a checkpoint it is a value: a function by row may go on with it, and the other way round.

        Raises:
            UsageError: what the function returns is no accumulator of this type.
        """
        where = f"operator '{self._node}': aggregating state '{name}'"
        value = self.value(name, type, ttl=ttl, evolution=evolution)
        refuse_no_function(where, function)
        return BatchAggregatingState(where, value, self._descriptors[-1].type, function)
