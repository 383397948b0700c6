"""Mutants of the types that columns may have: maps, decimals, moments; a named test fails."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from datetime import datetime
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pytest
from tests.model import test_evolution
from tests.mutants.harness import Mutant, assert_caught, patched
from tests.operators import test_types
from tests.runtime import test_moments_golden
from tests.runtime.checkpoints import test_in_flight
from tests.state import test_evolving, test_row_values
from tests.testing import test_every_type, test_moments_in_process

from headgate.cli import json_lines
from headgate.connectors.files import parquet
from headgate.model import evolution
from headgate.operators import types
from headgate.runtime.checkpoints import in_flight
from headgate.state import evolving, row_values
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


@contextmanager
def what_does_not_fit_is_rounded() -> Iterator[None]:
    def fitted(column: pa.Array, dtype: pa.DataType, name: str) -> pa.Array:
        return types._with_maps(types._with_lists(column), dtype).cast(dtype, safe=False)

    with patched(types, "fitted", fitted):
        yield


@contextmanager
def null_maps_of_a_stream_are_empty() -> Iterator[None]:
    real = types._with_maps

    def with_maps(column: pa.Array, dtype: pa.DataType) -> pa.Array:
        return real(column.fill_null([]) if pa.types.is_map(dtype) else column, dtype)

    with patched(types, "_with_maps", with_maps):
        yield


def int96_is_read_as_nanoseconds() -> AbstractContextManager[None]:
    real = parquet.pq.ParquetFile

    def opened(file: Any, **_: Any) -> Any:
        return real(file)

    return patched(parquet, "pq", SimpleNamespace(ParquetFile=opened))


def a_nan_is_printed_as_python_has_it() -> AbstractContextManager[None]:
    return patched(json_lines, "_json_line", lambda row: json.dumps(row, default=json_lines._json_value))


def a_duration_is_a_float() -> AbstractContextManager[None]:
    return patched(json_lines, "_duration_text", lambda value: value.total_seconds())


def nan_is_text_to_who_writes() -> AbstractContextManager[None]:
    return patched(json_lines, "_with_literals", lambda block, schema: block)


def test_values_that_are_others_on_the_other_side_are_found(tmp_path: Path) -> None:  # OP12, N74, CL6, CL7
    def fresh() -> Path:
        (made := tmp_path / str(len(list(tmp_path.iterdir())))).mkdir()
        return made

    to_maps = test_types.test_lists_of_entries_become_the_maps_of_a_stream
    assert_caught(null_maps_of_a_stream_are_empty, to_maps)
    refused = test_every_type.test_what_a_microsecond_cannot_hold_is_refused
    assert_caught(what_does_not_fit_is_rounded, refused, fresh())
    assert_caught(int96_is_read_as_nanoseconds, test_every_type.test_int96_reaches_as_far_as_times_do, fresh())
    printed = test_every_type.test_a_stream_is_printed_as_json_that_loses_nothing
    for mutant in (a_nan_is_printed_as_python_has_it, a_duration_is_a_float):
        assert_caught(mutant, printed, fresh())
    assert_caught(nan_is_text_to_who_writes, test_every_type.test_what_is_printed_can_be_written, fresh())


def moments_become_local_times_too() -> AbstractContextManager[None]:
    pair = {"timestamp[us]", "timestamp[us, tz=UTC]"}
    return patched(evolution, "gains_zone", lambda old, new: {old, new} == pair)


def a_key_never_gains_a_zone() -> AbstractContextManager[None]:
    return patched(evolving, "is_same_key", lambda old, new: old == new)


def every_zone_is_utc() -> AbstractContextManager[None]:
    def plain(value: datetime) -> datetime:
        return value.replace(tzinfo=row_values._ZONE)

    return patched(row_values, "_plain_moment", plain)


def int96_is_a_local_time() -> AbstractContextManager[None]:
    return patched(parquet, "_with_zones", lambda file: file.schema_arrow)


def only_the_same_zones_are_on_the_way() -> AbstractContextManager[None]:
    return patched(in_flight, "_unzoned", lambda name, schema: name)


def test_times_that_lose_or_never_gain_a_zone_are_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:  # OP11, EV12, N74
    assert_caught(moments_become_local_times_too, test_evolution.test_a_local_time_becomes_a_moment_in_a_key_too)
    wherever = test_evolving.test_local_times_become_moments_wherever_they_are
    assert_caught(a_key_never_gains_a_zone, wherever, "memory", "column")
    assert_caught(every_zone_is_utc, test_row_values.test_a_moment_is_the_same_in_whatever_zone_it_was_put)
    assert_caught(int96_is_a_local_time, test_moments_in_process.test_int96_is_a_moment, tmp_path)
    in_flight_as_moments = test_in_flight.test_local_times_in_flight_arrive_as_moments
    assert_caught(only_the_same_zones_are_on_the_way, in_flight_as_moments, monkeypatch)


@contextmanager
def moments_in_files_of_rocksdb_are_milliseconds() -> Iterator[None]:
    real = values._Fixed.decode

    def decode(self: Any, found: Any) -> pa.Array:
        column = real(self, found)
        is_moment = pa.types.is_timestamp(column.type)
        return pa.compute.multiply(column.view(pa.int64()), 1_000).view(column.type) if is_moment else column

    with patched(values._Fixed, "decode", decode):
        yield


def test_moments_that_earlier_releases_kept_and_that_are_others_now_are_found(tmp_path: Path) -> None:  # OP11
    pytest.importorskip("rocksdict")
    root = shutil.copytree(test_moments_golden.GOLDEN, tmp_path / "golden")
    read = test_moments_golden.test_moments_in_checkpoints_are_read_for_ever
    assert_caught(moments_in_files_of_rocksdb_are_milliseconds, read, root, "rocksdb")
