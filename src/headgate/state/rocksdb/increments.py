"""A checkpoint of a database as its files: those that earlier checkpoints hold are referred to (RB20).

Counterparts: ``protocol.checkpoints.sharing`` says which may be referred to, ``reopening`` opens them again. A file of
RocksDB never changes under its name, within one database; that it is the same one is told by its size and checksum.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TypeAlias

import xxhash

from headgate.model.manifest import SnapshotPart
from headgate.state.files import LocalDamage
from headgate.state.frozen import SnapshotTarget
from headgate.state.rocksdb.blocks import check_blocks
from headgate.state.rocksdb.database import FileRange, disk_error
from headgate.state.rocksdb.described import Description, is_told_by

SIZE_BYTES_MIN = 1 << 20
"""A database whose files are smaller is written as rows: there is little to be saved, and any backend reads these."""

Known: TypeAlias = dict[str, tuple[int, int]]
"""Size and checksum of files of one database, by name, as far as they were once read or written whole."""

LARGE = ".sst"
_LEFT_OUT = (LARGE, ".log", "LOG", "LOCK", "IDENTITY")
"""Endings of what is in no description: nothing was logged (RB4), and who opens it makes the others."""

OPTIONS = "OPTIONS-"
"""What the name begins with of what is in no description either: who opens it has options of its own (RB21)."""


def may_be_files(checkpoint: Path, tables: Sequence[object]) -> bool:
    """Whether a checkpoint is written as its files: they are large enough, and can be told what they are."""
    return is_told_by(tables) and sum(path.stat().st_size for path in checkpoint.glob(f"*{LARGE}")) >= SIZE_BYTES_MIN


def write_files(
    target: SnapshotTarget,
    shareable: Mapping[str, SnapshotPart],
    checkpoint: Path,
    known: Known,
    description: Description,
    ranges: Mapping[str, FileRange],
    rows: Mapping[str, int],
) -> None:
    """Write what nobody holds yet, and refer to the rest. May be repeated.

    Args:
        target: where they go.
        shareable: what may be referred to.
        checkpoint: the directory of the files.
        known: of this database; what is written is added.
        description: what the database is; its files are added.
        ranges: where each of the large files is.
        rows: of each state.

    Raises:
        LocalDamage: a file is not as it was written; nothing of it is (RB23).
        StorageError
    """
    large = sorted(checkpoint.glob(f"*{LARGE}"))
    for path in large:
        there = shareable.get(path.name)
        if there is not None and known.get(path.name) == (there.size_bytes, there.checksum):
            target.share(there)
            continue
        data = _read(path)
        _check(path, data, known.get(path.name))
        part = target.put_file(path.name, [data])
        known[path.name] = part.size_bytes, part.checksum
    small = {path.name: _read(path) for path in sorted(checkpoint.iterdir()) if _is_described(path.name)}
    names = [path.name for path in large]
    if set(names) != ranges.keys():
        raise LocalDamage(str(checkpoint), 0, f"the files {sorted(ranges)}", f"{names}")
    whole = replace(description, names=names, ranges=[ranges[name] for name in names], small=small)
    target.describe_files(whole.encode(), rows, whole.name)


def _is_described(name: str) -> bool:
    return not name.startswith(OPTIONS) and not name.endswith(_LEFT_OUT)


def _check(path: Path, data: bytes, known: tuple[int, int] | None) -> None:
    """Make sure that ``data`` is what it was when it was ``known``, or else that it is what RocksDB wrote (RB23)."""
    if known is None:
        check_blocks(data, path)
        return
    found = len(data), xxhash.xxh3_64_intdigest(data)
    if found != known:
        raise LocalDamage(
            str(path), 0, f"{known[0]} bytes with checksum {known[1]:016x}", f"{found[0]} with {found[1]:016x}"
        )


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except FileNotFoundError as error:
        raise LocalDamage(str(path), 0, "a file of a RocksDB database", "no file") from error
    except OSError as error:
        raise disk_error("read", path, error) from error
