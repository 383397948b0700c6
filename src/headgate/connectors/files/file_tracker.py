"""The files that one subtask reads: which it owns, where they are now, and which of them are new.

Counterparts: ``line_source``, which reads them; ``rotation``, which finds renamed ones. Source:
docs/spec/connectors.md. Every decision follows from names, inodes and content, and from the positions,
which all subtasks are given: nothing has to be agreed upon.
"""

from __future__ import annotations

import glob
import os
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace

from headgate.connectors.base import SourceContext, owner_of_split
from headgate.connectors.files.file_position import FilePosition
from headgate.connectors.files.filesystem import inode_of
from headgate.connectors.files.line_file import FileMovedError, FileOptions, LineFile
from headgate.connectors.files.rotation import ForeignFiles, Found, OlderFiles, SeenFile, renamed_to, was_compressed
from headgate.connectors.files.selection import COMPRESSED, FileSelection, numbered_files, owner_of_file, series_of
from headgate.errors import UsageError


class FileAssignment:
    """What of all selected files is one subtask's."""

    def __init__(self, context: SourceContext, selection: FileSelection, *, follow: bool) -> None:
        self._context = context
        self._selection = selection
        self._follow = follow
        self._others = ForeignFiles(system=selection.system)
        given = [root for root in selection.roots if not glob.has_magic(root)] if follow else []
        self.given = {root for root in given if not selection.system.is_directory(root)}
        """Files that were given one by one; some may be missing just now."""

    def owns(self, path: str, number: int | None) -> bool:
        """Whether the file at ``path``, of a fixed list the one with this number, is this subtask's."""
        parallelism = self._context.parallelism
        if self._follow:
            return owner_of_file(self._selection.key(path), parallelism) == self._context.subtask_index
        assert number is not None
        return owner_of_split(number, parallelism) == self._context.subtask_index

    def is_of_another(self, before: str, path: str) -> bool:
        """Whether ``path`` belongs to another log that was given by its name than ``before`` did."""
        series = series_of(path)
        return series != series_of(before) and series in self.given

    # -- files of other subtasks ------------------------------------------------------------------------------

    def note(self, path: str, inode: int) -> None:
        """Remember a file of another subtask under its name of today."""
        self._others.note(path, inode)

    def note_position(self, path: str, position: FilePosition) -> None:
        """Remember a file of another subtask as its position tells it.

        One of which nothing was read is not known under another name; one that is gone may have left its inode to
        another one that is known.
        """
        is_taken = position.is_finished and position.inode in self._others.files
        if position.inode and position.offset and not is_taken:
            self._others.files[position.inode] = SeenFile(
                path, position.head_bytes, position.head_digest, self._selection.system
            )

    def forget_all_but(self, inodes: Collection[int | None]) -> None:
        """Forget the files of others that are not there any more."""
        self._others.files = {inode: seen for inode, seen in self._others.files.items() if inode in inodes}

    def is_of_others(self, path: str, inode: int) -> bool:
        """Whether the file at ``path`` is one of another subtask's that was renamed."""
        return self._others.has(path, inode)


def _refuse_compressed_meanwhile(path: str, known: Collection[str], files: Sequence[str]) -> None:
    """Refuse a compressed file that may hold what was read of a file that is gone.

    Raises:
        UsageError
    """
    stem, ending = os.path.splitext(path)
    if ending.lower() in COMPRESSED and stem in known and stem not in files:
        raise UsageError(
            f"{stem} was read, and is gone; {path} may be the same, compressed, and would be read once more: put it "
            "back as it was, or move the compressed file away"
        )


LOOKS_MAX = 3
"""What is missing or may not be read just now is awaited for so many looks for new files."""


