"""Streams: create, list, describe, seal, delete; opening a store."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pytest
import sqlalchemy as sa
from tests.store.storing import KEYED, STREAM, database_of, drained, keyed

from headgate.errors import CorruptionError, UsageError
from headgate.store.catalogue import stream_rows as sql_streams
from headgate.store.catalogue import tables as t
from headgate.store.catalogue.sql import memory_catalogue
from headgate.store.location import store_root
from headgate.store.store import Store
from headgate.store.streams import TEXT_SCHEMA, StreamDefinition, check_takes, encode_schema

ENCODED = pa.dictionary(pa.int8(), pa.string())


def test_a_stream_is_as_it_was_created_also_after_reopening(store: Store) -> None:
    with Store.open(store.root) as again:
        info = again.describe(STREAM)
    assert (info.name, info.segments_count, info.routing_key, info.is_sealed) == (STREAM, 3, "key", False)
    assert info.schema == KEYED
    assert (info.ends, info.events_count, info.chunks_count) == ((0, 0, 0), 0, 0)


def test_creating_twice_is_an_error_unless_it_fits_and_is_allowed(store: Store) -> None:
    with pytest.raises(UsageError, match="exists already"):
        store.create_stream(STREAM, KEYED)
    assert store.create_stream(STREAM, KEYED, if_not_exists=True).segments_count == 3
    with pytest.raises(UsageError, match=r"'value' is int64 instead of int32|'value' is int32 instead of int64"):
        store.create_stream(STREAM, KEYED.set(1, pa.field("value", pa.int32())), if_not_exists=True)
    with pytest.raises(UsageError, match="the order must be key, value"):
        store.create_stream(STREAM, pa.schema([*KEYED][::-1]), if_not_exists=True)
    with pytest.raises(UsageError, match="routing key"):
        store.create_stream(STREAM, KEYED, routing_key="value", if_not_exists=True)


def test_a_stream_is_found_without_its_counts(store: Store) -> None:
    with store.writer(STREAM) as writer:
        writer.append(keyed(("a", 1)))
    found = store.find(STREAM)
    assert (found.heads, found.ends, found.chunks_count, found.size_bytes, found.prepared_count) == ((), (), 0, 0, 0)


@pytest.mark.parametrize("name", ["", "/a", "a/", "a//b", "a b", "../a", ".a", "a" * 201])
def test_unusable_names_are_refused(store: Store, name: str) -> None:
    with pytest.raises(UsageError, match="not usable"):
        store.create_stream(name, KEYED)


@pytest.mark.parametrize(
    ("schema", "segments", "key", "message"),
    [
        (pa.schema([]), 1, None, "at least one column"),
        (pa.schema([("a", pa.int64()), ("a", pa.int64())]), 1, None, "twice"),
        (pa.schema([("a", ENCODED)]), 1, None, "column 'a' is dictionary-encoded, .* cast it to string"),
        (pa.schema([("a", pa.list_(ENCODED))]), 1, None, "dictionary-encoded within list<"),
        (pa.schema([("a", pa.struct([("b", pa.map_(pa.string(), ENCODED))]))]), 1, None, "dictionary-encoded within"),
        (KEYED, 0, None, "segments"),
        (KEYED, 5_000, None, "segments"),
        (KEYED, 1, "nope", "not a column"),
        (pa.schema([("a", pa.large_list(pa.int8()))]), 1, "a", "cannot be a routing key"),
    ],
)
def test_definitions_that_cannot_be_are_refused(
    store: Store, schema: pa.Schema, segments: int, key: str | None, message: str
) -> None:
    with pytest.raises(UsageError, match=message):
        store.create_stream("new", schema, segments=segments, routing_key=key)


def test_list_by_scope(store: Store) -> None:
    store.create_stream("app/lines", TEXT_SCHEMA)
    store.create_stream("apple", TEXT_SCHEMA)
    assert [info.name for info in store.list_streams()] == ["app/events", "app/lines", "apple"]
    assert [info.name for info in store.list_streams("app")] == ["app/events", "app/lines"]
    memory = memory_catalogue("memory")
    memory.create_stream(StreamDefinition("app/lines", TEXT_SCHEMA, 1, None), 1, if_not_exists=False)
    assert [len(memory.list_streams(scope)) for scope in ("app", "App")] == [1, 0]
    assert store.list_streams("App") == []


def test_many_streams_are_listed_as_each_is_described(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sql_streams, "_STREAMS_AT_A_TIME", 2)
    for number in range(4):
        store.create_stream(f"other/{number}", KEYED, segments=2, routing_key="key")
        with store.writer(f"other/{number}") as writer:
            writer.append(keyed(*(("k", value) for value in range(number))))
    store.split("other/1", 0)
    store.seal("other/2")
    store.begin_shared("other/3")
    prepared = store.transactions.begin("other/0", owner="o", epoch=1, name="n")
    prepared.write(keyed(("k", 1)))
    prepared.prepare()
    listed = store.list_streams()
    assert listed == [store.describe(info.name) for info in listed]
    by_name = {info.name: info for info in listed}
    assert [by_name[f"other/{number}"].events_count for number in range(4)] == [0, 1, 2, 3]
    assert by_name["other/0"].prepared_count == 1
    assert by_name["other/3"].lease_due_ms is not None
    assert [len(by_name[name].segments) for name in ("other/0", "other/1", STREAM)] == [2, 3, 3]


def test_an_unknown_stream_is_named_with_those_there_are(store: Store) -> None:
    with pytest.raises(UsageError, match=r"'app/event' does not exist .*streams there: app/events"):
        store.describe("app/event")


def test_a_sealed_stream_takes_no_more_events_and_readers_reach_its_end(store: Store) -> None:
    writer = store.writer(STREAM)
    writer.append(keyed(("a", 1)))
    writer.flush()
    readers = [store.reader(STREAM, segment) for segment in range(3)]
    transaction = store.transactions.begin(STREAM, owner="p", epoch=1, name="late")
    store.seal(STREAM)
    store.seal(STREAM)
    found = []
    for reader in readers:
        assert not reader.has_ended()
        while (batch := reader.read()) is not None:
            found += batch.to_pylist()
        assert reader.has_ended()
    assert found == [{"key": "a", "value": 1}]
    future = writer.append(keyed(("b", 2)))
    with pytest.raises(UsageError, match="sealed"):
        writer.flush()
    with pytest.raises(UsageError, match="sealed"):
        future.result(0)
    with pytest.raises(UsageError, match="sealed"):
        transaction.prepare()
    with pytest.raises(UsageError, match="sealed"):
        store.writer(STREAM)


def test_a_prepared_transaction_keeps_its_stream_from_being_sealed(store: Store) -> None:
    transaction = store.transactions.begin(STREAM, owner="p", epoch=1, name="t")
    transaction.write(keyed(("a", 1)))
    transaction.prepare()
    with pytest.raises(UsageError, match="prepared transaction"):
        store.seal(STREAM)  # S12: its commit must not fail
    store.commit_transactions([(STREAM, "t")], owner="p", epoch=1)
    store.seal(STREAM)
    assert drained(store) == [("a", 1)]


def test_delete_removes_events_and_files_and_wants_a_sealed_stream(store: Store) -> None:
    store.create_stream("other", KEYED)
    for name in (STREAM, "other"):
        with store.writer(name) as writer:
            writer.append(keyed(("a", 1)))
    reader = store.reader(STREAM, 0)
    with pytest.raises(UsageError, match="not sealed"):
        store.delete(STREAM)
    store.seal(STREAM)
    store.delete(STREAM)
    assert [info.name for info in store.list_streams()] == ["other"]
    assert store.fsck() == []
    with pytest.raises(UsageError, match="deleted"):
        reader.read()
    store.create_stream(STREAM, KEYED)
    assert drained(store) == []
    assert drained(store, "other") == [("a", 1)]


def test_a_writer_does_not_write_into_a_namesake(store: Store) -> None:
    writer = store.writer(STREAM)
    store.delete(STREAM, force=True)
    store.create_stream(STREAM, KEYED)
    writer.append(keyed(("a", 1)))
    with pytest.raises(UsageError, match="was deleted"):
        writer.flush()
    assert store.fsck() == []


def test_a_newer_catalogue_is_refused(store: Store) -> None:
    with database_of(store).write() as connection:
        connection.execute(t.meta.update().values(value="99"))
    with pytest.raises(UsageError, match=r"version 99.*upgrade Headgate"):
        Store.open(store.root)


def test_a_damaged_catalogue_is_named(tmp_path: Path) -> None:
    (tmp_path / "catalogue.sqlite").write_bytes(b"not a database at all" * 100)
    with pytest.raises(CorruptionError, match=r"catalogue\.sqlite"):
        Store.open(tmp_path)


@pytest.mark.parametrize("data", [b"\xff\xff\xff\xff\x10\0\0\0garbage", encode_schema(KEYED).replace(b"key", b"kez")])
def test_a_schema_that_is_damaged_is_named(store: Store, data: bytes) -> None:
    with database_of(store).write() as connection:
        connection.execute(sa.update(t.streams).values(schema=data))
    with pytest.raises(CorruptionError, match="Arrow schema"):
        store.describe(STREAM)


def test_a_stream_takes_events_of_its_own_routing_key_until_it_is_sealed(store: Store) -> None:
    check_takes(store.find(STREAM), "key")
    check_takes(store.find(STREAM), None)
    with pytest.raises(UsageError, match="has the routing key 'key', not 'value'"):
        check_takes(store.find(STREAM), "value")
    store.seal(STREAM)
    with pytest.raises(UsageError, match="is sealed"):
        check_takes(store.find(STREAM), "key")


def test_the_root_is_absolute_and_comes_from_argument_environment_or_default(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("HEADGATE_STORE", raising=False)
    assert store_root() == str(tmp_path / ".headgate/store")
    monkeypatch.setenv("HEADGATE_STORE", "elsewhere")
    assert store_root() == str(tmp_path / "elsewhere")
    assert store_root("here") == str(tmp_path / "here")
    with pytest.raises(UsageError, match="local directory"):
        store_root("s3://bucket/x")


def test_a_root_that_cannot_be_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UsageError, match="HEADGATE_STORE"):
        Store.open(tmp_path / "file" / "store")
