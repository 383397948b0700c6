"""The check of a store by its server.

Counterpart: ``serving.checking``. Source: SS16 of docs/spec/served-store.md.
"""

from __future__ import annotations

import msgspec

from headgate.store.fsck import Problem
from headgate.store.served.client import Client, question_of
from headgate.store.served.values import decode

CHECK = "/check"


class CheckAsked(msgspec.Struct, frozen=True):
    """Who waits for which check; one with an unknown number is begun."""

    number: int
    verify_events: bool


class Checked(msgspec.Struct, frozen=True):
    """What a check has found, if it is over."""

    number: int
    is_over: bool
    problems: tuple[Problem, ...] = ()


def check_served(client: Client, verify_events: bool) -> list[Problem]:
    """Have the server check its store, and wait for what it finds."""
    number = 0
    while True:
        found = decode(client.ask(question_of(CHECK, CheckAsked(number, verify_events))), Checked)
        if found.is_over:
            return list(found.problems)
        number = found.number
