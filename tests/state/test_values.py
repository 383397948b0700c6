from __future__ import annotations

from datetime import UTC, date, datetime, timedelta, timezone, tzinfo
from typing import Any
from zoneinfo import ZoneInfo

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headgate.codec.snapshot import decode_sections
from headgate.state.backend import Ownership
from headgate.state.descriptors import KeyColumns, StateDescriptor, StateKind
from headgate.state.memory.row_backend import MemoryRowBackend
from headgate.state.values import RecordConversion, conversion

NESTED = pa.struct([("x", pa.int16()), ("l", pa.large_list(pa.struct([("t", pa.large_string())])))])
TIMES = st.datetimes(datetime(1, 1, 1), datetime(9999, 12, 31))
VALUES: list[tuple[pa.DataType, st.SearchStrategy[Any]]] = [
    (pa.int8(), st.integers(-128, 127)),
    (pa.uint64(), st.integers(0, (1 << 64) - 1)),
    (pa.float64(), st.floats() | st.integers(-9, 9)),
    (pa.float32(), st.floats(width=32) | st.floats(-1e9, 1e9)),
    (pa.bool_(), st.booleans()),
    (pa.large_string(), st.text()),
    (pa.large_binary(), st.binary()),
    (pa.timestamp("us"), TIMES),
    (
        pa.timestamp("us", "UTC"),
        TIMES | st.datetimes(datetime(2, 1, 1), datetime(9998, 1, 1), timezones=st.timezones()),
    ),
    (pa.date32(), st.dates()),
    (pa.decimal128(5, 2), st.decimals(-999, 999, places=2) | st.decimals(-999, 999, places=1) | st.integers(-9, 9)),
    (pa.duration("us"), st.timedeltas(timedelta(days=-9_999), timedelta(days=9_999))),
    (
        NESTED,
        st.fixed_dictionaries(
            {
                "x": st.none() | st.integers(-9, 9),
                "l": st.none() | st.lists(st.none() | st.fixed_dictionaries({"t": st.none() | st.text()})),
            }
        ),
    ),
]


@given(st.sampled_from(VALUES).flatmap(lambda case: st.tuples(st.just(case[0]), case[1])))
def test_values_read_the_same_after_a_restore(case: tuple[pa.DataType, Any]) -> None:
    dtype, value = case
    made = conversion(dtype)
    try:
        stored = made.store(value)
    except (ValueError, TypeError, OverflowError):
        assert dtype in (pa.large_string(), NESTED, pa.float32())  # lone surrogates; more than a float32 can hold
        return
    keys = KeyColumns(("k",), (pa.int64(),))
    state = StateDescriptor("s", StateKind.VALUE, dtype)
    backend, again = MemoryRowBackend(keys, [state]), MemoryRowBackend(keys, [state])
    backend.cells(state).put(1, stored)
    payload = b"".join(bytes(memoryview(b)) for b in backend.freeze().encode())
    again.restore(decode_sections(payload, "test"), "test", Ownership(128, 1, 0))
    assert repr(made.loaded(again.cells(state).get(1))) == repr(made.loaded(stored))


@pytest.mark.parametrize(
    ("dtype", "value"),
    [
        (pa.int64(), 1.5),
        (pa.int64(), "1"),
        (pa.int8(), 128),
        (pa.uint32(), -1),
        (pa.float64(), "1.0"),
        (pa.large_string(), 1),
        (pa.large_string(), "\ud800"),
        (pa.timestamp("us"), "2024-01-01"),
        (pa.bool_(), 1),
        (pa.large_list(pa.int64()), [1, "x"]),
        (pa.large_list(pa.int64()), 1),
        (NESTED, {"x": 1}),
        (NESTED, {"x": 1, "l": [], "m": 1}),
        (NESTED, [1, []]),
    ],
)
def test_what_does_not_fit_is_refused(dtype: pa.DataType, value: Any) -> None:
    with pytest.raises((ValueError, TypeError, OverflowError)):
        conversion(dtype).store(value)


@given(TIMES, st.sampled_from([None, UTC, ZoneInfo("UTC"), ZoneInfo("America/New_York"), timezone(timedelta(hours=5))]))
def test_a_moment_is_the_same_in_whatever_zone_it_was_put(time: datetime, zone: tzinfo | None) -> None:
    given = time.replace(year=min(max(time.year, 2), 9_998), tzinfo=zone)
    stored = conversion(pa.timestamp("us", "UTC")).store(given)
    expected = pa.array([given], pa.timestamp("us", "UTC")).view(pa.int64())[0].as_py()
    assert (stored.replace(tzinfo=None) - datetime(1970, 1, 1)) // timedelta(microseconds=1) == expected
    assert stored.tzinfo is ZoneInfo("UTC")


def test_numbers_of_numpy_and_times_become_pythons() -> None:
    assert type(conversion(pa.int64()).store(np.int32(7))) is int
    assert conversion(pa.float64()).store(np.float32(0.5)) == 0.5
    assert conversion(pa.date32()).store(np.datetime64("2024-01-02")) == date(2024, 1, 2)


def test_values_of_a_record_become_what_a_restore_would_return() -> None:
    made = RecordConversion((pa.int64(), pa.float32(), pa.large_list(pa.int64())))
    before = made((1, 0.1, (1, 2)), (None, None, None))
    assert before == (1, float(np.float32(0.1)), [1, 2])
    assert made((2, None, before[2]), before) == (2, None, [1, 2])
    assert made((2, None, before[2]), before)[2] is before[2], "what was kept is kept as it is"
    with pytest.raises((ValueError, TypeError)):
        made((1, "x", []), before)


def test_a_record_of_plain_values_is_kept_as_it_is() -> None:
    values = (1, "a", None)
    assert RecordConversion((pa.int64(), pa.large_string(), pa.int64()))(values, (None, None, None)) is values
