"""For tests of pipelines, sources and sinks: a runner without Spark, a scripted source, a sink to read, kits."""

from headgate.testing.collect import Collect
from headgate.testing.in_process import run, running
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
    "run",
    "running",
]
