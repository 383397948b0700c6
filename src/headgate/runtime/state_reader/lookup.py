"""Finds a checkpoint or savepoint by its path, and the pieces of each state in it, without reading large parts.

A piece is what one part of one subtask's snapshot holds of one state. Of parts beyond ``WHOLE_BYTES`` only the header
is read, which has a checksum of its own. Takes no lock, makes nothing, and never takes another checkpoint for
the one that was meant (docs/spec/reading-state.md).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace

import msgspec

from headgate.codec.snapshot import (
    BROADCAST_PREFIX,
    FILES_PREFIX,
    FINISHED_PREFIX,
    IN_FLIGHT_PREFIX,
    LISTS_PREFIX,
    OF_ROWS,
    POSITIONS_PREFIX,
    ROUNDS_PREFIX,
    STATE_PREFIX,
    UNION_PREFIX,
    decode_positions,
    decode_sections,
    header_end,
    is_container,
    section_sizes,
)
from headgate.codec.snapshot_rows import stored_rows
from headgate.dataclass import dataclass
from headgate.errors import CorruptionError, StorageError, UsageError
from headgate.model.graph import MAIN, MAIN_INPUT
from headgate.model.ids import CheckpointId, SubtaskId, VertexId, key_groups_of_subtask
from headgate.model.manifest import BUNDLE, Committable, KeyGroups, Manifest, Place, SnapshotPart, SubtaskEntry
from headgate.protocol.checkpoints.commit import settled
from headgate.protocol.checkpoints.recovery import candidates
from headgate.runtime.checkpoints.savepoints import NamedLog, named_log, refuse_unless_newest_is_known, savepoint_at
from headgate.runtime.checkpoints.snapshot_files import part_location, read_part, storage_at
from headgate.state.snapshot import is_description
from headgate.storage.base import NotFound, Storage, read_path, read_with_retries
from headgate.storage.urls import absolute_location, local_directory

_PLACES = (
    "the path of a savepoint, DIRECTORY/PIPELINE for the newest checkpoint of a pipeline, or DIRECTORY/PIPELINE/chk-ID"
)


@dataclass(frozen=True, slots=True)
class StoredCheckpoint:
    """A completed checkpoint, or the one that a savepoint is of.

    Attributes:
        what: it is, for messages.
        pipeline: name of the pipeline that wrote it.
        manifest: says what is in it; its ``place`` says where its files are.
        log: where it was found; None for a savepoint. Such files are removed when newer checkpoints are completed.
        life: of a savepoint, as it says.
        is_same_cut: of a savepoint, as it says; a checkpoint is the same cut as itself.
    """

    what: str
    pipeline: str
    manifest: Manifest
    log: NamedLog | None = None
    life: str = ""
    is_same_cut: bool = True

    @property
    def place(self) -> Place:
        """Where its files are."""
        assert self.manifest.place is not None, "find_checkpoint() notes the place"
        return self.manifest.place

    def storage(self) -> Storage:
        """Open the storage of its files.

        Raises:
            CorruptionError: the directory is gone.
            UsageError
        """
        try:
            return storage_at(self.place)
        except NotFound as error:
            raise CorruptionError(error.path, 0, f"the files of {self.what}", "no directory") from error

    def read(self, storage: Storage, part: SnapshotPart) -> memoryview:
        """Return the bytes of ``part``, verified.

        Raises:
            CorruptionError: it is damaged, or its file is missing.
            StorageError: it was removed, because newer checkpoints were completed meanwhile, or cannot be read.
        """
        try:
            return read_part(storage, self.place.prefix, part)
        except NotFound as error:
            raise self._missing(part) from error

    def read_start(self, storage: Storage, part: SnapshotPart, size_bytes: int) -> bytes:
        """Return the first bytes of ``part``; nothing is verified. Raises as ``read`` does."""
        if not part.path:
            return part.inline[:size_bytes]
        wanted = min(size_bytes, part.size_bytes)
        path = read_path(f"{self.place.prefix}/{part.path}", "a manifest")
        try:
            return storage.get_range(path, part.offset, wanted)
        except NotFound as error:
            raise self._missing(part) from error

    def standing(self) -> tuple[str, frozenset[Committable]]:
        """Return the pipeline identity that it was written under, "" if unknown; and of what it promised that which
        is committed, because a newer checkpoint of its log promises it no more (WS10).

        Raises:
            UsageError, CorruptionError, StorageError
        """
        if self.log is None:
            return self.life, frozenset()
        log = self.log.open()
        observed = log.observe()
        life, newest = log.known_identity(observed), next(iter(candidates(observed)), self.manifest)
        return "" if life is None else life.id, settled(self.manifest, newest)

    def _missing(self, part: SnapshotPart) -> CorruptionError | StorageError:
        if self.log is not None and not self._is_retained(self.log):
            return StorageError(
                "read",
                self.what,
                "its files were removed meanwhile, because newer checkpoints were completed; read the newest one, or "
                "take a savepoint, which stays",
            )
        where = f"{self.place.url.rstrip('/')}/{self.place.prefix}/{part.path}"
        return CorruptionError(where, 0, f"a file of {self.what}", "no file")

    def _is_retained(self, log: NamedLog) -> bool:
        return any(m.checkpoint == self.manifest.checkpoint for m in candidates(log.open().observe()))


def find_checkpoint(path: str, checkpoint: int | None = None) -> StoredCheckpoint:
    """Return what is at ``path``: a savepoint, or a checkpoint of a pipeline, the newest unless one is named.

    Args:
        path: a savepoint, ``DIRECTORY/PIPELINE``, or ``DIRECTORY/PIPELINE/chk-ID``; a directory or URL.
        checkpoint: its id, where ``path`` names none.

    Raises:
        UsageError: there is no such thing.
        CorruptionError: the newest one is unknown, because the log is damaged; or it is damaged itself.
        StorageError
    """
    if not path:
        raise UsageError(f"the path is empty; give {_PLACES}")
    url = absolute_location(path)
    savepoint = savepoint_at(url)
    if savepoint is not None:
        if checkpoint not in (None, savepoint.manifest.checkpoint):
            raise UsageError(f"{url} is a savepoint of checkpoint {savepoint.manifest.checkpoint}, not {checkpoint}")
        manifest = replace(savepoint.manifest, place=Place(url, savepoint.files))
        what = f"the savepoint {url} (pipeline '{savepoint.pipeline}', checkpoint {manifest.checkpoint})"
        return StoredCheckpoint(what, savepoint.pipeline, manifest, None, savepoint.life, savepoint.is_same_cut)
    log = named_log(url)
    if log is None:
        raise UsageError(_nothing_at(url))
    if checkpoint is not None:
        if log.checkpoint not in (None, checkpoint):
            raise UsageError(f"{url} names checkpoint {log.checkpoint}, but checkpoint {checkpoint} is asked for")
        log = replace(log, checkpoint=CheckpointId(checkpoint))
    return _in_log(url, log)


def _in_log(url: str, log: NamedLog) -> StoredCheckpoint:
    observed = log.open().observe()
    manifests = candidates(observed)
    if log.checkpoint is None:
        # one that is named by its id may be read whatever is damaged beside it
        refuse_unless_newest_is_known(observed)
    found = next((m for m in manifests if log.checkpoint in (None, m.checkpoint)), None)
    if found is None and not observed.entries:
        raise UsageError(_nothing_at(url))
    if found is None:
        wanted = "completed checkpoint" if log.checkpoint is None else f"checkpoint {log.checkpoint}"
        there = ", ".join(str(m.checkpoint) for m in reversed(manifests)) or "none"
        raise UsageError(f"pipeline '{log.pipeline}' has no {wanted} in {log.root}; there is {there}")
    what = f"checkpoint {found.checkpoint} of pipeline '{log.pipeline}'"
    manifest = found if found.place is not None else replace(found, place=Place(log.root, log.pipeline))
    return StoredCheckpoint(what, log.pipeline, manifest, log)


def _pipelines_below(url: str) -> list[str]:
    """Return the pipelines with checkpoints in the directory at ``url``, which was meant for one of them."""
    local = local_directory(url)
    return [] if local is None else sorted(log.parent.name for log in local.glob("*/log"))


def _nothing_at(url: str) -> str:
    """Return what is said where nothing is, with the pipelines that are near it."""
    others = {"below": _pipelines_below(url), "beside": _pipelines_below(url.rstrip("/").rpartition("/")[0] or "/")}
    found = next((f"; {where} it are the checkpoints of {', '.join(o)}" for where, o in others.items() if o), "")
    return f"there is neither a savepoint nor a checkpoint at {url}; give {_PLACES}{found}"


WHOLE_BYTES = 64 << 10
"""A smaller part is read whole: then the rows of all of its sections can be counted."""

LOG_SECTIONS = {"header", "schema", "groups", "chunks", "batches"}
"""A container with these is the log of a loop, and is one state."""

POSITIONS, ROUNDS, COMMITTABLES, LOG, DATA = "positions", "rounds", "committables", "log", "data"
"""Names of undeclared states."""


@dataclass(frozen=True, slots=True)
class Piece:
    """What one part has of one state.

    Attributes:
        subtask: that has it in its snapshot.
        part: holds it.
        prefix: of its section, such as ``state/``; of prepared output ``committables``.
        path: sections to descend into, the outermost first; () if the part has nothing else.
        size_bytes: of the section.
        rows: None: not counted.
        key_groups: that its keys can be in, if it has keys.
        sender: of records in flight: the subtask that had sent them.
        committable: of prepared output.
        files: of the database that it is in, ``part`` among them, which says what they are.
    """

    subtask: SubtaskId
    part: SnapshotPart
    prefix: str
    path: tuple[str, ...]
    size_bytes: int
    rows: int | None
    key_groups: KeyGroups
    sender: int = -1
    committable: Committable | None = None
    files: tuple[SnapshotPart, ...] = ()


FoundPieces = Iterator[tuple[str, str, Piece]]
"""Operator, state, and where some of it is."""


def pieces_of(
    checkpoint: StoredCheckpoint, storage: Storage, operator: str | None = None, *, is_counted: bool = True
) -> FoundPieces:
    """Yield every piece, of one ``operator`` or of all, in the order of the manifest.

    Args:
        checkpoint: what is looked at.
        storage: of its files.
        operator: that the pieces are of; None: all.
        is_counted: how many rows and bytes each has. If not, of parts that hold the same states one is looked at.

    Raises:
        CorruptionError: a header, or a small part, is damaged.
        StorageError
    """
    parts = [
        (entry, part)
        for entry in checkpoint.manifest.entries
        for part in entry.parts
        if operator is None or _may_have(checkpoint, entry, part, operator)
    ]
    of_part: dict[int, list[tuple[str, str, Piece]]] = {}
    alike: dict[object, list[tuple[str, str, Piece]]] = {}
    # smallest first: of parts that are alike the cheapest one is read
    for number, (entry, part) in sorted(enumerate(parts), key=lambda one: one[1][1].size_bytes):
        kind = None if is_counted else _alike(part)
        if kind is None or kind not in alike:
            of_part[number] = list(_of_part(checkpoint, storage, entry, part, operator))
            alike[kind] = of_part[number]
        else:
            of_part[number] = [_like(found, checkpoint, entry, part) for found in alike[kind]]
    for number in range(len(parts)):
        yield from of_part[number]
    for committable in checkpoint.manifest.committables:
        if operator in (None, committable.sink):
            yield committable.sink, COMMITTABLES, _of_output(checkpoint, committable)


def _like(
    found: tuple[str, str, Piece], checkpoint: StoredCheckpoint, entry: SubtaskEntry, part: SnapshotPart
) -> tuple[str, str, Piece]:
    """Return the piece of another part that holds the same states; its size is unknown."""
    node, name, piece = found
    rows = (part.rows or {}).get(node, {}).get(name)
    owned = _owned(checkpoint, entry, part)
    return node, name, replace(piece, subtask=entry.subtask, part=part, size_bytes=0, rows=rows, key_groups=owned)


def _may_have(checkpoint: StoredCheckpoint, entry: SubtaskEntry, part: SnapshotPart, operator: str) -> bool:
    """Whether a part can hold anything of ``operator``; bundles hold sections of the first operator of a chain."""
    if part.section != BUNDLE:
        return _named(part.section)[1] == operator
    if part.rows is not None:
        return operator in part.rows or operator == entry.subtask.vertex
    return operator == entry.subtask.vertex


def operators_of(checkpoint: StoredCheckpoint) -> list[str]:
    """Return the operators of which a checkpoint holds anything, as its manifest tells without reading more."""
    manifest = checkpoint.manifest
    found = {node for node, text in manifest.state_texts.items() if text}
    found |= {_named(part.section)[1] for entry in manifest.entries for part in entry.parts if part.section != BUNDLE}
    return sorted(found | {committable.sink for committable in manifest.committables})


def _alike(part: SnapshotPart) -> object:
    """Return what is equal for parts that hold the same states: those that are cut by key group; else None."""
    if part.key_groups is None or not part.section.startswith(STATE_PREFIX) or part.rows is None:
        return None
    return part.section, tuple((node, tuple(sorted(states))) for node, states in sorted(part.rows.items()))


def _of_part(
    checkpoint: StoredCheckpoint, storage: Storage, entry: SubtaskEntry, part: SnapshotPart, operator: str | None
) -> FoundPieces:
    where = part_location(checkpoint.place.prefix, part)
    owned = _owned(checkpoint, entry, part)
    if part.section.startswith(FILES_PREFIX):
        yield from _of_files(entry, part, owned)
        return
    if part.section != BUNDLE:
        data = _head_of(checkpoint, storage, part, where)
        prefix, node = _named(part.section)
        yield from _of_section(entry.subtask, part, prefix, node, (), data, owned, where)
        return
    for section, inner in decode_sections(checkpoint.read(storage, part), where).items():
        prefix, node = _named(section)
        if prefix != FINISHED_PREFIX and operator in (None, node):
            yield from _of_section(entry.subtask, part, prefix, node, (section,), inner, owned, where)


def _of_files(entry: SubtaskEntry, part: SnapshotPart, owned: KeyGroups) -> FoundPieces:
    """Yield the states of a database, known from the part that describes its files; nothing is read."""
    if not is_description(part):
        return
    files = tuple(other for other in entry.parts if other.section == part.section)
    for node, states in (part.rows or {}).items():
        size_bytes = sum(file.size_bytes for file in files) // max(1, len(states))
        for name, count in states.items():
            yield node, name, Piece(entry.subtask, part, STATE_PREFIX, (name,), size_bytes, count, owned, files=files)


def _of_section(
    subtask: SubtaskId,
    part: SnapshotPart,
    prefix: str,
    node: str,
    path: tuple[str, ...],
    data: bytes | memoryview,
    owned: KeyGroups,
    where: str,
) -> FoundPieces:
    """Yield the pieces of one node's section, of which ``data`` is all, or the beginning."""
    size_bytes = part.size_bytes if not path else len(data)
    if prefix not in OF_ROWS or not is_container(data):
        name = {POSITIONS_PREFIX: POSITIONS, ROUNDS_PREFIX: ROUNDS}.get(prefix, part.name or DATA)
        rows_count = _entries(data) if prefix == POSITIONS_PREFIX else 1 if prefix == ROUNDS_PREFIX else None
        yield node, name, Piece(subtask, part, prefix, path, size_bytes, rows_count, owned)
        return
    sizes = section_sizes(data, where)
    rows = _rows_of(part, node, data, size_bytes, where)
    if sizes.keys() == LOG_SECTIONS:
        yield node, LOG, Piece(subtask, part, prefix, path, size_bytes, rows.get(LOG), owned)
        return
    for name, size in sizes.items():
        state, sender = _channel_name(name) if prefix == IN_FLIGHT_PREFIX else (name, -1)
        yield node, state, Piece(subtask, part, prefix, (*path, name), size, rows.get(name), owned, sender)


