"""Slots of PostgreSQL, and positions in them, as checkpoints store them. Counterpart: ``changes_reader``."""

from __future__ import annotations

import zlib
from typing import Any

import msgspec

from headgate.codec.decodable import decodable
from headgate.connectors.postgres.connection import place_of
from headgate.environment import Environment
from headgate.errors import CorruptionError, UsageError

PATIENCE_MS = 60_000
"""How long a server that is away, or a slot that is in use, is waited for."""
RETRY_S = 0.05

_POSITION_VERSION = 1


class Position(msgspec.Struct, frozen=True):
    """A position as checkpoints store it.

    Attributes:
        slot: its name.
        system, timeline: of the server.
        lsn, index: see ``Point``.
        end: where a bounded reading ends; None: it does not.
    """

    slot: str
    system: str
    timeline: int
    lsn: int
    index: int = 0
    end: int | None = None
    version: int = _POSITION_VERSION

    def encode(self) -> bytes:
        """Return it as JSON."""
        return msgspec.json.encode(self)

    @classmethod
    def decode(cls, data: bytes) -> Position:
        """Return the position.

        Raises:
            CorruptionError
        """
        try:
            found = msgspec.json.decode(data, type=decodable(cls))
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise CorruptionError("position of changes", 0, "slot and LSN", str(error)) from error
        if found.version != _POSITION_VERSION:
            raise CorruptionError("position of changes", 0, f"version {_POSITION_VERSION}", f"version {found.version}")
        return found


def drop_slot(url: str, environment: Environment, connection: Any, slot: str) -> None:
    """Remove a slot if it is there; wait while the reader of a former generation still has it."""
    import psycopg

    until_ms = environment.monotonic_ms() + PATIENCE_MS
    while True:
        try:
            connection.execute(
                "SELECT pg_drop_replication_slot(slot_name) FROM pg_replication_slots WHERE slot_name = %s", (slot,)
            )
        except psycopg.errors.ObjectInUse as error:
            if environment.monotonic_ms() > until_ms:
                raise slot_in_use(url, slot) from error
            environment.sleep(RETRY_S)
        else:
            return


def slot_in_use(url: str, slot: str) -> UsageError:
    """Return the error about a slot that another process reads."""
    return UsageError(
        f"slot '{slot}' in {place_of(url)} is being read by another process; give each pipeline its own slot=, "
        "and stop the other one"
    )


def lock_of(slot: str) -> int:
    """Return the number of the lock that a reader has while it reads the snapshot of a slot."""
    return (zlib.crc32(b"headgate") << 31) | zlib.crc32(slot.encode())


def lsn_of(text: str) -> int:
    """Return a place in the log of a server as a number."""
    high, _, low = text.partition("/")
    return (int(high, 16) << 32) | int(low, 16)


def lsn_text(lsn: int) -> str:
    """Return a place in the log of a server as the server writes it."""
    return f"{lsn >> 32:X}/{lsn & 0xFFFFFFFF:X}"
