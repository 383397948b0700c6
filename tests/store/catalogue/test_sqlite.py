"""The catalogue in SQLite: commits are synced, opening waits for nobody for ever, and any damage is named."""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import os
import platform
import random
import shutil
import sqlite3
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import SimpleNamespace

import pyarrow as pa
import pytest
from tests.store.catalogue.damaging import Damage, Damaged, columns, damages
from tests.store.catalogue.test_sql import READS, WRITES, fill
from tests.store.storing import KEYED, STREAM, database_of, drained, in_a_child, keyed

from headgate.connectors.base import HoldContext
from headgate.connectors.streams import StreamSink, StreamSource
from headgate.errors import CorruptionError, HeadgateError, ProtocolViolation, StorageError, UsageError
from headgate.model.ids import Generation
from headgate.store.catalogue import integrity, sql
from headgate.store.catalogue.sql import CatalogueFile, SqlCatalogue
from headgate.store.catalogue.sqlite import Database
from headgate.store.catalogue.tables import metadata
from headgate.store.client.messages import CATALOGUE_SIGNATURES, decode, encode
from headgate.store.store import Store
from headgate.store.streams import StreamDefinition, StreamInfo

SYNCS = {"x86_64": (74, 75), "aarch64": (82, 83)}
"""Numbers of the system calls fsync and fdatasync."""


def levels(database: Database) -> set[int]:
    """PRAGMA synchronous of several connections at once; 2 is FULL."""
    with ExitStack() as stack:
        found = [stack.enter_context(database.read()) for _ in range(6)]
        found.append(stack.enter_context(database.write()))
        return {connection.exec_driver_sql("PRAGMA synchronous").scalar_one() for connection in found}


@pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")
def test_every_connection_syncs_every_commit(tmp_path: Path) -> None:
    with Store.open(tmp_path / "store") as store:

        def check() -> None:
            assert levels(database_of(store)) == {2}

        check()
        in_a_child(check)
    with Store.open(tmp_path / "store") as again:
        assert levels(database_of(again)) == {2}


@pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")
def test_a_child_has_connections_of_its_own(tmp_path: Path) -> None:
    def marks(database: Database, *, writes: bool = False) -> int:
        with database.write() if writes else database.read() as connection:
            return int(connection.exec_driver_sql("SELECT count(*) FROM sqlite_temp_master").scalar_one())

    with Store.open(tmp_path / "store") as store:
        with database_of(store).write() as connection:
            connection.exec_driver_sql("CREATE TEMP TABLE mark (number)")
        assert marks(database_of(store)) == 1

        def check(writes: bool) -> None:
            assert marks(database_of(store), writes=writes) == 0
            assert store.changes() == store.changes(), "and they are made once"

        for writes in (False, True):
            in_a_child(lambda writes=writes: check(writes))  # type: ignore[misc]


def test_who_writes_is_alone_from_the_beginning(tmp_path: Path) -> None:
    """Else one that has read something first could not go on behind another writer."""
    with Store.open(tmp_path / "store") as store:
        other = sqlite3.connect(tmp_path / "store" / "catalogue.sqlite", timeout=0, isolation_level=None)
        with contextlib.closing(other):
            with database_of(store).write(), pytest.raises(sqlite3.OperationalError, match="locked"):
                other.execute("BEGIN IMMEDIATE")
            with database_of(store).read():
                other.execute("BEGIN IMMEDIATE")


def test_every_thread_may_ask_for_changes(tmp_path: Path) -> None:
    with Store.open(tmp_path / "store") as store, ThreadPoolExecutor(1) as pool:
        assert pool.submit(store.changes).result() == store.changes()


