"""What a Spark master's URL says: its kind, its slots where they are in it, and where it can be reached.

Counterparts: ``spark.prerequisites``, which looks whether anything answers there; ``api.preparing``, which asks for
slots. A malformed URL is refused here, before any JVM is started. Never connects to anything.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from urllib.parse import SplitResult, urlsplit

from headgate.errors import UsageError

KINDS = "local[N], spark://HOST:PORT, yarn or k8s://HOST:PORT"

_LOCAL = re.compile(r"local(?:\[(\d+|\*)(?:,\d+)?\])?")
_LOCAL_CLUSTER = re.compile(r"local-cluster\[(\d+),(\d+),\d+\]")
_PORT_OF_SCHEME = {"https": 443, "http": 80}


@dataclass(frozen=True, slots=True)
class Master:
    """A Spark master.

    Attributes:
        url: as Spark takes it.
        slots: how many tasks run at a time; None: only the cluster knows, or ``has_all_processors``.
        has_all_processors: it has a slot for each processor of this machine.
        endpoints: hosts and ports, one of which must answer; none where the URL does not say.
    """

    url: str
    slots: int | None = None
    has_all_processors: bool = False
    endpoints: tuple[tuple[str, int], ...] = ()

    @property
    def is_local(self) -> bool:
        """Whether tasks run on this machine, in the JVM that this process starts."""
        return self.slots is not None or self.has_all_processors


def read_master(url: str) -> Master:
    """Return what ``url`` says.

    Raises:
        UsageError: Spark knows no such master.
    """
    text = "".join(url.split())
    if local := _LOCAL.fullmatch(text):
        if local.group(1) == "*":
            return Master(text, has_all_processors=True)
        return Master(text, slots=_positive(url, int(local.group(1) or 1)))
    if several := _LOCAL_CLUSTER.fullmatch(text):
        return Master(text, slots=int(several.group(1)) * int(several.group(2)))
    if text == "yarn":
        return Master(text)
    if text.startswith("spark://"):
        hosts = text.removeprefix("spark://").split(",")
        return Master(text, endpoints=tuple(_endpoint(url, urlsplit(f"spark://{host}"), None) for host in hosts))
    if text.startswith("k8s://"):
        server = text.removeprefix("k8s://")
        parts = urlsplit(server if "://" in server else f"https://{server}")
        return Master(text, endpoints=(_endpoint(url, parts, _PORT_OF_SCHEME.get(parts.scheme)),))
    if text.startswith("sc://"):
        raise UsageError(f"'{url}' is Spark Connect, on which pipelines do not run yet; give {KINDS}")
    raise _malformed(url)


def same_master(one: str, other: str) -> bool:
    """Return whether both texts name the same master; Spark itself writes some in another way."""
    return _normal(one) == _normal(other)


def _normal(url: str) -> str:
    text = "".join(url.split()).removesuffix("/")
    if text.startswith("k8s://") and "://" not in text.removeprefix("k8s://"):
        return f"k8s://https://{text.removeprefix('k8s://')}"
    return "local[1]" if text == "local" else text


def _endpoint(url: str, parts: SplitResult, port_default: int | None) -> tuple[str, int]:
    try:
        host, port = parts.hostname, parts.port or port_default
    except ValueError:  # the port is no number
        raise _malformed(url) from None
    if not host or port is None:
        raise _malformed(url)
    return host, port


def _positive(url: str, slots: int) -> int:
    if slots < 1:
        raise _malformed(url)
    return slots


def _malformed(url: str) -> UsageError:
    return UsageError(f"'{url}' is not the URL of a Spark master; give {KINDS}")
