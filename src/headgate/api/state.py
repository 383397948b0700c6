"""Where a pipeline keeps its keyed state, ``Pipeline(state=...)``, or one of its operators."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import TypeAlias

from headgate.api.option_checks import instance
from headgate.errors import UsageError
from headgate.model import config as model
from headgate.model.config import size_bytes
from headgate.storage.backends import absolute_location

MEMORY_MIN = 16 << 20
"""With less, RocksDB would only write and read its own files."""


@dataclass(frozen=True, slots=True)
class Memory:
    """Keeps keyed state in the memory of the workers. The default, and the fastest as long as the state fits."""

    def to_config(self) -> model.StateConfig:
        """Return it as plain data."""
        return model.MemoryState()


@dataclass(frozen=True, slots=True)
class RocksDB:
    """Keeps keyed state in RocksDB on the workers' local disks, and recently used state in memory.

    Needs the package rocksdict: ``pip install 'headgate[rocksdb]'``.

    Attributes:
        memory: how much memory the state of one worker may use, in all operators together.
        dir: a directory on a local disk of each worker's machine, as an absolute path. The default is the directory of
            Spark's own temporary files. Only this user can read its content, and none of it has to be kept.
    """

    memory: str | int = "512MB"
    dir: str | None = None

    def to_config(self) -> model.StateConfig:
        """Return it in bytes.

        Raises:
            UsageError: a value is wrong, or the package is not installed.
        """
        from headgate.state.choice import refuse_missing_library

        refuse_missing_library()
        memory_bytes = size_bytes(self.memory, "memory of RocksDB")
        if memory_bytes < MEMORY_MIN:
            raise UsageError(f"memory of RocksDB must be at least '16MB', but is {self.memory!r}")
        if self.dir is not None and not (isinstance(self.dir, str) and os.path.isabs(self.dir)):
            raise UsageError(
                f"dir of RocksDB must be the absolute path of a directory on each worker's machine, not {self.dir!r}"
            )
        return model.RocksState(memory_bytes, None if self.dir is None else absolute_location(self.dir))


StateChoice: TypeAlias = Memory | RocksDB


def state_config(state: StateChoice) -> model.StateConfig:
    """Return what users say of state as plain data.

    Raises:
        UsageError: it is none, a value is wrong, or a package is not installed.
    """
    found: StateChoice = instance(state, (Memory, RocksDB), "state")
    return found.to_config()


def pipeline_state(state: StateChoice | None, backend: str) -> model.StateConfig:
    """Return what users say of the state of a pipeline; ``backend`` is how they said it before there was a choice.

    Raises:
        UsageError: see ``state_config``, or there is no such backend.
    """
    if backend != "memory":
        raise UsageError(
            f"state_backend={backend!r} is not known: give state=headgate.Memory() or "
            "state=headgate.RocksDB(memory='2GB')"
        )
    return state_config(state or Memory())


def operator_state(state: StateChoice | None) -> model.StateConfig | None:
    """Return what users say of the state of one operator; None: it is where the pipeline has its state.

    Raises:
        UsageError: see ``state_config``.
    """
    return None if state is None else state_config(state)
