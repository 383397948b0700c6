"""Which files of a database the rows of some key groups are in: only these are fetched (RB29 of docs/spec/rocksdb.md).

A database is in the order of its key groups (RB1), so beyond its newest files each file has a range of them. Who wants
a part of the rows opens a database of which the other files were removed, with a note in its MANIFEST.
Counterparts: ``increments`` writes down where the files are, ``reopening`` fetches them.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

from headgate.model.manifest import KeyGroups
from headgate.state.files import UnsoundFiles
from headgate.state.rocksdb.database import FileRange, Rows
from headgate.state.rocksdb.described import Description
from headgate.state.rocksdb.notes import with_removed

_MANIFEST = "MANIFEST-"


def needed(description: Description, groups: KeyGroups) -> Description:
    """Return the database that ``description`` tells of without the files that have no row of ``groups``.

    Earlier releases did not write down where the files are: then it is all of them.
    """
    told = dict(zip(description.names, description.ranges, strict=False))
    removed = {name: found for name, found in told.items() if not _may_have(found, groups)}
    manifests = [name for name in description.small if name.startswith(_MANIFEST)]
    if not removed or len(manifests) != 1:  # without one, who opens it says what is wrong
        return description
    (manifest,) = manifests
    notes = with_removed(
        description.small[manifest], [(found.level, int(Path(name).stem)) for name, found in sorted(removed.items())]
    )
    left = {name: found for name, found in told.items() if name not in removed}
    small = {**description.small, manifest: notes}
    return replace(description, names=list(left), ranges=list(left.values()), small=small, is_whole=False)


def _may_have(file: FileRange, groups: KeyGroups) -> bool:
    return file.first_group < groups.first + groups.count and groups.first <= file.last_group


def check_files(rows: Rows, description: Description, where: str) -> None:
    """Make sure that an opened database has the files that ``description`` tells of, where it says, and no others.

    Its rows cannot be counted (R30): how many of them are in the files that are not here, nobody knows.

    Raises:
        UnsoundFiles: it is not so.
    """
    found, wanted = rows.files(), dict(zip(description.names, description.ranges, strict=True))
    if found != wanted:
        raise UnsoundFiles(where, 0, f"the files {_list(wanted.items())}", _list(found.items()))


def _list(files: Iterable[tuple[str, FileRange]]) -> str:
    return ", ".join(
        f"{name} (level {f.level}, key groups {f.first_group} to {f.last_group})" for name, f in sorted(files)
    )
