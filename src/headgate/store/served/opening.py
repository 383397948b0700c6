"""Opening a store that another process serves.

Counterpart: ``store.shared``, which is given the URL. Source: SS1, SS10 and SS13 of docs/spec/served-store.md.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import cast

from headgate.around import SYSTEM_AROUND, Around
from headgate.clock import Clock
from headgate.errors import StorageError, UsageError
from headgate.storage.base import Storage
from headgate.store.catalogue.base import Catalogue
from headgate.store.catalogue.date import ServerDate
from headgate.store.served import client as clients
from headgate.store.served.address import parse_address
from headgate.store.served.client import Client
from headgate.store.served.served_catalogue import ServedCatalogue
from headgate.store.served.served_storage import ServedStorage


@dataclass(frozen=True, slots=True)
class Served:
    """What there is of a store behind a server."""

    catalogue: Catalogue
    storage: Storage
    clock: Clock

    def close(self) -> None:
        """Let go of the connections."""
        self.catalogue.close()


def open_served(url: str, around: Around = SYSTEM_AROUND) -> Served:
    """Return the store behind the server at ``url``.

    Raises:
        UsageError: the server does not let us in, or is none.
        StorageError: it cannot be reached.
    """
    client = Client(parse_address(url), around)
    try:
        client.facts()
    except StorageError as error:
        if error.is_transient:
            raise
        raise UsageError(f"stream store at {url} cannot be opened: {error.cause}") from error
    client.patience_s = clients.PATIENCE_S
    catalogue = ServedCatalogue(client)
    return Served(cast(Catalogue, catalogue), ServedStorage(client), ServerDate(catalogue.date_ms, around))
