"""Readers of a group that wait, that are busy, and that come back under their name: in the machine room's time."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from contextlib import suppress

import pytest
from tests.store.room import Room
from tests.store.storing import KEYED, STREAM, keyed

from headgate.errors import FencedError, StorageError, UsageError
from headgate.protocol.store.reader_group import Lived
from headgate.store.reader_groups import LOOK_PAUSE_MS, CheckpointMarker, GroupEvents
from headgate.store.store import Store

LEASE_MS = 1_000
HEART = "headgate-group-heart"


def room(segments: int = 1) -> Room:
    found = Room()

    def begin(store: Store) -> None:
        store.create_stream(STREAM, KEYED, segments=segments, routing_key="key")
        store.reader_group("g", STREAM)

    found.process(begin)
    found.run()
    return found


def write(store: Store, *numbers: int) -> None:
    with store.writer(STREAM, linger=None) as writer:
        writer.append(keyed(*((f"k{n}", n) for n in numbers)))


def values(found: object) -> list[int]:
    assert isinstance(found, GroupEvents)
    return list(found.batch.column("value").to_pylist())


def counted(inside: Room) -> Counter[str]:
    """How often each verb of the catalogue is asked for from now on."""
    counts: Counter[str] = Counter()
    for verb in ("changes", "find_group", "change_group", "parts"):
        real = getattr(inside.catalogue, verb)

        def count(*args: object, verb: str = verb, real: Callable[..., object] = real, **options: object) -> object:
            counts[verb] += 1
            return real(*args, **options)

        setattr(inside.catalogue, verb, count)
    return counts


def test_a_read_waits_until_something_comes_or_its_time_is_over() -> None:
    inside, told = room(), []

    def read(store: Store) -> None:
        with store.reader_group("g").join("a") as reader:
            told.append((values(reader.read(timeout="10s")), inside.now_ms))
            told.append((reader.read(timeout="2s"), inside.now_ms))
            told.append((reader.read(), inside.now_ms))

    inside.process(read)
    inside.process(lambda store: write(store, 1, 2), after_ms=700)
    inside.run()
    (first, at_ms), (second, later_ms), third = told
    assert (first, second) == ([1, 2], None)
    assert 700 <= at_ms <= 700 + 2 * LOOK_PAUSE_MS
    assert third == (None, at_ms + 2_000) == (None, later_ms)


def test_a_reader_that_waits_asks_the_store_for_nothing_but_whether_it_has_changed() -> None:
    inside = room()

    def read(store: Store) -> None:
        reader = store.reader_group("g").join("a", lease="10s")
        counts = counted(inside)
        assert reader.read(timeout="60s") is None
        assert counts["changes"] <= 60_000 // LOOK_PAUSE_MS + 200
        assert counts["change_group"] <= 60_000 // 2_500 + 1
        assert counts["find_group"] <= 2 * (counts["change_group"] + 1)
        assert counts["parts"] <= 2 * (counts["change_group"] + 1)

    inside.process(read)
    inside.run()


def test_what_came_while_it_looked_is_not_waited_for() -> None:
    inside, told = room(), []
    real = inside.catalogue.parts

    def read(store: Store) -> None:
        def parts(*args: object) -> object:
            found = real(*args)  # type: ignore[arg-type]
            if not told:
                told.append("somebody writes at this moment")
                write(store, 1)
            return found

        inside.catalogue.parts = parts  # type: ignore[assignment, method-assign]
        assert values(store.reader_group("g").join("a").read(timeout="60s")) == [1]

    inside.process(read)
    inside.run()
    assert inside.now_ms == 0


def test_a_reader_that_waits_hears_of_markers_and_of_segments_that_come_to_it() -> None:  # RG8
    inside, told = room(), []

    def read(store: Store) -> None:
        reader = store.reader_group("g").join("b", commit_every=None)
        told.append(reader.read(timeout="60s"))
        told.append(values(reader.read(timeout="60s")))

    def first(store: Store) -> None:
        group = store.reader_group("g")
        reader = group.join("a")
        write(store, 5)
        inside.elapse(500)
        assert not group.checkpoint("c")
        inside.elapse(500)
        reader.leave(commits=False)

    inside.process(first)
    inside.process(read, after_ms=10)
    inside.run()
    assert told == [CheckpointMarker("c"), [5]]


def test_what_was_returned_is_committed_while_its_reader_waits() -> None:
    inside, cuts = room(), []

    def read(store: Store) -> None:
        write(store, 1, 2, 3)
        reader = store.reader_group("g").join("a", commit_every="1s")
        assert values(reader.read()) == [1, 2, 3]
        assert reader.read(timeout="5s") is None

    def look(store: Store) -> None:
        for _ in range(2):
            cuts.append(store.reader_group("g").cut()[STREAM].positions)
            inside.elapse(1_500)

    inside.process(read)
    inside.process(look, after_ms=500)
    inside.run()
    assert cuts == [{0: 0}, {0: 3}]


def test_nobody_waits_for_what_cannot_come() -> None:  # RG5
    inside = room()

    def read(store: Store) -> None:
        write(store, 1)
        store.seal(STREAM)
        reader = store.reader_group("g").join("a", commit_every="0ms")
        assert values(reader.read(timeout="60s")) == [1]
        assert reader.read(timeout="60s") is None
        assert reader.has_ended
        with pytest.raises(UsageError, match="timeout"):
            reader.read(timeout="soon")

    inside.process(read)
    inside.run()
    assert inside.now_ms < LEASE_MS


def test_who_is_fenced_while_it_waits_is_told() -> None:  # RG12
    inside, told = room(), []

    def read(store: Store) -> None:
        reader = store.reader_group("g").join("a")
        with pytest.raises(FencedError, match="join again"):
            reader.read(timeout="60s")
        told.append(inside.now_ms)

    inside.process(read)
    inside.process(lambda store: store.reader_group("g").reset(), after_ms=800)
    inside.run()
    assert told[0] <= 800 + 2 * LOOK_PAUSE_MS


def busy(inside: Room, busy_ms: int, busy_at_most: str | None) -> tuple[list[str], list[str]]:
    """Two readers, of which one is busy: who is in the group behind that, and the busy one's threads."""
    told: list[str] = []

    def work(store: Store) -> None:
        reader = store.reader_group("g").join("busy", lease=f"{LEASE_MS}ms", busy_at_most=busy_at_most)
        reader.read()
        inside.elapse(busy_ms)
        told.extend(store.reader_group("g").readers())
        inside.elapse(100 * LEASE_MS)

    def watch(store: Store) -> None:
        reader = store.reader_group("g").join("other", lease=f"{LEASE_MS}ms")
        while inside.now_ms < busy_ms + LEASE_MS:
            reader.read(timeout="50ms")

    process = inside.process(work)
    inside.process(watch)
    inside.run(busy_ms + LEASE_MS)
    return told, inside.threads_of(process)


