"""What a cluster's executors say of themselves: for ``headgate doctor --master``.

Counterpart: ``cli.doctor``, which judges. Whatever keeps their Python from answering is told as for a pipeline
(``spark.job_errors``). Starts a session of its own, and stops it.
"""

from __future__ import annotations

import platform
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from headgate import __version__
from headgate.clock import SYSTEM_CLOCK
from headgate.errors import UsageError
from headgate.spark.job_errors import job_error
from headgate.spark.masters import read_master
from headgate.spark.session import make_session, slots


@dataclass(frozen=True, slots=True)
class Executor:
    """A slot of a cluster: its host, the versions of Python and Headgate there, and how far its clock is ahead."""

    host: str
    python: str
    headgate: str
    ahead_ms: int


def executors_of(master: str) -> list[Executor]:
    """Return what each slot of ``master`` says.

    Raises:
        UsageError: the master is malformed, or its executors cannot run Headgate.
        PipelineFailed: it does not answer, or Spark could not start.
    """
    read_master(master)
    session = make_session("doctor", 1, master)
    try:
        count = max(1, slots(session))
        rdd = session.sparkContext.parallelize(range(count), count)
        begun_ms = SYSTEM_CLOCK.wall_ms()
        told = rdd.mapPartitions(answer).collect()
        return [Executor(host, python, release, _ahead_ms(at, begun_ms)) for host, python, release, at in told]
    except Exception as error:
        raise UsageError(job_error(str(error)) or str(error)) from None
    finally:
        session.stop()


def answer(_: Iterator[Any]) -> Iterator[tuple[str, str, str, int]]:
    """Say where this process is, what it runs, and what time it is there."""
    yield platform.node(), platform.python_version(), __version__, SYSTEM_CLOCK.wall_ms()


def _ahead_ms(there_ms: int, begun_ms: int) -> int:
    """Return how far a clock is off: it was asked between the beginning and now."""
    if there_ms < begun_ms:
        return there_ms - begun_ms
    return max(0, there_ms - SYSTEM_CLOCK.wall_ms())
