"""Types of Kafka Connect and Debezium in schemas of Avro: what ``connect.name`` says that a number or a text means.

Source: "Data type mappings" in the documents of Debezium's connectors, and the logical types of Kafka Connect. Names
that are not here, such as those of enums and of documents of JSON, are of values that are what they seem to be.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from decimal import Decimal
from typing import Any

import pyarrow as pa

from headgate.codec.arrow import LOCAL_TIME, MOMENT

ZONED_TIMESTAMP = "io.debezium.time.ZonedTimestamp"
"""A text with a date, a time and a zone."""

DECIMAL = "org.apache.kafka.connect.data.Decimal"

SCALED_DECIMAL = "io.debezium.data.VariableScaleDecimal"
"""A record with the bytes of a number, ``value``, and with its own ``scale``."""

DIGITS_MAX = 38
"""Of decimals in columns."""

SCALE_MAX = 20_000
"""Larger than any database has: a text has as many digits."""

NUMBERS: Mapping[tuple[str, str], tuple[pa.DataType, int, int]] = {
    ("int", "io.debezium.time.Date"): (pa.date32(), 1, 1),
    ("int", "org.apache.kafka.connect.data.Date"): (pa.date32(), 1, 1),
    ("int", "io.debezium.time.Time"): (pa.time64("ns"), 1_000_000, 1),
    ("int", "org.apache.kafka.connect.data.Time"): (pa.time64("ns"), 1_000_000, 1),
    ("long", "io.debezium.time.MicroTime"): (pa.time64("ns"), 1_000, 1),
    ("long", "io.debezium.time.NanoTime"): (pa.time64("ns"), 1, 1),
    ("long", "io.debezium.time.Timestamp"): (LOCAL_TIME, 1_000, 1),
    ("long", "io.debezium.time.MicroTimestamp"): (LOCAL_TIME, 1, 1),
    ("long", "io.debezium.time.NanoTimestamp"): (LOCAL_TIME, 1, 1_000),
    ("long", "org.apache.kafka.connect.data.Timestamp"): (MOMENT, 1_000, 1),
    ("long", "io.debezium.time.MicroDuration"): (pa.duration("us"), 1, 1),
    ("long", "io.debezium.time.NanoDuration"): (pa.duration("ns"), 1, 1),
}
"""Base and name → the Arrow type, and what a number is multiplied with and divided by."""


def decimal_digits(given: Mapping[str, Any]) -> tuple[Any, Any]:
    """Return precision and scale of a decimal in a schema.

    Connect has no precision, and its converters write 64 where they are told of none, and a scale that is larger, such
    as 127, where the database has none. Its decimals are those of 38 digits then, and a larger one is not read.
    """
    precision, scale = given.get("precision"), given.get("scale", 0)
    if given.get("connect.name") == DECIMAL:
        parameters = given.get("connect.parameters") or {}
        scale = int(parameters.get("scale", scale))
        precision = DIGITS_MAX if not precision or precision < scale else min(precision, DIGITS_MAX)
    return precision, scale


def moments(texts: Sequence[str | None], *, cuts: bool) -> list[pa.Scalar | None]:
    """Return the moment that each text says; None where it says none. ``cuts``: leave parts of a microsecond out."""
    return [None if one is None else _moment(one, cuts) for one in texts]


def _moment(text: str, cuts: bool) -> pa.Scalar | None:
    head, dot, rest = text.partition(".")
    zone = rest.lstrip("0123456789")
    digits = rest[: len(rest) - len(zone)]
    if dot and (cuts or not digits[6:].strip("0")):
        text = f"{head}.{digits[:6]}{zone}"
    try:
        return pa.scalar(text).cast(MOMENT)
    except pa.ArrowInvalid:
        return None


def scaled_text(value: bytes, scale: int) -> str | None:
    """Return a number of big-endian bytes with its scale as text, exactly; None if its scale is absurd."""
    if abs(scale) > SCALE_MAX:
        return None
    number = int.from_bytes(value, "big", signed=True)
    return format(Decimal((int(number < 0), tuple(map(int, str(abs(number)))), -scale)), "f")
