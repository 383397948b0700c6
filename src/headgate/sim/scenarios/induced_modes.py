"""Hooks and markers beside another guarantee, barriers that overtake, or savepoints (SM42).

A seed draws one of the four, and the rest as ``induced`` and that kind of run do. The checkers are those of both: what
the mode allows and nothing else, and I12.
"""

from __future__ import annotations

import random
from collections.abc import Mapping

from headgate.model.config import Guarantee
from headgate.model.manifest import Manifest
from headgate.sim.product.run import EVENTS_MAX, Result, result_of
from headgate.sim.scenarios.guarantees import draw_mode
from headgate.sim.scenarios.induced import InducedRun
from headgate.sim.scenarios.savepoints import SavepointRun
from headgate.sim.scenarios.unaligned import OvertakingRun

KINDS = ("at_least_once", "at_most_once", "overtaking", "savepoints")


class ModeRun(InducedRun):
    """Counts at least or at most once."""

    def __init__(self, seed: int, mode: Guarantee, *, is_traced: bool = False, events_max: int = EVENTS_MAX) -> None:
        super().__init__(seed, is_traced=is_traced, events_max=events_max)
        count = len(self.settings.inputs)
        self.judge = draw_mode(self, seed, mode)
        if len(self.settings.inputs) < count:
            self._put_on_tapes(seed, frozenset({0}))
        self.tapes.may_stay = mode is Guarantee.AT_MOST_ONCE


class TapesOvertakenRun(OvertakingRun, InducedRun):
    """Barriers overtake what waits after the marker."""

    def __init__(self, seed: int, *, is_traced: bool = False, events_max: int = EVENTS_MAX) -> None:
        super().__init__(seed, is_traced=is_traced, events_max=events_max)
        self._put_on_tapes(seed, frozenset(range(len(self.settings.inputs))))

    def _on_manifest(self, manifest: Manifest, files: Mapping[str, frozenset[str]]) -> None:
        self.tapes.on_manifest(manifest)
        super()._on_manifest(manifest, files)


class TapesSavedRun(SavepointRun, InducedRun):
    """Savepoints are taken, and the pipeline moves with them."""

    def __init__(self, seed: int, *, is_traced: bool = False, events_max: int = EVENTS_MAX) -> None:
        super().__init__(seed, is_traced=is_traced, events_max=events_max)
        self.has_drains = False  # a drained source is cut where it is, not behind a marker


def drawn(seed: int, *, is_traced: bool = False, events_max: int = EVENTS_MAX) -> InducedRun:
    """Return the run of a seed."""
    kind = random.Random(f"mixed of seed {seed}").choice(KINDS)
    if kind == "overtaking":
        return TapesOvertakenRun(seed, is_traced=is_traced, events_max=events_max)
    if kind == "savepoints":
        return TapesSavedRun(seed, is_traced=is_traced, events_max=events_max)
    return ModeRun(seed, Guarantee(kind), is_traced=is_traced, events_max=events_max)


def run_seed(seed: int, *, is_traced: bool = False, events_max: int = EVENTS_MAX) -> Result:
    """Run one seed."""
    return result_of(drawn(seed, is_traced=is_traced, events_max=events_max), seed, is_traced=is_traced)
