"""``headgate streams read`` and ``tail`` (docs/spec/stream-clients.md, CL1 and CL2)."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from tests.cli.streams.test_commands import run
from tests.store.storing import KEYED, STREAM, keyed
from typer.testing import CliRunner

from headgate.cli import app as cli
from headgate.errors import StorageError
from headgate.store.follower import StreamFollower
from headgate.store.store import Store

PATIENCE_S = 120.0
"""Nothing is measured by it: a test that hangs fails."""


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Store]:
    monkeypatch.setenv("HEADGATE_STORE", str(tmp_path / "store"))
    with Store.open() as opened:
        opened.create_stream(STREAM, KEYED, segments=2, routing_key="key")
        yield opened


def write(store: Store, *numbers: int) -> None:
    with store.writer(STREAM, linger=None) as writer:
        writer.append(keyed(*((f"k{number % 5}", number) for number in numbers)))


def values(printed: str) -> list[int]:
    return [json.loads(line)["value"] for line in printed.splitlines()]


@contextlib.contextmanager
def headgate(*arguments: str) -> Iterator[subprocess.Popen[str]]:
    """A process of the command line."""
    command = [sys.executable, "-m", "headgate.cli.app", *arguments]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def test_places_are_chosen(store: Store) -> None:  # CL1
    write(store, *range(10))
    cut = str(store.tail(STREAM))
    store.resize(STREAM, 3)
    write(store, *range(10, 20))
    assert sorted(values(run("read", STREAM))) == list(range(20))
    assert sorted(values(run("read", STREAM, "--cut", cut))) == list(range(10, 20))
    assert sorted(values(run("read", STREAM, "--end", cut))) == list(range(10))
    assert values(run("read", STREAM, "--key", "k3")) == [3, 8, 13, 18]
    assert values(run("read", STREAM, "--start", "latest")) == []
    assert values(run("read", STREAM, "--at", "2001-01-01", "--key", "k1", "-n", "2")) == [1, 6]
    assert len(values(run("read", STREAM, "-n", "7"))) == 7
    assert run("read", STREAM, "-n", "0") == ""
    assert "begin once" in run("read", STREAM, "--cut", cut, "--start", "latest", code=2)
    assert "does not go with --follow" in run("read", STREAM, "--end", cut, "-f", code=2)
    assert "no routing key" in run("read", "plain", "--key", "a", code=2) if store.create_stream("plain", KEYED) else 0
    assert "is no stream cut" in run("read", STREAM, "--cut", "here", code=2)


def test_the_last_events_of_each_segment(store: Store) -> None:
    assert run("tail", STREAM) == ""
    write(store, *range(100))
    store.resize(STREAM, 1)
    assert run("tail", STREAM) == ""
    write(store, *range(100, 120))
    assert values(run("tail", STREAM, "-n", "3")) == [117, 118, 119]
    assert values(run("tail", STREAM, "--key", "k2", "-n", "5")) == [117]
    assert run("tail", STREAM, "-n", "1", "--format", "text") == "k4\t119\n"
    store.seal(STREAM)
    assert values(run("tail", STREAM, "-f", "-n", "2")) == [118, 119]


def test_lines_of_text_are_json_if_asked_for(store: Store) -> None:
    run("write", "log", "--create", text="one\n")
    assert run("read", "log", "--json") == '{"line": "one"}\n'
    assert run("tail", "log") == "one\n"


@pytest.mark.run
def test_following_prints_what_comes_while_the_stream_changes(store: Store) -> None:  # CL1
    write(store, 1)
    with headgate("streams", "tail", "-f", STREAM) as process:
        assert process.stdout is not None
        printed = [json.loads(process.stdout.readline())]
        write(store, 2)
        printed.append(json.loads(process.stdout.readline()))
        store.resize(STREAM, 4)
        store.update_stream(STREAM, columns=pa.schema({"note": pa.large_string()}))
        wide = store.find(STREAM).schema
        with store.writer(STREAM) as writer:
            writer.append(pa.RecordBatch.from_pylist([{"key": "k2", "value": 7, "note": "new"}], schema=wide))
        printed.append(json.loads(process.stdout.readline()))
        store.seal(STREAM)
        assert process.wait(PATIENCE_S) == 0
    assert printed == [{"key": "k1", "value": 1}, {"key": "k2", "value": 2}, {"key": "k2", "value": 7, "note": "new"}]


@pytest.mark.run
def test_following_ends_quietly(store: Store) -> None:  # CL2
    write(store, 1)
    with headgate("streams", "read", "-f", STREAM) as process:
        assert process.stdout is not None
        assert process.stdout.readline()
        process.send_signal(signal.SIGINT)
        assert (process.wait(PATIENCE_S), process.communicate()) == (0, ("", ""))
    write(store, *range(60_000))
    with headgate("streams", "read", STREAM) as process:  # more than a pipe holds
        assert process.stdout is not None
        assert process.stdout.readline()
        process.stdout.close()
        assert process.stderr is not None
        assert (process.wait(PATIENCE_S), process.stderr.read()) == (0, "")
    assert os.environ["HEADGATE_STORE"]


@pytest.mark.parametrize("becomes_another", [False, True])
def test_a_ctrl_c_that_a_library_swallowed_ends_it_too(
    store: Store, monkeypatch: pytest.MonkeyPatch, becomes_another: bool
) -> None:  # CL2
    write(store, 1)
    real, reads = StreamFollower.read, []

    def read(self: StreamFollower, *given: Any, **more: Any) -> Any:
        reads.append(more["timeout"])
        if len(reads) == 1:
            with contextlib.suppress(KeyboardInterrupt):
                os.kill(os.getpid(), signal.SIGINT)
                time.sleep(60)  # the signal comes at once: not a wait for anything
            if becomes_another:
                raise StorageError("read", "catalogue", "user-defined function raised exception")
        assert len(reads) < 3, "it goes on"
        return real(self, *given, **more)

    monkeypatch.setattr(StreamFollower, "read", read)
    before = signal.getsignal(signal.SIGINT)
    result = CliRunner().invoke(cli.app, ["streams", "read", "-f", STREAM])
    assert (result.exit_code, result.exception, reads) == (0, None, ["1s"])
    assert signal.getsignal(signal.SIGINT) == before
