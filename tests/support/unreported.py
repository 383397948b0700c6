"""Runs of very many operators: reports of them, twice a second, would take as long as what they do."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from headgate.runtime.driver import driver
from headgate.runtime.worker import worker

NEVER_MS = 3_600_000


@contextmanager
def seldom_reported() -> Iterator[None]:
    """Have workers of this process report at the beginning and at the end."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(worker, "METRICS_PERIOD_MS", NEVER_MS)
        patch.setattr(driver, "PROGRESS_PERIOD_MS", NEVER_MS)
        yield
