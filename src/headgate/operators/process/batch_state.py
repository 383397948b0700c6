"""State as batch process functions see it: Polars Series aligned with the rows of a batch.

Counterpart: ``operators.process.batch_process`` makes them, ``state.backend.ColumnBackend`` holds what they show.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, TypeAlias

import numpy as np
import polars as pl
import pyarrow as pa
import pyarrow.compute as pc

from headgate.codec.exact_values import MisfitError, exact_array
from headgate.errors import UsageError
from headgate.operators.schemas import empty_frame, fitted, frame_of
from headgate.state.backend import ColumnBackend, ListColumns, MapColumns, ValueColumns
from headgate.state.descriptors import StateDescriptor
from headgate.state.key_index import Slots
from headgate.state.values import Mask, is_fixed

How: TypeAlias = Literal["min", "max", "add", "last"]


class Keys:
    """The keys of some rows; several rows may have the same key. Valid only during the call of the function."""

    def __init__(self, slots: Slots, columns: Callable[[Slots], list[pa.Array]], names: tuple[str, ...]) -> None:
        """For Headgate only: ``BatchContext.keys`` and ``BatchContext.lookup``."""
        self.slots = slots
        self._columns = columns
        self._names = names

    def __len__(self) -> int:
        return len(self.slots)

    def frame(self) -> pl.DataFrame:
        """Return the key columns as a frame, with one row for each row."""
        return frame_of(pa.RecordBatch.from_arrays(self._columns(self.slots), names=list(self._names)))


class CurrentKeys:
    """The keys of the current call; shared by the context and all states of one operator."""

    __slots__ = ("_keys",)

    def __init__(self) -> None:
        self._keys: Keys | None = None

    @property
    def keys(self) -> Keys:
        """The keys of the rows of this call."""
        if self._keys is None:
            raise UsageError(
                "state belongs to a key, and there is none in open(), in process_broadcast() or without key_by; use it "
                "in process(), on_timer() and on_round()"
            )
        return self._keys

    def of(self, keys: Keys | None) -> Keys:
        """The keys that a user gave as ``keys=``; without any, those of this call.

        Raises:
            UsageError: they are something else.
        """
        if keys is not None and not isinstance(keys, Keys):
            raise UsageError(f"keys= takes what context.lookup(frame) returns, not {type(keys).__name__}")
        return self.keys if keys is None else keys

    def move(self, keys: Keys | None) -> None:
        """Set the keys, or None between calls."""
        self._keys = keys


class _BatchState:
    """What the kinds of state share: from users' arguments to slots and Arrow columns, and back."""

    def __init__(self, node: str, descriptor: StateDescriptor, cursor: CurrentKeys) -> None:
        """For Headgate only; declare states with ``BatchStateHandle``."""
        self._node = node
        self._descriptor = descriptor
        self._current = cursor
        self._dtype = empty_frame(pa.schema([("", descriptor.type)])).dtypes[0]

    def _slots(self, keys: Keys | None) -> Slots:
        return self._current.of(keys).slots

    def _mask(self, where: pl.Series | None, rows: int) -> Mask | None:
        """Return which rows are meant, or None for all."""
        if where is None:
            return None
        if not isinstance(where, pl.Series) or where.dtype != pl.Boolean or len(where) != rows:
            raise self._wrong(f"where= must be a Boolean Series of {rows} rows, as many as there are keys")
        mask: Mask = where.fill_null(False).to_numpy()
        return mask

    def _column(self, values: Any, rows: int, dtype: pa.DataType, what: str) -> pa.Array:
        """Return a user's Series (or one value for all rows) as a column of ``dtype``."""
        if isinstance(values, pl.Series) and len(values) != rows:
            raise self._wrong(f"{what} must have {rows} rows, as many as there are keys, but has {len(values)}")
        try:
            if isinstance(values, pl.Series):
                return fitted(values.to_arrow(compat_level=pl.CompatLevel.oldest()), dtype, "")
            return exact_array([values], dtype).take(pa.array(np.zeros(rows, np.int64)))
        except (MisfitError, pa.ArrowException) as error:
            raise self._wrong(f"{what} must be {dtype}: {error}") from None

    def _values(self, values: Any, rows: int) -> pa.Array:
        return self._column(values, rows, self._descriptor.type, "the values")

    def _series(self, column: pa.Array) -> pl.Series:
        series = pl.from_arrow(column)
        assert isinstance(series, pl.Series)
        return series

    def _wrong(self, problem: str) -> UsageError:
        return UsageError(f"state '{self._descriptor.name}' of operator '{self._node}': {problem}")

    def _whole(self, slots: Slots, column: pa.Array, where: pl.Series | None, what: str) -> tuple[Slots, pa.Array]:
        """Return slots and values of the rows that ``where`` means; none of them may be null."""
        mask = self._mask(where, len(slots))
        if mask is not None:
            slots, column = slots[mask], column.filter(pa.array(mask))
        if column.null_count:
            raise self._wrong(f"{what} cannot be null; leave such rows out with where=")
        return slots, column


