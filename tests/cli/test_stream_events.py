"""``headgate streams write``, and how all commands answer programs (docs/spec/stream-clients.md)."""

from __future__ import annotations

import contextlib
import io
import json
import os
import signal
import sqlite3
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import closing
from itertools import pairwise
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
import typer.main
from rich.console import Console
from tests.cli.test_streams import run
from tests.store.storing import KEYED, STREAM, keyed
from typer.testing import CliRunner

from headgate.cli import app as cli
from headgate.cli import stream_events, streams
from headgate.cli.output import progress_bar
from headgate.cli.streams import app
from headgate.errors import StorageError
from headgate.store.follower import StreamFollower
from headgate.store.store import Store


@pytest.fixture(autouse=True)
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HEADGATE_STORE", str(tmp_path / "store"))
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setattr(streams, "QUIET_S", 0.001)
    return tmp_path / "store"


def lines(first: int, last: int) -> str:
    return "".join(f"{number}\n" for number in range(first, last))


def test_writing_the_same_again_writes_what_is_new(tmp_path: Path) -> None:
    run("create", "log", "--segments", "1")
    run("write", "log", "--writer-id", "w", text=lines(0, 5))
    for _ in range(2):
        told = json.loads(run("write", "log", "--writer-id", "w", "--json", text=lines(0, 8)))
    assert told == {"stream": "log", "events": 0, "already_there": 8}
    assert run("read", "log") == lines(0, 8)
    run("write", "log", "--writer-id", "other", text=lines(8, 10))
    assert run("read", "log") == lines(0, 10)
    (tmp_path / "a").write_text(lines(0, 3))
    (tmp_path / "b").write_text(lines(3, 6))
    files = str(tmp_path / "a"), str(tmp_path / "b")
    for _ in range(2):
        run("write", "files", "--create", "--writer-id", "w", *files)
    assert len(run("read", "files").splitlines()) == 6


def test_what_was_killed_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """However the input is cut into blocks, before and after: events are numbered, not blocks."""
    run("create", "log", "--segments", "1")
    cuts = iter([(4, 9), (2, 7, 12), (1,)])
    text = lines(0, 10) + lines(10, 16)

    def blocks(file: io.BytesIO) -> list[bytes]:
        given = file.read().splitlines(keepends=True)
        bounds = [0, *next(cuts), len(given)]
        return [b"".join(given[begin:end]) for begin, end in pairwise(bounds) if begin < end]

    monkeypatch.setattr(stream_events, "line_blocks", blocks)
    real = stream_events._append
    left = [2]

    def dies(writer: object, batch: object, **options: bool) -> None:
        left[0] -= 1
        if left[0] < 0:
            raise KeyboardInterrupt
        real(writer, batch, **options)  # type: ignore[arg-type]

    with monkeypatch.context() as patch:
        patch.setattr(stream_events, "_append", dies)
        run("write", "log", "--writer-id", "w", text=text, code=130)
    assert run("read", "log") == lines(0, 9), "what was flushed is there"
    assert json.loads(run("write", "log", "--writer-id", "w", "--json", text=text))["already_there"] == 9
    assert run("read", "log") == text
    run("write", "log", "--writer-id", "w", text=text)
    assert run("read", "log") == text


