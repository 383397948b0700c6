"""A disk that forgets what was not synced: names that a power cut takes with it, of files and of directories."""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

import pytest
from tests.mutants.harness import patched

from headgate.storage import local_files

Act = Callable[[], object]


def another_process() -> AbstractContextManager[None]:
    """Know nothing, for the time of the block, of what this process has synced."""
    return patched(local_files, "SYNCED", local_files.SyncedDirectories())


class PowerCut:
    """Watches links, renames and new directories in this process; ``cut`` removes those whose directory was not synced
    since."""

    def __init__(self) -> None:
        self._unsynced: dict[Path, set[Path]] = {}
        self._failures: list[Act] = []
        self.synced: list[Path] = []
        """Directories, in order."""

    def fail_directory_syncs(self, times: int, meanwhile: Act = lambda: None) -> None:
        """Have the next syncs of a directory fail. Others do ``meanwhile`` before the first one that fails says so."""
        self._failures = [meanwhile, *[lambda: None] * (times - 1)][:times]

    def cut(self) -> None:
        """Lose what was not synced."""
        for names in self._unsynced.values():
            for name in names:
                if name.is_dir():
                    shutil.rmtree(name)
                else:
                    name.unlink(missing_ok=True)
        self._unsynced.clear()

    def _named(self, target: str | Path) -> None:
        path = Path(target)
        self._unsynced.setdefault(path.parent, set()).add(path)

    @contextmanager
    def watching(self) -> Iterator[PowerCut]:
        """Watch for the time of the block."""
        fsync = os.fsync

        def watched_fsync(descriptor: int) -> None:
            path = Path(os.readlink(f"/proc/self/fd/{descriptor}"))
            if path.is_dir():
                if self._failures:
                    self._failures.pop(0)()
                    raise OSError(errno.EIO, os.strerror(errno.EIO))
                self._unsynced.pop(path, None)
                self.synced.append(path)
            fsync(descriptor)

        with pytest.MonkeyPatch.context() as patch:
            for name in ("link", "replace", "rename"):
                patch.setattr(os, name, self._naming(getattr(os, name)))
            patch.setattr(os, "mkdir", self._making(os.mkdir))
            patch.setattr(os, "fsync", watched_fsync)
            yield self

    def _naming(self, real: Callable[..., None]) -> Callable[..., None]:
        def named(source: str | Path, target: str | Path) -> None:
            real(source, target)
            self._named(target)

        return named

    def _making(self, real: Callable[..., None]) -> Callable[..., None]:
        def made(path: str | Path, mode: int = 0o777) -> None:
            real(path, mode)
            self._named(path)

        return made
