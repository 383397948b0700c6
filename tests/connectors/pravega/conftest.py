"""A server for the tests of this room, which all tests of one process of pytest share. They run with the deep ones."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.servers.pravega import PravegaServer, pravega_server


@pytest.hookimpl(tryfirst=True)  # before tests are chosen by their marks
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.parent == Path(__file__).parent and "pravega" in getattr(item, "fixturenames", ()):
            item.add_marker("deep")
            item.add_marker("long")


@pytest.fixture(scope="session")
def pravega() -> Iterator[PravegaServer]:
    with pravega_server() as server:
        yield server
