"""Has the tests of this room use served stores wherever they open one in a directory."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import pytest
from tests.servers.processes import Port
from tests.servers.proxy import Wire
from tests.store import storing
from tests.store.served.serving import WAIT_S, serving
from tests.store.storing import KEYED, STREAM, leave_repetitions

from headgate.store import core, location
from headgate.store.server.server import ServerOptions, StoreServer
from headgate.store.store import Store

HEARS_S = 60.0
"""Until a reader hears of news: whoever gives up before asks again and again, which some tests count."""

ESSENTIAL = ("test_served", "test_transactions")
"""What ``make check`` runs of this room; the rest takes minutes."""

REPEATED = {
    "test_groups_afar",
    "test_repeated_afar",
    "test_scaling_afar",
    "test_schemas_afar",
    "test_shared_transactions_afar",
    "test_truncation_afar",
}
"""Modules that ``make test`` leaves out: what they do is Python around verbs, each of which is sent in tests here."""

KEPT = {
    "test_a_silent_reader_loses_its_share_and_is_told_at_each_call",
    "test_readers_that_are_killed_or_stopped_lose_nothing_and_what_they_committed_is_not_read_again",
}
"""Of these, tests that ``make test`` has here, too."""

OF_THE_DIRECTORY = {
    "test_a_damaged_catalogue_is_named",
    "test_a_newer_catalogue_is_refused",
    "test_a_root_that_cannot_be_is_refused",
    "test_a_stream_of_many_layouts_is_quick_to_append_to",
    "test_what_the_catalogue_has_lost_at_the_end_of_a_segment_is_an_error",
    "test_locks_that_a_thread_of_the_parent_holds_do_not_stop_the_child",
    "test_what_is_written_while_the_tail_is_asked_for_is_not_overlooked",
}
"""Tests about the directory or the file of the catalogue; those about servers have others for the same."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    here = Path(__file__).parent
    items[:] = [
        item for item in items if item.path.parent != here or item.name.partition("[")[0] not in OF_THE_DIRECTORY
    ]
    leave_repetitions((item for item in items if item.path.parent == here), REPEATED, KEPT)
    for item in items:
        if item.path.parent == here:
            item.add_marker(pytest.mark.filterwarnings("ignore:This process:DeprecationWarning"))
            if not item.path.stem.startswith(ESSENTIAL):
                item.add_marker("long")


@pytest.fixture(autouse=True)
def _stores_are_served(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A store in a directory is one that a server in this process has, from its first opening on."""
    real_open, real_exists = Store.open.__func__, Store.exists  # type: ignore[attr-defined]
    urls: dict[str, str] = {}
    monkeypatch.setattr(core, "START_S", HEARS_S)
    with ExitStack() as opened:

        def url_of(root: object, access: str = "owner") -> str:
            text = location.store_root(root)  # type: ignore[arg-type]
            if "://" in text:
                return text
            if text not in urls:
                own = Store._open_directory(text, None, access)
                opened.callback(own.close)
                server = opened.enter_context(own.serve(ServerOptions("127.0.0.1", 0)))
                urls[text] = server.address.url
                monkeypatch.setitem(storing.SERVED, urls[text], own)
            return urls[text]

        def open_there(cls: type[Store], root: object = None, *, access: str = "owner", **more: Any) -> Store:
            store: Store = real_open(cls, url_of(root, access), **more)
            opened.callback(store.close)
            return store

        def exists_there(root: object = None) -> bool:
            text = location.store_root(root)  # type: ignore[arg-type]
            return bool(real_exists(urls.get(text, text)))

        monkeypatch.setattr(Store, "open", classmethod(open_there))
        monkeypatch.setattr(Store, "exists", staticmethod(exists_there))
        yield


@pytest.fixture
def hearing_s() -> float:
    """A client hears of a change a moment after it was made."""
    return WAIT_S


@pytest.fixture
def server(tmp_path: Path) -> Iterator[StoreServer]:
    """A server of a store with one stream."""
    with serving(tmp_path / "served") as made, Store.open(made.address.url) as store:
        store.create_stream(STREAM, KEYED, segments=1)
        yield made


@pytest.fixture
def port() -> Iterator[int]:
    """A port for one server after the other."""
    with closing(Port()) as held:
        yield held.number


@pytest.fixture
def wire(server: StoreServer) -> Iterator[Wire]:
    """A wire to that server."""
    made = Wire(server.address.port)
    yield made
    made.close()
