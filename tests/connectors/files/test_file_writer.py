"""When a file sink writes a file, that each record is in one place until then, and division by columns (D16)."""

from __future__ import annotations

import datetime as dt
import random
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import duckdb
import pyarrow as pa
import pytest
from tests.conftest import few
from tests.support.killing import run_killing

import headgate as hg
from headgate.codec.snapshot import encode_sections
from headgate.connectors.base import SealedTransaction, SinkContext
from headgate.connectors.files.file_committer import committed_files, read_committed
from headgate.connectors.files.file_sink import FileSink
from headgate.connectors.files.file_writer import FileWriter, HeldRecords, decode_held_records
from headgate.connectors.files.publish_log import NULL, StagedFile, decode_files, divided, encode_files, values_of
from headgate.errors import CorruptionError, LeaveBehind, UsageError
from headgate.model.ids import CheckpointId, Generation, SubtaskId, VertexId
from headgate.model.manifest import Committable, Manifest, SnapshotPart, SubtaskEntry
from headgate.operators.base import RestoredState
from headgate.protocol.checkpoints.commit import CommitPermit
from headgate.protocol.checkpoints.recovery import incompatibility
from headgate.state.snapshot import encode_batches

SCHEMA = pa.schema([("n", pa.int64())])


def batch(*numbers: int) -> pa.RecordBatch:
    return pa.record_batch([list(numbers)], schema=SCHEMA)


def state_of(**sections: bytes) -> RestoredState:
    encoded = encode_sections({name: [data] for name, data in sections.items()})
    return RestoredState(2, 4, memoryview(b"".join(bytes(memoryview(part)) for part in encoded)))


def test_records_held_back_come_back_with_the_columns_that_they_had() -> None:
    held = HeldRecords(SCHEMA, [batch(1), batch(2, 3)])
    assert held.rows() == {"records": 3}
    data = b"".join(bytes(memoryview(part)) for part in held.encode())
    assert decode_held_records(RestoredState(0, 1, memoryview(data)), "out") == [batch(1), batch(2, 3)]


def test_state_that_holds_no_records_is_refused_with_whose_it_was() -> None:
    whole = bytes(memoryview(encode_batches(SCHEMA, [batch(1, 2, 3)])[0]))
    with pytest.raises(CorruptionError, match="held back by 'out', subtask 2 is damaged at byte 0: expected a section"):
        decode_held_records(state_of(other=b"x"), "out")
    for size in range(0, len(whole) - 8, 9):
        with pytest.raises(CorruptionError, match="subtask 2 is damaged at byte 0: expected an Arrow stream"):
            decode_held_records(state_of(records=whole[:size]), "out")


@dataclass
class Clock:
    now_ms: int = 1_000

    def __call__(self) -> int:
        return self.now_ms


@dataclass
class Checkpoint:
    """What a completed one remembers of a sink."""

    output: list[Committable] = field(default_factory=list)
    states: list[bytes | None] = field(default_factory=list)


