"""Pipelines on local Spark without any fault: every operator and connector between real workers."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

import polars as pl
import psutil
import pyarrow as pa
import pytest

from crash.support.pipelines import WORDS
from crash.support.processes import STEP_S, Life, kill
from crash.support.results import assert_clean, assert_equal, assert_standard, read_stream
from crash.support.standing import SPARK_IN_DEEP
from headgate.connectors.files.file_committer import read_committed
from headgate.store.store import Store

Spec = Callable[..., dict[str, Any]]
Run = Callable[[dict[str, Any]], Life]


@pytest.mark.spark
def test_a_windowed_count_ends_with_everything_committed_and_is_not_repeated(
    spec: Spec, run: Run, tmp_path: Path
) -> None:
    what = spec("standard", rows=100_000, rate=None)
    result = run(what).result()
    assert result["is_finished"]
    assert result["restarts"] == 0
    assert_standard(tmp_path, 100_000)
    assert_clean(tmp_path)
    again = run(what)
    again.note("has already processed all its input")
    assert again.result()["is_finished"]
    assert_standard(tmp_path, 100_000)


@pytest.mark.spark
def test_every_operator_between_real_workers(spec: Spec, run: Run, tmp_path: Path) -> None:
    rows = 3_000
    run(spec("every_operator", rows=rows)).result()
    words = pl.DataFrame({"id": range(rows)}).with_columns(word=pl.Series([WORDS[i % len(WORDS)] for i in range(rows)]))
    late = pl.DataFrame({"id": range(-rows, 0)}).with_columns(word=pl.lit("late"))
    merged = pl.concat([words, late]).filter(pl.col("word").str.len_chars() > 4)
    marked = pl.concat([merged.with_columns(word=pl.col("word").str.to_uppercase() + mark) for mark in ".!"])
    found = read_stream(tmp_path / "store", "reduced")
    assert_equal(found, marked.with_columns(even=pl.col("id") % 2 == 0), "records")
    counts = marked.select("word", n=(pl.int_range(pl.len()) + 1).over("word").cast(pl.Int64))
    assert_equal(found, counts, "running counts")
    copies = pl.concat([words.filter(pl.col("id") < 10)] * 2)
    assert_equal(read_stream(tmp_path / "store", "copies"), copies, "broadcast records")
    assert_clean(tmp_path)


@pytest.mark.spark
def test_a_dataframe_goes_in_and_a_dataframe_comes_out(spec: Spec, run: Run) -> None:
    result = run(spec("dataframes")).result()
    assert result["columns"] == ["id", "key", "text"]
    assert result["rows"] == [[i, i % 7, str(i)] for i in range(1_000) if i % 7 != 3]


def write_lines(root: Path, count: int) -> pl.DataFrame:
    lines = [f"w{i} w{i % 10}" for i in range(count)]
    with Store.open(root / "store") as store:
        store.create_stream("lines", pa.schema([("line", pa.large_string())]), segments=3)
        writer = store.writer("lines")
        for start in range(0, count, 1_000):
            writer.append(pa.record_batch({"line": pa.array(lines[start : start + 1_000], pa.large_string())}))
        writer.close()
    return pl.DataFrame({"word": [word for line in lines for word in line.split()]})


@pytest.mark.spark
def test_a_stream_feeds_another_stream(spec: Spec, run: Run, tmp_path: Path) -> None:
    expected = write_lines(tmp_path, 20_000)
    run(spec("stream_to_stream")).result()
    assert_equal(read_stream(tmp_path / "store", "words"), expected, "words")
    assert_clean(tmp_path)


@pytest.mark.spark
def test_a_stream_is_followed_until_it_is_sealed(spec: Spec, run: Run, tmp_path: Path) -> None:
    expected = write_lines(tmp_path, 2_000)
    life = run(spec("stream_to_stream", follow=True))
    life.running()
    with Store.open(tmp_path / "store") as store:
        writer = store.writer("lines")
        writer.append(pa.record_batch({"line": pa.array(["at last"], pa.large_string())}))
        writer.close()
        store.seal("lines")
    assert life.result()["is_finished"]
    more = pl.DataFrame({"word": ["at", "last"]})
    assert_equal(read_stream(tmp_path / "store", "words"), pl.concat([expected, more]), "words")


@pytest.mark.spark
def test_text_files_are_copied_line_by_line(spec: Spec, run: Run, tmp_path: Path) -> None:
    logs = tmp_path / "logs"
    logs.mkdir()
    lines = [[f"{name} line {i}" for i in range(500)] for name in ("a", "b", "c")]
    for number, content in enumerate(lines):
        (logs / f"{number}.log").write_text("\n".join(content) + "\n")
    run(spec("text_files")).result()
    expected = pl.DataFrame({"line": [line for content in lines for line in content]})
    assert_equal(read_committed(str(tmp_path / "copied")), expected, "lines")


def assert_copied(life: Life, producer: Producer, path: Path) -> None:
    """Check that the pipeline ends, and copied its own rows and the producer's once."""
    assert life.result(2 * STEP_S)["is_finished"]
    expected = pl.DataFrame({"id": [*range(ROWS), *range(FIRST, FIRST + producer.count)]})
    assert_equal(read_committed(str(path / "copied")), expected, "records")


