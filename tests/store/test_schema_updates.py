"""Streams whose columns change while others write and read them: every value stays what it was (S76, S77)."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from tests.storage.faulty import Fault, FaultKind, FaultyStorage
from tests.store.storing import database_of, in_a_child, lose_an_answer

from headgate.errors import CorruptionError, StorageError, UsageError
from headgate.storage.local import LocalStorage
from headgate.storage.memory import MemoryStorage
from headgate.store.catalogue import tables as t
from headgate.store.catalogue.sql import memory_catalogue
from headgate.store.store import Store
from headgate.store.streams import OtherSchemaError, encode_schema

STREAM = "app/events"


def schema(**types: pa.DataType) -> pa.Schema:
    return pa.schema([pa.field(name, dtype) for name, dtype in types.items()])


FIRST = schema(key=pa.int32(), value=pa.float32())
WIDER = schema(key=pa.int64(), value=pa.float64())
MORE = schema(key=pa.int32(), value=pa.float32(), note=pa.large_string())
LAST = schema(key=pa.int64(), value=pa.float64(), note=pa.large_string())


def events(of: pa.Schema, *rows: tuple[Any, ...]) -> pa.RecordBatch:
    return pa.RecordBatch.from_pylist([dict(zip(of.names, row, strict=True)) for row in rows], schema=of)


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    with Store.open(tmp_path / "store") as opened:
        opened.create_stream(STREAM, FIRST, segments=2, routing_key="key")
        yield opened


def read(store: Store, version: int | None = None) -> list[tuple[Any, ...]]:
    """All events in one schema, by key; each reader's batches have its schema."""
    wanted = store.find(STREAM, schema_version=version).schema
    rows: list[tuple[Any, ...]] = []
    for segment in range(len(store.describe(STREAM).ends)):
        reader = store.reader(STREAM, segment, schema_version=version)
        while (batch := reader.read()) is not None:
            assert batch.schema.equals(wanted)
            rows += zip(*batch.to_pydict().values(), strict=True)
    return sorted(rows)


def write(store: Store, batch: pa.RecordBatch) -> None:
    with store.writer(STREAM) as writer:
        writer.append(batch)


def test_events_of_before_are_read_in_the_newest_schema(store: Store) -> None:  # S76, S77
    write(store, events(FIRST, (1, 0.5), (2, None)))
    info = store.update_stream(STREAM, schema=LAST)
    assert (info.schema_version, info.schema) == (1, LAST)
    write(store, events(LAST, (1 << 40, 1e300, "new")))
    assert read(store) == [(1, 0.5, None), (2, None, None), (1 << 40, 1e300, "new")]
    assert store.schemas(STREAM) == (FIRST, LAST)
    assert store.fsck() == []


def test_columns_are_added_or_widened_one_by_one(store: Store) -> None:  # S76
    write(store, events(FIRST, (1, 0.5)))
    store.update_stream(STREAM, columns=schema(note=pa.large_string()))
    write(store, events(MORE, (2, 1.5, "b")))
    assert store.update_stream(STREAM, columns=WIDER).schema == LAST
    write(store, events(LAST, (3, 2.5, "c")))
    assert read(store) == [(1, 0.5, None), (2, 1.5, "b"), (3, 2.5, "c")]
    assert [one.names for one in store.schemas(STREAM)] == [FIRST.names, MORE.names, LAST.names]


def test_what_is_within_a_column_is_added_and_widened(store: Store) -> None:  # S76, S77
    def of(*fields: tuple[str, pa.DataType]) -> pa.Schema:
        return schema(items=pa.large_list(pa.struct(list(fields))))

    old, new = of(("n", pa.int8())), of(("n", pa.int64()), ("text", pa.large_string()))
    store.create_stream("nested", old, segments=1)
    with store.writer("nested") as writer:
        writer.append(events(old, ([{"n": 1}, None],), (None,)))
    store.update_stream("nested", schema=new)
    batch = store.reader("nested", 0).read()
    assert batch is not None
    assert batch.to_pylist() == [{"items": [{"n": 1, "text": None}, None]}, {"items": None}]