class Life:
    """The writers of one generation, and what a coordinator does with their checkpoints."""

    def __init__(
        self,
        sink: FileSink,
        generation: int = 1,
        parallelism: int = 1,
        restored: Checkpoint | None = None,
        clock: Clock | None = None,
        schema: pa.Schema = SCHEMA,
    ) -> None:
        self.clock = clock or Clock()
        self.generation = Generation(generation)
        self._pending: list[Committable] = []
        restored = restored or Checkpoint()
        self._committer = sink.open_committer("p", "out", self.generation)
        self._committer.recover(restored.output)
        if restored.output:
            newest = max(c.checkpoint for c in restored.output)
            self._committer.commit(CommitPermit(newest, self.generation), restored.output)
        self.writers = [
            self._open(sink, SinkContext("p", "out", index, parallelism, self.generation, schema, self.clock))
            for index in range(parallelism)
        ]
        former = len(restored.states)
        for index, writer in enumerate(self.writers):
            mine = [
                RestoredState(subtask, former, memoryview(data))
                for subtask, data in enumerate(restored.states)
                if data is not None and (former != parallelism or subtask == index)
            ]
            if mine:
                writer.restore(mine)

    def _open(self, sink: FileSink, context: SinkContext) -> FileWriter:
        writer = sink.open(context)
        assert isinstance(writer, FileWriter)
        return writer

    def seal(self, checkpoint: int) -> list[tuple[SealedTransaction, bytes | None]]:
        return [(writer.seal(CheckpointId(checkpoint)), encoded(writer)) for writer in self.writers]

    def take(self, checkpoint: int) -> Checkpoint:
        """Take a checkpoint that completes and is committed."""
        done = self.prepare(checkpoint)
        self.commit(checkpoint, done)
        return done

    def prepare(self, checkpoint: int) -> Checkpoint:
        states: list[bytes | None] = []
        for index, (sealed, state) in enumerate(self.seal(checkpoint)):
            payload = sealed.prepare()
            states.append(state)
            if payload is not None:
                self._pending.append(Committable("out", CheckpointId(checkpoint), index, self.generation, payload))
        return Checkpoint(list(self._pending), states)

    def commit(self, checkpoint: int, done: Checkpoint) -> None:
        self._committer.commit(CommitPermit(CheckpointId(checkpoint), self.generation), done.output)
        self._pending = [c for c in self._pending if c not in done.output]


def encoded(writer: FileWriter) -> bytes | None:
    frozen = writer.freeze()
    return None if frozen is None else b"".join(bytes(memoryview(part)) for part in frozen.encode())


def shown(sink: FileSink) -> list[int]:
    frame = read_committed(sink.url)
    return sorted(frame["n"].to_list()) if frame.width else []


def test_twenty_minutes_of_checkpoints_every_second_make_a_file_a_minute(tmp_path: Path) -> None:
    sink, clock = FileSink(f"memory://{tmp_path}"), Clock()
    life = Life(sink, clock=clock)
    for second in range(1, 1_201):
        life.writers[0].write(batch(second))
        clock.now_ms += 1_000
        life.take(second)
    assert len(committed_files(sink.url)) == 20
    assert shown(sink) == list(range(1, 1_201))


def test_records_wait_for_the_interval_from_the_oldest_one_on(tmp_path: Path) -> None:
    sink, clock = FileSink(tmp_path, roll_interval="10s"), Clock()
    life = Life(sink, clock=clock)
    clock.now_ms += 60_000  # nothing was written: nothing has waited
    life.writers[0].write(batch(1))
    life.take(1)
    clock.now_ms += 9_999
    life.writers[0].write(batch(2))
    held = life.take(2)
    assert shown(sink) == []
    assert held.states != [None]
    clock.now_ms += 1
    assert life.take(3).states == [None]
    assert shown(sink) == [1, 2]
    assert life.take(4).states == [None]


def test_enough_records_for_a_file_do_not_wait(tmp_path: Path) -> None:
    sink = FileSink(tmp_path, roll_interval="1h", roll_bytes=64)
    life = Life(sink)
    life.writers[0].write(batch(1, 2, 3, 4, 5, 6, 7))
    assert life.take(1).states != [None]
    life.writers[0].write(batch(8))
    assert life.take(2).states == [None]
    assert shown(sink) == list(range(1, 9))


def test_what_has_spilled_to_disk_is_never_held_back(tmp_path: Path) -> None:
    sink = FileSink(tmp_path, roll_interval="1h", buffer_bytes=16)
    life = Life(sink)
    life.writers[0].write(batch(1))
    life.writers[0].write(batch(2))
    life.writers[0].write(batch(3))
    assert life.take(1).states == [None]
    assert shown(sink) == [1, 2, 3]


def test_nothing_is_held_back_where_the_interval_is_0(tmp_path: Path) -> None:
    sink = FileSink(tmp_path, roll_interval=0)
    life = Life(sink)
    life.writers[0].write(batch(1))
    assert life.take(1).states == [None]
    assert shown(sink) == [1]


