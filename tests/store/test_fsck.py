"""Whatever happens to a store's files, nobody reads less than was acknowledged, or something else, without an error."""

# Rules: F10

from __future__ import annotations

import random
import shutil
import sqlite3
from collections.abc import Callable
from contextlib import AbstractContextManager, closing, nullcontext
from pathlib import Path

import msgspec
import pyarrow as pa
import pytest
import xxhash
from tests.codec.test_arrow import BATCH, message, wild
from tests.conftest import IS_DEEP
from tests.store.catalogue.damaging import Damaged, columns, damages
from tests.store.storing import KEYED, STREAM, chunks_of, database_of, keyed

from headgate.codec.chunk import END_MAGIC, Part, encode_chunk
from headgate.errors import CorruptionError, HeadgateError, UsageError
from headgate.storage.memory import MemoryStorage
from headgate.store.catalogue import tables as t
from headgate.store.catalogue.records import StoredPart
from headgate.store.chunks import read_part
from headgate.store.fsck import check_at
from headgate.store.store import Store

CATALOGUE = "catalogue.sqlite"
Events = list[list[tuple[str, int]]]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Events]:
    return made(tmp_path_factory.mktemp("whole"))


def made(root: Path) -> tuple[Path, Events]:
    """Make a store; return what is in each segment: appended, committed, in front of a scaling and behind."""
    with Store.open(root) as store:
        fill(store)
        found, errors = read_all(root)
    assert errors == [None] * len(found)
    assert sum(map(len, found)) == 36
    return root, found


def fill(store: Store) -> None:
    store.create_stream(STREAM, KEYED, segments=2, routing_key="key")
    with store.writer(STREAM, linger=None, writer_id="w") as writer:
        for number in range(6):
            writer.append(keyed(*((key, number) for key in "abcd")))
            writer.flush()
    store.split(STREAM, 0)
    for number in range(6, 9):
        transaction = store.transactions.begin(STREAM, owner="p", epoch=1, name=f"t{number}")
        transaction.write(keyed(*((key, number) for key in "abcd")))
        transaction.prepare()
        store.commit_transactions([(STREAM, f"t{number}")], owner="p", epoch=1)
    store.seal(STREAM)


def read_all(root: Path) -> tuple[Events, list[HeadgateError | None]]:
    """Return what each segment gives from its beginning on, and the error that ended it, if one did."""
    return read_all_of(lambda: Store.open(root))


def read_all_of(opened: Callable[[], AbstractContextManager[Store]]) -> tuple[Events, list[HeadgateError | None]]:
    """Do what ``read_all`` does. An error of the whole store counts as one of each segment."""
    events: Events = []
    errors: list[HeadgateError | None] = []
    try:
        with opened() as store:
            for segment in range(len(store.layout(STREAM).segments)):
                events.append([])
                errors.append(None)
                try:
                    reader = store.reader(STREAM, segment, 0)
                    while (batch := reader.read()) is not None:
                        events[-1] += list(zip(*batch.to_pydict().values(), strict=True))
                except HeadgateError as error:
                    errors[-1] = error
    except HeadgateError as error:
        errors += [error] * 10
        events += [[]] * 10
    return events, errors


def flipped(data: bytearray, at: int, chance: random.Random) -> None:
    data[at] ^= 1 << chance.randrange(8)


def cut(data: bytearray, at: int, chance: random.Random) -> None:
    del data[at:]


def zeroed(data: bytearray, at: int, chance: random.Random) -> None:
    size = min(len(data) - at, chance.choice((16, 512, 4096)))
    data[at : at + size] = bytes(size)


def misplaced(data: bytearray, at: int, chance: random.Random) -> None:
    """A block of the disk holds what belongs elsewhere."""
    size = 512
    to, source = at // size * size, chance.randrange(len(data)) // size * size
    data[to : to + size] = data[source : source + size]


Damage = Callable[[bytearray, int, random.Random], None]


def silent(root: Path, whole: Events) -> str | None:
    """Return what is wrong with what is read, None if an error tells whatever is missing."""
    return silent_of(lambda: Store.open(root), whole)


