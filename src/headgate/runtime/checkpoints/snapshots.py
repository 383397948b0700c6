"""Parts of snapshots in the checkpoint storage: read with their checksum, and read again before they count as damaged.

Counterparts: ``targets`` writes them, ``restoring`` and ``snapshot_files`` read them. At most one part is in memory
at a time (SF10).
"""

from __future__ import annotations

from collections.abc import Iterator

import xxhash

from headgate.codec.snapshot import FILES_PREFIX, OF_ROWS, decode_sections
from headgate.codec.state_rows import difference, stored_rows
from headgate.errors import CorruptionError
from headgate.model.manifest import BUNDLE, SnapshotPart
from headgate.model.places import Place
from headgate.storage.backends import is_missing, open_storage
from headgate.storage.base import NotFound, Storage
from headgate.storage.paths import read_path
from headgate.storage.reading import read_again

READ_BYTES_MAX = 8 << 20
"""So much of a file is asked for at a time."""


def storage_at(place: Place) -> Storage:
    """Return the storage of somebody else's files; a directory that is missing is not made (SV5).

    Raises:
        NotFound, UsageError
    """
    if is_missing(place.url):
        raise NotFound(place.url)
    return open_storage(place.url)


def read_part(storage: Storage, pipeline: str, part: SnapshotPart) -> memoryview:
    """Return the bytes of ``part`` after checking their number, their checksum, and the rows of each state (R30).

    A read that does not fit is repeated: one bad read is not damage (R50).

    Raises:
        CorruptionError, NotFound, StorageError
    """
    return read_again(lambda: _read_once(storage, pipeline, part))


def verify_part(storage: Storage, pipeline: str, part: SnapshotPart) -> None:
    """Read ``part`` and check it as ``read_part`` does; what has no rows to be counted is not kept in memory (SF10).

    Raises:
        CorruptionError, NotFound, StorageError
    """
    if part.rows is None:
        read_again(lambda: _check_stream(storage, pipeline, part))
    else:
        read_part(storage, pipeline, part)


def place_of(pipeline: str, part: SnapshotPart) -> str:
    """Return where ``part`` is, for messages."""
    return f"{pipeline}/{part.path}" if part.path else "an inlined snapshot"


def _read_once(storage: Storage, pipeline: str, part: SnapshotPart) -> memoryview:
    where = place_of(pipeline, part)
    chunks = list(_chunks(storage, pipeline, part))
    data = memoryview(chunks[0] if len(chunks) == 1 else b"".join(chunks))
    _check_bytes(part, len(data), xxhash.xxh3_64_intdigest(data), where)
    if part.rows and not part.section.startswith(FILES_PREFIX):  # these are counted by whoever opens them (RB22)
        _check_rows(part, data, where)
    return data


def _check_stream(storage: Storage, pipeline: str, part: SnapshotPart) -> None:
    digest, size_bytes = xxhash.xxh3_64(), 0
    for chunk in _chunks(storage, pipeline, part):
        digest.update(chunk)
        size_bytes += len(chunk)
    _check_bytes(part, size_bytes, digest.intdigest(), place_of(pipeline, part))


def _chunks(storage: Storage, pipeline: str, part: SnapshotPart) -> Iterator[bytes]:
    """Return the bytes of ``part`` piece by piece; fewer than it says if the file is shorter."""
    if not part.path:
        yield part.inline
        return
    path = read_path(f"{pipeline}/{part.path}", "a manifest")
    at, end = part.offset, part.offset + part.size_bytes
    while True:
        chunk = storage.get_range(path, at, min(READ_BYTES_MAX, end - at))
        yield chunk
        at += len(chunk)
        if at >= end or not chunk:
            return


def _check_bytes(part: SnapshotPart, size_bytes: int, checksum: int, where: str) -> None:
    if size_bytes != part.size_bytes:
        raise CorruptionError(where, part.offset + size_bytes, f"{part.size_bytes} bytes", f"{size_bytes} bytes")
    if checksum != part.checksum:
        raise CorruptionError(where, part.offset, f"checksum {part.checksum:016x}", f"{checksum:016x}")


def _check_rows(part: SnapshotPart, data: memoryview, where: str) -> None:
    sections = decode_sections(data, where) if part.section == BUNDLE else {part.section: data}
    for node, recorded in (part.rows or {}).items():
        state = next((sections[f"{prefix}{node}"] for prefix in OF_ROWS if f"{prefix}{node}" in sections), None)
        inner = {} if state is None else decode_sections(state, f"{where}, state of '{node}'")
        problem = difference(recorded, stored_rows(inner, where))
        if problem is not None:
            expected, found = problem
            raise CorruptionError(where, 0, f"{expected} of operator '{node}', as its manifest says", found)
