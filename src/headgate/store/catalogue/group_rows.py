"""The state of a reader group as bytes in its row, and back.

Counterpart: ``groups`` reads and writes the row. JSON with a version of its own. Source: RG16 of
docs/spec/reader-groups.md.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

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
        found = msgspec.json.decode(data)
        if found["format"] not in (_FORMAT, _CLAIMED):
            raise ValueError(f"format {found['format']}")
        owners = {GroupSegment(stream, number): reader for stream, number, reader in found["owners"]}
        group = Group(
            found["streams"],
            _progress(found["progress"]),
            found["kept"],
            found["epoch"],
            found["reset"],
            {reader: Member(*row) for reader, row in found["readers"].items()},
            Shares(owners, frozenset(GroupSegment(*row) for row in found["leaving"])),
            tuple(Checkpoint(key, tuple(owed), _progress(rows)) for key, owed, rows in found["checkpoints"]),
            None if found["format"] == _FORMAT else msgspec.convert(found["claim"], Claim),
        )
        if wrong := contradictions(group):
            raise ValueError(f"it contradicts itself: {wrong[0]}")
        return group
    except (*MALFORMED, ValueError, KeyError, TypeError) as error:
        what = f"the state of reader group '{name}' in the catalogue"
        raise CorruptionError(what, 0, f"format {_FORMAT} or {_CLAIMED}", str(error)) from error


def _progress_rows(progress: Mapping[str, Progress]) -> dict[str, Any]:
    return {
        name: [sorted(x.positions.items()), sorted(x.done), sorted(x.begins.items())]
        for name, x in sorted(progress.items())
    }


def _progress(rows: Mapping[str, Any]) -> dict[str, Progress]:
    return {
        name: Progress(dict(positions), frozenset(done), dict(begins))
        for name, (positions, done, begins) in rows.items()
    }
