"""All checks over a history, in one call.

Counterpart: ``checks``, ``cycles``, ``groups``. Source: docs/spec/log-histories.md.
"""

from __future__ import annotations

from collections.abc import Iterable

from tests.logs.checks import POSITIONS, Anomaly, lost_in_the_end
from tests.logs.cycles import cycles
from tests.logs.groups import group_anomalies
from tests.logs.history import Index, Operation


def anomalies(operations: Iterable[Operation], *, is_complete: bool = True, is_real_time: bool = True) -> list[Anomaly]:
    """Return what is wrong with a history.

    Args:
        operations: of all processes, in any order.
        is_complete: somebody has read everything when all had ended.
        is_real_time: whoever looks sees what was acknowledged before it looked; else only what its own process has
            done and seen.
    """
    index = Index.of(operations)
    found = [anomaly for check in POSITIONS for anomaly in check(index)]
    found += cycles(index, is_real_time=is_real_time)
    found += group_anomalies(index, is_complete=is_complete)
    return [*found, *lost_in_the_end(index)] if is_complete else found