@pytest.mark.parametrize(
    ("wanted", "sentence"),
    [
        (schema(key=pa.int32()), r"'app/events' cannot be updated: column 'value' \(float\) would be removed"),
        (schema(key=pa.int16(), value=pa.float32()), "'key' would change from int32 to int16: not every int32 can be"),
        (
            schema(key=pa.float64(), value=pa.float32()),
            "'key' would change from int32 to double, but it is the routing",
        ),
        (
            pa.schema([*FIRST, pa.field("new", pa.int8(), nullable=False)]),
            r"column 'new' \(int8\) would be added and must not be null",
        ),
        (pa.schema([*FIRST, pa.field("key", pa.int64())]), "distinct names, but key occurs twice"),
    ],
)
def test_anything_else_is_refused_by_one_sentence_and_changes_nothing(
    store: Store, wanted: pa.Schema, sentence: str
) -> None:  # S76
    with pytest.raises(UsageError, match=sentence):
        store.update_stream(STREAM, schema=wanted)
    assert store.schemas(STREAM) == (FIRST,)


def test_equal_keys_are_never_told_apart_by_an_update(store: Store) -> None:  # S2, S76
    with pytest.raises(UsageError, match="equal keys would go to other segments"):
        store.update_stream(STREAM, schema=schema(key=pa.float64(), value=pa.float32()))


def test_a_column_that_must_not_be_null_is_not_added(store: Store) -> None:  # S76
    with pytest.raises(UsageError, match="would be added and must not be null"):
        store.update_stream(STREAM, columns=pa.schema([pa.field("new", pa.int8(), nullable=False)]))


def test_the_same_update_again_makes_no_schema(store: Store) -> None:  # S76
    for _ in range(2):
        assert store.update_stream(STREAM, columns=WIDER).schema_version == 1
    assert store.schemas(STREAM) == (FIRST, WIDER)


def test_how_to_update_must_be_said_once(store: Store) -> None:
    for given in ({}, {"schema": LAST, "columns": LAST}):
        with pytest.raises(UsageError, match=r"with schema= or columns=, one of both"):
            store.update_stream(STREAM, **given)  # type: ignore[arg-type]


def test_a_sealed_stream_is_not_updated(store: Store) -> None:  # S76
    store.seal(STREAM)
    with pytest.raises(UsageError, match="is sealed: it takes no more events"):
        store.update_stream(STREAM, schema=LAST)


