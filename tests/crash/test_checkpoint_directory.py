"""Checkpoints that are damaged, rotated, removed or published, and storage that fails (F9, F10, F11; I4)."""

from __future__ import annotations

import errno
import json
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from crash.support.processes import STEP_S, Life, kill, until
from crash.support.results import assert_clean, assert_equal, assert_standard, expected_standard, read_rows, read_stream
from crash.support.standing import SPARK_IN_DEEP
from headgate.runtime.checkpoints.log import CheckpointLog
from headgate.storage.urls import open_storage
from headgate.store.store import Store
from headgate.store.streams import TEXT_SCHEMA, Retention

pytestmark = [pytest.mark.crash, pytest.mark.timeout(1800)]


Spec = Callable[..., dict[str, Any]]
Run = Callable[[dict[str, Any]], Life]


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-7])


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 0x10
    path.write_bytes(data)


def newest_snapshot(root: Path, name: str) -> Path:
    """Return a file of the newest checkpoint."""
    directory = sorted((root / "checkpoints" / name).glob("chk-*"))[-1]
    return sorted(directory.iterdir())[0]


def newest_manifest(root: Path, name: str) -> Path:
    return sorted((root / "checkpoints" / name / "log").iterdir())[-1]


def run_and_stop(run: Run, what: dict[str, Any]) -> list[str]:
    """Run until another checkpoint, stop; return the notes."""
    life = run(what)
    life.running()
    life.checkpoint(2)
    life.child.send({"stop": what["name"]})
    life.result()
    return [e["text"] for e in life.seen("note")]


DAMAGES = [
    (truncate, newest_snapshot),
    (flip, newest_snapshot),
    (Path.unlink, newest_snapshot),
    (flip, newest_manifest),
    (truncate, newest_manifest),
    (Path.unlink, newest_manifest),
]


@pytest.mark.spark
def test_each_damage_is_named_and_the_checkpoint_before_it_used(spec: Spec, run: Run, tmp_path: Path) -> None:
    """The user chose to go back: the default is to stop."""
    what = spec("standard", rows=60_000, rate=12_000, inline_bytes_max=0, interval="100ms", on_damaged="previous")
    run_and_stop(run, what)
    for damage, find in DAMAGES:
        victim = find(tmp_path, what["name"])
        damage(victim)
        notes = run_and_stop(run, what)
        named = [n for n in notes if "cannot be used: " in n and victim.name in n]
        assert named, (damage, victim, notes)
        assert any("continues from checkpoint" in n for n in notes), notes
    life = run(what)
    assert life.result()["is_finished"]
    log = CheckpointLog(open_storage(str(tmp_path / "checkpoints")), what["name"])
    assert log.files.aside()
    log.discard_aside()  # what was gone back past is kept until somebody removes it (R51)
    # What the damaged checkpoints had committed comes again (K18), but nothing is lost and nothing is half restored.
    found = read_stream(tmp_path / "store", "out/rows")
    expected = expected_standard(60_000)["rows"]
    assert expected.join(found, on=expected.columns, how="anti").is_empty()
    assert found.join(expected, on=expected.columns, how="anti").is_empty()
    assert_clean(tmp_path)


@pytest.mark.spark
def test_a_pipeline_whose_every_checkpoint_is_damaged_does_not_start(spec: Spec, run: Run, tmp_path: Path) -> None:
    what = spec("standard", rows=60_000, inline_bytes_max=0)
    run_and_stop(run, what)
    victims = [p for d in (tmp_path / "checkpoints" / what["name"]).glob("chk-*") for p in d.iterdir()]
    for victim in victims:
        flip(victim)
    before = read_stream(tmp_path / "store", "out/rows")
    life = run(what)
    error = life.failed()
    assert error["is_usage"] is False or "cannot be restored" in error["error"]
    assert "no sound checkpoint is left" in error["error"]
    assert any(victim.name in error["error"] for victim in victims)
    assert read_stream(tmp_path / "store", "out/rows").equals(before)


