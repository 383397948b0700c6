"""Stores on a server are made once, by one of many, and are nobody else's; what is wrong there loses nothing."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import closing, suppress
from pathlib import Path

import psycopg
import pytest
from tests.servers.postgres import PostgresServer, postgres_server
from tests.servers.processes import Port
from tests.store.postgres.conftest import schema_for
from tests.store.storing import KEYED, STREAM, database_of, drained, keyed

from headgate.cli import app as cli
from headgate.environment import SystemClock, cancellable
from headgate.errors import StorageError, UsageError
from headgate.model.failure import ExitCode
from headgate.model.pipeline_identity import PipelineIdentity
from headgate.storage.local import LocalStorage
from headgate.store import location
from headgate.store.addresses import parse_postgres_url
from headgate.store.catalogue import postgresql as databases
from headgate.store.catalogue.postgresql import PostgresCatalogue
from headgate.store.catalogue.tables import CATALOGUE_VERSION
from headgate.store.store import Store
from headgate.store.transactions import owner_directory


def opened(url: str, chunks: Path | None = None) -> Store:
    catalogue, storage, clock = location.open_shared(parse_postgres_url(url).url, chunks)
    return Store(url, catalogue, storage, clock=clock)


def set_version(store: Store, version: int) -> None:
    with database_of(store).write() as connection:
        connection.exec_driver_sql(f"UPDATE meta SET value = '{version}' WHERE key = 'version'")


def test_a_store_is_made_once_and_remembers_where_its_chunks_are(url: str, tmp_path: Path) -> None:
    assert not Store.exists(url)
    with pytest.raises(UsageError, match="say where its chunks are to be"):
        opened(url)
    assert not Store.exists(url)
    with opened(url, tmp_path / "there") as store:
        store.create_stream(STREAM, KEYED)
        with store.writer(STREAM) as writer:
            writer.append(keyed(("a", 1)))
    with opened(url) as again, opened(url, f"{tmp_path}/there/") as same:  # type: ignore[arg-type]
        assert drained(again) == drained(same) == [("a", 1)]
    assert Store.exists(url)
    with pytest.raises(UsageError, match=r"has its chunks at .*/there, not at .*/elsewhere"):
        opened(url, tmp_path / "elsewhere")


def test_two_stores_do_not_share_a_place(url: str, tmp_path: Path) -> None:
    opened(url, tmp_path).close()
    with pytest.raises(UsageError, match="chunks of another store"):
        opened(f"{url}_2", tmp_path)
    with pytest.raises(UsageError, match="chunks of another store"):
        opened(f"{url}_2")
    opened(url).close()
    (tmp_path / location.MARK).write_bytes(b"\xff")
    with pytest.raises(UsageError, match="chunks of another store"):
        opened(url)


def test_of_two_stores_that_take_a_place_at_once_one_is_told(
    url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = LocalStorage.put_if_absent

    def put_behind_another(self: LocalStorage, path: str, parts: list[bytes]) -> None:
        real(self, path, [b"another store"])
        real(self, path, parts)

    monkeypatch.setattr(LocalStorage, "put_if_absent", put_behind_another)
    with pytest.raises(UsageError, match="chunks of another store"):
        opened(url, tmp_path)


def test_a_place_that_replaces_what_is_there_is_refused(
    url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(LocalStorage, "put_if_absent", LocalStorage.put)
    with pytest.raises(UsageError, match="replaces an object"):
        opened(url, tmp_path)


def test_a_place_that_cannot_be_reached_is_named(url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    opened(url, tmp_path).close()

    def fails(*, is_transient: bool) -> None:
        error = StorageError("read", "there", "it is away", is_transient)
        monkeypatch.setattr(location, "open_storage", lambda place: (_ for _ in ()).throw(error))

    fails(is_transient=False)
    with pytest.raises(UsageError, match=r"the chunks of the store at .* cannot be reached: cannot read there"):
        opened(url)
    fails(is_transient=True)
    with pytest.raises(StorageError, match="it is away"):
        opened(url)


def test_a_place_is_marked_although_whoever_made_the_store_died(
    url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(LocalStorage, "put_if_absent", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt()))
        with pytest.raises(KeyboardInterrupt):
            opened(url, tmp_path)
    opened(url).close()
    with pytest.raises(UsageError, match="chunks of another store"):
        opened(f"{url}_2", tmp_path)


PROGRAM = """
import sys
from contextlib import closing
import pyarrow as pa
from headgate.store.store import Store
with Store.open(sys.argv[1], chunks=sys.argv[2]) as store:
    schema = pa.schema([("key", pa.large_string()), ("value", pa.int64())])
    print(store.create_stream("app/events", schema, if_not_exists=True).stream_id)
