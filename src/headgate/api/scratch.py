"""Directories of runs whose results are only looked at: made anew for each run, gone when nobody needs them.

They lie below the checkpoint directory, which all workers reach. What a process left that died is removed by the next
run.
"""

from __future__ import annotations

import atexit
from pathlib import Path

from headgate.errors import UsageError
from headgate.model.security import Access
from headgate.storage.access import access_in
from headgate.storage.backends import local_directory
from headgate.storage.own_directory import OwnDirectory

SCRATCH = ".explored"
"""No pipeline can have this name."""


class ScratchDirectory:
    """One directory of this process."""

    def __init__(self, root: str) -> None:
        """Make it below the checkpoint directory ``root``, and remove what dead processes left there.

        Raises:
            UsageError: ``root`` is not a directory of this machine (or mounted on it).
        """
        local = local_directory(root)
        if local is None:
            raise UsageError(
                f"results are exchanged through the checkpoint directory, which must be a directory and not {root}; "
                "use Checkpointing(dir=) with one that all workers reach, or write to headgate.FileSink and call run()"
            )
        self._own = OwnDirectory(local / SCRATCH, access_in(local) if local.is_dir() else Access.OWNER)

    @property
    def path(self) -> Path:
        """Where it is."""
        return self._own.path

    def remove(self) -> None:
        """Remove it with everything in it. Idempotent."""
        self._own.remove()

    def remove_at_exit(self) -> None:
        """Keep it as long as this process lives."""
        atexit.register(self.remove)
