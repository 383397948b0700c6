"""Workers as plain child processes on several machines (``networks``): the stand-in for a cluster that costs no JVM.

Everything else is the product's own. What a cluster does when a machine disappears: it can kill nobody there, and the
next workers come elsewhere.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tests.runtime.launching import FINGERPRINT, ProcessLauncher, Zygote

from headgate.runtime.driver.driver import Driver, lock_for
from headgate.spark.session import SparkHandle


class PlacedLauncher(ProcessLauncher):
    """Spreads the workers of the first submission over the machines; all later ones are on the driver's machine."""

    def __init__(self, definition: Any, own_host: str, machines: Sequence[tuple[str, Sequence[str]]]) -> None:
        self._zygotes = {host: Zygote(at) for host, at in machines}
        self._own_host = own_host
        super().__init__(self._zygotes[own_host], definition)

    def _place(self, submission: int, index: int) -> tuple[Zygote, str]:
        hosts = list(self._zygotes)
        host = hosts[index % len(hosts)] if submission == 1 else self._own_host
        return self._zygotes[host], host

    def _is_out_of_reach(self, zygote: Zygote) -> bool:
        return zygote is not self._zygotes[self._own_host]


def start_placed(spec: dict[str, Any], pipeline: Any, observer: Any) -> SparkHandle:
    """Start a pipeline whose workers are where ``spec`` says."""
    definition = pipeline.definition()
    lock = lock_for(definition.config)
    launcher = PlacedLauncher(definition, spec["host"], spec["machines"])
    driver = Driver(definition, launcher, observer, FINGERPRINT, host=spec["host"], lock=lock, beats=True)
    driver.start()
    return SparkHandle(driver)