def test_every_command_answers_in_json(root: Path) -> None:
    """One JSON object a line, and nothing else, of every command that does something."""

    def told(*arguments: str, text: str = "", code: int = 0) -> list[dict[str, object]]:
        return [json.loads(line) for line in run(*arguments, "--json", text=text, code=code).splitlines()]

    assert told("create", STREAM, "--columns", "k:string", "--routing-key", "k")[0]["segments"] == 4
    assert told("write", STREAM, text='{"k":"a"}\n') == [{"stream": STREAM, "events": 1, "already_there": 0}]
    assert told("read", STREAM) == told("tail", STREAM) == [{"k": "a"}]
    assert told("list")[0] == told("describe", STREAM)[0]
    cut = told("cut", STREAM)[0]
    assert cut["cut"] == run("cut", STREAM).strip()
    assert told("update", STREAM, "--columns", "n:int")[0]["schema_version"] == 1
    assert told("scale", STREAM, "--segments", "2")[0]["before"] == 4
    assert told("scaling", STREAM, "--bytes-per-second", "1MB")[0]["scaling"]
    assert told("retention", STREAM, "--retention-age", "7 days")[0]["retention"] is not None
    assert told("groups", "create", "g", STREAM)[0]["group"] == "g"
    assert told("groups", "checkpoint", "g", "c")[0]["is_complete"] is True
    assert told("groups", "forget", "g", "c") == [{"group": "g", "checkpoint": "c"}]
    assert told("groups", "reset", "g", "--start", "latest", "--yes")[0]["unread_bytes"] == 0
    assert told("groups", "delete", "g", "--yes") == [{"group": "g"}]
    with Store.open(root) as store:
        store.hold(store.head(STREAM), holder="h")
        ids = [store.begin_shared(STREAM).id for _ in range(2)]
        store.transaction(STREAM, ids[0]).prepare()
    assert {one["state"] for one in told("transactions", "list")} == {"open", "prepared"}
    assert told("transactions", "show", STREAM, ids[0])[0]["id"] == ids[0]
    assert told("transactions", "commit", STREAM, ids[0], "--yes")[0]["events"] == 0
    assert told("transactions", "abort", STREAM, ids[1], "--yes")[0]["id"] == ids[1]
    assert told("transactions", "expire", STREAM) == [{"stream": STREAM, "aborted": [], "overdue": []}]
    assert told("release", STREAM, "h") == [{"stream": STREAM, "holder": "h"}]
    assert told("truncate", STREAM, "--cut", str(cut["cut"]), "--yes")[0]["events_removed"] == 1
    assert told("check", "--repair", "--remove-orphans")[0]["problems"] == 0
    with Store.open(root) as store:
        store.transactions.begin(STREAM, owner="p/sink", epoch=1, name="t").prepare()
    assert told("forget", "p/sink", "--abort-prepared", "--yes") == [{"owner": "p/sink", "aborted": 1}]
    assert told("seal", STREAM) == [{"stream": STREAM, "is_sealed": True}]
    assert told("delete", STREAM, "--yes")[0]["stream"] == STREAM


def test_every_command_can_answer_in_json() -> None:
    def without(command: object, name: str) -> list[str]:
        inner = getattr(command, "commands", None)
        if inner is not None:
            return [found for word, one in inner.items() for found in without(one, f"{name} {word}")]
        options = [option for parameter in command.params for option in parameter.opts]  # type: ignore[attr-defined]
        return [] if "--json" in options else [name]

    assert without(typer.main.get_command(app), "streams") == []


def test_damage_is_told_in_json(root: Path) -> None:
    run("write", "log", "--create", text="a\n")
    (chunk,) = (root / "chunks").rglob("*.chunk")
    chunk.unlink()
    found = json.loads(run("check", "--json", code=1))
    assert found["problems"] == 2
    assert {problem["is_harmless"] for problem in found["found"]} == {False}


def test_a_check_of_the_command_line_goes_on_behind_a_damaged_stream(root: Path) -> None:
    for name in ("a", "b"):
        run("write", name, "--create", text="a\n")
    with closing(sqlite3.connect(root / "catalogue.sqlite", isolation_level=None)) as tables:
        tables.execute("UPDATE streams SET schema = x'00', segments_count = 'many' WHERE name = 'a'")
        tables.execute("DELETE FROM segments WHERE stream_id = 2")
    found = json.loads(run("check", "--json", code=1))["found"]
    told = [problem["what"] for problem in found if not problem["is_harmless"]]
    assert any("its table 'streams' has 'many' as segments_count where a number is expected" in what for what in told)
    assert "b" in [problem["where"] for problem in found]
    run("check", "--remove-orphans", code=1)
    assert len(list((root / "chunks").rglob("*.chunk"))) == 2


def test_progress_is_for_terminals() -> None:
    shown = {}
    for is_terminal in (False, True):
        console = Console(file=io.StringIO(), force_terminal=is_terminal)
        with progress_bar("writing log", 100, console=console) as one:
            one.advance(40)
        shown[is_terminal] = console.file.getvalue()  # type: ignore[attr-defined]
    assert shown[False] == ""
    assert "writing log" in shown[True]


def test_a_check_tells_how_much_it_has_read(root: Path) -> None:
    run("write", "log", "--create", text=lines(0, 1_000))
    read: list[int] = []
    with Store.open(root) as store:
        assert store.fsck(on_bytes=read.append) == []
        size = store.describe("log").size_bytes
    assert size < sum(read) <= 2 * size


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
    command = [sys.executable, "-m", "headgate.cli", *arguments]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def test_places_are_chosen(store: Store) -> None:
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
def test_following_prints_what_comes_while_the_stream_changes(store: Store) -> None:
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
def test_following_ends_quietly(store: Store) -> None:
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
) -> None:
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
