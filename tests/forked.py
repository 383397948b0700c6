"""Real processes that are forked from one that has imported what they need: each starts without a second of imports."""

from __future__ import annotations

import multiprocessing
import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from multiprocessing.process import BaseProcess

CONTEXT = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload(["tests.logs.clients", "tests.store.faults.group_program", "tests.store.served.serving"])


@contextmanager
def stopped(process: BaseProcess) -> Iterator[None]:
    """Have a process stand still for the time of the block, unless it has ended."""
    assert process.pid is not None
    with suppress(ProcessLookupError):
        os.kill(process.pid, signal.SIGSTOP)
    try:
        yield
    finally:
        with suppress(ProcessLookupError):
            os.kill(process.pid, signal.SIGCONT)
