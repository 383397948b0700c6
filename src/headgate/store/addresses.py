"""URLs of stores that machines share: on a PostgreSQL server, or on a store server.

Counterparts: ``location`` asks whether it was given one; ``catalogue.postgresql`` and ``client.connection``
connect. Source: docs/spec/shared-store.md, docs/spec/served-store.md. Never lets a password or
token through: a store's URL is written to manifests, logs and pages.
"""

from __future__ import annotations

import re
from urllib.parse import unquote_plus, urlsplit

from headgate.dataclass import dataclass
from headgate.errors import UsageError
from headgate.tls import is_loopback

POSTGRES_SCHEMES = ("postgresql", "postgres")
SCHEMA_DEFAULT = "headgate"

_SECRETS = ("password", "sslpassword", "oauth_client_secret")
_SCHEMA = re.compile(r"(?!pg_)[a-z_][a-z0-9_]{0,62}")
_HOW_TO_LOG_IN = (
    "leave it out, since a store's URL is shown wherever the store is, and give it in the file ~/.pgpass, in one that "
    "passfile=... in the URL names, or in $PGPASSWORD, to the driver and to every worker"
)


@dataclass(frozen=True, slots=True)
class PostgresAddress:
    """Where a store's tables are.

    Attributes:
        url: what the user said; it names the store.
        conninfo: what of it the client library takes.
        schema: the schema that the tables are in.
    """

    url: str
    conninfo: str
    schema: str


def is_postgres_url(text: str) -> bool:
    """Return whether ``text`` is the URL of a database server."""
    return text.partition("://")[0].lower() in POSTGRES_SCHEMES and "://" in text


def parse_postgres_url(text: str) -> PostgresAddress:
    """Return what ``text`` says; everything but ``schema=`` is the client library's.

    Raises:
        UsageError: it has a password, or names a schema that cannot be.
    """
    base, _, query = text.partition("://")[2].partition("?")
    user, at, host = base.rpartition("@")
    if ":" in user:
        raise UsageError(f"the URL of the store at {host} has a password in it; {_HOW_TO_LOG_IN}")
    schema, kept = SCHEMA_DEFAULT, []
    for setting in filter(None, query.split("&")):
        name, _, value = (unquote_plus(part) for part in setting.partition("="))
        if name in _SECRETS:
            raise UsageError(f"the URL of the store at {host} has a password in it, {name}=; {_HOW_TO_LOG_IN}")
        if name == "chunks":
            raise UsageError(
                f"the URL of the store at {host} says chunks=, which is given once, when the store is made: "
                "Store.open(url, chunks=...) or headgate streams create --chunks"
            )
        if name == "schema":
            schema = value
        else:
            kept.append(setting)
    if not _SCHEMA.fullmatch(schema):
        raise UsageError(
            f"the URL of the store at {host} names the schema {schema!r}; use small letters, digits and '_', beginning "
            "with a letter that is not of 'pg_'"
        )
    rest = f"?{'&'.join(kept)}" if kept else ""
    conninfo = f"postgresql://{user}{at}{host}{rest}"
    own = "" if schema == SCHEMA_DEFAULT else f"{'&' if kept else '?'}schema={schema}"
    return PostgresAddress(conninfo + own, conninfo, schema)


SERVER_SCHEMES = ("headgate", "http", "https")
PORT = 4_060
"""Default port of a store server."""

TOKEN_VARIABLE, TOKEN_FILE_VARIABLE = "HEADGATE_STORE_TOKEN", "HEADGATE_STORE_TOKEN_FILE"
"""Environment variables that give the token to clients, and to servers without an option for it."""

CA_FILE_VARIABLE = "HEADGATE_STORE_CA_FILE"
"""File of the authority that signed the server's certificate, if one did."""

_PORTS = {"headgate": PORT, "http": 80, "https": 443}


@dataclass(frozen=True, slots=True)
class ServerAddress:
    """Where a server is. ``url`` names the store; ``is_tls``: whether connections are encrypted."""

    url: str
    host: str
    port: int
    is_tls: bool


def is_server_url(text: str) -> bool:
    """Return whether ``text`` is the URL of a server."""
    scheme, separator, _ = text.partition("://")
    return bool(separator) and scheme.lower() in SERVER_SCHEMES


def parse_server_url(text: str) -> ServerAddress:
    """Return the address of a store server from its URL. ``headgate://`` is encrypted unless it leads to this machine.

    Raises:
        UsageError: it has a token, or anything else after the port; a token is not shown.
    """
    try:
        parts = urlsplit(text)
        host, port = parts.hostname, parts.port
    except ValueError as error:
        raise UsageError(f"the URL of a served store cannot be read: {error}; write headgate://host:port") from None
    if parts.username is not None or parts.password is not None:
        raise UsageError(
            f"the URL of the store at {host} has a token or user in it; leave it out, since a store's URL is shown "
            f"wherever the store is, and give it in ${TOKEN_VARIABLE} or in the file that ${TOKEN_FILE_VARIABLE} "
            "names, to the driver and to every worker"
        )
    if not host:
        raise UsageError(f"the URL {text} names no host; write headgate://host:port")
    if parts.path not in ("", "/") or parts.query or parts.fragment:
        raise UsageError(
            f"the URL of the store at {host} has more in it than host and port; write headgate://host:port"
        )
    scheme = parts.scheme.lower()
    port = _PORTS[scheme] if port is None else port
    is_tls = not is_loopback(host) if scheme == "headgate" else scheme == "https"
    return server_address(host, port, is_tls=is_tls)


def server_address(host: str, port: int, *, is_tls: bool) -> ServerAddress:
    """Return the address of a server in its one spelling."""
    written = f"[{host}]" if ":" in host else host
    if is_tls == (not is_loopback(host)):
        return ServerAddress(f"headgate://{written}:{port}", host, port, is_tls)
    return ServerAddress(f"{'https' if is_tls else 'http'}://{written}:{port}", host, port, is_tls)
