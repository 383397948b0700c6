"""Time-to-live: what a state may be declared with, and what it means in a snapshot (docs/spec/ttl.md).

Backends keep an expiry beside each value, element and entry, and never show what has expired. Never reads a clock:
the operator sets the time. Modelled on Flink's ``StateTtlConfig``.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import pyarrow as pa

from headgate.errors import CorruptionError, UsageError
from headgate.model.config import Duration, duration_ms

_VERSION = 1


@dataclass(frozen=True, slots=True)
class MetaSection:
    """A section that belongs to no key.

    Attributes:
        name: of the section.
        what: its facts are about, in words.
    """

    name: str
    what: str

    def encode(self, **facts: int) -> bytes:
        """Return the facts as a section."""
        return json.dumps({"version": _VERSION, **facts}).encode()

    def found_in(self, sections: Mapping[str, memoryview], path: str) -> dict[str, Any] | None:
        """Return the facts that one part of a former snapshot holds; None: it has no such section.

        Raises:
            CorruptionError: it is of a version that is not known here.
        """
        if self.name not in sections:
            return None
        found: dict[str, Any] = json.loads(bytes(sections[self.name]))
        if found["version"] != _VERSION:
            raise CorruptionError(path, 0, f"{self.what} of version {_VERSION}", f"version {found['version']}")
        return found


EXPIRES_COLUMN = "expires_ms"
"""The last column of the section of a state with a TTL: from this processing time on there is no such row (TL6)."""

NEVER_MS = (1 << 63) - 1
"""Expiry of what was written when its state had no TTL; a restore sets it (TL7)."""

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
        update: what begins the duration anew. ``"write"``: each write; ``"read_and_write"``: each read as well.
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
        """Whether a read begins the duration anew."""
        return self.update == "read_and_write"


class StateTime:
    """What time it is to the states of one operator in one subtask.

    Attributes:
        now_ms: processing time of the call that runs; it never goes back (TL2, TL5). The operator sets it before each.
    """

    __slots__ = ("now_ms",)

    def __init__(self) -> None:
        self.now_ms = 0


@dataclass(frozen=True, slots=True)
class TtlMeta:
    """What a snapshot with a TTL says of a subtask: processing time at the barrier (TL5)."""

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
    """Return the columns of a section whose rows expire, from those of the state without a TTL."""
    return schema.append(_EXPIRES)


def other_form(schema: pa.Schema) -> pa.Schema:
    """Return what a declared state's section had for columns while it had no TTL, or, if it has none now, one (TL7)."""
    return schema.remove(len(schema) - 1) if has_expiry(schema) else with_expiry(schema)


def as_declared(batch: pa.RecordBatch, schema: pa.Schema) -> pa.RecordBatch:
    """Return rows of either form in that of ``schema``."""
    if len(batch.schema) < len(schema):
        return batch.append_column(_EXPIRES, pa.repeat(pa.scalar(NEVER_MS), batch.num_rows))
    return batch.select(schema.names)
