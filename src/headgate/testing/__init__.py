"""For tests of pipelines, sources and sinks: a scripted source, a sink to collect from, conformance kits."""

from headgate.testing.collect import Collect
from headgate.testing.script import EOF, PAUSE, FailOnce, ScriptedSource
from headgate.testing.sink_kit import Target, check_sink
from headgate.testing.source_kit import check_source

__all__ = ["EOF", "PAUSE", "Collect", "FailOnce", "ScriptedSource", "Target", "check_sink", "check_source"]
