"""Offline check of a store: every invariant of the catalogue, every byte of every chunk.

Counterpart: ``Store.fsck`` and ``headgate streams check``. Source: S40 of docs/spec/stream-store.md. Whatever is
damaged is a problem of its own, in a sentence, and never the end of the check. Never changes anything.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import pyarrow as pa
from msgspec import structs

from headgate.codec.chunk import PartEntry, decode_footer
from headgate.storage.base import NotFound, Storage
from headgate.store.catalogue.base import Audit, Catalogue, ChunkRecord, StoredPart
from headgate.store.chunks import read_part
from headgate.store.findings import Found, checked
from headgate.store.streams import StreamInfo

_LEFT = "belongs to nothing (left by a crash, or being written now)"
_UNKNOWN = "belongs to nothing that is known (left by a crash, being written now, or of what is damaged)"


@dataclass(frozen=True, slots=True)
class Problem:
    """Something that is not as it must be. ``is_harmless``: nothing was lost (an orphan of a crash)."""

    where: str
    what: str
    is_harmless: bool = False


@runtime_checkable
class CheckedThere(Protocol):
    """A catalogue of a store that another process has, which checks it beside its files (SS16)."""

    def check(self, *, verify_events: bool) -> list[Problem]:
        """Return the problems found there."""


def check_store(
    catalogue: Catalogue,
    storage: Storage,
    *,
    verify_events: bool,
    on_bytes: Callable[[int], None] = lambda size_bytes: None,
) -> list[Problem]:
    """Return the problems found. ``on_bytes`` hears how many more were read: each chunk's, twice in all."""
    if isinstance(catalogue, CheckedThere):
        return catalogue.check(verify_events=verify_events)
    with catalogue.audit() as audit:
        problems = _told(audit.problems())
        orphans = _LEFT if not problems else _UNKNOWN
        if verify_events:
            for stream in audit.streams():
                problems += _check_events(audit, storage, stream, on_bytes)
        problems += _check_files(audit, storage, on_bytes, orphans, verify=verify_events)
    return problems


def _told(found: Found) -> list[Problem]:
    return [Problem(where, what) for where, what in found]


def _check_events(audit: Audit, storage: Storage, stream: StreamInfo, on_bytes: Callable[[int], None]) -> list[Problem]:
    problems = []
    schemas = dict(enumerate(audit.schemas(stream)))
    for part in audit.parts(stream):
        if part.schema_version not in schemas:
            continue  # a problem of the catalogue, which says so
        where = f"{stream.name}/{part.entry.segment} position {part.start}"
        problems += _told(checked(where, _read, storage, part, schemas[part.schema_version]))
        on_bytes(part.entry.size_bytes)
    return problems


def _check_files(
    audit: Audit, storage: Storage, on_bytes: Callable[[int], None], orphans: str, *, verify: bool
) -> list[Problem]:
    """Check the chunks; ``orphans`` says what files are that belong to none."""
    problems = []
    there = set(storage.list("")) - audit.garbage()
    for chunk in audit.chunks():
        if chunk.path not in there:
            problems.append(Problem(f"{storage.url}/{chunk.path}", "is missing"))
            continue
        there.discard(chunk.path)
        if not chunk.entries:
            problems.append(
                Problem(f"{storage.url}/{chunk.path}", "holds no event that can still be read or committed")
            )
            continue
        if verify:
            problems += _told(checked(f"{storage.url}/{chunk.path}", _check_chunk, audit, storage, chunk))
            on_bytes(chunk.size_bytes)
    return problems + [Problem(f"{storage.url}/{path}", orphans, is_harmless=True) for path in sorted(there)]


def _read(storage: Storage, part: StoredPart, schema: pa.Schema) -> list[str]:
    read_part(storage, part, schema)
    return []


def _check_chunk(audit: Audit, storage: Storage, chunk: ChunkRecord) -> list[str]:
    """The footer says what the catalogue says, and beside it only what was truncated (S68)."""
    try:
        footer = decode_footer(f"{storage.url}/{chunk.path}", storage.get(chunk.path))
    except NotFound:
        return ["is missing"]  # it went since it was listed
    written = {part.offset: part for part in footer.parts}
    listed = {entry.offset: entry for entry in chunk.entries}
    agrees = all(offset in written and _is_same(audit, chunk, written[offset], listed[offset]) for offset in listed)
    gone = {written[offset].segment for offset in written.keys() - listed.keys()}
    agrees = agrees and all(audit.is_truncated(chunk, segment) for segment in gone)
    return [] if agrees else ["its footer and the catalogue disagree"]


def _is_same(audit: Audit, chunk: ChunkRecord, written: PartEntry, listed: PartEntry) -> bool:
    """Whether the catalogue has a part as it was written; a stream that was scaled meanwhile has it elsewhere (S75)."""
    return structs.replace(listed, segment=written.segment) == written and listed.segment in audit.heirs(
        chunk, written.segment
    )
