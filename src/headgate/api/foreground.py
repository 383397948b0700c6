"""Running a pipeline in the foreground: signals, the log, and programs that are only loaded."""

from __future__ import annotations

import logging
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any, Protocol

from headgate.display.progress import in_notebook
from headgate.environment import SYSTEM_CLOCK
from headgate.errors import HeadgateError, UsageError
from headgate.model.ids import CheckpointId
from headgate.model.progress import LateRecords, Observer, PipelineHandle, Progress, RunResult
from headgate.plain_text import printable
from headgate.runtime.driver.pipeline_lock import ASK, DRAIN, taking_signals

WAIT_S = 0.2
"""How long a signal may go unnoticed."""

REPEATED_SIGNAL_MS = 1_000
"""``timeout`` sends SIGTERM to its command and then to the whole group: twice within a moment, and once meant."""

_SIGNALS = (signal.SIGINT, signal.SIGTERM, DRAIN, ASK)
_loading = threading.local()


class RunRequested(BaseException):
    """Raised by ``run`` and ``start`` in a program that the command line only loads; carries the ``Pipeline``.

    Not an ``Exception``, so that the program does not catch it by accident.
    """

    def __init__(self, pipeline: object) -> None:
        super().__init__(pipeline)
        self.pipeline = pipeline


@contextmanager
def loading_only() -> Iterator[None]:
    """Within this block ``Pipeline.run`` and ``start`` raise ``RunRequested`` in this thread."""
    _loading.is_on = True
    try:
        yield
    finally:
        _loading.is_on = False


def refuse_while_loading(pipeline: object) -> None:
    """Raise ``RunRequested`` inside ``loading_only``."""
    if getattr(_loading, "is_on", False):
        raise RunRequested(pipeline)


def refuse_exploring_while_loading(call: str) -> None:
    """Refuse a program that looks at a stream while the command line loads it.

    Raises:
        UsageError
    """
    if getattr(_loading, "is_on", False):
        raise UsageError(
            f"the program calls {call}(), which runs by itself: start it with python, or make that call only "
            "if __name__ == '__main__'"
        )


class LoggingObserver:
    """Logs what a user should know to the logger ``headgate``; what no handler would show goes to standard error."""

    def __init__(self, pipeline: str) -> None:
        self._log = logging.getLogger("headgate")
        self._pipeline = pipeline

    def on_progress(self, progress: Progress) -> None:
        """Not logged."""

    def on_restart(self, reason: str, delay_ms: int) -> None:
        """Log a warning."""
        self._log.warning("pipeline '%s' restarts in %d ms: %s", self._pipeline, delay_ms, reason)

    def on_note(self, text: str) -> None:
        """Log it."""
        if self._log.hasHandlers():
            level = logging.WARNING if isinstance(text, LateRecords) else logging.INFO
            self._log.log(level, "pipeline '%s': %s", self._pipeline, text)
        else:
            print(printable(f"{self._pipeline}: {text}"), file=sys.stderr)

    def on_checkpoint(self, checkpoint: CheckpointId, duration_ms: int, size_bytes: int) -> None:
        """Log at debug level."""
        self._log.debug(
            "pipeline '%s' completed checkpoint %d: %d ms, %d bytes",
            self._pipeline,
            checkpoint,
            duration_ms,
            size_bytes,
        )


class MetricsEndpoint(Protocol):
    """``api.metrics.MetricsPort`` or ``api.metrics.MetricsPush``, which are imported only if used.

    ``note``: a note for the user that says where the metrics are.
    """

    note: str

    def watch(self, pipeline: str, progress: Callable[[], Progress]) -> None:
        """Show the metrics of ``pipeline`` from now on."""

    def close(self) -> None:
        """Give the port up. From any thread; may be called again."""


def start_with_endpoint(
    port: MetricsEndpoint, pipeline: str, observer: Observer, start: Callable[[], PipelineHandle]
) -> PipelineHandle:
    """Start, and show the metrics of the run at ``port`` until it has ended."""
    try:
        handle = start()
        observer.on_note(port.note)
    except BaseException:
        port.close()
        raise
    port.watch(pipeline, lambda: handle.progress)
    handle.when_ended(port.close)
    return handle