@pytest.mark.spark
@pytest.mark.timeout(1800)
def test_killed_workers_lose_and_repeat_nothing_of_a_group(
    spec: Spec, run: Run, tmp_path: Path
) -> None:  # GS2, GS5, GS13
    what = spec("group_source", rows=ROWS, rate=1_000, tolerable_failures=20)
    producer = Producer(tmp_path / "store")
    try:
        life = run(what)
        kill(life.running()["workers"]["1"])
        again = life.running()
        life.checkpoint()
        with Store.open(tmp_path / "store") as store:
            store.split("in", 0)
            store.merge("in", [1, 2])
        life.checkpoint()
        kill(again["workers"]["0"])
        life.running()
        life.checkpoint()
    finally:
        producer.stop()
    assert_copied(life, producer, tmp_path)
    with Store.open(tmp_path / "store") as store:
        assert store.reader_group("group").unread_bytes() == 0
        assert [problem for problem in store.fsck() if not problem.is_harmless] == []


LONG = 3_000


def write(root: Path, name: str, count: int) -> None:
    (root / "in").mkdir(exist_ok=True)
    padding = "x" * 10_000 if count == LONG else ""
    rows = ({"file": name, "number": number, "padding": padding} for number in range(count))
    (root / "in" / f"{name}.json").write_text("".join(json.dumps(row) + "\n" for row in rows))


@pytest.mark.spark
@pytest.mark.parametrize("added", ["a0", "c"])
def test_a_file_that_was_added_before_the_same_command_is_read_and_no_other_is_lost(
    spec: Spec, run: Run, tmp_path: Path, added: str
) -> None:  # T10
    write(tmp_path, "a", 10)
    write(tmp_path, "b", LONG)
    what = spec("listed-files", slow=True)
    life = run(what)
    life.running()
    for _ in range(3):
        life.checkpoint()
    life.child.send({"stop": what["name"]})
    assert not life.result()["is_finished"]
    before = read_committed(str(tmp_path / "rows"))
    assert before.filter(file="a").height == 10
    assert before.height < 10 + LONG
    write(tmp_path, added, 20)
    last = run({**what, "slow": False})
    last.note("continues from checkpoint")
    assert last.result()["is_finished"]
    found = sorted(read_committed(str(tmp_path / "rows")).select("file", "number").rows())
    assert found == sorted((name, n) for name, count in (("a", 10), ("b", LONG), (added, 20)) for n in range(count))


Launch = Callable[..., Life]
ROWS = 8_000
FIRST = 1_000_000
"""Numbers in the stream begin here."""


class Producer:
    """Appends numbers until it is told to stop; then the stream is sealed."""

    def __init__(self, root: Path) -> None:
        self._root = root
        with Store.open(root) as store:
            store.create_stream("in", pa.schema({"id": pa.int64()}), segments=3, routing_key="id")
        self.count = 0
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._produce)
        self._thread.start()

    def _produce(self) -> None:
        with Store.open(self._root) as store:
            with store.writer("in") as writer:
                while not self._is_over.wait(0.01):  # the pace: not a wait for anything
                    rows = [{"id": FIRST + self.count + n} for n in range(25)]
                    writer.append(pa.RecordBatch.from_pylist(rows, schema=pa.schema({"id": pa.int64()})))
                    self.count += len(rows)
            store.seal("in")

    def stop(self) -> None:
        self._is_over.set()
        self._thread.join()


