"""A sink whose committed records a test can read.

Counterpart: ``connectors.files.sink``, which it is.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from headgate.connectors.files.commit import read_committed
from headgate.connectors.files.sink import FileSink


class Collect(FileSink):
    """A sink for tests that keeps committed records in a directory. They are Parquet files, so types are preserved."""

    def __init__(self, path: str | Path) -> None:
        """Configure; ``path`` is a directory that every worker can reach."""
        super().__init__(path, "parquet", prefix="collected", roll_interval=0)

    def rows(self) -> list[dict[str, Any]]:
        """Return the records of completed checkpoints, in the order of checkpoints and subtasks."""
        return read_committed(self.url).to_dicts()
