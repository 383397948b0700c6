"""``Hybrid``: several sources one after the other, with restarts, rescaling and kills at every moment."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import polars as pl
import pytest
from tests.support.killing import run_killing

import headgate as hg
from headgate import testing
from headgate.connectors.base import HoldContext, PartsReader, SourceContext
from headgate.model.ids import CheckpointId, Generation
from headgate.testing import EOF, PAUSE, Collect, FailOnce, ScriptedSource, check_source

ROW = {"x": int, "t": int}


def rows(start: int, end: int) -> list[dict[str, Any]]:
    return [{"x": x, "t": x * 1_000} for x in range(start, end)]


def three(**options: Any) -> hg.Hybrid:
    first = hg.FromRows(rows(0, 5), splits=3, batch_rows=2)
    second = hg.FromRows(rows(5, 6), batch_rows=2)
    return hg.Hybrid(first, second, hg.FromRows(rows(6, 12), splits=2, batch_rows=2))


def test_it_conforms_at_every_restart_and_rescaling() -> None:
    found = check_source(three())
    assert sorted(row["x"] for row in found) == list(range(12))


def test_it_conforms_with_files_and_a_source_without_records(tmp_path: Path) -> None:
    for name, text in (("a", "1\n2\n"), ("b", "3\n")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "file.txt").write_text(text)
    empty = tmp_path / "none"
    empty.mkdir()
    (empty / "file.txt").write_text("")
    source = hg.Hybrid(hg.TextFiles(tmp_path / "a"), hg.TextFiles(empty), hg.TextFiles(tmp_path / "b"))
    assert sorted(row["line"] for row in check_source(source, (1, 2))) == ["1", "2", "3"]


def opened(source: hg.Hybrid, index: int = 0, parallelism: int = 1, positions: Any = None) -> Any:
    return source.open(SourceContext("p", "n", index, parallelism, positions))


def read(reader: Any) -> list[int]:
    found: list[int] = []
    while (polled := reader.poll()) is not None:
        found += polled.batch.column("x").to_pylist()
    return found


def test_a_hybrid_in_a_hybrid_stands_for_its_sources(tmp_path: Path) -> None:
    first, second, third = (hg.FromRows([{"n": n}]) for n in range(3))
    pipeline, sink = hg.Pipeline("nested"), Collect(tmp_path)
    pipeline.source(hg.Hybrid(hg.Hybrid(first, second), third)).sink(sink)
    testing.run(pipeline)
    assert [row["n"] for row in sink.rows()] == [0, 1, 2]


def test_a_source_begins_only_when_it_is_said_so() -> None:
    reader = opened(three(), 1, 2)
    assert isinstance(reader, PartsReader)
    assert read(reader) == [1, 2]
    assert reader.ended_parts == 1
    assert not reader.is_finished()
    assert reader.splits() == []
    assert read(reader) == []
    reader.begin_part(1)
    assert reader.ended_parts == 2, "it has nothing to read there"
    reader.begin_part(1)
    reader.begin_part(2)
    assert not reader.is_finished()
    assert read(reader) == [9, 10, 11]
    assert reader.is_finished()
    reader.begin_part(3)
    assert reader.is_finished()


def test_positions_say_which_source_is_read() -> None:
    reader = opened(three())
    read(reader)
    reader.begin_part(1)
    again = opened(three(), positions=reader.positions())
    assert read(again) == [5]
    again.begin_part(2)
    assert read(opened(three(), positions=again.positions())) == list(range(6, 12))


class Endless(hg.FromRows):
    def how_to_end(self) -> str | None:
        return "give end="


def test_what_cannot_be_read_one_after_the_other_is_refused() -> None:
    bounded = hg.FromRows(rows(0, 1))
    with pytest.raises(hg.UsageError, match="two sources or more"):
        hg.Hybrid(bounded)
    with pytest.raises(hg.UsageError, match=r"source 1 of Hybrid never ends, .*; give end="):
        hg.Hybrid(Endless(rows(0, 1)), bounded)
    with pytest.raises(hg.UsageError, match="a source such as"):
        hg.Hybrid(bounded, "topic")  # type: ignore[arg-type]
    assert hg.Hybrid(bounded, Endless(rows(0, 1))).how_to_end() == "give end="
    other = hg.Hybrid(bounded, hg.FromRows([{"y": 1}]))
    with pytest.raises(hg.UsageError, match=r"source 1 has x: int64, t: int64, source 2 has y: int64; give each"):
        hg.Pipeline("p").source(other)


class Held(hg.FromRows):
    """Remembers what it was asked to hold."""

    holds = True

    def __init__(self) -> None:
        super().__init__(rows(0, 1))
        self.asked: list[Sequence[Mapping[str, bytes]]] = []

    def hold(self, context: HoldContext, needed: Sequence[Mapping[str, bytes]]) -> None:
        self.asked.append(needed)


def test_input_is_held_until_it_was_read() -> None:
    first, second = Held(), Held()
    source = hg.Hybrid(first, second)
    context = HoldContext("p", "n", "life", Generation(1))
    source.hold(context, [])
    source.hold(context, [{"begun/0": b"0", "0/0": b"a"}])
    source.hold(context, [{"begun/0": b"0", "0/0": b"b"}, {"begun/0": b"1", "1/0": b"c"}])
    source.hold(context, [{"begun/0": b"1", "1/0": b"d"}])
    assert first.asked == [[], [{"0": b"a"}], [{"0": b"b"}]]
    assert second.asked == [[], [], [], [{"0": b"d"}]]


class Published(hg.FromRows):
    """Remembers what it was asked to publish."""

    publishes = True

    def __init__(self) -> None:
        super().__init__(rows(0, 1))
        self.asked: list[tuple[Mapping[str, bytes], bool]] = []

    def publish(
        self, context: HoldContext, checkpoint: CheckpointId | None, positions: Mapping[str, bytes], *, begins: bool
    ) -> None:
        self.asked.append((positions, begins))


def test_positions_are_published_for_the_source_that_is_read() -> None:
    first, second = Published(), Published()
    source = hg.Hybrid(first, second)
    context, one = HoldContext("p", "n", "life", Generation(1)), CheckpointId(1)
    assert source.publishes
    source.publish(context, None, {}, begins=True)
    source.publish(context, one, {"begun/0": b"0", "0/0": b"a"}, begins=False)
    source.publish(context, one, {"begun/0": b"1", "1/0": b"c"}, begins=False)
    source.publish(context, one, {"begun/0": b"1", "1/0": b"d"}, begins=True)
    assert first.asked == [({}, True), ({"0": b"a"}, False)]
    assert second.asked == [({}, True), ({"0": b"c"}, False), ({"0": b"d"}, True)]


class Hooked(Held):
    """Changes nothing outside in a run that only looks."""

    def without_hook(self) -> hg.FromRows:
        return hg.FromRows(rows(0, 1))


def test_a_run_that_only_looks_changes_nothing_outside() -> None:
    source = hg.Hybrid(hg.FromRows(rows(0, 1)), Hooked())
    assert not source.without_hook().holds
    assert source.holds


def scripts(flag: Path | None = None) -> hg.Hybrid:
    failing = [] if flag is None else [FailOnce(flag)]
    first = ScriptedSource([*rows(0, 3), EOF], [*rows(3, 6), PAUSE, PAUSE, *rows(6, 9), EOF], schema=ROW, pause_ms=50)
    late = [*rows(12, 15), PAUSE, *failing, PAUSE, *rows(15, 18), EOF]
    second = ScriptedSource([*rows(9, 12), PAUSE, EOF], late, schema=ROW, pause_ms=50)
    return hg.Hybrid(first, second)


SEEN: list[int] = []


def noted(row: dict[str, Any]) -> bool:
    SEEN.append(row["x"])
    return True


def pipeline_of(source: Any, out: Any) -> hg.Pipeline:
    pipeline = hg.Pipeline(
        "p", parallelism=2, checkpointing=hg.Checkpointing(interval="10ms"), restart=hg.FixedDelay(delay="1ms")
    )
    pipeline.source(source).filter(noted).sink(out)
    return pipeline


def test_all_subtasks_read_the_first_source_to_its_end_before_the_next(tmp_path: Path) -> None:
    SEEN.clear()
    out = Collect(tmp_path / "out")
    testing.run(pipeline_of(scripts(), out), timeout_s=300)
    assert sorted(row["x"] for row in out.rows()) == list(range(18))
    assert set(SEEN[:9]) == set(range(9))


@pytest.mark.parametrize("kill", [1, 2])
def test_kills_around_the_switch_lose_and_repeat_nothing(tmp_path: Path, kill: int) -> None:
    out = Collect(tmp_path / "out")
    run_killing(pipeline_of(scripts(tmp_path / "failed"), out), kill)
    assert sorted(row["x"] for row in out.rows()) == list(range(18))


def test_event_time_goes_on_in_the_next_source(tmp_path: Path) -> None:
    out = Collect(tmp_path / "out")
    pipeline = hg.Pipeline("p", parallelism=2, checkpointing=hg.Checkpointing(interval="10ms"))
    timed = pipeline.source(scripts()).with_timestamps("t", out_of_orderness="20s").with_columns(k=pl.lit(1))
    timed.key_by("k").window(hg.Tumbling("6s")).agg(n=pl.len()).sink(out)
    testing.run(pipeline, timeout_s=300)
    assert [row["n"] for row in out.rows()] == [6, 6, 6]


def test_other_sources_are_refused_at_the_next_start(tmp_path: Path) -> None:
    first, second = hg.FromRows(rows(0, 3)), hg.FromRows(rows(3, 6))
    directory = tmp_path / "state"

    def run(*sources: hg.FromRows) -> None:
        testing.run(
            pipeline_of(hg.Hybrid(*sources), Collect(tmp_path / "out")), checkpoint_dir=directory, timeout_s=300
        )

    run(first, second)
    run(first, second)
    for changed in ((second, first), (first, second, second)):
        with pytest.raises(hg.HeadgateError, match="hybrid: "):
            run(*changed)