def silent_of(opened: Callable[[], AbstractContextManager[Store]], whole: Events) -> str | None:
    events, errors = read_all_of(opened)
    for segment, expected in enumerate(whole):
        found, error = (events[segment], errors[segment]) if segment < len(events) else ([], None)
        if found != expected[: len(found)]:
            return f"segment {segment} has {found}, not {expected}"
        if len(found) < len(expected) and error is None:
            return f"segment {segment} has {len(found)} of {len(expected)} events, and no error"
    return None


@pytest.mark.parametrize("damage", [flipped, cut, zeroed, misplaced])
def test_no_damage_to_a_store_is_read_as_fewer_or_other_events(
    whole: tuple[Path, Events], damage: Damage, tmp_path: Path
) -> None:
    original, expected = whole
    chance = random.Random(damage.__name__)
    files = [path.relative_to(original) for path in sorted(original.rglob("*.chunk"))]
    for number in range(30 if IS_DEEP else 12):
        root = tmp_path / str(number)
        shutil.copytree(original, root)
        path = root / (CATALOGUE if number % 3 else chance.choice(files))
        data = bytearray(path.read_bytes())
        at = chance.choice([at for at, byte in enumerate(data) if byte])  # most of a database is empty
        damage(data, at, chance)
        path.write_bytes(data)
        problem = silent(root, expected)
        assert problem is None, f"{damage.__name__} at {at} of {path.name}: {problem}"
        shutil.rmtree(root)


def test_a_torn_tail_of_the_catalogues_log_is_cut_and_nothing_acknowledged_is_lost(tmp_path: Path) -> None:
    """The power goes while a commit is written: none of it counts, and all before it does."""
    root = tmp_path / "store"
    log = root / f"{CATALOGUE}-wal"
    with Store.open(root) as store:
        store.create_stream(STREAM, KEYED, segments=1)
        with store.writer(STREAM, linger=None) as writer:
            for number in range(3):
                writer.append(keyed(("a", number)))
                writer.flush()
            acknowledged = log.stat().st_size
            writer.append(keyed(("a", 3)))
            writer.flush()
            last = log.read_bytes()
            shutil.copytree(root, tmp_path / "left")
    assert len(last) > acknowledged
    chance = random.Random(3)
    for number, end in enumerate([acknowledged, *chance.sample(range(acknowledged + 1, len(last)), 6), len(last)]):
        left = tmp_path / str(number)
        shutil.copytree(tmp_path / "left", left)
        (left / f"{CATALOGUE}-shm").unlink(missing_ok=True)
        garbage = chance.randbytes(len(last) - end) if number % 2 else bytes(len(last) - end)
        (left / f"{CATALOGUE}-wal").write_bytes(last[:end] + garbage)
        expected = [("a", n) for n in range(4 if end == len(last) else 3)]
        assert read_all(left) == ([expected], [None])
        with Store.open(left) as store:
            with store.writer(STREAM) as writer:
                writer.append(keyed(("a", 9)))
            assert [problem for problem in store.fsck() if not problem.is_harmless] == []
        assert read_all(left) == ([[*expected, ("a", 9)]], [None])


@pytest.mark.parametrize("segment", [0, 2, 3])
def test_a_segment_that_is_lost_is_an_error_for_whoever_reads_or_writes_the_stream(
    whole: tuple[Path, Events], segment: int, tmp_path: Path
) -> None:
    shutil.copytree(whole[0], tmp_path / "store")
    with Store.open(tmp_path / "store") as store:
        reader = store.reader(STREAM, segment, len(whole[1][segment]))
        with database_of(store).write() as connection:
            connection.execute(t.segments.delete().where(t.segments.c.segment_id == segment))
        asked_for: list[Callable[[], object]] = [lambda: store.layout(STREAM), reader.read]
        asked_for += [lambda: store.reader_group("g", STREAM), lambda: store.split(STREAM, 1)]
        if segment:  # one that takes events
            asked_for += [lambda: store.find(STREAM), lambda: store.writer(STREAM), lambda: store.reader(STREAM, 1)]
        for ask in asked_for:
            with pytest.raises(CorruptionError, match=f"the layout of stream '{STREAM}' is damaged"):
                ask()
        assert any(STREAM in problem.where for problem in store.fsck())


