"""What a machine tells of itself when a rule was broken, and that each of its events and effects is one class."""

from __future__ import annotations

import importlib
import pkgutil
from collections import defaultdict
from dataclasses import fields, is_dataclass
from typing import get_type_hints

import pytest
from tests.protocol.making import cp, gen

import headgate.protocol
from headgate.errors import ProtocolViolation
from headgate.model.config import CheckpointConfig
from headgate.model.ids import SubtaskId, VertexId
from headgate.model.manifest import Committable, SnapshotPart, SubtaskEntry
from headgate.protocol.checkpoints.coordinator import Coordinator
from headgate.protocol.checkpoints.coordinator_events import (
    AbortReason,
    Acknowledged,
    Declined,
    ManifestWritten,
    Started,
)
from headgate.protocol.machine import STORY_CHARS_MAX, STORY_MAX, describe

WINDOW = SubtaskId(VertexId("window"), 3)


def heavy(checkpoint: int) -> Acknowledged:
    """An acknowledgement with inline state, many states and much output."""
    rows = {f"node-{n}": {f"state-{n}": n} for n in range(100)}
    output = tuple(Committable("sink", cp(checkpoint), 3, gen(2), b"p" * 1_000) for _ in range(500))
    handle = SnapshotPart(20_000, 1 << 63, "", b"s" * 20_000, rows)
    return Acknowledged(gen(2), cp(checkpoint), SubtaskEntry(WINDOW, (handle,), output))


def test_the_story_of_a_machine_has_keys_and_causes_and_a_bounded_size() -> None:
    machine = Coordinator(gen(2), (WINDOW,), CheckpointConfig(), cp(1))
    machine.handle(Started(1))
    machine.handle(heavy(7))
    machine.handle(Declined(gen(2), WINDOW, cp(8), AbortReason.SNAPSHOT_FAILED))
    _, acknowledged, declined = machine.story
    for part in ("Acknowledged", "generation=2", "checkpoint=7", "'window'", "index=3", "size_bytes=20000"):
        assert part in acknowledged, acknowledged
    assert len(acknowledged) <= STORY_CHARS_MAX
    assert "SNAPSHOT_FAILED" in declined
    for number in range(100):
        machine.handle(heavy(number + 10))
    assert len(machine.story) == STORY_MAX
    assert sum(map(len, machine.story)) <= STORY_MAX * STORY_CHARS_MAX
    with pytest.raises(ProtocolViolation) as broken:
        machine.handle(ManifestWritten(cp(9)))
    assert "ManifestWritten(checkpoint=9)" in broken.value.story[-1]
    assert len(str(broken.value)) < 5_000


def test_bytes_are_told_by_their_size_and_lists_by_their_length() -> None:
    assert describe((b"secret", [1, 2, 3, 4, 5], "y" * 81)) == f"[<6 bytes>, [1, 2, 3, 4, … 5 in all], '{'y' * 80}…']"


def test_what_a_peer_made_up_is_told_in_bounds() -> None:
    deep: object = b"x" * 100
    for _ in range(1_000):
        deep = (deep, "y" * 10_000)
    assert len(describe(deep)) < 2_000


def test_no_two_classes_of_the_machines_have_one_name_and_the_same_fields() -> None:
    found: dict[tuple[str, tuple[tuple[str, str], ...]], set[str]] = defaultdict(set)
    for module in pkgutil.walk_packages(headgate.protocol.__path__, "headgate.protocol."):
        for one in vars(importlib.import_module(module.name)).values():
            if isinstance(one, type) and is_dataclass(one) and one.__module__.startswith("headgate.protocol"):
                hints = get_type_hints(one)
                shape = tuple((field.name, repr(hints[field.name])) for field in fields(one))
                found[one.__name__, shape].add(one.__module__)
    assert {name: where for (name, _), where in found.items() if len(where) > 1} == {}
