"""Count late records, and how late they were.

Lateness is counted in buckets, because counters of subtasks, and of runs of a pipeline, are added up.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from headgate.model.progress import LATE_RECORDS, LATENESS_MS, late_within
from headgate.operators.base import OperatorMetrics

_BOUNDS = np.array(LATENESS_MS)


def count_late(
    metrics: OperatorMetrics, late_ms: npt.NDArray[np.int64], records: npt.NDArray[np.int64] | None = None
) -> None:
    """Count late rows.

    Args:
        metrics: the operator's.
        late_ms: for each row, by how much longer the watermark would have had to wait for it.
        records: how many records each row stands for; None: one.
    """
    buckets = np.minimum(np.searchsorted(_BOUNDS, late_ms), len(_BOUNDS) - 1)
    counts = np.bincount(buckets, weights=records, minlength=len(_BOUNDS)).astype(np.int64)
    metrics.add(LATE_RECORDS, int(counts.sum()))
    for bucket in np.flatnonzero(counts):
        metrics.add(late_within(LATENESS_MS[bucket]), int(counts[bucket]))
