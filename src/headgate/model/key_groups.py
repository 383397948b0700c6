"""Key groups: the units in which keyed state is owned and moves.

``key group = hash mod max_parallelism`` and ``subtask = key group · parallelism ÷ max_parallelism``
(P6: contiguous ranges, as in Flink's ``KeyGroupRangeAssignment``). The hash itself is in
``headgate.state.key_hash``; both are frozen: docs/spec/key-groups.md.
"""

from __future__ import annotations

MAX_PARALLELISM_DEFAULT = 128
MAX_PARALLELISM_MAX = 32_768


def key_groups_of_subtask(subtask_index: int, max_parallelism: int, parallelism: int) -> range:
    """Return the contiguous range of key groups that ``subtask_index`` owns."""
    assert 0 <= subtask_index < parallelism <= max_parallelism
    start = -(-subtask_index * max_parallelism // parallelism)
    end = -(-(subtask_index + 1) * max_parallelism // parallelism)
    return range(start, end)
