"""The table that a stream with changes describes."""

from __future__ import annotations

from typing import Any


def table_of(changes: list[dict[str, Any]], keys: tuple[str, ...]) -> list[dict[str, Any]]:
    """Return the rows that are left at the end. Without keys each row that goes was there."""
    if not keys:
        rows: list[dict[str, Any]] = []
        for change in changes:
            is_new = change.pop("op") in ("insert", "update_after")
            rows.append(change) if is_new else rows.remove(change)
        return rows
    found: dict[tuple[Any, ...], dict[str, Any]] = {}
    for change in changes:
        op = change.pop("op")
        key = tuple(change[name] for name in keys)
        if op == "delete":
            found.pop(key, None)
        elif op != "update_before":
            found[key] = change
    return list(found.values())
