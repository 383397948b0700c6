"""What becomes of calls whose tasks are cancelled (docs/spec/stream-clients.md)."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from tests.api.async_stores import Held, inner, run
from tests.api.test_async_store import numbers, write
from tests.store.storing import KEYED, STREAM, keyed

import headgate as hg
from headgate.store.follower import StreamFollower
from headgate.store.reader_groups import GroupReader, ReaderGroup
from headgate.store.writer import StreamWriter


async def cancelled(task: asyncio.Task[Any], held: Held, times: int = 1) -> None:
    """Cancel a task while its call is made, and let the call end."""
    await held.begun()
    for _ in range(times):
        task.cancel()
        await asyncio.sleep(0.01)  # not a wait for anything
        assert not task.done(), "its call has not ended"
    held.let_go()
    with pytest.raises(asyncio.CancelledError):
        await task


def hold(monkeypatch: pytest.MonkeyPatch, owner: Any, name: str) -> Held:
    """Have the next calls of a method wait."""
    held = Held(getattr(owner, name))
    monkeypatch.setattr(owner, name, lambda *args, **kwargs: held(*args, **kwargs))
    return held


@pytest.mark.parametrize("times", [1, 3])
def test_who_is_cancelled_in_a_call_ends_when_it_has_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, times: int
) -> None:
    async def test(store: hg.AsyncStore) -> None:
        held = Held(inner(store).create_stream)
        await cancelled(asyncio.create_task(store._run(lambda: held("other", KEYED))), held, times)
        assert "other" in [info.name for info in await store.list_streams()]

    run(tmp_path, test)


def test_a_call_that_has_not_begun_is_never_carried_out(tmp_path: Path) -> None:
    async def test(store: hg.AsyncStore) -> None:
        held, late = Held(lambda: None), Held(lambda: None)
        first = asyncio.create_task(store._run(held))
        await held.begun()
        second = asyncio.create_task(store._run(late))  # there is one thread
        await asyncio.sleep(0.01)  # not a wait for anything
        second.cancel()
        with pytest.raises(asyncio.CancelledError):
            await second
        held.let_go()
        await first
        await store.list_streams()
        assert late.count == 0

    run(tmp_path, test, threads=1)


def test_a_time_limit_of_asyncio_is_one(tmp_path: Path) -> None:
    async def test(store: hg.AsyncStore) -> None:
        async with store.follow(STREAM) as events:
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0.02):
                    await events.read()
            await write(store, 1)
            assert numbers(await asyncio.wait_for(events.read(), 60)) == [1]

    run(tmp_path, test)


def test_what_a_cancelled_call_has_made_is_taken_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def test(store: hg.AsyncStore) -> None:
        group = await store.reader_group("g", STREAM)
        with pytest.MonkeyPatch.context() as patch:
            held = hold(patch, ReaderGroup, "join")
            await cancelled(asyncio.create_task(group.join("r").__aenter__()), held)
        assert await group.readers() == {}
        with pytest.MonkeyPatch.context() as patch:
            held = hold(patch, hg.Store, "begin_shared")
            await cancelled(asyncio.create_task(store.begin_shared(STREAM)), held)
        assert [info.status.value for info in await store.list_transactions(stream=STREAM)] == ["aborted"]
        closed: list[str] = []
        with pytest.MonkeyPatch.context() as patch:
            held = hold(patch, hg.Store, "open")
            patch.setattr(hg.Store, "close", lambda one: closed.append(one.root))
            await cancelled(asyncio.create_task(hg.AsyncStore.open(tmp_path / "other").__aenter__()), held)
        assert closed == [str(tmp_path / "other")]

    run(tmp_path, test)


def test_a_cancelled_read_loses_nothing(tmp_path: Path) -> None:
    async def test(store: hg.AsyncStore) -> None:
        await write(store, *range(10))
        async with store.follow(STREAM) as events:
            found = numbers(await events.read(3))
            with pytest.MonkeyPatch.context() as patch:
                held = hold(patch, StreamFollower, "read")
                await cancelled(asyncio.create_task(events.read(3)), held, times=2)
            while (one := await events.read(3, timeout=0)) is not None:
                found += numbers(one)
        assert sorted(found) == list(range(10))

    run(tmp_path, test)


def test_what_a_cancelled_read_had_found_is_not_committed(tmp_path: Path) -> None:
    async def test(store: hg.AsyncStore) -> None:
        await write(store, *range(10))
        group = await store.reader_group("g", STREAM)
        async with group.join("r", commit_every=None) as reader:
            found = numbers(await reader.read(3))
            with pytest.MonkeyPatch.context() as patch:
                held = hold(patch, GroupReader, "read")
                await cancelled(asyncio.create_task(reader.read(3)), held)
            await reader.commit()
            (cut,) = (await group.cut()).values()
            assert sum(cut.positions.values()) == len(found)
            while (one := await reader.read(3, timeout=0)) is not None:
                found += numbers(one)
        assert sorted(found) == list(range(10))

    run(tmp_path, test)


def test_a_marker_that_nobody_was_told_of_is_not_passed(tmp_path: Path) -> None:
    async def test(store: hg.AsyncStore) -> None:
        group = await store.reader_group("g", STREAM)
        async with group.join("r", commit_every=None) as reader:
            assert not await group.checkpoint("c")
            with pytest.MonkeyPatch.context() as patch:
                held = hold(patch, GroupReader, "read")
                await cancelled(asyncio.create_task(reader.read()), held)
            await reader.commit()
            assert not await group.checkpoint("c")
            assert await reader.read() == hg.CheckpointMarker("c")
            await reader.commit()
            assert await group.checkpoint("c")

    run(tmp_path, test)


def test_who_is_cancelled_in_its_block_leaves_the_group_and_commits_nothing(tmp_path: Path) -> None:
    async def test(store: hg.AsyncStore) -> None:
        await write(store, *range(10))
        group = await store.reader_group("g", STREAM)
        has_read = asyncio.Event()

        async def works_for_long() -> None:
            async with group.join("r") as reader:
                await reader.read()
                has_read.set()
                await asyncio.sleep(3_600)  # not a wait for anything

        working = asyncio.create_task(works_for_long())
        await has_read.wait()
        working.cancel()
        with pytest.raises(asyncio.CancelledError):
            await working
        assert await group.readers() == {}
        async with group.join("r") as reader:
            found = numbers(await reader.read())
            while (one := await reader.read(timeout=0)) is not None:
                found += numbers(one)
        assert sorted(found) == list(range(10))

    run(tmp_path, test)


def test_an_append_that_was_cancelled_is_repeated_by_its_number(tmp_path: Path) -> None:
    async def test(store: hg.AsyncStore) -> None:
        async with store.writer(STREAM, writer_id="w") as writer:
            with pytest.MonkeyPatch.context() as patch:
                held = hold(patch, StreamWriter, "append")
                await cancelled(asyncio.create_task(writer.append(keyed(("a", 1)))), held)
            assert writer.next_sequence == 2, "it was taken"
            waiting = asyncio.create_task(writer.append(keyed(("a", 2))))
            await asyncio.sleep(0)  # not a wait for anything
            waiting.cancel()
            with pytest.raises(asyncio.CancelledError):
                await waiting
            was_taken = writer.next_sequence == 3
            for number in (1, 2):
                await writer.append(keyed(("a", number)), number)
            assert writer.next_sequence == 3
            assert was_taken in (True, False)
        async with store.follow(STREAM, end="latest") as events:
            assert [number async for one in events for number in numbers(one)] == [1, 2]

    run(tmp_path, test)


def test_who_waits_until_it_is_durable_is_cancelled_at_once(tmp_path: Path) -> None:
    async def test(store: hg.AsyncStore) -> None:
        async with store.writer(STREAM, linger="1 hour") as writer:
            waiting = asyncio.create_task(writer.append(keyed(("a", 1))))
            while writer.next_sequence == 1:
                await asyncio.sleep(0.001)
            waiting.cancel()
            with pytest.raises(asyncio.CancelledError):
                await waiting
            assert (await store.describe(STREAM)).events_count == 0
            await writer.flush()
        assert (await store.describe(STREAM)).events_count == 1, "as if it had not been cancelled"

    run(tmp_path, test)


def test_a_cancelled_write_of_a_transaction_is_repeated_by_its_number(tmp_path: Path) -> None:
    async def test(store: hg.AsyncStore) -> None:
        transaction = await store.begin_shared(STREAM)
        async with transaction.writer("p") as writer:
            with pytest.MonkeyPatch.context() as patch:
                held = hold(patch, hg.TransactionWriter, "flush")
                await writer.write(keyed(("a", 1)))
                flushing = asyncio.create_task(store._calls.run(lambda: held(writer._blocking)))
                await cancelled(flushing, held)
            await writer.write(keyed(("a", 1)), 1)
            await writer.write(keyed(("a", 2)), 2)
        await transaction.commit()
        async with store.follow(STREAM, end="latest") as events:
            assert [number async for one in events for number in numbers(one)] == [1, 2]

    run(tmp_path, test)


def test_an_error_of_a_cancelled_call_is_nobodys(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    async def test(store: hg.AsyncStore) -> None:
        held = Held(inner(store).describe)
        await cancelled(asyncio.create_task(store._run(lambda: held("missing"))), held)
        with pytest.raises(hg.UsageError, match="does not exist"):
            await store.describe("missing")

    run(tmp_path, test)
    assert "exception" not in caplog.text


def test_wrong_events_are_refused_and_nothing_is_taken(tmp_path: Path) -> None:
    async def test(store: hg.AsyncStore) -> None:
        async with store.writer(STREAM, writer_id="w") as writer:
            with pytest.raises(hg.UsageError):
                await writer.append(pa.record_batch({"other": [1]}))
            assert writer.next_sequence == 1

    run(tmp_path, test)
