"""What all machines share: a bounded story of their events, and dying of a broken rule.

A machine takes one event and returns the effects to run, in order. It does no I/O, reads no clock, draws no random
numbers and never assumes that an effect succeeded: outcomes come back as events.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from enum import Enum

from headgate.dataclass import dataclass
from headgate.errors import ProtocolViolation

STORY_MAX = 64
"""Events kept for error messages: enough to see one checkpoint, bounded because machines live for months."""

STORY_CHARS_MAX = 300
"""Of one event: its keys and causes. State and output inside it are described by their size."""
_DEPTH_MAX = 5
_ITEMS_MAX = 4
_TEXT_CHARS_MAX = 80


@dataclass(frozen=True, slots=True)
class Ignored:
    """EFFECT: the event was legal but changes nothing. Says why, so that tests tell it from forgotten."""

    reason: str


class Machine:
    """Base of the machines: keeps the story, and refuses to go on after a broken rule."""

    def __init__(self) -> None:
        self._story: deque[object] = deque(maxlen=STORY_MAX)  # made text only on request: events come per batch
        self._dead: ProtocolViolation | None = None

    @property
    def story(self) -> tuple[str, ...]:
        """The last events, oldest first."""
        return tuple(describe(event)[:STORY_CHARS_MAX] for event in self._story)

    def _begin(self, event: object) -> None:
        """Record ``event``; raise again if this machine is dead."""
        if self._dead is not None:
            raise self._dead
        self._story.append(event)

    def _violation(self, problem: str) -> ProtocolViolation:
        """Kill the machine and return the error to raise."""
        self._dead = ProtocolViolation(type(self).__name__, problem, self.story)
        return self._dead


def describe(value: object, depth: int = 0) -> str:
    """Return ``value`` for a story: keys and causes in full, bytes by their size, long lists by their length."""
    if isinstance(value, Enum):
        return value.name
    if isinstance(value, bytes | bytearray | memoryview):
        return f"<{len(value)} bytes>"
    if isinstance(value, str):
        return repr(value if len(value) <= _TEXT_CHARS_MAX else f"{value[:_TEXT_CHARS_MAX]}…")
    if depth >= _DEPTH_MAX:
        return "…"
    if is_dataclass(value) and not isinstance(value, type):
        parts = (f"{f.name}={describe(getattr(value, f.name), depth + 1)}" for f in fields(value) if f.repr)
        return f"{type(value).__name__}({', '.join(parts)})"
    if isinstance(value, tuple | list | frozenset | set | Mapping):
        shown = ", ".join(describe(item, depth + 1) for item in itertools.islice(value, _ITEMS_MAX))
        return f"[{shown}]" if len(value) <= _ITEMS_MAX else f"[{shown}, … {len(value)} in all]"
    return repr(value)[:_TEXT_CHARS_MAX]
