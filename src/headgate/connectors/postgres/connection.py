"""How sinks and sources reach a PostgreSQL server: the URL, the password that is not in it, and what errors mean."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote, unquote_plus

from headgate.connectors.secret import is_secret_place, read_secret
from headgate.distribution import install_command
from headgate.errors import HeadgateError, StorageError, UsageError

if TYPE_CHECKING:
    import psycopg

SETTINGS = "-c DateStyle=ISO -c TimeZone=UTC -c IntervalStyle=iso_8601 -c extra_float_digits=3 -c bytea_output=hex"
"""How the server writes values for sources."""

SCHEMES = ("postgresql://", "postgres://")
_SECRETS = ("password", "sslpassword", "oauth_client_secret")

_CONNECTION = {
    "connect_timeout": "10",
    "keepalives_idle": "10",
    "keepalives_interval": "5",
    "keepalives_count": "3",
    "tcp_user_timeout": "25000",
}
"""The loss of the server's machine is noticed within half a minute, unless the URL says something else."""

_LOST = ("08", "57P", "25P03", "25006", "53", "55", "58", "40")
"""SQLSTATEs after which the same may succeed: no connection, no room, locked, a deadlock, the server stops."""

_AS_THINGS_ARE = "55000"
"""What a sink asks for is not possible, as a delete from a published table without replica identity; that stays so."""

_LASTING = (
    *("authentication failed", "no password supplied", "does not exist", "not permitted to log in"),
    *("permission denied", "no pg_hba.conf entry", "does not support SSL", "certificate", "no encryption"),
)
"""Refusals of a server that stay: trying again does not help. They come without a SQLSTATE."""


def check_url(url: str, secret: str, kind: str) -> None:
    """Check the URL of a server, and that the client libraries are there.

    Args:
        url: of libpq.
        secret: where the password is found; "": libpq finds it, or there is none.
        kind: the name of the class, for errors.

    Raises:
        UsageError: it is none, or has a password, which is not shown.
    """
    if not url.startswith(SCHEMES):
        raise UsageError(f"{kind} needs a URL such as 'postgresql://user@host:5432/database', not {url[:40]!r}")
    rest, _, query = url.partition("://")[2].partition("?")
    user, _, place = rest.rpartition("@")
    names = {unquote_plus(setting.partition("=")[0]).lower() for setting in query.split("&")}
    if ":" in user or names & set(_SECRETS):
        raise UsageError(
            f"{kind}: the URL of the server at {place} has a password in it; leave it out, and give secret='env:NAME' "
            "or secret='file:/path', or have it in $PGPASSWORD or ~/.pgpass of the driver and of every worker"
        )
    if secret and not is_secret_place(secret):
        raise UsageError(
            f"{kind}(secret=) must be 'env:NAME' or 'file:/path', which says where the password is found; the password "
            "itself must not be part of a program"
        )
    with client_libraries(kind):
        import adbc_driver_postgresql
        import psycopg  # noqa: F401

        del adbc_driver_postgresql


@contextmanager
def client_libraries(kind: str) -> Iterator[None]:
    """Name the extra if a package is missing."""
    try:
        yield
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] not in ("psycopg", "adbc_driver_postgresql", "adbc_driver_manager"):
            raise
        raise UsageError(
            f"{kind} needs the package {error.name}, in the driver and on every worker: {install_command('postgres')}"
        ) from None


def connection_text(url: str, secret: str, options: Mapping[str, str]) -> str:
    """Return what libpq takes, with the password: for one connection, never to be kept or shown."""
    import psycopg.conninfo

    given = psycopg.conninfo.conninfo_to_dict(url)
    password = {"password": read_secret(secret, "PostgreSQL")} if secret else {}
    return psycopg.conninfo.make_conninfo(**{**_CONNECTION, **options, **given, **password})  # type: ignore[arg-type]


def database_of(url: str) -> str:
    """Return host and database."""
    return unquote(url.partition("://")[2].partition("?")[0].rpartition("@")[2])


def place_of(url: str) -> str:
    """Return the database, for messages."""
    return f"PostgreSQL at {database_of(url)}"


def said_by(error: BaseException) -> str:
    """Return what the server said, in one line, without the statement."""
    said = str(getattr(error, "orig", None) or error)
    said = said.partition("ERROR:")[2] or said.partition("FATAL:")[2] or said.rpartition("[libpq]")[2]
    lines = [line.strip() for line in said.splitlines() if line.strip()]
    kept = [line for line in lines if not line.startswith(("SQLSTATE", "Query was", ". SQLSTATE"))]
    return "; ".join(kept[:2]).rstrip(". ") or type(error).__name__


def state_of(error: BaseException) -> str:
    """Return the SQLSTATE of an error of any of the libraries; "" if it has none."""
    original: Any = getattr(error, "orig", None) or error
    return getattr(original, "sqlstate", None) or ""


def as_ours(error: BaseException, operation: str, place: str) -> HeadgateError | None:
    """Return the error that means that the same may succeed later; None: it may not."""
    state, said = state_of(error), said_by(error)
    if state.startswith(_LOST) and state != _AS_THINGS_ARE:
        return StorageError(operation, place, said)
    if not state:
        return StorageError(operation, place, said, is_transient=not any(words in said for words in _LASTING))
    return None


def _source_text(url: str, **more: str) -> str:
    """Return what libpq takes for a source."""
    import psycopg.conninfo

    given = str(psycopg.conninfo.conninfo_to_dict(url).get("options") or "")
    settings = " ".join(filter(None, (given, SETTINGS)))
    return psycopg.conninfo.make_conninfo(connection_text(url, "", {}), **{"options": settings, **more})


def connect(url: str, *, replication: bool = False, name: str = "headgate") -> psycopg.Connection[Any]:
    """Return a connection without transactions. ``name``: what the server calls it.

    Raises:
        StorageError
        UsageError: the client library is not installed.
    """
    with client_libraries("PostgreSQL"):
        import psycopg
    more = {"application_name": name} | ({"replication": "database"} if replication else {})
    with translated(url, "connect to"):
        return psycopg.connect(_source_text(url, **more), autocommit=True)


def connect_arrow(url: str) -> Any:
    """Return a connection of ADBC, without transactions of its own.

    Raises:
        StorageError
        UsageError: the client library is not installed.
    """
    with client_libraries("PostgreSQL"):
        from adbc_driver_postgresql import dbapi
    with translated(url, "connect to"):
        return dbapi.connect(_source_text(url), autocommit=True)


@contextmanager
def translated(url: str, operation: str) -> Iterator[None]:
    """Raise our errors in place of those of the client libraries, which read rows by Arrow: that raises OSError."""
    with client_libraries("PostgreSQL"):
        import adbc_driver_manager
        import psycopg
    try:
        yield
    except (psycopg.Error, adbc_driver_manager.Error, OSError) as error:
        raise failure(error, url, operation) from error


def failure(error: Exception, url: str, operation: str) -> StorageError:
    """Return what to raise instead of an error of a client library."""
    import psycopg

    said, state = said_by(error), state_of(error)
    if state:
        is_transient = state.startswith(_LOST)
    else:
        is_lost = isinstance(error, psycopg.OperationalError | psycopg.InterfaceError) or "connection" in said
        is_transient = is_lost and not any(words in said for words in _LASTING)
    return StorageError(operation, place_of(url), said, is_transient=is_transient)