@pytest.mark.parametrize("gone", ["tables", "version"])
def test_tables_that_are_gone_are_an_error_and_not_made_anew(
    whole: tuple[Path, Events], gone: str, tmp_path: Path
) -> None:
    path = tmp_path / "store" / CATALOGUE
    shutil.copytree(whole[0], path.parent)
    with closing(sqlite3.connect(path, isolation_level=None)) as tables:
        if gone == "tables":
            tables.execute("PRAGMA writable_schema=ON")
            tables.execute("DELETE FROM sqlite_master")
        else:
            tables.execute("DELETE FROM meta WHERE key = 'version'")
    before = path.read_bytes()
    for _ in range(2):
        with pytest.raises(CorruptionError, match=r"catalogue\.sqlite is damaged"):
            Store.open(path.parent)
    assert path.read_bytes() == before


NO_VERSIONS = {"bytes": "x'39'", "text": "'nine'", "long": f"'{'9' * 5_000}'", "null": "NULL"}


@pytest.mark.parametrize("value", NO_VERSIONS.values(), ids=NO_VERSIONS)
def test_a_version_that_is_no_number_is_damage(whole: tuple[Path, Events], value: str, tmp_path: Path) -> None:
    path = tmp_path / "store" / CATALOGUE
    shutil.copytree(whole[0], path.parent)
    loosen(path, "meta")
    with closing(sqlite3.connect(path, isolation_level=None)) as tables:
        tables.execute(f"UPDATE meta SET value = {value}")
    with pytest.raises(CorruptionError, match="no version of it"):
        Store.open(path.parent)


def loosen(path: Path, table: str) -> None:
    """Have SQLite take anything in any column of a table."""
    with closing(sqlite3.connect(path, isolation_level=None)) as tables:
        tables.execute("PRAGMA writable_schema=ON")
        tables.execute(f"UPDATE sqlite_master SET sql = replace(sql, ' NOT NULL', '') WHERE name = '{table}'")


@pytest.mark.parametrize("value", ["NULL", "'\xff'", "x'ff'"])
@pytest.mark.parametrize("column", ["size_bytes", "checksum", "offset", "events_count"])
def test_columns_that_hold_what_they_never_hold_are_damage(
    whole: tuple[Path, Events], value: str, column: str, tmp_path: Path
) -> None:
    path = tmp_path / "store" / CATALOGUE
    shutil.copytree(whole[0], path.parent)
    loosen(path, "parts")
    with closing(sqlite3.connect(path, isolation_level=None)) as tables:
        tables.execute(f'UPDATE parts SET "{column}" = {value} WHERE segment_id = 1 AND start >= 12')
    with Store.open(path.parent) as store:
        reader = store.reader(STREAM, 1)
        found = reader.read(12)
        assert found is not None
        assert found.num_rows == 12, "nothing before the damage is lost"
        with pytest.raises(CorruptionError):
            reader.read()


OF_EVENTS = ("streams", "segments", "chunks", "parts", "former_schemas")


def test_no_value_of_the_catalogue_is_damaged_so_that_other_events_are_read(
    whole: tuple[Path, Events],
) -> None:
    """Whatever a column holds: what is read is what was written, up to an error of ours."""
    storage, chance = MemoryStorage(), random.Random(14)
    damaged = Damaged(lambda catalogue: fill(Store("store", catalogue, storage)))
    for column in columns():
        if column.table.name not in OF_EVENTS or not damaged.rows_count(column.table):
            continue
        for damage in chance.sample(list(damages(damaged, column)), 3):
            if damaged.damage(damage):
                store = Store("store", damaged.catalogue, storage)
                problem = silent_of(lambda store=store: nullcontext(store), whole[1])  # type: ignore[misc]
                assert problem is None, f"{damage.name}: {problem}"


def test_a_check_tells_of_a_chunk_that_is_damaged_anywhere_and_goes_on(
    whole: tuple[Path, Events], tmp_path: Path
) -> None:
    shutil.copytree(whole[0], tmp_path / "store")
    first, second, *_ = sorted((tmp_path / "store").rglob("*.chunk"))
    second.unlink()
    data = first.read_bytes()
    with Store.open(tmp_path / "store") as store:
        before = {problem.where for problem in store.fsck()}
        for at in range(0, len(data), 64):
            first.write_bytes(data[:at] + bytes(byte ^ 0xFF for byte in data[at : at + 64]) + data[at + 64 :])
            found = store.fsck()
            assert {problem.where for problem in found} > before, f"nothing is wrong from byte {at} on"
            assert all("\n" not in problem.what and not problem.is_harmless for problem in found)


