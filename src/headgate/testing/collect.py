"""A sink whose committed records a test can read.

Counterpart: ``connectors.files.sink``, which it is.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from headgate.connectors.files.commit import read_committed
from headgate.connectors.files.sink import FileSink


class Collect(FileSink):
    """Keeps committed records as Parquet files in a directory, so that types survive."""

    def __init__(self, path: str | Path) -> None:
        """Configure; ``path`` is a directory that every worker reaches."""
        super().__init__(path, "parquet", prefix="collected", roll_interval=0)

    def rows(self) -> list[dict[str, Any]]:
        """Return the records of completed checkpoints, in order of checkpoint and subtask."""
        return read_committed(self.url).to_dicts()
