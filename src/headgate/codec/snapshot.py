"""Container of one snapshot: named sections of bytes, with magic, version and checksums.

Used by stateful operators for their own state and by the runtime for all state of one subtask (a section per
node). Counterpart: none, the same functions write and read. Never does I/O.

Layout (little endian): magic 8 bytes · version u32 · header size u32 · xxh3-64 of the header u64 · header ·
payload. The header is, for each section: name size u16 · name (UTF-8) · payload size u64 · xxh3-64 u64.
"""

from __future__ import annotations

import json
import re
import struct
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, TypeAlias

import msgspec
import pyarrow as pa
import xxhash

from headgate.codec.decodable import decodable
from headgate.dataclass import dataclass
from headgate.errors import CorruptionError, UnknownFormat
from headgate.model.ids import CheckpointId, Generation, SubtaskId
from headgate.protocol.checkpoints.retention import StoredFile

Buffer: TypeAlias = bytes | bytearray | memoryview | pa.Buffer

MAGIC = b"HGSNAP\r\n"
VERSION = 1

# Sections of a snapshot are named by node, not by vertex: chaining may differ when the pipeline is edited.
FINISHED_PREFIX = "finished/"
POSITIONS_PREFIX = "positions/"
ROUNDS_PREFIX = "rounds/"
STATE_PREFIX = "state/"
LISTS_PREFIX = "lists/"
UNION_PREFIX = "union/"
BROADCAST_PREFIX = "broadcast/"
IN_FLIGHT_PREFIX = "in-flight/"
FILES_PREFIX = "files/"
"""What the section of a node holds: the prefix stands before the node's name."""

CHUNKS_DESCRIPTION = "chunks"
"""Name of the part that describes the files of one state if they are chunks of state in memory."""

DATABASE_DESCRIPTION = "database"
"""The same if they are the files of a RocksDB database."""

OF_ROWS = (STATE_PREFIX, LISTS_PREFIX, UNION_PREFIX, BROADCAST_PREFIX, IN_FLIGHT_PREFIX)
"""Prefixes of sections with counted rows.

Lists, unions and broadcast states belong to no key: at a restore, lists are dealt out, unions go to every subtask, and
broadcast states are the same in all. Records in flight were on their way to the node when a barrier overtook them.
Files of a database are not among them: only the backend that wrote them can count their rows (SF15).
"""

_PREFIX = struct.Struct("<8sIIQ")
_NAME = struct.Struct("<H")
_SECTION = struct.Struct("<QQ")


def encode_sections(sections: Mapping[str, Sequence[Buffer]]) -> list[Buffer]:
    """Return the container of ``sections`` as buffers to be written one after another; payloads are not copied."""
    header = bytearray()
    payload: list[Buffer] = []
    for name, buffers in sections.items():
        digest = xxhash.xxh3_64()
        size_bytes = 0
        for buffer in buffers:
            view = memoryview(buffer)
            digest.update(view)
            size_bytes += view.nbytes
            payload.append(buffer)
        encoded = name.encode()
        header += _NAME.pack(len(encoded)) + encoded + _SECTION.pack(size_bytes, digest.intdigest())
    prefix = _PREFIX.pack(MAGIC, VERSION, len(header), xxhash.xxh3_64_intdigest(bytes(header)))
    return [prefix + bytes(header), *payload]


def decode_sections(data: bytes | bytearray | memoryview, path: str) -> dict[str, memoryview]:
    """Return the sections of a container as views into ``data``; everything is verified first.

    Args:
        data: a whole container.
        path: where it came from, for the message.

    Raises:
        CorruptionError: any byte is wrong or missing.
    """
    view = memoryview(data).cast("B")
    header, offset = _verified_header(view, path)
    sections: dict[str, memoryview] = {}
    for name, size_bytes, digest in _header_entries(header):
        payload = view[offset : offset + size_bytes]
        if len(payload) != size_bytes:
            raise CorruptionError(path, offset, f"{size_bytes} bytes of section '{name}'", f"{len(payload)} bytes")
        if xxhash.xxh3_64_intdigest(payload) != digest:
            raise CorruptionError(path, offset, f"section '{name}' with its checksum", "other bytes")
        sections[name] = payload
        offset += size_bytes
    if offset != len(view):
        raise CorruptionError(path, offset, "the end of the file", f"{len(view) - offset} more bytes")
    return sections


def encode_positions(positions: Mapping[str, bytes]) -> bytes:
    """Return the section ``positions/…`` of a source. A name of a split that is not UTF-8 is written as bytes."""
    try:
        return msgspec.msgpack.encode(dict(positions))
    except UnicodeEncodeError:
        named = {split.encode(errors="surrogatepass"): position for split, position in positions.items()}
        return msgspec.msgpack.encode(named)


def decode_positions(data: Buffer) -> dict[str, bytes]:
    """Return ``split → position``, as ``encode_positions`` was given it.

    Raises:
        msgspec.DecodeError: it is something else.
    """
    try:
        return msgspec.msgpack.decode(data, type=decodable(dict[str, bytes]))
    except msgspec.ValidationError:
        named = msgspec.msgpack.decode(data, type=decodable(dict[bytes, bytes]))
    return {split.decode(errors="surrogatepass"): position for split, position in named.items()}


def is_container(data: bytes | memoryview) -> bool:
    """Whether bytes begin as a container does."""
    return bytes(data[: len(MAGIC)]) == MAGIC


