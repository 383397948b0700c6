"""Batches of events as chunk files: limits of events, encoding, and reading back.

Counterpart: ``writer`` and ``transactions`` write chunks, ``reader`` reads parts. Source:
docs/spec/stream-store.md. Never makes events visible by itself: a chunk without catalogue rows is an orphan.
"""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from typing import Protocol, TypeAlias

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import xxhash

from headgate.codec.arrow import read_batch
from headgate.codec.chunk import PART_BYTES_MAX, EncodedChunk, Part, encode_chunk, verify_part
from headgate.codec.frames import BatchEncoder
from headgate.dataclass import dataclass
from headgate.errors import CorruptionError, StorageError, UsageError
from headgate.storage.base import NotFound, Storage
from headgate.store.catalogue.records import ChunkRecord, StoredPart
from headgate.store.routing import Segments, hash_text, ranges_of, segments_of
from headgate.store.streams import StreamInfo, convert_batch

EVENT_BYTES_MAX = 8 << 20
"""Largest event (S2 of Pravega's defaults): it must fit several times into a reader's memory."""

_Sizes: TypeAlias = npt.NDArray[np.int64]


def check_events(stream: str, batch: pa.RecordBatch) -> None:
    """Check every event of ``batch`` against the limit, and that readers will find the batch sound.

    Raises:
        UsageError: an event is larger, and the message says which; or a column contradicts itself.
    """
    try:
        batch.validate(full=True)
    except pa.ArrowException as error:
        raise UsageError(f"a batch for stream '{stream}' cannot be stored: {error}") from error
    # no event is larger than its batch, so sizes of single ones are seldom computed
    if batch.nbytes <= EVENT_BYTES_MAX:
        return
    sizes = np.zeros(batch.num_rows, dtype=np.int64)
    for column in batch.columns:
        sizes += value_sizes(column)
    largest = int(sizes.argmax())
    if sizes[largest] > EVENT_BYTES_MAX:
        raise UsageError(
            f"event {largest} of a batch for stream '{stream}' has {sizes[largest]} bytes, the limit is "
            f"{EVENT_BYTES_MAX}; store large objects elsewhere and their path in the event"
        )


def value_sizes(column: pa.Array) -> _Sizes:
    """Return the bytes of each value, offsets and validity not counted; of a type that has no size, its mean."""
    column = _stored(column)
    dtype = column.type
    if _has_bytes(dtype):
        return _filled(pc.binary_length(column))
    if pa.types.is_struct(dtype):
        sizes = np.zeros(len(column), dtype=np.int64)
        for child in column.flatten():
            sizes += value_sizes(child)
        return sizes
    if pa.types.is_map(dtype):
        offsets = column.offsets.to_numpy()
        children = _running(value_sizes(column.keys) + value_sizes(column.items))
        return np.asarray(children[offsets[1:]] - children[offsets[:-1]], dtype=np.int64)
    if _is_list(dtype):
        lengths = _filled(pc.list_value_length(column))
        children, ends = _running(value_sizes(column.flatten())), np.cumsum(lengths)
        return np.asarray(children[ends] - children[ends - lengths], dtype=np.int64)
    return np.full(len(column), _width(column), dtype=np.int64)


def _stored(column: pa.Array) -> pa.Array:
    """Return the same values in a type with sizes that Arrow can compute."""
    dtype = column.type
    if isinstance(dtype, pa.BaseExtensionType):
        return _stored(column.storage)
    if pa.types.is_run_end_encoded(dtype):
        return _stored(pc.run_end_decode(column))
    if pa.types.is_string_view(dtype):
        return column.cast(pa.large_string())
    return column.cast(pa.large_binary()) if pa.types.is_binary_view(dtype) else column


def _running(sizes: _Sizes) -> _Sizes:
    return np.concatenate([np.zeros(1, dtype=np.int64), np.cumsum(sizes)])