@pytest.mark.parametrize(
    ("damage", "problem"),
    [
        ("UPDATE parts SET events_count = 2 WHERE chunk_id = 1", "its footer and the catalogue disagree"),
        ("DELETE FROM parts WHERE chunk_id = 1", "holds no event that can still be read or committed"),
        ("UPDATE chunks SET schema_version = 7 WHERE id = 1", "has schema 7, which is none"),
    ],
    ids=["footer", "no events", "schema"],
)
def test_a_check_goes_on_behind_a_chunk_that_is_recorded_wrongly(store: Store, damage: str, problem: str) -> None:
    for number in range(3):
        with store.writer(STREAM) as writer:
            writer.append(keyed(("a", number)))
    for path in sorted(chunks_of(store).rglob("*.chunk")):
        data = path.read_bytes()
        path.write_bytes(data[:70] + bytes([data[70] ^ 1]) + data[71:])
    before = {found.where for found in store.fsck()}
    assert len(before) == 3
    with database_of(store).write() as connection:
        connection.exec_driver_sql(damage)
    found = store.fsck()
    assert any(one.what.endswith(problem) for one in found)
    assert len(before & {one.where for one in found}) >= 2, "those of the other chunks"


@pytest.mark.parametrize(
    ("damage", "problem"),
    [
        ("DELETE FROM chunks WHERE id = 1", "its chunk is not in the catalogue"),
        ("DELETE FROM prepared_parts", "prepared with 0 hidden events, not 1"),
        ("UPDATE prepared_parts SET transaction_id = 99", "1 hidden parts belong to no transaction"),
        ("DELETE FROM shared_transactions", "open, and its lease is None"),
        (
            "UPDATE shared_transactions SET transaction_id = 99",
            "1 rows of shared_transactions belong to no transaction",
        ),
    ],
)
def test_what_the_tables_say_of_each_other_is_checked(store: Store, damage: str, problem: str) -> None:
    with store.writer(STREAM) as writer:
        writer.append(keyed(("a", 1)))
    transaction = store.transactions.begin(STREAM, owner="p", epoch=1, name="t")
    transaction.write(keyed(("a", 2)))
    transaction.prepare()
    store.begin_shared(STREAM)
    assert store.fsck() == []
    with database_of(store).write() as connection:
        connection.exec_driver_sql(damage)
    assert problem in [found.what for found in store.fsck(verify_events=False)]


def test_what_a_check_trips_over_is_a_problem_and_not_its_end() -> None:
    def check(error: Exception) -> list[str]:
        raise error

    problem = "cannot be checked, what is recorded makes no sense (TypeError: no number)"
    assert check_at("here", check, TypeError("no number")) == [("here", problem)]
    assert check_at("here", check, UsageError("is wrong")) == [("here", "is wrong")]


FOOTERS = [
    ["a", "b"],
    7,
    {"a": 1},
    [1, [["x"] * 5]],
    [1, []],
    [1, [[0, 1, 64, 1 << 63, 3]]],
    [1, [[0, -1, -64, -2, -3]]],
]


@pytest.mark.parametrize("footer", FOOTERS, ids=map(str, range(len(FOOTERS))))
def test_a_footer_of_another_shape_is_told_although_its_checksum_is_right(
    whole: tuple[Path, Events], footer: object, tmp_path: Path
) -> None:
    shutil.copytree(whole[0], tmp_path / "store")
    path = min((tmp_path / "store").rglob("*.chunk"))
    data, other = path.read_bytes(), msgspec.msgpack.encode(footer)
    size = int.from_bytes(data[-20:-16], "little")
    trailer = len(other).to_bytes(4, "little") + xxhash.xxh3_64_intdigest(other).to_bytes(8, "little") + END_MAGIC
    path.write_bytes(data[: -20 - size] + other + trailer)
    with Store.open(tmp_path / "store") as store:
        (problem,) = store.fsck()
    assert problem.where.endswith(path.name)


