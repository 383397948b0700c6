"""Whose a file is: this subtask's, or one of the others', of which it keeps in mind which they are (N1, N2, N19, N20).

Names say it, and for files that were renamed the inodes and beginnings under which they were seen, so that nothing has
to be agreed upon. Counterpart: ``table``, which holds the files that are this subtask's.
"""

from __future__ import annotations

import glob
from collections.abc import Collection

from headgate.connectors.base import SourceContext, owner_of_split
from headgate.connectors.files.listing import FileSelection, owner_of_file, series_of
from headgate.connectors.files.position import FilePosition
from headgate.connectors.files.rotation import Others, SeenFile


class Share:
    """What of all selected files is one subtask's."""

    def __init__(self, context: SourceContext, selection: FileSelection, *, follow: bool) -> None:
        self._context = context
        self._selection = selection
        self._follow = follow
        self._others = Others(system=selection.system)
        given = [root for root in selection.roots if not glob.has_magic(root)] if follow else []
        self.given = {root for root in given if not selection.system.is_directory(root)}
        """Files that were given one by one; some may be missing just now."""

    def owns(self, path: str, number: int | None) -> bool:
        """Whether the file at ``path``, of a fixed list the one with this number, is this subtask's (N1, N2)."""
        parallelism = self._context.parallelism
        if self._follow:
            return owner_of_file(self._selection.key(path), parallelism) == self._context.subtask_index
        assert number is not None
        return owner_of_split(number, parallelism) == self._context.subtask_index

    def is_of_another(self, before: str, path: str) -> bool:
        """Whether ``path`` belongs to another log that was given by its name than ``before`` did."""
        series = series_of(path)
        return series != series_of(before) and series in self.given

    # -- files of other subtasks (N20) ------------------------------------------------------------------------------

    def note(self, path: str, inode: int) -> None:
        """Remember a file of another subtask under its name of today."""
        self._others.note(path, inode)

    def note_position(self, path: str, position: FilePosition) -> None:
        """Remember a file of another subtask as its position tells it.

        One of which nothing was read is nobody's under another name (N20); one that is gone may have left its inode to
        another one that is known (N19).
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
