"""Reading what was written: one read whose bytes do not fit is not damage yet (R50 of docs/spec/recovery.md)."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import TypeVar

from headgate.errors import CorruptionError
from headgate.storage.base import NotFound

READS_MAX = 3
"""So often are bytes read that do not fit, before that is believed."""

_T = TypeVar("_T")


def read_again(read: Callable[[], _T]) -> _T:
    """Return what ``read`` returns; repeat it a few times while it says that the bytes are damaged or missing."""
    for _ in range(READS_MAX - 1):
        with contextlib.suppress(CorruptionError, NotFound):
            return read()
    return read()
