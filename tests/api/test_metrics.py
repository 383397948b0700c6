"""The port for Prometheus: fetched over a socket, and read by Prometheus' own parsers."""

from __future__ import annotations

import contextlib
import gzip
import http.client
import os
import select
import shutil
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any
from urllib.parse import urlsplit

import pytest
from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import ExportMetricsServiceRequest
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample
from tests.servers.objects import OWN

from headgate.api import metrics
from headgate.api.foreground import start_with_endpoint
from headgate.api.metrics import MetricsPort, MetricsPush
from headgate.api.pipeline import METRICS_HOST
from headgate.cli.options import RunOptions, StartPoint
from headgate.cli.run import metrics_port
from headgate.errors import UsageError
from headgate.model.ids import CheckpointId, Generation, NodeName
from headgate.model.progress import (
    CheckpointProgress,
    LoopProgress,
    NodeProgress,
    PendingCheckpoint,
    PipelineState,
    Progress,
    SilentObserver,
    SourceProgress,
    SplitProgress,
    SubtaskProgress,
)

SUBTASKS = (
    SubtaskProgress(0, 10, 5, 1, 1_500, 250, 250, 0.5, 0.1, 2, 300, 1_700_000_000_500, (("late", 4), ("cached", 2))),
    SubtaskProgress(1, 20, 5),
)
NODE = NodeProgress(NodeName('sum of "x"'), 8_000_000, 7, lag_ms=2_500, state_bytes=99, state_rows=3, subtasks=SUBTASKS)
PROGRESS = Progress(
    PipelineState.RUNNING,
    Generation(3),
    restarts=2,
    failures=2,
    nodes=(NODE,),
    busy=0.75,
    uptime_ms=60_000,
    loops=(LoopProgress(NodeName("ranks"), queued_bytes=7),),
    last_checkpoint=CheckpointProgress(CheckpointId(7), 34, 12_300, 1_700_000_000_000),
    pending_checkpoint=PendingCheckpoint(CheckpointId(8), 1_500),
)


@pytest.fixture
def port() -> Iterator[MetricsPort]:
    made = MetricsPort(0, METRICS_HOST)
    yield made
    made.close()


def fetched(url: str, accept: str = "text/plain") -> str:
    request = urllib.request.Request(url, headers={"Accept": accept})
    with urllib.request.urlopen(request, timeout=120) as answer:
        text: str = answer.read().decode()
    return text


def samples(text: str) -> dict[str, list[Sample]]:
    found: dict[str, list[Sample]] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            found.setdefault(sample.name, []).append(sample)
    return found


def values(text: str, name: str, *labels: str) -> dict[Any, float]:
    return {tuple(s.labels[label] for label in labels): s.value for s in samples(text)[name]}


def test_every_operator_and_subtask_is_shown(port: MetricsPort) -> None:
    port.watch("counts", lambda: PROGRESS)
    text = fetched(port.url)
    assert {s.labels["pipeline"] for found in samples(text).values() for s in found} == {"counts"}
    of = 'sum of "x"'
    assert values(text, "headgate_records_in_total", "operator", "subtask") == {(of, "0"): 10, (of, "1"): 20}
    assert values(text, "headgate_late_records_total", "subtask") == {("0",): 4, ("1",): 0}
    assert values(text, "headgate_busy_seconds_total", "subtask") == {("0",): 1.5, ("1",): 0}
    assert values(text, "headgate_held_back_seconds_total", "subtask") == {("0",): 0.25, ("1",): 0}
    assert values(text, "headgate_queued_bytes", "subtask") == {("0",): 300, ("1",): 0}
    assert values(text, "headgate_watermark_timestamp_seconds", "subtask") == {("0",): 1_700_000_000.5}
    assert values(text, "headgate_operator_events_total", "subtask", "event") == {("0", "cached"): 2}
    assert values(text, "headgate_counted_records_in", "operator") == {(of,): 8_000_000}
    assert values(text, "headgate_watermark_lag_seconds", "operator") == {(of,): 2.5}
    assert values(text, "headgate_restarts_total") == {(): 2}
    assert values(text, "headgate_last_checkpoint_duration_seconds") == {(): 0.034}
    assert values(text, "headgate_pending_checkpoint_age_seconds") == {(): 1.5}
    assert values(text, "headgate_loop_queued_bytes", "loop") == {("ranks",): 7}
    states = values(text, "headgate_state", "state")
    assert [state for (state,), is_now in states.items() if is_now] == ["running"]


