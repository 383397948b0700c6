"""Readers of a served store hear of news, and ask nobody before."""

from __future__ import annotations

import time

import pytest
from tests.servers.proxy import Wire
from tests.store.served.serving import WAIT_S, over
from tests.store.storing import STREAM, keyed

from headgate.store.client import remote_store
from headgate.store.reader import SegmentReader
from headgate.store.server.server import StoreServer
from headgate.store.store import Store


def soon(reader: SegmentReader) -> list[int]:
    deadline_s = time.monotonic() + WAIT_S
    while time.monotonic() < deadline_s:
        batch = reader.read()
        if batch is not None:
            found: list[int] = batch.column(1).to_pylist()
            return found
        time.sleep(0.001)
    return []


def test_a_reader_hears_of_news_from_afar(server: StoreServer) -> None:
    with Store.open(server.address.url) as store, Store.open(server.address.url) as other:
        reader = store.reader(STREAM, 0)
        assert reader.read() is None
        before = server.counts.requests
        for _ in range(100):
            assert reader.read() is None
        assert server.counts.requests <= before + 1
        with other.writer(STREAM) as writer:
            writer.append(keyed(("a", 1)))
        assert soon(reader) == [1]


def test_what_a_process_has_changed_its_readers_see_at_once(server: StoreServer) -> None:
    with Store.open(server.address.url) as store, store.writer(STREAM, linger=None) as writer:
        reader = store.reader(STREAM, 0)
        for number in range(10):
            assert reader.read() is None
            writer.append(keyed(("a", number)))
            writer.flush()
            batch = reader.read()
            assert batch is not None
            assert batch.column(1).to_pylist() == [number]


def test_a_reader_that_hears_nothing_looks_for_itself(
    server: StoreServer, wire: Wire, monkeypatch: pytest.MonkeyPatch
) -> None:
    with over(wire) as store, Store.open(server.address.url) as other:
        reader = store.reader(STREAM, 0)
        assert reader.read() is None
        client = store._core.catalogue._client  # type: ignore[attr-defined]
        monkeypatch.setattr(remote_store.ServerChangeListener, "_hear", lambda self, connection: connection.close())
        wire.cut()
        for _ in range(20):  # whoever would take the last that it heard for the present has done so by then
            assert reader.read() is None
            time.sleep(0.01)  # a pause, not a wait for anything
        with other.writer(STREAM) as writer:
            writer.append(keyed(("a", 1)))
        assert soon(reader) == [1]
        assert client.facts().store


def test_what_comes_while_a_reader_asks_is_not_overlooked(server: StoreServer, monkeypatch: pytest.MonkeyPatch) -> None:
    carrying = server._answers._carrying
    signature, parts = carrying._verbs["catalogue", "parts"]
    with Store.open(server.address.url) as store, Store.open(server.address.url) as other:
        reader = store.reader(STREAM, 0)
        assert reader.read() is None  # and now it hears
        waits = [1]

        def write_behind(**arguments: object) -> object:
            found = parts(**arguments)
            if waits:
                waits.clear()
                with other.writer(STREAM) as writer:
                    writer.append(keyed(("a", 1)))
            return found

        monkeypatch.setitem(carrying._verbs, ("catalogue", "parts"), (signature, write_behind))
        store._core.catalogue._change_listener.changed_here()  # type: ignore[attr-defined]
        assert reader.read() is None
        assert soon(reader) == [1]


def test_who_closes_a_store_waits_for_nobody(server: StoreServer) -> None:
    store = Store.open(server.address.url)
    store.changes()
    store.close()
    assert store.changes() > 0, "and another question begins anew"
    store.close()
