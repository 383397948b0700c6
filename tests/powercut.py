"""A disk that forgets what was not synced: names that a power cut takes with it."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest


class PowerCut:
    """Watches links and renames in this process; ``cut`` removes those whose directory was not synced since."""

    def __init__(self) -> None:
        self._unsynced: dict[Path, set[Path]] = {}
        self._failures = 0

    def fail_directory_syncs(self, times: int) -> None:
        """Have the next syncs of a directory fail."""
        self._failures = times

    def cut(self) -> None:
        """Lose what was not synced."""
        for names in self._unsynced.values():
            for name in names:
                name.unlink(missing_ok=True)
        self._unsynced.clear()

    def _named(self, target: str | Path) -> None:
        path = Path(target)
        self._unsynced.setdefault(path.parent, set()).add(path)

    @contextmanager
    def watching(self) -> Iterator[PowerCut]:
        """Watch for the time of the block."""
        link, replace, fsync = os.link, os.replace, os.fsync

        def watched_link(source: Path, target: Path) -> None:
            link(source, target)
            self._named(target)

        def watched_replace(source: Path, target: Path) -> None:
            replace(source, target)
            self._named(target)

        def watched_fsync(descriptor: int) -> None:
            path = Path(os.readlink(f"/proc/self/fd/{descriptor}"))
            if path.is_dir():
                if self._failures:
                    self._failures -= 1
                    raise OSError(errno.EIO, os.strerror(errno.EIO))
                self._unsynced.pop(path, None)
            fsync(descriptor)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(os, "link", watched_link)
            patch.setattr(os, "replace", watched_replace)
            patch.setattr(os, "fsync", watched_fsync)
            yield self