def test_what_is_written_while_orphans_are_looked_for_stays(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    real = store._core.storage.list

    def listed(directory: str) -> list[str]:
        with store.writer(STREAM) as writer:
            writer.append(keyed(("a", 1)))
        return real(directory)

    monkeypatch.setattr(store._core.storage, "list", listed)
    assert store.collect_orphans() == 0
    monkeypatch.undo()
    assert store.fsck() == []


@pytest.mark.parametrize("verify_events", [False, True])
def test_what_the_store_gives_up_while_it_is_checked_is_no_problem(
    store: Store, monkeypatch: pytest.MonkeyPatch, verify_events: bool
) -> None:
    """The check sees the catalogue of one moment, and files go as others truncate and abort."""
    for n in range(4):
        with store.writer(STREAM) as writer:
            writer.append(keyed(("a", n)))
    transaction = store.transactions.begin(STREAM, owner="o", epoch=1, name="t")
    transaction.write(keyed(("a", 9)))
    transaction.prepare()

    def give_up() -> None:
        store.truncate(store.tail(STREAM))
        store.transactions.abort(STREAM, "t", owner="o", epoch=1)

    real = store._core.storage.list

    def listed(directory: str) -> list[str]:
        give_up()
        return real(directory)

    monkeypatch.setattr(store._core.storage, "list", listed)
    assert store.fsck(verify_events=verify_events, on_bytes=lambda size_bytes: give_up()) == []
    assert store.events_between(store.head(STREAM)) == 0


def test_no_file_is_removed_where_something_is_damaged(whole: tuple[Path, Events], tmp_path: Path) -> None:
    """A chunk whose row is damaged seems to belong to nothing."""
    shutil.copytree(whole[0], tmp_path / "store")
    files = sorted((tmp_path / "store").rglob("*.chunk"))
    with closing(sqlite3.connect(tmp_path / "store" / CATALOGUE, isolation_level=None)) as tables:
        tables.execute("UPDATE chunks SET file = x'00ff' WHERE id = 2")
    with Store.open(tmp_path / "store") as store:
        with pytest.raises(CorruptionError, match=r"'chunks' has the bytes .* as file where text is expected"):
            store.collect_orphans()
        harmless = [problem.what for problem in store.fsck() if problem.is_harmless]
    assert harmless == ["belongs to nothing that is known (left by a crash, being written now, or of what is damaged)"]
    assert sorted((tmp_path / "store").rglob("*.chunk")) == files


def test_no_file_is_removed_where_one_is_missing(store: Store) -> None:
    with store.writer(STREAM) as writer:
        writer.append(keyed(("a", 1)))
    storage = store._core.storage
    storage.delete(*storage.list(""))
    storage.put("orphan.chunk", [b"x"])
    with pytest.raises(CorruptionError, match=r"a sound store, .* found this: is missing"):
        store.collect_orphans()
    assert storage.list("") == ["orphan.chunk"]


@pytest.mark.parametrize("payload", [wild(BATCH), message(BATCH, "zstd")], ids=["wild", "compressed"])
def test_a_part_that_would_crash_its_readers_is_damage(payload: bytes | pa.Buffer) -> None:
    """Its checksum is right: who may append may write any bytes."""
    storage = MemoryStorage("chunks")
    chunk = encode_chunk(1, [Part(0, BATCH.num_rows, (payload,))])
    storage.put("1/w/a.chunk", chunk.buffers)
    with pytest.raises(CorruptionError, match=r"1/w/a\.chunk is damaged at byte 64: expected events of"):
        read_part(storage, StoredPart(0, "1/w/a.chunk", chunk.entries[0]), BATCH.schema)


def test_what_readers_would_refuse_is_not_stored(tmp_path: Path) -> None:
    no_text = pa.StringArray.from_buffers(1, pa.py_buffer(b"\0\0\0\0\1\0\0\0"), pa.py_buffer(b"\xff"))
    batch = pa.record_batch([no_text.cast(KEYED.field("key").type, safe=False), pa.array([1])], schema=KEYED)
    with Store.open(tmp_path) as store:
        store.create_stream(STREAM, KEYED)
        with store.writer(STREAM, linger=None) as writer:
            with pytest.raises(UsageError, match=f"a batch for stream '{STREAM}' cannot be stored: .*UTF8"):
                writer.append(batch)
            writer.append(keyed(("a", 1)))
            writer.flush()
        with pytest.raises(UsageError, match="cannot be stored"):
            store.transactions.begin(STREAM, owner="p", epoch=1, name="t").write(batch)
    events, errors = read_all(tmp_path)
    assert [event for segment in events for event in segment] == [("a", 1)]
    assert set(errors) == {None}
