"""Whole streams as one program reads them (docs/spec/stream-clients.md, FW)."""

from __future__ import annotations

import contextlib
import datetime as dt
import math
from collections.abc import Sequence

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.store.room import Room
from tests.store.storing import KEYED, STREAM, Failing, keyed
from tests.support.clocks import HandClock

from headgate.errors import StorageError, TruncatedError, UsageError
from headgate.store.follower import StreamEvents, StreamFollower
from headgate.store.store import Store
from headgate.store.streams import StreamCut


def write(store: Store, *numbers: int) -> None:
    with store.writer(STREAM, linger=None) as writer:
        writer.append(keyed(*((f"k{number % 5}", number) for number in numbers)))


def rows(found: StreamEvents | None) -> list[tuple[str, int]]:
    return [] if found is None else list(zip(*found.batch.to_pydict().values(), strict=True))


def all_of(follower: StreamFollower, rows_max: int = 1_000) -> list[tuple[str, int]]:
    """All that there is now."""
    found = []
    while (one := follower.read(rows_max)) is not None:
        found += rows(one)
    return found


def check_order(found: Sequence[tuple[str, int]], expected: Sequence[int]) -> None:
    """Each event once, and those of a key as they were written, which is by their number."""
    assert sorted(number for _, number in found) == sorted(expected)
    for key in {key for key, _ in found}:
        of_key = [number for other, number in found if other == key]
        assert of_key == sorted(of_key), key


def test_a_stream_that_is_scaled_is_followed_in_the_order_of_each_key(store: Store) -> None:  # FW1
    follower = store.follow(STREAM)
    write(store, *range(20))
    store.split(STREAM, 1, 3)
    write(store, *range(20, 40))
    store.resize(STREAM, 2)
    write(store, *range(40, 60))
    check_order(all_of(follower, rows_max=3), range(60))
    store.resize(STREAM, 1)
    write(store, *range(60, 70))
    check_order(all_of(follower), range(60, 70))
    assert not follower.has_ended
    store.seal(STREAM)
    assert all_of(follower) == []
    assert follower.has_ended


def test_where_following_begins_and_ends(store: Store) -> None:  # FW2
    write(store, *range(10))
    store.resize(STREAM, 2)
    middle = store.tail(STREAM)
    latest = store.follow(STREAM, start="latest")
    write(store, *range(10, 20))
    check_order(all_of(latest), range(10, 20))
    check_order(all_of(store.follow(STREAM, start=middle)), range(10, 20))
    before = store.follow(STREAM, end=middle)
    check_order(all_of(before), range(10))
    assert before.has_ended
    now = store.follow(STREAM, start=middle, end="latest")
    store.resize(STREAM, 4)
    write(store, 20)
    check_order([row for one in now for row in rows(one)], range(10, 20))
    check_order(all_of(store.follow(STREAM, start="latest")), [])


def test_following_begins_at_a_date(store: Store) -> None:  # FW2
    clock = HandClock()
    timed = Store(store.root, store._core.catalogue, store._core.storage, clock=clock)
    write(timed, 1, 2)
    clock.advance(60_000)
    write(timed, 3)
    date = dt.datetime.fromtimestamp(clock.date_ms / 1_000)
    check_order(all_of(store.follow(STREAM, start=date)), [3])


def test_a_cut_that_cannot_be_is_refused(store: Store) -> None:  # FW2
    write(store, 1)
    here = store.tail(STREAM)
    with pytest.raises(UsageError, match="a former stream"):
        store.follow(STREAM, start=StreamCut(STREAM, here.stream_id + 1, here.positions))
    for positions in ({0: 99}, {7: 0}):
        with pytest.raises(UsageError, match="comes from another store"):
            store.follow(STREAM, end=StreamCut(STREAM, here.stream_id, positions))
    for wrong in ({"start": "latst"}, {"end": "earliest"}):
        with pytest.raises(UsageError, match="a reader of a stream"):
            store.follow(STREAM, **wrong)  # type: ignore[arg-type]


@pytest.mark.parametrize("dtype", [pa.float64(), pa.float32()], ids=str)
def test_events_whose_key_is_not_a_number_are_those_of_a_key(store: Store, dtype: pa.DataType) -> None:
    schema = pa.schema({"key": dtype, "value": pa.int64()})
    store.create_stream("measured", schema, segments=4, routing_key="key")
    with store.writer("measured") as writer:
        writer.append(pa.record_batch([pa.array([math.nan, 1.0, math.nan, None], dtype), [1, 2, 3, 4]], schema=schema))
    found = list(store.follow("measured", key=math.nan, end="latest"))
    assert [value for one in found for value in one.batch.column("value").to_pylist()] == [1, 3]


def test_what_is_truncated_under_a_follower_is_told(store: Store) -> None:  # FW2
    write(store, *range(20))
    begin, follower = store.head(STREAM), store.follow(STREAM)
    store.truncate(store.tail(STREAM))
    with pytest.raises(TruncatedError):
        all_of(follower)
    with pytest.raises(TruncatedError):
        store.follow(STREAM, start=begin)
    write(store, 20)
    check_order(all_of(store.follow(STREAM)), [20])


