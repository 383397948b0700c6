"""Arrow batches that somebody else wrote: sound, or refused before anything uses them."""

from __future__ import annotations

import struct
from collections.abc import Callable

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headgate.codec import arrow
from headgate.codec.arrow import read_batch, read_stream, stream_rows

BATCH = pa.record_batch(
    {"n": pa.array(range(40)), "text": pa.array([f"word {n}" for n in range(40)], pa.large_string())}
)
REFUSED = (pa.ArrowException, OSError)


def stream(*batches: pa.RecordBatch, compression: str | None = None) -> memoryview:
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, batches[0].schema, options=pa.ipc.IpcWriteOptions(compression=compression)) as writer:
        for batch in batches:
            writer.write_batch(batch)
    return memoryview(sink.getvalue())


def message(batch: pa.RecordBatch, compression: str | None = None) -> pa.Buffer:
    sink = pa.BufferOutputStream()
    options = pa.ipc.IpcWriteOptions(compression=compression)
    with pa.ipc.new_stream(sink, batch.schema, options=options) as writer:
        before = sink.tell()
        writer.write_batch(batch)
    whole = sink.getvalue()
    reader = pa.MessageReader.open_stream(whole)
    schema = reader.read_next_message()
    assert schema.type == "schema"
    found = reader.read_next_message()
    assert before >= 0
    return found.serialize()


def wild(batch: pa.RecordBatch) -> bytes:
    """Return a batch whose last text begins where no memory is; its bytes are sound otherwise."""
    data = bytearray(batch.serialize())
    offsets = batch.column("text").buffers()[1].to_pybytes()
    at = data.index(offsets[: 8 * (batch.num_rows + 1)])
    struct.pack_into("<q", data, at + 8 * (batch.num_rows - 1), 1 << 45)
    return bytes(data)


def test_batches_that_are_sound_are_what_was_written() -> None:
    assert read_batch(BATCH.serialize(), BATCH.schema).equals(BATCH)
    schema, (first, second) = read_stream(stream(BATCH, BATCH.slice(3, 5)))
    assert schema.equals(BATCH.schema)
    assert first.equals(BATCH)
    assert second.equals(BATCH.slice(3, 5))
    assert stream_rows(stream(BATCH, BATCH.slice(3, 5))) == 45


def test_a_batch_whose_offsets_lead_anywhere_is_refused() -> None:
    with pytest.raises(pa.ArrowInvalid, match=r"[Oo]ffset"):
        read_batch(pa.py_buffer(wild(BATCH)), BATCH.schema)
    data = bytes(stream(BATCH)).replace(BATCH.serialize().to_pybytes()[-600:], wild(BATCH)[-600:])
    assert data != bytes(stream(BATCH))
    with pytest.raises(pa.ArrowInvalid, match=r"[Oo]ffset"):
        read_stream(memoryview(data))


@pytest.mark.parametrize("compression", ["lz4", "zstd"])
@pytest.mark.parametrize(
    "read",
    [
        lambda data: read_batch(message(BATCH, data), BATCH.schema),
        lambda data: read_stream(stream(BATCH, compression=data)),
        lambda data: stream_rows(stream(BATCH, compression=data)),
    ],
    ids=["batch", "stream", "rows"],
)
def test_a_compressed_batch_is_refused_where_none_is_written(read: Callable[[str], object], compression: str) -> None:
    with pytest.raises(pa.ArrowInvalid, match="a compressed batch where none is written"):
        read(compression)


def test_a_compressed_dictionary_is_refused_too() -> None:
    words = pa.record_batch({"word": pa.array(["a" * 1_000, "b" * 1_000] * 20).dictionary_encode()})
    assert read_stream(stream(words))[1][0].equals(words)
    with pytest.raises(pa.ArrowInvalid, match="a compressed batch"):
        read_stream(stream(words, compression="zstd"))


def test_a_compressed_stream_takes_no_more_memory_than_is_allowed(monkeypatch: pytest.MonkeyPatch) -> None:
    large = pa.record_batch({"n": pa.array([0] * (1 << 16))})
    data = stream(large, large, compression="zstd")
    assert len(data) < 10_000
    assert read_stream(data, is_compressed=True)[1] == [large, large]
    monkeypatch.setattr(arrow, "COMPRESSED_BYTES_MAX", large.nbytes * 2 - 1)
    allocated = pa.total_allocated_bytes()
    with pytest.raises(pa.ArrowInvalid, match="compressed batches of more than"):
        read_stream(data, is_compressed=True)
    assert pa.total_allocated_bytes() - allocated < large.nbytes


@settings(max_examples=300)
@given(st.data())
def test_whatever_bytes_come_they_are_a_sound_batch_or_refused(data: st.DataObject) -> None:
    changed = bytearray(stream(BATCH))
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, len(changed) - 1))
        changed[at] = data.draw(st.integers(0, 255))
    changed = changed[: data.draw(st.integers(0, len(changed)))]
    try:
        _, batches = read_stream(memoryview(changed))
    except REFUSED:
        return
    for batch in batches:
        batch.to_pylist()