def test_the_end_of_the_input_shows_everything(tmp_path: Path) -> None:
    sink = FileSink(tmp_path, roll_interval="1h")
    life = Life(sink, parallelism=2)
    for writer in life.writers:
        writer.write(batch(1))
    life.take(1)
    for writer in life.writers:
        writer.finish()
        writer.finish()
    assert life.take(2).states == [None, None]
    assert shown(sink) == [1, 1]


@pytest.mark.parametrize(("before", "after"), [(1, 1), (3, 3), (3, 2), (2, 5), (4, 1)])
def test_what_was_held_back_is_shown_by_the_first_checkpoint_after_a_restart_once(
    tmp_path: Path, before: int, after: int
) -> None:
    sink = FileSink(tmp_path, roll_interval="1h")
    life = Life(sink, parallelism=before)
    for index, writer in enumerate(life.writers):
        writer.write(batch(index))
    done = life.take(1)
    life.writers[0].write(batch(99))  # in no checkpoint: the source gives it again
    assert shown(sink) == []
    second = Life(sink, 2, after, done)
    second.writers[0].write(batch(99))
    again = second.take(2)
    assert set(again.states) == {None}
    assert shown(sink) == [*range(before), 99]


def test_records_with_other_columns_from_before_a_restart_get_a_file_of_their_own(tmp_path: Path) -> None:
    sink = FileSink(tmp_path, "parquet", roll_interval="1h")
    life = Life(sink)
    life.writers[0].write(batch(1))
    done = life.take(1)
    schema = pa.schema([("n", pa.int64()), ("more", pa.large_string())])
    second = Life(sink, 2, 1, done, schema=schema)
    second.writers[0].write(pa.record_batch([[2], ["x"]], schema=schema))
    second.take(2)
    assert len(committed_files(sink.url)) == 2
    assert read_committed(sink.url).sort("n").to_dicts() == [{"n": 1, "more": None}, {"n": 2, "more": "x"}]


def test_records_held_back_keep_no_larger_buffers_alive(tmp_path: Path) -> None:
    life = Life(FileSink(tmp_path, roll_interval="1h"))
    large = batch(*range(100_000))
    for checkpoint in (1, 2):
        life.writers[0].write(large.slice(checkpoint, 1))
        life.take(checkpoint)
    assert sum(held.get_total_buffer_size() for held in life.writers[0]._held) < 1_000


def test_a_prepare_that_is_repeated_after_it_succeeded_returns_the_same(tmp_path: Path) -> None:
    life = Life(FileSink(tmp_path, roll_interval=0))
    life.writers[0].write(batch(1))
    ((sealed, _),) = life.seal(1)
    payload = sealed.prepare()
    assert payload is not None
    assert sealed.prepare() == payload
    assert [file.rows for file in decode_files("payload", payload)] == [1]


def test_state_that_is_none_is_refused(tmp_path: Path) -> None:
    life = Life(FileSink(tmp_path))
    with pytest.raises(CorruptionError, match="records held back by 'out', subtask 0"):
        life.writers[0].restore([RestoredState(0, 1, memoryview(b"?" * 40))])


@pytest.mark.parametrize("options", [{"roll_bytes": 0}, {"roll_interval": "soon"}, {"roll_interval": -1}])
def test_limits_that_make_no_sense_are_refused(tmp_path: Path, options: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match=next(iter(options))):
        FileSink(tmp_path, **options)


def test_a_checkpoint_with_records_of_a_sink_that_is_gone_does_not_fit() -> None:
    # D15
    handle = SnapshotPart(1, 1, rows={"out": {"records": 7}, "total": {"accumulators": 3}})
    entries = tuple(SubtaskEntry(SubtaskId(VertexId("out"), index), (handle,)) for index in (0, 1))
    texts = {"out": "", "total": "reduce"}
    manifest = Manifest(CheckpointId(4), Generation(1), 2, 16, entries, state_texts=texts)
    assert incompatibility(manifest, texts, 16) is None
    problem = incompatibility(manifest, {"total": "reduce"}, 16)
    assert problem is not None
    assert "checkpoint 4 holds 14 records that sink 'out' has not written yet" in problem.reason
    assert problem.remedy == LeaveBehind("out")
    empty = replace(manifest, entries=())
    assert incompatibility(empty, {"total": "reduce"}, 16) is None