def _rows_of(part: SnapshotPart, node: str, data: bytes | memoryview, size_bytes: int, where: str) -> Mapping[str, int]:
    """Return the rows of each section as the manifest recorded them, or as they are counted in what is at hand."""
    recorded = dict((part.rows or {}).get(node, {}))
    if len(data) < size_bytes:
        return recorded
    return {**stored_rows(decode_sections(data, where), where), **recorded}


def _entries(data: bytes | memoryview) -> int | None:
    """Return how many entries a map has, None if it is none; then decoding reports it."""
    try:
        return len(decode_positions(data))
    except msgspec.DecodeError:
        return None


def _head_of(checkpoint: StoredCheckpoint, storage: Storage, part: SnapshotPart, where: str) -> bytes | memoryview:
    """Return all of a small part, verified, and of another one its header, to be verified."""
    if part.size_bytes <= WHOLE_BYTES:
        return checkpoint.read(storage, part)

    def read() -> bytes:
        # the header says what is inside: the rest is read, and verified, when its rows are wanted
        head = checkpoint.read_start(storage, part, WHOLE_BYTES)
        if is_container(head):
            if len(head) < header_end(head) <= part.size_bytes:
                head = checkpoint.read_start(storage, part, header_end(head))
            section_sizes(head, where)
        elif part.rows is not None:
            raise CorruptionError(where, part.offset, "sections of state", "something else")
        return head

    return read_with_retries(read)


