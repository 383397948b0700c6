"""The pipelines that this user has run on this machine: where their checkpoints and pages are, and whether they run.

Every start writes a small file ``<state>/headgate/pipelines/<name>/<digest of the directory>``, every served page
``<state>/headgate/pages/<process id>-<pipeline>``, where ``<state>`` is ``$XDG_STATE_HOME`` or ``~/.local/state``.
They are hints only: what cannot be written or read is left out. A pipeline's lock and log decide who may run it.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict
from enum import Enum
from pathlib import Path
from typing import Any

import msgspec
import xxhash

from headgate.codec.decodable import decodable
from headgate.codec.json_files import MALFORMED, Ending, LockHolder
from headgate.dataclass import dataclass
from headgate.errors import HeadgateError, StorageError, UsageError
from headgate.model.config import Access
from headgate.model.manifest import Manifest
from headgate.protocol.checkpoints.recovery import candidates
from headgate.runtime.checkpoints.log import CheckpointLog
from headgate.runtime.driver.pipeline_lock import LOCK_NAME, is_running_here, read_holder
from headgate.storage.local_files import make_directories, user_state_directory, write_created
from headgate.storage.urls import local_directory, open_storage


def remember_pipeline(pipeline: str, root: str) -> list[str]:
    """Record that ``pipeline`` has its checkpoints in ``root``; return other places where it has some."""
    try:
        directory = user_state_directory() / "pipelines" / pipeline
        make_directories(directory)
        mine = directory / xxhash.xxh3_64_hexdigest(root.encode())
        write_created(mine, root.encode(), Access.OWNER)
        others = [_place(path) for path in directory.iterdir() if path != mine]
    except (OSError, RuntimeError):  # no home directory, or one that is read-only
        return []
    return sorted(other for other in others if other and _is_there(other, pipeline))


def remembered_pipelines() -> list[tuple[str, str]]:
    """Return the name and place of each recorded pipeline, without directories in which it no longer is."""
    try:
        directories = list((user_state_directory() / "pipelines").iterdir())
    except (OSError, RuntimeError):
        return []
    found = [(directory.name, place) for directory in directories for place in _places(directory)]
    return [(name, place) for name, place in found if local_directory(place) is None or _is_there(place, name)]


def pipelines_below(root: str) -> list[tuple[str, str]]:
    """Return the name and the place of each pipeline that has checkpoints in the directory ``root``."""
    local = local_directory(root)
    try:
        names = [] if local is None else [path.name for path in local.iterdir()]
    except OSError:
        names = []
    return [(name, root) for name in names if _is_there(root, name)]


def _places(directory: Path) -> list[str]:
    try:
        return [place for place in map(_place, directory.iterdir()) if place]
    except OSError:
        return []


def _place(path: Path) -> str:
    """Return what a record says; "" if it is gone, or another process is just writing it."""
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeError):
        return ""


def _is_there(root: str, pipeline: str) -> bool:
    local = local_directory(root)
    return local is not None and (local / pipeline / "log").is_dir()


@dataclass(frozen=True, slots=True)
class ServedPage:
    """The page of one run.

    Attributes:
        address: where browsers of this machine find it.
        started_s: when the process began that serves it, as the operating system says: numbers of processes come again.
    """

    address: str
    started_s: float


@contextmanager
def announced_page(pipeline: str, address: str) -> Iterator[None]:
    """Record that a page is served at ``address`` until the block ends."""
    note = None
    with suppress(OSError, RuntimeError):  # no home directory, or one that is read-only
        directory = _directory()
        make_directories(directory)
        _forget_the_dead(directory)
        note = directory / f"{os.getpid()}-{pipeline}"
        page = ServedPage(address, _started_s(os.getpid()) or 0.0)
        note.unlink(missing_ok=True)  # of a process that had this number
        write_created(note, msgspec.json.encode(page), Access.OWNER)
    try:
        yield
    finally:
        if note is not None:
            with suppress(OSError):
                note.unlink(missing_ok=True)


def page_of(pipeline: str, pid: int) -> str:
    """Return the address of the page that process ``pid`` serves of ``pipeline``, "" if it serves none."""
    try:
        page = msgspec.json.decode((_directory() / f"{pid}-{pipeline}").read_bytes(), type=decodable(ServedPage))
    except (OSError, RuntimeError, *MALFORMED):
        return ""
    return page.address if page.started_s == _started_s(pid) else ""


def _directory() -> Path:
    return user_state_directory() / "pages"


def _forget_the_dead(directory: Path) -> None:
    for note in directory.iterdir():
        pid = note.name.partition("-")[0]
        if pid.isdigit() and _started_s(int(pid)) is None:
            note.unlink(missing_ok=True)


def _started_s(pid: int) -> float | None:
    import psutil

    try:
        return float(psutil.Process(pid).create_time())
    except (psutil.Error, OverflowError):
        return None


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
    """Its process vanished without reporting: it was killed, or the machine went down."""
    UNKNOWN = "not known"
    """Its checkpoints are in an object store, and this machine does not run it; or its process is another user's."""


@dataclass(frozen=True, slots=True)
class KnownPipeline:
    """A pipeline and its checkpoint directory.

    Attributes:
        name: of the pipeline.
        place: directory or URL of its checkpoints.
        state: what it does.
        owner: the user that runs it, or ran it last, for people; "" if unknown.
        detail: why it failed, or what could not be found out; "" if there is nothing to say.
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


class PipelineRegistry:
    """Lists the known pipelines; a checkpoint log is read again only when it has changed."""

    def __init__(self, directories: Iterable[str] = ()) -> None:
        self._directories = tuple(directories)
        self._newest: dict[tuple[str, str], tuple[int, Manifest | None]] = {}

    def look(self) -> list[KnownPipeline]:
        """Return the pipelines that still exist: running ones first, then by name and place."""
        places = {*remembered_pipelines(), *(found for root in self._directories for found in pipelines_below(root))}
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
        with suppress(UsageError):
            if is_running_here(place, name):
                return KnownState.RUNNING, ""
        return KnownState.UNKNOWN, "an object store does not say whether another machine runs it"
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
