"""The store for tasks of asyncio (docs/spec/stream-clients.md, AC)."""

from __future__ import annotations

import asyncio
import inspect
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from tests.api.async_stores import PATIENCE_S, Held, Watched, inner, run
from tests.store.storing import STREAM, keyed

import headgate as hg
from headgate.api import async_calls
from headgate.api.async_calls import AsyncProxy
from headgate.api.async_store import (
    AsyncGroupReader,
    AsyncReaderGroup,
    AsyncSharedTransaction,
    AsyncStreamFollower,
    AsyncStreamWriter,
    AsyncTransactionWriter,
)
from headgate.store.follower import StreamEvents, StreamFollower
from headgate.store.reader_groups import GroupEvents
from headgate.store.writer import StreamWriter


def numbers(found: StreamEvents | GroupEvents | hg.CheckpointMarker | None) -> list[int]:
    assert isinstance(found, StreamEvents | GroupEvents)
    return list(found.batch.column("value").to_pylist())


async def write(store: hg.AsyncStore, *values: int) -> None:
    async with store.writer(STREAM) as writer:
        await writer.append(keyed(*((f"k{value % 5}", value) for value in values)))


def test_what_is_appended_is_followed_until_the_end(tmp_path: Path) -> None:
    async def test(store: hg.AsyncStore) -> None:
        async def read() -> list[int]:
            async with store.follow(STREAM) as events:
                return [number async for found in events for number in numbers(found)]

        reading = asyncio.create_task(read())
        await write(store, 1, 2)
        await store.resize(STREAM, 3)
        await write(store, 3)
        await store.seal(STREAM)
        assert sorted(await reading) == [1, 2, 3]
        assert (await store.describe(STREAM)).events_count == 3
        assert await store.fsck() == []

    run(tmp_path, test)


def test_a_group_is_read_by_tasks(tmp_path: Path) -> None:
    async def test(store: hg.AsyncStore) -> None:
        await write(store, *range(20))
        await store.seal(STREAM)
        group = await store.reader_group("g", STREAM)

        async def read(name: str) -> list[int]:
            async with group.join(name) as reader:
                return [number async for found in reader for number in numbers(found)]

        first, second = await asyncio.gather(read("a"), read("b"))
        assert sorted(first + second) == list(range(20))
        assert await group.unread_bytes() == 0
        assert await group.readers() == {}

    run(tmp_path, test)


def test_a_transaction_is_written_by_tasks(tmp_path: Path) -> None:
    async def test(store: hg.AsyncStore) -> None:
        transaction = await store.begin_shared(STREAM)

        async def part(name: str, value: int) -> None:
            there = await store.transaction(STREAM, transaction.id)
            async with there.writer(name) as writer:
                await writer.write(keyed(("k", value)))
                assert (writer.participant, writer.next_sequence) == (name, 2)

        await asyncio.gather(*(part(f"w{value}", value) for value in range(5)))
        await transaction.prepare()
        assert (await transaction.status()).events_count == 5
        await transaction.commit()
        assert (await store.describe(STREAM)).events_count == 5

    run(tmp_path, test)


def test_no_call_is_made_in_the_thread_of_the_loop(tmp_path: Path) -> None:
    """Every call of the catalogue and the storage tells where it is made: no time is measured."""
    threads: set[int] = set()

    async def test(store: hg.AsyncStore) -> None:
        blocking = inner(store)
        blocking._core.catalogue = Watched(blocking._core.catalogue, threads)
        blocking._core.storage = Watched(blocking._core.storage, threads)
        async with store.writer(STREAM, writer_id="w") as writer:
            await writer.append(keyed(("a", 1)))
            submitted = await writer.submit(keyed(("b", 2)))
            await writer.flush()
            await submitted
        async with store.follow(STREAM) as events:
            assert await events.read() is not None
            await events.read(timeout="30ms")
            await events.cut()
        group = await store.reader_group("g", STREAM)
        async with group.join("r", lease="50ms", timeout="1s") as reader:
            assert await reader.read() is not None
            await reader.read(timeout="60ms")
            await reader.commit()
            await reader.heartbeat()
        await group.checkpoint("c")
        await group.describe()
        transaction = await store.begin_shared(STREAM)
        async with transaction.writer() as participant:
            await participant.write(keyed(("a", 3)))
            await participant.ping()
        await transaction.commit()
        await store.describe(STREAM)
        await store.list_streams()

    run(tmp_path, test)
    assert threads
    assert threading.get_ident() not in threads