@pytest.mark.parametrize("seed", few(range(30), 10))
def test_every_record_is_shown_once_whatever_rolls_aborts_and_dies(tmp_path: Path, seed: int) -> None:
    # a source that goes back to where the restored checkpoint was
    rng = random.Random(seed)
    sink = FileSink(f"memory://{tmp_path}", roll_interval="5s", roll_bytes=rng.choice((40, 200, 10_000)))
    done, position, completed, generation = Checkpoint(), 0, 0, 1
    clock = Clock()
    life = Life(sink, generation, rng.randint(1, 4), done, clock)
    for checkpoint in range(1, 60):
        for _ in range(rng.randint(0, 6)):
            rng.choice(life.writers).write(batch(position))
            position += 1
        clock.now_ms += rng.randint(0, 4_000)
        if checkpoint == 59:
            for writer in life.writers:
                writer.finish()
        pending = life.prepare(checkpoint)
        fate = "complete" if checkpoint == 59 else rng.choice(("complete", "complete", "abort", "die", "die late"))
        if fate in ("complete", "die late"):
            done, completed = pending, position
        if fate == "complete":
            life.commit(checkpoint, done)
        if fate.startswith("die"):
            generation, position = generation + 1, completed
            life = Life(sink, generation, rng.randint(1, 4), done, clock)
    assert shown(sink) == list(range(position))


DAYS_SCHEMA = pa.schema([("n", pa.int64()), ("day", pa.date32()), ("name", pa.large_string())])
DAYS = (dt.date(2015, 7, 15), dt.date(2015, 7, 16))
NAMES = ["a", "", None, "é", "x/y", "..", "00:01", "100%", "a=b", " ", "..\\up", "dots.", '"]', "_own", "%41"]


def rows() -> list[dict[str, Any]]:
    return [{"n": n, "day": DAYS[n % 2], "name": name} for n, name in enumerate(NAMES * 2)]


def context(generation: int = 1) -> SinkContext:
    return SinkContext("p", "out", 0, 1, Generation(generation), DAYS_SCHEMA)


def prepared(sink: FileSink, checkpoint: int, records: list[dict[str, Any]], generation: int = 1) -> Committable:
    writer = sink.open(context(generation))
    writer.write(pa.RecordBatch.from_pylist(records, schema=DAYS_SCHEMA))
    sealed = writer.seal(CheckpointId(checkpoint))
    payload = sealed.prepare()
    assert payload is not None
    assert sealed.prepare() == payload
    return Committable("out", CheckpointId(checkpoint), 0, Generation(generation), payload)


def commit(sink: FileSink, checkpoint: int, committable: Committable, generation: int = 1) -> None:
    committer = sink.open_committer("p", "out", Generation(generation))
    committer.recover([committable])
    for _ in range(2):  # a second time, nothing happens
        committer.commit(CommitPermit(CheckpointId(checkpoint), Generation(generation)), [committable])


@pytest.mark.parametrize("form", ["jsonl", "csv", "parquet"])
def test_records_are_in_the_directories_of_their_values(tmp_path: Path, form: Any) -> None:
    sink = FileSink(tmp_path, form, partition_by=("day", "name"), roll_interval=0)
    commit(sink, 1, prepared(sink, 1, rows()))
    found = read_committed(str(tmp_path)).select("n", "day", "name").sort("n").rows()
    assert found == [(row["n"], row["day"].isoformat(), row["name"] or None) for row in rows()]
    directories = {path.rpartition("/")[0] for path in committed_files(str(tmp_path))}
    assert len(directories) == len({(row["day"], row["name"] or None) for row in rows()})
    assert "day=2015-07-15/name=00%3A01" in directories
    assert {Path(tmp_path, path).parent.parent.parent for path in committed_files(str(tmp_path))} == {tmp_path}


