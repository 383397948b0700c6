"""Intervals go by a clock that only goes forward; the date is read in one place."""

from __future__ import annotations

import asyncio
import gc
import itertools
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from headgate.environment import (
    SYSTEM_CLOCK,
    SYSTEM_THREADS,
    CancellablePool,
    DaemonPool,
    DaemonThread,
    ThreadEnded,
    cancellable,
    cancellable_as_here,
    close_all,
    is_cancelled,
)

ROOT = Path(__file__).parent.parent


@pytest.mark.parametrize("step_s", [3_600, -3_600])
def test_intervals_do_not_follow_a_date_that_is_set(step_s: int) -> None:
    before_ms = time.monotonic_ns() // 1_000_000
    with pytest.MonkeyPatch.context() as patch:
        looks = itertools.count()
        patch.setattr(time, "time_ns", lambda: (1_700_000_000 + step_s * next(looks)) * 1_000_000_000)
        patch.setattr(time, "time", lambda: 1_700_000_000.0 + step_s * next(looks))
        readings = [SYSTEM_CLOCK.monotonic_ms() for _ in range(20)]
        assert SYSTEM_CLOCK.wall_ms() % 3_600_000 == 1_700_000_000_000 % 3_600_000
    after_ms = time.monotonic_ns() // 1_000_000
    assert before_ms <= readings[0]
    assert readings == sorted(readings)
    assert readings[-1] <= after_ms


def test_the_date_is_milliseconds_since_1970() -> None:
    begun_ms = time.time_ns() // 1_000_000
    assert abs(SYSTEM_CLOCK.wall_ms() - begun_ms) < 600_000


@pytest.mark.parametrize(
    "look", ["import time\ntime.time()", "from time import time_ns", "from datetime import datetime\ndatetime.now()"]
)
@pytest.mark.parametrize(
    "place", ["src/headgate/runtime/worker/worker.py", "scripts/demo/feeder.py", "bench/running.py"]
)
def test_the_linter_lets_nobody_else_read_the_date(look: str, place: str) -> None:
    def refused(name: str) -> bool:
        command = [sys.executable, "-m", "ruff", "check", "--select", "TID251", "--stdin-filename", name, "-"]
        return subprocess.run(command, input=look, cwd=ROOT, capture_output=True, text=True).returncode == 1

    assert refused(place)
    assert not refused("src/headgate/environment.py")


WAIT_S = 300.0


def test_calls_run_in_their_order_and_what_they_raise_is_lost() -> None:
    pool, ran = DaemonPool(1, "one"), list[int]()
    for number in range(5):
        pool.submit(ran.append, number)
        pool.submit(lambda: 1 / 0)
    pool.shutdown()
    assert ran == list(range(5))
    with pytest.raises(RuntimeError):
        pool.submit(ran.append, 5)


def test_no_more_calls_run_at_a_time_than_there_are_threads() -> None:
    pool, barrier, over = DaemonPool(2, "two"), threading.Barrier(3), threading.Event()
    late = threading.Event()
    for _ in range(2):
        pool.submit(lambda: (barrier.wait(WAIT_S), over.wait(WAIT_S)))
    pool.submit(late.set)
    barrier.wait(WAIT_S)
    assert not late.is_set()
    over.set()
    pool.shutdown()
    assert late.is_set()


