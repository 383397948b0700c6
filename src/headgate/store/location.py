"""Location of a store: its root, and the catalogue and the chunks of one that machines share.

Counterparts: ``store.Store`` opens it by its URL; ``catalogue.postgresql`` and ``client.remote_store`` connect.
Source: docs/spec/shared-store.md, docs/spec/served-store.md. Never lets two stores have one place: one would take the
chunks of the other for its own.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from headgate.distribution import install_command
from headgate.environment import Clock
from headgate.errors import StorageError, UsageError
from headgate.storage.base import AlreadyExists, NotFound, Storage, refuse_unless_exclusive
from headgate.storage.urls import absolute_location, open_storage
from headgate.store.addresses import is_postgres_url, is_server_url, parse_postgres_url, parse_server_url
from headgate.store.catalogue.base import Catalogue

ROOT_VARIABLE = "HEADGATE_STORE"

ROOT_DEFAULT = ".headgate/store"

OPENERS: dict[str, Callable[[str], Any]] = {}
"""Stores of other surroundings, by scheme: the simulator's."""


def store_root(root: str | Path | None = None) -> str:
    """Return the store's absolute directory, or URL: ``root``, else $HEADGATE_STORE, else ``.headgate/store``.

    Raises:
        UsageError: it is no directory and not the URL of a store.
    """
    chosen = str(root) if root is not None else os.environ.get(ROOT_VARIABLE) or ROOT_DEFAULT
    scheme, separator, _ = chosen.partition("://")
    if scheme in OPENERS:
        return chosen
    shared = shared_store_url(chosen)
    if shared is not None:
        return shared
    place = chosen if separator else absolute_location(chosen)
    if "://" in place:
        raise UsageError(
            "the stream store needs a local directory, postgresql://user@host/database, or headgate://host:port, "
            f"not {chosen}"
        )
    return place


MARK = "headgate-store"
"""The object beside the chunks that says to which store they belong."""

_seen: set[str] = set()


def shared_store_url(text: str) -> str | None:
    """Return the URL of a store in its one spelling, if it is one that machines share.

    Raises:
        UsageError: it cannot be one; a password in it is not shown.
    """
    if is_server_url(text):
        return parse_server_url(text).url
    return parse_postgres_url(text).url if is_postgres_url(text) else None


def is_shared(root: str) -> bool:
    """Return whether ``root`` is the URL of such a store."""
    return is_postgres_url(root) or is_server_url(root)


def shared_exists(root: str) -> bool:
    """Return whether there is such a store; makes none. One that was there is not looked for again.

    Raises:
        UsageError, StorageError: its server cannot be asked.
    """
    if root not in _seen and _is_there(root):
        _seen.add(root)
    return root in _seen


def _is_there(root: str) -> bool:
    if is_server_url(root):
        from headgate.store.client.remote_store import open_remote_store

        open_remote_store(root).close()  # a server has a store
        return True
    with _client_library():
        from headgate.store.catalogue.postgresql import exists
    return exists(parse_postgres_url(root))


def open_shared(root: str, chunks: str | os.PathLike[str] | None) -> tuple[Catalogue, Storage, Clock]:
    """Return catalogue, chunks and clock of a store; make it where there is none, if ``chunks`` says where they go.

    Raises:
        UsageError: there is none, it has its chunks elsewhere, they are another store's, or we are not let in.
        StorageError: server or storage cannot be reached.
    """
    with _client_library():
        from headgate.store.catalogue.postgresql import open_catalogue
        from headgate.store.core import ServerClock
    place = None if chunks is None else absolute_location(chunks).rstrip("/")
    catalogue, found = open_catalogue(parse_postgres_url(root), place)
    try:
        storage = open_storage(found.chunks)
        _claim(storage, found.store_id, root)
        return catalogue, open_storage(f"{found.chunks.rstrip('/')}/chunks"), ServerClock(catalogue.date_ms)
    except StorageError as error:
        catalogue.close()
        if error.is_transient:
            raise
        raise UsageError(f"the chunks of the store at {root} cannot be reached: {error}") from error
    except BaseException:
        catalogue.close()
        raise


@contextlib.contextmanager
def _client_library() -> Iterator[None]:
    try:
        yield
    except ModuleNotFoundError as error:
        if error.name != "psycopg":
            raise
        raise UsageError(
            "a store on PostgreSQL needs the package psycopg, in the driver and on every worker: "
            f"{install_command('postgres')}"
        ) from None


def _claim(storage: Storage, store_id: str, root: str) -> None:
    """Mark the place as this store's; the process that made the store may have died before that."""
    with contextlib.suppress(NotFound):
        _check_mark(storage, store_id, root)
        return
    refuse_unless_exclusive(storage, "chunks")
    # another process was quicker: the check below says whether it was for this store
    with contextlib.suppress(AlreadyExists):
        storage.put_if_absent(MARK, [store_id.encode()])
    _check_mark(storage, store_id, root)


def _check_mark(storage: Storage, store_id: str, root: str) -> None:
    if storage.get(MARK).decode(errors="replace") != store_id:
        raise UsageError(
            f"{storage.url} has the chunks of another store than the one at {root}, or of one whose tables were "
            "deleted; give this one another place, or delete what is there if it is not needed"
        )
