"""Metrics of a running pipeline: a port for Prometheus, and a sender for OpenTelemetry.

Names follow Prometheus' conventions: base units, units in names, ``_total`` for counters. Counters never decrease
while the process lives; what the pipeline has counted, each record once, are gauges. OpenTelemetry gets the same
metrics with a dot after ``headgate``; it needs the extra ``otel``, and the SDK's own variables count as everywhere.
"""

from __future__ import annotations

import functools
import http
import logging
import socket
import socketserver
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from io import BufferedReader
from typing import Any, TypeAlias, cast
from urllib.parse import urlsplit
from wsgiref.simple_server import WSGIRequestHandler, make_server

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.exposition import ThreadingWSGIServer, make_wsgi_app
from prometheus_client.registry import Collector

from headgate.distribution import install_command
from headgate.errors import UsageError
from headgate.http_limits import HEAD_S, BoundedInput, ConnectionLimit, TooLongError, host_of
from headgate.model.progress import (
    LATE_RECORDS,
    LoopProgress,
    NodeProgress,
    PipelineState,
    Progress,
    SourceProgress,
    SplitProgress,
    SubtaskProgress,
)
from headgate.tls import is_loopback

CALLERS_MAX = 32
"""Connections of the port: Prometheus has one at a time."""

HEAD_BYTES_MAX = 16 << 10
"""Limit of the request line and headers; a scraper sends far less."""

LOOK_S = 0.05
"""How often the port's thread checks whether the run has ended."""

_log = logging.getLogger("headgate")

Family: TypeAlias = CounterMetricFamily | GaugeMetricFamily
OfSubtask: TypeAlias = tuple[str, str, Callable[[SubtaskProgress], float | None]]

SUBTASK_COUNTERS: Sequence[OfSubtask] = (
    ("records_in", "Records that the operator was given, those that were read again too.", lambda s: s.records_in),
    ("records_out", "Records that the operator sent, those that were sent again too.", lambda s: s.records_out),
    ("bad_records", "Records that the operator refused.", lambda s: s.bad_records),
    (
        "late_records",
        "Records that came after their window had closed.",
        lambda s: dict(s.counters).get(LATE_RECORDS, 0),
    ),
    ("busy_seconds", "Time spent in the operator's own code.", lambda s: s.busy_ms / 1000),
    ("held_back_seconds", "Time in which those after it had no room (backpressure).", lambda s: s.held_back_ms / 1000),
    ("idle_seconds", "The rest of the time: it waited for records, or for its turn.", lambda s: s.idle_ms / 1000),
)
SUBTASK_GAUGES: Sequence[OfSubtask] = (
    ("queued_batches", "Batches that wait on its inputs.", lambda s: s.queued_batches),
    ("queued_bytes", "Bytes of the records that wait on its inputs.", lambda s: s.queued_bytes),
    (
        "watermark_timestamp_seconds",
        "Its watermark, seconds since 1970.",
        lambda s: None if s.watermark_ms is None else s.watermark_ms / 1000,
    ),
)
NODE_GAUGES: Sequence[tuple[str, str, Callable[[NodeProgress], float | None]]] = (
    ("counted_records_in", "Records in since the pipeline began, each counted once.", lambda n: n.records_in),
    ("counted_records_out", "Records out since the pipeline began, each counted once.", lambda n: n.records_out),
    ("watermark_lag_seconds", "How far its watermark is behind the date.", lambda n: _seconds(n.lag_ms)),
    ("state_bytes", "Size of its state in the last completed checkpoint.", lambda n: n.state_bytes),
    ("state_rows", "Rows of its state in the last completed checkpoint.", lambda n: n.state_rows),
)
LOOP_GAUGES: Sequence[tuple[str, str, Callable[[LoopProgress], float]]] = (
    ("loop_queued_batches", "Batches that wait to go round again.", lambda one: one.queued_batches),
    ("loop_queued_bytes", "Bytes that wait to go round again, in memory and on disk.", lambda one: one.queued_bytes),
    ("loop_spilled_bytes", "Bytes of them that are on disk.", lambda one: one.spilled_bytes),
    (
        "loop_trip_seconds",
        "Time of the last trip round the loop, of the slowest subtask.",
        lambda one: one.trip_ms / 1000,
    ),
)
SOURCE_GAUGES: Sequence[tuple[str, str, Callable[[SourceProgress], float | None]]] = (
    ("source_splits", "Splits that have not ended.", lambda s: s.splits),
    ("source_idle_splits", "Splits that do not hold event time back.", lambda s: s.idle_splits),
    ("source_waiting_splits", "Splits that wait for slower ones in event time.", lambda s: s.waiting_splits),
    ("source_lag_records", "Records that were not read yet, of splits with a known end.", lambda s: _lag(s, "records")),
    ("source_lag_bytes", "Bytes that were not read yet, of splits with a known end.", lambda s: _lag(s, "bytes")),
    ("source_undecided", "What waits for the end of open transactions.", lambda s: s.undecided),
)
SPLIT_GAUGES: Sequence[tuple[str, str, Callable[[SplitProgress], float | None]]] = (
    ("split_position", "Where reading continues.", lambda s: s.position),
    ("split_end", "Where the split ended when it was last read.", lambda s: s.end),
    ("split_records_per_second", "Records that were read lately.", lambda s: s.records_per_second),
    ("split_watermark_timestamp_seconds", "Its watermark, seconds since 1970.", lambda s: _seconds(s.watermark_ms)),
    ("split_idle", "1: it does not hold event time back.", lambda s: s.is_idle),
    ("split_waiting", "1: it waits for slower splits in event time.", lambda s: s.is_waiting),
    ("split_undecided", "What waits for the end of open transactions.", lambda s: s.undecided),
)
PIPELINE_COUNTERS: Sequence[tuple[str, str, Callable[[Progress], float]]] = (
    ("restarts", "How often the pipeline was started again, by its supervisor too.", lambda p: p.restarts),
    ("failures", "How often something failed, in all its drivers under one supervisor.", lambda p: p.failures),
)
PIPELINE_GAUGES: Sequence[tuple[str, str, Callable[[Progress], float | None]]] = (
    ("uptime_seconds", "Time since this run began.", lambda p: p.uptime_ms / 1000),
    ("generation", "Number of the running generation.", lambda p: p.generation),
    ("busiest_worker_ratio", "Share of the time in which the busiest worker did not sleep.", lambda p: p.busy),
    ("drift_seconds", "How far a split may be ahead of the slowest one.", lambda p: _seconds(p.drift_ms)),
    ("lost_outputs", "Pieces of output that a target denied, in all runs.", lambda p: p.lost_outputs),
    ("last_checkpoint_id", "Number of the last completed checkpoint.", lambda p: _last(p, lambda c: c.checkpoint)),
    (
        "last_checkpoint_timestamp_seconds",
        "When it was triggered, seconds since 1970.",
        lambda p: _last(p, lambda c: c.trigger_wall_ms / 1000),
    ),
    ("last_checkpoint_duration_seconds", "How long it took.", lambda p: _last(p, lambda c: c.duration_ms / 1000)),
    ("last_checkpoint_size_bytes", "Size of its snapshots.", lambda p: _last(p, lambda c: c.size_bytes)),
    (
        "pending_checkpoint_age_seconds",
        "How long the oldest checkpoint has been under way; 0: there is none.",
        lambda p: 0.0 if p.pending_checkpoint is None else p.pending_checkpoint.age_ms / 1000,
    ),
)


