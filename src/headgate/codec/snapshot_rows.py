"""Count the rows of state in the bytes of a snapshot of any writer.

Counterpart: ``state.snapshot.FrozenState.rows``, which says how many there were at the barrier. The two come from
different places on purpose: the manifest records the latter, and a snapshot with other rows is neither acknowledged
nor restored. Never copies or decodes a row.
"""

from __future__ import annotations

import json
from collections.abc import Mapping

import pyarrow as pa

from headgate.codec.arrow import stream_rows
from headgate.codec.loop_log import LOG_ROWS, log_rows
from headgate.errors import CorruptionError

ARROW_START = b"\xff\xff\xff\xff"
"""Every Arrow stream begins so, and no JSON."""


def stored_rows(sections: Mapping[str, memoryview], path: str) -> dict[str, int]:
    """Return how many rows each section of an operator's snapshot has; sections without rows are left out.

    Args:
        sections: of the container that the operator wrote.
        path: where it came from, for messages.

    Raises:
        CorruptionError: a section is not what its first bytes promise.
    """
    logged = log_rows(sections)
    if logged is not None:
        return {LOG_ROWS: logged}
    return {name: _rows_of(data, f"{path}, state '{name}'") for name, data in sections.items()}


def difference(recorded: Mapping[str, int], found: Mapping[str, int]) -> tuple[str, str] | None:
    """Return what was expected and what was found of the first state with other rows than recorded, or None."""
    for name, rows in recorded.items():
        if found.get(name, 0) != rows:
            return f"{rows} rows of state '{name}'", f"{found.get(name, 0)} rows"
    return None


def _rows_of(data: memoryview, path: str) -> int:
    if data[:4] != ARROW_START:
        return _entries_of(data)
    try:
        return stream_rows(data)
    except (pa.ArrowException, OSError) as error:
        raise CorruptionError(path, 0, "an Arrow stream", str(error)) from error


def _entries_of(data: memoryview) -> int:
    """Return the entries of a JSON object; anything else has no rows."""
    try:
        found = json.loads(bytes(data))
    except ValueError:
        return 0
    return len(found) if isinstance(found, dict) else 0
