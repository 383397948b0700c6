"""Mutants of stores that machines share: each breaks one promise about the server, and a named test fails."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa
from tests.mutants.harness import Mutant, assert_caught, patched
from tests.servers.postgres import PostgresServer
from tests.servers.proxy import Wire
from tests.store.postgres import test_server_idle as idle
from tests.store.postgres import test_server_losses as losses
from tests.store.postgres import test_server_migration as migration
from tests.store.postgres import test_server_opening as openings
from tests.store.postgres.conftest import _stores_are_on_the_server, postgres, url  # noqa: F401
from tests.store.postgres.test_server_losses import store, through, wire  # noqa: F401
from tests.store.postgres.test_server_migration import undone  # noqa: F401

from headgate.store import shared
from headgate.store.catalogue.postgres import database, opening, tables
from headgate.store.catalogue.postgres.database import PostgresDatabase
from headgate.store.catalogue.postgres.watch import Watch
from headgate.store.store import Store

pytestmark = pytest.mark.filterwarnings(
    "ignore:This process:DeprecationWarning", "ignore::pytest.PytestUnhandledThreadExceptionWarning"
)


@contextmanager
def who_changes_locks_nothing() -> Iterator[None]:
    """DB4."""
    real = database._write
    with patched(database, "_write", lambda channel: real(channel).removesuffix(" FOR UPDATE")):
        yield


@contextmanager
def who_stops_is_waited_for() -> Iterator[None]:
    """DB7."""
    begin = "BEGIN ISOLATION LEVEL READ COMMITTED READ WRITE"
    with patched(database, "_begin_change", lambda: begin), patched(database, "BUSY_TIMEOUT_S", 2.0):
        yield


@contextmanager
def a_commit_that_was_not_answered_is_not_waited_for() -> Iterator[None]:
    """DB8, as it was before a test found it."""
    with patched(PostgresDatabase, "_settle", lambda self: None), patched(losses, "SLOW_S", 5.0):
        yield


@contextmanager
def a_commit_that_was_not_answered_is_carried_out_again() -> Iterator[None]:
    """DB8."""
    real = database.failure
    with patched(database, "failure", lambda error, operation, url, is_decided=True: real(error, operation, url)):
        yield


@contextmanager
def who_cannot_hear_says_that_nothing_changed() -> Iterator[None]:
    """DB9."""
    real = Watch.changes

    def changes(self: Watch) -> int:
        return real(self) if self._hears or self._thread is None else 0

    with patched(Watch, "changes", changes), patched(losses, "SOON_S", 3.0):
        yield


@contextmanager
def own_changes_are_told_by_the_server_only() -> Iterator[None]:
    """DB9. It takes its time: it might be as quick as the process itself."""
    real = Watch.changed

    def changed(self: Watch) -> None:
        time.sleep(0.3)  # slow work: not a wait for anything
        real(self)

    with patched(database, "changed_here", lambda url: None), patched(Watch, "changed", changed):
        yield


@contextmanager
def texts_are_in_the_order_of_the_database() -> Iterator[None]:
    """DB3."""
    tables.tables.cache_clear()
    with patched(tables, "_TEXT", sa.Text()):
        yield
    tables.tables.cache_clear()


@contextmanager
def nobody_looks_at_the_version() -> Iterator[None]:
    """DB3."""
    with patched(PostgresDatabase, "_check_version", lambda self, connection: None):
        yield


@contextmanager
def places_are_not_marked() -> Iterator[None]:
    """DB2."""
    with patched(shared, "_claim", lambda storage, store_id, root: None):
        yield


@contextmanager
def the_database_decides_about_the_disk() -> Iterator[None]:
    """DB5."""
    real = database._session
    with patched(database, "_session", lambda schema: real(schema).rpartition("SELECT")[0]):
        yield


@contextmanager
def readers_ask_again_and_again() -> Iterator[None]:
    """DB9."""
    real = Watch.changes

    def changes(self: Watch) -> int:
        self.changed()
        return real(self)

    with patched(Watch, "changes", changes), patched(idle, "QUIET_S", 1.0):
        yield


@contextmanager
def texts_of_raised_tables_are_in_the_order_of_the_database() -> Iterator[None]:
    """DB3."""
    with patched(opening, "compare_texts_as_bytes", lambda connection: None):
        yield


@contextmanager
def schemas_are_not_quoted() -> Iterator[None]:
    """DB1, as it was before a test found it: tables of ``schema=default`` were in ``public``."""
    real = database._session
    with patched(database, "_session", lambda schema: real(schema).replace('"', "")):
        yield


BY_OPENING: dict[Mutant, Any] = {
    texts_are_in_the_order_of_the_database: openings.test_texts_are_in_the_order_of_their_bytes,
    nobody_looks_at_the_version: openings.test_a_store_that_a_newer_release_raised_is_refused_with_one_sentence,
    places_are_not_marked: openings.test_two_stores_do_not_share_a_place,
}
asking = losses.test_who_asks_for_what_is_still_being_committed_waits_for_it
appending = losses.test_an_append_whose_commit_was_not_answered_is_there_once
BY_CUTTING: dict[Mutant, Any] = {
    a_commit_that_was_not_answered_is_not_waited_for: asking,
    a_commit_that_was_not_answered_is_carried_out_again: appending,
}


@pytest.mark.parametrize("mutant", BY_OPENING, ids=lambda mutant: mutant.__name__)
def test_what_is_wrong_with_opening_is_caught(mutant: Mutant, url: str, tmp_path: Path) -> None:
    assert_caught(mutant, BY_OPENING[mutant], url, tmp_path)


@pytest.mark.parametrize("mutant", BY_CUTTING, ids=lambda mutant: mutant.__name__)
def test_what_is_wrong_with_lost_answers_is_caught(mutant: Mutant, through: Store, wire: Wire) -> None:
    assert_caught(mutant, BY_CUTTING[mutant], through, wire)


def test_a_missing_lock_is_caught(store: Store) -> None:
    assert_caught(who_changes_locks_nothing, losses.test_threads_that_append_at_once_get_positions_of_their_own, store)


def test_who_keeps_the_lock_is_caught(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    test = losses.test_who_stops_in_the_middle_does_not_stop_the_others
    assert_caught(who_stops_is_waited_for, test, store, monkeypatch)


def test_deaf_readers_are_caught(
    store: Store,
    postgres: PostgresServer,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    test = losses.test_a_reader_that_cannot_hear_looks_for_itself
    assert_caught(who_cannot_hear_says_that_nothing_changed, test, store, postgres, monkeypatch)


def test_readers_that_miss_their_own_process_are_caught(store: Store) -> None:
    test = losses.test_what_this_process_has_changed_its_readers_see_at_once
    assert_caught(own_changes_are_told_by_the_server_only, test, store)


def test_commits_that_do_not_wait_are_caught(postgres: PostgresServer, url: str, tmp_path: Path) -> None:
    test = openings.test_a_commit_waits_for_the_disk_although_the_database_says_not_to
    assert_caught(the_database_decides_about_the_disk, test, postgres, url, tmp_path)


def test_hot_readers_are_caught(store: Store, through: Store, wire: Wire) -> None:
    assert_caught(readers_ask_again_and_again, idle.test_an_idle_reader_asks_the_server_nothing, store, through, wire)


def test_tables_that_are_raised_otherwise_are_caught(undone: Store, url: str) -> None:
    test = migration.test_tables_of_an_older_version_are_raised_to_those_of_a_new_store
    assert_caught(texts_of_raised_tables_are_in_the_order_of_the_database, test, undone, url, 6)


def test_schemas_in_the_wrong_words_are_caught(postgres: PostgresServer, tmp_path: Path) -> None:
    test = openings.test_a_schema_may_be_called_as_a_word_of_sql
    assert_caught(schemas_are_not_quoted, test, postgres, tmp_path)
