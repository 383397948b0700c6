"""Columns of every type that a user meets, each with the values at which types go wrong.

What tests of every surface put in, and compare with what comes out. Counterparts:
``tests/testing/test_every_type.py``, ``tests/spark/test_every_type_of_spark.py``.
"""

from __future__ import annotations

import datetime as dt
import math
import struct
from decimal import Decimal
from typing import Any

import pyarrow as pa

from headgate.operators.schemas import canonical_schema, to_canonical

NAN, INFINITY = math.nan, math.inf
FIRST = dt.datetime(1, 1, 1)
LAST = dt.datetime(9999, 12, 31, 23, 59, 59, 999_999)
PLAIN = pa.struct({"a": pa.int32(), "b": pa.string()})
DEEP = pa.struct({"s": PLAIN, "l": pa.list_(PLAIN), "at": pa.timestamp("us", "UTC")})


def utc(value: dt.datetime) -> dt.datetime:
    return value.replace(tzinfo=dt.UTC)


WHOLE = {f"{sign}int{bits}": getattr(pa, f"{sign}int{bits}")() for sign in ("", "u") for bits in (8, 16, 32, 64)}


def _ends(name: str) -> list[Any]:
    bits = int(name.lstrip("uint"))
    return [0, 2**bits - 1, 1] if name.startswith("u") else [-(2 ** (bits - 1)), 2 ** (bits - 1) - 1, 0]


CASES: dict[str, tuple[pa.DataType, list[Any]]] = {
    "boolean": (pa.bool_(), [True, False]),
    **{name: (dtype, _ends(name)) for name, dtype in WHOLE.items()},
    "float": (pa.float32(), [NAN, -0.0, INFINITY, -INFINITY, 1.5]),
    "double": (pa.float64(), [NAN, -0.0, INFINITY, -INFINITY, 5e-324, 0.1]),
    "decimal": (pa.decimal128(38, 18), [Decimal("9" * 20 + "." + "9" * 18), Decimal("-1E-18"), Decimal(0)]),
    "small decimal": (pa.decimal128(5, 2), [Decimal("-999.99"), Decimal("0.01")]),
    "string": (pa.string(), ["", "a\0b", "\0", "🦆é", 'a"b\\c\n', "null"]),
    "binary": (pa.binary(), [b"", b"\0", bytes(range(256))]),
    "date": (pa.date32(), [dt.date(1, 1, 1), dt.date(1969, 12, 31), dt.date(9999, 12, 31)]),
    "timestamp": (
        pa.timestamp("us", "UTC"),
        [utc(FIRST), utc(LAST), utc(dt.datetime(1969, 12, 31, 23, 59, 59, 999_999))],
    ),
    "timestamp_ntz": (pa.timestamp("us"), [FIRST, LAST, dt.datetime(2026, 3, 8, 2, 30, 0, 1)]),
    "interval": (pa.duration("us"), [dt.timedelta(days=-1, microseconds=1), dt.timedelta(days=100_000, hours=25)]),
    "array": (pa.list_(pa.int64()), [[], [None], [1, None, 2**62]]),
    "struct": (PLAIN, [{"a": 1, "b": ""}, {"a": None, "b": None}]),
    "map": (pa.map_(pa.string(), pa.float64()), [[], [("", None), ("a", -0.0)]]),
    "nested": (
        DEEP,
        [
            {"s": None, "l": None, "at": utc(FIRST)},
            {"s": {"a": 1, "b": None}, "l": [None, {"a": None, "b": "x"}], "at": None},
        ],
    ),
    "all null": (pa.string(), [None]),
    'odd, `na.me` "ü" [b]': (pa.int64(), [7]),
    "case": (pa.int64(), [1]),
    "Case": (pa.string(), ["two"]),
}
"""Of each column, the type and its values. The last row has nulls only."""

NOT_OF_SPARK = ("uint8", "uint16", "uint32", "uint64", "Case")
"""Columns that Spark does not have: it has no unsigned integers, and ``case`` and ``Case`` are one name to it."""

ROWS = 1 + max(len(values) for _, values in CASES.values())


def table(*without: str) -> pa.Table:
    """Return all columns but some, behind ``n``, the number of each row; the last row has nulls."""
    columns: dict[str, pa.Array] = {"n": pa.array(range(ROWS), pa.int64())}
    for name, (dtype, values) in CASES.items():
        if name not in without:
            found = [values[at % len(values)] for at in range(ROWS - 1)]
            columns[name] = pa.array([*found, None], dtype)
    return pa.table(columns)


def carried(given: pa.Table) -> pa.Table:
    """Return ``given`` as Headgate carries it."""
    schema = canonical_schema(given.schema)
    return pa.Table.from_batches([to_canonical(batch) for batch in given.to_batches()], schema)


def exact(value: Any) -> Any:
    """Return what tells values apart that Python calls equal, or does not call equal to themselves."""
    if isinstance(value, float):
        return "NaN" if math.isnan(value) else struct.pack(">d", value).hex()
    if isinstance(value, dict):
        return {name: exact(inner) for name, inner in value.items()}
    if isinstance(value, list | tuple):
        return [exact(inner) for inner in value]
    return (type(value).__name__, value)


def rows_of(found: pa.Table | list[dict[str, Any]]) -> list[Any]:
    """Return rows in their order, to be compared."""
    rows = found if isinstance(found, list) else found.to_pylist()
    return [exact(row) for row in sorted(rows, key=lambda row: row["n"])]
