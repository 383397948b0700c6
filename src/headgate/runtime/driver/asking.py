"""Checkpoints and savepoints that another process of this machine asks a running pipeline for (rule C63 of
docs/spec/coordinator.md).

Who asks leaves a file with a name of its own beside the pipeline's lock, and rings with a signal. The pipeline's
process takes it, does what it says, and puts what came of it in another file. Counterparts: ``runtime.driver.stopping``
(finds and rings), ``api.running`` (hears).
"""

from __future__ import annotations

import os
import secrets
from pathlib import Path

import msgspec

from headgate.model.progress import CheckpointOutcome
from headgate.model.run_request import RunRequest
from headgate.storage.access import access_in, write_created
from headgate.storage.backends import local_directory

ASKED, TAKEN, WRITTEN, ANSWERED = ".asked", ".taken", ".written", ".answered"


class Ask:
    """One question and its answer."""

    def __init__(self, path: Path) -> None:
        self._path = path

    @classmethod
    def leave(cls, root: str, pipeline: str, request: RunRequest | None = None) -> Ask:
        """Leave a question beside the lock of ``pipeline``."""
        local = local_directory(root)
        assert local is not None, "only a local pipeline can be rung for"
        ask = cls(local / pipeline / f"checkpoint-{os.getpid()}-{secrets.token_hex(8)}")
        ask._put(ASKED, b"" if request is None else msgspec.json.encode(request))
        return ask

    def _put(self, suffix: str, data: bytes) -> None:
        """Whoever sees it sees all of it, and is who may write beside the lock (SE1, SE2)."""
        written = self._path.with_suffix(WRITTEN)
        write_created(written, data, access_in(written.parent))
        written.rename(self._path.with_suffix(suffix))

    def take(self) -> RunRequest | None:
        """Return what is asked for, to whoever takes it first; None: nobody waits, or somebody else did."""
        try:
            self._path.with_suffix(ASKED).rename(self._path.with_suffix(TAKEN))
            data = self._path.with_suffix(TAKEN).read_bytes()
        except FileNotFoundError:
            return None
        return msgspec.json.decode(data, type=RunRequest) if data else RunRequest()

    @property
    def is_given_up(self) -> bool:
        """Whether who asked has died."""
        pid = self._path.name.split("-")[1]
        return not (pid.isdecimal() and Path(f"/proc/{pid}").exists())

    def answer(self, outcome: CheckpointOutcome) -> None:
        """Say what came of it, unless nobody waits any more."""
        asked = self._path.with_suffix(ASKED), self._path.with_suffix(TAKEN)
        if any(path.exists() for path in asked):
            self._put(ANSWERED, msgspec.json.encode(outcome))
            for path in asked:
                path.unlink(missing_ok=True)

    def answered(self) -> CheckpointOutcome | None:
        """Return what came of it, or None while nobody has said so."""
        try:
            return msgspec.json.decode(self._path.with_suffix(ANSWERED).read_bytes(), type=CheckpointOutcome)
        except FileNotFoundError:
            return None

    def remove(self) -> None:
        """Forget it, answered or not."""
        for suffix in (ASKED, TAKEN, WRITTEN, ANSWERED):
            self._path.with_suffix(suffix).unlink(missing_ok=True)


def left(root: str, pipeline: str) -> list[Ask]:
    """Return the questions that somebody waits for; remove what is left of others."""
    local = local_directory(root)
    paths = [] if local is None else sorted((local / pipeline).glob("checkpoint-*-*.*"))
    asks = {path.with_suffix(""): Ask(path.with_suffix("")) for path in paths}
    for ask in asks.values():
        if ask.is_given_up:
            ask.remove()
    return [Ask(path.with_suffix("")) for path in paths if path.suffix == ASKED and path.exists()]


def taken(root: str, pipeline: str, run: str) -> list[tuple[Ask, RunRequest]]:
    """Take the questions to ``run``; remove those to a former one, whoever has the number of who asked now (C76)."""
    asks = ((ask, ask.take()) for ask in left(root, pipeline))
    found = [(ask, request) for ask, request in asks if request is not None]
    for ask, request in found:
        if not request.is_for(run):
            ask.remove()
    return [(ask, request) for ask, request in found if request.is_for(run)]