class BatchValueState(_BatchState):
    """One value per key."""

    def __init__(self, node: str, descriptor: StateDescriptor, cursor: CurrentKeys, columns: ValueColumns) -> None:
        """For Headgate only; declare states with ``BatchStateHandle``."""
        super().__init__(node, descriptor, cursor)
        self._columns = columns

    def get(self, *, keys: Keys | None = None) -> pl.Series:
        """Return the value for the key of each row; null if there is none."""
        return self._series(self._columns.get(self._slots(keys)))

    def exists(self, *, keys: Keys | None = None) -> pl.Series:
        """Return, for each row, whether its key has a value."""
        return pl.Series(self._columns.contains(self._slots(keys)))

    def put(self, values: Any, where: pl.Series | None = None, *, keys: Keys | None = None) -> None:
        """Set the value for the key of each row. The last row of a key wins, and a null clears the value.

        Args:
            values: a Series with one value per row, or one value for all rows.
            where: use only these rows.
            keys: the keys of other rows than those of the batch.
        """
        slots = self._slots(keys)
        column, mask = self._values(values, len(slots)), self._mask(where, len(slots))
        if mask is not None:
            slots, column = slots[mask], column.filter(pa.array(mask))
        if column.null_count == 0:
            self._columns.put(slots, column)
            return
        is_valid = column.is_valid().to_numpy(zero_copy_only=False)
        rows = np.arange(len(slots))
        # the last row of a key decides: put those with a value, then clear keys with null in their last row
        reversed_slots, first = np.unique(slots[::-1], return_index=True)
        last_rows = rows[::-1][first]
        self._columns.put(slots[is_valid], column.filter(pa.array(is_valid)))
        self._columns.clear(reversed_slots[~is_valid[last_rows]])

    def clear(self, where: pl.Series | None = None, *, keys: Keys | None = None) -> None:
        """Remove the values of the rows' keys. Snapshots no longer contain them."""
        slots = self._slots(keys)
        mask = self._mask(where, len(slots))
        self._columns.clear(slots if mask is None else slots[mask])

    def update(self, values: Any, how: How, where: pl.Series | None = None, *, keys: Keys | None = None) -> pl.Series:
        """Combine each row's value with the value of its key, and return what has changed.

        Args:
            values: a Series with one value per row, or one value for all rows. Rows with a null are skipped.
            how: "min" and "max" (which skip NaN), "add" (a missing value counts as 0), or "last".
            where: use only these rows.
            keys: the keys of other rows than those of the batch.

        Returns:
            A Boolean Series: True for exactly one row of each key with a changed value. For "min", "max" and "last",
            this row holds the new value, so ``batch.filter(...)`` returns the changes. For "add", it is the last row of
            the key, and ``get()`` returns the sums.

        Raises:
            UsageError: a sum of integers is larger than the state's type holds.
        """
        slots = self._slots(keys)
        column, mask = self._values(values, len(slots)), self._mask(where, len(slots))
        if column.null_count:
            is_valid = column.is_valid().to_numpy(zero_copy_only=False)
            mask = is_valid if mask is None else mask & is_valid
        if mask is None:
            return pl.Series(self._updated(slots, column, how))
        changed = np.zeros(len(slots), np.bool_)
        changed[mask] = self._updated(slots[mask], column.filter(pa.array(mask)), how)
        return pl.Series(changed)

    def _updated(self, slots: Slots, column: pa.Array, how: How) -> Mask:
        self.check_how(how)
        if how == "last":
            return self._columns.replace(slots, column)
        if how == "add":
            return self._columns.add(slots, column)
        return self._columns.extreme(slots, column, is_min=how == "min")

    def chosen(self, values: Any, where: pl.Series | None, keys: Keys | None) -> tuple[int, Slots, Slots, pl.Series]:
        """Return how many rows there are; of those that are meant and have a value: their numbers, slots and values.

        For Headgate only. Values may be of any type.
        """
        slots = self._slots(keys)
        count = len(slots)
        given = values if isinstance(values, pl.Series) else pl.Series([values]).new_from_index(0, count)
        if len(given) != count:
            raise self._wrong(f"the values must have {count} rows, as many as there are keys, but has {len(given)}")
        mask, is_there = self._mask(where, count), given.is_not_null().to_numpy()
        rows = np.flatnonzero(is_there if mask is None else mask & is_there)
        return count, rows, slots[rows], given.gather(rows)

    def at(self, slots: Slots) -> pl.Series:
        """Return the values of ``slots``, null where there is none; for Headgate only."""
        return self._series(self._columns.get(slots))

    def replace_at(self, slots: Slots, values: pl.Series) -> Mask:
        """Set the values of ``slots``, none twice; return which are others than before. For Headgate only.

        Raises:
            UsageError: a value is null, or does not fit the state's type.
        """
        column = self._values(values, len(slots))
        if column.null_count:
            raise self._wrong("its function made null of what a key has; return an accumulator, or call clear()")
        return self._columns.replace(slots, column)

    def check_how(self, how: How) -> None:
        """Make sure that values can be combined so; for Headgate only.

        Raises:
            UsageError: they cannot.
        """
        dtype = self._descriptor.type
        if how == "last":
            return
        if how not in ("min", "max", "add"):
            raise self._wrong(f'update knows "min", "max", "add" and "last", not {how!r}')
        is_number = pa.types.is_integer(dtype) or pa.types.is_floating(dtype) or pa.types.is_duration(dtype)
        if not (is_number if how == "add" else is_fixed(dtype)):
            raise self._wrong(f'update by "{how}" needs numbers, but the state holds {dtype}; use "last"')


