"""What became of a manifest: never FAILED if it may be there, never WRITTEN if it may go (C12, X8, X10, O11)."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from headgate.errors import FencedError, UsageError
from headgate.model.ids import CheckpointId, Generation
from headgate.model.manifest import Manifest
from headgate.runtime.checkpointlog import CheckpointLog, Outcome
from headgate.store.faulty import Fault, FaultKind, FaultyStorage
from headgate.store.local import LocalStorage
from headgate.store.memory import MemoryStorage
from headgate.store.objectstore import ObjectStorage
from headgate.store.storage import Bytes

sys.path.insert(0, str(Path(__file__).parents[1] / "store"))
from powercut import PowerCut  # noqa: E402
