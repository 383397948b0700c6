"""One snapshot in the checkpoint storage: written with its checksum, and read again before it counts as damaged.

Small ones travel in the manifest (C13). Counterparts: ``uploads`` writes, ``restoring`` and ``snapshot_files`` read.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

import xxhash

from headgate.codec.snapshot import STATE_PREFIX, decode_sections
from headgate.codec.state_rows import difference, stored_rows
from headgate.errors import CorruptionError
from headgate.model.ids import CheckpointId, Generation, SubtaskId
from headgate.model.manifest import StateHandle
from headgate.storage.base import Bytes, Storage
from headgate.storage.reading import read_again


def write_snapshot(
    storage: Storage,
    pipeline: str,
    subtask: SubtaskId,
    checkpoint: CheckpointId,
    generation: Generation,
    parts: Sequence[Bytes],
    inline_bytes_max: int,
    rows: dict[str, dict[str, int]] | None = None,
) -> StateHandle:
    """Make the snapshot of one subtask durable and return its handle (C13: small ones travel in the manifest).

    ``rows``: how many rows each state in it has, by operator and state.

    Raises:
        StorageError
    """
    digest = xxhash.xxh3_64()
    size = 0
    for part in parts:
        digest.update(part)
        size += len(part)
    if size <= inline_bytes_max:
        return StateHandle(size, digest.intdigest(), "", b"".join(bytes(part) for part in parts), rows)
    name = re.sub(r"[^A-Za-z0-9_.-]", "_", str(subtask.vertex))
    path = f"chk-{checkpoint:010d}/{name}-{subtask.index}.g{generation}"  # unique per generation (C33)
    storage.put(f"{pipeline}/{path}", parts)
    return StateHandle(size, digest.intdigest(), path, rows=rows)


def read_snapshot(storage: Storage, pipeline: str, handle: StateHandle) -> bytes:
    """Return the payload of ``handle`` after checking its size, its checksum, and the rows of each state (R30).

    A read that does not fit is repeated: one bad read is not damage (R50).

    Raises:
        CorruptionError, NotFound, StorageError
    """
    return read_again(lambda: _read_once(storage, pipeline, handle))


def _read_once(storage: Storage, pipeline: str, handle: StateHandle) -> bytes:
    where = f"{pipeline}/{handle.path}" if handle.path else "an inlined snapshot"
    data = storage.get(where) if handle.path else handle.inline
    if len(data) != handle.size_bytes:
        raise CorruptionError(where, len(data), f"{handle.size_bytes} bytes", f"{len(data)} bytes")
    found = xxhash.xxh3_64_intdigest(data)
    if found != handle.checksum:
        raise CorruptionError(where, 0, f"checksum {handle.checksum:016x}", f"{found:016x}")
    if handle.rows:
        _check_rows(data, handle.rows, where)
    return data


def _check_rows(data: bytes, rows: Mapping[str, Mapping[str, int]], where: str) -> None:
    sections = decode_sections(data, where)
    for node, recorded in rows.items():
        state = sections.get(f"{STATE_PREFIX}{node}")
        inner = {} if state is None else decode_sections(state, f"{where}, state of '{node}'")
        problem = difference(recorded, stored_rows(inner, where))
        if problem is not None:
            expected, found = problem
            raise CorruptionError(where, 0, f"{expected} of operator '{node}', as its manifest says", found)