def test_an_update_whose_answer_was_lost_is_made_once(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:  # S76
    with monkeypatch.context() as patch:
        lose_an_answer(store, patch)
        with pytest.raises(StorageError):
            store.update_stream(STREAM, schema=LAST)
    assert store.update_stream(STREAM, schema=LAST).schema_version == 1
    assert store.schemas(STREAM) == (FIRST, LAST)


def test_two_processes_that_update_at_once_both_get_what_they_add_or_are_told(store: Store) -> None:  # S76
    def other() -> None:
        with Store.open(store.root) as mine:
            mine.update_stream(STREAM, columns=schema(theirs=pa.int8()))

    in_a_child(other)
    with pytest.raises(UsageError, match=r"column 'theirs' \(int8\) would be removed"):
        store.update_stream(STREAM, schema=MORE)  # which says what all columns are, and knows nothing of the other
    assert store.update_stream(STREAM, columns=schema(note=pa.large_string())).schema.names == [
        *FIRST.names,
        "theirs",
        "note",
    ]


def test_a_writer_of_before_goes_on_and_so_does_its_successor(store: Store) -> None:
    with store.writer(STREAM) as before:
        before.append(events(FIRST, (1, 0.5)))
        store.update_stream(STREAM, schema=LAST)
        before.append(events(FIRST, (2, 0.5)))
    write(store, events(FIRST, (3, 0.5)))  # opened behind the update, by a program of before
    assert read(store) == [(1, 0.5, None), (2, 0.5, None), (3, 0.5, None)]
    assert store.fsck() == []


def test_a_writer_takes_a_newer_schema_up_with_its_first_event_of_it(store: Store) -> None:
    with store.writer(STREAM, linger=None) as writer:
        writer.append(events(FIRST, (1, 0.5)))
        store.update_stream(STREAM, schema=LAST)
        writer.append(events(LAST, (1 << 40, 1e300, "new")))  # one flush with that of before
        writer.append(events(FIRST, (2, 0.5)))
    assert read(store) == [(1, 0.5, None), (2, 0.5, None), (1 << 40, 1e300, "new")]
    assert store.describe(STREAM).chunks_count == 1


def test_events_that_the_stream_never_had_columns_for_are_refused(store: Store) -> None:
    store.update_stream(STREAM, schema=MORE)
    store.update_stream(STREAM, schema=LAST)
    with (
        store.writer(STREAM) as writer,
        pytest.raises(UsageError, match=r"do not fit stream 'app/events': column 'note'"),
    ):
        writer.append(events(WIDER, (1, 0.5)))  # no note, and wider numbers: no former schema
    with pytest.raises(UsageError, match="do not fit stream"):
        store.transactions.begin(STREAM, owner="p", epoch=1, name="t").write(events(WIDER, (1, 0.5)))


def test_a_flush_that_failed_before_an_update_is_written_as_it_was(tmp_path: Path) -> None:
    disk = FaultyStorage(LocalStorage(tmp_path / "store" / "chunks"))
    with Store.open(tmp_path / "store", storage=disk) as store:
        store.create_stream(STREAM, FIRST, segments=1)
        writer = store.writer(STREAM, writer_id="w", linger=None)
        writer.append(events(FIRST, (1, 0.5)))
        disk.inject(Fault(FaultKind.NO_SPACE, "put"))
        with pytest.raises(StorageError):
            writer.flush()
        store.update_stream(STREAM, schema=LAST)
        disk.heal()
        writer.append(events(LAST, (2, 0.5, "b")))
        writer.close()
        again = store.writer(STREAM, writer_id="w", linger=None)
        assert again.append(events(LAST, (1, 0.5, "x")), sequence=1).result().is_duplicate  # whatever its columns are
        again.append(events(FIRST, (3, 0.5)), sequence=3)
        again.close()
        assert read(store) == [(1, 0.5, None), (2, 0.5, "b"), (3, 0.5, None)]


def test_an_append_whose_answer_was_lost_before_an_update_is_not_repeated(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    writer = store.writer(STREAM, linger=None)
    writer.append(events(FIRST, (1, 0.5)))
    with monkeypatch.context() as patch:
        lose_an_answer(store, patch)
        with pytest.raises(StorageError):
            writer.flush()
    store.update_stream(STREAM, schema=LAST)
    writer.close()
    assert read(store) == [(1, 0.5, None)]


def test_what_is_routed_anew_behind_an_update_gets_the_schema_that_it_is_written_in(store: Store) -> None:
    writer = store.writer(STREAM, linger=None)
    writer.append(events(FIRST, *((key, 0.5) for key in range(20))))
    store.update_stream(STREAM, schema=LAST)
    store.split(STREAM, 0)
    writer.close()
    assert read(store) == [(key, 0.5, None) for key in range(20)]
    assert store.fsck() == []


def test_equal_keys_stay_in_one_segment_when_they_become_wider(store: Store) -> None:  # S2, S76
    keys = range(-20, 20)
    write(store, events(FIRST, *((key, 0.0) for key in keys)))
    store.update_stream(STREAM, schema=LAST)
    write(store, events(LAST, *((key, 1.0, None) for key in keys)))
    for segment in range(2):
        batch = store.reader(STREAM, segment).read()
        assert batch is not None
        of_segment = batch.to_pydict()
        first = [k for k, v in zip(of_segment["key"], of_segment["value"], strict=True) if v == 0.0]
        assert first == [k for k, v in zip(of_segment["key"], of_segment["value"], strict=True) if v == 1.0]


def test_a_transaction_of_before_is_prepared_and_committed_behind_an_update(store: Store) -> None:
    prepared = store.transactions.begin(STREAM, owner="p", epoch=1, name="prepared")
    prepared.write(events(FIRST, (1, 0.5)))
    prepared.prepare()
    opened = store.transactions.begin(STREAM, owner="p", epoch=1, name="opened")
    opened.write(events(FIRST, (2, 0.5)))
    store.update_stream(STREAM, schema=LAST)
    with pytest.raises(UsageError, match="'opened' began before stream 'app/events' got the columns of these events"):
        opened.write(events(LAST, (9, 9.0, "x")))
    opened.write(events(FIRST, (3, 0.5)))
    opened.prepare()
    later = store.transactions.begin(STREAM, owner="p", epoch=1, name="later")
    later.write(events(FIRST, (4, 0.5)))  # by a program of before
    later.write(events(LAST, (5, 0.5, "e")))
    later.prepare()
    store.update_stream(STREAM, columns=schema(more=pa.int8()))
    store.commit_transactions([(STREAM, name) for name in ("prepared", "opened", "later")], owner="p", epoch=1)
    assert read(store) == [
        *((key, 0.5, None, None) for key in (1, 2, 3, 4)),
        (5, 0.5, "e", None),
    ]
    assert store.fsck() == []


def test_a_reader_of_before_goes_on_in_its_schema(store: Store) -> None:  # S77
    store.create_stream("one", FIRST, segments=1)
    reader = store.reader("one", 0)
    store.update_stream("one", schema=schema(key=pa.int64(), value=pa.float32(), note=pa.large_string()))
    with store.writer("one", linger=None) as writer:
        writer.append(events(store.find("one").schema, (7, 0.5, "left out")))
        writer.flush()
        batch = reader.read()
        assert batch is not None
        assert batch.schema == FIRST
        assert batch.to_pylist() == [{"key": 7, "value": 0.5}]
        writer.append(events(store.find("one").schema, (8, 0.5, None)))
        writer.flush()
        writer.append(events(store.find("one").schema, (1 << 40, 0.5, None)))
        writer.flush()
    batch = reader.read()  # what fits comes first, then it is said what to do, each time
    assert batch is not None
    assert batch.to_pylist() == [{"key": 8, "value": 0.5}]
    for _ in range(2):
        with pytest.raises(
            OtherSchemaError,
            match=r"stream 'one' has other columns since it was opened: column 'key' has become int64, and there is "
            r"what does not fit int32, in segment 0 from position 2 on; open it again, or start the pipeline again",
        ):
            reader.read()
    batch = store.reader("one", 0, reader.position).read()
    assert batch is not None
    assert batch.to_pylist() == [{"key": 1 << 40, "value": 0.5, "note": None}]


def test_a_float_is_never_read_as_one_of_fewer_digits(store: Store) -> None:  # S77
    store.update_stream(STREAM, schema=WIDER)
    write(store, events(WIDER, (1, 0.1)))
    with pytest.raises(OtherSchemaError, match="column 'value' has become double"):
        read(store, 0)


def test_a_stream_can_be_read_in_a_schema_that_it_had(store: Store) -> None:  # S77
    store.update_stream(STREAM, schema=MORE)
    write(store, events(MORE, (1, 0.5, "a")))
    assert read(store, 0) == [(1, 0.5)]
    assert read(store, 1) == [(1, 0.5, "a")]
    for version in (-1, 2):
        with pytest.raises(UsageError, match=f"has schemas 0 to 1, not {version}"):
            store.reader(STREAM, 0, schema_version=version)


def test_a_program_of_before_finds_its_stream_and_a_new_one_is_of_version_0(store: Store) -> None:
    store.update_stream(STREAM, schema=LAST)
    assert store.create_stream(STREAM, FIRST, if_not_exists=True).schema == LAST
    with pytest.raises(UsageError, match="do not fit"):
        store.create_stream(STREAM, schema(other=pa.int8()), if_not_exists=True)
    opened = store.reader(STREAM, 0)
    store.delete(STREAM, force=True)
    with pytest.raises(UsageError, match="was deleted"):
        opened._schemas.of(1_000)
    assert store.create_stream(STREAM, FIRST, routing_key="key").schema_version == 0
    assert store.schemas(STREAM) == (FIRST,)


def test_a_damaged_history_of_schemas_is_found(store: Store) -> None:  # S76
    write(store, events(FIRST, (1, 0.5)))
    store.update_stream(STREAM, schema=LAST)
    write(store, events(LAST, (2, 0.5, None)))
    with database_of(store).write() as connection:
        connection.execute(t.former_schemas.delete())
    (problem,) = store.fsck()
    assert problem.what.endswith("expected 1 former schemas, found 0: []")
    with pytest.raises(CorruptionError, match="1 former schemas"):
        read(store)


def test_a_chunk_of_a_schema_that_is_not_there_is_found(store: Store) -> None:  # S76
    write(store, events(FIRST, (1, 0.5)))
    with database_of(store).write() as connection:
        connection.execute(t.chunks.update().values(schema_version=1))
    (problem,) = store.fsck()
    assert problem.what.endswith("has schema 1, which is none")
    with pytest.raises(CorruptionError, match="schema 1 of the stream, found 1 schemas"):
        read(store)


def test_a_schema_that_cannot_have_become_the_next_one_is_found(store: Store) -> None:  # S76
    store.update_stream(STREAM, schema=LAST)
    with database_of(store).write() as connection:
        other = encode_schema(schema(other=pa.int8()))
        connection.execute(t.former_schemas.update().values(schema=other))
    assert [problem.what for problem in store.fsck()] == [
        "its schema 0 cannot have become the next one: column 'other' (int8) would be removed; columns can be added at "
        "the end, and numbers can become wider ones"
    ]


WIDTHS = [pa.int8(), pa.int16(), pa.int32(), pa.int64()]
NUMBERS = st.lists(st.integers(-128, 127), min_size=1, max_size=3)


class SchemaMachine(RuleBasedStateMachine):
    """Writers, transactions and readers of any age against a stream whose one column gets wider and gets neighbours."""

    @initialize()
    def open(self) -> None:
        self.store = Store("memory", memory_catalogue("memory"), MemoryStorage())
        self.schemas = [schema(n=pa.int8())]
        self.store.create_stream(STREAM, self.schemas[0], segments=1)
        self.written: list[dict[str, int]] = []
        self.transactions_count = 0
        self.writers = [self.store.writer(STREAM, linger=None)]
        self.readers = [(0, self.store.reader(STREAM, 0))]
        self.prepared: list[tuple[str, list[dict[str, int]]]] = []

    def _rows(self, version: int, numbers: list[int]) -> tuple[pa.RecordBatch, list[dict[str, int]]]:
        rows = [dict.fromkeys(self.schemas[version].names, number) for number in numbers]
        return pa.RecordBatch.from_pylist(rows, schema=self.schemas[version]), rows

    @rule(adds=st.booleans())
    def update(self, adds: bool) -> None:
        present = self.schemas[-1]
        wider = WIDTHS.index(present.field("n").type) + 1
        if adds:
            changes = schema(**{f"c{len(self.schemas)}": pa.int8()})
        elif wider < len(WIDTHS):
            changes = schema(n=WIDTHS[wider])
        else:
            return
        self.schemas.append(self.store.update_stream(STREAM, columns=changes).schema)
        self.writers.append(self.store.writer(STREAM, linger=None))
        self.readers.append((len(self.schemas) - 1, self.store.reader(STREAM, 0)))

    @rule(by=st.integers(0), version=st.integers(0), numbers=NUMBERS)
    def append(self, by: int, version: int, numbers: list[int]) -> None:
        batch, rows = self._rows(version % len(self.schemas), numbers)
        writer = self.writers[by % len(self.writers)]
        writer.append(batch)
        writer.flush()
        self.written += rows

    @rule(version=st.integers(0), numbers=NUMBERS)
    def prepare(self, version: int, numbers: list[int]) -> None:
        batch, rows = self._rows(version % len(self.schemas), numbers)
        self.transactions_count += 1
        name = f"t{self.transactions_count}"
        transaction = self.store.transactions.begin(STREAM, owner="p", epoch=1, name=name)
        transaction.write(batch)
        transaction.prepare()
        self.prepared.append((name, rows))

    @rule()
    def commit(self) -> None:
        for name, rows in self.prepared:
            self.store.commit_transactions([(STREAM, name)], owner="p", epoch=1)
            self.written += rows
        self.prepared = []

    @invariant()
    def every_reader_sees_everything_in_its_own_schema(self) -> None:
        for version, reader in self.readers:
            at = reader.position
            batch = reader.read()
            found = [] if batch is None else batch.to_pylist()
            wanted = self.schemas[version]
            assert batch is None or batch.schema == wanted
            assert found == [{name: row.get(name) for name in wanted.names} for row in self.written[at:]]

    def teardown(self) -> None:
        if hasattr(self, "store"):
            assert self.store.fsck() == []
            assert self.store.schemas(STREAM) == tuple(self.schemas)


TestSchemas = SchemaMachine.TestCase
TestSchemas.settings = settings(max_examples=20, stateful_step_count=15)
