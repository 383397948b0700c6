"""The loops whose results others have published, under faults: FLIP-16's ``2n − n = n``, Flink ML's sums per round."""

from __future__ import annotations

import random
from collections import Counter

import pytest

from headgate.sim.fixedloops import RECORDS, ROUNDS, SPLITS, add_and_subtract, sums_per_round
from headgate.sim.run import Drawing, run_seed


def test_two_n_minus_n_is_n_for_every_key() -> None:  # A1: state = records of the source = records behind the loop
    workload = add_and_subtract(random.Random(0), 2)
    source = workload.graph.nodes[0].spec
    read = Counter(record[2] for _, records in source.splits for record in records)  # type: ignore[attr-defined]
    behind = Counter(record[2] for record in workload.expected["out"].elements())
    state = {record[2]: record[3] for record in workload.expected["state"] if record[0] == "=tally"}
    assert read == behind == Counter(state)
    assert read.total() == SPLITS * RECORDS


def test_the_sum_is_the_same_in_every_round_and_comes_once() -> None:  # A2
    workload = sums_per_round(random.Random(0), 3)
    total = SPLITS * (0 + RECORDS - 1) * RECORDS // 2
    rounds = sorted((record[0].count("@P"), record[3], times) for record, times in workload.expected["out"].items())
    assert rounds == [(round_, total, 1) for round_ in range(ROUNDS)]


@pytest.mark.parametrize("draw", [add_and_subtract, sums_per_round])
def test_faults_change_nothing(draw: Drawing) -> None:
    failed = [(seed, str(result.violation)) for seed in range(12) if (result := run_seed(seed, draw=draw)).violation]
    assert failed == []