def break_syncs() -> None:
    """Have the kernel fail every fsync and fdatasync of this thread with an I/O error, from now on."""

    def instruction(code: int, if_so: int, if_not: int, value: int) -> bytes:
        return struct.pack("HBBI", code, if_so, if_not, value)

    fsync, fdatasync = SYNCS[platform.machine()]
    program = b"".join(
        [
            instruction(0x20, 0, 0, 0),  # load the number of the system call
            instruction(0x15, 1, 0, fsync),
            instruction(0x15, 0, 1, fdatasync),
            instruction(0x06, 0, 0, 0x00050000 | 5),  # errno EIO
            instruction(0x06, 0, 0, 0x7FFF0000),  # allow
        ]
    )
    buffer = ctypes.create_string_buffer(program, len(program))
    header = struct.pack("HxxxxxxP", len(program) // 8, ctypes.addressof(buffer))
    libc = ctypes.CDLL(None, use_errno=True)
    assert libc.prctl(38, 1, 0, 0, 0) == 0  # no new privileges
    assert libc.prctl(22, 2, ctypes.create_string_buffer(header, len(header)), 0, 0) == 0  # filter system calls
    with pytest.raises(OSError, match="Input/output error"), open(os.devnull) as file:
        os.fsync(file.fileno())


@pytest.mark.skipif(platform.machine() not in SYNCS, reason="numbers of system calls are known for two machines")
@pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")
def test_a_commit_that_cannot_be_synced_is_not_acknowledged(tmp_path: Path) -> None:
    with Store.open(tmp_path / "store") as store:
        store.create_stream(STREAM, KEYED, segments=1)
        transaction = store.transactions.begin(STREAM, owner="p", epoch=1, name="t")
        transaction.write(keyed(("a", 1)))
        transaction.prepare()

        def commit_without_syncs() -> None:
            break_syncs()
            with pytest.raises(StorageError, match=r"cannot write .*disk I/O error"):
                store.commit_transactions([(STREAM, "t")], owner="p", epoch=1)

        in_a_child(commit_without_syncs)
        store.commit_transactions([(STREAM, "t")], owner="p", epoch=1)
        assert drained(store) == [("a", 1)]
        assert store.fsck() == []


@pytest.mark.timeout(60)
@pytest.mark.parametrize("kind", [fcntl.LOCK_EX, fcntl.LOCK_SH])
def test_a_lock_that_somebody_holds_does_not_keep_a_store_from_opening(tmp_path: Path, kind: int) -> None:
    Store.open(tmp_path / "store").close()
    with open(tmp_path / "store" / "catalogue.lock", "rb") as held:
        fcntl.flock(held, kind)
        with Store.open(tmp_path / "store") as store:
            store.create_stream(STREAM, KEYED)


@pytest.mark.timeout(60)
def test_making_a_store_does_not_wait_for_ever_and_says_for_whom(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sql, "LOCK_TIMEOUT_S", 0.05)
    (tmp_path / "store").mkdir()
    with open(tmp_path / "store" / "catalogue.lock", "wb") as held:
        fcntl.flock(held, fcntl.LOCK_SH)
        with pytest.raises(
            StorageError, match=rf"(process {os.getpid()} \(|another process).* has held the lock .*catalogue\.lock for"
        ):
            Store.open(tmp_path / "store")
    Store.open(tmp_path / "store").close()


def test_making_a_store_waits_for_who_makes_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "store").mkdir()
    with open(tmp_path / "store" / "catalogue.lock", "wb") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        waits: list[float] = []

        def sleep(seconds: float) -> None:
            waits.append(seconds)
            fcntl.flock(held, fcntl.LOCK_UN)

        monkeypatch.setattr(sql, "time", SimpleNamespace(monotonic=time.monotonic, sleep=sleep))
        Store.open(tmp_path / "store").close()
        assert len(waits) == 1


def test_a_catalogue_that_was_closed_tells_of_what_came_meanwhile(tmp_path: Path) -> None:
    with Store.open(tmp_path / "store") as store, Store.open(tmp_path / "store") as other:
        seen = {store.changes()}
        for number in range(4):
            other.create_stream(f"s{number}", KEYED)
            seen.add(store.changes())
            database_of(store).close()
            seen.add(store.changes())
        assert len(seen) == 9
        assert not store.is_untouched


