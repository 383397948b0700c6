"""Schemas that differ by zones alone."""

from __future__ import annotations

import pyarrow as pa
import pytest

from headgate.codec.arrow import LOCAL_TIME, MOMENT, gains_zones, in_zones_of, joined_zones, unzoned_schema
from headgate.model import state_schema


def nested(one: pa.DataType, other: pa.DataType) -> pa.Schema:
    return pa.schema({"a": one, "s": pa.struct({"l": pa.large_list(other), "n": pa.int64()})})


@pytest.mark.parametrize(
    ("old", "new", "gains"),
    [
        ((LOCAL_TIME, LOCAL_TIME), (MOMENT, MOMENT), True),
        ((MOMENT, LOCAL_TIME), (MOMENT, MOMENT), True),
        ((MOMENT, MOMENT), (MOMENT, MOMENT), True),
        ((MOMENT, MOMENT), (LOCAL_TIME, MOMENT), False),
        ((MOMENT, LOCAL_TIME), (LOCAL_TIME, MOMENT), False),
        ((LOCAL_TIME, pa.int64()), (MOMENT, MOMENT), False),
        ((pa.date32(), LOCAL_TIME), (MOMENT, MOMENT), False),
    ],
)
def test_columns_gain_zones_and_lose_none(old: tuple, new: tuple, gains: bool) -> None:  # EV12
    before, now = nested(*old), nested(*new)
    assert gains_zones(before, now) is gains
    told = [", ".join(f"{field.name}: {field.type}" for field in schema) for schema in (before, now)]
    assert state_schema.gains_zones(*told) is gains, "the texts say the same"
    assert (joined_zones(before, nested(MOMENT, MOMENT)) is None) is (
        unzoned_schema(before) != nested(LOCAL_TIME, LOCAL_TIME)
    )


def test_no_number_changes_with_the_zone() -> None:  # EV12
    numbers = [0, None, -(2**62), 2**62]
    batch = pa.record_batch({"a": pa.array(numbers, LOCAL_TIME)})
    moments = in_zones_of(batch, pa.schema({"a": MOMENT}))
    assert moments.column(0).view(pa.int64()).to_pylist() == numbers
    assert unzoned_schema(moments.schema) == batch.schema
    assert in_zones_of(moments, batch.schema).equals(batch)


def test_texts_are_compared_as_they_are() -> None:  # EV12
    assert not state_schema.gains_zones("value (.*): timestamp[us]", "value at: timestamp[us, tz=UTC]")
    assert not state_schema.gains_zones("timestamp[us], n", "timestamp[us, tz=UTC]")
    assert not state_schema.gains_zones("timestamp[ms]", "timestamp[us, tz=UTC]")
