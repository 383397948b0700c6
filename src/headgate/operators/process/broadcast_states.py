"""Broadcast state as functions see it, by row and by batch (BC1, BC4 of docs/spec/broadcast.md).

Counterpart: ``broadcast_side``, which holds it and says when it may be written.
"""

from __future__ import annotations

from typing import Any

import polars as pl
import pyarrow as pa

from headgate.codec.exact_values import MisfitError, exact_array
from headgate.errors import UsageError
from headgate.operators.process.broadcast_side import BroadcastMap, BroadcastSide
from headgate.operators.process.cursor import Cursor
from headgate.operators.process.keyed_states import MapState
from headgate.operators.schemas import frame_of
from headgate.operators.types import fitted
from headgate.state.descriptors import StateDescriptor


class BroadcastState(MapState):
    """A map that is the same in every subtask. Only ``process_broadcast`` writes it; every method can read it.

    It has the methods of a ``MapState``, but belongs to no key.
    """

    def __init__(self, node: str, descriptor: StateDescriptor, side: BroadcastSide) -> None:
        """For Headgate only; declare it with ``state.broadcast``."""
        super().__init__(node, descriptor, Cursor(), side.declare(descriptor))
        self._side = side

    @property
    def exists(self) -> bool:
        """Whether the map has any entries."""
        self._side.check_readable(self._descriptor.name)
        return super().exists

    def get(self, map_key: Any, default: Any = None) -> Any:
        """Return the value of ``map_key``, or ``default``. Changing a returned dict or list changes nothing."""
        self._side.check_readable(self._descriptor.name)
        return super().get(map_key, default)

    def contains(self, map_key: Any) -> bool:
        """Return whether the map has a value for ``map_key``."""
        self._side.check_readable(self._descriptor.name)
        return super().contains(map_key)

    def keys(self) -> list[Any]:
        """Return the keys in a new list, in the order in which they were added. It is the same in every subtask."""
        self._side.check_readable(self._descriptor.name)
        return super().keys()

    def items(self) -> list[tuple[Any, Any]]:
        """Return pairs of key and value in a new list, in the order of ``keys``."""
        self._side.check_readable(self._descriptor.name)
        return super().items()

    def __len__(self) -> int:
        self._side.check_readable(self._descriptor.name)
        return super().__len__()

    def put(self, map_key: Any, value: Any) -> None:
        """Set the value of ``map_key``; None removes it. Only allowed in ``process_broadcast``.

        Raises:
            UsageError: the call is not in ``process_broadcast``, or the key or value does not fit the state's types.
        """
        self._side.check_writable(self._descriptor.name)
        super().put(map_key, value)

    def remove(self, map_key: Any) -> None:
        """Remove ``map_key``, if it is there. Only allowed in ``process_broadcast``."""
        self._side.check_writable(self._descriptor.name)
        super().remove(map_key)

    def clear(self) -> None:
        """Remove all entries. Only allowed in ``process_broadcast``."""
        self._side.check_writable(self._descriptor.name)
        super().clear()


class BatchBroadcastState:
    """A map that is the same in every subtask, read and written as Series and frames; see ``BroadcastState``."""

    def __init__(self, node: str, descriptor: StateDescriptor, side: BroadcastSide) -> None:
        """For Headgate only; declare it with ``state.broadcast``."""
        self._rows = BroadcastState(node, descriptor, side)
        self._map: BroadcastMap = side.declare(descriptor)
        self._side = side
        self._node = node
        self._shown: tuple[int, pl.DataFrame] | None = None

    def frame(self) -> pl.DataFrame:
        """Return all entries in the columns ``key`` and ``value``, in the order in which the keys were added."""
        self._side.check_readable(self._map.descriptor.name)
        version = self._map.version
        if self._shown is None or self._shown[0] != version:
            self._shown = version, frame_of(self._map.batch().rename_columns(["key", "value"]))
        return self._shown[1]

    def get(self, keys: pl.Series) -> pl.Series:
        """Return the value for each of ``keys``; null if there is none."""
        wanted = self._series(keys, self._map.descriptor.key_type, "the keys").alias("key").to_frame()
        return wanted.join(self.frame(), on="key", how="left", maintain_order="left")["value"]

    def contains(self, keys: pl.Series) -> pl.Series:
        """Return, for each of ``keys``, whether the map has a value."""
        there = self.frame()["key"].implode()
        return self._series(keys, self._map.descriptor.key_type, "the keys").is_in(there).fill_null(value=False)

    def __len__(self) -> int:
        return len(self._rows)

    def put(self, keys: pl.Series, values: Any) -> None:
        """Set the value of each key, row after row; a null removes it. Only allowed in ``process_broadcast``.

        Args:
            keys: a Series of map keys.
            values: a Series with one value per key, or one value for all keys.
        """
        self._side.check_writable(self._map.descriptor.name)
        own_keys = self._series(keys, self._map.descriptor.key_type, "the keys")
        found = values if isinstance(values, pl.Series) else self._repeated(values, len(keys))
        if len(found) != len(keys):
            raise self._wrong(
                f"the values must have {len(keys)} rows, as many as there are keys, but have {len(found)}"
            )
        own_values = self._series(found, self._map.descriptor.type, "the values")
        for key, value in zip(own_keys, own_values.to_list(), strict=True):
            self._rows.put(key, value)

    def remove(self, keys: pl.Series) -> None:
        """Remove each key that is there. Only allowed in ``process_broadcast``."""
        self._side.check_writable(self._map.descriptor.name)
        for key in self._series(keys, self._map.descriptor.key_type, "the keys"):
            self._rows.remove(key)

    def clear(self) -> None:
        """Remove all entries. Only allowed in ``process_broadcast``."""
        self._rows.clear()

    def _repeated(self, value: Any, rows: int) -> pl.Series:
        try:
            one = pl.from_arrow(exact_array([value], self._map.descriptor.type))
        except MisfitError as error:
            raise self._wrong(f"the values must be {self._map.descriptor.type}: {error}") from None
        assert isinstance(one, pl.Series)
        return one.new_from_index(0, rows)

    def _series(self, given: Any, dtype: pa.DataType, what: str) -> pl.Series:
        """Return a user's Series in the type of the state."""
        if not isinstance(given, pl.Series):
            raise self._wrong(f"{what} must be a Series, not {type(given).__name__}")
        try:
            found = pl.from_arrow(fitted(given.to_arrow(compat_level=pl.CompatLevel.oldest()), dtype, ""))
        except (MisfitError, pa.ArrowException, pl.exceptions.PolarsError) as error:
            raise self._wrong(f"{what} must be {dtype}: {error}") from None
        assert isinstance(found, pl.Series)
        return found

    def _wrong(self, problem: str) -> UsageError:
        return UsageError(f"broadcast state '{self._map.descriptor.name}' of operator '{self._node}': {problem}")
