"""The files of one subtask: which there are, where they are now, and which of them are new.

Counterparts: ``files.FileReader``, which reads them; ``rotation``, which finds renamed ones. Source: rules N1, N2 and
N18–N21 of docs/spec/connectors.md. Every decision follows from names, inodes and content, and from the positions, which
all subtasks are given: nothing has to be agreed upon.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from headgate.connectors.base import SourceContext, owner_of_split
from headgate.connectors.files.lines import FileMovedError, LineFile
from headgate.connectors.files.listing import FileSelection, numbered, owner_of_file, series_of
from headgate.connectors.files.position import FilePosition
from headgate.connectors.files.rotation import Others, SeenFile, inode_of, missed, renamed_to
from headgate.errors import UsageError


class FileTable:
    """``path → file`` of the files that one subtask owns."""

    def __init__(self, context: SourceContext, selection: FileSelection, *, follow: bool, line_bytes_max: int) -> None:
        self.files: dict[str, LineFile] = {}
        self.losses: list[LineFile] = []
        """Files that were replaced unseen: what was appended last may be missing (N21)."""
        self._context = context
        self._selection = selection
        self._follow = follow
        self._line_bytes_max = line_bytes_max
        self._system = selection.system
        self._others = Others(system=self._system)

    # -- at the start -------------------------------------------------------------------------------------------

    def open(self, files: Sequence[str], positions: Mapping[str, bytes]) -> list[LineFile]:
        """Return the files to read: those of the positions, wherever they are now, and the new ones of the list.

        Raises:
            UsageError: a file is gone, or is not what it was, and something of it was not read.
        """
        known = {path: FilePosition.decode(path, encoded) for path, encoded in positions.items()}
        numbers = {} if self._follow else numbered(files, {path: at.number for path, at in known.items()})
        own = {}
        for path, position in known.items():
            number = numbers.get(path)
            if self._owns(path, number):
                own[path] = self._file(path, replace(position, number=number))
            elif position.inode:
                is_unread = position.offset == 0
                self._others.files[position.inode] = SeenFile(
                    path, position.head_bytes, position.head_digest, self._system, is_unread
                )
        self._place(list(own.values()))
        for path in files:
            if path not in self.files:
                self._consider(path, numbers.get(path))
        return list(self.files.values())

    def _place(self, files: Sequence[LineFile]) -> None:
        """Find where restored files are now; those still in their places first, so that no other takes them."""
        moved = [file for file in files if not self._is_in_place(file)]
        self.files = {file.path: file for file in files if file not in moved}
        renamed: list[tuple[str, LineFile]] = []
        for file in moved:
            before, now = file.path, renamed_to(file, lambda path: path not in self.files)
            if now is not None:
                file.move(now)
                self.files[now] = file
                renamed.append((before, file))
        for file in moved:
            if self.files.get(file.path) is not file:
                self._settle(file)
        for before, file in renamed:
            self._add_missed(before, file.path)

    def _is_in_place(self, file: LineFile) -> bool:
        inode = self._inode_of(file.path)
        return inode is not None and (inode == file.inode if file.inode else file.is_at(file.path))

    def _settle(self, file: LineFile) -> None:
        """Decide about a restored file that is not where it was and was not renamed."""
        inode = self._inode_of(file.path)
        if inode is not None and file.path not in self.files and file.is_at(file.path):
            file.accept(inode)
            self.files[file.path] = file
        elif not file.is_finished:
            is_unknown = inode is not None and not file.inode  # of version 0.1: it cannot be looked for
            if not self._follow or file.unread_bytes or is_unknown:
                raise UsageError(str(file.gone()))
            if inode is not None:
                self.losses.append(file)
            file.finish()
        if file.is_finished:
            self.files.setdefault(file.path, file)

    # -- later --------------------------------------------------------------------------------------------------

    def discover(self) -> list[LineFile]:
        """Look for new files, and for files that were renamed; return those that are new to this subtask."""
        before = {id(file) for file in self.files.values()}
        listed = self._selection.find(skips_compressed=True)
        for path in listed:
            file = self.files.get(path)
            if file is not None and file.is_finished:
                self._reappeared(file)
            elif file is None:
                self._consider(path, None)
        present = {self._inode_of(path) for path in listed}
        self._others.files = {inode: seen for inode, seen in self._others.files.items() if inode in present}
        return [file for file in self.files.values() if id(file) not in before]

    def _reappeared(self, file: LineFile) -> None:
        """A file is there again under the name of one that was removed: put back, or another one (N7)."""
        inode = self._inode_of(file.path)
        if inode is not None:
            is_same = file.has_fingerprint and file.is_at(file.path)
            position = replace(file.position(), is_finished=False) if is_same else FilePosition()
            self.files[file.path] = self._file(file.path, replace(position, inode=inode))

    def _consider(self, path: str, number: int | None) -> None:
        """Add ``path`` if it is a new file, and ours."""
        inode = self._inode_of(path)
        if inode is None and self._follow:
            return
        if not self._owns(path, number):
            if inode is not None:
                self._others.note(path, inode)
            return
        for file in self.files.values():
            if inode and file.inode == inode and file.path != path:
                if self._inode_of(file.path) == inode:
                    return  # one file with two names
                if file.is_at(path):
                    self._rename(file, path)
                    return
        if inode and self._others.has(path, inode):
            return
        self.files[path] = self._file(path, FilePosition(inode=inode or 0, number=number))

    def relocate(self, file: LineFile, moved: FileMovedError) -> None:
        """Find ``file``, which is not at its path any more; afterwards it has another one, or has finished.

        Raises:
            UsageError: it changed in place, or is gone and something of it was not read.
        """
        now = renamed_to(file, lambda path: path not in self.files or self.files[path].inode != file.inode)
        if now is not None:
            self._rename(file, now)
        elif moved.is_in_place:
            raise UsageError(str(moved))
        elif moved.inode is not None and file.is_at(file.path):
            file.accept(moved.inode)
        elif not self._follow or file.unread_bytes:
            raise UsageError(str(file.gone()))
        else:
            file.finish()  # N7

    def _rename(self, file: LineFile, path: str) -> None:
        """Note the new name of ``file``; whoever had this name has moved on, too."""
        before = file.path
        if self.files.get(before) is file:
            del self.files[before]
        other = self.files.pop(path, None)
        file.move(path)
        self.files[path] = file
        if other is not None and not other.is_finished:
            self.relocate(other, FileMovedError("", self._inode_of(path)))
        self._add_missed(before, path)

    def _add_missed(self, before: str, now: str) -> None:
        if not self._follow:
            return
        inodes = {file.inode for file in self.files.values()}
        for path in missed(self._selection, before, now):
            inode = self._inode_of(path)
            if path not in self.files and inode not in inodes and inode is not None:
                self.files[path] = self._file(path, FilePosition(inode=inode))

    # -- what follows from names ----------------------------------------------------------------------------------

    def is_rotated(self, path: str) -> bool:
        """Whether ``path`` has a name that rotation makes: nobody is expected to write there any more."""
        key = self._selection.key(path)
        return series_of(key) != key

    def _owns(self, path: str, number: int | None) -> bool:
        parallelism = self._context.parallelism
        if self._follow:
            return owner_of_file(self._selection.key(path), parallelism) == self._context.subtask_index
        assert number is not None
        return owner_of_split(number, parallelism) == self._context.subtask_index

    def _file(self, path: str, position: FilePosition) -> LineFile:
        return LineFile(path, position, self._follow, self._line_bytes_max, self._system)

    def _inode_of(self, path: str) -> int | None:
        return inode_of(path, self._system)
