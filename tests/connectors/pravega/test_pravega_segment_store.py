"""Appends over connections that break: what is written is there once, in order."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import pyarrow as pa
import pytest
from tests.servers.pravega import PravegaServer, access
from tests.servers.proxy import Wire

from headgate.connectors.pravega.controller import StreamName, TransactionState
from headgate.connectors.pravega.events import frame, unframe
from headgate.connectors.pravega.segment_store import Appender, Command, Connection, SegmentError, read, segment_info

pytestmark = pytest.mark.xdist_group("pravega")
"""They share a server."""


@contextlib.contextmanager
def wire_to(server: PravegaServer, stream: StreamName) -> Iterator[Wire]:
    wire = Wire(server.client.place(stream, 0)[1])
    try:
        yield wire
    finally:
        wire.close()


def block(values: list[bytes]) -> tuple[memoryview, int]:
    data, ends = frame(pa.array(values, pa.large_binary()))
    return memoryview(data)[: ends[-1]], len(values)


@pytest.mark.parametrize("is_carried_out", [False, True])
def test_what_was_sent_over_a_connection_that_broke_is_there_once(pravega: PravegaServer, is_carried_out: bool) -> None:
    """PV7."""
    stream = StreamName.parse(pravega.create_stream(1))
    opened = pravega.client.open_transaction(stream, 60_000)
    segment = stream.transaction_segment(0, opened.id)
    with wire_to(pravega, stream) as wire:
        appender = Appender(("127.0.0.1", wire.port), access(pravega, stream))
        writing = appender.begin(segment)
        for number in range(100):
            if number in (20, 60):
                wire.lose_answer(b"event %d," % number, is_given=is_carried_out)
            if number == 80:
                wire.cut()
            appender.append(writing, *block([b"event %d," % number, b"more %d" % number]))
        appender.flush(writing)
        assert wire.lost_count == 2
        appender.close()
    connection = Connection(pravega.client.place(stream, 0), access(pravega, stream))
    info = segment_info(connection, segment)
    found, _ = unframe(read(connection, segment, 0, info.end), "here")
    assert found.to_pylist() == [part % number for number in range(100) for part in (b"event %d,", b"more %d")]
    connection.close()


def test_appends_to_a_transaction_that_is_gone_are_refused(pravega: PravegaServer) -> None:
    stream = StreamName.parse(pravega.create_stream(1))
    opened = pravega.client.open_transaction(stream, 60_000)
    pravega.client.abort(stream, opened.id)
    while pravega.client.state(stream, opened.id) is not TransactionState.ABORTED:
        continue
    appender = Appender(pravega.client.place(stream, 0), access(pravega, stream))
    with pytest.raises(SegmentError) as found:
        appender.begin(stream.transaction_segment(0, opened.id))
    assert found.value.kind is Command.NO_SUCH_SEGMENT
    appender.close()
