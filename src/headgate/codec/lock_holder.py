"""Bytes of a pipeline's lock file: who runs the pipeline on this machine, and after that, how the run ended.

``headgate-lock 1 <xxh3-64 of the body, hex>\\n`` followed by JSON that a person can read. Counterpart:
``runtime.driver.pipeline_lock``. What does not verify says nothing: the file may just be being written.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

import msgspec
import xxhash

from headgate.codec.malformed import MALFORMED

_MAGIC = b"headgate-lock 1"


class Ending(Enum):
    """How a run ended."""

    NONE = ""
    """It goes on, or has died without a word."""
    FINISHED = "finished"
    DRAINED = "drained"
    STOPPED = "stopped"
    CANCELLED = "cancelled"
    """And its checkpoints were removed."""
    FAILED = "failed"
    REPLACED = "replaced"
    """Another run has overwritten its word. Not in files."""


@dataclass(frozen=True, slots=True)
class LockHolder:
    """The process that holds a lock, or the last one that did.

    Attributes:
        owner: who runs the pipeline, for people.
        nonce: differs for every run, also of one process.
        takes_signals: whether SIGTERM stops the pipeline and SIGUSR1 drains it; else they would kill the process.
        takes_asks: whether SIGUSR2 has it look for checkpoints that somebody asks for; else it would kill the process.
        checkpoint: the newest completed checkpoint of the run at its end.
        reason: of a failure.
        takes_savepoints: whether what it is asked for may be a savepoint.
        takes_cancels: whether it may be asked to cancel.
        keeper: the process that starts it again when it died, 0 if there is none.
        claimant: the name under which it claims, exactly; "" in files of older releases, and of what does not claim.
        is_in_doubt: it was cancelled, and nobody can tell whether its checkpoints are given up (C72).
    """

    owner: str
    host: str
    pid: int
    nonce: str
    takes_signals: bool = False
    ending: Ending = Ending.NONE
    checkpoint: int | None = None
    reason: str = ""
    takes_asks: bool = False
    takes_savepoints: bool = False
    takes_cancels: bool = False
    keeper: int = 0
    claimant: str = ""
    is_in_doubt: bool = False


def encode_holder(holder: LockHolder) -> bytes:
    """Return the bytes of ``holder``."""
    body = msgspec.json.encode(holder) + b"\n"
    return b"%s %s\n%s" % (_MAGIC, xxhash.xxh3_64_hexdigest(body).encode(), body)


def decode_holder(data: bytes) -> LockHolder | None:
    """Return what ``data`` says, or None when it is empty, half written or of another format."""
    head, _, body = data.partition(b"\n")
    if head != b"%s %s" % (_MAGIC, xxhash.xxh3_64_hexdigest(body).encode()):
        return None
    try:
        return msgspec.json.decode(body, type=LockHolder)
    except MALFORMED:
        return None