def files_open_below(start: str) -> list[str]:
    links = [os.readlink(entry) for entry in Path("/proc/self/fd").iterdir() if entry.is_symlink()]
    return [link for link in links if link.startswith(start)]


@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="needs to see the files of the process")
def test_a_store_that_was_closed_has_no_file_of_its_catalogue_open(tmp_path: Path) -> None:
    with Store.open(tmp_path / "store") as store:
        store.create_stream(STREAM, KEYED)
        store.changes()
    assert files_open_below(f"{tmp_path}/store/catalogue") == []


NOBODY = 65_534
OWNER = "pipe/sink"
EVENTS_COUNT = 5


def make_store(root: Path) -> Path:
    """Make a store with events, a sealed stream, and transactions that are committed and prepared."""
    with Store.open(root) as store:
        for name in (STREAM, "app/done"):
            store.create_stream(name, KEYED, segments=2, routing_key="key")
        with store.writer(STREAM) as writer:
            writer.append(keyed(("a", 1), ("b", 2), ("c", 3)))
        for name, events in (("one", [("a", 4), ("d", 5)]), ("two", [("e", 6)])):
            transaction = store.transactions.begin(STREAM, owner=OWNER, epoch=1, name=name)
            transaction.write(keyed(*events))
            transaction.prepare()
        store.commit_transactions([(STREAM, "one")], owner=OWNER, epoch=1)
        store.seal("app/done")
    return root


@contextmanager
def tables_of(root: Path) -> Iterator[sqlite3.Connection]:
    connection = sqlite3.connect(root / "catalogue.sqlite")
    try:
        with connection:
            yield connection
    finally:
        connection.close()