def test_columns_that_are_added_come_with_the_first_event_that_has_them(store: Store) -> None:
    write(store, 1)
    follower = store.follow(STREAM)
    first = follower.read()
    assert first is not None
    assert first.batch.schema == KEYED
    with store.writer(STREAM) as before:
        store.update_stream(STREAM, columns=pa.schema({"note": pa.large_string()}))
        before.append(keyed(("k2", 2)))
    assert rows(follower.read()) == [("k2", 2)]
    wide = pa.schema([*KEYED, pa.field("note", pa.large_string())])
    with store.writer(STREAM) as writer:
        writer.append(pa.RecordBatch.from_pylist([{"key": "k1", "value": 3, "note": "new"}], schema=wide))
    found = follower.read()
    assert found is not None
    assert found.batch.to_pylist() == [{"key": "k1", "value": 3, "note": "new"}]
    assert follower.read() is None


def test_a_look_at_new_columns_that_fails_costs_nothing(store: Store) -> None:
    failing = Failing(store._core.catalogue)
    follower = Store(store.root, failing, store._core.storage).follow(STREAM)  # type: ignore[arg-type]
    wide = pa.schema([*KEYED, pa.field("note", pa.large_string())])
    store.update_stream(STREAM, schema=wide)
    with store.writer(STREAM) as writer:
        writer.append(pa.RecordBatch.from_pylist([{"key": "k", "value": 1, "note": "new"}], schema=wide))
    store.seal(STREAM)
    failing.down = {"find_stream"}
    for _ in range(2):
        with pytest.raises(StorageError, match="away"):
            follower.read()
    failing.down.clear()
    assert [one.batch.to_pylist() for one in follower] == [[{"key": "k", "value": 1, "note": "new"}]]


def test_a_call_that_fails_costs_a_follower_nothing(store: Store) -> None:  # whichever it is
    write(store, *range(5))
    store.split(STREAM, 1, 2)
    write(store, *range(5, 10))
    store.merge(STREAM, [segment.segment_id for segment in store.find(STREAM).segments[:2]])
    write(store, *range(10, 15))
    store.seal(STREAM)
    failing = Failing(store._core.catalogue)
    while failing.calls >= failing.at:
        failing = Failing(store._core.catalogue, failing.at + 1)
        flaky = Store(store.root, failing, store._core.storage)  # type: ignore[arg-type]
        follower: StreamFollower | None = None
        found: list[tuple[str, int]] = []
        while follower is None or not follower.has_ended:
            with contextlib.suppress(StorageError):
                follower = follower or flaky.follow(STREAM)
                one = follower.read()
                assert one is not None or follower.has_ended, f"it stands still behind failure {failing.at}"
                found += rows(one)
        check_order(found, range(15))
        assert follower.cut() == store.tail(STREAM)


def test_numbers_that_became_wider_are_followed(store: Store) -> None:
    store.create_stream("narrow", pa.schema({"n": pa.int32()}), segments=1)
    follower = store.follow("narrow")
    store.update_stream("narrow", columns=pa.schema({"n": pa.int64()}))
    with store.writer("narrow") as writer:
        writer.append(pa.RecordBatch.from_pylist([{"n": 1 << 40}], schema=pa.schema({"n": pa.int64()})))
    found = follower.read()
    assert found is not None
    assert found.batch.to_pylist() == [{"n": 1 << 40}]


def test_who_follows_from_its_cut_gets_the_rest(store: Store) -> None:
    write(store, *range(20))
    store.resize(STREAM, 5)
    write(store, *range(20, 40))
    store.resize(STREAM, 1)
    write(store, *range(40, 50))
    follower = store.follow(STREAM)
    for _ in range(60):
        rest = all_of(store.follow(STREAM, start=StreamCut.parse(str(follower.cut()))))
        first = all_of(store.follow(STREAM, end=follower.cut()))
        check_order(first + rest, range(50))
        if follower.read(1) is None:
            break
    assert rest == []
    latest = store.follow(STREAM, start="latest")
    assert all_of(store.follow(STREAM, start=latest.cut())) == []


def test_what_is_given_back_is_returned_again(store: Store) -> None:  # FW5
    write(store, *range(20))
    follower = store.follow(STREAM)
    found = []
    while (one := follower.read(4)) is not None:
        follower.unread(one)
        check_order(all_of(store.follow(STREAM, start=follower.cut())), sorted(set(range(20)) - {n for _, n in found}))
        one = follower.read(2)
        found += rows(one)
    check_order(found, range(20))


def test_what_is_given_back_comes_before_what_other_segments_have(store: Store) -> None:  # FW5
    write(store, *range(40))
    follower = store.follow(STREAM)
    segments = set()
    while (one := follower.read(3)) is not None:
        follower.unread(one)
        assert follower.read(3) == one
        segments.add(one.segment)
    assert len(segments) > 1


def test_only_the_latest_read_is_given_back(store: Store) -> None:  # FW5
    write(store, *range(20))
    follower = store.follow(STREAM)
    first, second = follower.read(1), follower.read(1)
    assert first is not None
    assert second is not None
    with pytest.raises(UsageError, match="only what the latest read"):
        follower.unread(first)
    follower.unread(second)
    with pytest.raises(UsageError, match="only what the latest read"):
        follower.unread(second)


