"""Mutants of looking at a store: it changes something, or sees what is not there; a named test fails."""

from __future__ import annotations

import shutil
import sqlite3
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from tests.cli import test_looking as nowhere
from tests.cli import test_main as describing
from tests.cli import test_streams as commands
from tests.mutants.harness import Mutant, assert_caught, patched
from tests.store.catalogue import test_store_looking as lookers

from headgate.cli import checkpoints, sinks
from headgate.store.catalogue import looking, opening, sql
from headgate.store.catalogue.looking import Look
from headgate.store.store import Store

Test = Callable[..., object]
KILLED = lookers.test_what_a_killed_writer_left_in_the_log_is_seen_and_stays_there


def older(tmp_path: Path) -> Path:
    return Path(shutil.copytree(lookers.GOLDEN / "store_2", tmp_path / "older"))


@contextmanager
def looking_raises_the_store() -> Iterator[None]:
    with patched(sql, "open_database", opening.open_to_write):
        yield


@contextmanager
def a_copy_is_never_taken_anew() -> Iterator[None]:
    with patched(Look, "changes", lambda self: 1):
        yield


@contextmanager
def a_copy_is_believed_whoever_came_and_went() -> Iterator[None]:
    with patched(Look, "_state", lambda self: 0):
        yield


@contextmanager
def the_log_of_a_killed_writer_is_not_looked_at() -> Iterator[None]:
    with patched(looking, "_BESIDE", {}):
        yield


@contextmanager
def looking_is_done_as_writers_do() -> Iterator[None]:
    def connect(self: Look, how: str) -> sqlite3.Connection:
        return sqlite3.connect(self._path, isolation_level=None, check_same_thread=False)

    with patched(Look, "_connect", connect):
        yield


@contextmanager
def the_catalogue_is_opened_beside_sqlite() -> Iterator[None]:
    """As to read its header: when that is closed, the locks of the process are gone."""
    real = Look.version

    def version(self: Look) -> int | None:
        with open(self._path, "rb") as file:
            file.read(19)
        return real(self)

    with patched(Look, "version", version):
        yield


@pytest.mark.parametrize(
    ("mutant", "test", "arguments"),
    [
        (looking_raises_the_store, lookers.test_looking_at_an_older_store_changes_no_file, ("list",)),
        (a_copy_is_never_taken_anew, lookers.test_what_an_older_release_writes_meanwhile_is_seen, (True,)),
        (the_log_of_a_killed_writer_is_not_looked_at, KILLED, ()),
        (looking_is_done_as_writers_do, KILLED, ()),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_looking_that_changes_something_or_sees_old_things_is_caught(
    mutant: Mutant, test: Test, arguments: tuple[object, ...], tmp_path: Path
) -> None:  # CT8
    assert_caught(mutant, test, older(tmp_path), *arguments)


def test_commands_that_raise_what_they_only_show_are_caught(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:  # CT8, SC7
    monkeypatch.setenv("HEADGATE_STORE", str(tmp_path / "store"))
    monkeypatch.setenv("COLUMNS", "200")
    test = commands.test_looking_at_a_store_of_an_older_version_changes_no_file
    assert_caught(looking_raises_the_store, test, tmp_path / "store", "store_2")
    test = describing.test_describing_a_pipeline_changes_nothing_in_a_store_of_an_older_version
    (tmp_path / "program").mkdir()
    assert_caught(looking_raises_the_store, test, tmp_path / "program", monkeypatch, "store_2")


def test_a_copy_of_two_moments_is_caught(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:  # CT8
    test = lookers.test_a_copy_is_of_one_moment_although_somebody_comes_and_goes
    assert_caught(a_copy_is_believed_whoever_came_and_went, test, older(tmp_path), monkeypatch)


@pytest.mark.parametrize(
    ("test", "arguments"),
    [
        (lookers.test_opening_a_store_again_leaves_the_locks_of_the_process_alone, ("of this version",)),
        (lookers.test_what_is_acknowledged_is_seen_by_others_although_the_store_was_opened_twice, ()),
    ],
    ids=["locks", "events"],
)
def test_a_catalogue_that_is_opened_beside_sqlite_is_caught(
    test: Test, arguments: tuple[object, ...], tmp_path: Path
) -> None:  # CT9
    assert_caught(the_catalogue_is_opened_beside_sqlite, test, tmp_path, *arguments)


@contextmanager
def a_store_is_made_for_who_looks() -> Iterator[None]:
    with patched(Store, "exists", staticmethod(lambda root=None: True)):
        yield


@contextmanager
def a_directory_is_made_for_who_looks() -> Iterator[None]:
    with patched(checkpoints, "is_missing", lambda url: False), patched(sinks, "is_missing", lambda url: False):
        yield


@pytest.mark.parametrize(
    ("mutant", "command"),
    [
        (a_store_is_made_for_who_looks, "streams list"),
        (a_store_is_made_for_who_looks, "streams check"),
        (a_directory_is_made_for_who_looks, "checkpoints list"),
        (a_directory_is_made_for_who_looks, "checkpoints show p"),
        (a_directory_is_made_for_who_looks, "sinks list out"),
        (a_directory_is_made_for_who_looks, "sinks forget p/out out -y"),
    ],
)
def test_whoever_looks_and_makes_something_is_caught(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mutant: Mutant, command: str
) -> None:  # CT13
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("HEADGATE_STORE", raising=False)
    assert_caught(mutant, nowhere.test_looking_at_what_is_not_there_makes_nothing, tmp_path, command)
