"""Stores that earlier releases wrote go on as they were."""

from __future__ import annotations

import datetime as dt
import shutil
import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from tests.store.storing import STREAM, drain, drained, keyed

from headgate.environment import SYSTEM_CLOCK
from headgate.errors import CorruptionError, StorageError, UsageError
from headgate.model.ids import Generation
from headgate.model.pipeline_identity import Life, Owner
from headgate.protocol.store.layouts import first_layout
from headgate.protocol.store.transactions import Status
from headgate.store.catalogue import versions
from headgate.store.catalogue.records import GroupStart
from headgate.store.policies import Retention
from headgate.store.routing import hash_column
from headgate.store.store import Store

GOLDEN = Path(__file__).parents[2] / "golden"
OWNER = "pipe/sink"


@pytest.fixture(params=["store_0_1", "store_2"])
def old(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    return Path(shutil.copytree(GOLDEN / request.param, tmp_path / "store"))


@contextmanager
def tables_of(root: Path) -> Iterator[sqlite3.Connection]:
    connection = sqlite3.connect(root / "catalogue.sqlite")
    try:
        with connection:
            yield connection
    finally:
        connection.close()


def version_of(root: Path) -> str:
    with tables_of(root) as connection:
        return str(connection.execute("SELECT value FROM meta WHERE key = 'version'").fetchone()[0])


def raise_store(root: Path) -> None:
    """Change something."""
    with Store.open(root) as store:
        store.fence("anybody", 1)


def name(checkpoint: int, subtask: int, generation: int) -> str:
    return f"{OWNER}/checkpoint-{checkpoint}/subtask-{subtask}/generation-{generation}"


def test_a_store_of_an_older_version_keeps_its_events_outcomes_fences_and_writers(old: Path) -> None:  # CT3
    assert version_of(old) in ("1", "2")
    with Store.open(old) as store:
        assert store.fsck() == []
        assert len(drained(store)) == 6 + 6 + 1
        assert store.describe("app/done").is_sealed
        statuses = {info.name: info.status for info in store.list_transactions()}
        assert statuses[name(4, 0, 1)] is Status.ABORTED
        assert statuses[name(5, 0, 2)] is statuses["batch-2"] is Status.PREPARED
        store.commit_transactions([(STREAM, name(3, i, 1)) for i in (0, 1)], owner=OWNER, epoch=2)
        store.commit_transactions([(STREAM, name(5, 0, 2))], owner=OWNER, epoch=2)
        with pytest.raises(CorruptionError, match="aborted"):
            store.commit_transactions([(STREAM, name(4, 0, 1))], owner=OWNER, epoch=2)
        store.commit_transactions([(STREAM, "batch-2")], owner="mine", epoch=7)
        writer = store.writer(STREAM, writer_id="importer", epoch=3)
        assert writer.next_sequence == 4
        writer.append(keyed(("a", 4)))
        writer.close()
        assert len(drained(store)) == 13 + 3
    assert version_of(old) == "9"
    with Store.open(old) as again:
        assert again.fsck() == []


def test_events_of_a_store_of_version_6_have_one_schema_that_can_be_updated(tmp_path: Path) -> None:  # CT3, S76
    root = Path(shutil.copytree(GOLDEN / "store_6", tmp_path / "store"))
    assert version_of(root) == "6"
    with Store.open(root) as store:
        assert store.fsck() == []
        before = drained(store)
        assert len(before) == 10
        assert store.describe(STREAM).schema_version == 0
        store.update_stream(STREAM, columns=pa.schema([("value", pa.int64()), ("note", pa.large_string())]))
        store.commit_transactions([(STREAM, "batch-2")], owner="mine", epoch=7)
        assert drained(store) == sorted([*((*row, None) for row in before), ("a", 5, None)])
        assert store.fsck() == []
    assert version_of(root) == "9"
    raised = shape(root)
    Store.open(tmp_path / "new").close()
    assert raised == shape(tmp_path / "new")


def test_a_store_of_version_7_goes_on_and_can_have_reader_groups(tmp_path: Path) -> None:  # CT3, RG16
    root = Path(shutil.copytree(GOLDEN / "store_7", tmp_path / "store"))
    assert version_of(root) == "7"
    with Store.open(root) as store:
        assert store.fsck() == []
        assert len(drained(store)) == 9
        assert list(store.holds(STREAM)) == ["somebody"]
        store._catalogue.create_group("g", [STREAM], GroupStart(), 1)
        assert list(store.holds(STREAM)) == ["reader group g", "somebody"]
        assert store.fsck() == []
    assert version_of(root) == "9"
    raised = shape(root)
    Store.open(tmp_path / "new").close()
    assert raised == shape(tmp_path / "new")


def test_a_store_of_version_8_goes_on_and_can_have_shared_transactions(tmp_path: Path) -> None:  # CT3, TX15
    root = Path(shutil.copytree(GOLDEN / "store_8", tmp_path / "store"))
    with Store.open(root) as store:
        assert store.fsck() == []
        assert len(drained(store)) == 6
        assert store.reader_groups() == ["billing"]
        assert {x.name: (x.status, x.begun_ms, x.participants) for x in store.list_transactions()} == {
            "batch-1": (Status.COMMITTED, None, ()),
            "batch-2": (Status.PREPARED, None, ()),
        }
        assert version_of(root) == "8"  # looking changes nothing
        transaction = store.begin_shared(STREAM)
        with transaction.writer("a") as writer:
            writer.write(keyed(("g", 9)))
        transaction.commit()
        store.commit_transactions([(STREAM, "batch-2")], owner="mine", epoch=7)
        assert len(drained(store)) == 9
        assert store.fsck() == []
    assert version_of(root) == "9"
    raised = shape(root)
    Store.open(tmp_path / "new").close()
    assert raised == shape(tmp_path / "new")


def test_a_release_of_version_6_that_has_a_raised_store_open_fails_instead_of_misreading_it(
    tmp_path: Path,
) -> None:  # CT6
    root = Path(shutil.copytree(GOLDEN / "store_6", tmp_path / "store"))
    with tables_of(root) as of_an_older_release:
        of_an_older_release.execute("SELECT path FROM chunks").fetchall()
        raise_store(root)
        with pytest.raises(sqlite3.OperationalError, match="no such column"):
            of_an_older_release.execute("SELECT path FROM chunks")
        with pytest.raises(sqlite3.OperationalError, match="no column named path"):
            of_an_older_release.execute("INSERT INTO chunks (stream_id, path, size_bytes) VALUES (1, 'x', 1)")


def test_a_store_of_version_2_keeps_the_lives_of_its_owners(tmp_path: Path) -> None:  # LV3
    root = Path(shutil.copytree(GOLDEN / "store_2", tmp_path / "store"))
    with Store.open(root) as store:
        assert store.owner(OWNER) == Owner(Life("life", "/checkpoints", "host", 1_700_000_000_000), Generation(2))


def test_segments_of_an_older_version_get_the_keys_that_their_events_have(old: Path) -> None:  # CT6
    with Store.open(old) as store:
        for stream in store.list_streams():
            layout = store.layout(stream.name)
            assert (stream.layout_epoch, layout) == (0, first_layout(stream.segments_count))
        segments = store.layout(STREAM).present
        for segment, events in zip(segments, drain(store), strict=True):
            hashes = hash_column(pa.array([key for key, _ in events], pa.large_string()))
            assert events
            assert all(segment.key_low <= h >> 32 < segment.key_high for h in hashes.tolist())


def shape(root: Path) -> dict[str, list[Any]]:
    """Columns and indices of every table."""
    with tables_of(root) as connection:
        tables = [row[0] for row in connection.execute("SELECT name FROM sqlite_master WHERE type = 'table'")]
        return {
            f"{pragma} {table}": connection.execute(f"PRAGMA {pragma}({table})").fetchall()
            for table in sorted(tables)
            for pragma in ("table_info", "index_list")
        }


def test_the_tables_of_a_raised_store_are_those_of_a_new_one(old: Path, tmp_path: Path) -> None:  # CT3
    raise_store(old)
    Store.open(tmp_path / "new").close()
    assert shape(old) == shape(tmp_path / "new")


def test_raising_that_fails_half_way_changes_nothing_and_is_repeated(
    old: Path, monkeypatch: pytest.MonkeyPatch
) -> None:  # CT3
    before = shape(old)

    def fail(*_: object) -> None:
        raise StorageError("write", "catalogue", "no space left")

    with Store.open(old) as store:
        with monkeypatch.context() as patch:
            patch.setattr(versions, "insert_segments", fail)
            with pytest.raises(StorageError):
                store.fence("anybody", 1)
        assert shape(old) == before
        store.fence("anybody", 1)
        assert version_of(old) == "9"
        assert store.fsck() == []


def test_an_older_release_that_has_a_raised_store_open_fails_instead_of_misreading_it(old: Path) -> None:  # CT6
    with tables_of(old) as of_an_older_release:
        of_an_older_release.execute("SELECT segment, end_position FROM segments").fetchall()
        raise_store(old)
        for what in ("parts", "prepared_parts", "segments"):
            with pytest.raises(sqlite3.OperationalError, match="no such column"):
                of_an_older_release.execute(f"SELECT segment FROM {what}")


def test_an_older_store_that_lacks_a_segment_is_not_raised(old: Path) -> None:
    with tables_of(old) as connection:
        connection.execute("DELETE FROM segments WHERE segment = 1")
    before = version_of(old)
    with pytest.raises(CorruptionError, match=r"segments 0 to \d of stream \d"):
        Store.open(old)
    assert version_of(old) == before


def test_a_store_of_a_later_version_is_refused_with_one_sentence(old: Path) -> None:
    Store.open(old).close()
    with tables_of(old) as connection:
        connection.execute("UPDATE meta SET value = '10' WHERE key = 'version'")
    with pytest.raises(UsageError, match=r"has version 10, this Headgate reads up to 9; upgrade Headgate"):
        Store.open(old)
    assert version_of(old) == "10"


def test_what_an_older_release_wrote_counts_from_the_moment_in_which_it_was_raised(old: Path) -> None:  # S66, S71
    before = dt.datetime.fromtimestamp(SYSTEM_CLOCK.wall_ms() / 1_000, dt.UTC)
    with Store.open(old) as store:
        store.set_retention(STREAM, Retention(age="1 hour"))
        assert store.retain(STREAM) == store.head(STREAM) == store.cut_at(STREAM, before)
        assert len(drained(store)) == 13
        after = dt.datetime.fromtimestamp(SYSTEM_CLOCK.wall_ms() / 1_000 + 1, dt.UTC)
        assert store.cut_at(STREAM, after) == store.tail(STREAM)
        truncated = store.truncate(store.tail(STREAM))
        assert truncated == store.tail(STREAM)
        assert drained(store) == []
        assert store.fsck() == []