def fail_while(control: Path, part: str, operations: list[str], number: int, until_seen: Callable[[], Any]) -> None:
    """Let storage fail until the pipeline has reported it."""
    control.write_text(json.dumps({"errno": number, "part": part, "operations": operations}))
    try:
        until_seen()
    finally:
        control.unlink()


@pytest.mark.spark
def test_storage_that_fails_for_a_while_is_reported_and_costs_nothing(
    spec: Spec, run: Run, tmp_path: Path, storage_fault: Path
) -> None:
    what = spec("standard", rows=60_000, inline_bytes_max=0, gate=None)
    life = run(what)
    running = life.running()
    life.checkpoint()
    no_space = "No space left on device"
    fail_while(storage_fault, "/chk-", ["put"], errno.ENOSPC, lambda: life.note(no_space))
    life.checkpoint(2)
    fail_while(storage_fault, "_staging", ["put"], errno.ENOSPC, lambda: life.note(no_space))
    life.checkpoint(2)
    fail_while(storage_fault, "/log/", ["put_if_absent", "get"], errno.EIO, lambda: life.note("Input/output error"))
    life.checkpoint(2)
    everything = ["put", "put_if_absent", "get", "list", "rename_if_absent"]
    # but not what sinks write to: a commit that fails is repeated, and no checkpoint fails meanwhile
    fail_while(storage_fault, str(tmp_path / "checkpoints"), everything, errno.EIO, life.restart)
    life.running(after=running["generation"])
    assert life.result()["is_finished"]
    assert_standard(tmp_path, 60_000)
    assert_clean(tmp_path)


SERIES = ("web.log", "mail.log")
LINES = 500


class Logs:
    """Two programs that log, and logrotate with its default: rename, then make anew under the same name."""

    def __init__(self, root: Path) -> None:
        self.directory = root / "logs"
        self.directory.mkdir()
        self.store = root / "store"
        self.written: list[str] = []

    def write(self, *, finished: bool = True) -> None:
        """Append to both files; ``finished``: the last line has its end."""
        for name in SERIES:
            lines = [f"{name} {len(self.written) + number}" for number in range(LINES)]
            self.written += lines
            with (self.directory / name).open("a") as file:
                file.write("\n".join(lines) + ("\n" if finished else ""))

    def end_lines(self) -> None:
        for name in SERIES:
            with (self.directory / name).open("a") as file:
                file.write("\n")

    def rotate(self) -> None:
        for name in SERIES:
            for number in range(9, 0, -1):
                older = self.directory / f"{name}.{number}"
                if older.exists():
                    older.rename(self.directory / f"{name}.{number + 1}")
            (self.directory / name).rename(self.directory / f"{name}.1")
            (self.directory / name).touch()

    def found(self) -> list[str]:
        return sorted(read_stream(self.store, "lines")["line"].to_list())

    def wait_until_read(self, life: Life) -> None:
        """Every line that is written was committed: once."""

        def is_there() -> bool:
            life.checkpoint()
            return len(self.found()) >= len(self.written)

        until(is_there, f"{len(self.written)} lines in the stream")
        assert self.found() == sorted(self.written)


@pytest.mark.spark
def test_every_line_comes_once_though_logs_are_rotated_workers_killed_and_the_pipeline_stopped(
    spec: Spec, run: Run, tmp_path: Path
) -> None:
    logs = Logs(tmp_path)
    logs.write()
    what = spec("followed_files")
    life = run(what)
    running = life.running()
    logs.wait_until_read(life)

    logs.write()  # read by nobody yet, or in part
    logs.rotate()
    logs.write()
    kill(next(iter(running["workers"].values())))
    life.restart()
    running = life.running(after=running["generation"])
    logs.rotate()  # once more, while the next workers look for the first of the renamed files
    logs.write(finished=False)
    logs.end_lines()
    logs.wait_until_read(life)

    life.child.send({"stop": what["name"]})
    life.result()
    logs.write()  # nobody reads
    logs.rotate()
    logs.write()
    logs.rotate()
    logs.write()
    life = run({**what, "parallelism": 1})
    life.running(workers=1)
    logs.wait_until_read(life)

    life.child.send({"drain": what["name"]})
    assert life.result()["is_finished"]
    assert logs.found() == sorted(logs.written)
    assert_clean(tmp_path)


