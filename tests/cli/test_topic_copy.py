"""``headgate streams copy`` with a topic: what it refuses before anything runs, and where it finds secrets."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

from headgate.cli import topic_copy
from headgate.cli.app import app
from headgate.connectors.kafka.security import KafkaSecurity
from headgate.errors import UsageError


def refused(*arguments: str) -> str:
    result = CliRunner().invoke(app, ["streams", "copy", *arguments])
    assert isinstance(result.exception, UsageError), result.output
    return str(result.exception)


def test_options_that_contradict_each_other_are_refused() -> None:
    assert "needs --brokers" in refused("kafka:orders", "orders")
    assert "between a topic and a stream" in refused("kafka:a", "kafka:b", "--brokers", "h:1")
    assert "--cut is for copies from stream to stream" in refused("kafka:a", "b", "--brokers", "h:1", "--cut", "x")
    assert "name it as kafka:TOPIC" in refused("a", "b", "--brokers", "h:1")
    assert "--name is for copies to or from a topic" in refused("a", "b", "--name", "x")
    assert "a pipeline" in refused("kafka:a", "b", "--brokers", "h:1", "--name", "a b")


def test_secrets_are_named_in_a_file_and_never_in_arguments(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "kafka.toml"
    file.write_text('tls = true\nmechanism = "PLAIN"\nuser = "u"\nsecret = "env:KAFKA_PASSWORD"\n')
    wanted = KafkaSecurity(tls=True, mechanism="PLAIN", user="u", secret="env:KAFKA_PASSWORD")
    assert topic_copy.read_security(file) == wanted
    file.write_text('password = "p"\n')
    monkeypatch.setenv("HEADGATE_KAFKA_SECURITY", str(file))
    assert "must have no other options than tls" in refused("kafka:a", "b", "--brokers", "h:1")
    file.write_text("tls =")
    assert "is not TOML" in refused("kafka:a", "b", "--brokers", "h:1")
    file.unlink()
    assert "cannot be read: No such file" in refused("kafka:a", "b", "--brokers", "h:1")
