"""Tests pipelines, sources and sinks: a runner without Spark, a scripted source, a readable sink, conformance kits.

Names are imported when they are first used, because pytest imports this package for its plugin in every project.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from headgate.testing.connectors import EOF, PAUSE, Collect, FailOnce, ScriptedSource
    from headgate.testing.in_process import run, running
    from headgate.testing.late_splits import Growing, check_late_splits
    from headgate.testing.sink_kit import check_sink
    from headgate.testing.sinks.fake_pipeline import Target
    from headgate.testing.source_kit import check_source

_HOMES = {
    "Collect": "headgate.testing.connectors",
    "EOF": "headgate.testing.connectors",
    "FailOnce": "headgate.testing.connectors",
    "Growing": "headgate.testing.late_splits",
    "PAUSE": "headgate.testing.connectors",
    "ScriptedSource": "headgate.testing.connectors",
    "Target": "headgate.testing.sinks.fake_pipeline",
    "check_late_splits": "headgate.testing.late_splits",
    "check_sink": "headgate.testing.sink_kit",
    "check_source": "headgate.testing.source_kit",
    "run": "headgate.testing.in_process",
    "running": "headgate.testing.in_process",
}

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


def __getattr__(name: str) -> Any:
    """Import a public name when it is first used."""
    module = _HOMES.get(name)
    if module is None:
        raise AttributeError(f"headgate.testing has no name '{name}'")
    from headgate.call_errors import checked_call, checked_calls

    value = getattr(importlib.import_module(module), name)
    if isinstance(value, type):
        checked_calls(value)
    elif callable(value):
        value = checked_call(value)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
