"""Hooks and markers beside another guarantee, barriers that overtake, or savepoints (SM42).

A seed draws one of the four, and the rest as ``induced`` and that kind of run do. The checkers are those of both: what
the mode allows and nothing else, and I12.
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Any

from headgate.model.config import Guarantee
from headgate.model.manifest import Manifest
from headgate.sim.scenarios.guarantees import draw_mode
from headgate.sim.scenarios.induced import InducedRun
from headgate.sim.scenarios.savepoints import SavepointRun
from headgate.sim.scenarios.unaligned import OvertakingRun


class AtLeastOnceRun(InducedRun):
    """Counts at least once."""

    MODE = Guarantee.AT_LEAST_ONCE

    def _draw(self) -> None:
        super()._draw()
        count = len(self.settings.inputs)
        self.judge = draw_mode(self, self.seed, self.MODE)
        if len(self.settings.inputs) < count:
            self._put_on_tapes(frozenset({0}))
        self.tapes.may_stay = self.MODE is Guarantee.AT_MOST_ONCE


class AtMostOnceRun(AtLeastOnceRun):
    """Counts at most once."""

    MODE = Guarantee.AT_MOST_ONCE


class TapesOvertakenRun(OvertakingRun, InducedRun):
    """Barriers overtake what waits after the marker."""

    def _draw(self) -> None:
        super()._draw()
        self._put_on_tapes(frozenset(range(len(self.settings.inputs))))

    def _on_manifest(self, manifest: Manifest, files: Mapping[str, frozenset[str]]) -> None:
        self.tapes.on_manifest(manifest)
        super()._on_manifest(manifest, files)


class TapesSavedRun(SavepointRun, InducedRun):
    """Savepoints are taken, and the pipeline moves with them."""

    def _draw(self) -> None:
        super()._draw()
        self.has_drains = False  # a drained source is cut where it is, not behind a marker


MODES = (AtLeastOnceRun, AtMostOnceRun, TapesOvertakenRun, TapesSavedRun)


def draw_induced_mode(seed: int, **options: Any) -> InducedRun:
    """Return the run of a seed."""
    return random.Random(f"mixed of seed {seed}").choice(MODES)(seed, **options)
