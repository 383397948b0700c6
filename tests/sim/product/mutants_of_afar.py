"""Bugs planted in stores afar, on an object store or behind a server; seeds of ``sim.streams.afar`` find them.

``tests/mutants/test_served_store_mutants.py`` and ``test_parts_ahead_mutants.py`` have those that a named test finds.
"""

from __future__ import annotations

import contextlib
from contextlib import AbstractContextManager
from typing import Any

from tests.mutants.harness import Mutant, patched
from tests.sim.product.patching import around

from headgate.errors import StorageError
from headgate.storage.base import NotFound
from headgate.store.fetching import Fetch, Room
from headgate.store.read_ahead import ReadAhead
from headgate.store.served.client import Client, Settled
from headgate.store.serving.settling import Settling

# -- reading ahead ---------------------------------------------------------------------------------------------------


def a_fetch_that_fails_wakes_nobody() -> AbstractContextManager[None]:  # S83
    def run(self: Fetch) -> None:
        with contextlib.suppress(StorageError, NotFound):
            self._payload = self._storage.get_range(self.path, self.offset, self.size_bytes)
            self._over.set()
            if self._is_unwanted:
                self.let_go()

    return patched(Fetch, "run", run)


def what_is_given_up_takes_room_for_ever() -> AbstractContextManager[None]:  # S83
    return patched(Room, "give_back", lambda self, fetch: None)


def a_dropped_reader_keeps_its_room() -> AbstractContextManager[None]:  # S83
    def init(call: Any, self: ReadAhead, *given: Any) -> None:
        call(self, *given)
        _kept.append(self)

    return around(ReadAhead, "__init__", init)


_kept: list[ReadAhead] = []


# -- questions without an answer -------------------------------------------------------------------------------------


def a_lost_answer_is_asked_for_again_as_if_it_only_read() -> AbstractContextManager[None]:  # SS9
    return around(Client, "ask", lambda call, self, question, is_once=False: call(self, question))


def a_late_question_is_carried_out() -> AbstractContextManager[None]:  # SS9
    return patched(Settling, "settle", lambda self, name, wait_s: Settled(is_over=True, is_void=True))


def nobody_waits_for_what_is_under_way() -> AbstractContextManager[None]:  # SS9
    def settle(call: Any, self: Settling, name: str, wait_s: float) -> Settled:
        found: Settled = call(self, name, 0)
        return found if found.is_over else Settled(is_over=True, is_void=True)

    return around(Settling, "settle", settle)


def a_new_process_of_the_server_says_that_nothing_was_done() -> AbstractContextManager[None]:  # SS9
    def settled(call: Any, self: Client, connection: Any, lost: Any) -> Settled:
        if connection.facts.instance != lost.instance:
            return Settled(is_over=True, is_void=True)
        found: Settled = call(self, connection, lost)
        return found

    return around(Client, "_settled", settled)


ALL: dict[Mutant, int] = {
    a_fetch_that_fails_wakes_nobody: 7,
    what_is_given_up_takes_room_for_ever: 3,
    a_dropped_reader_keeps_its_room: 7,
    a_lost_answer_is_asked_for_again_as_if_it_only_read: 2,
    a_late_question_is_carried_out: 0,
    nobody_waits_for_what_is_under_way: 0,
    a_new_process_of_the_server_says_that_nothing_was_done: 6,
}
"""Each with a seed that finds it."""
