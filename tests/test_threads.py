"""Pools of threads that do not keep their process alive, and calls that are called off."""

from __future__ import annotations

import gc
import subprocess
import sys
import threading

import pytest

from headgate.environment import CancellablePool, DaemonPool, cancellable, cancellable_as_here, is_cancelled

WAIT_S = 60.0


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


def test_a_call_hears_in_any_thread_that_it_is_called_off() -> None:  # G16
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
