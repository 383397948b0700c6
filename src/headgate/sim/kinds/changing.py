"""Pipelines that are another one at the next start: in their guarantee (SM43), in their
code (SM46), or because their user goes back to an older checkpoint (SM44).

A seed draws what changes, and the rest as that kind of run does. Counterpart: ``savepoints``, where the place changes.
"""

from __future__ import annotations

import random
from collections.abc import Callable

from headgate.sim.kinds.changing_back import GoingBackRun
from headgate.sim.kinds.changing_code import ChangingCodeRun
from headgate.sim.kinds.changing_modes import ChangingModeRun
from headgate.sim.product.run import EVENTS_MAX, Result, Run, result_of

KINDS: tuple[Callable[..., Run], ...] = (ChangingModeRun, GoingBackRun, ChangingCodeRun)


def drawn(seed: int, *, is_traced: bool = False, events_max: int = EVENTS_MAX) -> Run:
    """Return the run of a seed."""
    return random.Random(f"change of seed {seed}").choice(KINDS)(seed, is_traced=is_traced, events_max=events_max)


def run_seed(seed: int, *, is_traced: bool = False, events_max: int = EVENTS_MAX) -> Result:
    """Run one seed."""
    return result_of(drawn(seed, is_traced=is_traced, events_max=events_max), seed, is_traced=is_traced)
