"""The URL of a store that a process serves.

Counterpart: ``store.shared`` asks whether it was given one; ``connection`` connects. Source: SS1 of
docs/spec/served-store.md. Never lets a token through: the URL is written to manifests, logs and pages.
"""

from __future__ import annotations

from dataclasses import dataclass
from urllib.parse import urlsplit

from headgate.errors import UsageError
from headgate.tls import is_loopback

SCHEMES = ("headgate", "http", "https")
PORT = 4_060
"""Where a server listens unless it is told otherwise."""

TOKEN_VARIABLE, TOKEN_FILE_VARIABLE = "HEADGATE_STORE_TOKEN", "HEADGATE_STORE_TOKEN_FILE"
"""Where clients, and servers that are told nothing else, have the token from."""

CA_FILE_VARIABLE = "HEADGATE_STORE_CA_FILE"
"""The authority that signed the server's certificate, if somebody did."""

_PORTS = {"headgate": PORT, "http": 80, "https": 443}


@dataclass(frozen=True, slots=True)
class Address:
    """Where a server is. ``url`` names the store; ``is_tls``: whether connections are encrypted."""

    url: str
    host: str
    port: int
    is_tls: bool


def is_address(text: str) -> bool:
    """Return whether ``text`` is the URL of a server."""
    scheme, separator, _ = text.partition("://")
    return bool(separator) and scheme.lower() in SCHEMES


def parse_address(text: str) -> Address:
    """Return what ``text`` says. ``headgate://`` is encrypted unless it leads to this machine.

    Raises:
        UsageError: it has a token, or anything else behind the port; a token is not shown.
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
    return address_of(host, port, is_tls=is_tls)


def address_of(host: str, port: int, *, is_tls: bool) -> Address:
    """Return the address of a server in its one spelling."""
    written = f"[{host}]" if ":" in host else host
    if is_tls == (not is_loopback(host)):
        return Address(f"headgate://{written}:{port}", host, port, is_tls)
    return Address(f"{'https' if is_tls else 'http'}://{written}:{port}", host, port, is_tls)
