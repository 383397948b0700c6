"""For tests of pipelines, sources and sinks: a scripted source, a sink to collect from, conformance kits."""

from headgate.testing.collect import Collect
from headgate.testing.late_splits import Growing, check_late_splits
from headgate.testing.script import EOF, PAUSE, FailOnce, ScriptedSource
from headgate.testing.sink_kit import check_sink
from headgate.testing.sinks.target import Target
from headgate.testing.source_kit import check_source

__all__ = [
    "EOF",
    "PAUSE",
    "Collect",
    "FailOnce",
    "Growing",
    "ScriptedSource",
    "Target",
    "check_late_splits",
    "check_sink",
    "check_source",
]
