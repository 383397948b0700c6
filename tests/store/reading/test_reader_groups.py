"""Reader groups on a store: readers share streams, in one process and in several."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pytest
from tests.store.storing import KEYED, STREAM, Clock, Failing, database_of, keyed, lose_an_answer

from headgate.errors import CorruptionError, FencedError, StorageError, UsageError
from headgate.store.catalogue.group_rows import decode_group, encode_group
from headgate.store.reader_groups import CheckpointMarker, GroupEvents, GroupReader, ReaderGroup
from headgate.store.store import Store
from headgate.store.streams import StreamCut


@pytest.fixture
def store(tmp_path: Path, clock: Clock) -> Iterator[Store]:
    with Store.open(tmp_path / "store") as opened:
        timed = Store(opened.root, opened._core.catalogue, opened._core.storage, clock=clock)
        timed.create_stream(STREAM, KEYED, segments=2, routing_key="key")
        yield timed


def write(store: Store, first: int, last: int) -> None:
    with store.writer(STREAM) as writer:
        writer.append(keyed(*((f"k{n % 8}", n) for n in range(first, last))))


def rows(found: GroupEvents | CheckpointMarker | None) -> list[tuple[str, int]]:
    assert isinstance(found, GroupEvents)
    return list(zip(*found.batch.to_pydict().values(), strict=True))


def drain(reader: GroupReader, rows_max: int = 1_000) -> list[tuple[str, int]]:
    """All that there is for it now; no marker may be among it."""
    found = []
    while (one := reader.read(rows_max)) is not None:
        found += rows(one)
    return found


def numbers(found: list[tuple[str, int]]) -> list[int]:
    return sorted(number for _, number in found)


def test_readers_share_a_stream_and_each_event_goes_to_one(store: Store) -> None:  # RG1
    write(store, 0, 20)
    group = store.reader_group("g", STREAM)
    with group.join("a") as a, group.join("b") as b:
        found = drain(a)  # b has nothing yet: a was there first, and is asked for a segment
        a.commit()
        write(store, 20, 40)
        mine, others = drain(a), drain(b)
        assert mine
        assert others
        assert numbers(found + mine + others) == list(range(40))
        assert {name: len(own) for name, own in group.readers().items()} == {"a": 1, "b": 1}
    assert (group.readers(), group.unread_bytes()) == ({}, 0)


def test_a_group_one_of_whose_streams_was_deleted_begins_anew_in_it_and_goes_on_in_the_others(store: Store) -> None:
    other = "app/other"
    store.create_stream(other, KEYED, segments=1, routing_key="key")
    write(store, 0, 20)
    group = store.reader_group("g", [STREAM, other])
    with group.join("a") as reader:
        assert numbers(drain(reader)) == list(range(20))
        assert group.checkpoint("c") is False
        assert reader.read() == CheckpointMarker("c")
    store.delete(other, force=True)
    late = group.join("late")
    with pytest.raises(UsageError, match=f"stream '{other}' was deleted|stream '{other}' does not exist"):
        drain(late)
    assert group.cut().keys() == group.cut("c").keys() == {STREAM}
    assert group.unread_bytes() == 0
    store.create_stream(other, KEYED, segments=1, routing_key="key")
    with store.writer(other) as writer:
        writer.append(keyed(("new", 100)))
    with pytest.raises(UsageError, match="was deleted"):
        drain(late)
    write(store, 20, 30)
    group.reset(cuts=list(group.cut().values()))
    with group.join("a") as reader:
        assert numbers(drain(reader)) == [*range(20, 30), 100]


def test_what_is_unread_is_counted_from_the_position_on(store: Store) -> None:
    stream = store.create_stream("one", KEYED, segments=1)
    for _ in range(2):
        with store.writer("one") as writer:
            writer.append(keyed(*(("k", number) for number in range(10))))
    with database_of(store).read() as connection:
        query = f"SELECT size_bytes FROM parts WHERE stream_id = {stream.stream_id} ORDER BY start"
        first, second = connection.exec_driver_sql(query).scalars()
    for position, expected in ((0, first + second), (5, first // 2 + second), (10, second), (20, 0)):
        group = store.reader_group(f"g{position}", "one", cuts=[StreamCut("one", stream.stream_id, {0: position})])
        assert group.unread_bytes() == expected


def test_what_a_read_returned_is_processed_with_the_next_one(store: Store, clock: Clock) -> None:
    write(store, 0, 20)
    group = store.reader_group("g", STREAM)
    reader = group.join("a", commit_every="1s")
    found = rows(reader.read())
    clock.now_ms += 1_000
    before = group.cut()[STREAM]
    found += rows(reader.read())  # commits what the first one returned
    assert group.cut()[STREAM] != before
    first, second = found[: len(found) - len(group_rest(group))], group_rest(group)
    assert numbers(first + second) == list(range(20))
    assert second == found[len(first) :]


def group_rest(group: ReaderGroup) -> list[tuple[str, int]]:
    """What is not processed yet; the group is as before."""
    reader = group.join("a", commit_every=None, takes_over=True)
    found = drain(reader)
    reader.leave(commits=False)
    return found


def test_without_commits_everything_is_read_again(store: Store, clock: Clock) -> None:  # RG2
    write(store, 0, 20)
    group = store.reader_group("g", STREAM)
    reader = group.join("a", commit_every=None)
    for _ in range(5):
        clock.now_ms += 5_000
        reader.read()
    assert numbers(drain(group.join("a", takes_over=True))) == list(range(20))
    with pytest.raises(FencedError, match="join again"):
        reader.read()
    with pytest.raises(FencedError, match="join again"):
        reader.commit()


def test_a_scaled_stream_is_read_to_its_end_in_order(store: Store) -> None:  # RG4, RG5
    write(store, 0, 20)
    store.split(STREAM, 0)
    write(store, 20, 40)
    store.merge(STREAM, [1, 3])
    write(store, 40, 60)
    store.seal(STREAM)
    group = store.reader_group("g", STREAM)
    with group.join("a", commit_every="1h") as reader:
        found = drain(reader)
        while not reader.has_ended:
            found += drain(reader)
    assert numbers(found) == list(range(60))
    for key in range(8):
        assert [n for k, n in found if k == f"k{key}"] == list(range(key, 60, 8))
    assert group.unread_bytes() == 0


def test_a_checkpoint_comes_as_a_marker_to_each_reader_and_is_gone_back_to(store: Store) -> None:  # RG8, RG9, RG15
    write(store, 0, 20)
    group = store.reader_group("g", STREAM)
    a, b = group.join("a", commit_every=None), group.join("b", commit_every=None)
    a.commit()
    first = [*drain(a), *rows(b.read(2))]
    assert not group.checkpoint("c")
    assert (a.read(), b.read()) == (CheckpointMarker("c"), CheckpointMarker("c"))
    behind = drain(b)
    assert group.checkpoints() == {"c": False}  # a has not said yet that its caller knows
    assert a.read() is None
    assert group.checkpoint("c")
    assert store.events_between(store.head(STREAM), group.cut("c")[STREAM]) == len(first)
    group.reset(checkpoint="c")
    with pytest.raises(FencedError, match="reset"):
        a.read()
    assert numbers(drain(group.join("a"))) == numbers(behind)


def test_a_group_begins_anew_where_it_is_told(store: Store) -> None:  # RG15
    write(store, 0, 20)
    middle = store.tail(STREAM)
    write(store, 20, 30)
    group = store.reader_group("g", [STREAM], start="latest")
    assert drain(group.join("a")) == []
    group.reset(cuts=[middle])
    assert numbers(drain(group.join("a"))) == list(range(20, 30))
    group.reset()
    assert numbers(drain(group.join("a"))) == list(range(30))
    assert numbers(drain(store.reader_group("h", STREAM, cuts=[middle]).join("a"))) == list(range(20, 30))


def test_a_silent_reader_loses_its_share_and_is_told_at_each_call(store: Store, clock: Clock) -> None:  # RG12, RG13
    write(store, 0, 20)
    group = store.reader_group("g", STREAM)
    zombie, other = group.join("zombie", lease="10s", commit_every=None), group.join("other", commit_every=None)
    lost = drain(zombie)
    found = []
    for _ in range(6):
        clock.now_ms += 2_500
        found += drain(other)
    assert list(group.readers()) == ["other"]
    assert lost
    assert numbers(found) == list(range(20))
    for call in (zombie.read, zombie.commit, zombie.heartbeat):
        with pytest.raises(FencedError, match="considered dead"):
            call()
    with pytest.raises(FencedError):
        zombie.leave()
    zombie.leave(commits=False)


def test_who_says_that_it_lives_keeps_its_share(store: Store, clock: Clock) -> None:  # RG13
    group = store.reader_group("g", STREAM)
    busy, other = group.join("busy"), group.join("other")
    for _ in range(20):
        clock.now_ms += 2_500
        other.read()
        busy.heartbeat()
    assert list(group.readers()) == ["busy", "other"]


def test_an_answer_that_was_lost_costs_and_repeats_nothing(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:  # RG3
    write(store, 0, 20)
    group = store.reader_group("g", STREAM)
    a, b = group.join("a", commit_every=None), group.join("b", commit_every=None)
    found = rows(a.read(2))
    with monkeypatch.context() as patch:
        lose_an_answer(store, patch)
        with pytest.raises(StorageError):
            a.commit()  # it has given a segment to b
    found += [*drain(a), *drain(b)]
    assert numbers(found) == list(range(20))


def test_what_a_group_needs_is_not_truncated_unless_it_is_said(store: Store) -> None:  # RG17
    write(store, 0, 20)
    group = store.reader_group("g", STREAM)
    with pytest.raises(UsageError, match="'reader group g' needs"):
        store.truncate(store.tail(STREAM))
    with group.join("a") as reader:
        drain(reader)
    store.truncate(store.tail(STREAM))
    write(store, 20, 30)
    group.checkpoint("c")
    with group.join("a") as reader:
        drain(reader)
    with pytest.raises(UsageError, match="'reader group g' needs"):  # the checkpoint does
        store.truncate(store.tail(STREAM))
    store.truncate(store.tail(STREAM), force=True)
    group.forget_checkpoint("c")
    assert store.delete_reader_group("g")
    assert not store.delete_reader_group("g")
    assert store.holds(STREAM) == {}
    with pytest.raises(UsageError, match="no reader group 'g'"):
        group.join("a")


def test_nobody_else_holds_under_the_name_of_a_group(store: Store) -> None:  # RG17
    write(store, 0, 20)
    store.reader_group("g", STREAM)
    before = store.holds(STREAM)
    with pytest.raises(UsageError, match="'reader group g' is the name under which a reader group holds"):
        store.hold(store.tail(STREAM), holder="reader group g")
    assert store.holds(STREAM) == before


def test_columns_that_are_added_come_to_the_readers_of_a_group(store: Store) -> None:
    failing = Failing(store._core.catalogue)
    flaky = Store(store.root, failing, store._core.storage)  # type: ignore[arg-type]
    store.create_stream("rates", pa.schema({"n": pa.float32()}), segments=1)
    reader = flaky.reader_group("g", "rates").join("a", commit_every="0ms")

    def write_as(value: float, **columns: pa.DataType) -> None:
        schema = store.update_stream("rates", columns=pa.schema(columns)).schema
        with store.writer("rates") as writer:
            writer.append(pa.RecordBatch.from_pylist([{"n": value, "note": "new"}], schema=schema))

    write_as(0.5, n=pa.float32())
    assert isinstance(found := reader.read(), GroupEvents)
    assert found.batch.to_pylist() == [{"n": 0.5}]
    write_as(1.5, note=pa.large_string())
    failing.down = {"find_stream"}
    for _ in range(2):
        with pytest.raises(StorageError, match="away"):
            reader.read(1)
    reader.commit()
    failing.down.clear()
    assert isinstance(found := reader.read(1), GroupEvents)
    assert found.batch.to_pylist() == [{"n": 1.5, "note": "new"}]
    write_as(0.1, n=pa.float64())
    assert isinstance(found := reader.read(1), GroupEvents)
    assert found.batch.to_pylist() == [{"n": 0.1, "note": "new"}]
    assert reader.read() is None
    assert reader.segments == (("rates", 0),)


def test_a_reader_says_when_it_has_to_be_called_again(store: Store, clock: Clock) -> None:
    write(store, 0, 4)
    group = store.reader_group("g", STREAM)
    reader = group.join("a", lease="10s", commit_every="1s")
    assert reader.read() is not None
    assert reader.due_in_ms == 1_000, "for its commit"
    clock.now_ms += 400
    assert reader.due_in_ms == 600
    clock.now_ms += 600
    assert reader.due_in_ms == 0
    reader.commit()
    clock.now_ms += 1_000
    assert reader.due_in_ms == 10_000 // 4 - 2_000, "nothing is to be committed, so for its lease"
    slow = group.join("b", lease="10s", commit_every=None)
    assert slow.due_in_ms == 10_000 // 4


def test_events_are_taken_back_while_the_store_is_away(store: Store) -> None:
    """Else the next read would count them as processed."""
    failing = Failing(store._core.catalogue)
    flaky = Store(store.root, failing, store._core.storage)  # type: ignore[arg-type]
    write(store, 0, 20)
    reader = flaky.reader_group("g", STREAM).join("a", commit_every=None)
    first = reader.read(3)
    assert isinstance(first, GroupEvents)
    failing.down = {"find_stream", "find_group", "change_group", "parts"}
    reader.unread(first)
    failing.down.clear()
    reader.commit()
    assert numbers(drain(reader)) == list(range(20))


def test_what_cannot_be_says_why(store: Store) -> None:
    store.create_stream("other", KEYED)
    group = store.reader_group("g", STREAM)
    assert store.reader_groups() == ["g"]
    assert store.reader_group("g").streams() == [STREAM]
    for call, told in (
        (lambda: store.reader_group("g", "other"), "reads app/events, not other"),
        (lambda: store.reader_group("h"), "no reader group 'h'"),
        (lambda: store.reader_group("a b", STREAM), "not usable"),
        (lambda: store.reader_group("h", "missing"), "does not exist"),
        (lambda: store.reader_group("h", STREAM, start="middle"), "'earliest' or 'latest'"),
        (lambda: store.reader_group("h", STREAM, cuts=[store.tail("other")]), "does not read"),
        (lambda: store.reader_group("h", STREAM, checkpoints_kept=0), "at least 1"),
        (lambda: group.reset(checkpoint="c"), "no completed checkpoint 'c'"),
        (lambda: group.cut("c"), "no completed checkpoint 'c'"),
        (lambda: group.join(""), "needs a name"),
    ):
        with pytest.raises(UsageError, match=told):
            call()
    group.join("a")
    with pytest.raises(UsageError, match="takes_over"):
        group.join("a")


def test_the_state_of_a_group_survives_as_bytes_and_damage_is_told(store: Store) -> None:
    group = store.reader_group("g", STREAM)
    group.join("a")
    group.checkpoint("c")
    found = store._core.catalogue.find_group("g").group
    data = encode_group(found)
    assert decode_group(data, "g") == found
    for bad in (b"", b"{}", b"[]", data[:-3], data.replace(b'"format":1', b'"format":2')):
        with pytest.raises(CorruptionError, match="reader group 'g'"):
            decode_group(bad, "g")


READER = """
import sys, time
from headgate.errors import FencedError
from headgate.store.store import Store
root, name, asks = sys.argv[1], sys.argv[2], sys.argv[3] == "asks"
reader = Store.open(root).reader_group("g").join(name, lease="1s", commit_every=None)
print("joined", flush=True)
if asks:
    sys.stdin.readline()
