"""The pipelines that this user has run on this machine: whether each runs now, and its newest checkpoint.

Known are those that a start noted (``api.homes``), and those below directories that are given. Looks only, and
decides nothing: who may run a pipeline is decided by its lock and its log.
"""

from __future__ import annotations

import socket
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from enum import Enum
from typing import Any

from headgate.api import homes
from headgate.api.pages import page_of
from headgate.codec.lock_holder import Ending, LockHolder
from headgate.errors import HeadgateError, StorageError, UsageError
from headgate.model.manifest import Manifest
from headgate.protocol.checkpoints.recovery import candidates
from headgate.runtime.checkpoints.log import CheckpointLog
from headgate.runtime.driver.pipeline_lock import LOCK_NAME, read_holder
from headgate.runtime.driver.stopping import is_running_here
from headgate.storage.backends import local_directory, open_storage


class KnownState(Enum):
    """What a pipeline does, as far as this machine can tell."""

    RUNNING = "running"
    ELSEWHERE = "on another machine"
    """Its lock was taken there, and does not say that it ended."""
    FINISHED = "finished"
    DRAINED = "drained"
    STOPPED = "stopped"
    CANCELLED = "cancelled"
    FAILED = "failed"
    DIED = "died"
    """Its process ended without a word: it was killed, or the machine went down."""
    UNKNOWN = "not known"
    """Its checkpoints are in an object store, or its process belongs to somebody else."""


@dataclass(frozen=True, slots=True)
class KnownPipeline:
    """A pipeline at one place.

    Attributes:
        name: of the pipeline.
        place: directory or URL of its checkpoints.
        state: what it does.
        owner: who runs it, or ran it last, for people; "" if nobody said so.
        detail: why it failed, or what could not be told; "" if there is nothing to say.
        checkpoint: the newest completed one, None if there is none.
        triggered_ms: when that was triggered, in milliseconds since 1970 by its driver's clock.
        duration_ms: how long it took.
        size_bytes: of what it wrote and refers to.
        page: where its run is shown in a browser, "" if it is not.
    """

    name: str
    place: str
    state: KnownState
    owner: str = ""
    detail: str = ""
    checkpoint: int | None = None
    triggered_ms: int | None = None
    duration_ms: int | None = None
    size_bytes: int | None = None
    page: str = ""


def known_fields(known: KnownPipeline) -> dict[str, Any]:
    """Return ``known`` as JSON has it."""
    return {**asdict(known), "state": known.state.value}


class Looker:
    """Looks at the pipelines that are known, again and again; a log is read again only when it has changed."""

    def __init__(self, directories: Iterable[str] = ()) -> None:
        self._directories = tuple(directories)
        self._newest: dict[tuple[str, str], tuple[int, Manifest | None]] = {}

    def look(self) -> list[KnownPipeline]:
        """Return the pipelines, running ones first, then by name and place. Those that are gone are left out."""
        places = {*homes.remembered(), *(found for root in self._directories for found in homes.below(root))}
        found = [self._look_at(name, place) for name, place in places]
        return sorted(found, key=lambda one: (one.state is not KnownState.RUNNING, one.name, one.place))

    def _look_at(self, name: str, place: str) -> KnownPipeline:
        holder = read_holder(place, name)
        state, detail = _state_of(name, place, holder)
        owner = "" if holder is None else holder.owner
        page = page_of(name, holder.pid) if holder is not None and state is KnownState.RUNNING else ""
        try:
            newest = self._newest_of(name, place)
        except HeadgateError as error:
            return KnownPipeline(name, place, state, owner, detail or str(error), page=page)
        if newest is None:
            return KnownPipeline(name, place, state, owner, detail, page=page)
        numbers = (int(newest.checkpoint), newest.trigger_wall_ms, newest.duration_ms, newest.size_bytes)
        return KnownPipeline(name, place, state, owner, detail, *numbers, page)

    def _newest_of(self, name: str, place: str) -> Manifest | None:
        """Return the newest checkpoint, None without one. Object stores are not asked.

        Raises:
            StorageError: the log cannot be read.
        """
        local = local_directory(place)
        if local is None:
            return None
        try:
            changed_ns = (local / name / "log").stat().st_mtime_ns
        except FileNotFoundError:
            return None
        except OSError as error:
            raise StorageError("list", f"{place}/{name}/log", str(error.strerror)) from error
        before = self._newest.get((name, place))
        if before is not None and before[0] == changed_ns:
            return before[1]
        newest = next(iter(candidates(CheckpointLog(open_storage(place), name).observe())), None)
        self._newest[name, place] = changed_ns, newest
        return newest


def _state_of(name: str, place: str, holder: LockHolder | None) -> tuple[KnownState, str]:
    """Return what a pipeline does, and what there is to say about it."""
    local = local_directory(place)
    if local is None:
        return KnownState.UNKNOWN, "an object store does not say whether a pipeline runs"
    if holder is None:
        return KnownState.UNKNOWN, f"{local / name / LOCK_NAME} does not say which process runs it"
    if holder.ending is not Ending.NONE:
        return KnownState(holder.ending.value), holder.reason
    if holder.host != socket.gethostname():
        return KnownState.ELSEWHERE, ""
    try:
        return (KnownState.RUNNING if is_running_here(place, name) else KnownState.DIED), ""
    except UsageError as error:
        return KnownState.UNKNOWN, str(error)
