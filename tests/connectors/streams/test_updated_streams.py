"""Pipelines around streams that get other columns: each goes on in those that it was built with."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from headgate.connectors.base import SinkContext, SourceContext
from headgate.connectors.streams import StreamSink, StreamSource, StreamSourceReader
from headgate.errors import UsageError
from headgate.model.failure import FailureKind
from headgate.model.ids import CheckpointId, Generation
from headgate.model.manifest import Committable
from headgate.protocol.checkpoints.commit import CommitPermit
from headgate.runtime.worker.worker import failure_of
from headgate.store.store import Store
from headgate.store.streams import OtherSchemaError

NAME = "app/events"
FIRST = pa.schema([pa.field("key", pa.string()), pa.field("n", pa.int32())])
"""As a program writes it that knows nothing of canonical types."""

LAST = pa.schema([pa.field("key", pa.string()), pa.field("n", pa.int64()), pa.field("note", pa.string())])


@pytest.fixture
def store(tmp_path: Path) -> Store:
    store = Store.shared(tmp_path / "store")
    store.create_stream(NAME, FIRST, segments=1, routing_key="key")
    return store


def write(store: Store, of: pa.Schema, *rows: tuple[Any, ...]) -> None:
    with store.writer(NAME) as writer:
        batch = pa.RecordBatch.from_pylist([dict(zip(of.names, row, strict=True)) for row in rows], schema=of)
        writer.append(batch)


def reader_of(store: Store, built: pa.Schema | None, positions: dict[str, bytes] | None = None) -> StreamSourceReader:
    source = StreamSource(NAME, store.root)
    return source.open(SourceContext("p", "source", 0, 1, positions, schema=built))


def polled(reader: StreamSourceReader, schema: pa.Schema) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []
    while (batch := reader.poll()) is not None:
        assert batch.batch.schema.equals(schema)
        found += batch.batch.to_pylist()
    return found


def test_a_pipeline_goes_on_in_the_columns_that_it_was_built_with(store: Store) -> None:
    built = StreamSource(NAME, store.root).schema()
    opened = reader_of(store, built)
    write(store, FIRST, ("a", 1))
    store.update_stream(NAME, schema=LAST)
    write(store, LAST, ("b", 2, "new"))
    expected = [{"key": "a", "n": 1}, {"key": "b", "n": 2}]
    assert polled(opened, built) == expected
    assert polled(reader_of(store, built), built) == expected  # of a worker that was started behind the update


def test_a_pipeline_that_is_built_anew_has_the_new_columns_at_its_old_positions(store: Store) -> None:
    built = StreamSource(NAME, store.root).schema()
    write(store, FIRST, ("a", 1), ("b", 2))
    before = reader_of(store, built)
    first = before._readers[f"{NAME}/0"].read(1)
    assert first is not None
    store.update_stream(NAME, schema=LAST)
    write(store, LAST, ("c", 1 << 40, "new"))
    again = StreamSource(NAME, store.root).schema()
    assert again == pa.schema([("key", pa.large_string()), ("n", pa.int64()), ("note", pa.large_string())])
    assert polled(reader_of(store, again, before.positions()), again) == [
        {"key": "b", "n": 2, "note": None},
        {"key": "c", "n": 1 << 40, "note": "new"},
    ]


def test_a_pipeline_that_meets_what_does_not_fit_says_what_to_do_at_once(store: Store) -> None:
    built = StreamSource(NAME, store.root).schema()
    reader = reader_of(store, built)
    store.update_stream(NAME, schema=LAST)
    write(store, LAST, ("b", 1 << 40, None))
    with pytest.raises(OtherSchemaError, match=r"start the pipeline again$") as caught:
        reader.poll()
    assert failure_of(caught.value).kind is FailureKind.DETERMINISTIC  # no restart would help


def test_a_source_of_which_nobody_knows_what_it_was_built_with_reads_the_newest(store: Store) -> None:
    store.update_stream(NAME, schema=LAST)
    write(store, LAST, ("b", 2, "new"))
    newest = StreamSource(NAME, store.root).schema()
    for built in (None, pa.schema([("made", pa.int64())])):  # by a source of the user's around this one
        assert polled(reader_of(store, built), newest) == [{"key": "b", "n": 2, "note": "new"}]


def sunk(store: Store, of: pa.Schema, row: tuple[Any, ...], checkpoint: int) -> None:
    """What a pipeline writes to the stream with one checkpoint."""
    sink = StreamSink(NAME, store.root)
    sink.check(of)
    writer = sink.open(SinkContext("p", "sink", 0, 1, Generation(1), of))
    writer.write(pa.RecordBatch.from_pylist([dict(zip(of.names, row, strict=True))], schema=of))
    payload = writer.seal(CheckpointId(checkpoint)).prepare()
    assert payload is not None
    promise = Committable("sink", CheckpointId(checkpoint), 0, Generation(1), payload)
    permit = CommitPermit(CheckpointId(checkpoint), Generation(1))
    sink.open_committer("p", "sink", Generation(1)).commit(permit, [promise])


def canonical(*fields: tuple[str, pa.DataType]) -> pa.Schema:
    return pa.schema(list(fields))


def test_a_pipeline_of_before_goes_on_writing(store: Store) -> None:
    old = canonical(("n", pa.int32()), ("key", pa.large_string()))  # by name
    new = canonical(("key", pa.large_string()), ("n", pa.int64()), ("note", pa.large_string()))
    sunk(store, old, (1, "a"), 1)
    store.update_stream(NAME, schema=LAST)
    sunk(store, old, (2, "b"), 2)
    sunk(store, new, ("c", 1 << 40, "new"), 3)
    batch = store.reader(NAME, 0).read()
    assert batch is not None
    assert batch.to_pylist() == [
        {"key": "a", "n": 1, "note": None},
        {"key": "b", "n": 2, "note": None},
        {"key": "c", "n": 1 << 40, "note": "new"},
    ]
    with pytest.raises(UsageError, match=r"records do not fit stream .*: column 'note'"):
        StreamSink(NAME, store.root).check(canonical(("key", pa.large_string()), ("n", pa.int64())))
