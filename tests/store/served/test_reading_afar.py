"""Readers and streams, of a served store."""

import time

import pytest
from tests.store.served.serving import WAIT_S
from tests.store.storing import keyed
from tests.store.test_store_reader import *  # noqa: F403
from tests.store.test_store_reader import ONE, database_of, values
from tests.store.test_store_streams import *  # noqa: F403

from headgate.store.store import Store


def test_the_tail_is_asked_for_only_when_something_changed(ten: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on this machine, but that a client hears of a change a moment after it was made."""
    reader = ten.reader(ONE, 0, 30)
    assert reader.read() is None
    queries: list[int] = []
    real = database_of(ten).read
    monkeypatch.setattr(database_of(ten), "read", lambda: (queries.append(1), real())[1])
    for _ in range(100):
        assert reader.read() is None
    assert queries == []
    with Store.open(ten.root) as other, other.writer(ONE) as writer:
        writer.append(keyed(("k", 30)))
    found, deadline = values(reader), time.monotonic() + WAIT_S
    while not found and time.monotonic() < deadline:
        time.sleep(0.001)
        found = values(reader)
    assert found == [30]
