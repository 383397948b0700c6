"""Histories that a sound log could have: clients that overlap, of which some die, over a plain list for each segment.

Counterpart: ``checks`` must find nothing in them, and whatever ``planted`` puts into them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace

from tests.logs.history import Operation, Outcome, Place, Poll, Seek, Send, Step

SEGMENTS, KEYS = 3, 4

Choose = Callable[[int], int]
"""Draws a number below another one."""


@dataclass
class Log:
    """What is visible in each segment, and when an operation takes effect."""

    choose: Choose
    segments: list[list[str]] = field(default_factory=lambda: [[] for _ in range(SEGMENTS)])
    now_ns: int = 0
    done: list[Operation] = field(default_factory=list)

    def passes(self) -> int:
        """Return the time; it is another one for each that asks."""
        self.now_ns += 1 + self.choose(2)
        return self.now_ns


class Client:
    """Begins, takes effect, ends: each is a step, and others make theirs in between."""

    def __init__(self, log: Log, name: str) -> None:
        self._log, self._name = log, name
        self._lives = self._sent = 0
        self._reached: dict[int, int] = {}
        self._current: Operation | None = None
        self._has_taken_effect = False

    def step(self) -> None:
        """Make the next step."""
        if self._current is None:
            self._begin()
        elif not self._has_taken_effect:
            self._take_effect()
        else:
            self._end()

    def stop(self) -> None:
        """What it was about is not answered any more, whether it took effect or not."""
        if self._current is not None:
            self._die()

    def _begin(self) -> None:
        begun_ns = self._log.passes()
        steps: tuple[Step, ...] = () if self._reads else self._sends()
        process = f"{self._name}.{self._lives}"
        self._current = Operation(process, begun_ns, None, Outcome.OK, steps)
        self._has_taken_effect = False

    @property
    def _reads(self) -> bool:
        return self._name.startswith("r")

    def _sends(self) -> tuple[Step, ...]:
        found = []
        for _ in range(1 + self._log.choose(3)):
            self._sent += 1
            found.append(Send(f"{self._name}-k{self._log.choose(KEYS)}", f"{self._name}-{self._sent}"))
        return tuple(found)

    def _take_effect(self) -> None:
        assert self._current is not None
        self._has_taken_effect = True
        fate = self._log.choose(8)
        if self._reads:
            self._read(is_new=fate == 0)
        elif fate == 0:
            self._current = replace(self._current, outcome=Outcome.FAILED)
        elif fate == 1:
            self._die()
        else:
            self._write()
            if fate == 2:
                self._die()

    def _write(self) -> None:
        assert self._current is not None
        sends = []
        for send in self._current.sends:
            segment = int(send.key.rpartition("k")[2]) % SEGMENTS
            self._log.segments[segment].append(send.value)
            sends.append(replace(send, place=Place(segment, len(self._log.segments[segment]) - 1)))
        self._current = replace(self._current, steps=tuple(sends))

    def _read(self, *, is_new: bool) -> None:
        assert self._current is not None
        segment = self._log.choose(SEGMENTS)
        log, start = self._log.segments[segment], self._reached.get(segment, 0)
        steps: list[Step] = []
        if is_new:
            start = self._log.choose(len(log) + 1)
            steps.append(Seek(segment))
        end = min(len(log), start + 1 + self._log.choose(6))
        events = tuple((at, log[at]) for at in range(start, end))
        steps.append(Poll(segment, events, end if end == len(log) else None))
        self._reached[segment] = end
        self._current = replace(self._current, steps=tuple(steps))

    def _die(self) -> None:
        assert self._current is not None
        unanswered = tuple(replace(send, place=None) for send in self._current.sends)
        self._log.done.append(replace(self._current, steps=unanswered, outcome=Outcome.UNKNOWN))
        self._current = None
        self._lives += 1

    def _end(self) -> None:
        assert self._current is not None
        self._log.done.append(replace(self._current, ended_ns=self._log.passes()))
        self._current = None


def sound_history(choose: Choose, steps: int = 120) -> list[Operation]:
    """Return the history of three writers and two readers, and of one that reads everything in the end."""
    log = Log(choose)
    clients = [Client(log, name) for name in ("w1", "w2", "w3", "r1", "r2")]
    for _ in range(steps):
        clients[choose(len(clients))].step()
    for client in clients:
        client.stop()
    for segment, values in enumerate(log.segments):
        begun_ns = log.passes()
        poll = Poll(segment, tuple(enumerate(values)), len(values))
        log.done.append(Operation("last", begun_ns, log.passes(), Outcome.OK, (poll,)))
    return log.done