@pytest.mark.crash
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("with_spark", SPARK_IN_DEEP)
def test_a_driver_that_dies_between_hook_and_trigger_loses_nothing(
    spec: Spec, launch: Launch, tmp_path: Path, with_spark: bool
) -> None:  # EI1, KP19, SC21
    what = spec("stream_cuts", rows=ROWS, rate=1_000, tolerable_failures=20)
    producer = Producer(tmp_path / "store")
    try:
        marker = tmp_path / "killed"
        life = launch(what, with_spark=with_spark, HEADGATE_KILL_AT=f"before-trigger:3:{marker}")
        assert life.child.exit_code(2 * STEP_S) == -9, life.child.tale("not killed")
        life.child.assert_gone()
        assert marker.exists()
        life = launch(what, with_spark=with_spark)
        life.note("continues from checkpoint")
        kill(life.running()["workers"]["1"])
        life.running()
        life.checkpoint()
    finally:
        producer.stop()
    assert_copied(life, producer, tmp_path)
    with Store.open(tmp_path / "store") as store:
        assert [problem for problem in store.fsck() if not problem.is_harmless] == []


RESCALED_ROWS = 40_000


@pytest.mark.spark
def test_a_pipeline_goes_on_with_more_and_with_fewer_slots(spec: Spec, run: Run, tmp_path: Path) -> None:  # R15
    what = spec("standard", rows=RESCALED_ROWS)
    for parallelism in (2, 1):
        life = run({**what, "parallelism": parallelism})
        life.running(workers=parallelism)
        life.checkpoint()
        life.child.send({"stop": what["name"]})
        assert not life.result()["is_finished"]
    last = run({**what, "parallelism": 2})
    last.note("continues from checkpoint")
    kill(last.running()["workers"]["1"])
    assert last.result()["is_finished"]
    assert_standard(tmp_path, RESCALED_ROWS)
    assert_clean(tmp_path)


PATIENCE_S = 600
PROGRAM = """
import headgate as hg

p = hg.Pipeline("endless", parallelism=2, checkpointing=hg.Checkpointing(interval="200ms", dir="checkpoints"))
rows = p.source(hg.Generator({"k": hg.Choice(("a", "b"))}, rows_per_second=2_000), name="made")
rows.key_by("k").reduce(lambda a, b: b, name="latest").sink(hg.Discard(), name="gone")
"""


@pytest.mark.spark
def test_a_page_shows_a_pipeline_and_stops_it(tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(PROGRAM)
    command = [sys.executable, "-m", "headgate.cli", "run", "--json", "--ui", "0", "program.py"]
    environment = os.environ | {"HEADGATE_UI_TOKEN": "sesame", "HEADGATE_LOG_DIR": str(tmp_path / "logs")}
    with subprocess.Popen(command, cwd=tmp_path, env=environment, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            first = json.loads(process.stdout.readline())
            address = re.findall(r"http://[^ ]+", first["text"])[0]
            shown = until_running(address)
            assert [node["name"] for node in shown["graph"]["nodes"]] == ["made", "key-by", "latest", "gone"]
            assert shown["rates"][-1][0] > 0
            assert [worker["worker"] for worker in shown["progress"]["workers"]] == [0, 1]
            assert {worker["pid"] for worker in shown["progress"]["workers"]} <= set(psutil.pids())
            until_aligned(address, {"latest[0]", "latest[1]"})
            assert {"worker-0", "worker-1"} <= set(called(address, "api/logs")["logs"])
            assert called(address, "api/ask/stop", b"{}") == {"answer": "it stops"}
            events = [json.loads(line) for line in process.stdout]
            assert process.wait(PATIENCE_S) == 0
            assert events[-1]["outcome"] == "stopped"
        finally:
            process.kill()


def until_aligned(address: str, subtasks: set[str]) -> None:
    """Wait until some checkpoint says of each of ``subtasks`` that it waited. One of them names those that did most."""
    deadline, found = time.monotonic() + PATIENCE_S, set[str]()
    while not subtasks <= found:
        assert time.monotonic() < deadline, found
        aligned = [one["checkpoint"] for one in called(address, "api/state")["checkpoints"] if one["longest"]]
        for checkpoint in aligned:
            found |= {one["subtask"] for one in called(address, f"api/alignment/{checkpoint}")["subtasks"]}


def until_running(address: str) -> dict[str, Any]:
    deadline = time.monotonic() + PATIENCE_S
    while time.monotonic() < deadline:
        shown = called(address, "api/state")
        nodes = (shown["progress"] or {}).get("nodes", [])
        if any(one["longest"] for one in shown["checkpoints"]) and any(
            node["records_out_per_second"] > 0 for node in nodes
        ):
            return shown
        time.sleep(0.2)
    raise AssertionError("the pipeline never ran")


def called(address: str, path: str, body: bytes | None = None) -> dict[str, Any]:
    request = urllib.request.Request(address + path, body, {"Authorization": "Bearer sesame"})
    with urllib.request.urlopen(request, timeout=60) as answer:
        found: dict[str, Any] = json.load(answer)
        return found