def test_a_call_that_was_refused_for_want_of_a_thread_is_not_run_later(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its caller does it itself, so it would be done twice."""
    pool, has_begun, may_end, ran = DaemonPool(2, "two"), threading.Event(), threading.Event(), list[int]()
    pool.submit(lambda: (has_begun.set(), may_end.wait(WAIT_S)))
    assert has_begun.wait(WAIT_S)

    def refuse(_: DaemonThread) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patch:
        patch.setattr(DaemonThread, "start", refuse)
        with pytest.raises(RuntimeError):
            pool.submit(ran.append, 1)
    may_end.set()
    pool.shutdown()
    assert ran == []


def test_calls_that_have_not_begun_can_be_forgotten() -> None:
    pool, has_begun, may_end, ran = DaemonPool(1, "one"), threading.Event(), threading.Event(), list[int]()
    pool.submit(lambda: (has_begun.set(), may_end.wait(WAIT_S)))
    pool.submit(ran.append, 1)
    assert has_begun.wait(WAIT_S)
    pool.shutdown(wait=False, cancel_futures=True)
    may_end.set()
    pool.shutdown()
    assert ran == []


def test_threads_end_with_their_pool() -> None:
    pool = DaemonPool(2, "of-a-pool-that-goes")
    for _ in range(4):
        pool.submit(int)
    mine = [thread for thread in threading.enumerate() if thread.name.startswith("of-a-pool-that-goes")]
    assert mine
    del pool
    gc.collect()
    for thread in mine:
        thread.join(WAIT_S)
        assert not thread.is_alive()


def test_a_call_that_hangs_keeps_no_process_alive() -> None:  # C38
    program = (
        "import threading\n"
        "from headgate.environment import SYSTEM_THREADS\n"
        "begun = threading.Event()\n"
        "pool = SYSTEM_THREADS.pool(1, 'hangs', is_daemon=True)\n"
        "pool.submit(lambda: (begun.set(), threading.Event().wait()))\n"
        "begun.wait()\n"
        "pool.shutdown(wait=False)\n"
    )
    assert subprocess.run([sys.executable, "-c", program], timeout=WAIT_S, check=False).returncode == 0


def test_a_call_hears_in_any_thread_that_it_is_called_off() -> None:
    off, begun, may_end, heard = threading.Event(), threading.Event(), threading.Event(), list[bool]()
    pool = CancellablePool(DaemonPool(1, "one"), off)

    def call() -> None:
        heard.append(is_cancelled())
        begun.set()
        assert may_end.wait(WAIT_S)
        heard.append(is_cancelled())
        beside = DaemonPool(1, "beside")
        beside.submit(cancellable_as_here(lambda: heard.append(is_cancelled())))
        beside.shutdown()
        cancellable(None, lambda: heard.append(is_cancelled()))()
        heard.append(is_cancelled())

    pool.submit(call)
    assert begun.wait(WAIT_S)
    off.set()
    may_end.set()
    pool.shutdown()
    assert heard == [False, True, True, False, True]
    assert not is_cancelled()


CALLS: list[str] = []


def closes(*answers: BaseException | None) -> list[Callable[[], object]]:
    """One call for each answer: it raises it, or nothing."""
    CALLS.clear()

    def close(number: int, answer: BaseException | None) -> None:
        CALLS.append(f"close {number}")
        if answer is not None:
            raise answer

    return [lambda n=number, a=answer: close(n, a) for number, answer in enumerate(answers)]  # type: ignore[misc]


def test_everything_is_closed_and_the_first_error_is_told() -> None:
    first = SystemExit(3)
    with pytest.raises(SystemExit) as raised:
        close_all(closes(None, first, OSError("second"), None))
    assert raised.value is first
    assert CALLS == ["close 0", "close 1", "close 2", "close 3"]


def test_nothing_fails_where_nothing_fails() -> None:
    close_all(closes(None, None))
    assert CALLS == ["close 0", "close 1"]


def test_a_thread_that_ends_closes_nothing_more() -> None:
    with pytest.raises(ThreadEnded):
        close_all(closes(OSError("first"), ThreadEnded(), None))
    assert CALLS == ["close 0", "close 1"]


class Ended:
    """What coroutines came to, in the thread of the loop."""

    def __init__(self) -> None:
        self.found: dict[str, object] = {}
        self.threads: set[int] = set()
        self._changed = threading.Condition()

    def done(self, name: str) -> Callable[[object, BaseException | None], None]:
        def done(value: object, error: BaseException | None) -> None:
            with self._changed:
                self.found[name] = value if error is None else type(error)
                self.threads.add(threading.get_ident())
                self._changed.notify_all()

        return done

    def wait(self, *names: str) -> None:
        with self._changed:
            assert self._changed.wait_for(lambda: self.found.keys() >= set(names), 60)


async def returning() -> str:
    return "value"


async def raising() -> None:
    raise ValueError


async def hanging() -> None:
    await asyncio.Event().wait()


def test_an_event_loop_runs_coroutines_side_by_side_and_says_what_comes_of_each() -> None:
    loop, ended = SYSTEM_THREADS.event_loop("test"), Ended()
    cancel = loop.submit(hanging, ended.done("cancelled"))
    loop.submit(hanging, ended.done("closed"))
    loop.submit(raising, ended.done("raised"))
    loop.submit(returning, ended.done("returned"))
    ended.wait("raised", "returned")
    cancel()
    ended.wait("cancelled")
    assert "closed" not in ended.found
    loop.close()
    cancelled = asyncio.CancelledError
    assert ended.found == {"cancelled": cancelled, "closed": cancelled, "raised": ValueError, "returned": "value"}
    assert len(ended.threads) == 1
    assert threading.get_ident() not in ended.threads
    cancel()  # nothing is left to cancel


def test_what_is_submitted_at_any_moment_runs() -> None:
    loop, ended = SYSTEM_THREADS.event_loop("test"), Ended()
    for number in range(500):
        loop.submit(returning, ended.done(str(number)))
    ended.wait(*map(str, range(500)))
    loop.close()
