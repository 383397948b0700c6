"""Time-to-live: what a state may be declared with, and what it means in a snapshot (docs/spec/ttl.md).

Backends keep an expiry beside each value, element and entry, and never show what has expired. Never reads a clock:
the operator sets the time. Modelled on Flink's ``StateTtlConfig``.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from operator import itemgetter
from typing import Any, Literal, Protocol, TypeAlias

import pyarrow as pa

from headgate.codec.snapshot import MetaSection
from headgate.errors import UsageError
from headgate.model.config import Duration, duration_ms

EXPIRES_COLUMN = "expires_ms"
"""The last column of the section of a state with a TTL: from this processing time on there is no such row."""

NEVER_MS = (1 << 63) - 1
"""Expiry of what was written when its state had no TTL; a restore sets it."""

TTL_SECTION = "headgate.ttl"
"""The section about a subtask's processing time that belongs to no key (``TtlMeta``)."""

_EXPIRES = pa.field(EXPIRES_COLUMN, pa.int64())
_DURATION_MS_MAX = 1_000 * 365 * 86_400_000
_META = MetaSection(TTL_SECTION, "expiry")


@dataclass(frozen=True, slots=True)
class TTL:
    """How long a value, a list element or a map entry lives: ``state.value("seen", pa.int64(), ttl=hg.TTL("7d"))``.

    The time is processing time. No operation returns state that has expired.

    Attributes:
        duration: ``"30s"``, ``"7d"`` or a ``timedelta``.
        update: what restarts the duration. ``"write"``: each write; ``"read_and_write"``: each read as well.
    """

    duration: Duration
    update: Literal["write", "read_and_write"] = "write"

    def __post_init__(self) -> None:
        found_ms = duration_ms(self.duration, "the duration of a TTL")
        if not 0 < found_ms <= _DURATION_MS_MAX:
            raise UsageError(f"the duration of a TTL must be from 1 ms to 1,000 years, but is {self.duration!r}")
        if self.update not in ("write", "read_and_write"):
            raise UsageError(f'a TTL is updated on "write" or on "read_and_write", not on {self.update!r}')

    @property
    def duration_ms(self) -> int:
        """The duration in milliseconds."""
        return duration_ms(self.duration)

    @property
    def is_renewed_by_reads(self) -> bool:
        """Whether a read restarts the duration."""
        return self.update == "read_and_write"


class StateTime:
    """What time it is to the states of one operator in one subtask.

    Attributes:
        now_ms: processing time of the call that runs; it never goes back. The operator sets it before each.
    """

    __slots__ = ("now_ms",)

    def __init__(self) -> None:
        self.now_ms = 0


@dataclass(frozen=True, slots=True)
class TtlMeta:
    """What a snapshot with a TTL says of a subtask: processing time at the barrier."""

    processing_time_ms: int

    def encode(self) -> bytes:
        """Return it as a section."""
        return _META.encode(ms=self.processing_time_ms)

    @staticmethod
    def found_in(sections: Mapping[str, memoryview], path: str) -> TtlMeta | None:
        """Return what one part of a former snapshot says; None: no state of it had a TTL.

        Raises:
            CorruptionError: it is of a version that is not known here.
        """
        found = _META.found_in(sections, path)
        return None if found is None else TtlMeta(found["ms"])


def has_expiry(schema: pa.Schema) -> bool:
    """Whether a declared state's section of these columns says when its rows expire."""
    return len(schema) > 0 and schema.names[-1] == EXPIRES_COLUMN


def with_expiry(schema: pa.Schema) -> pa.Schema:
    """Return the columns of a section with rows that expire, from those of the state without a TTL."""
    return schema.append(_EXPIRES)


def other_form(schema: pa.Schema) -> pa.Schema:
    """Return what a declared state's section had for columns while it had no TTL, or, if it has none now, one."""
    return schema.remove(len(schema) - 1) if has_expiry(schema) else with_expiry(schema)