class BatchListState(_BatchState):
    """A list of elements per key, in the order in which they were appended."""

    def __init__(self, node: str, descriptor: StateDescriptor, cursor: CurrentKeys, columns: ListColumns) -> None:
        """For Headgate only; declare states with ``BatchStateHandle``."""
        super().__init__(node, descriptor, cursor)
        self._columns = columns

    def append(self, values: Any, where: pl.Series | None = None, *, keys: Keys | None = None) -> None:
        """Append each row's value to the list of its key, in the order of the rows.

        ``values`` is a Series without nulls, or one value for all rows. For several columns, pass a Series of structs:
        ``batch.select("to", "weight").to_struct()``. ``where`` chooses rows.
        """
        slots = self._slots(keys)
        column = self._values(values, len(slots))
        self._columns.append(*self._whole(slots, column, where, "an element"))

    def explode(self, where: pl.Series | None = None, *, keys: Keys | None = None) -> tuple[pl.Series, pl.Series]:
        """Join the rows with the lists of their keys.

        Returns:
            The row number of each element (ascending, for use in ``batch[rows]`` or ``gather``), and the elements.
        """
        slots = self._slots(keys)
        mask = self._mask(where, len(slots))
        if mask is None:
            rows, values = self._columns.explode(slots)
        else:
            chosen = np.flatnonzero(mask)
            rows, values = self._columns.explode(slots[chosen])
            rows = chosen[rows]
        return pl.Series(rows.astype(np.uint32)), self._series(values)

    def counts(self, *, keys: Keys | None = None) -> pl.Series:
        """Return the length of the list for the key of each row."""
        return pl.Series(self._columns.counts(self._slots(keys)))

    def get(self, *, keys: Keys | None = None) -> pl.Series:
        """Return the list for the key of each row, or an empty list if there is none."""
        slots = self._slots(keys)
        offsets = np.concatenate([[0], np.cumsum(self._columns.counts(slots))])
        _, values = self._columns.explode(slots)
        return self._series(pa.LargeListArray.from_arrays(pa.array(offsets, pa.int64()), values))

    def put(self, values: pl.Series, where: pl.Series | None = None, *, keys: Keys | None = None) -> None:
        """Replace the lists of the rows' keys with those of a Series of lists. The last row of a key wins."""
        slots = self._slots(keys)
        column = self._column(values, len(slots), pa.large_list(self._descriptor.type), "the lists")
        slots, column = self._whole(slots, column, where, "a list")
        wanted, first = np.unique(slots[::-1], return_index=True)
        lists = column.take(pa.array(len(slots) - 1 - first))
        elements = lists.flatten()
        if elements.null_count:
            raise self._wrong("an element cannot be null")
        self._columns.clear(wanted)
        counts = pc.list_value_length(lists).to_numpy(zero_copy_only=False)
        self._columns.append(np.repeat(wanted, counts), elements)

    def clear(self, where: pl.Series | None = None, *, keys: Keys | None = None) -> None:
        """Remove the lists of the rows' keys. Snapshots no longer contain them."""
        slots = self._slots(keys)
        mask = self._mask(where, len(slots))
        self._columns.clear(slots if mask is None else slots[mask])