def test_sources_and_their_most_lagging_splits_are_shown(port: MetricsPort) -> None:
    splits = (SplitProgress('o"x/1', 1, 70, 100, 30, 70, 7.5, 1_700_000_000_500), SplitProgress("o/2", is_idle=True))
    orders = SourceProgress(NodeName("orders"), "records", 3, 1, 35, 1, splits)
    logs = SourceProgress(
        NodeName("logs"),
        "bytes",
        1,
        0,
        9,
        0,
        (SplitProgress("a.log", 0, 1, 10, 9, is_waiting=True, undecided=5),),
        1,
        5,
    )
    port.watch("counts", lambda: replace(PROGRESS, sources=(orders, logs), drift_ms=2_500))
    text = fetched(port.url)
    assert values(text, "headgate_source_splits", "source") == {("orders",): 3, ("logs",): 1}
    assert values(text, "headgate_source_idle_splits", "source") == {("orders",): 1, ("logs",): 0}
    assert values(text, "headgate_source_waiting_splits", "source") == {("orders",): 0, ("logs",): 1}
    assert values(text, "headgate_source_undecided", "source") == {("orders",): 0, ("logs",): 5}
    assert values(text, "headgate_split_undecided", "split") == {('o"x/1',): 0, ("o/2",): 0, ("a.log",): 5}
    assert values(text, "headgate_split_waiting", "split") == {('o"x/1',): 0, ("o/2",): 0, ("a.log",): 1}
    assert values(text, "headgate_drift_seconds") == {(): 2.5}
    assert values(text, "headgate_source_lag_records", "source") == {("orders",): 35}
    assert values(text, "headgate_source_lag_bytes", "source") == {("logs",): 9}
    first = ("orders", 'o"x/1')
    assert values(text, "headgate_split_lag_records", "source", "split") == {first: 30}
    assert values(text, "headgate_split_lag_bytes", "source", "split") == {("logs", "a.log"): 9}
    assert values(text, "headgate_split_position", "source", "split") == {first: 70, ("logs", "a.log"): 1}
    assert values(text, "headgate_split_end", "split")['o"x/1',] == 100
    assert values(text, "headgate_split_records_per_second", "split")['o"x/1',] == 7.5
    assert values(text, "headgate_split_watermark_timestamp_seconds", "split") == {('o"x/1',): 1_700_000_000.5}
    assert values(text, "headgate_split_idle", "split") == {('o"x/1',): 0, ("o/2",): 1, ("a.log",): 0}


def test_each_request_gets_the_latest_numbers(port: MetricsPort) -> None:
    seen = [PROGRESS]
    port.watch("counts", lambda: seen[-1])
    fetched(port.url)
    seen.append(replace(PROGRESS, state=PipelineState.FAILED, restarts=5))
    assert values(fetched(port.url), "headgate_restarts_total") == {(): 5}


def test_openmetrics_is_understood_too(port: MetricsPort) -> None:
    from prometheus_client.openmetrics.parser import text_string_to_metric_families as parsed

    port.watch("counts", lambda: PROGRESS)
    text = fetched(port.url, "application/openmetrics-text; version=1.0.0")
    assert {family.name for family in parsed(text)} >= {"headgate_records_in", "headgate_state"}


def test_promtool_finds_nothing_wrong(port: MetricsPort) -> None:
    promtool = shutil.which("promtool", path=os.pathsep.join([os.environ["PATH"], str(OWN)]))
    if promtool is None:
        pytest.skip(
            "promtool is not installed: 'make setup-test' gets it on Debian, where it is in the package prometheus"
        )
    port.watch("counts", lambda: PROGRESS)
    text = fetched(port.url)
    checked = subprocess.run([promtool, "check", "metrics"], input=text, capture_output=True, text=True, timeout=120)
    assert (checked.returncode, checked.stdout + checked.stderr) == (0, "")


