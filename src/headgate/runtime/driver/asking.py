"""Checkpoints that another process of this machine asks a running pipeline for (rule C63 of docs/spec/coordinator.md).

Who asks leaves a file with a name of its own beside the pipeline's lock, and rings with a signal. The pipeline's
process takes a checkpoint and puts what came of it in another file. Counterparts: ``runtime.driver.stopping`` (finds
and rings), ``api.running`` (hears).
"""

from __future__ import annotations

import os
import secrets
from pathlib import Path

import msgspec

from headgate.model.progress import CheckpointOutcome
from headgate.storage.backends import local_directory

ASKED, WRITTEN, ANSWERED = ".asked", ".written", ".answered"


class Ask:
    """One question and its answer."""

    def __init__(self, path: Path) -> None:
        self._path = path

    @classmethod
    def leave(cls, root: str, pipeline: str) -> Ask:
        """Leave a question beside the lock of ``pipeline``."""
        local = local_directory(root)
        assert local is not None, "only a local pipeline can be rung for"
        ask = cls(local / pipeline / f"checkpoint-{os.getpid()}-{secrets.token_hex(8)}")
        ask._path.with_suffix(ASKED).touch(mode=0o600, exist_ok=False)
        return ask

    @property
    def is_given_up(self) -> bool:
        """Whether who asked has died."""
        pid = self._path.name.split("-")[1]
        return not (pid.isdecimal() and Path(f"/proc/{pid}").exists())

    def answer(self, outcome: CheckpointOutcome) -> None:
        """Say what came of it, unless nobody waits any more."""
        asked, written = self._path.with_suffix(ASKED), self._path.with_suffix(WRITTEN)
        if asked.exists():
            written.write_bytes(msgspec.json.encode(outcome))
            written.rename(self._path.with_suffix(ANSWERED))
            asked.unlink(missing_ok=True)

    def answered(self) -> CheckpointOutcome | None:
        """Return what came of it, or None while nobody has said so."""
        try:
            return msgspec.json.decode(self._path.with_suffix(ANSWERED).read_bytes(), type=CheckpointOutcome)
        except FileNotFoundError:
            return None

    def remove(self) -> None:
        """Forget it, answered or not."""
        for suffix in (ASKED, WRITTEN, ANSWERED):
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