class BatchMapState(_BatchState):
    """A map of entries per key."""

    def __init__(self, node: str, descriptor: StateDescriptor, cursor: CurrentKeys, columns: MapColumns) -> None:
        """For Headgate only; declare states with ``BatchStateHandle``."""
        super().__init__(node, descriptor, cursor)
        self._columns = columns

    def get(self, map_keys: Any, *, keys: Keys | None = None) -> pl.Series:
        """Return the value for the key and map key of each row; null if there is none."""
        slots = self._slots(keys)
        return self._series(self._columns.get(slots, self._own_keys(map_keys, slots)))

    def contains(self, map_keys: Any, *, keys: Keys | None = None) -> pl.Series:
        """Return, for each row, whether its map key has a value."""
        slots = self._slots(keys)
        return pl.Series(self._columns.contains(slots, self._own_keys(map_keys, slots)))

    def put(self, map_keys: Any, values: Any, where: pl.Series | None = None, *, keys: Keys | None = None) -> None:
        """Set the value for the key and map key of each row. The last row wins, and nulls are refused."""
        slots = self._slots(keys)
        column = self._values(values, len(slots))
        chosen, column = self._whole(slots, column, where, "a value")
        self._columns.put(chosen, self._own_keys(map_keys, slots, where), column)

    def remove(self, map_keys: Any, where: pl.Series | None = None, *, keys: Keys | None = None) -> None:
        """Remove the map key of each row from the map of its key."""
        slots = self._slots(keys)
        mask = self._mask(where, len(slots))
        self._columns.remove(slots if mask is None else slots[mask], self._own_keys(map_keys, slots, where))

    def items(
        self, where: pl.Series | None = None, *, keys: Keys | None = None
    ) -> tuple[pl.Series, pl.Series, pl.Series]:
        """Join the rows with the maps of their keys: the row number of each entry (ascending), map key, value."""
        slots = self._slots(keys)
        mask = self._mask(where, len(slots))
        chosen = np.arange(len(slots)) if mask is None else np.flatnonzero(mask)
        rows, map_keys, values = self._columns.items(slots[chosen])
        return pl.Series(chosen[rows].astype(np.uint32)), self._series(map_keys), self._series(values)

    def clear(self, where: pl.Series | None = None, *, keys: Keys | None = None) -> None:
        """Remove the maps of the rows' keys. Snapshots no longer contain them."""
        slots = self._slots(keys)
        mask = self._mask(where, len(slots))
        self._columns.clear(slots if mask is None else slots[mask])

    def _own_keys(self, map_keys: Any, slots: Slots, where: pl.Series | None = None) -> pa.Array:
        column = self._column(map_keys, len(slots), self._descriptor.key_type, "the map keys")
        _, column = self._whole(slots, column, where, "a map key")
        if pa.types.is_floating(column.type) and pc.any(pc.is_nan(column)).as_py():
            raise self._wrong("a map key cannot be NaN; leave such rows out with where=")
        return column


class BatchHandleFactory:
    """Makes the states of one operator (``declaring.HandleFactory``)."""

    def __init__(self, node: str, cursor: CurrentKeys, backend: Callable[[StateDescriptor], ColumnBackend]) -> None:
        """``backend`` returns the backend that has the descriptor's state."""
        self._node = node
        self._current = cursor
        self._backend = backend

    def value(self, descriptor: StateDescriptor) -> BatchValueState:
        return BatchValueState(self._node, descriptor, self._current, self._backend(descriptor).values(descriptor))

    def list(self, descriptor: StateDescriptor) -> BatchListState:
        return BatchListState(self._node, descriptor, self._current, self._backend(descriptor).lists(descriptor))

    def map(self, descriptor: StateDescriptor) -> BatchMapState:
        return BatchMapState(self._node, descriptor, self._current, self._backend(descriptor).maps(descriptor))
