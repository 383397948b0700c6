"""Memory: what counts as growth."""

from __future__ import annotations

import pytest
from bench.memory import judge

SECONDS = [float(second) for second in range(100)]


def test_growth_after_the_warm_up_is_slope_and_share() -> None:
    used = [100e6 + max(second - 20, 0) * 1e6 for second in SECONDS]
    judged = judge(SECONDS, used)
    assert judged["slope_mb_per_min"] == pytest.approx(60)
    assert judged["growth"] == pytest.approx(0.594, abs=0.01)
    assert judged["max_mb"] == pytest.approx(179)


def test_memory_that_fills_during_the_warm_up_is_flat() -> None:
    judged = judge(SECONDS, [min(second, 19.0) * 1e6 for second in SECONDS])
    assert judged["slope_mb_per_min"] == pytest.approx(0, abs=1e-6)
    assert judged["growth"] == 0


def test_what_fills_for_a_while_is_told_from_what_goes_on() -> None:
    filled = judge(SECONDS, [100e6 + min(second, 50.0) * 1e6 for second in SECONDS])
    assert filled["slope_mb_per_min"] > 10
    assert filled["slope_of_second_half_mb_per_min"] == pytest.approx(0, abs=1e-6)
    leaking = judge(SECONDS, [100e6 + second * 1e6 for second in SECONDS])
    assert leaking["slope_of_second_half_mb_per_min"] == pytest.approx(60)


def test_too_few_samples_are_refused() -> None:
    with pytest.raises(ValueError, match="found 8"):
        judge(SECONDS[:10], SECONDS[:10])
