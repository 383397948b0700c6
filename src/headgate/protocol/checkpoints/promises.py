"""What an old checkpoint promised and may be promised again (rules SV26 and WS10 of docs/spec/savepoints.md).

Pure functions over manifests of one life of a pipeline. A checkpoint promises its output until a newer one no longer
does: from then on it is committed, and targets may forget that (K20). That is so only in one line of checkpoints; those
that a pipeline left by going back are in no line, and what they promised may have been aborted.
Counterparts: ``runtime.driver.adopting``, ``runtime.written_state``, which restore and write what was promised.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import replace

from headgate.model.definition import PipelineDefinition
from headgate.model.ids import CheckpointId
from headgate.model.lineage import NodeKind
from headgate.model.manifest import Committable, Left, Manifest

_Identity = tuple[str, int, int, int]


def is_in_line(checkpoint: CheckpointId, newer: Manifest) -> bool:
    """Whether ``newer`` descends from ``checkpoint`` of the same life, or is it."""
    return checkpoint <= newer.checkpoint and not _was_left(checkpoint, None, newer)


def leaving(base: Manifest, first: CheckpointId) -> tuple[Left, ...]:
    """Return what checkpoints from ``first`` on have to say, when they descend from ``base``, an older one."""
    is_anything_left = first > base.checkpoint + 1
    return (*base.left, Left(base.checkpoint, first)) if is_anything_left else base.left


def giving_up(base: Manifest, promised: Iterable[Committable]) -> tuple[Left, ...]:
    """Return what checkpoints that descend from ``base`` have to say when what it ``promised`` is given up (SV30).

    Their sinks may come back, and are no witness that it was committed. ``base`` itself stays in line.
    """
    oldest: dict[str, CheckpointId] = {}
    for one in promised:
        oldest[one.sink] = min(one.checkpoint, oldest.get(one.sink, one.checkpoint))
    below = CheckpointId(base.checkpoint + 1)
    return tuple(Left(CheckpointId(first - 1), below, sink) for sink, first in sorted(oldest.items()))


def settled(found: Manifest, newer: Manifest) -> frozenset[Committable]:
    """Return what ``found`` promised and was committed before ``newer`` was written, both of one life.

    What a sink promised that ``newer`` does not know is not, nor what was given up before that sink came back (SV30).
    """
    if not is_in_line(found.checkpoint, newer):
        return frozenset()
    still = _identities(newer.committables)
    promised = (c for c in found.committables if c.sink in newer.state_texts)
    promised = (c for c in promised if not _was_left(c.checkpoint, c.sink, newer))
    return frozenset(c for c in promised if _identity(c) not in still)


def promised_here(restored: Manifest, definition: PipelineDefinition) -> tuple[Committable, ...]:
    """Return what ``restored`` promised, but for sinks that were removed by name (SV30)."""
    here = definition.plan.state_texts()
    gone = {name for name in definition.config.start.allow_unclaimed_state if name not in here}
    return tuple(committable for committable in restored.committables if committable.sink not in gone)


def given_up(restored: Manifest, definition: PipelineDefinition) -> tuple[Left, ...]:
    """Return what checkpoints that descend from ``restored`` have to say about sinks that were removed by name."""
    here = promised_here(restored, definition)
    return giving_up(restored, [one for one in restored.committables if one not in here])


def among(committables: Iterable[Committable], promised: Iterable[Committable]) -> frozenset[Committable]:
    """Return those that are promised, by their identity (K8): where they are stored may differ."""
    identities = _identities(promised)
    return frozenset(c for c in committables if _identity(c) in identities)


def without(manifest: Manifest, committables: Collection[Committable]) -> Manifest:
    """Return ``manifest`` without the promise of ``committables``."""
    entries = tuple(
        replace(entry, committables=tuple(c for c in entry.committables if c not in committables))
        for entry in manifest.entries
    )
    return replace(manifest, entries=entries, carried=tuple(c for c in manifest.carried if c not in committables))


def in_front_of_other_targets(manifest: Manifest) -> Manifest:
    """Return ``manifest`` for another pipeline than the one that took it, or another life: the targets are that one's.

    So its sinks write elsewhere (LV2), and what they held goes there, too (EV16).
    """
    lineages = {
        name: replace(lineage, locations=()) if lineage.kind is NodeKind.SINK else lineage
        for name, lineage in manifest.lineages.items()
    }
    return replace(manifest, lineages=lineages)


def _was_left(checkpoint: CheckpointId, sink: str | None, newer: Manifest) -> bool:
    return any(left.sink == sink and left.above < checkpoint < left.below for left in newer.left)


def _identities(committables: Iterable[Committable]) -> set[_Identity]:
    return {_identity(committable) for committable in committables}


def _identity(committable: Committable) -> _Identity:
    return (committable.sink, committable.checkpoint, committable.subtask_index, committable.generation)
