"""Fixtures of the store's tests."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.store.storing import KEYED, STREAM, Clock

from headgate.store.store import Store


@pytest.fixture
def hearing_s() -> float:
    """So long after a change was made a reader may not have heard of it."""
    return 0.0


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    with Store.open(tmp_path / "store") as opened:
        opened.create_stream(STREAM, KEYED, segments=3, routing_key="key")
        yield opened
