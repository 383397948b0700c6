"""A stream of numbers that is scaled, and a reader group on it, in memory: the plain model of the tests."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from headgate.protocol.store import layouts, reader_group, reading_order
from headgate.protocol.store.layouts import Layout, Plan, first_layout
from headgate.protocol.store.reader_group import Answer, Done, Event, Group, GroupSegment, handle, settled, views_for
from headgate.protocol.store.reading_order import FirstStart, View
from headgate.protocol.store.truncation import Extent

STREAM = "s"


def at(segment: int) -> GroupSegment:
    return GroupSegment(STREAM, segment)


@dataclass
class Log:
    """A stream: what is in each segment, as (key, number)."""

    layout: Layout = field(default_factory=lambda: first_layout(2))
    events: dict[int, list[tuple[int, int]]] = field(default_factory=dict)
    is_sealed: bool = False
    written: int = 0

    def write(self, key: int) -> None:
        """Append the next number; ``key``: 0 to 7, an eighth of the keys each."""
        point = key * (layouts.KEY_SPACE // 8)
        home = next(x for x in self.layout.present if x.key_low <= point < x.key_high)
        self.events.setdefault(home.segment_id, []).append((key, self.written))
        self.written += 1

    def scale(self, plan: object) -> None:
        assert isinstance(plan, Plan), plan
        change = layouts.scale(self.layout, plan)
        assert isinstance(change, layouts.Change)
        self.layout = change.layout

    def end(self, segment: int) -> int:
        return len(self.events.get(segment, ()))

    def view(self) -> View:
        extents = {x.segment_id: Extent(0, self.end(x.segment_id)) for x in self.layout.segments}
        return View(self.layout, extents, self.is_sealed)

    def has_ended(self, segment: int) -> bool:
        return self.is_sealed or self.layout.segments[segment].closed_epoch is not None

    def start(self, *, from_latest: bool = False, begin: Mapping[int, int] | None = None) -> FirstStart:
        return FirstStart({x: e.end for x, e in self.view().extents.items()}, from_latest, begin=begin)


def new_group(log: Log, start: FirstStart | None = None) -> Group:
    progress = reading_order.first(log.view(), log.start() if start is None else start)
    return Group({STREAM: 1}, {STREAM: progress})


def sizes(group: Group, log: Log) -> dict[GroupSegment, int]:
    return {x: (log.end(x.segment) - group.position(x)) << 20 for x in group.readable}


def answered(group: Group, log: Log, event: Event) -> Answer:
    """What the catalogue does in one transaction."""
    answer = handle(group, event, {name: log.view() for name in views_for(group, event)})
    return Done(settled(answer.group, sizes(answer.group, log))) if isinstance(answer, Done) else answer


def after(group: Group, log: Log, *events: Event) -> Group:
    """The group after events that are not refused."""
    for event in events:
        answer = answered(group, log, event)
        assert isinstance(answer, Done), answer
        group = answer.group
    return group


def without_time(group: Group) -> Group:
    """The group, but for how often its readers said that they live."""
    return replace(group, readers={name: replace(x, beats=0) for name, x in group.readers.items()})


__all__ = ["STREAM", "Log", "after", "answered", "at", "new_group", "reader_group", "sizes", "without_time"]