class ProgressCollector(Collector):
    """Makes metric families of the latest progress of one pipeline for each request."""

    def __init__(self, pipeline: str, progress: Callable[[], Progress]) -> None:
        self._pipeline = pipeline
        self._progress = progress

    def describe(self) -> list[Family]:
        """Return nothing: families depend on the progress."""
        return []

    def collect(self) -> Iterator[Family]:
        """Return all families."""
        progress = self._progress()
        yield from self._of_pipeline(progress)
        yield from self._of_operators(progress.nodes)
        yield from self._of_subtasks(progress.nodes)
        for name, text, of_loop in LOOP_GAUGES:
            gauge = GaugeMetricFamily(f"headgate_{name}", text, labels=("pipeline", "loop"))
            for loop in progress.loops:
                gauge.add_metric((self._pipeline, str(loop.loop)), of_loop(loop))
            yield gauge
        yield from self._of_sources(progress.sources)

    def _of_sources(self, sources: Sequence[SourceProgress]) -> Iterator[Family]:
        for name, text, of_source in SOURCE_GAUGES:
            gauge = GaugeMetricFamily(f"headgate_{name}", text, labels=("pipeline", "source"))
            for source in sources:
                if (value := of_source(source)) is not None:
                    gauge.add_metric((self._pipeline, str(source.source)), value)
            yield gauge
        labels = ("pipeline", "source", "split")
        for unit in ("records", "bytes"):
            gauge = GaugeMetricFamily(f"headgate_split_lag_{unit}", "What was not read of it yet.", labels=labels)
            for source in sources:
                for split in source.most_lagging if source.unit == unit else ():
                    if split.lag is not None:
                        gauge.add_metric((self._pipeline, str(source.source), split.split), split.lag)
            yield gauge
        for name, text, of_split in SPLIT_GAUGES:
            gauge = GaugeMetricFamily(f"headgate_{name}", text, labels=labels)
            for source in sources:
                for split in source.most_lagging:
                    if (value := of_split(split)) is not None:
                        gauge.add_metric((self._pipeline, str(source.source), split.split), value)
            yield gauge

    def _of_pipeline(self, progress: Progress) -> Iterator[Family]:
        state = GaugeMetricFamily("headgate_state", "1 for the state that it is in.", labels=("pipeline", "state"))
        for one in PipelineState:
            state.add_metric((self._pipeline, one.value), one is progress.state)
        yield state
        for name, text, of in PIPELINE_COUNTERS:
            counter = CounterMetricFamily(f"headgate_{name}", text, labels=("pipeline",))
            counter.add_metric((self._pipeline,), of(progress))
            yield counter
        for name, text, found in PIPELINE_GAUGES:
            gauge = GaugeMetricFamily(f"headgate_{name}", text, labels=("pipeline",))
            value = found(progress)
            if value is not None:
                gauge.add_metric((self._pipeline,), value)
            yield gauge

    def _of_operators(self, nodes: Sequence[NodeProgress]) -> Iterator[Family]:
        for name, text, of in NODE_GAUGES:
            gauge = GaugeMetricFamily(f"headgate_{name}", text, labels=("pipeline", "operator"))
            for node in nodes:
                value = of(node)
                if value is not None:
                    gauge.add_metric((self._pipeline, str(node.node)), value)
            yield gauge

    def _of_subtasks(self, nodes: Sequence[NodeProgress]) -> Iterator[Family]:
        labels = ("pipeline", "operator", "subtask")
        families: list[tuple[Family, OfSubtask]] = [
            (CounterMetricFamily(f"headgate_{one[0]}", one[1], labels=labels), one) for one in SUBTASK_COUNTERS
        ]
        families += [(GaugeMetricFamily(f"headgate_{one[0]}", one[1], labels=labels), one) for one in SUBTASK_GAUGES]
        own = CounterMetricFamily(
            "headgate_operator_events", "What operators count themselves, by name.", labels=(*labels, "event")
        )
        for node in nodes:
            for subtask in node.subtasks:
                values = (self._pipeline, str(node.node), str(subtask.subtask))
                for family, (_, _, of) in families:
                    value = of(subtask)
                    if value is not None:
                        family.add_metric(values, value)
                for event, count in subtask.counters:
                    if event != LATE_RECORDS:
                        own.add_metric((*values, event), count)
        yield from (family for family, _ in families)
        yield own


