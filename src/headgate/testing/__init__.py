"""Tests pipelines, sources and sinks: a runner without Spark, a scripted source, a readable sink, conformance kits.

Names are imported when they are first used, because pytest imports this package for its plugin in every project.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from headgate.public_names import PublicNames

PUBLIC_NAMES = {
    "headgate.testing.connectors": "Collect EOF FailOnce PAUSE ScriptedSource",
    "headgate.testing.in_process": "run running",
    "headgate.testing.source_kit": "Growing check_late_splits check_source",
    "headgate.testing.sink_kit": "check_sink",
    "headgate.testing.sinks.fake_pipeline": "Target",
}
"""The public names by module. A new one also needs an import below, for type checkers."""

_names = PublicNames(__name__, PUBLIC_NAMES)

if TYPE_CHECKING:
    from headgate.testing.connectors import EOF as EOF
    from headgate.testing.connectors import PAUSE as PAUSE
    from headgate.testing.connectors import Collect as Collect
    from headgate.testing.connectors import FailOnce as FailOnce
    from headgate.testing.connectors import ScriptedSource as ScriptedSource
    from headgate.testing.in_process import run as run
    from headgate.testing.in_process import running as running
    from headgate.testing.sink_kit import check_sink as check_sink
    from headgate.testing.sinks.fake_pipeline import Target as Target
    from headgate.testing.source_kit import Growing as Growing
    from headgate.testing.source_kit import check_late_splits as check_late_splits
    from headgate.testing.source_kit import check_source as check_source
else:
    __all__ = _names.all


def __getattr__(name: str) -> Any:
    """Import a public name when it is first used."""
    return _names.load(name)


def __dir__() -> list[str]:
    return _names.all
