"""Follows files that rotate while a test acts between any two looks at them."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.connectors.source_reading import context

from headgate.connectors.base import SourceReader
from headgate.connectors.files.filesystem import LOCAL, FileSystem, LocalFiles
from headgate.connectors.files.line_source import FileReader, TextFiles


def source_of(paths: object, system: FileSystem, *, follow: bool = True) -> TextFiles:
    kind = type("Files", (TextFiles,), {"system": system})
    made = kind(paths, follow=follow, poll_interval="1ms", discovery_interval=0)
    assert isinstance(made, TextFiles)
    return made


class Following:
    """All subtasks of a source that follows files, with a clock of their own; may be started again at any time."""

    def __init__(self, paths: object, parallelism: int = 2, *, follow: bool = True, system: FileSystem = LOCAL) -> None:
        self.source = source_of(paths, system, follow=follow)
        self.found: list[str] = []
        self.bad: list[dict[str, object]] = []
        self.seconds = 0.0
        self.start(parallelism, None)

    def start(self, parallelism: int, positions: dict[str, bytes] | None) -> None:
        self.source.schema()
        self.readers = []
        for index in range(parallelism):
            reader = self.source.open(context(index, parallelism, positions, lambda: int(self.seconds * 1_000)))
            assert isinstance(reader, FileReader)
            self.readers.append(reader)

    def positions(self) -> dict[str, bytes]:
        found: dict[str, bytes] = {}
        for reader in self.readers:
            assert not found.keys() & reader.positions().keys(), "two subtasks own one file"
            found |= reader.positions()
        return found

    def restart(self, parallelism: int = 2) -> None:
        self.start(parallelism, self.positions())

    def poll(self, times: int = 12) -> list[str]:
        """Let every subtask look several times; return the lines that are new."""
        before = len(self.found)
        for _ in range(times):
            self.seconds += 1.0
            for reader in self.readers:
                self.take(reader)
        return self.found[before:]

    def take(self, reader: SourceReader) -> None:
        batch = reader.poll()
        if batch is not None:
            self.found += batch.batch.column("line").to_pylist()
            self.bad += batch.bad.to_pylist() if batch.bad is not None else []


def append(path: Path, *lines: str) -> None:
    with path.open("a") as file:
        file.writelines(f"{line}\n" for line in lines)


def rotate(log: Path, *, count: int = 9) -> None:
    """As ``logrotate`` with ``nocreate`` does."""
    for old in range(count, 0, -1):
        if Path(f"{log}.{old}").exists():
            Path(f"{log}.{old}").rename(f"{log}.{old + 1}")
    log.rename(f"{log}.1")


def assert_each_once(following: Following, written: int) -> None:
    """Every line, which ends with its number, was found once."""
    assert sorted(int(line.split()[1]) for line in following.found) == list(range(written))
    assert following.bad == []


class Meddling(LocalFiles):
    """Lets a test act before or after calls, by the name of the method; ``calls`` are taken off as they happen."""

    def __init__(self) -> None:
        self.before: dict[str, Callable[[str], object]] = {}
        self.after: dict[str, Callable[[str], object]] = {}

    def _act(self, when: dict[str, Callable[[str], object]], name: str, path: str) -> None:
        if name in when:
            when[name](path)

    def stat(self, path: str) -> os.stat_result:
        self._act(self.before, "stat", path)
        return os.stat(path)

    def opened(self, path: str) -> Any:
        self._act(self.before, "opened", path)
        return super().opened(path)

    def siblings(self, path: str) -> list[tuple[str, int]]:
        self._act(self.before, "siblings", path)
        found = super().siblings(path)
        self._act(self.after, "siblings", path)
        return found

    def may_read(self, path: str) -> bool:
        self._act(self.before, "may_read", path)
        return super().may_read(path)

    def may_list(self, path: str) -> bool:
        self._act(self.before, "may_list", path)
        return super().may_list(path)
