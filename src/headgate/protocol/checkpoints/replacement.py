"""Whether a driver was replaced by another one (rules R40 and R56 of docs/spec/recovery.md).

Pure functions over what was observed in the checkpoint log. Counterparts: ``recovery``, which decides what to start
from; ``runtime.checkpoints.log``, which reads, and refuses. Never takes what cannot be read for nothing: it may be the
entry of a newer driver, and one that claims above it fences the healthy one.
"""

from __future__ import annotations

from collections.abc import Sequence

from headgate.model.ids import Generation
from headgate.model.manifest import Manifest
from headgate.protocol.checkpoints.recovery import Damage, ObservedEntry, ObservedLog, lost_entry


def replaced_by(log: ObservedLog, mine: Generation, owner: str, since: int) -> Generation | Damage | None:
    """Return the newest generation that another driver than ``owner`` began after ``mine``, or None.

    Ask before a driver claims again: one that was replaced stops. Were it to take over in turn, two drivers would
    replace each other for ever (C38, I5). A claim of its own that it does not know of does not count. A manifest tells
    as well as a claim, which may have been pruned (R40): a driver knows every generation of its own that has any.

    ``since`` is the first sequence that this driver did not write itself. Damage there may be an entry of another one:
    then nobody can tell, and it is returned (R56).
    """
    newer = (e.content for e in log.counted() if not isinstance(e.content, Damage) and e.content.generation > mine)
    others = [c.generation for c in newer if isinstance(c, Manifest) or c.owner != owner]
    if others:
        return max(others)
    damaged = (entry.content for entry in log.counted() if entry.sequence >= since)
    lost = (lost_entry(sequence) for sequence in log.lost() if sequence >= since)
    return next((found for found in (*damaged, *lost) if isinstance(found, Damage)), None)


def newest_of(later: Sequence[ObservedEntry], above: Generation) -> Generation | Damage | None:
    """Return the newest generation above ``above`` that any entry of ``later`` is of; None if there is none.

    If one that cannot be read may be, nobody can tell, and the damage is returned (R56).
    """
    read = [entry.content.generation for entry in later if not isinstance(entry.content, Damage)]
    if any(generation > above for generation in read):
        return max(read)
    return next((entry.content for entry in later if isinstance(entry.content, Damage)), None)
