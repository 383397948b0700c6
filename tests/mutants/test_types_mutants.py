"""Mutants of the types that columns may have: maps, decimals; a named test fails."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pyarrow as pa
import pytest
from tests.mutants.harness import Mutant, assert_caught, patched
from tests.operators import test_types

from headgate.operators import types
from headgate.state.rocksdb import values


@contextmanager
def a_slice_of_maps_has_the_entries_of_others() -> Iterator[None]:
    """As when offsets of a slice are taken for those of a whole column."""
    real = types._with_lists

    def with_lists(column: pa.Array) -> pa.Array:
        if not pa.types.is_map(column.type) or column.offset == 0:
            return real(column)
        first = column.offsets[0].as_py()
        moved = pa.MapArray.from_arrays(pa.compute.subtract(column.offsets, first), column.keys, column.items)
        return real(moved)

    with patched(types, "_with_lists", with_lists):
        yield


@contextmanager
def null_maps_are_empty() -> Iterator[None]:
    real = types._with_lists

    def with_lists(column: pa.Array) -> pa.Array:
        found = real(column)
        return found.fill_null([]) if pa.types.is_map(column.type) else found

    with patched(types, "_with_lists", with_lists):
        yield


@contextmanager
def decimals_are_floats_in_rocksdb() -> Iterator[None]:
    real = values._plain
    with patched(values, "_plain", lambda dtype: pa.float64() if pa.types.is_decimal(dtype) else real(dtype)):
        yield


@pytest.mark.parametrize(
    ("mutant", "test"),
    [
        (a_slice_of_maps_has_the_entries_of_others, test_types.test_maps_become_lists_of_their_entries),
        (null_maps_are_empty, test_types.test_maps_become_lists_of_their_entries),
        (decimals_are_floats_in_rocksdb, test_types.test_decimals_and_times_are_bytes_in_rocksdb_and_come_back),
    ],
)
def test_columns_that_change_on_their_way_are_found(mutant: Mutant, test: Callable[..., object]) -> None:  # OP10
    assert_caught(mutant, test)
