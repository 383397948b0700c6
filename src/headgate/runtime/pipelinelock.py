"""At most one driver of a pipeline on one machine's directory: an advisory lock that dies with its process.

The lock only makes the second driver stop *early* and say who runs. What protects the data, also on object stores
where there is no lock, is the claim in the checkpoint log (``runtime.checkpointlog``).
"""

from __future__ import annotations

import fcntl
import os
from pathlib import Path
from typing import IO

from headgate.errors import UsageError


class PipelineLock:
    """Holds ``<root>/<pipeline>/lock`` while this process lives."""

    def __init__(self, file: IO[str] | None) -> None:
        self._file = file

    @classmethod
    def acquire(cls, root: str, pipeline: str, owner: str) -> PipelineLock:
        """Take the lock, if ``root`` is a local directory.

        Raises:
            UsageError: another driver runs this pipeline.
        """
        local = local_path(root)
        if local is None:
            return cls(None)
        directory = local / pipeline
        directory.mkdir(parents=True, exist_ok=True)
        file = open(directory / "lock", "a+", encoding="utf-8")  # noqa: SIM115 - held as long as the pipeline runs
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            file.seek(0)
            holder = file.read().strip() or "another process"
            file.close()
            raise UsageError(
                f"pipeline '{pipeline}' is already run by {holder} with the same checkpoint directory; stop that one "
                "first, or give this pipeline another name"
            ) from error
        file.truncate(0)
        file.write(owner)
        file.flush()
        os.set_inheritable(file.fileno(), False)
        return cls(file)

    def release(self) -> None:
        """Let others run the pipeline."""
        if self._file is not None:
            self._file.close()
            self._file = None


def local_path(root: str) -> Path | None:
    """Return the directory of a local checkpoint root, or None for an object store."""
    if root.startswith("file://"):
        return Path(root.removeprefix("file://"))
    return None if "://" in root else Path(root)
