"""Who has nothing to do asks the server nothing, however often it looks: counted in bytes on the wire."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest
from tests.servers.proxy import Wire
from tests.store.postgres.test_server_losses import append_in_a_child, soon, store, through, wire  # noqa: F401
from tests.store.storing import STREAM, keyed

from headgate.connectors.base import SourceContext
from headgate.connectors.streams.stream_source import StreamSource
from headgate.store.store import Store

pytestmark = pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")

LOOKS = 1_000
QUIET_S = 300.0


def quiet(look: Callable[[], object], wire: Wire, looks: int = LOOKS) -> None:
    """Look until so many looks ask nothing: what is asked in the background may come late on a busy machine."""
    deadline = time.monotonic() + QUIET_S
    before = -1
    while before != wire.asked_bytes:
        assert time.monotonic() < deadline, "somebody asks again and again"
        before = wire.asked_bytes
        for _ in range(looks):
            assert look() is None


def test_an_idle_reader_asks_the_server_nothing(store: Store, through: Store, wire: Wire) -> None:
    reader = through.reader(STREAM, 0)
    quiet(reader.read, wire)
    append_in_a_child(store)
    assert soon(reader) == [1]
    quiet(reader.read, wire)


def test_an_idle_source_asks_the_server_nothing(through: Store, wire: Wire) -> None:
    context = SourceContext("p", "source", 0, 1, None)
    reader = StreamSource(STREAM, through.root).open(context)
    quiet(reader.poll, wire)


def test_an_idle_reader_of_a_group_asks_the_server_nothing_between_its_signs_of_life(
    through: Store, wire: Wire
) -> None:
    group = through.reader_group("g", STREAM)
    with group.join("r", lease="1 hour", commit_every=None) as reader:
        quiet(reader.read, wire)
        quiet(lambda: reader.read(timeout="300ms"), wire, 1)
        with through.writer(STREAM) as writer:
            writer.append(keyed(("a", 1)))
        assert reader.read(timeout="60s") is not None
