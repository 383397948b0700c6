"""Retention and scaling policies: the least and the most that they can be, and what is recorded of them."""

from __future__ import annotations

import pytest

from headgate.errors import CorruptionError, UsageError
from headgate.protocol.store.layouts import SEGMENTS_MAX, ScalingPolicy, Unit
from headgate.store.streams import (
    Retention,
    RetentionPolicy,
    Scaling,
    decode_retention,
    decode_scaling,
    encode_retention,
    encode_scaling,
    recorded_retention,
)


@pytest.mark.parametrize("policy", [RetentionPolicy(1, 1), RetentionPolicy(1, None), RetentionPolicy(None, 1), None])
def test_a_retention_is_recorded_as_it_was_given(policy: RetentionPolicy | None) -> None:
    assert decode_retention("here", encode_retention(policy)) == policy
    again = recorded_retention(policy and policy.age_ms, policy and policy.size_bytes)
    assert (again and again.checked()) == policy


@pytest.mark.parametrize(
    "policy", [ScalingPolicy(Unit.EVENTS, 1, 1, 1, 0), ScalingPolicy(Unit.BYTES, 2, 1, SEGMENTS_MAX, 1), None]
)
def test_a_scaling_is_recorded_as_it_was_given(policy: ScalingPolicy | None) -> None:
    assert decode_scaling("here", encode_scaling(policy)) == policy


def test_a_scaling_may_be_as_small_and_as_large_as_a_stream() -> None:
    smallest = Scaling(events_per_second=1, max_segments=1, cool_down=0)
    assert smallest.checked() == ScalingPolicy(Unit.EVENTS, 1, 1, 1, 0)
    assert Scaling(bytes_per_second="1KB", max_segments=SEGMENTS_MAX).checked().segments_max == SEGMENTS_MAX


@pytest.mark.parametrize(
    "text", ["x", "[]", "{}", '{"age_ms": 0, "size_bytes": 1}', '{"age_ms": 1, "size_bytes": "1"}']
)
def test_a_damaged_retention_is_told(text: str) -> None:
    with pytest.raises(CorruptionError, match="a retention policy"):
        decode_retention("here", text)


@pytest.mark.parametrize("numbers", ["0, 1, 1, 0", "1, 0, 1, 0", "1, 2, 1, 0", "1, 1, 1"])
def test_a_damaged_scaling_is_told(numbers: str) -> None:
    with pytest.raises(CorruptionError, match="a scaling policy"):
        decode_scaling("here", f'{{"unit": "events", "numbers": [{numbers}]}}')


def test_what_is_wrong_with_a_size_or_an_age_is_said_of_that_option() -> None:
    with pytest.raises(UsageError, match=r"Retention\(size=\) "):
        Retention(size="much").checked()
    with pytest.raises(UsageError, match=r"Retention\(age=\) "):
        Retention(age="soon").checked()