def as_declared(batch: pa.RecordBatch, schema: pa.Schema) -> pa.RecordBatch:
    """Return rows of either form in that of ``schema``."""
    if len(batch.schema) < len(schema):
        return batch.append_column(_EXPIRES, pa.repeat(pa.scalar(NEVER_MS), batch.num_rows))
    return batch.select(schema.names)


Timed: TypeAlias = tuple[Any, int]
"""What was stored, and from which processing time on it is gone.

State by row with a TTL holds such a pair for a value, a list of pairs for a list, a dict of pairs for a map. Pairs are
in the order of their expiry, so what has expired is always at the beginning.
"""

_expiry = itemgetter(1)


class ExpiringCells(Protocol):
    """What the functions below need of ``backend.RowCells``."""

    def get(self, key: Any) -> Any:
        """See ``RowCells``."""

    def writable(self, key: Any) -> Any:
        """See ``RowCells``."""

    def remove(self, key: Any) -> None:
        """See ``RowCells``."""


def live_value(cells: ExpiringCells, key: Any, now_ms: int) -> Timed | None:
    """Return the value of ``key``, or None; remove one that has expired."""
    found: Timed | None = cells.get(key)
    if found is None or found[1] > now_ms:
        return found
    cells.remove(key)
    return None


def live_elements(cells: ExpiringCells, key: Any, now_ms: int) -> list[Timed] | None:
    """Return the list of ``key``, or None; remove elements that have expired."""
    found: list[Timed] | None = cells.get(key)
    if found is None or found[0][1] > now_ms:
        return found
    expired = bisect_right(found, now_ms, key=_expiry)
    if expired == len(found):
        cells.remove(key)
        return None
    kept: list[Timed] = cells.writable(key)
    del kept[:expired]
    return kept


def live_entries(cells: ExpiringCells, key: Any, now_ms: int) -> dict[Any, Timed] | None:
    """Return the map of ``key``, or None; remove entries that have expired."""
    found: dict[Any, Timed] | None = cells.get(key)
    if found is None or next(iter(found.values()))[1] > now_ms:
        return found
    expired = []
    for map_key, pair in found.items():
        if pair[1] > now_ms:
            break
        expired.append(map_key)
    if len(expired) == len(found):
        cells.remove(key)
        return None
    kept: dict[Any, Timed] = cells.writable(key)
    for map_key in expired:
        del kept[map_key]
    return kept


def drop_expired(cells: ExpiringCells, key: Any, now_ms: int) -> bool:
    """Remove what has expired of a key's object; return whether anything lives."""
    found = cells.get(key)
    if type(found) is tuple:  # the usual case, so it reads the object once
        if found[1] > now_ms:
            return True
        cells.remove(key)
        return False
    if found is None:
        return False
    live = live_elements if type(found) is list else live_entries
    return live(cells, key, now_ms) is not None


def last_expiry(found: Any) -> int:
    """Return from when on nothing of a key's object lives."""
    match found:
        case list():
            expires: int = found[-1][1]
        case dict():
            expires = next(reversed(found.values()))[1]
        case _:
            expires = found[1]
    return expires


def live_objects(objects: Iterable[tuple[Any, Any]], now_ms: int) -> Iterator[tuple[Any, Any]]:
    """Yield keys with what lives of their objects; changes nothing, so that a snapshot can be encoded again."""
    for key, found in objects:
        if last_expiry(found) <= now_ms:
            continue
        match found:
            case list():
                yield key, found[bisect_right(found, now_ms, key=_expiry) :]
            case dict():
                yield key, {map_key: pair for map_key, pair in found.items() if pair[1] > now_ms}
            case _:
                yield key, found


def no_longer_than(found: Any, limit_ms: int) -> Any:
    """Return a key's object, of which nothing lives longer than until ``limit_ms``, in the order of expiry."""
    match found:
        case list():
            return [(stored, min(expires, limit_ms)) for stored, expires in found]
        case dict():
            clipped = [(map_key, (stored, min(expires, limit_ms))) for map_key, (stored, expires) in found.items()]
            return dict(sorted(clipped, key=lambda entry: entry[1][1]))
    return found[0], min(found[1], limit_ms)
