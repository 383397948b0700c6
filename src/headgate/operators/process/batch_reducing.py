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
    """One value per key: the first value that was added, combined with each later one."""

    def __init__(self, value: BatchValueState, how: How) -> None:
        """For Headgate only; declare states with ``BatchStateHandle``."""
        self._value = value
        self._how = how

    def add(self, values: Any, where: pl.Series | None = None, *, keys: Keys | None = None) -> pl.Series:
        """Combine each row's value with the value of its key, row after row. Rows with a null are skipped.

        Args:
            values: a Series with one value per row, or one value for all rows.
            where: use only these rows.
            keys: the keys of other rows than those of the batch.

        Returns:
            A Boolean Series: True at one row of each key whose combined value has changed.
        """
        return self._value.update(values, self._how, where, keys=keys)

    def get(self, *, keys: Keys | None = None) -> pl.Series:
        """Return the combined value for the key of each row; null if nothing was added to it."""
        return self._value.get(keys=keys)

    def exists(self, *, keys: Keys | None = None) -> pl.Series:
        """Return, for each row, whether its key has a value."""
        return self._value.exists(keys=keys)

    def clear(self, where: pl.Series | None = None, *, keys: Keys | None = None) -> None:
        """Remove the values of the rows' keys. Snapshots no longer contain them."""
        self._value.clear(where, keys=keys)


class BatchStateHandle(Declarations[BatchValueState, BatchListState, BatchMapState]):
    """Declares state in ``BatchProcessFunction.open``."""

    def broadcast(
        self, name: str, key_type: Any, type: Any, *, evolution: Evolution = NO_EVOLUTION
    ) -> BatchBroadcastState:
        """Declare a map from ``key_type`` to ``type`` that is the same in every subtask.

        Raises:
            UsageError: the function has no broadcast side.
        """
        return BatchBroadcastState(self._node, *self._declared_broadcast(name, key_type, type, evolution))

    def reducing(
        self, name: str, type: Any, how: How, *, ttl: TTL | None = None, evolution: Evolution = NO_EVOLUTION
    ) -> BatchReducingState:
        """Declare one value per key that is combined with every value that is added.

        ``how`` is ``"add"``, ``"min"``, ``"max"`` or ``"last"``. A checkpoint stores the state like a value state, so a
        new version of the program may declare it as a value, or with another ``how``.

        Raises:
            UsageError: values of this type cannot be combined in this way.
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
        """Declare one accumulator of ``type`` per key. ``function`` adds values to it and computes the result from it.

        A checkpoint stores the state like a value state, so a function that works by row can take it over, and the
        other way round.

        Raises:
            UsageError: the function does not return an accumulator of this type.
        """
        where = f"operator '{self._node}': aggregating state '{name}'"
        value = self.value(name, type, ttl=ttl, evolution=evolution)
        refuse_no_function(where, function)
        return BatchAggregatingState(where, value, self._descriptors[-1].type, function)
