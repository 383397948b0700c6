"""Judges readers that share a log: each event is processed once, those of a key in order.

Counterpart: ``checks``. Source: docs/spec/log-histories.md. Pure. An operation of a member of a group is a read
together with what came of its commit: acknowledged, refused, or never answered.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence

from tests.logs.checks import Anomaly, Kind
from tests.logs.history import Index, Operation, Outcome, Place


def group_anomalies(index: Index, *, is_complete: bool) -> Iterator[Anomaly]:
    """Judge each group of the history by itself."""
    members: dict[str, list[Operation]] = defaultdict(list)
    for operation in index.operations:
        if operation.group:
            members[operation.group].append(operation)
    for group, operations in members.items():
        committed = sorted((x for x in operations if x.outcome is Outcome.OK), key=lambda x: x.read_ns or x.begun_ns)
        yield from _twice(group, committed)
        yield from _out_of_order(index, group, committed)
        if is_complete:
            yield from _lost(index, group, committed, [x for x in operations if x.outcome is Outcome.UNKNOWN])


def _values(operations: Sequence[Operation]) -> list[str]:
    return [value for operation in operations for poll in operation.polls for _, value in poll.events]


def _twice(group: str, committed: Sequence[Operation]) -> Iterator[Anomaly]:
    twice = sorted(value for value, times in Counter(_values(committed)).items() if times > 1)
    if twice:
        yield Anomaly(Kind.PROCESSED_TWICE, f"by group {group}: {twice[:5]}, {len(twice)} in all")


def _lost(index: Index, group: str, committed: Sequence[Operation], unknown: Sequence[Operation]) -> Iterator[Anomaly]:
    """Of what a commit that was not answered would have covered, nobody knows."""
    seen = {*_values(committed), *_values(unknown)}
    there = {send.value for x in index.writers() if x.outcome is Outcome.OK for send in x.sends} | set(index.readers_of)
    lost = sorted(there - seen)
    if lost:
        yield Anomaly(Kind.NOT_PROCESSED, f"by group {group}: {lost[:5]}, {len(lost)} in all")


def _out_of_order(index: Index, group: str, committed: Sequence[Operation]) -> Iterator[Anomaly]:
    reached: dict[str, Place] = {}
    for operation in committed:
        for poll in operation.polls:
            for position, value in poll.events:
                key, place = index.key_of.get(value, value), Place(poll.segment, position)
                if place <= reached.get(key, Place(-1, -1)):
                    yield Anomaly(Kind.OUT_OF_ORDER, f"by group {group}: {value} at {place} behind {reached[key]}")
                reached[key] = place
