"""Offline check of a store: every invariant of the catalogue, every byte of every chunk.

Counterpart: ``Store.fsck`` and ``headgate streams check``. Source: docs/spec/stream-store.md. Whatever is
damaged is a problem of its own, in a sentence, and never the end of the check. Never changes anything.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from contextlib import suppress
from typing import ParamSpec, Protocol, TypeAlias, runtime_checkable

import pyarrow as pa
from msgspec import structs

from headgate.codec.chunk import PartEntry, decode_footer
from headgate.dataclass import dataclass
from headgate.errors import CorruptionError, HeadgateError
from headgate.storage.base import NotFound, Storage
from headgate.store.catalogue.base import Audit, Catalogue
from headgate.store.catalogue.records import ChunkRecord, StoredPart
from headgate.store.chunks import read_part
from headgate.store.streams import StreamInfo

Findings: TypeAlias = list[tuple[str, str]]
"""Where something is wrong, and what."""

NONSENSE_ERRORS = (TypeError, ValueError, LookupError, ArithmeticError, AttributeError, AssertionError, MemoryError)
"""What code raises that trips over a value which is never there."""

_P = ParamSpec("_P")


def check_at(where: str, check: Callable[_P, Iterable[str]], *of: _P.args, **named: _P.kwargs) -> Findings:
    """Return what ``check`` finds; what it trips over is found, too: nothing else is left unchecked for it."""

    def found() -> Findings:
        return [(where, problem) for problem in check(*of, **named)]

    return check_or_report(where, found)


def check_or_report(where: str, check: Callable[_P, Findings], *of: _P.args, **named: _P.kwargs) -> Findings:
    """Do what ``check_at`` does, where ``check`` says itself where each problem is."""
    try:
        return check(*of, **named)
    except HeadgateError as error:
        return [(where, str(error))]
    except NONSENSE_ERRORS as error:
        return [(where, f"cannot be checked, what is recorded makes no sense ({type(error).__name__}: {error})")]


_LEFT = "belongs to nothing (left by a crash, or being written now)"
_UNKNOWN = "belongs to nothing that is known (left by a crash, being written now, or of what is damaged)"


@dataclass(frozen=True, slots=True)
class Problem:
    """Something that is not as it must be. ``is_harmless``: nothing was lost (an orphan of a crash)."""

    where: str
    what: str
    is_harmless: bool = False


Suspect: TypeAlias = tuple[str, Problem]
"""A problem of a chunk, with its file."""


@runtime_checkable
class RemotelyChecked(Protocol):
    """A catalogue of a store that another process has, which checks it beside its files."""

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
    if isinstance(catalogue, RemotelyChecked):
        return catalogue.check(verify_events=verify_events)
    with catalogue.audit() as audit:
        problems = _problems(audit.problems())
        orphans = _LEFT if not problems else _UNKNOWN
        suspects: list[Suspect] = []
        if verify_events:
            for stream in audit.streams():
                suspects += _check_events(audit, storage, stream, on_bytes)
        # after the view was taken: what it has and the list has not is lost, or was given up since (`_still_recorded`)
        there = set(storage.list("")) - audit.garbage()
        for chunk in audit.chunks():
            suspects += _check_file(audit, storage, on_bytes, chunk, there, verify=verify_events)
            there.discard(chunk.path)
    problems += _still_recorded(catalogue, suspects)
    return problems + [Problem(f"{storage.url}/{path}", orphans, is_harmless=True) for path in sorted(there)]


def _problems(found: Findings) -> list[Problem]:
    return [Problem(where, what) for where, what in found]


def _still_recorded(catalogue: Catalogue, suspects: list[Suspect]) -> list[Problem]:
    """Leave out what is said of files that the store gave up while it was checked: truncated, aborted, deleted."""
    if not suspects:
        return []
    paths = {path for path, _ in suspects}
    with suppress(CorruptionError):  # which is said already
        paths = catalogue.known_chunks(paths)
    return [problem for path, problem in suspects if path in paths]


def _check_events(audit: Audit, storage: Storage, stream: StreamInfo, on_bytes: Callable[[int], None]) -> list[Suspect]:
    suspects: list[Suspect] = []
    schemas = dict(enumerate(audit.schemas(stream)))
    for part in audit.parts(stream):
        if part.schema_version not in schemas:
            continue  # a problem of the catalogue, which says so
        where = f"{stream.name}/{part.entry.segment} position {part.start}"
        found = check_at(where, _read, storage, part, schemas[part.schema_version])
        suspects += [(part.path, problem) for problem in _problems(found)]
        on_bytes(part.entry.size_bytes)
    return suspects


def _check_file(
    audit: Audit,
    storage: Storage,
    on_bytes: Callable[[int], None],
    chunk: ChunkRecord,
    there: Collection[str],
    *,
    verify: bool,
) -> list[Suspect]:
    """Check a chunk; ``there`` are the files that were listed."""
    where = f"{storage.url}/{chunk.path}"
    if chunk.path not in there:
        return [(chunk.path, Problem(where, "is missing"))]
    if not chunk.entries:
        return [(chunk.path, Problem(where, "holds no event that can still be read or committed"))]
    if not verify:
        return []
    found = check_at(where, _check_chunk, audit, storage, chunk)
    on_bytes(chunk.size_bytes)
    return [(chunk.path, problem) for problem in _problems(found)]


def _read(storage: Storage, part: StoredPart, schema: pa.Schema) -> list[str]:
    read_part(storage, part, schema)
    return []


def _check_chunk(audit: Audit, storage: Storage, chunk: ChunkRecord) -> list[str]:
    """The footer says what the catalogue says, and beside it only what was truncated."""
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