def test_a_port_that_is_taken_is_one_sentence(port: MetricsPort) -> None:
    taken = int(port.url.split(":")[-1].split("/")[0])
    with pytest.raises(UsageError, match=f"^metrics cannot be shown at port {taken} of 127.0.0.1 .*another port"):
        MetricsPort(taken, METRICS_HOST)
    with pytest.raises(UsageError, match=r"metrics cannot be shown at port 0 of 203\.0\.113\.1"):
        MetricsPort(0, "203.0.113.1")
    with pytest.raises(UsageError, match="from 0 to 65535"):
        MetricsPort(70_000, METRICS_HOST)


class Ending:
    """A handle that ends when the test says so."""

    progress = PROGRESS

    def __init__(self) -> None:
        self.calls: list[Callable[[], None]] = []

    def when_ended(self, call: Callable[[], None]) -> None:
        self.calls.append(call)


class Noting(SilentObserver):
    def __init__(self) -> None:
        self.notes: list[str] = []

    def on_note(self, text: str) -> None:
        self.notes.append(text)


def is_open(port: MetricsPort) -> bool:
    host, number = port.url.removeprefix("http://").removesuffix("/metrics").split(":")
    with socket.socket() as asking:
        return asking.connect_ex((host, int(number))) == 0


def test_a_port_answers_from_the_start_to_the_end_of_a_run(port: MetricsPort) -> None:
    assert fetched(port.url) == "", "nothing runs yet"
    handle: Any = Ending()
    observer = Noting()
    assert start_with_endpoint(port, "counts", observer, lambda: handle) is handle
    assert observer.notes == [f"metrics at {port.url}"]
    assert "headgate_state" in fetched(port.url)
    (end,) = handle.calls
    end()
    end()
    assert not is_open(port)


def test_a_start_that_fails_gives_its_port_up(port: MetricsPort) -> None:
    def start() -> Any:
        assert is_open(port)
        raise UsageError("no Java")

    with pytest.raises(UsageError, match="no Java"):
        start_with_endpoint(port, "counts", SilentObserver(), start)
    assert not is_open(port)


def options(number: int) -> RunOptions:
    begins = StartPoint(None, None, ())
    return RunOptions(None, None, None, begins, False, False, False, False, None, metrics_port=number)


def test_who_goes_on_for_another_runs_without_a_port_that_is_taken(
    port: MetricsPort, capsys: pytest.CaptureFixture[str]
) -> None:
    taken = options(int(port.url.split(":")[-1].split("/")[0]))
    with pytest.raises(UsageError, match="metrics cannot be shown"):
        metrics_port(taken, must_run=False)
    assert metrics_port(taken, must_run=True) is None
    assert "running without metrics: metrics cannot be shown" in capsys.readouterr().err


def test_a_supervisor_passes_the_port_on_and_a_wrong_one_is_refused() -> None:
    assert "--metrics-port=9095" in options(9_095).of_a_driver()
    with pytest.raises(UsageError, match="--metrics-port is a number from 0 to 65535"):
        options(70_000).check()
    with pytest.raises(UsageError, match="--metrics-host is about --metrics-port"):
        replace(options(1), metrics_port=None, metrics_host="::1").check()


def test_silent_callers_take_a_few_descriptors_and_keep_nobody_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metrics, "CALLERS_MAX", 4)
    monkeypatch.setattr(metrics._Caller, "timeout", 600)  # they are ended because others come
    port = MetricsPort(0, METRICS_HOST)
    port.watch("shop", lambda: PROGRESS)
    with contextlib.ExitStack() as opened:
        opened.callback(port.close)
        silent: list[socket.socket] = []
        while len(silent) < 12:
            oldest = silent[-4] if len(silent) >= 4 else None
            if (stream := silent_caller(port, oldest)) is not None:
                silent.append(opened.enter_context(stream))
        assert values(fetched_at_last(port.url), "headgate_restarts_total", "pipeline") == {("shop",): 2}


