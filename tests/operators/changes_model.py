"""What a stream with changes means, in plain Python."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any


def applied(
    changes: Iterable[dict[str, Any]], keys: Sequence[str], *, retractions: bool, strict: bool = False
) -> list[dict[str, Any]]:
    """Return the table that the changes make, in the order of its keys.

    With retractions, each row that goes must be there as it is. ``strict``: so must every insert be new, every update
    be one, and every delete be of a row.
    """
    table: dict[Any, dict[str, Any]] = {}
    there: Counter[Any] = Counter()
    for change in changes:
        row = {name: value for name, value in change.items() if name != "op"}
        key = tuple(row[name] for name in keys)
        if change["op"] in ("update_before", "delete"):
            if retractions:
                there[repr(row)] -= 1
                assert there[repr(row)] >= 0, f"{change} takes back what was not there"
            assert change["op"] == "delete" or retractions
            if strict:
                assert key in table, f"{change} is of no row"
            if table.get(key) == row or not retractions:
                table.pop(key, None)
            if change["op"] == "update_before":
                table[key] = {}
        else:
            there[repr(row)] += 1
            if strict:
                assert (key in table) == (change["op"] == "update_after"), f"{change} comes when {table.get(key)} is"
                assert not retractions or not table.get(key), (
                    f"{change} comes without {table.get(key)} being taken back"
                )
            table[key] = row
    assert all(row for row in table.values()), "an update has no new row"
    return [table[key] for key in sorted(table)]
