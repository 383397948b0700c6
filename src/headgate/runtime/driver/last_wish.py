"""Says for a driver that died before it could: its user had asked it to stop or drain (SB15 of docs/spec/standby.md).

Whoever asked still knows. Counterparts: ``runtime.driver.heart``, by which a driver that lives says it itself;
``runtime.driver.lookout`` in a standby.
"""

from __future__ import annotations

from headgate.codec.heartbeat import encode_beat, end_path
from headgate.codec.lock_holder import LockHolder
from headgate.model.heartbeat import Beat, Course
from headgate.runtime.driver.lookout import Lookout
from headgate.storage.base import Storage

REASON = "its driver died before it could carry out the request"

_UNAWARE = frozenset({Course.RUNNING, Course.DRAINING, Course.FAILED})
"""Of such a run a standby does not know that it was to stop."""


def tell_standbys(storage: Storage, pipeline: str, dead: LockHolder, *, drain: bool) -> None:
    """Record as the end of the run of ``dead`` what was asked of it, unless somebody has claimed since.

    Raises:
        StorageError
    """
    found = Lookout(storage, pipeline, "").all()
    if not found.knows_beats or not _is_by(dead, found.owner) or found.course not in _UNAWARE:
        return
    if drain and (found.course is Course.DRAINING or found.was_draining):
        return
    course = Course.FAILED if drain else Course.STOPPED
    word = Beat(found.generation, found.owner, 0, course, None, found.reason or REASON, was_draining=drain)
    storage.put(end_path(pipeline, found.generation), [encode_beat(word)])


def _is_by(dead: LockHolder, owner: str) -> bool:
    """Whether ``dead`` has claimed as ``owner``. Of a lock that does not say it, nobody can tell."""
    return dead.claimant == owner != ""
