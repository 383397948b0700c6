"""Sources whose files live in the pipeline's own directory, which is known only when it starts."""

from __future__ import annotations

from typing import Any, Protocol, runtime_checkable

from headgate.connectors.base import Source
from headgate.errors import UsageError
from headgate.storage.backends import local_directory


@runtime_checkable
class PlacedSource(Protocol):
    """A source whose input is kept in the pipeline's directory."""

    def at(self, root: str, pipeline: str, node: str) -> CapturableSource:
        """Return the source with its place below the checkpoint directory ``root``."""


@runtime_checkable
class CapturableSource(Source, Protocol):
    """A placed source whose input is written there when the pipeline starts."""

    def capture(self) -> Any:
        """Write what is to be read, once for all restarts; return the SparkSession it came from."""

    def captured(self) -> Source:
        """Return the source that reads what ``capture`` wrote."""


def place(root: str, pipeline: str, kind: str, node: str) -> str:
    """Return the directory of one node's files: ``<root>/<pipeline>/<kind>/<node>``.

    Raises:
        UsageError: ``root`` is not a directory of this machine (or mounted on it).
    """
    local = local_directory(root)
    if local is None:
        raise UsageError(
            f"operator '{node}': DataFrames are exchanged through the checkpoint directory, which must be a directory "
            f"and not {root}; use ParquetFiles and FileSink with an object store"
        )
    return str(local / pipeline / kind / node)
