"""``map_async``, with a service whose answers the test gives: nothing here waits for time."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Coroutine
from typing import Any

import pyarrow as pa
import pytest
from tests.operators.harness import BORN_MS, Harness, Recorder, encoded

from headgate.environment import SystemThreads
from headgate.errors import BadRecord, StorageError, UsageError
from headgate.operators.async_map import AsyncFunction, AsyncMapSpec
from headgate.operators.base import OperatorContext, RestoredState
from headgate.operators.keys import partition
from headgate.operators.user_functions import UserFunctionError

SCHEMA = pa.schema([("x", pa.int64()), ("k", pa.int64())])


class Call:
    """One attempt that the service was asked for."""

    def __init__(self, call: Callable[[], Coroutine[Any, Any, Any]], done: Callable[..., None]) -> None:
        self._coroutine = call()
        self._done = done
        self.is_cancelled = False

    def answer(self) -> None:
        """Let the function return."""
        try:
            self._coroutine.send(None)
        except StopIteration as end:
            self._done(end.value, None)
        except Exception as error:
            self._done(None, error)

    def fail(self, error: BaseException) -> None:
        self._coroutine.close()
        self._done(None, error)

    def cancel(self) -> None:
        self.is_cancelled = True
        self._coroutine.close()


class Service(SystemThreads):
    """Threads whose event loop runs nothing by itself, but what opens and closes clients."""

    def __init__(self) -> None:
        self.calls: list[Call] = []
        self.is_closed = False

    def event_loop(self, name: str) -> Any:
        return self

    def submit(self, call: Callable[[], Coroutine[Any, Any, Any]], done: Callable[..., None]) -> Callable[[], None]:
        made = Call(call, done)
        if getattr(call, "__name__", "") in ("open", "close"):
            made.answer()
        else:
            self.calls.append(made)
        return made.cancel

    def close(self) -> None:
        self.is_closed = True


class Subtask:
    """An operator with its service."""

    def __init__(
        self,
        spec: AsyncMapSpec,
        states: list[RestoredState] | None = None,
        *,
        subtask: tuple[int, int] = (0, 1),
        diverts: bool = False,
    ) -> None:
        self.service = Service()
        self.now_ms = 1_000
        self.out = Recorder(diverts)
        self.context = OperatorContext("p", "node", *subtask, 128, lambda: self.now_ms)
        self.context.threads = self.service
        self.context.diverts = diverts
        self.context.wall_ms = lambda: BORN_MS
        self.operator = spec.build()
        self.operator.open(self.context, self.out)
        if states:
            self.operator.restore(states)
        self.tick()

    advance = Harness.advance
    snapshot = Harness.snapshot

    def send(self, *rows: dict[str, Any]) -> None:
        self.operator.process(batch(*rows))

    def tick(self) -> None:
        self.advance(0)

    @property
    def calls(self) -> list[Call]:
        return self.service.calls

    def answer(self, *numbers: int) -> None:
        for number in numbers:
            self.calls[number].answer()
        self.tick()

    def found(self) -> list[int]:
        return [row["x"] for row in self.out.rows()]


def batch(*rows: dict[str, Any]) -> pa.RecordBatch:
    return pa.RecordBatch.from_pylist(list(rows), schema=SCHEMA)


def row(x: int) -> dict[str, Any]:
    return {"x": x, "k": x % 4}


async def doubled(row: dict[str, Any]) -> Any:
    return {**row, "x": row["x"] * 2}


def test_ordered_results_leave_in_the_order_of_the_records() -> None:
    one = Subtask(AsyncMapSpec(doubled, SCHEMA))
    one.send(row(1), row(2), row(3))
    one.answer(2, 1)
    assert one.found() == []
    one.answer(0)
    assert one.found() == [2, 4, 6]


def test_unordered_results_leave_at_once_but_not_over_a_watermark() -> None:
    one = Subtask(AsyncMapSpec(doubled, SCHEMA, is_ordered=False))
    one.send(row(1), row(2))
    one.operator.on_watermark(10)
    one.send(row(3))
    one.operator.on_idle(True)
    one.answer(2, 1)
    assert one.found() == [4]
    assert one.out.log == [("batch", 1)]
    one.answer(0)
    assert one.found() == [4, 2, 6]
    assert one.out.log == [("batch", 1), ("batch", 1), ("watermark", 10), ("batch", 1), ("idle", True)]


def test_event_time_passes_at_once_where_nothing_waits() -> None:
    one = Subtask(AsyncMapSpec(doubled, SCHEMA))
    one.operator.on_watermark(5)
    one.operator.on_idle(True)
    assert one.out.log == [("watermark", 5), ("idle", True)]


def test_no_more_calls_run_than_the_limit_and_input_waits() -> None:
    one = Subtask(AsyncMapSpec(doubled, SCHEMA, limit=2))
    assert not one.operator.is_full
    one.send(*map(row, range(5)))
    assert len(one.calls) == 2
    assert one.operator.is_full
    one.answer(1)
    assert len(one.calls) == 2, "in order, an answer that waits for another one counts"
    one.answer(0)
    assert len(one.calls) == 4
    one.answer(2, 3)
    assert not one.operator.is_full
    assert one.operator.is_waiting
    one.answer(4)
    assert not one.operator.is_waiting
    assert one.found() == [0, 2, 4, 6, 8]


def test_a_function_may_return_several_records_or_none() -> None:
    async def split(row: dict[str, Any]) -> Any:
        return {1: None, 2: [row, row], 3: row, 4: ()}[row["x"]]

    one = Subtask(AsyncMapSpec(split, SCHEMA))
    one.send(*map(row, (1, 2, 3, 4)))
    one.answer(0, 1, 2, 3)
    assert one.found() == [2, 2, 3]


def test_a_failed_call_is_repeated_after_pauses_that_double() -> None:
    one = Subtask(AsyncMapSpec(doubled, SCHEMA, retries=2, retry_delay_ms=100))
    one.send(row(1))
    one.calls[0].fail(ConnectionError("away"))
    one.tick()
    one.advance(99)
    assert len(one.calls) == 1
    one.advance(1)
    one.calls[1].fail(ConnectionError("away"))
    one.tick()
    one.advance(199)
    assert len(one.calls) == 2
    one.advance(1)
    one.answer(2)
    assert one.found() == [2]
    assert one.context.metrics.counters == {"retried": 2}


def test_a_call_that_failed_too_often_fails_the_pipeline() -> None:
    one = Subtask(AsyncMapSpec(doubled, SCHEMA, retries=1, retry_delay_ms=0))
    one.send(row(1))
    one.calls[0].fail(ConnectionError("away"))
    one.tick()
    one.calls[1].fail(ConnectionError("still away"))
    with pytest.raises(UserFunctionError, match="ConnectionError: still away") as caught:
        one.tick()
    assert caught.value.record == repr(row(1))


def test_only_errors_that_are_worth_it_are_repeated() -> None:
    spec = AsyncMapSpec(doubled, SCHEMA, retries=9, retry_if=lambda error: isinstance(error, ConnectionError))
    one = Subtask(spec)
    one.send(row(1))
    one.calls[0].fail(ValueError("no such user"))
    with pytest.raises(UserFunctionError, match="no such user"):
        one.tick()


def test_a_failed_record_is_a_bad_record_by_the_policy() -> None:
    one = Subtask(AsyncMapSpec(doubled, SCHEMA, diverts_exceptions=True), diverts=True)
    one.send(row(1), row(2))
    one.calls[0].fail(ValueError("no such user"))
    one.answer(1)
    assert one.found() == [4]
    [bad] = one.out.bad
    assert "ValueError: no such user" in bad["problem"]
    assert bad["record"] == repr(row(1))


@pytest.mark.parametrize("result", [{"x": "text", "k": 1}, {"x": 1}])
def test_a_result_that_does_not_fit_is_a_bad_record(result: Any) -> None:
    async def wrong(row: dict[str, Any]) -> Any:
        return result

    one = Subtask(AsyncMapSpec(wrong, SCHEMA))
    one.send(row(1))
    with pytest.raises(BadRecord):
        one.answer(0)


def test_a_result_that_is_no_record_is_an_error() -> None:
    async def wrong(row: dict[str, Any]) -> Any:
        return 7

    one = Subtask(AsyncMapSpec(wrong, SCHEMA))
    one.send(row(1))
    with pytest.raises(UserFunctionError, match="must return a dict, a list of dicts or None, not int"):
        one.answer(0)


def test_a_call_that_takes_too_long_is_cancelled_and_repeated_and_its_late_answer_ignored() -> None:
    one = Subtask(AsyncMapSpec(doubled, SCHEMA, timeout_ms=50, retries=1, retry_delay_ms=0))
    one.send(row(1))
    one.advance(49)
    assert not one.calls[0].is_cancelled
    one.advance(1)
    one.tick()
    assert one.calls[0].is_cancelled
    assert len(one.calls) == 2
    one.calls[0]._done({"x": 99, "k": 0}, None)
    one.tick()
    assert one.found() == []
    one.answer(1)
    assert one.found() == [2]
    assert one.context.metrics.counters == {"timed_out": 1, "retried": 1}
    one.advance(1_000)
    assert one.found() == [2]


def test_the_last_timeout_is_an_error_or_gives_another_result() -> None:
    one = Subtask(AsyncMapSpec(doubled, SCHEMA, timeout_ms=50))
    one.send(row(1))
    with pytest.raises(UserFunctionError, match="no answer within 50 ms, in attempt 1"):
        one.advance(50)
    other = Subtask(AsyncMapSpec(doubled, SCHEMA, timeout_ms=50, on_timeout=lambda row: {**row, "x": -1}))
    other.send(row(1))
    other.advance(50)
    other.tick()
    assert other.found() == [-1]


def test_an_answer_that_came_in_time_counts_although_it_was_seen_late() -> None:
    one = Subtask(AsyncMapSpec(doubled, SCHEMA, timeout_ms=50))
    one.send(row(1))
    one.calls[0].answer()
    one.advance(500)
    assert one.found() == [2]


def test_each_attempt_gets_a_record_of_its_own() -> None:
    seen = []

    async def spoiling(row: dict[str, Any]) -> Any:
        seen.append(dict(row))
        row["x"] = None
        raise ConnectionError

    one = Subtask(AsyncMapSpec(spoiling, SCHEMA, retries=1, retry_delay_ms=0, diverts_exceptions=True), diverts=True)
    one.send(row(1))
    one.answer(0)
    one.tick()
    one.answer(1)
    assert seen == [row(1), row(1)]
    assert one.out.bad[0]["record"] == repr(row(1))


def test_a_row_is_emitted_as_it_was_when_it_was_returned() -> None:
    mine = row(0)

    async def again(given: dict[str, Any]) -> Any:
        mine["x"] = given["x"]
        return mine if given["x"] < 3 else [mine]

    one = Subtask(AsyncMapSpec(again, SCHEMA))
    one.send(row(1), row(2), row(3), row(4))
    for call in one.calls:
        call.answer()
    one.tick()
    assert one.found() == [1, 2, 3, 4]


def test_nothing_is_sent_after_the_last_barrier() -> None:
    one = Subtask(AsyncMapSpec(doubled, SCHEMA, limit=1))
    one.send(row(1), row(2))
    one.context.is_stopping = True
    one.answer(0)
    assert len(one.calls) == 1


def test_a_busy_worker_emits_results_together() -> None:
    one = Subtask(AsyncMapSpec(doubled, SCHEMA, is_ordered=False))
    one.context.is_busy = True
    one.send(row(1), row(2))
    one.answer(0)
    one.answer(1)
    assert one.out.log == []
    one.advance(one.context.flush_ms)
    assert one.out.log == [("batch", 2)]


class Client(AsyncFunction):
    def __init__(self) -> None:
        self.log: list[str] = []

    async def open(self) -> None:
        self.log.append("open")

    async def call(self, row: dict[str, Any]) -> Any:
        self.log.append("call")
        return row

    async def close(self) -> None:
        self.log.append("close")


def test_a_client_is_opened_before_calls_and_closed_in_a_copy_of_the_function() -> None:
    client = Client()
    one = Subtask(AsyncMapSpec(client, SCHEMA))
    one.send(row(1))
    one.answer(0)
    one.operator.close()
    assert one.operator.user_object.log == ["open", "call", "close"]  # type: ignore[attr-defined]
    assert client.log == []
    assert one.service.is_closed


def test_a_client_that_cannot_be_opened_fails_the_subtask() -> None:
    class Broken(Client):
        async def open(self) -> None:
            raise ConnectionError("no route")

    with pytest.raises(UserFunctionError, match="no route"):
        Subtask(AsyncMapSpec(Broken(), SCHEMA))


def test_a_store_that_is_away_when_a_client_is_opened_may_come_back() -> None:
    class Away(Client):
        async def open(self) -> None:
            raise StorageError("look at", "a table", "no route")

    with pytest.raises(StorageError, match="cannot look at a table: no route") as caught:
        Subtask(AsyncMapSpec(Away(), SCHEMA))
    assert caught.value.is_transient


def test_calls_run_side_by_side_in_one_thread_of_their_own() -> None:
    threads = set()

    class Meeting(AsyncFunction):
        async def open(self) -> None:
            import asyncio

            self.all_there = asyncio.Event()
            self.count = 0

        async def call(self, row: dict[str, Any]) -> Any:
            threads.add(threading.get_ident())
            self.count += 1
            if self.count == 3:
                self.all_there.set()
            await self.all_there.wait()
            return row

    one = Harness(AsyncMapSpec(Meeting(), SCHEMA))
    woken = threading.Event()
    one.context.wake = woken.set
    one.send(batch(row(1), row(2), row(3)))
    while len(one.out.rows()) < 3:
        assert woken.wait(60)
        woken.clear()
        one.advance(0)
    one.operator.close()
    assert len(threads) == 1
    assert threading.get_ident() not in threads


def test_records_without_an_answer_are_asked_for_again_after_a_restore() -> None:
    one = Subtask(AsyncMapSpec(doubled, SCHEMA, limit=2))
    one.send(*map(row, range(5)))
    one.answer(0)
    snapshot = one.snapshot()
    again = Subtask(AsyncMapSpec(doubled, SCHEMA, limit=2), [snapshot])
    assert again.operator.is_full
    again.send(row(5))
    again.answer(0, 1)
    again.answer(2, 3)
    again.answer(4)
    assert one.found() + again.found() == [0, 2, 4, 6, 8, 10]


def test_records_of_another_schema_are_refused_and_none_do_no_harm() -> None:
    other = pa.schema([("x", pa.int64())])
    one = Subtask(AsyncMapSpec(doubled, SCHEMA))
    empty = one.snapshot()
    one.send(row(1))
    Subtask(AsyncMapSpec(doubled, other), [empty])
    with pytest.raises(UsageError, match="without an answer, with the columns x: int64, k: int64, but its input has"):
        Subtask(AsyncMapSpec(doubled, other), [one.snapshot()])


def shares(rows: list[dict[str, Any]], keys: tuple[str, ...], parallelism: int) -> list[pa.RecordBatch | None]:
    """Return what each subtask reads."""
    if keys and rows:
        return partition(batch(*rows), keys, 128, parallelism)
    return [batch(*rows[index::parallelism]) for index in range(parallelism)]


@pytest.mark.parametrize("keys", [(), ("k",)])
@pytest.mark.parametrize("is_ordered", [True, False])
def test_every_record_has_its_results_once_through_snapshots_and_rescaling(
    keys: tuple[str, ...], is_ordered: bool
) -> None:
    for seed in range(10):
        rng = random.Random(seed)
        spec = AsyncMapSpec(
            doubled, SCHEMA, None, keys, limit=rng.choice([1, 2, 7, 100]), is_ordered=is_ordered, retries=99
        )
        states: list[RestoredState] = []
        committed: list[int] = []
        given = iter(range(10_000))
        total = 0
        for stage in range(4):
            parallelism = rng.choice([1, 2, 3, 5])
            subtasks = [Subtask(spec, states, subtask=(i, parallelism)) for i in range(parallelism)]
            for step in range(rng.randrange(12) if stage < 3 else 0):
                rows = [row(next(given)) for _ in range(rng.randrange(9))]
                total += len(rows)
                for one, part in zip(subtasks, shares(rows, keys, parallelism), strict=True):
                    if part is not None and part.num_rows:
                        one.operator.process(part)
                    if rng.random() < 0.3:
                        one.operator.on_watermark(stage * 1_000 + step)
                    give_some(one, rng)
            if stage == 3:
                for one in subtasks:
                    while one.operator.is_waiting:
                        give_some(one, rng)
            states = [one.snapshot() for one in subtasks]
            for one in subtasks:
                committed += one.found()
                if is_ordered and keys:
                    for key in range(4):
                        of_key = [x for x in one.found() if x // 2 % 4 == key]
                        assert of_key == sorted(of_key)
                give_some(one, rng)  # what follows the barrier is lost
        assert sorted(committed) == [2 * x for x in range(total)]


def give_some(one: Subtask, rng: random.Random) -> None:
    """Answer some calls, or let them fail, in any order."""
    waiting = [call for call in one.calls if call._coroutine.cr_frame is not None]
    for call in rng.sample(waiting, rng.randrange(len(waiting) + 1)):
        if rng.random() < 0.1:
            call.fail(ConnectionError())
        else:
            call.answer()
    one.advance(rng.choice([0, 100_000]) if not waiting else 0)
    one.advance(1_000 if rng.random() < 0.2 else 0)


@pytest.mark.parametrize("is_ordered", [True, False])
def test_no_watermark_overtakes_a_record(is_ordered: bool) -> None:
    for seed in range(10):
        rng = random.Random(seed)
        one = Subtask(AsyncMapSpec(doubled, SCHEMA, limit=rng.choice([1, 3, 50]), is_ordered=is_ordered, retries=99))
        before: dict[int, int] = {}
        numbers = iter(range(10_000))
        for step in range(30):
            one.send(*[row(next(numbers)) for _ in range(1 + rng.randrange(4))])
            if rng.random() < 0.5:
                before[step] = next(numbers)
                one.operator.on_watermark(step)
                one.send(row(next(numbers)))
            give_some(one, rng)
        while one.operator.is_waiting:
            give_some(one, rng)
        rows = iter(one.found())
        seen: list[int] = []
        for kind, value in one.out.log:
            if kind == "batch":
                seen += [next(rows) // 2 for _ in range(value)]
            else:
                expected = set(range(before[value])) - set(before.values())
                assert set(seen) == expected
        assert one.out.watermarks() == sorted(before)
        assert encoded(one.operator, one.context) is not None