def header_end(data: bytes | memoryview) -> int:
    """Return where the header of a container ends, from its first bytes; these are not verified yet."""
    return _PREFIX.size + int(_PREFIX.unpack_from(data)[2]) if len(data) >= _PREFIX.size else _PREFIX.size


def section_sizes(data: bytes | memoryview, path: str) -> dict[str, int]:
    """Return the size in bytes of each section of a container, of which ``data`` has the header at least.

    Raises:
        CorruptionError: any byte of the header is wrong or missing.
    """
    header, _ = _verified_header(memoryview(data).cast("B"), path)
    return {name: size_bytes for name, size_bytes, _ in _header_entries(header)}


def section_views(parts: Sequence[Buffer]) -> dict[str, memoryview]:
    """Return views of what ``encode_sections`` returned, except of sections in several buffers; nothing is copied."""
    prefix, *payload = (memoryview(part).cast("B") for part in parts)
    buffers = iter([view for view in payload if view.nbytes])
    sections: dict[str, memoryview] = {}
    for name, size_bytes, _ in _header_entries(prefix[_PREFIX.size :]):
        found = [memoryview(b"")]
        while sum(view.nbytes for view in found) < size_bytes:
            found.append(next(buffers))
        if len(found) <= 2:
            sections[name] = found[-1]
    return sections


def _verified_header(view: memoryview, path: str) -> tuple[memoryview, int]:
    """Return the header of a container, and where it ends."""
    if len(view) < _PREFIX.size:
        raise CorruptionError(path, 0, f"at least {_PREFIX.size} bytes", f"{len(view)} bytes")
    magic, version, header_bytes, header_digest = _PREFIX.unpack_from(view)
    if magic != MAGIC:
        raise UnknownFormat(path, 0, "a snapshot", repr(bytes(magic)))
    if version != VERSION:
        raise UnknownFormat(path, 8, f"snapshot version {VERSION}", f"version {version}")
    start = _PREFIX.size
    header = view[start : start + header_bytes]
    if len(header) != header_bytes or xxhash.xxh3_64_intdigest(header) != header_digest:
        raise CorruptionError(path, start, f"a header of {header_bytes} bytes with its checksum", "other bytes")
    return header, start + header_bytes


def _header_entries(header: memoryview) -> Iterator[tuple[str, int, int]]:
    at = 0
    while at < len(header):
        (name_bytes,) = _NAME.unpack_from(header, at)
        at += _NAME.size
        name = bytes(header[at : at + name_bytes]).decode()
        at += name_bytes
        size_bytes, digest = _SECTION.unpack_from(header, at)
        at += _SECTION.size
        yield name, size_bytes, digest


_DIRECTORY = "chk-"
_OTHERS = re.compile(r"[^A-Za-z0-9_.-]")


def snapshot_path(checkpoint: CheckpointId, subtask: SubtaskId, generation: Generation, number: int = 0) -> str:
    """Return where an upload writes its file ``number``, unique per generation."""
    return _stem(checkpoint, subtask, generation) + (f".{number}" if number else "")


def output_path(checkpoint: CheckpointId, subtask: SubtaskId, generation: Generation, number: int) -> str:
    """Return where a subtask writes the ``number``-th large payload that it has prepared."""
    return f"{_stem(checkpoint, subtask, generation)}.o{number}"


def file_path(checkpoint: CheckpointId, subtask: SubtaskId, generation: Generation, number: int) -> str:
    """Return where an upload writes the ``number``-th file that later checkpoints may share (SF15)."""
    return f"{_stem(checkpoint, subtask, generation)}.f{number}"


def stored_file(path: str) -> StoredFile | None:
    """Return who wrote ``path`` (relative to the pipeline's directory), or None if it is no file of a snapshot."""
    directory, _, name = path.partition("/")
    checkpoint = directory.removeprefix(_DIRECTORY)
    if not directory.startswith(_DIRECTORY) or not _is_number(checkpoint) or not name:
        return None
    generation = name.rpartition(".g")[2].partition(".")[0]
    written_by = Generation(int(generation)) if _is_number(generation) else Generation(0)
    return StoredFile(path, CheckpointId(int(checkpoint)), written_by)


def _stem(checkpoint: CheckpointId, subtask: SubtaskId, generation: Generation) -> str:
    return f"{_DIRECTORY}{checkpoint:010d}/{_OTHERS.sub('_', str(subtask.vertex))}-{subtask.index}.g{generation}"


def _is_number(text: str) -> bool:
    return text.isascii() and text.isdigit()


_FACTS_VERSION = 1


@dataclass(frozen=True, slots=True)
class MetaSection:
    """A section that belongs to no key.

    Attributes:
        name: of the section.
        what: its facts are about, in words.
    """

    name: str
    what: str

    def encode(self, **facts: int | str) -> bytes:
        """Return the facts as a section."""
        return json.dumps({"version": _FACTS_VERSION, **facts}).encode()

    def found_in(self, sections: Mapping[str, memoryview], path: str) -> dict[str, Any] | None:
        """Return the facts that one part of a former snapshot holds; None: it has no such section.

        Raises:
            CorruptionError: it is of a version that is not known here.
        """
        if self.name not in sections:
            return None
        found: dict[str, Any] = json.loads(bytes(sections[self.name]))
        if found["version"] != _FACTS_VERSION:
            raise CorruptionError(path, 0, f"{self.what} of version {_FACTS_VERSION}", f"version {found['version']}")
        return found