try:
    while not reader.has_ended:
        found = reader.read(5)
        if found is None:
            reader.commit()
            time.sleep(0.02)
            continue
        print("read", *found.batch.column("value").to_pylist(), flush=True)
        if asks:
            sys.stdin.readline()
        reader.commit()
        print("committed", flush=True)
except FencedError:
    print("fenced", flush=True)
"""


def started(store: Store, name: str, how: str) -> subprocess.Popen[str]:
    arguments = [sys.executable, "-c", READER, store.root, name, how]
    pipe = subprocess.PIPE
    return subprocess.Popen(arguments, stdin=pipe, stdout=pipe, text=True, env=os.environ.copy())


def line(process: subprocess.Popen[str]) -> list[str]:
    assert process.stdout is not None
    return process.stdout.readline().split()


def answer(process: subprocess.Popen[str]) -> None:
    assert process.stdin is not None
    process.stdin.write("\n")
    process.stdin.flush()


@pytest.mark.crash
def test_readers_that_are_killed_or_stopped_lose_nothing_and_what_they_committed_is_not_read_again(
    tmp_path: Path,
) -> None:  # RG2, RG12, RG13, RG20
    with Store.open(tmp_path / "store") as store:
        store.create_stream(STREAM, KEYED, segments=2, routing_key="key")
        write(store, 0, 40)
        store.reader_group("g", STREAM)
        killed, stopped = started(store, "killed", "asks"), None
        try:
            assert line(killed) == ["joined"]
            answer(killed)
            committed = line(killed)[1:]
            stopped = started(store, "stopped", "asks")
            assert line(stopped) == ["joined"]
            answer(killed)  # it commits, and gives a segment up
            assert line(killed) == ["committed"]
            in_vain = line(killed)[1:]
            answer(stopped)  # not before: while it reads it looks whether the other one is silent
            in_vain += line(stopped)[1:]
            killed.kill()
            stopped.send_signal(signal.SIGSTOP)
            store.split(STREAM, 1)
            transaction = store.transactions.begin(STREAM, owner="me", epoch=1, name="t")
            transaction.write(keyed(*((f"k{n % 8}", n) for n in range(40, 60))))
            transaction.prepare()
            store.merge(STREAM, [0, 2])
            store.commit_transactions([(STREAM, "t")], owner="me", epoch=1)
            store.seal(STREAM)
            patient = started(store, "patient", "goes on")
            said = [words.split() for words in patient.communicate()[0].splitlines()]
            assert said[-1] == ["committed"]
            found = [value for words in said if words[0] == "read" for value in words[1:]]
            assert sorted(map(int, committed + found)) == list(range(60))
            assert set(in_vain) <= set(found)
            stopped.send_signal(signal.SIGCONT)
            answer(stopped)
            assert line(stopped) == ["fenced"]
        finally:
            for process in (killed, stopped):
                if process is not None:
                    process.kill()
                    process.communicate()
        assert store.fsck() == []