def test_who_waits_asks_the_catalogue_only_when_something_has_changed(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:  # FW6
    follower = store.follow(STREAM)
    assert follower.read() is None
    asked: list[str] = []
    for verb in ("parts", "look", "find_stream", "layout_and_extents"):
        monkeypatch.setattr(store._core.catalogue, verb, lambda *_, verb=verb: asked.append(verb))
    assert follower.read(timeout="60ms") is None
    assert asked == []
    monkeypatch.undo()
    write(store, 1)
    check_order(rows(follower.read(timeout="10s")), [1])


def test_who_waits_rests_until_there_is_more() -> None:  # FW6
    """In the room time passes only while everybody waits."""
    room, found = Room(), list[tuple[list[tuple[str, int]], int]]()

    def read(store: Store) -> None:
        store.create_stream(STREAM, KEYED, segments=2, routing_key="key")
        found.append((rows(store.follow(STREAM).read(timeout="1 hour")), room.now_ms))

    room.process(read, "reader")
    room.process(lambda store: write(store, 1), "writer", after_ms=30_000)
    room.run()
    ((events, read_ms),) = found
    assert events == [("k1", 1)]
    assert 30_000 <= read_ms < 60_000


def test_one_key_is_read_from_its_segments_only(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:  # FW7
    write(store, *range(20))
    store.resize(STREAM, 6)
    write(store, *range(20, 40))
    store.resize(STREAM, 1)
    write(store, *range(40, 50))
    store.resize(STREAM, 3)
    write(store, *range(50, 60))
    mine = [number for number in range(60) if number % 5 == 3]
    opened: set[int] = set()
    real = store._core.catalogue.parts
    monkeypatch.setattr(
        store._core.catalogue, "parts", lambda stream, n, *rest: opened.add(n) or real(stream, n, *rest)
    )
    asked: list[object] = []
    real_extents = store._core.catalogue.extents
    monkeypatch.setattr(store._core.catalogue, "extents", lambda stream: asked.append(stream) or real_extents(stream))
    follower = store.follow(STREAM, key="k3")
    assert all_of(follower, rows_max=2) == [("k3", number) for number in mine]
    assert asked == [], "for a long history that would take long"
    assert len(opened) == 4, "one in each layout"
    bounded = store.follow(STREAM, key="k3", end="latest")
    assert all_of(bounded) == [("k3", number) for number in mine]
    assert bounded.has_ended
    check_order(all_of(store.follow(STREAM, start=follower.cut(), key="k3")), [])
    write(store, *range(60, 65))
    store.seal(STREAM)
    assert all_of(follower) == [("k3", 63)]
    assert follower.has_ended
    assert follower.cut() == store.tail(STREAM), "also in segments without the key"


def test_a_key_that_cannot_be_is_refused(store: Store) -> None:  # FW7
    store.create_stream("plain", KEYED)
    with pytest.raises(UsageError, match="has no routing key"):
        store.follow("plain", key="a")
    store.create_stream("numbers", KEYED, routing_key="value")
    with pytest.raises(UsageError, match="'x' is no value of 'value'"):
        store.follow("numbers", key="x")
    with pytest.raises(UsageError, match="is no value of 'value'"):
        store.follow("numbers", key=1.5)
    with store.writer("numbers") as writer:
        writer.append(keyed(("a", 7), ("b", 8)))
    for key in (7, "7"):
        assert all_of(store.follow("numbers", key=key)) == [("a", 7)]


@settings(max_examples=30)
@given(
    steps=st.lists(st.sampled_from(["write", "split", "merge", "read", "resume", "give back"]), max_size=25),
    data=st.data(),
)
def test_any_history_is_followed_once_and_in_order(
    steps: list[str], data: st.DataObject, tmp_path_factory: pytest.TempPathFactory
) -> None:  # FW1, FW5
    with Store.open(tmp_path_factory.mktemp("followed") / "store") as store:
        store.create_stream(STREAM, KEYED, segments=2, routing_key="key")
        follower, found, written = store.follow(STREAM), list[tuple[str, int]](), 0
        for step in steps:
            layout = store.layout(STREAM)
            present = [segment.segment_id for segment in layout.present]
            match step:
                case "write":
                    write(store, *range(written, written + 7))
                    written += 7
                case "split":
                    store.split(STREAM, data.draw(st.sampled_from(present)))
                case "merge" if len(present) > 1:
                    at = data.draw(st.integers(0, len(present) - 2))
                    store.merge(STREAM, present[at : at + 2])
                case "read":
                    found += rows(follower.read(data.draw(st.integers(1, 5))))
                case "give back":
                    if (one := follower.read(3)) is not None:
                        follower.unread(one)
                case "resume":
                    follower = store.follow(STREAM, start=StreamCut.parse(str(follower.cut())))
                case _:
                    pass
        store.seal(STREAM)
        found += [row for one in follower for row in rows(one)]
        check_order(found, range(written))
