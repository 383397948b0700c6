"""Stores on a server that earlier versions made go on as they were: a dump of each is in ``tests/golden``."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psycopg
import pyarrow as pa
import pytest
from tests.servers.postgres import PostgresServer
from tests.store.postgres.test_server_opening import opened, set_version
from tests.store.storing import KEYED, STREAM, database_of, drained, keyed

from headgate.errors import CorruptionError, FencedError, StorageError
from headgate.model.ids import Generation
from headgate.model.pipeline_identity import Life, Owner
from headgate.protocol.store.transactions import Status
from headgate.store.catalogue import versions
from headgate.store.catalogue.tables import CATALOGUE_VERSION
from headgate.store.store import Store

GOLDEN = Path(__file__).parents[2] / "golden"
OWNER = "pipe/sink"

UNDONE = {
    8: ("DROP TABLE shared_transactions", "DROP TABLE participants"),
    7: ("DROP TABLE reader_groups",),
    6: (
        "DROP TABLE former_schemas",
        "ALTER TABLE streams DROP COLUMN schema_version, DROP COLUMN scaling, DROP COLUMN scaled_ms",
        "ALTER TABLE chunks DROP COLUMN schema_version",
        "ALTER TABLE chunks RENAME COLUMN file TO path",
    ),
}
"""Takes from the tables of the version above what that has added. No release had those of version 8 and less on a
server, but what raises them is what will raise others."""


@pytest.fixture
def old(postgres: PostgresServer, tmp_path: Path) -> str:
    """The store of version 9, as it was left."""
    place = Path(shutil.copytree(GOLDEN / "postgres_9" / "place", tmp_path / "place"))
    dump = (GOLDEN / "postgres_9" / "catalogue.sql").read_text().replace("@PLACE@", str(place))
    with psycopg.connect(postgres.url().partition("?")[0], autocommit=True) as connection:
        connection.execute("DROP SCHEMA IF EXISTS golden_9 CASCADE")
        connection.execute(dump.encode())
    return postgres.url("golden_9")


def name(checkpoint: int, subtask: int, generation: int) -> str:
    return f"{OWNER}/checkpoint-{checkpoint}/subtask-{subtask}/generation-{generation}"


def shape(store: Store) -> list[tuple[Any, ...]]:
    """Columns and indices of every table; names of constraints may be those of former columns."""
    columns = (
        "SELECT table_name, column_name, data_type, is_nullable, column_default, collation_name "
        "FROM information_schema.columns WHERE table_schema = current_schema() ORDER BY 1, 2"
    )
    indices = (
        "SELECT t.relname::text, a.attname::text, k.n::int, i.indisunique, i.indisprimary FROM pg_index i "
        "JOIN pg_class t ON t.oid = i.indrelid JOIN pg_namespace s ON s.oid = t.relnamespace "
        "CROSS JOIN LATERAL unnest(i.indkey) WITH ORDINALITY AS k(at, n) "
        "JOIN pg_attribute a ON a.attrelid = t.oid AND a.attnum = k.at "
        "WHERE s.nspname = current_schema() ORDER BY 1, 2, 3, 4, 5"
    )
    with database_of(store).read() as connection:
        found = [tuple(row) for query in (columns, indices) for row in connection.exec_driver_sql(query)]
        schema = connection.exec_driver_sql("SELECT current_schema()").scalar_one()
    return [tuple(str(x).replace(f"{schema}.", "") for x in row) for row in found]


def version_of(store: Store) -> str:
    with database_of(store).read() as connection:
        return str(connection.exec_driver_sql("SELECT value FROM meta WHERE key = 'version'").scalar_one())


def test_a_store_of_version_9_on_a_server_goes_on(old: str, url: str, tmp_path: Path) -> None:  # DB3, CT3
    with opened(old) as store, opened(url, tmp_path / "new") as new:
        assert version_of(store) == str(CATALOGUE_VERSION)
        assert shape(store) == shape(new)
        assert store.fsck() == []
        before = drained(store)
        assert [row[:2] for row in before] == [("a", 1), ("a", 3), ("a", 4), ("b", 2), ("c", 5), ("d", 6), ("e", 7)]
        assert store.describe("app/done").is_sealed
        assert store.describe(STREAM).schema_version == 1
        assert len(store.layout(STREAM).present) == 3
        assert store.reader_groups() == ["billing"]
        assert "reader group billing" in store.holds(STREAM)
        assert store.owner(OWNER) == Owner(Life("life", "/checkpoints", "host", 1_700_000_000_000), Generation(2))
        statuses = {info.name: info.status for info in store.list_transactions()}
        assert statuses[name(1, 0, 1)] is Status.COMMITTED
        assert statuses[name(2, 0, 1)] is Status.ABORTED
        assert statuses["batch-2"] is Status.PREPARED
        with pytest.raises(CorruptionError, match="aborted"):
            store.commit_transactions([(STREAM, name(2, 0, 1))], owner=OWNER, epoch=2)
        with pytest.raises(FencedError):
            store.begin(STREAM, owner=OWNER, epoch=1)
        store.commit_transactions([(STREAM, "batch-2")], owner="mine", epoch=7)
        with store.writer(STREAM, writer_id="importer", epoch=3) as writer:
            assert writer.next_sequence == 3
            writer.append(pa.record_batch([["a"], [9], [None]], schema=store.describe(STREAM).schema))
        assert len(drained(store)) == len(before) + 2
        assert store.fsck() == []
    with opened(old) as again:
        assert len(drained(again)) == len(before) + 2


@pytest.fixture
def undone(url: str, tmp_path: Path) -> Iterator[Store]:
    with opened(url, tmp_path / "old") as store:
        store.create_stream(STREAM, KEYED)
        with store.writer(STREAM) as writer:
            writer.append(keyed(("a", 1)))
        yield store


def undo(store: Store, version: int) -> None:
    with database_of(store).write() as connection:
        for step in sorted(UNDONE, reverse=True):
            for statement in UNDONE[step] if step >= version else ():
                connection.exec_driver_sql(statement)
    set_version(store, version)


@pytest.mark.parametrize("version", UNDONE)
def test_tables_of_an_older_version_are_raised_to_those_of_a_new_store(
    undone: Store, url: str, version: int
) -> None:  # DB3, CT3
    before = shape(undone)
    undo(undone, version)
    with opened(url) as raised:
        assert shape(raised) == before
        assert drained(raised) == [("a", 1)]
        assert raised.fsck() == []
        with raised.begin_shared(STREAM).writer("a") as writer:
            writer.write(keyed(("b", 2)))


@contextmanager
def full_disk_at_the_last_step() -> Iterator[None]:
    def fail(*_: object) -> None:
        raise StorageError("write", "catalogue", "no space left")

    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(versions._RAISES, CATALOGUE_VERSION - 1, fail)
        yield


def test_raising_on_a_server_that_fails_half_way_changes_nothing_and_is_repeated(
    undone: Store, url: str
) -> None:  # DB3, CT3
    undo(undone, 6)
    with full_disk_at_the_last_step(), pytest.raises(StorageError):
        opened(url)
    with psycopg.connect(url.partition("?")[0]) as connection:
        schema = url.partition("schema=")[2]
        assert connection.execute(f"SELECT value FROM {schema}.meta WHERE key = 'version'".encode()).fetchone() == (
            "6",
        )
        assert connection.execute(f"SELECT path FROM {schema}.chunks".encode()).fetchall()
    with opened(url) as raised:
        assert drained(raised) == [("a", 1)]
