"""The logs beside streams, without a server."""

from __future__ import annotations

from typing import cast

import pytest

from headgate.connectors.pravega.controller import Controller, StreamName
from headgate.connectors.pravega.security import NO_SECURITY
from headgate.connectors.pravega.side_stream import SideStream
from headgate.environment import SYSTEM_ENVIRONMENT
from headgate.errors import StorageError, UsageError


class HalfCreated:
    """A controller that knows a stream by name, and none of its segments yet, as it does while it creates one."""

    security = NO_SECURITY

    def exists(self, stream: StreamName) -> bool:
        return True

    def head(self, stream: StreamName) -> dict[int, int]:
        raise UsageError(f"Pravega found no such stream: {stream}")


def test_a_log_that_another_process_is_creating_is_looked_at_again() -> None:
    log = SideStream(cast(Controller, HalfCreated()), StreamName("shop", "orders"), "notes", SYSTEM_ENVIRONMENT)
    with pytest.raises(StorageError, match="it is being created or deleted") as caught:
        log.news()
    assert caught.value.is_transient