def test_duckdb_reads_the_columns_from_the_directories(tmp_path: Path) -> None:
    records = [row for row in rows() if row["name"] != "%41"]
    sink = FileSink(tmp_path, "parquet", partition_by=["day", "name"], roll_interval=0)
    commit(sink, 1, prepared(sink, 1, records))
    read = f"read_parquet('{tmp_path}/day=*/*/*.parquet', hive_partitioning = true, hive_types = {{'name': VARCHAR}})"
    found = duckdb.sql(f"SELECT n, day, name FROM {read} ORDER BY n").fetchall()
    assert found == [(row["n"], row["day"], row["name"] or None) for row in records]


def test_a_pipeline_writes_each_record_once_although_a_worker_is_killed(tmp_path: Path) -> None:
    pipeline = hg.Pipeline("divided", parallelism=2, checkpointing=hg.Checkpointing(interval="50ms"))
    records = [{"n": n, "minute": n // 100} for n in range(2_000)]
    numbers = pipeline.source(hg.FromRows(records, splits=2, batch_rows=50))
    numbers.sink(FileSink(tmp_path / "out", "jsonl", partition_by="minute", roll_interval=0))
    run_killing(pipeline, 1)
    found = read_committed(str(tmp_path / "out")).sort("n")
    assert found.rows() == [(n, str(n // 100)) for n in range(2_000)]


def test_prepared_files_of_partitions_are_swept_when_they_are_given_up(tmp_path: Path) -> None:
    sink = FileSink(tmp_path, partition_by="name", roll_interval=0)
    prepared(sink, 1, rows())
    spoof = [{"n": 1, "day": DAYS[0], "name": "x-0000000001-00000-9999999999-00000.json"}]
    prepared(sink, 1, spoof)
    kept = prepared(sink, 2, rows()[:2], generation=2)
    commit(sink, 2, kept, generation=2)
    assert sorted(read_committed(str(tmp_path))["n"].to_list()) == [0, 1]
    assert not [path for path in (tmp_path / "_staging").rglob("*") if path.is_file()]


def test_a_list_of_files_leads_nowhere_else() -> None:
    for name in ("_claims/p.out/0000000001", "a=../../x", "../x", "a=b/../x", "/etc/x", "a=b/", "=b/x", "a=/x"):
        with pytest.raises(CorruptionError, match="expected"):
            decode_files("list", encode_files([StagedFile(name, 1, 1, "0")]))
    good = [StagedFile("a=b/c=%3A/x.csv", 1, 1, "0")]
    assert decode_files("list", encode_files(good)) == good


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        (["no"], "names 'no'; the records have n, day, name"),
        (["n", "day", "name"], "names every column"),
        (["price"], "of type double; it takes texts"),
        (["_own"], "cannot begin the name of a directory"),
    ],
)
def test_columns_that_cannot_name_directories_are_refused(tmp_path: Path, columns: list[str], message: str) -> None:
    extra = [(name, pa.float64()) for name in columns if name in ("price", "_own")]
    schema = pa.schema([*DAYS_SCHEMA, *(pa.field(*pair) for pair in extra)])
    with pytest.raises(UsageError, match=message):
        FileSink(tmp_path, partition_by=columns).check(schema)


def test_a_column_named_twice_and_a_value_too_long_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="names a column twice"):
        FileSink(tmp_path, partition_by=["n", "n"])
    with pytest.raises(UsageError, match=r"it has 305 bytes, and at most 240 are possible"):
        prepared(FileSink(tmp_path, partition_by="name", roll_interval=0), 1, [{"n": 1, "name": "x" * 300}])


def test_a_text_like_the_directory_of_nulls_is_no_null() -> None:
    table = pa.table({"p": [NULL, None, ""], "n": [1, 2, 3]})
    found = {place: part["n"].to_pylist() for place, part in divided(table, ["p"])}
    assert list(found.values()) == [[1], [2, 3]]
    assert [values_of(f"{place}/file")["p"] for place in found] == [NULL, None]
