"""A store that machines share: its catalogue on a database server, its chunks where all of them reach them.

Counterparts: ``store.Store`` opens it by its URL; ``catalogue.postgres`` keeps the catalogue. Source: DB1 and DB2 of
docs/spec/shared-store.md. Never lets two stores have one place: one would take the chunks of the other for its own.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator

from headgate.clock import Clock
from headgate.errors import StorageError, UsageError
from headgate.storage.backends import absolute_location, open_storage
from headgate.storage.base import AlreadyExists, NotFound, Storage
from headgate.store.catalogue.base import Catalogue
from headgate.store.catalogue.postgres.address import is_address, parse_address

MARK = "headgate-store"
"""The object beside the chunks that says whose they are."""

_seen: set[str] = set()


def shared_root(text: str) -> str | None:
    """Return the URL of a store in its one spelling, if it is one that machines share.

    Raises:
        UsageError: it cannot be one; a password in it is not shown.
    """
    return parse_address(text).url if is_address(text) else None


def is_shared(root: str) -> bool:
    """Return whether ``root`` is the URL of such a store."""
    return is_address(root)


def shared_exists(root: str) -> bool:
    """Return whether there is such a store; makes none. One that was there is not looked for again."""
    if root not in _seen:
        with _client_library():
            from headgate.store.catalogue.postgres.opening import exists
        if exists(parse_address(root)):
            _seen.add(root)
    return root in _seen


def open_shared(root: str, chunks: str | os.PathLike[str] | None) -> tuple[Catalogue, Storage, Clock]:
    """Return catalogue, chunks and clock of a store; make it where there is none, if ``chunks`` says where they go.

    Raises:
        UsageError: there is none, it has its chunks elsewhere, they are another store's, or we are not let in.
        StorageError: server or storage cannot be reached.
    """
    with _client_library():
        from headgate.store.catalogue.postgres.date import ServerDate
        from headgate.store.catalogue.postgres.opening import open_catalogue
    place = None if chunks is None else _checked_place(chunks)
    catalogue, found = open_catalogue(parse_address(root), place)
    try:
        storage = open_storage(found.chunks)
        _claim(storage, found.store_id, root)
        return catalogue, open_storage(f"{found.chunks.rstrip('/')}/chunks"), ServerDate(catalogue.date_ms)
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
            "pip install 'headgate[postgres]'"
        ) from None


def _checked_place(chunks: str | os.PathLike[str]) -> str:
    place = absolute_location(chunks).rstrip("/")
    user, _, _ = place.partition("://")[2].partition("/")[0].rpartition("@")
    if ":" in user:
        raise UsageError(
            "the place of the chunks has a password or key in its URL, which is shown wherever the store is; give it "
            "in the environment of the driver and of every worker"
        )
    return place


def _claim(storage: Storage, store_id: str, root: str) -> None:
    """Mark the place as this store's; whoever made the store may have died before that."""
    with contextlib.suppress(NotFound):
        _check_mark(storage, store_id, root)
        return
    try:
        storage.put_if_absent(MARK, [store_id.encode()])
    except AlreadyExists:
        pass
    except NotFound as error:
        raise UsageError(
            f"the chunks of the store at {root} cannot be reached: there is no {storage.url}; make the bucket first"
        ) from error
    _check_mark(storage, store_id, root)


def _check_mark(storage: Storage, store_id: str, root: str) -> None:
    if storage.get(MARK).decode(errors="replace") != store_id:
        raise UsageError(
            f"{storage.url} has the chunks of another store than the one at {root}, or of one whose tables were "
            "deleted; give this one another place, or delete what is there if it is not needed"
        )
