"""Stores that earlier releases wrote go on as they were."""

from __future__ import annotations

import shutil
import sqlite3
from pathlib import Path

import pytest
from tests.store.storing import STREAM, drained, keyed

from headgate.errors import CorruptionError, UsageError
from headgate.protocol.store.transactions import Status
from headgate.store.store import Store

GOLDEN = Path(__file__).parents[1] / "golden"
OWNER = "pipe/sink"


@pytest.fixture
def old(tmp_path: Path) -> Path:
    return Path(shutil.copytree(GOLDEN / "store_0_1", tmp_path / "store"))


def version_of(root: Path) -> str:
    connection = sqlite3.connect(root / "catalogue.sqlite")
    try:
        return str(connection.execute("SELECT value FROM meta WHERE key = 'version'").fetchone()[0])
    finally:
        connection.close()


def name(checkpoint: int, subtask: int, generation: int) -> str:
    return f"{OWNER}/checkpoint-{checkpoint}/subtask-{subtask}/generation-{generation}"


def test_a_store_of_version_0_1_keeps_its_events_outcomes_fences_and_writers(old: Path) -> None:
    assert version_of(old) == "1"
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
    assert version_of(old) == "2"
    with Store.open(old) as again:
        assert again.fsck() == []


def test_a_store_of_a_later_version_is_refused_with_one_sentence(old: Path) -> None:
    Store.open(old).close()
    connection = sqlite3.connect(old / "catalogue.sqlite")
    connection.execute("UPDATE meta SET value = '3'")
    connection.commit()
    connection.close()
    with pytest.raises(UsageError, match=r"has version 3, this Headgate reads up to 2; upgrade Headgate"):
        Store.open(old)
    assert version_of(old) == "3"