class MetricsPort:
    """A port that answers Prometheus until it is closed; before ``watch`` there are no metrics."""

    def __init__(self, port: int, host: str) -> None:
        """Take ``port`` of ``host``; 0 is any that is free.

        Raises:
            UsageError: the port is taken, or there is no such address here.
        """
        if isinstance(port, bool) or not isinstance(port, int) or not 0 <= port <= 65_535:
            raise UsageError(f"metrics_port must be a number from 0 to 65535, not {port!r}")
        self._registry = CollectorRegistry(auto_describe=False)
        self._server = _listening(host, port, self._registry)
        self._thread = threading.Thread(
            target=self._server.serve_forever, args=(LOOK_S,), name="headgate-metrics", daemon=True
        )
        self._thread.start()
        self._closing = threading.Lock()
        self._is_closed = False
        self.url = f"http://{f'[{host}]' if ':' in host else host}:{self._server.server_port}/metrics"
        self.note = f"metrics at {self.url}"

    def watch(self, pipeline: str, progress: Callable[[], Progress]) -> None:
        """Show the metrics of ``pipeline`` from now on."""
        self._registry.register(ProgressCollector(pipeline, progress))

    def close(self) -> None:
        """Give the port up. From any thread; may be called again."""
        with self._closing:
            if self._is_closed:
                return
            self._is_closed = True
            self._server.shutdown()
            self._server.server_close()
            self._thread.join()


