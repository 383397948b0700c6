"""Where the pages of runs are served on this machine, so that the page of all pipelines can lead there.

One small file for each: ``<state>/headgate/pages/<process id>-<pipeline>``, written when the page is served and removed
when it ends; ``<state>`` as in ``api.homes``. Only a memory aid: what cannot be written or read is left out.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import msgspec

from headgate.codec.malformed import MALFORMED
from headgate.model.security import Access
from headgate.storage.access import write_created
from headgate.storage.local import make_directories
from headgate.storage.user_state import user_state_directory


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
def announced(pipeline: str, address: str) -> Iterator[None]:
    """Let others find the page at ``address`` for the time of the block."""
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
        page = msgspec.json.decode((_directory() / f"{pid}-{pipeline}").read_bytes(), type=ServedPage)
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