# Rules: F1


WORDS = 3


@contextmanager
def producing(root: Path, is_over: threading.Event) -> Iterator[list[int]]:
    """Append numbered lines until it is over, then seal the stream; gives how many there were."""
    counts = [0]

    def produce() -> None:
        with Store.open(root) as store:
            with store.writer("lines") as writer:
                while not is_over.wait(0.01):  # the pace: not a wait for anything
                    lines = [" ".join(f"{n}-{word}" for word in range(WORDS)) for n in range(counts[0], counts[0] + 20)]
                    writer.append(pa.record_batch([pa.array(lines, pa.large_string())], schema=TEXT_SCHEMA))
                    counts[0] += 20
            store.seal("lines")

    thread = threading.Thread(target=produce)
    thread.start()
    try:
        yield counts
    finally:
        is_over.set()
        thread.join()


def found_words(store: Store) -> Counter[str]:
    found: Counter[str] = Counter()
    for segment in range(store.describe("words").segments_count):
        reader = store.reader("words", segment)
        while (batch := reader.read()) is not None:
            found.update(batch.column("word").to_pylist())
    return found


@pytest.mark.spark
def test_workers_are_killed_while_the_input_is_truncated(
    spec: Callable[..., dict[str, Any]], run: Callable[[dict[str, Any]], Life], tmp_path: Path
) -> None:
    is_over = threading.Event()
    with Store.open(tmp_path / "store") as store:
        store.create_stream("lines", TEXT_SCHEMA, segments=3)
        with producing(tmp_path / "store", is_over) as counts:
            life = run(spec("stream_to_stream", follow=True))
            generation = 0
            for _ in range(3):
                running = life.running(after=generation)
                generation = running["generation"]
                life.checkpoint()
                store.set_retention("lines", Retention(age="1ms"))
                before = sum(store.head("lines").positions.values())
                until(lambda: sum(store.retain("lines").positions.values()) > before, "the input to be truncated")  # noqa: B023
                kill(next(iter(running["workers"].values())))
                life.restart()
            is_over.set()
            life.result()
        expected = Counter(f"{n}-{word}" for n in range(counts[0]) for word in range(WORDS))
        assert found_words(store) == expected
        assert store.describe("lines").events_count < counts[0]
        assert [problem for problem in store.fsck() if not problem.is_harmless] == []


# Rules: F3, F23


Launch = Callable[..., Life]
ROWS = 16_000


def assert_published(root: Path, rows: int) -> None:
    """Every row is public, and committed once."""
    assert sorted(int(path.name) for path in (root / "public").iterdir()) == list(range(rows))
    assert_equal(read_rows(root), expected_standard(rows)["rows"], "rows")


@pytest.mark.parametrize("with_spark", SPARK_IN_DEEP)
def test_a_driver_killed_behind_the_final_manifest_has_everything_published_by_the_next_start(
    spec: Spec, launch: Launch, tmp_path: Path, with_spark: bool
) -> None:
    """All is committed with the final checkpoint, and nobody was told: the next start tells."""
    what = spec("publishing", rows=4_000, rate=8_000, interval="1h", gate=None)
    marker = tmp_path / "killed"
    first = launch(what, with_spark=with_spark, HEADGATE_KILL_AT=f"after-manifest:1:{marker}")
    assert first.child.exit_code(2 * STEP_S) == -9, first.child.tale("it was not killed")
    first.child.assert_gone()
    assert list((tmp_path / "public").iterdir()) == [], "nobody was told"
    life = launch(what, with_spark=with_spark)
    life.note("notified once more")
    result = life.result(2 * STEP_S)
    assert result["is_finished"]
    assert life.child.exit_code() == 0
    assert_published(tmp_path, 4_000)
    assert_clean(tmp_path)
