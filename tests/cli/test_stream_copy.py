"""``headgate streams copy`` with another system: what it refuses before anything runs, and where it finds secrets."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

from headgate.cli import stream_copy
from headgate.cli.app import app
from headgate.connectors.kafka.security import KafkaSecurity
from headgate.errors import UsageError


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