class FileTracker:
    """``path → file`` of the files that one subtask owns."""

    def __init__(self, context: SourceContext, selection: FileSelection, options: FileOptions) -> None:
        self.files: dict[str, LineFile] = {}
        self.losses: list[LineFile] = []
        """Files that were replaced unseen: what was appended last may be missing (N21)."""
        self._selection = selection
        self._options, self._follow = options, options.follow
        self._system = selection.system
        self._assignment = FileAssignment(context, selection, follow=options.follow)
        self._older = OlderFiles(self._system)
        self._settled: dict[str, LineFile] = {}
        """By series, the file for which everything that was rotated away before it has been dealt with."""
        self._awaited: dict[str, int] = {}
        """In how many looks in a row something was missing or could not be read, by path."""

    # -- at the start -------------------------------------------------------------------------------------------

    def open(self, files: Sequence[str], positions: Mapping[str, bytes]) -> list[LineFile]:
        """Return the files to read: those of the positions, wherever they are now, and the new ones of the list.

        Raises:
            UsageError: a file is gone, or is not what it was, and something of it was not read.
        """
        known = {path: FilePosition.decode(path, encoded) for path, encoded in positions.items()}
        numbers = {} if self._follow else numbered_files(files, {path: at.number for path, at in known.items()})
        own = {}
        for path, position in known.items():
            number = numbers.get(path)
            if self._assignment.owns(path, number):
                own[path] = self._file(path, replace(position, number=number, older=None, is_settled=False))
                if position.older is not None:
                    self._older.restore(series_of(path), position.older)
            else:
                self._assignment.note_position(path, position)
        # after the files of the positions, and before new ones: see ``_add_missed``
        beside = self._beside(own, files)
        renamed = self._place(list(own.values()), files, numbers)
        settled = {series_of(path) for path, position in known.items() if position.is_settled}
        self._settled = {path: file for path, file in self.files.items() if own.get(path) is file and path in settled}
        for path in files:
            if path not in self.files:
                _refuse_compressed_meanwhile(path, known, files)
                self._consider(path, numbers.get(path))
        for before, file in renamed:
            series = series_of(before)
            if series in beside and series not in self._older:
                self._older.are_written_before(series, self._free(beside)[series], file.path)
        self._add_missed(beside, own)
        return list(self.files.values())

    def _place(
        self, files: Sequence[LineFile], listed: Collection[str], numbers: Mapping[str, int]
    ) -> list[tuple[str, LineFile]]:
        """Find where restored files are now; those still in their places first, so that no other takes them.

        Returns those that were renamed, with their former paths.
        """
        moved = [file for file in files if not self._is_in_place(file)]
        self.files = {file.path: file for file in files if file not in moved}
        formerly = {id(file): file.path for file in files}
        searched = deque(moved)
        while searched:
            file = searched.popleft()
            now = renamed_to(file, self._is_free_for(file))
            if now is None:
                continue
            if not file.has_fingerprint and self._is_for_another(now, listed, numbers):
                moved.remove(file)
                continue
            if now in self.files:  # who was found there has been renamed since
                moved.append(self.files[now])
                searched.append(self.files[now])
            file.move(now)
            if self._follow:
                file.reopen()  # it may have been removed, and is put back
            self.files[now] = file
        renamed = [(formerly[id(file)], file) for file in self.files.values() if formerly[id(file)] != file.path]
        for file in moved:
            if self.files.get(file.path) is not file:
                self._settle(file)
        return renamed

    def _is_for_another(self, path: str, listed: Collection[str], numbers: Mapping[str, int]) -> bool:
        """Whether another subtask reads what is at ``path`` now, if nothing was read of it under another name.

        Subtasks look at different times, and an inode is used again: what it says could differ from one to the next.
        """
        selected = self._selection.look().files if self._follow else listed
        return path in selected and not self._assignment.owns(path, numbers.get(path))

    def _is_free_for(self, file: LineFile) -> Callable[[str], bool]:
        """Return whether ``file`` may be at a path: an inode tells it from a file that was seen there before.

        Of a file of which nothing was read the inode is all there is, and another log may have that now: it is looked
        for under names of its own series, and under those that no other log has that was given by its name.
        """

        def is_free(path: str) -> bool:
            if not file.has_fingerprint and self._assignment.is_of_another(file.path, path):
                return False
            return path not in self.files or bool(file.inode and self.files[path].inode != file.inode)

        return is_free

    def _is_in_place(self, file: LineFile) -> bool:
        inode = self._inode_of(file.path)
        return inode is not None and (inode == file.inode if file.inode else file.is_at(file.path))

    def _settle(self, file: LineFile) -> None:
        """Decide about a restored file that is not where it was and was not renamed."""
        inode = self._inode_of(file.path)
        if inode is not None and file.path not in self.files and self._is_in_its_place(file, inode):
            file.accept(inode)
            self.files[file.path] = file
        elif not file.is_finished:
            is_unknown = inode is not None and not file.inode  # it cannot be looked for
            if not self._follow or file.unread_bytes or is_unknown:
                raise UsageError(str(file.gone()))
            self._finish(file, inode)
        if file.is_finished:
            self.files.setdefault(file.path, file)

    def _is_in_its_place(self, file: LineFile, inode: int) -> bool:
        """Whether what is at the path of ``file``, which is nowhere, is a copy that took its place.

        Of a file of which nothing was read anything could be one, but not what is known and was renamed.
        """
        if not file.is_at(file.path):
            return False
        if file.has_fingerprint:
            return True
        others = [each for each in self.files.values() if each.inode == inode and each is not file]
        is_known = any(not each.was_empty and each.is_at(file.path, inode) for each in others)
        return not is_known and not self._assignment.is_of_others(file.path, inode)

    # -- later --------------------------------------------------------------------------------------------------

    def discover(self) -> list[LineFile]:
        """Look for new files, and for files that were renamed; return those that are new to this subtask."""
        before = dict(self.files)
        listing = self._selection.look()
        self._check_awaited(listing.unreadable)
        listed = listing.files
        beside = self._beside(before, [*listed, *listing.unreadable])
        for path in listed:
            file = self.files.get(path)
            if file is not None and file.is_finished:
                self._reappeared(file)
            elif file is None:
                self._consider(path, None)
        present = {self._inode_of(path) for path in listed}
        self._assignment.forget_all_but(present)
        self._add_missed(beside, before)
        known = {id(file) for file in before.values()}
        return [file for file in self.files.values() if id(file) not in known]

    def _check_awaited(self, unreadable: Sequence[str]) -> None:
        """Rotation makes a file first and lets others read it then: a moment is granted.

        Raises:
            UsageError: it has passed.
        """
        unfinished = {file.path for file in self.files.values() if not file.is_finished}
        missing = {path for path in sorted(unfinished.intersection(self._awaited)) if self._inode_of(path) is None}
        self._awaited = {path: self._awaited.get(path, 0) + 1 for path in {*unreadable, *missing}}
        for path in unreadable:
            if self._awaited[path] >= LOOKS_MAX and self._assignment.owns(path, None):
                raise self._selection.cannot_read(path)

    def _reappeared(self, file: LineFile) -> None:
        """A file is there again under the name of one that was removed: put back, renamed, or another one."""
        inode = self._inode_of(file.path)
        if inode is not None and not self._is_known(file.path, inode):
            is_same = file.has_fingerprint and file.is_at(file.path)
            position = replace(file.position(), is_finished=False) if is_same else FilePosition()
            self.files[file.path] = self._file(file.path, replace(position, inode=inode))

    def _consider(self, path: str, number: int | None) -> None:
        """Add ``path`` if it is a new file, and ours."""
        inode = self._inode_of(path)
        if inode is None and self._follow:
            return
        if not self._assignment.owns(path, number):
            if inode is not None:
                self._assignment.note(path, inode)
            return
        if inode is None or not self._is_known(path, inode):
            self.files[path] = self._file(path, FilePosition(inode=inode or 0, number=number))

    def _is_known(self, path: str, inode: int) -> bool:
        """Whether the file at ``path`` has another name, or had; one that was renamed has this one now."""
        for file in list(self.files.values()):
            if file.inode == inode and file.path != path:
                if self._inode_of(file.path) == inode:
                    return True  # one file with two names
                if not file.was_empty and file.is_at(path, inode):
                    self._rename(file, path)
                    return True
        # If it was renamed on while it was looked at, the next look tells.
        return self._assignment.is_of_others(path, inode) or self._inode_of(path) != inode

    def relocate(self, file: LineFile, moved: FileMovedError) -> bool:
        """Find ``file``, which is not at its path any more; afterwards it has another one, or has finished.

        Returns whether that is so: a file that is missing with something unread is awaited for a few looks.

        Raises:
            UsageError: it changed in place, or is gone and something of it was not read.
        """
        now = renamed_to(file, self._is_free_for(file))
        if now is not None:
            self._rename(file, now)
        elif moved.is_in_place:
            raise UsageError(str(moved))
        elif moved.inode is not None and self._is_in_its_place(file, moved.inode):
            file.accept(moved.inode)
        elif self.files.get(file.path) is file and self._is_awaited(file, moved):
            return False
        elif not self._follow or file.unread_bytes:
            raise UsageError(str(file.gone()))
        else:
            self._finish(file, moved.inode)
        self._awaited.pop(file.path, None)
        return True

    def _is_awaited(self, file: LineFile, moved: FileMovedError) -> bool:
        is_missing = self._follow and file.unread_bytes > 0 and moved.inode is None
        return is_missing and self._awaited.setdefault(file.path, 0) < LOOKS_MAX

    def _finish(self, file: LineFile, inode: int | None) -> None:
        """``file`` is nowhere, and all that is known of it was read (N21). ``inode``: what is at its path now.

        If it made way for another one, or was compressed, more may have been appended than was seen. To a file
        that was rotated away and read to its end nothing is appended.
        """
        is_replaced = inode is not None or was_compressed(file)
        if is_replaced and not (self.is_rotated(file.path) and file.was_opened):
            self.losses.append(file)
        file.finish()

    def _rename(self, file: LineFile, path: str) -> None:
        """Note the new name of ``file``; the file that had this name has moved on, too."""
        before = file.path
        if self.files.get(before) is file:
            del self.files[before]
        other = self.files.pop(path, None)
        if file.is_finished:  # it had been removed, and is put back
            file = self._file(path, replace(file.position(), is_finished=False))
        file.move(path)
        self.files[path] = file
        if other is not None and not other.is_finished:
            self.relocate(other, FileMovedError("", self._inode_of(path)))

    # -- what is beside the files that are selected ---------------------------------------------------------

    def _beside(self, known: Collection[str], listed: Collection[str]) -> dict[str, Found]:
        """Return, by series, the files that are beside ours and are not ``listed`` themselves."""
        if not self._follow:
            return {}
        shown = self._selection.shows_all_beside
        paths = {path for path in {*known, *listed, *self._assignment.given} if not shown(path)}
        return self._older.beside({series_of(path) for path in paths if self._assignment.owns(path, None)}, listed)

    def _add_missed(self, beside: Mapping[str, Found], before: Mapping[str, LineFile]) -> None:
        """Add what was rotated away unseen. ``beside`` was listed after the files of ``before`` were noticed.

        What lies beside a file in its place was rotated away before that file was made. If it was dealt with then,
        what is there besides does not come from rotation.
        """
        of_series: dict[str, list[LineFile]] = {series: [] for series in beside}
        for path, file in self.files.items() if beside else ():
            of_series.setdefault(series_of(path), []).append(file)
        free_of = self._free(beside)
        for series, found in beside.items():
            self._older.prune(series, found)
            free, current = free_of[series], self.files.get(series)
            is_known = current is not None and not current.is_finished and before.get(series) is current
            is_still = is_known and self._are_in_place(of_series[series])
            if series not in self._older or (is_still and self._settled.get(series) is current):
                self._older.are(series, free)
                continue
            for path, inode in self._older.missed(series, free):
                self.files[path] = self._file(path, FilePosition(inode=inode))
            if is_still and current is not None:
                self._settled[series] = current

    def _are_in_place(self, files: Sequence[LineFile]) -> bool:
        return all(file.is_finished or self._is_in_place(file) for file in files)

    def _free(self, beside: Mapping[str, Found]) -> dict[str, Found]:
        """Leave out what is known as input of some subtask."""
        known: dict[int, list[LineFile]] = {}
        for file in self.files.values():
            known.setdefault(file.inode, []).append(file)
        taken = {path for path, file in self.files.items() if not file.is_finished or file in self.losses}

        def is_known(path: str, inode: int) -> bool:
            return any(
                not file.is_finished or (file.has_fingerprint and file.is_at(path, inode))
                for file in known.get(inode, ())
            )

        def is_free(path: str, inode: int) -> bool:
            return path not in taken and not is_known(path, inode) and not self._assignment.is_of_others(path, inode)

        return {series: [each for each in found if is_free(*each)] for series, found in beside.items()}

    # -- positions ------------------------------------------------------------------------------------------------

    def positions(self) -> dict[str, bytes]:
        """Return a position for each file. One of a series says which files of it are no input.

        A file with a loss that was not reported yet has not finished: a restart would not report it.
        """
        found = {}
        said: set[str] = set()
        for path in sorted(self.files):
            file, series = self.files[path], series_of(path) if self._older else ""
            position = file.position()
            if file in self.losses:
                position = replace(position, is_finished=False)
            if series in self._older and series not in said:
                said.add(series)
                is_settled = series in self.files and self._settled.get(series) is self.files[series]
                position = replace(position, older=self._older.of(series), is_settled=is_settled)
            found[path] = position.encode()
        return found

    # -- what follows from names ----------------------------------------------------------------------------------

    def is_rotated(self, path: str) -> bool:
        """Whether ``path`` has a name that rotation makes: no more writes are expected there."""
        key = self._selection.key(path)
        return series_of(key) != key

    def _file(self, path: str, position: FilePosition) -> LineFile:
        return LineFile(path, position, self._options, self._system)

    def _inode_of(self, path: str) -> int | None:
        return inode_of(path, self._system)