@pytest.fixture
def readonly(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A store that this process is not allowed to write."""
    root = make_store(tmp_path / "store")
    monkeypatch.setattr(sql, "may_write", lambda path: False)
    return root


def test_a_table_that_cannot_be_read_is_said_and_no_end_of_the_check(tmp_path: Path) -> None:
    root = make_store(tmp_path / "store")
    with contextlib.closing(sqlite3.connect(root / "catalogue.sqlite", isolation_level=None)) as tables:
        tables.execute("PRAGMA wal_checkpoint(TRUNCATE)")
        size = tables.execute("PRAGMA page_size").fetchone()[0]
        page = tables.execute("SELECT rootpage FROM sqlite_master WHERE name = 'reader_groups'").fetchone()[0]
    data = (root / "catalogue.sqlite").read_bytes()
    (root / "catalogue.sqlite").write_bytes(data[: (page - 1) * size] + bytes(size) + data[page * size :])
    with Store.open(root) as store:
        found = [problem.what for problem in store.fsck()]
    assert any(what.startswith("table 'reader_groups' cannot be read to its end: ") for what in found)


@pytest.mark.parametrize("version", ["0", "1", "9"])
def test_a_store_of_another_version_is_refused_with_one_sentence(tmp_path: Path, version: str) -> None:
    root = make_store(tmp_path / "store")
    with tables_of(root) as tables:
        tables.execute("UPDATE meta SET value = ? WHERE key = 'version'", (version,))
    before = content(root)
    with pytest.raises(UsageError, match=rf"has version {version}, this Headgate reads version 2; ") as refused:
        Store.open(root)
    assert "\n" not in str(refused.value)
    assert content(root) == before


COMMITS = "import os, sqlite3, sys; c = sqlite3.connect(sys.argv[1]); c.execute(sys.argv[2]); c.commit(); "


def in_a_process_that(does: str, root: Path, statement: str) -> None:
    subprocess.run([sys.executable, "-c", does, str(root / "catalogue.sqlite"), statement], check=True, timeout=120)


def content(root: Path) -> dict[str, bytes]:
    """Every file below ``root``, and what is in it."""
    return {str(path.relative_to(root)): path.read_bytes() for path in sorted(root.rglob("*")) if path.is_file()}


def check_as_sink(store: Store) -> None:
    StreamSink(STREAM, store.root).check(KEYED)


def describe_as_source(store: Store) -> None:
    source = StreamSource(STREAM, store.root)
    assert (source.schema(), source.how_to_end() is None) == (KEYED, False)


LOOKS: dict[str, Callable[[Store], object]] = {
    "list": lambda store: store.list_streams("app"),
    "describe": lambda store: store.describe(STREAM),
    "layout": lambda store: store.layout(STREAM),
    "transactions": lambda store: store.list_transactions(owner=OWNER),
    "owner": lambda store: store.pipelines.owner(OWNER),
    "read": drained,
    "changes": Store.changes,
    "fsck": Store.fsck,
    "sink": check_as_sink,
    "source": describe_as_source,
}


@pytest.mark.parametrize("look", LOOKS)
def test_reading_a_store_that_may_not_be_written_changes_no_file(readonly: Path, look: str) -> None:
    before = content(readonly)
    with Store.open(readonly) as store:
        LOOKS[look](store)
        assert content(readonly) == before
    assert content(readonly) == before


@pytest.mark.parametrize("stays", [True, False], ids=["is open", "comes and goes"])
def test_what_others_write_meanwhile_is_seen(readonly: Path, stays: bool) -> None:
    with contextlib.ExitStack() as open_files, Store.open(readonly) as looker:
        assert not looker.describe(STREAM).is_sealed
        for is_sealed in (1, 0, 1):
            seen = looker.changes()
            statement = f"UPDATE streams SET is_sealed = {is_sealed} WHERE name = '{STREAM}'"
            if stays:
                older = open_files.enter_context(contextlib.closing(sqlite3.connect(readonly / "catalogue.sqlite")))
                with older:
                    older.execute(statement)
            else:
                in_a_process_that(COMMITS + "c.close()", readonly, statement)
            assert looker.changes() != seen
            assert looker.describe(STREAM).is_sealed == bool(is_sealed)
            assert looker.changes() == looker.changes()


@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="needs to see the files of the process")
def test_a_store_that_may_be_written_meanwhile_is_read_itself(readonly: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with Store.open(readonly) as looker:
        assert looker.is_untouched
        assert looker._core.catalogue.path == str(readonly / "catalogue.sqlite")
        monkeypatch.undo()
        with tables_of(readonly) as writer:
            writer.execute("INSERT INTO meta VALUES ('more', '')")
        assert not looker.is_untouched
        assert len(drained(looker)) == EVENTS_COUNT
    assert files_open_below(f"{readonly}/catalogue") == []


def test_a_store_that_has_another_version_meanwhile_is_refused(readonly: Path) -> None:
    with Store.open(readonly) as looker:
        looker.describe(STREAM)
        with tables_of(readonly) as newer:
            newer.execute("UPDATE meta SET value = '10' WHERE key = 'version'")
        with pytest.raises(UsageError, match=r"has version 10, this Headgate reads version 2"):
            looker.describe(STREAM)


def test_what_a_killed_writer_left_in_the_log_is_seen_and_stays_there(readonly: Path) -> None:
    in_a_process_that(COMMITS + "os._exit(0)", readonly, f"UPDATE streams SET is_sealed = 1 WHERE name = '{STREAM}'")
    before = content(readonly)
    assert before["catalogue.sqlite-wal"]
    with Store.open(readonly) as looker:
        assert looker.describe(STREAM).is_sealed
    after = content(readonly)
    for name in ("catalogue.sqlite", "catalogue.sqlite-wal"):
        assert after[name] == before[name]


def test_a_copy_is_of_one_moment_although_somebody_comes_and_goes(
    readonly: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A writer that was not there when the copy was begun, and is gone when it is ready."""
    copy, left = sql._copy, [1]

    def disturbed(file: sqlite3.Connection) -> sqlite3.Connection:
        copied = copy(file)
        if left[0]:
            left[0] -= 1
            with tables_of(readonly) as writer:
                writer.execute("INSERT INTO meta VALUES (?, '')", (f"disturbed {left[0]}",))
        return copied

    monkeypatch.setattr(sql, "_copy", disturbed)
    with contextlib.closing(CatalogueFile(readonly / "catalogue.sqlite")) as look:
        copied = look.copy()
        keys = {key for (key,) in copied.execute("SELECT key FROM meta")}
        copied.close()
    assert keys == {"version", "disturbed 0"}


def test_who_never_gets_a_copy_of_one_moment_says_so(readonly: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    number = iter(range(1_000_000))
    monkeypatch.setattr(CatalogueFile, "_state", lambda self: next(number))
    with pytest.raises(StorageError, match="changed whenever it was read") as caught:
        Store.open(readonly)
    assert caught.value.is_transient


def test_a_store_that_was_removed_meanwhile_is_named(readonly: Path) -> None:
    with Store.open(readonly) as looker:
        looker.describe(STREAM)
        shutil.rmtree(readonly)
        with pytest.raises(StorageError, match=r"cannot read .*catalogue\.sqlite: No such file"):
            looker.describe(STREAM)


@pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")
def test_a_readonly_catalogue_taken_through_a_fork_sees_what_comes(
    readonly: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Store.open(readonly) as store:
        monkeypatch.undo()
        seen = store.changes()
        count = len(drained(store))
        child = os.fork()
        if child == 0:
            status = 1
            with contextlib.suppress(BaseException):
                assert store.changes() != seen
                assert len(drained(store)) == count
                with store.writer(STREAM) as writer:
                    writer.append(keyed(("child", 1)))
                status = 0 if len(drained(store)) == count + 1 else 2
            os._exit(status)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        assert len(drained(store)) == count + 1


# -- who may not write ------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def without_rights(root: Path) -> Iterator[None]:
    """Nobody may write below ``root``, we neither: the superuser becomes somebody else for the time."""
    paths = [root, *root.rglob("*")]
    for path in paths:
        path.chmod(0o555 if path.is_dir() else 0o444)
    is_superuser = os.geteuid() == 0
    if is_superuser:
        os.seteuid(NOBODY)
    try:
        yield
    finally:
        if is_superuser:
            os.seteuid(0)
        for path in paths:
            path.chmod(0o755 if path.is_dir() else 0o644)


@pytest.fixture
def public() -> Iterator[Path]:
    """A directory that every user of this machine may enter and read."""
    made = Path(tempfile.mkdtemp(prefix="headgate-public-"))
    made.chmod(0o755)
    yield made
    shutil.rmtree(made)


def test_a_store_in_a_directory_that_cannot_be_written_to_can_be_looked_at(public: Path) -> None:
    root = make_store(public / "store")
    before = content(root)
    with without_rights(root), Store.open(root) as store:
        assert len(drained(store)) == EVENTS_COUNT
        assert store.fsck() == []
        assert [info.name for info in store.list_streams()] == ["app/done", STREAM]
        check_as_sink(store)
        with pytest.raises(UsageError, match=r"stream store at .* cannot be written to: (Permission denied|Read-only)"):
            store.create_stream("other", pa.schema([("a", pa.int64())]))
        assert len(drained(store)) == EVENTS_COUNT
    assert content(root) == before


OWNER_PROCESS = """
import sqlite3, sys
catalogue = sqlite3.connect(sys.argv[1], isolation_level=None)
for line in sys.stdin:
    print(catalogue.execute(line).fetchall(), flush=True)
"""


def test_a_store_that_its_owner_has_open_is_looked_at_by_who_may_only_read(public: Path) -> None:
    root = public / "store"
    with Store.open(root) as owner:
        owner.create_stream(STREAM, KEYED, segments=1)
    command = [sys.executable, "-c", OWNER_PROCESS, str(root / "catalogue.sqlite")]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdin is not None
        assert process.stdout is not None

        def tell(statement: str) -> str:
            print(statement, file=process.stdin, flush=True)
            return process.stdout.readline()

        assert tell("SELECT name FROM streams") == f"[('{STREAM}',)]\n"
        with without_rights(root):
            with Store.open(root) as looker:
                assert not looker.describe(STREAM).is_sealed
                for is_sealed in (0, 1):
                    tell(f"UPDATE streams SET is_sealed = {is_sealed}")
                    assert looker.describe(STREAM).is_sealed == bool(is_sealed)
                process.stdin.close()
                process.wait(120)
                assert looker.describe(STREAM).is_sealed
            with Store.open(root) as later:  # what the owner left beside it is there still
                assert later.describe(STREAM).is_sealed


@pytest.mark.parametrize("kept", ["log and index", "log", "empty log"])
def test_what_a_killed_writer_left_is_seen_by_who_may_only_read_or_refused_with_one_sentence(
    public: Path, kept: str
) -> None:
    """Without the index of the log SQLite must write a new one."""
    root = make_store(public / "store")
    in_a_process_that(COMMITS + "os._exit(0)", root, "UPDATE streams SET is_sealed = 1")
    if kept != "log and index":
        (root / "catalogue.sqlite-shm").unlink()
    if kept == "empty log":
        (root / "catalogue.sqlite-wal").write_bytes(b"")
    with without_rights(root):
        if kept == "log":
            with pytest.raises(StorageError, match=r"left beside it cannot be read without the right") as caught:
                Store.open(root)
            assert not caught.value.is_transient
        else:
            with Store.open(root) as store:
                assert store.describe(STREAM).is_sealed == (kept == "log and index")


def test_a_catalogue_that_may_not_be_read_is_refused_with_one_sentence(public: Path) -> None:
    root = make_store(public / "store")
    with without_rights(root):
        if os.getuid() == 0:
            os.seteuid(0)
        (root / "catalogue.sqlite").chmod(0o000)
        if os.getuid() == 0:
            os.seteuid(NOBODY)
        with pytest.raises(UsageError, match=r"stream store at .* cannot be opened: Permission denied"):
            Store.open(root)


# -- locks of the process ----------------------------------------------------------------------------------------------


def locks_on(path: Path) -> list[str]:
    """Return the locks that this process holds on a file.

    They are read one descriptor at a time: ``/proc/locks`` is read in pieces, and a lock that moves up meanwhile,
    because another process gave one back, is missed.
    """
    held = []
    for descriptor in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):  # closed since, such as that of the list itself
            if os.path.samestat(os.stat(f"/proc/self/fd/{descriptor}"), path.stat()):
                lines = Path(f"/proc/self/fdinfo/{descriptor}").read_text().splitlines()
                held += [line.split(":", 2)[2] for line in lines if line.startswith("lock:")]
    return held


@pytest.mark.skipif(not Path("/proc/self/fdinfo").exists(), reason="needs to see the locks of files")
def test_opening_a_store_again_leaves_the_locks_of_the_process_alone(tmp_path: Path) -> None:
    """Closing any descriptor of a file frees all locks that the process has on it, those of SQLite too."""
    root = make_store(tmp_path / "store")
    with Store.open(root) as store, contextlib.closing(sqlite3.connect(root / "catalogue.sqlite")) as connection:
        connection.execute("SELECT count(*) FROM meta").fetchone()
        held = locks_on(root / "catalogue.sqlite")
        assert held
        with Store.open(root) as again:
            drained(again)
            drained(store)
        assert set(held) <= set(locks_on(root / "catalogue.sqlite"))
        database_of(store).close()
        store.transactions.fence("another", 1)
        assert set(held) <= set(locks_on(root / "catalogue.sqlite"))


def test_what_is_acknowledged_is_seen_by_others_although_the_store_was_opened_twice(tmp_path: Path) -> None:
    """Without the locks of this process another one that leaves takes the log away, and what follows in it."""
    counts = "import sqlite3, sys; c = sqlite3.connect(sys.argv[1]); (n,), = c.execute(sys.argv[2]); c.close(); "
    root, statement = tmp_path / "store", "SELECT count(*) FROM parts"
    with Store.open(root) as store:
        store.create_stream(STREAM, KEYED, segments=1)
        Store.open(root).close()
        in_a_process_that(counts + "assert n == 0", root, statement)
        with store.writer(STREAM) as writer:
            writer.append(keyed(("a", 1)))
        in_a_process_that(counts + "assert n == 1", root, statement)


def test_a_source_holds_nothing_in_a_store_that_may_not_be_written(readonly: Path) -> None:
    before = content(readonly)
    source = StreamSource(STREAM, str(readonly))
    source.hold(HoldContext("p", "source", "life", Generation(1)), [])
    assert content(readonly) == before


CASES_OF_VERBS = int(os.environ.get("HEADGATE_TEST_CASES", "80"))
"""There are some 40,000 of damages and verbs: a few of them each time, others with another seed."""

CASES_OF_COLUMNS = int(os.environ.get("HEADGATE_TEST_CASES", "1"))
SEED = int(os.environ.get("HEADGATE_TEST_SEED", "10"))


def filled(catalogue: SqlCatalogue) -> None:
    """Something of everything, also of former layouts."""
    fill(catalogue)
    stream = catalogue.find_stream("s")
    catalogue.create_stream(StreamDefinition("quiet", stream.schema, 1, None), 1, if_not_exists=False)
    WRITES["scale_stream"](catalogue, stream)


@pytest.fixture(scope="module")
def damaged() -> Damaged:
    return Damaged(filled)


def problems(catalogue: SqlCatalogue) -> list[tuple[str, str]]:
    with catalogue.audit() as audit:
        found = audit.problems()
        for stream in audit.streams():
            audit.schemas(stream)
            list(audit.parts(stream))
        for chunk in audit.chunks():
            for entry in chunk.entries:
                audit.heirs(chunk, entry.segment)
                audit.is_truncated(chunk, entry.segment)
        audit.garbage()
    return found


def test_a_check_tells_of_each_value_of_a_wrong_kind_and_goes_on(damaged: Damaged) -> None:
    check_values(damaged)


def check_values(damaged: Damaged) -> None:
    chance = random.Random(SEED)
    damaged.mend()
    assert problems(damaged.catalogue) == [HELD_FOR_NOBODY]
    for column in columns():
        every = list(damages(damaged, column))
        for damage in chance.sample(every, min(CASES_OF_COLUMNS, len(every))):
            if not damaged.damage(damage):
                continue
            damaged.change("DELETE FROM segments WHERE stream_id = 2")  # something else, of stream 'sealed'
            found = problems(damaged.catalogue)
            assert all("\n" not in what for _, what in found), damage.name
            words = f"its table '{column.table.name}' has "
            told = [what for _, what in found if what.startswith(words) and f" as {column.name} where " in what]
            assert len(told) == (not damage.is_of_its_kind), f"{damage.name}: {found}"
            is_other = column.table.name in ("streams", "segments", "meta")
            assert is_other or "sealed" in [where for where, _ in found], f"{damage.name}: {found}"


@pytest.mark.parametrize(
    ("value", "shown"),
    [(None, "nothing"), (b"\x00\xff", r"the bytes b'\x00\xff'"), ("abc", "'abc'"), (1.5, "1.5")],
    ids=["nothing", "bytes", "text", "number"],
)
def test_what_is_wrong_is_said_with_its_value_and_its_row(damaged: Damaged, value: object, shown: str) -> None:
    damaged.mend()
    assert damaged.damage(Damage(metadata.tables["segments"].columns["end_position"], 0, value, is_of_its_kind=False))
    (problem,) = [what for _, what in problems(damaged.catalogue) if "table" in what]
    assert problem == (
        f"its table 'segments' has {shown} as end_position where a number is expected, "
        "in the row of stream_id 1, segment_id 0"
    )


def test_of_many_rows_that_are_wrong_some_are_said(damaged: Damaged, monkeypatch: pytest.MonkeyPatch) -> None:
    count, more = damaged.rows_count(metadata.tables["segments"]), "its table 'segments' has more such rows"
    for most in (count, count - 1):
        damaged.mend()
        damaged.change("UPDATE segments SET end_position = 'x'")
        monkeypatch.setattr(integrity, "PROBLEMS_MAX", most)
        found = [what for _, what in problems(damaged.catalogue) if "table 'segments'" in what]
        assert len(found) == count
        assert (more in found) is (most < count)


HELD_FOR_NOBODY = (
    "reader group 'forgotten'",
    "there is none, and stream 's' is held for it; --repair lets go of it",
)
"""What ``fill`` leaves to be mended."""


def test_no_verb_ends_in_an_error_of_another_kind_where_a_value_is_damaged(damaged: Damaged) -> None:
    chance = random.Random(SEED)
    damaged.mend()
    stream = damaged.catalogue.find_stream("s")
    every = [damage for column in columns() for damage in damages(damaged, column)]
    for damage in chance.sample(every, min(CASES_OF_VERBS, len(every))):
        for name in chance.sample(sorted(READS.keys() | WRITES.keys()), 4):
            if damaged.damage(damage):
                check_verb(damaged, damage, name, stream)


def check_verb(damaged: Damaged, damage: Damage, name: str, stream: StreamInfo) -> None:
    try:
        answer = (READS | WRITES)[name](damaged.catalogue, stream)
        decode(encode(answer), CATALOGUE_SIGNATURES[name].gives)  # it is what the verb is declared to give
    except ProtocolViolation:
        raise
    except HeadgateError:
        return
    except Exception as error:
        raise AssertionError(f"{name} with {damage.name}: {error!r}") from error


HANDED_ON = [
    ("segments.end_position", None, "describe_stream"),
    ("streams.is_sealed", None, "find_stream"),
    ("streams.created_ms", None, "find_stream"),
    ("shared_transactions.due_ms", 1.5, "list_streams"),
    ("transactions.epoch", "abc", "transactions"),
    ("holds.position", None, "holds"),
]


@pytest.mark.parametrize(("name", "value", "verb"), HANDED_ON)
def test_what_a_verb_only_hands_on_is_looked_at(damaged: Damaged, name: str, value: object, verb: str) -> None:
    table, _, column = name.partition(".")
    damaged.mend()
    stream, told = damaged.catalogue.find_stream("s"), []
    for row in range(damaged.rows_count(metadata.tables[table])):
        assert damaged.damage(Damage(metadata.tables[table].columns[column], row, value, is_of_its_kind=False))
        try:
            READS[verb](damaged.catalogue, stream)
        except CorruptionError as error:
            told.append(str(error))
    assert told
    assert all(f"its table '{table}' has " in one and f" as {column} where " in one for one in told)


BLOBS = ("streams.schema", "former_schemas.schema", "owners.life", "reader_groups.state")
CHECKED_BY_SUM = ("streams.schema", "former_schemas.schema", "owners.life")
TEXTS = ("streams.retention", "streams.scaling")


@pytest.mark.parametrize("name", [*BLOBS, *TEXTS])
def test_a_value_that_is_damaged_somewhere_is_told(damaged: Damaged, name: str) -> None:
    """Of those without a checksum, which are JSON, another value may be a sound one."""
    table, _, column_name = name.partition(".")
    column, chance = metadata.tables[table].columns[column_name], random.Random(name)
    damaged.mend()
    stream, whole = damaged.catalogue.find_stream("s"), damaged.value(column, 0)
    data = whole.encode() if isinstance(whole, str) else whole
    for number in range(16):
        at, end = sorted(chance.sample(range(len(data) + 1), 2))
        middle = [bytes(end - at), chance.randbytes(end - at), b"", data[at:end] * 2][number % 4]
        other = data[:at] + middle + data[end:]
        if other == data:
            continue
        damage = Damage(column, 0, other.decode("latin-1") if isinstance(whole, str) else other, is_of_its_kind=True)
        assert damaged.damage(damage)
        found = problems(damaged.catalogue)
        assert name not in CHECKED_BY_SUM or found != [HELD_FOR_NOBODY], damage.name
        for verb in ("find_stream", "schemas", "find_group", "owner", "change_group"):
            damaged.damage(damage)
            check_verb(damaged, damage, verb, stream)