def test_a_thread_says_that_a_busy_reader_lives_for_as_long_as_it_may_be_busy() -> None:
    assert busy(room(), 5 * LEASE_MS, "10s") == (["busy", "other"], ["main", HEART])
    assert busy(room(), 5 * LEASE_MS, None) == (["other"], ["main"])
    told, threads = busy(room(), 6 * LEASE_MS, "3s")
    assert (told, threads) == (["other"], ["main"])


def test_a_commit_is_a_call_too_after_which_a_reader_may_be_busy() -> None:
    inside, told = room(), []

    def work(store: Store) -> None:
        reader = store.reader_group("g").join("busy", lease=f"{LEASE_MS}ms", commit_every=None, busy_at_most="3s")
        for _ in range(5):
            inside.elapse(2 * LEASE_MS)
            reader.commit()
        told.extend(store.reader_group("g").readers())

    def watch(store: Store) -> None:
        reader = store.reader_group("g").join("other", lease=f"{LEASE_MS}ms")
        while not told:
            reader.read(timeout="50ms")

    inside.process(work)
    inside.process(watch)
    inside.run()
    assert told == ["busy", "other"]


def test_whoever_was_busy_for_too_long_is_refused_and_does_not_come_back() -> None:  # RG12
    inside, told = room(), []

    def work(store: Store) -> None:
        group = store.reader_group("g")
        reader = group.join("busy", lease=f"{LEASE_MS}ms", busy_at_most="2s")
        inside.elapse(10 * LEASE_MS)
        for call in (reader.read, reader.commit, reader.heartbeat, reader.leave):
            with pytest.raises(FencedError, match="join again"):
                call()
            inside.elapse(LEASE_MS)
            assert list(group.readers()) == ["other"]
        told.append("refused")

    def watch(store: Store) -> None:
        with store.reader_group("g").join("other", lease=f"{LEASE_MS}ms") as reader:
            while not told:
                reader.read(timeout="50ms")

    process = inside.process(work)
    inside.process(watch)
    inside.run()
    assert (told, inside.threads_of(process)) == (["refused"], [])


def test_the_thread_ends_when_its_reader_is_out_of_the_group() -> None:  # RG12
    inside, threads = room(), []

    def work(store: Store) -> None:
        group = store.reader_group("g")
        reader = group.join("a", lease=f"{LEASE_MS}ms", busy_at_most="1h")
        reader.read()
        group.reset()
        inside.elapse(LEASE_MS)
        threads.extend(inside.threads_of(process))
        with pytest.raises(FencedError):
            reader.read()
        inside.elapse(LEASE_MS)
        threads.extend(inside.threads_of(process))

    process = inside.process(work)
    inside.run()
    assert threads == []
    assert inside.now_ms < 3 * LEASE_MS