def start_with_metrics(
    port: int | None,
    host: str,
    push: str | None,
    pipeline: str,
    observer: Observer,
    start: Callable[[], PipelineHandle],
) -> PipelineHandle:
    """Start, and show the metrics of the run at a port, send them to a collector, or both.

    Raises:
        UsageError: the port is taken, or there can be no such collector.
    """

    def start_pushing() -> PipelineHandle:
        if push is None:
            return start()
        from headgate.api.metrics import MetricsPush

        return start_with_endpoint(MetricsPush(push), pipeline, observer, start)

    if port is None:
        return start_pushing()
    from headgate.api.metrics import MetricsPort

    return start_with_endpoint(MetricsPort(port, host), pipeline, observer, start_pushing)


def show_in_notebook(handle: PipelineHandle) -> None:
    """Show the run in the notebook's cell that waits for it; elsewhere do nothing."""
    show = getattr(handle, "_ipython_display_", None)
    if show is None or not in_notebook():
        return
    try:
        show()
    except Exception:
        logging.getLogger("headgate").debug("the run could not be shown", exc_info=True)


def run_to_end(
    start: Callable[[], PipelineHandle], started: Callable[[PipelineHandle], None] = lambda handle: None
) -> RunResult:
    """Start, call ``started``, then wait until the pipeline has ended or a signal has stopped it.

    The first SIGINT or SIGTERM stops with a last checkpoint. The second one does not wait for that, and removes
    nothing; two SIGTERM within a
    moment count once, because a command that ends a process group sends two. SIGUSR1
    drains; SIGUSR2 does what others ask for. Outside the main thread signals are left alone.

    Raises:
        PipelineFailed, FencedError, UsageError
    """
    if threading.current_thread() is not threading.main_thread():
        return _waited(start())
    received: list[int] = []
    told_ms: list[int] = []

    def remember(number: int, frame: FrameType | None) -> None:
        now_ms = SYSTEM_CLOCK.monotonic_ms()
        if number == signal.SIGTERM:
            told_ms.append(now_ms)
            if len(told_ms) > 1 and now_ms - told_ms[0] < REPEATED_SIGNAL_MS:
                return
        received.append(number)

    # Before start: a process that reads from the lock that this one takes signals must not kill it with one. SIGINT
    # after it: until then it may interrupt, and PySpark installs a handler of its own when it makes its context.
    before: dict[int, Any] = {n: signal.signal(n, remember) for n in _SIGNALS if n is not signal.SIGINT}
    try:
        with taking_signals():
            handle = start()
        before[signal.SIGINT] = signal.signal(signal.SIGINT, remember)
        started(handle)
        return _wait_for_end_or_signal(handle, received)
    finally:
        for number, handler in before.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)


def _wait_for_end_or_signal(handle: PipelineHandle, received: list[int]) -> RunResult:
    asked: set[bool] = set()
    cancelled = False
    rung = 0
    while True:
        result = handle.wait(WAIT_S)
        if result is not None:
            return result
        if (count := received.count(ASK)) > rung:
            rung = count
            # in threads: this one has to notice further signals
            threading.Thread(target=handle.answer_requests, name="headgate-asked", daemon=True).start()
        ends = [number for number in received if number != ASK]
        for drain in sorted({number == DRAIN for number in ends} - asked, reverse=True):
            asked.add(drain)
            threading.Thread(target=_stop, args=(handle, drain), name="headgate-stop", daemon=True).start()
        if sum(number != DRAIN for number in ends) > 1 and not cancelled:
            cancelled = True
            # a second signal wants the end, whatever the options say about checkpoints
            handle.cancel(retain=True)


def _stop(handle: PipelineHandle, drain: bool) -> None:
    try:
        handle.stop(drain=True) if drain else handle.stop()
    except HeadgateError as error:  # the waiting thread gets the same failure from ``wait``
        logging.getLogger("headgate").debug("stop ended with: %s", error)


def _waited(handle: PipelineHandle) -> RunResult:
    while True:
        result = handle.wait(None)
        if result is not None:
            return result
