"""What is wrong on a server is said in one sentence, and nothing is lost by it: rights, silence, a full disk."""

from __future__ import annotations

import os
import shutil
import socket
import tempfile
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import psycopg
import pytest
from tests.servers.postgres import PostgresServer, postgres_server
from tests.store.postgres.conftest import schema_for
from tests.store.postgres.test_postgresql import opened
from tests.store.storing import KEYED, STREAM, database_of, drained, keyed

from headgate.cli import app as cli
from headgate.errors import StorageError
from headgate.model.failure import ExitCode
from headgate.store.catalogue import postgresql as databases
from headgate.store.store import Store


@pytest.fixture
def store(postgres: PostgresServer, tmp_path: Path) -> Iterator[Store]:
    with opened(postgres.url(schema_for(tmp_path)), tmp_path / "chunks") as made:
        made.create_stream(STREAM, KEYED, segments=1)
        with made.writer(STREAM, linger=None) as writer:
            writer.append(keyed(("a", 0)))
        yield made


def let_read(store: Store, schema: str, user: str) -> None:
    with database_of(store).write() as connection:
        if not connection.exec_driver_sql(f"SELECT 1 FROM pg_roles WHERE rolname = '{user}'").scalar():
            connection.exec_driver_sql(f"CREATE ROLE {user} LOGIN")
        connection.exec_driver_sql(f"GRANT USAGE ON SCHEMA {schema} TO {user}")
        connection.exec_driver_sql(f"GRANT SELECT ON ALL TABLES IN SCHEMA {schema} TO {user}")


def test_who_may_only_read_reads_and_is_told_what_is_missing(
    store: Store, postgres: PostgresServer, tmp_path: Path
) -> None:
    schema = schema_for(tmp_path)
    let_read(store, schema, "onlooker")
    url = postgres.url(schema, user="onlooker")
    with opened(url) as own:
        reader = own.reader(STREAM, 0)
        assert reader.read() is not None
        assert own.fsck() == []
        for change in (
            lambda: own.seal(STREAM),
            lambda: own.create_stream("other", KEYED),
            lambda: own.writer(STREAM, writer_id="w"),
            lambda: own.reader_group("g", STREAM),
            lambda: own.transactions.begin(STREAM, owner="p", epoch=1, name="t").prepare(),
        ):
            with pytest.raises(StorageError, match=r"permission denied for table \w+; ask the owner") as caught:
                change()
            assert "\n" not in str(caught.value)
            assert not caught.value.is_transient
        with store.writer(STREAM) as writer:
            writer.append(keyed(("a", 1)))
    assert drained(store) == [("a", 0), ("a", 1)]


def test_a_server_that_says_nothing_is_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It takes the connection and never answers, as one whose machine hangs. The client library waits 2 s at least."""
    monkeypatch.setattr(databases, "OPENING_PATIENCE_S", 0.2)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"postgresql://u@127.0.0.1:{silent.getsockname()[1]}/db?connect_timeout=2"
        with pytest.raises(StorageError, match=r"cannot connect to .*timeout") as caught:
            opened(url, tmp_path)
    assert caught.value.is_transient
    assert "\n" not in str(caught.value)


def test_the_command_line_says_what_is_wrong_with_a_server_in_one_sentence(
    postgres: PostgresServer, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    url = postgres.url(user="nobody_here")
    monkeypatch.setattr("sys.argv", ["headgate", "streams", "list", "--store", url])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    assert ended.value.code == ExitCode.USAGE
    (sentence,) = (line for line in capsys.readouterr().err.splitlines() if line.startswith("Error: "))
    assert 'role "nobody_here" does not exist' in sentence


SMALL_DISK = "8m"


@pytest.fixture(scope="module")
def small() -> Iterator[tuple[PostgresServer, Path]]:
    """A server with a directory on a disk that is soon full; only that server sees the disk."""
    if os.geteuid() != 0 or shutil.which("unshare") is None or shutil.which("setpriv") is None:
        pytest.skip("a small disk needs root, and 'unshare' and 'setpriv' of util-linux")
    directory = Path(tempfile.mkdtemp(prefix="headgate-small-"))
    try:
        directory.chmod(0o755)
        with postgres_server(small_disk=(directory, SMALL_DISK)) as server:
            yield server, directory
    finally:
        shutil.rmtree(directory, ignore_errors=True)


def test_a_full_disk_of_the_server_is_named_and_waited_for(small: tuple[PostgresServer, Path], tmp_path: Path) -> None:
    server, directory = small
    with opened(server.url("filling"), tmp_path) as store:
        store.create_stream(STREAM, KEYED, segments=1)
        on_the_small_disk(server, directory)
        acknowledged, failed = 0, None
        with store.writer(STREAM, writer_id="w", linger=None) as writer:
            while failed is None:
                done = writer.append(keyed(("a", acknowledged)))
                try:
                    writer.flush()
                except StorageError as error:
                    failed = error
                else:
                    assert done.done()
                    acknowledged += 1
            assert "No space left on device" in str(failed)
            assert "\n" not in str(failed)
            assert failed.is_transient
            assert drained(store) == [("a", number) for number in range(acknowledged)]
            with database_of(store).write() as connection:
                connection.exec_driver_sql("DROP TABLE filler")
            writer.flush()
            assert done.done()
        assert drained(store) == [("a", number) for number in range(acknowledged + 1)]
        assert store.fsck() == []


def on_the_small_disk(server: PostgresServer, directory: Path) -> None:
    """Move what appends write to the small disk, and leave them a few pages of it."""
    with psycopg.connect(server.url().partition("?")[0], autocommit=True) as connection:
        connection.execute(f"CREATE TABLESPACE small LOCATION '{directory}'")
        for table in ("chunks", "parts"):
            connection.execute(f"ALTER TABLE filling.{table} SET TABLESPACE small")
        connection.execute("CREATE TABLE filling.filler (line text) TABLESPACE small")
        for rows in (1_000, 10, 1):
            with suppress(psycopg.errors.DiskFull):
                while True:
                    connection.execute(
                        f"INSERT INTO filling.filler SELECT repeat('x', 1000) FROM generate_series(1, {rows})"
                    )