def _width(column: pa.Array) -> int:
    try:
        return max(1, int(column.type.bit_width) // 8)
    except ValueError:  # a union, or nothing but nulls
        return int(-(-column.nbytes // max(1, len(column))))


def _filled(lengths: pa.Array) -> _Sizes:
    return np.asarray(pc.fill_null(lengths, 0).to_numpy(zero_copy_only=False), dtype=np.int64)


def _has_bytes(dtype: pa.DataType) -> bool:
    return bool(
        pa.types.is_string(dtype)
        or pa.types.is_large_string(dtype)
        or pa.types.is_binary(dtype)
        or pa.types.is_large_binary(dtype)
    )


def _is_list(dtype: pa.DataType) -> bool:
    return bool(
        pa.types.is_list(dtype)
        or pa.types.is_large_list(dtype)
        or pa.types.is_fixed_size_list(dtype)
        or pa.types.is_list_view(dtype)
        or pa.types.is_large_list_view(dtype)
    )


PART_ROWS_MAX = 65_536
"""A reader loads and verifies a part as a whole; this bounds what one read costs."""

PART_BYTES_TARGET = 16 << 20

FLUSH_BYTES = 32 << 20
"""Buffered events are written as a chunk at this size, so that memory is bounded whatever is written."""


@dataclass(frozen=True, slots=True)
class BatchChunk:
    """Batches encoded together.

    Attributes:
        chunk: the file.
        counts: per batch and segment, the number of events (row = batch, column = one of ``segments``).
        segments: the numbers of the segments that took events when they were routed.
        schema_version: in which schema of the stream they were encoded.
    """

    chunk: EncodedChunk
    counts: npt.NDArray[np.int64]
    segments: tuple[int, ...]
    schema_version: int

    def record(self, path: str) -> ChunkRecord:
        """Return the record for the catalogue once the chunk is at ``path``."""
        return ChunkRecord(path, self.chunk.size_bytes, self.chunk.entries, self.schema_version)


UNCOPIED_BYTES_MIN = 1 << 20
"""A copy of fewer bytes costs less than preparing to do without."""


def random_name() -> str:
    """Return a name that nothing has."""
    return secrets.token_hex(16)


TRANSACTIONS = "txn"
"""Directory below a stream's, of what owners of transactions write."""


def owner_directory(stream_id: int, owner: str) -> str:
    """Return where an owner's chunks are, prepared or not."""
    return f"{stream_id}/{TRANSACTIONS}/{xxhash.xxh3_64_hexdigest(owner.encode())}"


def transaction_directory(stream_id: int, owner: str, name: str) -> str:
    """Return where the chunks of a transaction are, hidden or visible."""
    return f"{owner_directory(stream_id, owner)}/shared/{hash_text(name):016x}"


def chunk_path(stream_id: int, kind: str, name: str) -> str:
    """Return the path of the chunk called ``name``; ``kind`` is a directory below the stream's."""
    return f"{stream_id}/{kind}/{name}.chunk"


def encode_batches(stream: StreamInfo, batches: Sequence[pa.RecordBatch], fallback: int) -> BatchChunk:
    """Encode non-empty ``batches`` as one chunk; without a routing key ``fallback`` picks one segment for all.

    Order within a segment is the order of the batches. Those of a former schema get that of ``stream``.
    """
    batches = [convert_batch(batch, stream.schema) for batch in batches]
    version = stream.schema_version
    whole = batches[0] if len(batches) == 1 else pa.concat_batches(batches)
    lengths = [batch.num_rows for batch in batches]
    segments = tuple(segment.segment_id for segment in stream.segments)
    assert segments, "a stream has segments"
    counts = np.zeros((len(batches), len(segments)), dtype=np.int64)
    encoder = BatchEncoder(whole.schema) if whole.nbytes >= UNCOPIED_BYTES_MIN else None
    if stream.routing_key is None or len(segments) == 1:
        at = fallback % len(segments)
        counts[:, at] = lengths
        return BatchChunk(
            encode_chunk(stream.stream_id, _parts(segments[at], whole, encoder)), counts, segments, version
        )
    routes = _routes(stream, whole.column(stream.routing_key))
    assert len(routes) == whole.num_rows, "every event has one segment"
    at = 0
    for row, length in enumerate(lengths):
        counts[row] = np.bincount(routes[at : at + length], minlength=len(segments))
        at += length
    # stable: events of one segment stay in the order in which they were appended;
    # numbers of 16 bits, of which there are enough (SEGMENTS_MAX), are sorted by counting: ten times as fast
    ordered = whole.take(pa.array(np.argsort(routes.astype(np.uint16), kind="stable")))
    parts: list[Part] = []
    at = 0
    for segment, count in zip(segments, counts.sum(axis=0).tolist(), strict=True):
        parts += _parts(segment, ordered.slice(at, count), encoder)
        at += count
    assert at == whole.num_rows, "every event is in one part"
    return BatchChunk(encode_chunk(stream.stream_id, parts), counts, segments, version)


def _routes(stream: StreamInfo, keys: pa.Array) -> Segments:
    """Return to which of its present segments each event goes, counted in the order of their keys."""
    if stream.layout_epoch == 0:
        return segments_of(keys, len(stream.segments))  # of equal ranges
    return ranges_of(keys, [segment.key_low for segment in stream.segments])


class RangeReader(Protocol):
    """What parts are read from: a storage, or one of which some was fetched before."""

    @property
    def url(self) -> str:
        """See ``Storage``."""

    def get_range(self, path: str, offset: int, size_bytes: int) -> bytes | memoryview:
        """See ``Storage``."""


def read_part(storage: RangeReader, part: StoredPart, schema: pa.Schema) -> pa.RecordBatch:
    """Return the events of a part, verified.

    Raises:
        CorruptionError: the file is missing, cut or changed; names file and offset.
        StorageError: it cannot be read now.
    """
    entry, where = part.entry, f"{storage.url}/{part.path}"
    # before anything is read: a damaged row must not decide how much memory is taken
    if not 0 < entry.size_bytes <= PART_BYTES_MAX or entry.offset < 0:
        wanted = f"a part of at most {PART_BYTES_MAX} bytes from a position on"
        raise CorruptionError(where, 0, wanted, f"{entry.size_bytes} from {entry.offset}")
    try:
        payload = storage.get_range(part.path, entry.offset, entry.size_bytes)
    except NotFound:
        raise CorruptionError(where, 0, "a chunk that the catalogue lists", "no such file") from None
    verify_part(where, entry, payload)
    try:
        batch = read_batch(pa.py_buffer(payload), schema)
    except (pa.ArrowException, OSError, ValueError, LookupError) as error:
        raise CorruptionError(where, entry.offset, f"events of {schema.names}", str(error)) from error
    if batch.num_rows != entry.events_count:
        raise CorruptionError(where, entry.offset, f"{entry.events_count} events", f"{batch.num_rows}")
    return batch


def delete_quietly(storage: Storage, paths: Sequence[str]) -> None:
    """Remove orphans; what cannot be removed now stays harmless and is found by the next sweep."""
    for path in paths:
        try:
            storage.delete(path)
        except StorageError:
            # a storage that fails now most likely fails for the rest, too, each after its time-outs
            return


def _parts(segment: int, batch: pa.RecordBatch, encoder: BatchEncoder | None) -> list[Part]:
    """Cut into serialised pieces that stay below the limits; with ``encoder`` they refer to the memory of ``batch``."""
    if batch.num_rows == 0:
        return []
    pieces = max(-(-batch.num_rows // PART_ROWS_MAX), -(-batch.nbytes // PART_BYTES_TARGET))
    # rows differ in size, so a piece may have to be cut once more; one event is never cut
    if pieces > 1 and batch.num_rows > 1:
        rows = -(-batch.num_rows // pieces)
        pieces_of = (batch.slice(at, rows) for at in range(0, batch.num_rows, rows))
        return [part for piece in pieces_of for part in _parts(segment, piece, encoder)]
    payload = [batch.serialize()] if encoder is None else encoder.encode(batch)
    return [Part(segment, batch.num_rows, tuple(payload))]