"""


def test_first_openers_on_a_server_agree(url: str, tmp_path: Path) -> None:
    command = [sys.executable, "-c", PROGRAM, url, str(tmp_path)]
    processes = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(3)]
    assert {process.communicate()[0].strip() for process in processes} == {"1"}
    assert [process.returncode for process in processes] == [0] * 3
    with opened(url) as store:
        assert store.describe(STREAM).schema == KEYED


def test_a_store_on_a_server_of_another_version_is_refused_with_one_sentence(url: str, tmp_path: Path) -> None:
    with opened(url, tmp_path) as store, opened(url) as reader:
        store.create_stream(STREAM, KEYED)
        reader.describe(STREAM)
        set_version(store, CATALOGUE_VERSION + 1)
        for use in (lambda: reader.describe(STREAM), lambda: reader.seal(STREAM)):
            with pytest.raises(UsageError, match=f"has version {CATALOGUE_VERSION + 1} by now.*upgrade Headgate"):
                use()
        with pytest.raises(
            UsageError, match=f"has version {CATALOGUE_VERSION + 1}, this Headgate reads version {CATALOGUE_VERSION}"
        ):
            opened(url)


def test_texts_are_in_the_order_of_their_bytes(url: str, tmp_path: Path) -> None:
    with opened(url, tmp_path) as store:
        for name in ("b", "A", "a", "B", "a-b", "a_b", "ab"):
            store.create_stream(name, KEYED)
        assert [info.name for info in store.list_streams()] == ["A", "B", "a", "a-b", "a_b", "ab", "b"]
        for owner in ("p/one", "p/two"):
            transaction = store.transactions.begin("a", owner=owner, epoch=1, name=owner)
            transaction.write(keyed(("x", 1)))
            transaction.prepare()
        own, _ = (owner_directory(store.find("a").stream_id, owner) for owner in ("p/one", "p/two"))
        assert store._core.catalogue.chunk_paths(own) != set()
        assert [other.sink for other in store.pipelines.owner("p/one", "a", "p/").others] == ["two"]


def test_a_login_that_fails_says_so_in_one_sentence(postgres: PostgresServer, tmp_path: Path) -> None:
    for url, said in (
        (postgres.url(user="nobody_here"), 'role "nobody_here" does not exist'),
        (postgres.url(database="missing"), 'database "missing" does not exist'),
        (postgres.url() + "&sslmode=require", "does not support SSL"),
        (postgres.url() + "&no_such=1", "no_such"),
        (postgres.url(user="locked"), "no password supplied"),
    ):
        with pytest.raises(UsageError, match=said) as caught:
            opened(url, tmp_path)
        assert "\n" not in str(caught.value)


def test_a_wrong_password_is_never_shown(
    postgres: PostgresServer, url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with opened(url, tmp_path) as store, database_of(store).write() as connection:
        connection.exec_driver_sql("DROP ROLE IF EXISTS locked")
        connection.exec_driver_sql("CREATE ROLE locked LOGIN PASSWORD 'the-right-one'")
    monkeypatch.setenv("PGPASSWORD", "the-wrong-one")
    with pytest.raises(UsageError, match="password authentication failed") as caught:
        opened(postgres.url(user="locked"), tmp_path)
    assert "the-wrong-one" not in str(caught.value)
    monkeypatch.setenv("PGPASSWORD", "the-right-one")
    with pytest.raises(UsageError, match="permission denied for database"):
        opened(postgres.url("of_locked", user="locked"), tmp_path / "other")


def test_a_server_that_is_not_there_is_waited_for_and_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(databases, "OPENING_PATIENCE_S", 0.2)
    with (
        closing(Port()) as nobodys,
        pytest.raises(StorageError, match=r"cannot connect to postgresql://u@127\.0\.0\.1:\d+/db.*refused") as caught,
    ):
        opened(f"postgresql://u@127.0.0.1:{nobodys.number}/db", tmp_path)
    assert caught.value.is_transient


def test_what_is_called_off_waits_for_no_database(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(databases, "PATIENCE_S", 3_600.0)
    off = threading.Event()
    off.set()
    with closing(Port()) as nobodys:
        address = parse_postgres_url(f"postgresql://u@127.0.0.1:{nobodys.number}/db")
        database = databases.PostgresDatabase(address)
        database.patience_s = databases.PATIENCE_S
        catalogue = PostgresCatalogue(database)
        with pytest.raises(StorageError, match="refused"):
            cancellable(off, lambda: catalogue.list_streams(""))()


def test_chunks_that_cannot_be_reached_are_named(url: str, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UsageError, match="file"):
        opened(url, tmp_path / "file" / "below")


def test_a_commit_waits_for_the_disk_although_the_database_says_not_to(
    postgres: PostgresServer, url: str, tmp_path: Path
) -> None:
    with opened(url, tmp_path) as store, database_of(store).write() as connection:
        connection.exec_driver_sql("ALTER ROLE postgres SET synchronous_commit TO off")
    try:
        with opened(url) as store, database_of(store).write() as connection:
            assert connection.exec_driver_sql("SHOW synchronous_commit").scalar_one() == "on"
    finally:
        with opened(url) as store, database_of(store).write() as connection:
            connection.exec_driver_sql("ALTER ROLE postgres RESET synchronous_commit")


def test_names_that_the_server_cannot_keep_are_refused(url: str, tmp_path: Path) -> None:
    with opened(url, tmp_path) as store:
        store.create_stream(STREAM, KEYED)
        with pytest.raises(UsageError, match="cannot keep"):
            store.writer(STREAM, writer_id="a\0b")
        assert store.pipelines.owner("x", STREAM).life is None
        assert store._core.catalogue.own("x", PipelineIdentity("a", "/a", "h", 1)).life is not None


def test_a_machine_whose_date_is_wrong_ends_no_lease(url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with opened(url, tmp_path) as store:
        store.create_stream(STREAM, KEYED)
        transaction = store.begin_shared(STREAM, lease="10 minutes")
        day_ms = 86_400_000
        with opened(url) as other:
            for days in (1, 2, 3):
                monkeypatch.setattr(SystemClock, "wall_ms", lambda _, days=days: 1_800_000_000_000 + days * day_ms)
                assert other.expire_transactions(STREAM) == []
        with transaction.writer("a") as writer:
            writer.write(keyed(("a", 1)))
        transaction.commit()
        assert drained(store) == [("a", 1)]


def test_a_schema_may_be_called_as_a_word_of_sql(postgres: PostgresServer, tmp_path: Path) -> None:
    for word in ("user", "default", "select"):
        with opened(postgres.url(word), tmp_path / word) as store, database_of(store).read() as connection:
            asked = "SELECT schemaname FROM pg_tables WHERE tablename = 'meta'"
            assert word in connection.exec_driver_sql(asked).scalars().all()
        opened(postgres.url(word)).close()


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
