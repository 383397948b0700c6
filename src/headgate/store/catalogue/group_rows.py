"""The state of a reader group as bytes in its row, and back.

Counterpart: ``groups`` reads and writes the row. JSON with a version of its own. Source: RG16 of
docs/spec/reader-groups.md.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeAlias

import msgspec

from headgate.codec.malformed import MALFORMED
from headgate.errors import CorruptionError
from headgate.protocol.store.group_claims import Claim
from headgate.protocol.store.group_progress import Progress
from headgate.protocol.store.group_shares import GroupSegment, Shares
from headgate.protocol.store.reader_group import Checkpoint, Group, Member, contradictions

_FORMAT = 1
_CLAIMED = 2
"""The format of a group that a pipeline reads by: a release that knows of none would let others join it."""

_ProgressRow: TypeAlias = tuple[list[tuple[int, int]], list[int], list[tuple[int, int]]]
"""Positions, what is done, and where others begin: see ``Progress``."""


class _Row(msgspec.Struct, frozen=True):
    """What the bytes are made of. Types are checked while they are read: what is damaged may be of any shape."""

    format: int
    streams: dict[str, int]
    kept: int
    epoch: int
    reset: str
    progress: dict[str, _ProgressRow]
    readers: dict[str, tuple[str, int, int]]
    owners: list[tuple[str, int, str]]
    leaving: list[tuple[str, int]]
    checkpoints: list[tuple[str, list[str], dict[str, _ProgressRow]]]
    claim: Claim | None = None


def encode_group(group: Group) -> bytes:
    """Return the bytes of ``group``."""
    claim = {} if group.claim is None else {"claim": group.claim}
    return msgspec.json.encode(
        {
            "format": _FORMAT if group.claim is None else _CLAIMED,
            "streams": group.streams,
            "kept": group.kept,
            "epoch": group.epoch,
            "reset": group.reset,
            "progress": _progress_rows(group.progress),
            "readers": {name: [x.token, x.lease_ms, x.beats] for name, x in sorted(group.readers.items())},
            "owners": [[*segment, owner] for segment, owner in sorted(group.shares.owners.items())],
            "leaving": [list(segment) for segment in sorted(group.shares.leaving)],
            "checkpoints": [[x.name, list(x.owed_by), _progress_rows(x.progress)] for x in group.checkpoints],
            **claim,
        }
    )


def decode_group(data: bytes, name: str) -> Group:
    """Return the group in ``data``; ``name`` is for errors.

    Raises:
        CorruptionError: it is none, of another format, or contradicts itself.
    """
    try:
        found = msgspec.json.decode(data, type=_Row)
        if found.format not in (_FORMAT, _CLAIMED):
            raise ValueError(f"format {found.format}")
        if (found.claim is None) != (found.format == _FORMAT):
            raise ValueError(f"format {found.format} with claim {found.claim}")
        group = _group(found)
        if wrong := contradictions(group):
            raise ValueError(f"it contradicts itself: {wrong[0]}")
        return group
    except MALFORMED as error:
        what = f"the state of reader group '{name}' in the catalogue"
        raise CorruptionError(what, 0, f"format {_FORMAT} or {_CLAIMED}", str(error)) from error


def _group(found: _Row) -> Group:
    owners = {GroupSegment(stream, number): reader for stream, number, reader in found.owners}
    return Group(
        found.streams,
        _progress(found.progress),
        found.kept,
        found.epoch,
        found.reset,
        {reader: Member(*row) for reader, row in found.readers.items()},
        Shares(owners, frozenset(GroupSegment(*row) for row in found.leaving)),
        tuple(Checkpoint(key, tuple(owed), _progress(rows)) for key, owed, rows in found.checkpoints),
        found.claim,
    )


def _progress_rows(progress: Mapping[str, Progress]) -> dict[str, _ProgressRow]:
    return {
        name: (sorted(x.positions.items()), sorted(x.done), sorted(x.begins.items()))
        for name, x in sorted(progress.items())
    }


def _progress(rows: Mapping[str, _ProgressRow]) -> dict[str, Progress]:
    return {
        name: Progress(dict(positions), frozenset(done), dict(begins))
        for name, (positions, done, begins) in rows.items()
    }
