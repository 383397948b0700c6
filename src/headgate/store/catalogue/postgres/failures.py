"""What a failure of the database means: whether anything was changed, whether waiting helps, and what to say.

Counterpart: ``database``, which asks, and ``verbs``, which repeats. Source: DB8 and DB10 of docs/spec/shared-store.md.
"""

from __future__ import annotations

import psycopg
import sqlalchemy as sa

from headgate.errors import CorruptionError, HeadgateError, StorageError, UsageError

DATABASE_ERRORS = (sa.exc.DBAPIError, psycopg.Error)


class InterruptedVerbError(StorageError):
    """Certainly nothing was changed, and the same may succeed a moment later: the verb is to be repeated."""


_LOST = ("08", "57P01", "57P02", "57P03", "57P05", "25P03", "25006", "53300")
"""The connection went, the server stops, starts, has no room for one more, or is not the one that takes changes."""
_CLASHED = ("40001", "40P01")
_WAITING_HELPS = ("40003", "53", "55", "57", "58")
_DAMAGED = ("XX001", "XX002")
_GONE = ("42P01", "3F000")
_NO_TEXT = ("22021", "22P05")
_LASTING = (
    *("authentication failed", "no password supplied", "does not exist", "not permitted to log in"),
    *("permission denied", "no pg_hba.conf entry", "does not support SSL", "certificate", "no encryption"),
)
"""Why a server does not let somebody in who comes again a second later either."""


def failure(error: Exception, operation: str, url: str, *, is_decided: bool = True) -> HeadgateError | None:
    """Return what to raise instead of ``error``; None: it is a bug, let it through.

    ``is_decided``: it came before the transaction was to be committed, so certainly nothing was changed.
    """
    original = error.orig if isinstance(error, sa.exc.DBAPIError) else error
    state = getattr(original, "sqlstate", None) or ""
    said = one_line(original)
    if is_lost(original) or state in _CLASHED:
        return (InterruptedVerbError if is_decided else StorageError)(operation, url, said)
    if state in _DAMAGED:
        return CorruptionError(url, 0, "a stream store's catalogue", said)
    if state in _NO_TEXT or isinstance(original, psycopg.DataError):
        return UsageError(f"PostgreSQL cannot keep a name or text that was to be written to {url}: {said}")
    if state in _GONE:
        return StorageError(operation, url, f"tables of the stream store are gone: {said}", is_transient=False)
    if state.startswith(_WAITING_HELPS):
        return StorageError(operation, url, said)
    if state == "42501":
        return StorageError(operation, url, f"{said}; ask the owner of the store for the right", is_transient=False)
    return None


def refusal(error: Exception, url: str) -> StorageError:
    """Return what to raise where no connection could be made.

    The client library gives words and no code. What is not known to stay as it is, in any language, is waited for.
    """
    original = error.orig if isinstance(error, sa.exc.DBAPIError) else error
    said = one_line(original)
    if isinstance(original, psycopg.ProgrammingError) or any(words in said for words in _LASTING):
        return StorageError("connect to", url, said, is_transient=False)
    return InterruptedVerbError("connect to", url, said)


def is_lost(error: BaseException | None) -> bool:
    """Return whether the connection is of no more use, and another one may be."""
    state = getattr(error, "sqlstate", None)
    if state is None:
        return isinstance(error, psycopg.OperationalError | psycopg.InterfaceError)
    return str(state).startswith(_LOST)


def one_line(error: BaseException | None) -> str:
    """Return what the client library or the server said, in one line."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return "; ".join(lines[:2]) or type(error).__name__
