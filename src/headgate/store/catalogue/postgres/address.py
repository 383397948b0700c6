"""The URL of a store on a database server.

Counterpart: ``store.store`` asks whether it was given one; ``database`` connects. Source: DB1 and DB2 of
docs/spec/shared-store.md. Never lets a password through: the URL is written to manifests, logs and pages.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from urllib.parse import unquote_plus

from headgate.errors import UsageError

SCHEMES = ("postgresql", "postgres")
SCHEMA_DEFAULT = "headgate"

_SECRETS = ("password", "sslpassword", "oauth_client_secret")
_SCHEMA = re.compile(r"(?!pg_)[a-z_][a-z0-9_]{0,62}")
_HOW_TO_LOG_IN = (
    "leave it out, since a store's URL is shown wherever the store is, and give it in the file ~/.pgpass, in one that "
    "passfile=... in the URL names, or in $PGPASSWORD, to the driver and to every worker"
)


@dataclass(frozen=True, slots=True)
class Address:
    """Where a store's tables are.

    Attributes:
        url: what the user said; it names the store.
        conninfo: what of it the client library takes.
        schema: the schema that the tables are in.
    """

    url: str
    conninfo: str
    schema: str


def is_address(text: str) -> bool:
    """Return whether ``text`` is the URL of a database server."""
    return text.partition("://")[0].lower() in SCHEMES and "://" in text


def parse_address(text: str) -> Address:
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
                f"the URL of the store at {host} says chunks=, which a store is told once, when it is made: "
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
    return Address(conninfo + own, conninfo, schema)
