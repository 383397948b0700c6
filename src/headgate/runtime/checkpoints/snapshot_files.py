"""The snapshot files of one pipeline: read with checksums, verified, removed when unneeded, set aside.

``snapshot_writer`` writes them, ``restore`` reads them, ``log`` says which checkpoints are completed;
``protocol.checkpoints.retention`` decides what may be removed. At most one part is in memory at a time.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence

import xxhash

from headgate import fault_points
from headgate.codec.snapshot import FILES_PREFIX, OF_ROWS, decode_sections, stored_file
from headgate.codec.snapshot_rows import difference, stored_rows
from headgate.errors import CorruptionError
from headgate.model.ids import CheckpointId, Generation
from headgate.model.manifest import BUNDLE, Manifest, Place, SnapshotPart, SubtaskEntry
from headgate.protocol.checkpoints.recovery import Damage, Gap, ObservedLog
from headgate.protocol.checkpoints.restore_selection import KeptAside
from headgate.protocol.checkpoints.retention import FileRetention, StoredFile
from headgate.storage.base import AlreadyExists, NotFound, Storage, is_probe, read_path, read_with_retries
from headgate.storage.urls import is_missing, open_storage

READ_BYTES_MAX = 8 << 20
"""So much of a file is asked for at a time."""


def storage_at(place: Place) -> Storage:
    """Return the storage of another place; a directory that is missing is not made (SV5).

    Raises:
        NotFound, UsageError
    """
    if is_missing(place.url):
        raise NotFound(place.url)
    return open_storage(place.url)


def read_part(storage: Storage, pipeline: str, part: SnapshotPart) -> memoryview:
    """Return the bytes of ``part`` after checking their number, their checksum, and the rows of each state.

    A read that does not fit is repeated: one bad read is not damage.

    Raises:
        CorruptionError, NotFound, StorageError
    """
    return read_with_retries(lambda: _read_once(storage, pipeline, part))


def verify_part(storage: Storage, pipeline: str, part: SnapshotPart) -> None:
    """Read ``part`` and check it as ``read_part`` does; what has no rows to be counted is not kept in memory.

    Raises:
        CorruptionError, NotFound, StorageError
    """
    if part.rows is None:
        read_with_retries(lambda: _check_stream(storage, pipeline, part))
    else:
        read_part(storage, pipeline, part)


def part_location(pipeline: str, part: SnapshotPart) -> str:
    """Return where ``part`` is, for messages."""
    return f"{pipeline}/{part.path}" if part.path else "an inlined snapshot"


def _read_once(storage: Storage, pipeline: str, part: SnapshotPart) -> memoryview:
    where = part_location(pipeline, part)
    data = memoryview(b"".join(_chunks(storage, pipeline, part)))  # of one piece no copy is made
    _check_bytes(part, len(data), xxhash.xxh3_64_intdigest(data), where)
    if part.rows and not part.section.startswith(FILES_PREFIX):  # these are counted by their reader
        _check_rows(part, data, where)
    return data


def _check_stream(storage: Storage, pipeline: str, part: SnapshotPart) -> None:
    digest, size_bytes = xxhash.xxh3_64(), 0
    for chunk in _chunks(storage, pipeline, part):
        digest.update(chunk)
        size_bytes += len(chunk)
    _check_bytes(part, size_bytes, digest.intdigest(), part_location(pipeline, part))


def _chunks(storage: Storage, pipeline: str, part: SnapshotPart) -> Iterator[bytes]:
    """Return the bytes of ``part`` piece by piece; fewer than it says if the file is shorter."""
    if not part.path:
        yield part.inline
        return
    path = read_path(f"{pipeline}/{part.path}", "a manifest")
    at, end = part.offset, part.offset + part.size_bytes
    while True:
        # at least one read, so that a missing file is noticed even for a part without bytes
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


_WHY = "why"
_SKIPPED = "skipped"
"""The same reason again, if a start restored an older checkpoint: no file is kept for it (R57)."""
_ASIDE = re.compile(rf"[^/]+/aside/([0-9]{{10,}})-([0-9]{{10,}})/(?:{_WHY}|log-[0-9]{{10,}})")
_NOTE = re.compile(rf"[^/]+/aside/([0-9]{{10,}})-([0-9]{{10,}})/(?:{_WHY}|{_SKIPPED}|log-[0-9]{{10,}})")


class SnapshotFiles:
    """All files of snapshots below one pipeline's directory."""

    def __init__(self, storage: Storage, pipeline: str) -> None:
        self._storage = storage
        self._pipeline = pipeline
        self._retention = FileRetention(Generation(0), CheckpointId(0), {})

    def read(self, part: SnapshotPart, place: Place | None = None) -> memoryview:
        """Return the bytes of ``part`` after checking them; ``place``: where it is, if not here.

        Raises:
            CorruptionError, NotFound, StorageError
        """
        if place is None:
            return read_part(self._storage, self._pipeline, part)
        return read_part(storage_at(place), place.prefix, part)

    def sections(self, entry: SubtaskEntry, place: Place | None = None) -> dict[str, list[memoryview]]:
        """Return everything that one subtask left in a checkpoint: the parts of each section, in their order.

        ``place``: where that is, if not here.

        Raises:
            CorruptionError, NotFound, StorageError
        """
        found: dict[str, list[memoryview]] = {}
        for part in entry.parts:
            data = self.read(part, place)
            inner = decode_sections(data, part.path) if part.section == BUNDLE else {part.section: data}
            for name, section in inner.items():
                found.setdefault(name, []).append(section)
        return found

    def verify(self, manifest: Manifest) -> list[Damage]:
        """Read every part of ``manifest``, one at a time, and return what is wrong with their files (I4)."""
        storage, pipeline, at = self._storage, self._pipeline, ""
        if manifest.place is not None:
            pipeline, at = manifest.place.prefix, f"{manifest.place.url.rstrip('/')}/"
            try:
                storage = storage_at(manifest.place)
            except NotFound as error:
                return [Damage(error.path, "the directory is missing")]
        found: dict[str, Damage] = {}
        for part in manifest.parts:
            try:
                verify_part(storage, pipeline, part)
            except CorruptionError as error:
                # one sentence for each file, however many of its parts are wrong
                found.setdefault(error.path, Damage(f"{at}{error.path}", str(error)))
            except NotFound as error:
                found.setdefault(error.path, Damage(f"{at}{error.path}", "the file is missing"))
        return list(found.values())

    # -- what is needed ---------------------------------------------------------------------------------------------

    def claimed(self, generation: Generation, first: CheckpointId, manifests: Iterable[Manifest]) -> None:
        """``generation`` begins with ``first``, and finds the completed checkpoints ``manifests``."""
        self._retention = FileRetention(generation, first, {m.checkpoint: m.files for m in manifests})

    def restored(self, retained: Collection[CheckpointId]) -> None:
        """Of what was found only ``retained`` may be restored again."""
        self._retention.narrowed(retained)

    def began(self, checkpoint: CheckpointId) -> None:
        """Uploads of ``checkpoint`` may run from now on."""
        self._retention.began(checkpoint)

    def completed(self, manifest: Manifest) -> None:
        """``manifest`` is durable."""
        self._retention.completed(manifest.checkpoint, manifest.files)

    # -- what is not ------------------------------------------------------------------------------------------------

    def delete(self, parts: Sequence[SnapshotPart]) -> None:
        """Remove the files of ``parts`` of a checkpoint that was given up, but not those that others need (SF5).

        Raises:
            StorageError
        """
        self._remove(self._retention.unneeded(part.path for part in parts if part.path))

    def drop(self, checkpoint: CheckpointId) -> None:
        """Checkpoints up to ``checkpoint`` are not restored any more: remove files without a reference (C31).

        Raises:
            StorageError
        """
        self._retention.dropped(checkpoint)
        self._remove_garbage()

    def sweep(self) -> None:
        """Remove what dead generations have left, and what they had begun to write.

        Raises:
            StorageError
        """
        self._storage.sweep_unfinished(self._pipeline)
        for path in filter(is_probe, self._storage.list(self._pipeline)):
            self._storage.delete(path)
        self._remove_garbage()

    def _remove_garbage(self) -> None:
        paths = self._storage.list(self._pipeline)
        # looked up each time: a user may discard what is aside while the pipeline runs
        self._retention.set_aside(max((below for _, below in _ranges_aside(paths)), default=CheckpointId(0)))  # R51
        self._remove(self._retention.garbage(self._files_of(paths)))

    def _remove(self, paths: Iterable[str]) -> None:
        """Remove unneeded files; a crash in between leaves the rest to the next sweep (SF8)."""
        for path in paths:
            fault_points.reach("in-removal")
            self._storage.delete(f"{self._pipeline}/{path}")

    def _files_of(self, paths: Iterable[str]) -> list[StoredFile]:
        prefix = f"{self._pipeline}/"
        found = (stored_file(path.removeprefix(prefix)) for path in paths)
        return [file for file in found if file is not None]

    # -- what is kept aside -----------------------------------------------------------------------------------------

    def set_aside(self, log: ObservedLog, gaps: Sequence[Gap], restored: CheckpointId | None = None) -> None:
        """Keep what a start cannot use, until the user discards it (R51): snapshots and log entries.

        Repeating it changes nothing. ``restored``: what the start uses; it gives up whatever is newer (R57).

        Raises:
            StorageError
        """
        paths = {entry.sequence: entry.path for entry in log.entries}
        for gap in gaps:
            name = f"{self._pipeline}/aside/{gap.above:010d}-{gap.below:010d}"
            for sequence in gap.sequences:
                with contextlib.suppress(AlreadyExists, NotFound, KeyError):  # a lost entry has no path
                    data = self._storage.get(paths[sequence])
                    self._storage.put_if_absent(f"{name}/log-{sequence:010d}", [data])
            # the reason last: what has one was copied whole
            why = "".join(f"{damage.path}: {damage.problem}\n" for damage in gap.damages)
            for note in (_SKIPPED, _WHY) if gap.above == restored else (_WHY,):
                with contextlib.suppress(AlreadyExists):
                    self._storage.put_if_absent(f"{name}/{note}", [why.encode()])

    def aside(self) -> list[KeptAside]:
        """Return what was set aside, oldest first.

        Raises:
            StorageError
        """
        return self._reasons(_WHY)

    def rolled_back_by(self) -> list[KeptAside]:
        """Return what starts gave up by restoring an older checkpoint, oldest first, with or without its files (R57).

        Raises:
            StorageError
        """
        return self._reasons(_SKIPPED)

    def _reasons(self, note: str) -> list[KeptAside]:
        found: list[KeptAside] = []
        for path in self._storage.list(f"{self._pipeline}/aside"):
            if _NOTE.fullmatch(path) and path.endswith(f"/{note}"):
                with contextlib.suppress(NotFound):  # a user removes what is aside, while a run goes on
                    why = self._storage.get(path).decode("utf-8", "replace").strip()
                    found.append(KeptAside(*_range_of(path), why))
        return found

    def aside_paths(self) -> list[str]:
        """Return the paths of what was set aside, reasons last.

        Raises:
            StorageError
        """
        return sorted(filter(_NOTE.fullmatch, self._storage.list(f"{self._pipeline}/aside")))

    def discard_aside(self, manifests: Callable[[], Iterable[Manifest]]) -> int:
        """Remove what was set aside and what only stayed for its sake, but not what any manifest needs (SF7).

        ``manifests`` reads all that there are: after the list of files, because a pipeline that runs meanwhile may
        complete a checkpoint, and may go back once more. What it writes later is not on the list. Snapshots first,
        reasons last. That a start gave a checkpoint up stays known while the log has that checkpoint (R57).

        Returns:
            How many files of checkpoints that were.

        Raises:
            StorageError
        """
        paths = self._storage.list(self._pipeline)
        found = list(manifests())
        needed = frozenset[str]().union(*(manifest.files for manifest in found))
        until = max((below for _, below in _ranges_aside(paths)), default=CheckpointId(0))
        files = [
            f"{self._pipeline}/{file.path}"
            for file in self._files_of(paths)
            if file.path not in needed and file.checkpoint < until
        ]
        notes = [path for path in paths if _NOTE.fullmatch(path) and not _is_about(path, found)]
        # the notes keep the files of their time, so after a crash in between the rest is still found here
        for path in [*files, *sorted(notes)]:
            self._storage.delete(path)
        return len(files)


def _is_about(path: str, manifests: Iterable[Manifest]) -> bool:
    """Whether the note at ``path`` says that a start went back to before one of ``manifests``."""
    above, below = _range_of(path)
    return path.endswith(f"/{_SKIPPED}") and any(above < manifest.checkpoint < below for manifest in manifests)


def _range_of(path: str) -> tuple[CheckpointId, CheckpointId]:
    match = _NOTE.fullmatch(path)
    assert match is not None, f"{path} was listed as a note about files set aside"
    return CheckpointId(int(match.group(1))), CheckpointId(int(match.group(2)))


def _ranges_aside(paths: Sequence[str]) -> set[tuple[CheckpointId, CheckpointId]]:
    return {_range_of(path) for path in paths if _ASIDE.fullmatch(path)}
