"""``headgate streams copy`` (docs/spec/stream-clients.md)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tests.cli.test_streams import run
from tests.store.storing import KEYED, STREAM, drained, keyed

from headgate.errors import StorageError
from headgate.store.store import Store
from headgate.store.transactions import TransactionWriter


@pytest.fixture(autouse=True)
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HEADGATE_STORE", str(tmp_path / "store"))
    with Store.open() as store:
        store.create_stream(STREAM, KEYED, segments=2, routing_key="key")
        write(store, 0, 20)
        store.resize(STREAM, 3)
        write(store, 20, 40)
    return tmp_path / "store"


def write(store: Store, first: int, last: int) -> None:
    with store.writer(STREAM, linger=None) as writer:
        writer.append(keyed(*((f"k{number % 5}", number) for number in range(first, last))))


def in_order(store: Store, stream: str, last: int) -> None:
    """Each event is there once, and those of a key in order."""
    assert sorted(number for _, number in drained(store, stream)) == list(range(last))
    for key in range(5):
        found = [
            row["value"] for one in store.follow(stream, end="latest", key=f"k{key}") for row in one.batch.to_pylist()
        ]
        assert found == sorted(found)


def test_a_copy_has_the_order_of_each_key_and_the_next_one_goes_on(root: Path, tmp_path: Path) -> None:
    other = str(tmp_path / "other")
    told = json.loads(run("copy", STREAM, "kept/events", "--to-store", other, "--json"))
    assert told["events"] == 40
    with Store.open(root) as store:
        write(store, 40, 50)
        store.resize(STREAM, 1)
        write(store, 50, 60)
    assert run("copy", STREAM, "kept/events", "--to-store", other, "--cut", told["cut"]).startswith("20 events of")
    with Store.open(other) as store:
        in_order(store, "kept/events", 60)
        assert store.find("kept/events").routing_key == "key"
        assert store.fsck() == []
    assert json.loads(run("copy", STREAM, "one-key", "--key", "k3", "--json"))["events"] == 12
    assert json.loads(run("copy", STREAM, "first", "--end", told["cut"], "--json"))["events"] == 40
    assert "into itself" in run("copy", STREAM, STREAM, code=2)
    run("create", "other/columns")
    assert "columns" in run("copy", STREAM, "other/columns", code=2)


def test_a_copy_that_fails_leaves_nothing(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real, left = TransactionWriter.write, [2]

    def fails(self: TransactionWriter, *args: Any) -> None:
        left[0] -= 1
        if left[0] < 0:
            raise StorageError("write", "disk", "no space left")
        real(self, *args)
        self.flush()

    with monkeypatch.context() as patch:
        patch.setattr(TransactionWriter, "write", fails)
        assert "no space left" in run("copy", STREAM, "kept", code=1)
    with Store.open(root) as store:
        assert drained(store, "kept") == []
        assert [info.status.value for info in store.list_transactions(stream="kept")] == ["aborted"]
        assert store.fsck() == []
    run("copy", STREAM, "kept")
    with Store.open(root) as store:
        in_order(store, "kept", 40)
