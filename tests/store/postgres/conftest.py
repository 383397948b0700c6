"""Has the tests of this room use stores on a PostgreSQL server wherever they open one in a directory."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from tests.servers.postgres import PostgresServer, postgres_server
from tests.store.storing import leave_repetitions

from headgate.store import core, location
from headgate.store.store import Store

HEARS_S = 60.0
"""Until a reader hears of news: whoever gives up before asks again and again, which some tests count."""

ESSENTIAL = ("test_server", "test_transactions")
"""What ``make check`` runs of this room; the rest takes minutes."""

REPEATED = {
    "test_groups_there",
    "test_kills_there",
    "test_repeated_there",
    "test_scaling_there",
    "test_schemas_there",
    "test_shared_transactions_there",
    "test_truncation_there",
}
"""Modules that ``make test`` leaves out: what they do is Python around verbs, each of which has its tests here, and is
used by processes that are killed in ``test_server_objects``."""

KEPT = {
    "test_a_silent_reader_loses_its_share_and_is_told_at_each_call",
    "test_a_zombie_changes_nothing_after_its_successor_recovered",
    "test_nothing_is_held_of_closed_segments_whose_events_are_gone",
    "test_of_verdicts_that_race_one_wins",
    "test_readers_that_are_killed_or_stopped_lose_nothing_and_what_they_committed_is_not_read_again",
    "test_what_somebody_let_go_of_is_held_again_when_the_group_moves",
    "test_whoever_uses_the_store_next_aborts_what_nobody_writes",
}
"""Of these, tests that ``make test`` has here, too: locks of the server, its date, and what is held in SQL."""

OF_SQLITE = {
    "test_a_damaged_catalogue_is_named",
    "test_a_root_that_cannot_be_is_refused",
    "test_a_stream_of_many_layouts_is_quick_to_append_to",
    "test_first_openers_at_once_agree",
    "test_locks_that_a_thread_of_the_parent_holds_do_not_stop_the_child",
}
"""Tests about the file, or in the words of SQLite; those about servers have others for the same."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    here = Path(__file__).parent
    items[:] = [item for item in items if item.path.parent != here or item.name not in OF_SQLITE]
    leave_repetitions((item for item in items if item.path.parent == here), REPEATED, KEPT)
    for item in items:
        if item.path.parent == here and not item.path.stem.startswith(ESSENTIAL):
            item.add_marker("long")


@pytest.fixture(scope="session")
def postgres() -> Iterator[PostgresServer]:
    with postgres_server() as server:
        yield server


@pytest.fixture
def url(postgres: PostgresServer, request: pytest.FixtureRequest) -> str:
    """Where a store may be made."""
    return postgres.url(f"own_{abs(hash(request.node.nodeid)) % 10**12}")


def schema_for(path: Path) -> str:
    return f"t_{hashlib.md5(str(path.absolute()).encode()).hexdigest()[:16]}"


@pytest.fixture(autouse=True)
def _stores_are_on_the_server(postgres: PostgresServer, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A store in a directory is a store on the server, of a schema of its own, with its chunks in that directory."""
    real_open, real_exists = Store.open.__func__, Store.exists  # type: ignore[attr-defined]
    monkeypatch.setattr(core, "START_S", HEARS_S)
    with ExitStack() as opened:

        def url_of(root: object) -> str:
            text = location.store_root(root)  # type: ignore[arg-type]
            return text if "://" in text else postgres.url(schema_for(Path(text)))

        def open_there(cls: type[Store], root: object = None, *, storage: Any = None, **_: Any) -> Store:
            text = location.store_root(root)  # type: ignore[arg-type]
            chunks = None if "://" in text else text
            store: Store = real_open(cls, url_of(root), storage=storage, chunks=chunks)
            opened.callback(store.close)
            return store

        monkeypatch.setattr(Store, "open", classmethod(open_there))
        monkeypatch.setattr(Store, "exists", staticmethod(lambda root=None: real_exists(url_of(root))))
        yield