def test_the_loop_goes_on_while_a_call_does_not_return(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def test(store: hg.AsyncStore) -> None:
        held = Held(inner(store).describe)
        monkeypatch.setattr(hg.Store, "describe", held)
        asked = asyncio.create_task(AsyncProxy(store._calls, None)._run(lambda: held(STREAM)))
        await held.begun()
        await write(store, 1)  # in other threads, for this task
        assert not asked.done()
        held.let_go()
        assert (await asked).events_count == 1

    run(tmp_path, test)


def test_appends_are_in_the_order_in_which_tasks_made_them(tmp_path: Path) -> None:
    async def test(store: hg.AsyncStore) -> None:
        async with store.writer(STREAM, linger="1ms") as writer:
            await asyncio.gather(*(writer.append(keyed(("k", number))) for number in range(60)))
        async with store.follow(STREAM, end="latest") as events:
            found = [number async for one in events for number in numbers(one)]
        assert found == list(range(60))

    run(tmp_path, test)


def test_calls_of_one_reader_do_not_overlap(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def test(store: hg.AsyncStore) -> None:
        await write(store, 1)
        async with store.follow(STREAM) as events:
            held = Held(StreamFollower.read)
            monkeypatch.setattr(StreamFollower, "read", lambda *args, **kwargs: held(*args, **kwargs))
            first, second = asyncio.create_task(events.read()), asyncio.create_task(events.cut())
            await held.begun()
            await asyncio.sleep(0.02)  # not a wait for anything
            has_overlapped = second.done()
            held.let_go()
            assert not has_overlapped
            assert numbers(await first) == [1]
            assert sum((await second).positions.values()) == 1

    run(tmp_path, test)


def test_many_wait_with_few_threads(tmp_path: Path) -> None:
    others = set(threading.enumerate())  # of stores that were closed just now

    async def test(store: hg.AsyncStore) -> None:
        readers = [await store.follow(STREAM, start="latest") for _ in range(50)]
        waiting = [asyncio.create_task(reader.read()) for reader in readers]
        await asyncio.sleep(0.05)  # not a wait for anything
        mine = [
            x for x in set(threading.enumerate()) - others if x.name.startswith(("headgate-async", "headgate-bell"))
        ]
        assert len(mine) <= 3
        await write(store, 7)
        assert [numbers(found) for found in await asyncio.gather(*waiting)] == [[7]] * 50

    run(tmp_path, test, threads=2)


def test_the_thread_that_looks_ends_when_nobody_waits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(async_calls, "IDLE_S", 0.02)

    async def test(store: hg.AsyncStore) -> None:
        async with store.follow(STREAM) as events:
            for number in range(3):
                assert await events.read(timeout="20ms") is None
                while any(x.name == "headgate-bell" for x in threading.enumerate()):
                    await asyncio.sleep(0.01)
                await write(store, number)
                assert numbers(await events.read()) == [number]

    run(tmp_path, test)


def test_what_comes_between_a_look_and_the_wait_is_not_missed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def test(store: hg.AsyncStore) -> None:
        real_read, real_wait = StreamFollower.read, async_calls.ChangePoller.wait
        events = await store.follow(STREAM)
        await write(store, 1)
        waits: list[float | None] = []

        def read(self: StreamFollower, rows_max: int) -> StreamEvents | None:
            found = real_read(self, rows_max)
            if found is None and not waits:
                with inner(store).writer(STREAM) as writer:  # right behind the look
                    writer.append(keyed(("k", 2)))
            return found

        async def wait(self: async_calls.ChangePoller, seen: int, timeout_s: float | None) -> None:
            waits.append(timeout_s)
            assert seen != inner(store).changes()
            await real_wait(self, seen, timeout_s)

        monkeypatch.setattr(StreamFollower, "read", read)
        monkeypatch.setattr(async_calls.ChangePoller, "wait", wait)
        assert numbers(await events.read()) == [1]
        assert numbers(await events.read()) == [2]
        assert waits == [None], "nothing but the change has woken it"

    run(tmp_path, test)


def test_who_waits_in_a_group_lives(tmp_path: Path) -> None:
    async def test(store: hg.AsyncStore) -> None:
        group = await store.reader_group("g", STREAM)

        def beats() -> int:
            return inner(store)._core.catalogue.find_group("g").group.readers["r"].beats

        async with group.join("r", lease="400ms", takes_over=True) as reader:
            waiting = asyncio.create_task(reader.read())
            while await store._run(beats) < 3:
                await asyncio.sleep(0.01)
            assert not waiting.done()
            await write(store, 1)
            assert numbers(await waiting) == [1]

    run(tmp_path, test)


def test_who_joins_waits_for_a_name_without_a_thread(tmp_path: Path) -> None:
    async def test(store: hg.AsyncStore) -> None:
        group = await store.reader_group("g", STREAM)
        dead = await group.join("r", lease="100ms")
        joining = [asyncio.create_task(group.join("r", timeout=f"{PATIENCE_S:.0f}s").__aenter__())]
        joined = await joining[0]
        with pytest.raises(hg.FencedError):
            await dead.read(timeout=0)
        with pytest.raises(hg.UsageError, match="is in"):
            await group.join("r", timeout="1ms")
        await joined.leave()

    run(tmp_path, test, threads=1)


def test_closing_waits_for_calls_that_were_begun(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    others = set(threading.enumerate())

    async def test(store: hg.AsyncStore) -> None:
        held = Held(hg.Store.list_streams)
        asked = asyncio.create_task(store._calls.run(lambda: held(inner(store))))
        await held.begun()
        closing = asyncio.create_task(store.close())
        await asyncio.sleep(0.02)  # not a wait for anything
        assert not closing.done()
        with pytest.raises(hg.UsageError, match="the store is closed"):
            await store.list_streams()
        held.let_go()
        await closing
        assert [info.name for info in await asked] == [STREAM]
        await store.close()

    run(tmp_path, test)
    assert not [x for x in set(threading.enumerate()) - others if x.name == "headgate-bell"]


def test_a_closed_store_has_no_thread_that_looks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not even one that was about to end, and has its last turn late."""
    thread_run = threading.Thread.run

    def late(self: threading.Thread) -> None:
        thread_run(self)
        if self.name == "headgate-bell":
            time.sleep(1)  # slow work: not a wait for anything

    async def test(store: hg.AsyncStore) -> None:
        async with store.follow(STREAM) as events:
            assert await events.read(timeout="300ms") is None
            await asyncio.sleep(0.1)  # nobody waits: not a wait for anything

    monkeypatch.setattr(threading.Thread, "run", late)
    monkeypatch.setattr(async_calls, "IDLE_S", 0)
    others = set(threading.enumerate())
    run(tmp_path, test)
    assert not [x for x in set(threading.enumerate()) - others if x.name == "headgate-bell"]


def test_a_store_belongs_to_its_loop(tmp_path: Path) -> None:
    async def opened() -> hg.AsyncStore:
        return await hg.AsyncStore.open(tmp_path / "store")

    store = asyncio.run(opened())
    with pytest.raises(hg.UsageError, match="the event loop in which it was opened"):
        asyncio.run(store.list_streams())
    with pytest.raises(hg.UsageError, match="at least one thread"):
        run(tmp_path, hg.AsyncStore.close, threads=0)
    inner(store).close()


OF_PIPELINES = """
changes collect_orphans exists find is_untouched look_after reader serve shared
"""
"""What is for pipelines, servers, or the offline check; and single segments, which ``follow`` reads."""


@pytest.mark.parametrize(
    ("blocking", "mine", "others"),
    [
        (hg.Store, hg.AsyncStore, OF_PIPELINES),
        (hg.ReaderGroup, AsyncReaderGroup, "look_for"),
        (hg.GroupReader, AsyncGroupReader, "unread due_in_ms"),
        (hg.SharedTransaction, AsyncSharedTransaction, ""),
        (hg.TransactionWriter, AsyncTransactionWriter, ""),
        (StreamWriter, AsyncStreamWriter, ""),
        (StreamFollower, AsyncStreamFollower, "unread"),
    ],
)
def test_tasks_can_do_what_plain_functions_can(blocking: type[Any], mine: type[Any], others: str) -> None:
    def names(kind: type[Any]) -> set[str]:
        return {name for name, _ in inspect.getmembers(kind) if not name.startswith("_")}

    assert names(blocking) - names(mine) == set(others.split())
    for name in names(blocking) & names(mine):
        theirs, ours = getattr(blocking, name), getattr(mine, name)
        if callable(theirs) and name not in ("open", "append"):
            wanted, given = (list(inspect.signature(x).parameters) for x in (theirs, ours))
            assert given == wanted, name
