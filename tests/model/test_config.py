"""Durations and defaults."""

from __future__ import annotations

from datetime import timedelta

import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headgate.errors import UsageError
from headgate.model.config import CheckpointConfig, Duration, ExponentialDelay, PipelineConfig, duration_ms


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("500ms", 500),
        ("1s", 1_000),
        (" 1.5 s ", 1_500),
        ("5m", 300_000),
        ("5min", 300_000),
        ("1h", 3_600_000),
        ("2d", 172_800_000),
        (0, 0),
        ("1 second", 1_000),
        ("90 seconds", 90_000),
        ("1 minute", 60_000),
        ("1.5 hours", 5_400_000),
        ("1 day", 86_400_000),
        ("20 milliseconds", 20),
        (timedelta(minutes=1, milliseconds=5), 60_005),
        (pd.Timedelta("2h"), 7_200_000),
        (timedelta(), 0),
    ],
)
def test_durations_are_milliseconds(text: Duration, expected: int) -> None:
    assert duration_ms(text) == expected


@given(st.integers(0, 10**9))
def test_a_whole_number_of_milliseconds_is_itself(value: int) -> None:
    assert duration_ms(f"{value}ms") == duration_ms(timedelta(milliseconds=value)) == value


@pytest.mark.parametrize("value", [60, 1.5, -5])
def test_a_number_without_a_unit_is_refused(value: float) -> None:
    with pytest.raises(UsageError, match=f"window size is {value} without a unit: write '{value}s' for seconds, or"):
        duration_ms(value, "window size")  # type: ignore[arg-type]


@pytest.mark.parametrize("text", ["", "1", "s", "-1s", "1 week", "1s 5ms", "1S", "1e3s"])
def test_other_texts_are_refused_with_examples(text: str) -> None:
    with pytest.raises(UsageError, match=r"interval must look like '500ms', '1s', '5 minutes' or '1h', not"):
        duration_ms(text, "interval")


@pytest.mark.parametrize("value", [True, None, b"1s"])
def test_other_types_are_refused(value: object) -> None:
    with pytest.raises(UsageError, match="must be a duration such as '1s' or a timedelta"):
        duration_ms(value)  # type: ignore[arg-type]


def test_a_negative_duration_is_refused() -> None:
    with pytest.raises(UsageError, match="timeout must not be negative, but is -1 day, 23:59:55"):
        duration_ms(timedelta(seconds=-5), "timeout")


@pytest.mark.parametrize(
    ("value", "least"),
    [("1.5ms", 2), ("0.4ms", 1), (timedelta(microseconds=2_500), 3), ("0.0001s", 1), (pd.Timedelta(1, "ns"), 1)],
)
def test_a_part_of_a_millisecond_is_refused_and_not_rounded(value: Duration, least: int) -> None:
    with pytest.raises(UsageError, match=f"timeout is .*, but durations are whole milliseconds: write '{least}ms'"):
        duration_ms(value, "timeout")


@pytest.mark.parametrize("value", [timedelta.max, "36501d", "999999999999999999h"])
def test_a_duration_of_ages_is_refused(value: Duration) -> None:
    with pytest.raises(UsageError, match=r"timeout is .*, but must be at most 36500 days"):
        duration_ms(value, "timeout")


@pytest.mark.parametrize(
    ("value", "expected"),
    [("0.1s", 100), ("1.001s", 1_001), (timedelta(days=36_500), 3_153_600_000_000), (timedelta(milliseconds=1), 1)],
)
def test_whole_milliseconds_are_exact(value: Duration, expected: int) -> None:
    assert duration_ms(value) == expected


def test_a_pipeline_is_exactly_once_and_restarts_unless_told_otherwise() -> None:
    config = PipelineConfig("p", 2, "/tmp/x")
    assert config.checkpoints == CheckpointConfig(interval_ms=1_000, max_concurrent=1, tolerable_failures=0, retained=2)
    assert config.restart == ExponentialDelay(attempts=None)
    assert config.max_parallelism == 128
