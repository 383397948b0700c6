"""Numbers that are sent to an OpenTelemetry collector: a small one on loopback (OM9)."""

from __future__ import annotations

import gzip
import sys
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any

import pytest
from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import ExportMetricsServiceRequest

from headgate.api import metrics
from headgate.api.foreground import start_with_endpoint
from headgate.api.metrics import MetricsPush
from headgate.errors import UsageError
from headgate.model.ids import NodeName
from headgate.model.progress import NodeProgress, PipelineState, Progress, SilentObserver, SubtaskProgress


class Collector(HTTPServer):
    """Keeps what it is sent."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Taking)
        self.paths: list[str] = []
        self.requests: list[Any] = []

    def numbers(self) -> dict[tuple[str, tuple[str, ...]], float]:
        """Return the latest request by name and values of attributes."""
        found: dict[tuple[str, tuple[str, ...]], float] = {}
        for resource in self.requests[-1].resource_metrics:
            for metric in (metric for scope in resource.scope_metrics for metric in scope.metrics):
                for point in (metric.sum if metric.HasField("sum") else metric.gauge).data_points:
                    labels = tuple(attribute.value.string_value for attribute in point.attributes)
                    found[metric.name, labels] = point.as_double or point.as_int
        return found


class _Taking(BaseHTTPRequestHandler):
    server: Collector

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        body = gzip.decompress(body) if self.headers.get("Content-Encoding") == "gzip" else body
        self.server.paths.append(self.path)
        self.server.requests.append(ExportMetricsServiceRequest.FromString(body))
        self.send_response(200)
        self.end_headers()

    def log_message(self, format: str, *arguments: object) -> None:
        pass


@pytest.fixture
def collector() -> Iterator[Collector]:
    server = Collector()
    thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    yield server
    server.shutdown()
    server.server_close()
    thread.join()


def progress() -> Progress:
    subtask = SubtaskProgress(1, records_in=7, busy_ms=1_500)
    node = NodeProgress(NodeName("map"), records_in=5, subtasks=(subtask,))
    return Progress(PipelineState.RUNNING, nodes=(node,), restarts=2)


def test_the_last_numbers_reach_the_collector(collector: Collector) -> None:  # OM9
    push = MetricsPush(f"http://127.0.0.1:{collector.server_port}")
    push.watch("p", progress)
    push.close()
    push.close()
    assert collector.paths == ["/v1/metrics"]
    numbers = collector.numbers()
    assert numbers["headgate.records_in", ("p", "map", "1")] == 7
    assert numbers["headgate.busy_seconds", ("p", "map", "1")] == 1.5
    assert numbers["headgate.counted_records_in", ("p", "map")] == 5
    assert numbers["headgate.restarts", ("p",)] == 2
    assert numbers["headgate.state", ("p", "running")] == 1


def test_a_collector_that_is_not_there_holds_nobody_up(monkeypatch: pytest.MonkeyPatch) -> None:  # OM9
    monkeypatch.setattr(metrics, "LAST_PUSH_MS_MAX", 100)
    with Collector() as gone:
        port = gone.server_port
    push = MetricsPush(f"http://127.0.0.1:{port}")
    push.watch("p", progress)
    push.close()


def test_without_the_sdk_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:  # OM9
    monkeypatch.setitem(sys.modules, "opentelemetry.sdk.metrics", None)
    with pytest.raises(UsageError, match=r"pip install 'headgate-streams\[otel\]'"):
        MetricsPush("http://localhost:4318")


class Handle:
    """A run that has begun."""

    progress = progress()

    def __init__(self) -> None:
        self.calls: list[Callable[[], None]] = []

    def when_ended(self, call: Callable[[], None]) -> None:
        self.calls.append(call)


def test_a_run_is_watched_until_it_has_ended(collector: Collector) -> None:  # OM9
    notes: list[str] = []
    observer, handle = SilentObserver(), Handle()
    observer.on_note = notes.append  # type: ignore[method-assign]
    push = MetricsPush(f"http://127.0.0.1:{collector.server_port}")
    assert start_with_endpoint(push, "p", observer, lambda: handle) is handle  # type: ignore[arg-type, return-value]
    assert notes == [f"metrics are sent to http://127.0.0.1:{collector.server_port}/v1/metrics"]
    for call in handle.calls:
        call()
    assert collector.numbers()["headgate.restarts", ("p",)] == 2


def test_a_start_that_fails_sends_nothing(collector: Collector) -> None:  # OM9
    def start() -> Any:
        raise UsageError("no")

    push = MetricsPush(f"http://127.0.0.1:{collector.server_port}")
    with pytest.raises(UsageError, match="no"):
        start_with_endpoint(push, "p", SilentObserver(), start)
    assert push._is_closed
    assert collector.requests == []


@pytest.mark.parametrize("url", ["localhost:4318", "grpc://localhost:4317", "", "http://"])
def test_what_is_no_collector_is_refused(url: str) -> None:  # OM9
    with pytest.raises(UsageError, match="such as http://localhost:4318"):
        MetricsPush(url)