def _owned(checkpoint: StoredCheckpoint, entry: SubtaskEntry, part: SnapshotPart) -> KeyGroups:
    """Return the key groups of a part: its own, else those that its subtask owned."""
    if part.key_groups is not None:
        return part.key_groups
    manifest = checkpoint.manifest
    owned = key_groups_of_subtask(entry.subtask.index, manifest.max_parallelism, manifest.parallelism)
    return KeyGroups(owned.start, len(owned))


def _of_output(checkpoint: StoredCheckpoint, committable: Committable) -> Piece:
    stored = committable.stored
    part = SnapshotPart(len(committable.payload), 0, inline=committable.payload) if stored is None else stored
    subtask = SubtaskId(VertexId(committable.sink), committable.subtask_index)
    owned = KeyGroups(0, checkpoint.manifest.max_parallelism)
    size_bytes = part.size_bytes + sum(piece.size_bytes for piece in committable.pieces)
    return Piece(subtask, part, COMMITTABLES, (), size_bytes, 1, owned, committable=committable)


def _named(section: str) -> tuple[str, str]:
    """Return the prefix of a section, and the operator that it names."""
    prefixes = (
        STATE_PREFIX,
        FILES_PREFIX,
        LISTS_PREFIX,
        UNION_PREFIX,
        BROADCAST_PREFIX,
        IN_FLIGHT_PREFIX,
        POSITIONS_PREFIX,
        ROUNDS_PREFIX,
    )
    prefix = next((one for one in (*prefixes, FINISHED_PREFIX) if section.startswith(one)), "")
    return prefix, section.removeprefix(prefix)


def _channel_name(section: str) -> tuple[str, int]:
    """Return what records in flight from an output to an input are called, and the subtask that sent them."""
    # from the right: the name of the node, which comes first, may hold slashes
    sender, tag, input_, copy, index = section.rsplit("/", 4)
    is_plain = (tag, input_, copy) == (MAIN, MAIN_INPUT, "0")
    return f"{IN_FLIGHT_PREFIX}{sender}" + ("" if is_plain else f"/{tag}/{input_}/{copy}"), int(index)
