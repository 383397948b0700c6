"""What became of a question whose answer was lost.

Each question that may change something has a name. Whoever lost the answer asks by it: the answer is kept for a while;
a question that has not come yet is refused when it comes; one that is under way is waited for. All of this may be lost
with the process: then nobody knows, and says so. Counterpart: ``served.client``. Source: SS9 of
docs/spec/served-store.md.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TypeVar

from headgate.store.served.client import Settled
from headgate.threads import SYSTEM_THREADS, Threads

_T = TypeVar("_T")

ANSWERS_MAX = 1_024
ANSWER_BYTES_MAX = 1 << 16
"""So many answers are kept, and none that is larger: then its caller is told that nobody knows (CT7)."""

VOID_MAX = 1 << 16
"""Questions that were asked for and had not come; a connection that was cut delivers nothing for longer."""


class VoidError(Exception):
    """The question came when its client had given it up, or came twice. Expected: not a HeadgateError."""


class Outcome:
    """Where the answer to one question is put."""

    def __init__(self) -> None:
        self.status = 0
        self.data = b""


class Settling:
    """The questions of one process of the server."""

    def __init__(self, threads: Threads = SYSTEM_THREADS) -> None:
        self._changed = threads.condition()
        self._under_way: set[str] = set()
        self._answered: OrderedDict[str, Outcome] = OrderedDict()
        self._void: OrderedDict[str, None] = OrderedDict()

    @contextmanager
    def under_way(self, name: str) -> Iterator[Outcome]:
        """Carry out the question ``name`` within the block, which says what was answered.

        Raises:
            VoidError: it is not to be carried out.
        """
        outcome = Outcome()
        with self._changed:
            if name in self._void or name in self._under_way or name in self._answered:
                raise VoidError
            self._under_way.add(name)
        try:
            yield outcome
        finally:
            with self._changed:
                self._under_way.discard(name)
                if len(outcome.data) > ANSWER_BYTES_MAX:
                    outcome.status, outcome.data = 0, b""
                _keep(self._answered, name, outcome, ANSWERS_MAX)
                self._changed.notify_all()

    def settle(self, name: str, wait_s: float) -> Settled:
        """Return what became of a question; one that has not come is never carried out from now on."""
        with self._changed:
            self._changed.wait_for(lambda: name not in self._under_way, wait_s)
            if name in self._under_way:
                return Settled(is_over=False)
            outcome = self._answered.get(name)
            if outcome is not None:
                return Settled(is_over=True, status=outcome.status, data=outcome.data)
            _keep(self._void, name, None, VOID_MAX)
            return Settled(is_over=True, is_void=True)


def _keep(among: OrderedDict[str, _T], name: str, value: _T, most: int) -> None:
    among[name] = value
    while len(among) > most:
        among.popitem(last=False)
