"""``headgate streams copy`` with another system: what it refuses before anything runs, and where it finds secrets."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tests.cli.test_streams import run
from tests.store.storing import KEYED, STREAM, drained, keyed
from typer.testing import CliRunner

from headgate.cli import stream_copy
from headgate.cli.app import app
from headgate.connectors.kafka.connection import KafkaSecurity
from headgate.errors import StorageError, UsageError
from headgate.store.store import Store
from headgate.store.transactions import TransactionWriter


def refused(*arguments: str) -> str:
    result = CliRunner().invoke(app, ["streams", "copy", *arguments])
    assert isinstance(result.exception, UsageError), result.output
    return str(result.exception)


def test_options_that_contradict_each_other_are_refused() -> None:
    assert "needs --brokers" in refused("kafka:orders", "orders")
    assert "between a stream of the store and kafka:a" in refused("kafka:a", "kafka:b", "--brokers", "h:1")
    assert "use a pipeline to pravega:s/b" in refused("kafka:a", "pravega:s/b", "--brokers", "h:1")
    assert "--cut is for copies from stream to stream" in refused("kafka:a", "b", "--brokers", "h:1", "--cut", "x")
    assert "name a topic as kafka:TOPIC" in refused("a", "b", "--brokers", "h:1")
    assert "--name is for copies to or from Kafka or Pravega" in refused("a", "b", "--name", "x")
    assert "--segments is for copies to or from Kafka or Pravega" in refused("a", "b", "--segments", "2")
    assert "--segments is for copies to or from Pravega" in refused("kafka:a", "b", "--segments", "2")
    assert "a pipeline" in refused("kafka:a", "b", "--brokers", "h:1", "--name", "a b")
    assert "needs --controller HOST:PORT" in refused("a", "pravega:s/b")
    assert "--partitions is for copies to or from Kafka" in refused("a", "pravega:s/b", "--partitions", "2")
    assert "--cut is for copies from stream to stream" in refused("a", "pravega:s/b", "--cut", "x")
    assert "'scope/stream', not 'b'" in refused("pravega:b", "a", "--controller", "h:1")
    assert "--segments is for a stream of Pravega that is written" in refused(
        "pravega:s/b", "a", "--controller", "h:1", "--segments", "2"
    )


def test_secrets_are_named_in_a_file_and_never_in_arguments(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "kafka.toml"
    file.write_text('tls = true\nmechanism = "PLAIN"\nuser = "u"\nsecret = "env:KAFKA_PASSWORD"\n')
    wanted = KafkaSecurity(tls=True, mechanism="PLAIN", user="u", secret="env:KAFKA_PASSWORD")
    assert stream_copy.read_security(file) == wanted
    file.write_text('password = "p"\n')
    monkeypatch.setenv("HEADGATE_KAFKA_SECURITY", str(file))
    assert "must have no other options than tls" in refused("kafka:a", "b", "--brokers", "h:1")
    file.write_text("tls =")
    assert "is not TOML" in refused("kafka:a", "b", "--brokers", "h:1")
    file.unlink()
    assert "cannot be read: No such file" in refused("kafka:a", "b", "--brokers", "h:1")


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