class _Server(ThreadingWSGIServer):
    """An HTTP server with a bound on the connections and threads it uses."""

    def __init__(self, address: tuple[str, int], handler: type[WSGIRequestHandler], *, family: int) -> None:
        self.address_family = family
        self.callers = ConnectionLimit(CALLERS_MAX)
        self.is_local = is_loopback(address[0])
        super().__init__(address, handler)

    def server_bind(self) -> None:
        """Bind without asking a name server for a host name that is never used."""
        socketserver.TCPServer.server_bind(self)
        self.server_name, self.server_port = str(self.server_address[0]), self.server_address[1]
        self.setup_environ()

    def get_request(self) -> tuple[Any, Any]:
        """Accept a connection; while the process has no descriptor left, callers wait."""
        try:
            return super().get_request()
        except OSError:
            time.sleep(LOOK_S)
            raise

    def verify_request(self, request: Any, client_address: Any) -> bool:
        """Return whether there is room for one more."""
        return self.callers.admit(request)

    def close_request(self, request: Any) -> None:
        """Close a connection."""
        super().close_request(request)
        self.callers.left(request)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Do not print errors of a connection; the terminal belongs to the pipeline."""
        if not isinstance(sys.exc_info()[1], (OSError, TooLongError)):
            _log.exception("the port for metrics could not answer")


class _Caller(WSGIRequestHandler):
    """One request."""

    timeout = HEAD_S

    def setup(self) -> None:
        """Begin; see ``BoundedInput``."""
        super().setup()
        self.rfile = cast(BufferedReader, BoundedInput(self.rfile, HEAD_BYTES_MAX))

    def parse_request(self) -> bool:
        """Return whether there is a request, for this machine by its own name if it listens for that alone."""
        if not super().parse_request():
            return False
        server = cast(_Server, self.server)
        if server.is_local and not is_loopback(host_of(self.headers.get("Host", "localhost"))):
            self.send_error(http.HTTPStatus.FORBIDDEN, "this port is for this machine, called by its own name")
            return False
        server.callers.asked(self.connection)
        return True

    def log_message(self, format: str, *arguments: object) -> None:
        """Do not log requests: the terminal belongs to the pipeline."""


def _listening(host: str, port: int, registry: CollectorRegistry) -> _Server:
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        made = functools.partial(_Server, family=family)
        return make_server(host, port, make_wsgi_app(registry), cast(type[_Server], made), handler_class=_Caller)
    except OSError as error:
        raise UsageError(
            f"metrics cannot be shown at port {port} of {host} ({error.strerror or error}): choose another port, "
            "or end what uses this one"
        ) from error


def _seconds(duration_ms: int | None) -> float | None:
    return None if duration_ms is None else duration_ms / 1000


def _lag(source: SourceProgress, unit: str) -> int | None:
    return source.lag if source.unit == unit else None


def _last(progress: Progress, of: Callable[..., float]) -> float | None:
    return None if progress.last_checkpoint is None else of(progress.last_checkpoint)


METRICS_PATH = "/v1/metrics"
"""Where collectors take metrics over HTTP, as OTLP has it."""

LAST_PUSH_MS_MAX = 3_000
"""How long the end of a run waits for a collector that does not answer."""


class MetricsPush:
    """Sends the metrics of one run to a collector until it is closed; before ``watch`` it sends none.

    A collector that does not answer is no failure of the run: the SDK logs it and tries again.
    """

    def __init__(self, url: str) -> None:
        """Make it; nothing is sent yet. ``url``: of a collector, such as ``http://localhost:4318``.

        Raises:
            UsageError: it is no such URL, or the SDK is not installed.
        """
        self.url = _endpoint(url)
        self.note = f"metrics are sent to {self.url}"
        try:
            from opentelemetry.exporter.otlp.proto.http.metric_exporter import OTLPMetricExporter
            from opentelemetry.sdk.metrics import MeterProvider
            from opentelemetry.sdk.metrics.export import PeriodicExportingMetricReader
        except ImportError:
            raise UsageError(f"metrics for OpenTelemetry need its SDK: {install_command('otel')}") from None
        self._reader = PeriodicExportingMetricReader(OTLPMetricExporter(endpoint=self.url))
        self._provider = MeterProvider(metric_readers=[self._reader], shutdown_on_exit=False)
        self._closing = threading.Lock()
        self._is_closed = False

    def watch(self, pipeline: str, progress: Callable[[], Progress]) -> None:
        """Send the metrics of ``pipeline`` from now on."""
        meter = self._provider.get_meter("headgate")
        collector = ProgressCollector(pipeline, progress)
        for family in collector.collect():
            is_counter = family.type == "counter"
            make = meter.create_observable_counter if is_counter else meter.create_observable_gauge
            name = family.name.replace("headgate_", "headgate.", 1)
            make(name, [partial(_observed, collector, family.name)], description=family.documentation)

    def close(self) -> None:
        """Send the last metrics and end. From any thread; idempotent."""
        with self._closing:
            if not self._is_closed:
                self._is_closed = True
                self._provider.shutdown(LAST_PUSH_MS_MAX)


def _observed(collector: ProgressCollector, name: str, options: object) -> Iterable[Any]:
    """Return what the family ``name`` has now; ``options`` are the SDK's."""
    from opentelemetry.metrics import Observation

    for family in collector.collect():
        if family.name == name:
            yield from (Observation(float(sample.value), sample.labels) for sample in family.samples)


def _endpoint(url: str) -> str:
    """Return where metrics go.

    Raises:
        UsageError
    """
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise UsageError(f"metrics are sent to a collector such as http://localhost:4318, not to {url!r}")
    return url if parts.path.strip("/") else f"{parts.scheme}://{parts.netloc}{METRICS_PATH}"
