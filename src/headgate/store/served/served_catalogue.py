"""The verbs of a catalogue that another process has.

Counterparts: ``catalogue.base`` says what each means, ``serving.carrying`` carries them out. Source: SS6, SS9 and SS17
of docs/spec/served-store.md.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, cast

from headgate.errors import UsageError
from headgate.model.life import Mine
from headgate.store.catalogue.base import Audit
from headgate.store.catalogue.values import Contents
from headgate.store.fsck import Problem
from headgate.store.served.checked import check_served
from headgate.store.served.client import Client, question_of
from headgate.store.served.failures import UnjudgedError
from headgate.store.served.hearing import Hearing
from headgate.store.served.values import decode
from headgate.store.served.verbs import (
    CATALOGUE_SIGNATURES,
    OF_THE_CATALOGUE,
    READING,
    REPEATED,
    Judged,
    Reset,
    Signature,
)
from headgate.store.streams import StreamReset

DATE, UNTOUCHED = "/date", "/untouched"


class ServedCatalogue:
    """A catalogue behind a server. Its verbs are made of their declarations, below."""

    def __init__(self, client: Client) -> None:
        self._client = client
        self._hearing = Hearing(client)

    @property
    def path(self) -> str:
        """See ``Catalogue``."""
        return self._client.url

    @property
    def is_untouched(self) -> bool:
        """See ``Catalogue``."""
        return decode(self._client.ask(question_of(UNTOUCHED)), bool)

    def close(self) -> None:
        """See ``Catalogue``."""
        self._hearing.close()
        self._client.close()

    def changes(self) -> int:
        """See ``Catalogue``."""
        return self._hearing.changes()

    def date_ms(self) -> int:
        """Return the server's date, in milliseconds since 1970.

        Raises:
            StorageError: it cannot be reached.
        """
        return decode(self._client.ask(question_of(DATE)), int)

    def audit(self) -> AbstractContextManager[Audit]:
        """Nobody has this view from afar.

        Raises:
            UsageError
        """
        raise UsageError(f"the store at {self.path} is checked by its server: headgate streams check, or Store.fsck")

    def check(self, *, verify_events: bool) -> list[Problem]:
        """Have the server check its store, and wait for what it finds (SS16)."""
        return check_served(self._client, verify_events)

    def contents(self, stream: str, of: str, mine: Mine) -> Contents:
        """See ``Catalogue``."""
        return cast(Contents, self._judging(mine, lambda judged: self.carry_out("contents", (stream, of, judged), {})))

    def start_over(self, reset: StreamReset, now_ms: int) -> str | None:
        """See ``Catalogue``."""

        def ask(judged: Judged) -> object:
            told = Reset(reset.streams, reset.owner, reset.epoch, reset.life, reset.of, judged)
            return self.carry_out("start_over", (told, now_ms), {})

        return cast(str | None, self._judging(reset.mine, ask))

    def carry_out(self, name: str, arguments: tuple[Any, ...], named: dict[str, Any]) -> Any:
        """Have the server carry out a verb."""
        signature = CATALOGUE_SIGNATURES[name]
        question = question_of(f"/verb/{OF_THE_CATALOGUE}/{name}", signature.bound(arguments, named))
        changes_something = name not in READING
        try:
            may_repeat = name in REPEATED
            data = self._client.ask(question, is_once=changes_something, may_repeat=may_repeat)
            return decode(data, signature.gives)
        finally:
            if changes_something:
                self._hearing.changed_here()

    def _judging(self, mine: Mine, ask: Callable[[Judged], object]) -> object:
        """Ask, and say of each owner that the server comes upon whether it is the caller's own (SS17)."""
        judged: Judged = []
        while True:
            try:
                return ask(judged)
            except UnjudgedError as unjudged:
                judged = [*judged, (unjudged.owner, mine(unjudged.owner))]


def _verb(signature: Signature) -> Callable[..., Any]:
    def carried_out(self: ServedCatalogue, *arguments: Any, **named: Any) -> Any:
        return self.carry_out(signature.name, arguments, named)

    carried_out.__name__, carried_out.__doc__ = signature.name, "See ``Catalogue``."
    return carried_out


for _signature in CATALOGUE_SIGNATURES.values():
    if not hasattr(ServedCatalogue, _signature.name):
        setattr(ServedCatalogue, _signature.name, _verb(_signature))
