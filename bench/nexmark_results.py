"""When results of a NEXMark query are equal: their number and a digest of their rows, the same for all systems.

Standard library only, because every system computes them in an environment of its own.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterable, Mapping
from datetime import date, datetime
from decimal import Decimal
from typing import Any

COMPARED: Mapping[str, tuple[str, ...]] = {
    "q9": ("id", "price", "date_time_bid"),
    "q18": ("bidder", "auction", "date_time"),
    "q19": ("auction", "price", "rank_number"),
}
"""Columns that do not depend on which of several equal bids came first; of other queries, all columns."""

KEYS: Mapping[str, tuple[str, ...]] = {
    "q4": ("category",),
    "q9": ("id", "rank"),
    "q15": ("day",),
    "q16": ("channel", "day"),
    "q17": ("auction", "day"),
    "q18": ("bidder", "auction"),
    "q19": ("auction", "rank_number"),
}
"""By what the rows of the queries are known whose results change."""

WHOLE = ("average", "avg_price")
"""Averages, which Flink cuts off to whole numbers."""


def digest(query: str, rows: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """Return ``results`` and ``digest`` of rows by name of the column, in whatever order.

    Of q12, which bids share a window is up to the clock, so that only the number of bids of each bidder counts.
    """
    if query == "q12":
        bids: Counter[Any] = Counter()
        for row in rows:
            bids[row["bidder"]] += row["bid_count"]
        rows = [{"bidder": bidder, "bid_count": count} for bidder, count in bids.items()]
    lines = sorted(_line(query, row) for row in rows)
    return {"results": len(lines), "digest": hashlib.sha256("\n".join(lines).encode()).hexdigest()[:16]}


def last_rows(query: str, changes: Iterable[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Return the rows that are left of the results; a change says with ``op`` what it does, else it is a new value."""
    if query not in KEYS:
        return list(changes)
    left: dict[tuple[Any, ...], Mapping[str, Any]] = {}
    for change in changes:
        key = tuple(change[name] for name in KEYS[query])
        op = change.get("op", "insert")
        if op == "delete":
            left.pop(key, None)
        elif op != "update_before":
            left[key] = {name: value for name, value in change.items() if name != "op"}
    return list(left.values())


def _line(query: str, row: Mapping[str, Any]) -> str:
    names = COMPARED.get(query) or sorted(row)
    return "\t".join(f"{name}={_text(name, row[name])}" for name in names)


def _text(name: str, value: Any) -> str:
    if value is None:
        return "null"
    if name in WHOLE:
        return str(int(value))
    if isinstance(value, datetime):
        return value.replace(tzinfo=None).isoformat(timespec="milliseconds")
    if isinstance(value, date):
        return value.isoformat()
    if isinstance(value, Decimal):
        return f"{value.normalize():f}"
    return str(value)
