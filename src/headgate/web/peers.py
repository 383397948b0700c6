"""Whether a browser on loopback belongs to the user who runs the page (PG13).

The kernel's table of connections says whose each end is. Where there is no such table, the answer is no.
"""

from __future__ import annotations

import ipaddress
import os
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import TypeAlias

Address: TypeAlias = tuple[str, int]
"""Of one end of a connection: an IP address and a port."""

TABLES = ("/proc/net/tcp", "/proc/net/tcp6")
ESTABLISHED = "01"


def is_of_this_user(browser: Address, page: Address) -> bool:
    """Whether the connection from ``browser`` to ``page`` was opened by a process of the user of this one."""
    return any(owner_in(_lines_of(table), browser, page) == os.getuid() for table in TABLES)


def owner_in(table: Iterable[str], browser: Address, page: Address) -> int | None:
    """Return whose the end ``browser`` is of its connection to ``page``, None if ``table`` does not say.

    Args:
        table: lines as in ``/proc/net/tcp``; the first one has titles.
        browser: where the connection comes from.
        page: where it leads.
    """
    for line in table:
        fields = line.split()
        if len(fields) < 8 or fields[3] != ESTABLISHED:
            continue
        if _address_of(fields[1]) == _plain(browser) and _address_of(fields[2]) == _plain(page):
            return int(fields[7])
    return None


def _lines_of(table: str) -> list[str]:
    try:
        return Path(table).read_text().splitlines()[1:]
    except OSError:
        return []


def _address_of(field: str) -> tuple[str, int]:
    """Return what ``0100007F:0FD2`` means: words of four bytes in the machine's order, then the port."""
    words, _, port = field.partition(":")
    packed = bytes.fromhex(words)
    if sys.byteorder == "little":
        packed = b"".join(packed[at : at + 4][::-1] for at in range(0, len(packed), 4))
    return _plain((str(ipaddress.ip_address(packed)), int(port, 16)))


def _plain(address: Address) -> tuple[str, int]:
    """Return ``address`` in one spelling: IPv4 is IPv4 though it came through a socket of IPv6."""
    try:
        ip = ipaddress.ip_address(address[0])
    except ValueError:
        return address
    mapped = ip.ipv4_mapped if isinstance(ip, ipaddress.IPv6Address) else None
    return str(mapped or ip), address[1]
