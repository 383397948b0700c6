"""Pipelines between streams of a served store: each event once, although answers are lost and the wire is cut."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.servers.proxy import Wire
from tests.store.storing import KEYED, drained, keyed

import headgate as hg
from headgate import testing
from headgate.connectors.base import Source
from headgate.store.served import client as clients
from headgate.store.serving.server import StoreServer
from headgate.store.store import Store

WAIT_S = 240.0
COUNT = 200


@pytest.fixture
def filled(server: StoreServer) -> Iterator[Store]:
    """A store with something in it, over a wire of its own."""
    with Store.open(server.address.url) as store:
        store.create_stream("in", KEYED, segments=2, routing_key="key")
        store.create_stream("out", KEYED, segments=2, routing_key="key")
        yield store


@pytest.mark.parametrize("kind", ["stream", "group"])
def test_a_pipeline_copies_each_event_once_whatever_is_lost_on_the_way(
    filled: Store, wire: Wire, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:  # SS9, SS10
    monkeypatch.setattr(clients, "PAUSES_S", (0.001, 0.02))
    url = f"headgate://127.0.0.1:{wire.port}"
    pipeline = hg.Pipeline(
        "copies", parallelism=2, checkpointing=hg.Checkpointing(interval="20ms", dir=tmp_path / "checkpoints")
    )
    source: Source = (
        hg.StreamSource("in", store=url) if kind == "stream" else hg.GroupSource("in", "readers", store=url)
    )
    pipeline.source(source, name="source").sink(hg.StreamSink("out", store=url, routing_key="key"), name="out")
    is_over = threading.Event()
    lost = [b"/catalogue/prepare ", b"/catalogue/commit ", b"PUT /chunk/", b"/parts "]
    lost += [b"/catalogue/change_group "] if kind == "group" else []

    def disturb() -> None:
        turn = 0
        while not is_over.wait(0.02):  # a pause, not a wait for anything
            wire.lose_answer(lost[wire.lost_count % len(lost)])  # the next one once this one is lost
            turn += 1
            if turn % 4 == 0:
                wire.cut()

    def write() -> None:
        with filled.writer("in", writer_id="w", linger=None) as writer:
            for number in range(COUNT):
                writer.append(keyed((f"k{number % 7}", number)))
                if number % 10 == 9:
                    writer.flush()
                    time.sleep(0.01)  # a pause, not a wait for anything
        filled.seal("in")

    threads = [threading.Thread(target=work) for work in (disturb, write)]
    for thread in threads:
        thread.start()
    try:
        result = testing.run(pipeline, timeout_s=WAIT_S)
    finally:
        is_over.set()
        for thread in threads:
            thread.join(WAIT_S)
    assert result is not None
    assert wire.lost_count > 0
    assert drained(filled, "out") == drained(filled, "in")
    assert len(drained(filled, "out")) == COUNT
    assert [problem for problem in filled.fsck() if not problem.is_harmless] == []
