"""States with a TTL and RocksDB, which does not keep any yet (RB9)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pyarrow as pa
import pytest
from tests.state.backends import GROUPS, OWNER, sections_of, states

import headgate as hg
from headgate.state.descriptors import KeyColumns, StateDescriptor, StateKind

KEYS = KeyColumns(("id",), (pa.int64(),))


class Seen(hg.ProcessFunction):
    def open(self, state: hg.StateHandle) -> None:
        self.seen = state.value("seen", pa.bool_(), ttl=hg.TTL("1m"))

    def process(self, row: dict[str, Any], context: hg.ProcessContext) -> None:
        self.seen.put(True)


def pipeline(state: hg.Memory | hg.RocksDB) -> hg.Pipeline:
    made = hg.Pipeline("p", state=state)
    made.source(hg.FromRows([{"n": 1}])).key_by("n").process(Seen(), name="dedup").sink(hg.Discard())
    return made


# RB9
def test_a_state_with_a_ttl_is_refused_on_rocksdb() -> None:
    assert pipeline(hg.Memory()).definition()
    with pytest.raises(
        hg.UsageError, match=r"state 'seen' of operator 'dedup' has a TTL, and headgate.RocksDB keeps none"
    ):
        pipeline(hg.RocksDB()).definition()
    expiring = StateDescriptor("seen", StateKind.VALUE, pa.bool_(), ttl=hg.TTL("1m"))
    with states("rocksdb") as worker:
        factory = worker.of("node", 0, GROUPS)
        calls: list[Callable[..., object]] = [factory.by_row, factory.by_column]
        for make in calls:
            with pytest.raises(hg.UsageError, match="has a TTL"):
                make(KEYS, [expiring])


# RB9
@pytest.mark.parametrize("kind", StateKind)
def test_a_state_that_had_a_ttl_goes_on_on_rocksdb(kind: StateKind) -> None:
    key_type = pa.int64() if kind is StateKind.MAP else None
    had, has = (StateDescriptor("s", kind, pa.int64(), key_type, ttl) for ttl in (hg.TTL("1m"), None))
    with states("memory") as memory, states("rocksdb") as rocks:
        former = memory.of("node", 0, GROUPS).by_column(KEYS, [had])
        slots, numbers = former.slots([pa.array([1, 2])]), pa.array([3, 4])
        match kind:
            case StateKind.VALUE:
                former.values(had).put(slots, numbers)
            case StateKind.LIST:
                former.lists(had).append(slots, numbers)
            case StateKind.MAP:
                former.maps(had).put(slots, numbers, numbers)
        sections = sections_of(former.freeze())
        for made in (rocks.of("node", 0, GROUPS).by_row, rocks.of("node", 0, GROUPS).by_column):
            later = made(KEYS, [has])
            later.restore(sections, "snapshot", OWNER)
            later.end_restore()
            assert later.freeze().rows() == {"s": 2}
