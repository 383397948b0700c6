"""The verbs on a server: one that was interrupted before it changed anything is carried out again.

Counterpart: ``catalogue.sql``, whose verbs these are; ``database`` says when one was interrupted. Source: DB8 of
docs/spec/shared-store.md. Never repeats what may have taken effect: that is its caller's, who knows how (CT7).
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from typing import Any

import sqlalchemy as sa

from headgate.store.catalogue.base import Catalogue
from headgate.store.catalogue.postgres import database
from headgate.store.catalogue.postgres.failures import InterruptedVerbError
from headgate.store.catalogue.sql import SqlCatalogue
from headgate.threads import is_called_off

_NO_VERBS = {"path", "is_untouched", "close", "changes", "audit"}
"""``audit`` lasts as long as its caller wants: whoever checks a store while the server goes checks it again."""

PAUSE_S = 0.05


class PostgresCatalogue(SqlCatalogue):
    """A catalogue on a server. Every verb waits for a server that went, for a while."""

    def date_ms(self) -> int:
        """Return the server's date, in milliseconds since 1970.

        Raises:
            StorageError: it cannot be reached.
        """
        with self._database.read() as connection:
            asked = sa.text("SELECT (extract(epoch FROM clock_timestamp()) * 1000)::bigint")
            return int(connection.execute(asked).scalar_one())


def _patient(verb: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(verb)
    def carried_out(*args: Any, **kwargs: Any) -> Any:
        deadline_s = time.monotonic() + database.PATIENCE_S
        while True:
            try:
                return verb(*args, **kwargs)
            except InterruptedVerbError:
                if is_called_off() or time.monotonic() >= deadline_s:
                    raise
            time.sleep(PAUSE_S)

    return carried_out


for _name in sorted(vars(Catalogue)):
    if not _name.startswith("_") and _name not in _NO_VERBS:
        setattr(PostgresCatalogue, _name, _patient(getattr(SqlCatalogue, _name)))