def silent_caller(port: MetricsPort, oldest: socket.socket | None) -> socket.socket | None:
    """Connect; return the connection once ``oldest`` was ended for it, None if it was refused.

    It is refused while threads of too many ended connections have not closed them yet.
    """
    stream = socket.create_connection((METRICS_HOST, int(urlsplit(port.url).port or 0)), 120)
    if oldest is None:
        return stream
    ended, _, _ = select.select([oldest, stream], [], [], 120)
    assert ended, "neither the oldest connection nor the new one was ended"
    if oldest in ended:
        return stream
    stream.close()
    return None


def fetched_at_last(url: str) -> str:
    """Fetch ``url``, again while the call is refused as in ``silent_caller``."""
    deadline = time.monotonic() + 300
    while True:
        try:
            return fetched(url)
        except OSError:
            if time.monotonic() > deadline:
                raise


def test_a_head_without_end_is_not_read_on(port: MetricsPort, capfd: pytest.CaptureFixture[str]) -> None:
    address = METRICS_HOST, int(urlsplit(port.url).port or 0)
    with socket.create_connection(address, 120) as stream:
        stream.sendall(b"GET /metrics HTTP/1.1\r\n" + (b"a: " + b"b" * 1_000 + b"\r\n") * 17)
        with contextlib.suppress(ConnectionResetError):
            assert stream.recv(1) == b""
    assert capfd.readouterr() == ("", ""), "the terminal is the pipeline's"


@pytest.mark.parametrize(
    ("host", "status"),
    [("evil.example.com", 403), ("evil.example.com:80", 403), ("localhost:1", 200), ("127.0.0.1", 200), ("[::1]", 200)],
)
def test_metrics_are_not_for_a_page_of_another_site(port: MetricsPort, host: str, status: int) -> None:
    port.watch("shop", lambda: PROGRESS)
    connection = http.client.HTTPConnection(METRICS_HOST, int(urlsplit(port.url).port or 0), timeout=120)
    with contextlib.closing(connection):
        connection.request("GET", "/metrics", headers={"Host": host})
        answer = connection.getresponse()
        assert answer.status == status
        assert (b"headgate_restarts" in answer.read()) is (status == 200)


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


def test_the_last_numbers_reach_the_collector(collector: Collector) -> None:
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


def test_a_collector_that_is_not_there_holds_nobody_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metrics, "LAST_PUSH_MS_MAX", 100)
    with Collector() as gone:
        port = gone.server_port
    push = MetricsPush(f"http://127.0.0.1:{port}")
    push.watch("p", progress)
    push.close()


def test_without_the_sdk_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
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


def test_a_run_is_watched_until_it_has_ended(collector: Collector) -> None:
    notes: list[str] = []
    observer, handle = SilentObserver(), Handle()
    observer.on_note = notes.append  # type: ignore[method-assign]
    push = MetricsPush(f"http://127.0.0.1:{collector.server_port}")
    assert start_with_endpoint(push, "p", observer, lambda: handle) is handle  # type: ignore[arg-type, return-value]
    assert notes == [f"metrics are sent to http://127.0.0.1:{collector.server_port}/v1/metrics"]
    for call in handle.calls:
        call()
    assert collector.numbers()["headgate.restarts", ("p",)] == 2


def test_a_start_that_fails_sends_nothing(collector: Collector) -> None:
    def start() -> Any:
        raise UsageError("no")

    push = MetricsPush(f"http://127.0.0.1:{collector.server_port}")
    with pytest.raises(UsageError, match="no"):
        start_with_endpoint(push, "p", SilentObserver(), start)
    assert push._is_closed
    assert collector.requests == []


@pytest.mark.parametrize("url", ["localhost:4318", "grpc://localhost:4317", "", "http://"])
def test_what_is_no_collector_is_refused(url: str) -> None:
    with pytest.raises(UsageError, match="such as http://localhost:4318"):
        MetricsPush(url)