def test_the_thread_ends_with_its_reader_and_goes_on_after_a_failure() -> None:
    inside, beats = room(), []
    real = inside.catalogue.change_group

    def change(name: str, event: object) -> object:
        if isinstance(event, Lived):
            beats.append(inside.now_ms)
            if len(beats) == 2:
                raise StorageError("write", "catalogue", "disk I/O error")
        return real(name, event)  # type: ignore[arg-type]

    inside.catalogue.change_group = change  # type: ignore[assignment, method-assign]

    def work(store: Store) -> None:
        with store.reader_group("g").join("a", lease=f"{LEASE_MS}ms", busy_at_most="1h") as reader:
            reader.read()
            inside.elapse(LEASE_MS + 50)
            assert len(beats) == 4
        assert inside.threads_of(process) == []
        reader.leave(commits=False)
        with pytest.raises(FencedError):
            reader.read()
        assert inside.threads_of(process) == []

    process = inside.process(work)
    inside.run()
    assert inside.now_ms < 2 * LEASE_MS
    assert len(beats) == 4


def test_the_thread_ends_when_nobody_has_its_reader_any_more() -> None:
    """It was dropped without ``leave``: others get what it had when its lease is over, not after ``busy_at_most``."""
    inside, threads, there = room(), [], []

    def work(store: Store) -> None:
        reader = store.reader_group("g").join("dropped", lease=f"{LEASE_MS}ms", busy_at_most="1h")
        reader.read()
        inside.elapse(2 * LEASE_MS)
        threads.extend(inside.threads_of(process))
        del reader
        inside.elapse(LEASE_MS)
        assert HEART not in inside.threads_of(process)

    def watch(store: Store) -> None:
        with store.reader_group("g").join("other", lease=f"{LEASE_MS}ms") as reader:
            while inside.now_ms < 5 * LEASE_MS:
                reader.read(timeout="50ms")
                if inside.now_ms < 2 * LEASE_MS:
                    assert len(store.reader_group("g").readers()) == 2
            there.extend(store.reader_group("g").readers())

    process = inside.process(work)
    inside.process(watch)
    inside.run()
    assert HEART in threads
    assert there == ["other"]


def test_a_name_is_free_when_its_reader_has_been_silent_for_its_lease() -> None:
    inside, told = room(), []

    def work(store: Store) -> None:
        group = store.reader_group("g")
        group.join("a", lease="10s")  # and its process dies; nobody else is there
        with pytest.raises(UsageError, match="timeout"):
            group.join("a")
        again = store.reader_group("g").join("a", timeout="30s")
        told.append((again.reader_id, inside.now_ms))
        with pytest.raises(UsageError, match="in the group already"):
            group.join("a", timeout="5s")
        told.append(("refused", inside.now_ms))

    inside.process(work)
    inside.run()
    (_, joined_ms), (_, refused_ms) = told
    assert 10_000 <= joined_ms <= 13_000
    assert refused_ms == joined_ms + 5_000


def test_who_has_the_name_and_lives_keeps_it() -> None:
    inside, told = room(), []

    def live(store: Store) -> None:
        with store.reader_group("g").join("a", lease=f"{LEASE_MS}ms") as reader:
            while not told:
                reader.read(timeout="100ms")

    def work(store: Store) -> None:
        with pytest.raises(UsageError, match="in the group already"):
            store.reader_group("g").join("a", timeout="20s")
        told.append(inside.now_ms)

    inside.process(live)
    inside.process(work, after_ms=100)
    inside.run()
    assert told == [20_100]


def test_whoever_waits_for_a_checkpoint_takes_dead_readers_for_dead() -> None:  # RG8, RG13
    inside, told = room(), []

    def work(store: Store) -> None:
        group = store.reader_group("g")
        group.join("dead", lease=f"{LEASE_MS}ms")
        while not group.checkpoint("c"):
            inside.elapse(100)
        told.append((inside.now_ms, dict(group.readers())))

    inside.process(work)
    inside.run()
    ((at_ms, readers),) = told
    assert LEASE_MS <= at_ms <= 2 * LEASE_MS
    assert readers == {}


def test_whoever_is_refused_a_checkpoint_watches_too() -> None:  # RG8, RG13
    inside, told = room(), []

    def work(store: Store) -> None:
        group = store.reader_group("g")
        group.join("dead", lease=f"{LEASE_MS}ms")
        for name in ("c", "d", "e"):
            group.checkpoint(name)
        while not told:
            inside.elapse(100)
            with suppress(UsageError):  # three are not complete
                told.append(group.checkpoint("f"))

    inside.process(work)
    inside.run()
    assert told == [True]
    assert LEASE_MS <= inside.now_ms <= 2 * LEASE_MS
