"""The numbers of a running pipeline for OpenTelemetry: sent to a collector now and then, and once more at the end.

They are those of ``api.prometheus``, under the same names but with a dot behind ``headgate``. The SDK's own variables
(``OTEL_EXPORTER_OTLP_HEADERS``, ``OTEL_METRIC_EXPORT_INTERVAL``, ``OTEL_RESOURCE_ATTRIBUTES``, …) count as everywhere.
Needs the extra ``otel``.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any
from urllib.parse import urlsplit

from headgate.api.prometheus import ProgressCollector
from headgate.errors import UsageError
from headgate.model.progress import Progress

METRICS_PATH = "/v1/metrics"
"""Where collectors take metrics over HTTP, as OTLP has it."""

LAST_PUSH_MS_MAX = 3_000
"""How long the end of a run waits for a collector that does not answer."""


class MetricsPush:
    """Sends the numbers of one run until it is closed; before ``watch`` there are none.

    A collector that does not answer is no failure of the run: the SDK logs it and tries again.
    """

    def __init__(self, url: str) -> None:
        """Make it; nothing is sent yet. ``url``: of a collector, such as ``http://localhost:4318``.

        Raises:
            UsageError: it is no such URL, or the SDK is not installed.
        """
        self.url = _endpoint(url)
        self.told = f"metrics are sent to {self.url}"
        try:
            from opentelemetry.exporter.otlp.proto.http.metric_exporter import OTLPMetricExporter
            from opentelemetry.sdk.metrics import MeterProvider
            from opentelemetry.sdk.metrics.export import PeriodicExportingMetricReader
        except ImportError:
            raise UsageError("metrics for OpenTelemetry need its SDK: pip install 'headgate[otel]'") from None
        self._reader = PeriodicExportingMetricReader(OTLPMetricExporter(endpoint=self.url))
        self._provider = MeterProvider(metric_readers=[self._reader], shutdown_on_exit=False)
        self._closing = threading.Lock()
        self._is_closed = False

    def watch(self, pipeline: str, progress: Callable[[], Progress]) -> None:
        """Send the numbers of ``pipeline`` from now on."""
        meter = self._provider.get_meter("headgate")
        collector = ProgressCollector(pipeline, progress)
        for family in collector.collect():
            is_counter = family.type == "counter"
            make = meter.create_observable_counter if is_counter else meter.create_observable_gauge
            name = family.name.replace("headgate_", "headgate.", 1)
            make(name, [partial(_observed, collector, family.name)], description=family.documentation)

    def close(self) -> None:
        """Send the last numbers and end. From any thread; may be called again."""
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
