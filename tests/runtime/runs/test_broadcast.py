"""Pipelines with a broadcast side, with the real driver and workers in this process (docs/spec/broadcast.md)."""

from __future__ import annotations

import json
import sys
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import polars as pl
import pyarrow as pa
import pytest
from pyspark import cloudpickle
from tests.conftest import few
from tests.runtime.running import WAIT_S, definition_of, in_flight, pipeline_at, taken
from tests.runtime.runs.test_results import events, generator, same
from tests.runtime.runs.test_unaligned import KilledAt
from tests.support.killing import run_killing

import headgate as hg
from headgate import testing
from headgate.connectors.files.file_committer import read_committed
from headgate.errors import UsageError
from headgate.model.config import RocksState
from headgate.model.plan import PipelineDefinition
from headgate.testing import EOF, PAUSE, Collect, FailOnce, ScriptedSource

EVENT = {"key": int, "n": int}
RULE = {"rule": int, "value": int}
END_MS = 1 << 52
"""Beyond all event time: a timer for it fires when all input of both sides has ended."""

Row = dict[str, Any]


def finished(pipeline: hg.Pipeline, **options: Any) -> Any:
    """Run it to its end; a busy machine takes its time."""
    return testing.run(pipeline, timeout_s=300, **options)


def folded(so_far: int, value: int) -> int:
    """What a rule becomes of a value: another thing if they come in another order."""
    return (so_far * 31 + value + 1) % 1_000_003


class Rules(hg.BroadcastProcessFunction):
    """Tells at the end, for each key, how many events it had, and what this subtask made of all rules."""

    schema = {"key": int, "events": int, "rules": str}

    def open(self, state: hg.StateHandle) -> None:
        self.events = state.value("events", int)
        self.rules = state.broadcast("rules", int, int)

    def process(self, row: Row, context: hg.ProcessContext) -> None:
        self.events.put(self.events.get(0) + 1)
        context.timers.register_event_time(END_MS)

    def process_broadcast(self, row: Row, context: hg.BroadcastContext) -> None:
        self.rules.put(row["rule"], folded(self.rules.get(row["rule"], 0), row["value"]))

    def on_timer(self, timer: hg.Timer, context: hg.ProcessContext) -> Iterator[Row]:
        if context.timers.is_end:
            yield {"key": context.key, "events": self.events.get(), "rules": json.dumps(self.rules.items())}


class BatchRules(hg.BatchBroadcastProcessFunction):
    """The same by batch."""

    schema = Rules.schema

    def open(self, state: hg.BatchStateHandle) -> None:
        self.events = state.value("events", int)
        self.rules = state.broadcast("rules", int, int)

    def process(self, batch: pl.DataFrame, context: hg.BatchContext) -> None:
        self.events.update(1, "add")
        context.timers.register_event_time(END_MS)

    def process_broadcast(self, batch: pl.DataFrame, context: hg.BroadcastContext) -> None:
        for rule, value in batch.select("rule", "value").rows():
            one = pl.Series([rule])
            self.rules.put(one, folded(self.rules.get(one)[0] or 0, value))

    def on_timer(self, timers: hg.FiredTimers, context: hg.BatchContext) -> pl.DataFrame:
        rules = json.dumps([list(row) for row in self.rules.frame().rows()])
        return context.keys.frame().with_columns(events=self.events.get(), rules=pl.lit(rules))


EVENTS = [[{"key": n % 7, "n": n} for n in range(part * 70, part * 70 + 70)] for part in range(3)]
CHANGES = [[{"rule": n % 3, "value": n} for n in range(part * 40, part * 40 + 40)] for part in range(3)]


def expected_rules(*parts: list[Row]) -> str:
    found: dict[int, int] = {}
    for row in (row for part in parts for row in part):
        found[row["rule"]] = folded(found.get(row["rule"], 0), row["value"])
    return json.dumps([list(item) for item in found.items()])


def connected(
    events: list[Any], changes: list[Any], sink: Any, function: Any = None, *more: list[Any], **options: Any
) -> hg.Pipeline:
    """Return a pipeline of events by key and rules, which may come from several sources."""
    options.setdefault("restart", hg.FixedDelay(delay="10ms"))
    options.setdefault("checkpointing", hg.Checkpointing(interval="20ms"))
    pipeline = hg.Pipeline("p", **{"parallelism": 2, **options})
    rules = [
        pipeline.source(ScriptedSource(script, schema=RULE, pause_ms=20), name=f"rules-{number}")
        for number, script in enumerate([changes, *more])
    ]
    side = rules[0].union(*rules[1:]) if more else rules[0]
    stream = pipeline.source(ScriptedSource(events, schema=EVENT, pause_ms=20), name="events")
    keyed = stream.key_by("key").connect(side.broadcast())
    keyed.process(function or Rules(), name="apply").sink(sink)
    return pipeline


def found_in(sink: Collect) -> tuple[dict[int, int], set[str]]:
    """Return the events of each key, and all the different copies of the rules."""
    rows = sink.rows()
    counts = Counter(row["key"] for row in rows)
    assert set(counts.values()) == {1}, "a key told twice"
    return {row["key"]: row["events"] for row in rows}, {row["rules"] for row in rows}


ALL_EVENTS = dict.fromkeys(range(7), 30)


def apart(script: list[list[Row]]) -> list[Any]:
    """Return a script with time for checkpoints between its parts."""
    return [script[0], PAUSE, PAUSE, script[1], PAUSE, PAUSE, script[2], EOF]


@pytest.mark.parametrize(
    ("function", "state"), few(list(product([Rules(), BatchRules()], [hg.Memory(), hg.RocksDB()])), 2)
)
def test_lost_workers_change_no_broadcast_state(tmp_path: Path, function: Any, state: Any) -> None:
    sink = Collect(tmp_path / "out")
    changes = [CHANGES[0], PAUSE, PAUSE, CHANGES[1], PAUSE, FailOnce(tmp_path / "failed"), PAUSE, CHANGES[2], EOF]
    pipeline = connected(apart(EVENTS), changes, sink, function, parallelism=3, state=state)
    run_killing(pipeline, 1)
    assert found_in(sink) == (ALL_EVENTS, {expected_rules(*CHANGES)})


def stored(directory: Path, state: str = "rules") -> pl.DataFrame:
    return hg.read_state(directory / "p", "apply", state)


def stopped_with_rules(pipeline: hg.Pipeline, directory: Path, count: int = 3) -> None:
    """Run it until a checkpoint has rules in it; then cancel it."""

    def has_rules() -> bool:
        names = hg.state_catalog(directory / "p").filter(pl.col("operator") == "apply")["state"]
        return "rules" in names and stored(directory).height == count

    with testing.running(pipeline) as handle:
        taken(handle, has_rules)


PAIRS = [(before, after) for before in (1, 2, 3, 5, 8) for after in (1, 2, 3, 5, 8) if before != after]


@pytest.mark.parametrize(("before", "after"), few(PAIRS, 2))
def test_broadcast_state_is_restored_at_any_parallelism(tmp_path: Path, before: int, after: int) -> None:
    sink, directory = Collect(tmp_path / "out"), tmp_path / "checkpoints"
    options = {"checkpointing": hg.Checkpointing(interval=None, dir=directory)}
    function, other = (Rules(), BatchRules()) if before < after else (BatchRules(), Rules())
    stopped_with_rules(
        connected([EVENTS[0], PAUSE], [CHANGES[0], PAUSE], sink, function, parallelism=before, **options), directory
    )
    going_on = connected(
        [EVENTS[0], PAUSE, *EVENTS[1:], EOF], [CHANGES[0], PAUSE, *CHANGES[1:], EOF], sink, other, **options
    )
    assert finished(going_on, parallelism=after).is_finished
    assert found_in(sink) == (ALL_EVENTS, {expected_rules(*CHANGES)})


def test_every_subtask_sees_the_records_of_several_senders_in_one_order(tmp_path: Path) -> None:
    sink = Collect(tmp_path / "out")
    several = [[*([{"rule": 0, "value": 100 * source + n}] for n in range(30)), EOF] for source in range(4)]
    pipeline = connected([*EVENTS, EOF], several[0], sink, None, *several[1:], parallelism=3)
    run_killing(pipeline, 1)
    events, copies = found_in(sink)
    assert events == ALL_EVENTS
    assert len(copies) == 1, "subtasks saw different orders"


def test_copies_are_equal_after_a_restore_at_least_once(tmp_path: Path) -> None:
    sink = Collect(tmp_path / "out")
    checkpointing = hg.Checkpointing(interval="5ms", mode="at_least_once")
    several = [[*([{"rule": n % 3, "value": 100 * source + n}] for n in range(60)), PAUSE, EOF] for source in range(4)]
    spread = [item for part in EVENTS for item in (part, PAUSE)]
    pipeline = connected(
        [*spread, EOF], several[0], sink, None, *several[1:], parallelism=3, checkpointing=checkpointing
    )
    run_killing(pipeline, 1)
    rows = sink.rows()
    assert {row["key"] for row in rows} == set(range(7))
    assert min(row["events"] for row in rows) >= 30
    last = {row["key"]: row["rules"] for row in rows}
    assert len(set(last.values())) == 1, "copies differ"


@pytest.mark.parametrize("after", few([3, 2, 5], 1))
def test_barriers_that_overtake_change_no_broadcast_state(tmp_path: Path, after: int) -> None:
    sink, directory = Collect(tmp_path / "out"), tmp_path / "checkpoints"
    changes = [{"rule": n % 3, "value": n} for n in range(120)]
    checkpointing = hg.Checkpointing(interval=None, dir=directory, alignment_timeout=0)
    first = [[[row] for row in changes[:60]], [[row] for row in changes[60:]]]
    slow = Slow(tmp_path / "slow")
    (tmp_path / "slow").touch()
    before = connected([EVENTS[0], PAUSE], [*first[0], PAUSE], sink, slow, checkpointing=checkpointing, parallelism=3)
    with testing.running(before) as handle:
        taken(handle, lambda: in_flight(directory, "apply-broadcast"))
    with pytest.raises(hg.UsageError, match="broadcast state of operator 'apply' cannot be changed in a checkpoint"):
        hg.edit_savepoint(directory / "p", tmp_path / "edited").replace("apply", "rules", stored(directory)).write()
    (tmp_path / "slow").unlink()
    going_on = connected(
        [EVENTS[0], PAUSE, *EVENTS[1:], EOF],
        [*first[0], PAUSE, *first[1], EOF],
        sink,
        Slow(tmp_path / "slow"),
        checkpointing=checkpointing,
    )
    assert finished(going_on, parallelism=after).is_finished
    assert found_in(sink) == (ALL_EVENTS, {expected_rules(changes)})


class Slow(Rules):
    """Takes its time for a rule, in each subtask another one, while a file is there."""

    def __init__(self, flag: Path) -> None:
        self.flag = flag

    def process_broadcast(self, row: Row, context: hg.BroadcastContext) -> None:
        if self.flag.exists():
            time.sleep(0.004 * (context.subtask_index + 1))  # slow work: not a wait for anything
        super().process_broadcast(row, context)


def test_the_side_goes_through_one_subtask(tmp_path: Path) -> None:
    pipeline = connected([EOF], [EOF], Collect(tmp_path / "out"))
    text = pipeline.describe()
    assert "<- rules-0, first" in text
    assert "<- apply-broadcast, broadcast" in text


def timed(pipeline: hg.Pipeline, *, is_timed: bool, rules: list[Any], sink: Any) -> hg.Pipeline:
    side = pipeline.source(ScriptedSource(rules, schema=RULE, pause_ms=20), name="rules")
    events = pipeline.source(ScriptedSource([EVENTS[0], PAUSE], schema=EVENT, pause_ms=20), name="events")
    if is_timed:
        side = side.with_timestamps("value")
    keyed = events.with_timestamps("n").key_by("key").connect(side.broadcast())
    keyed.process(Firing(), name="apply").sink(sink)
    return pipeline


class Firing(Rules):
    """Tells when event time has reached 50."""

    def process(self, row: Row, context: hg.ProcessContext) -> None:
        context.timers.register_event_time(50)

    def on_timer(self, timer: hg.Timer, context: hg.ProcessContext) -> Iterator[Row]:
        yield {"key": context.key, "events": 0, "rules": ""}


@pytest.mark.parametrize(("is_timed", "latest"), [(False, 0), (True, 60), (True, 40)])
def test_a_side_with_event_times_holds_timers_back(tmp_path: Path, is_timed: bool, latest: int) -> None:
    sink = Collect(tmp_path / "out")
    pipeline = hg.Pipeline("p", parallelism=2, checkpointing=hg.Checkpointing(interval="10ms"))
    made = timed(pipeline, is_timed=is_timed, rules=[[{"rule": 0, "value": latest}], PAUSE], sink=sink)
    deadline = time.monotonic() + WAIT_S
    with testing.running(made) as handle:
        if (is_timed, latest) == (True, 40):
            for _ in range(5):
                taken(handle)
            assert not sink.rows()
            return
        while not sink.rows() or len(sink.rows()) < 7:
            taken(handle)
            assert time.monotonic() < deadline, "event time was held back"


def test_broadcast_state_is_read_and_written_without_a_pipeline(tmp_path: Path) -> None:
    sink, directory = Collect(tmp_path / "out"), tmp_path / "checkpoints"
    checkpointing = hg.Checkpointing(interval=None, dir=directory)
    before = connected([EVENTS[0], PAUSE], [CHANGES[0], PAUSE], sink, parallelism=3, checkpointing=checkpointing)
    stopped_with_rules(before, directory)
    kinds = hg.state_catalog(directory / "p").filter(pl.col("operator") == "apply").select("state", "kind", "rows")
    assert ("rules", "broadcast map", 3) in kinds.rows()
    rules = stored(directory)
    assert rules.columns == ["map_key", "value", "_subtask"]
    assert [list(row) for row in rules.select("map_key", "value").rows()] == json.loads(expected_rules(CHANGES[0]))
    with testing.running(before) as handle:
        taken(handle)
        handle.stop(savepoint=tmp_path / "savepoint")
    edited = hg.edit_savepoint(tmp_path / "savepoint", tmp_path / "edited")
    edited.replace("apply", "rules", rules.with_columns(value=pl.lit(7))).write()
    sink = Collect(tmp_path / "again")
    after = connected([EVENTS[0], PAUSE, *EVENTS[1:], EOF], [CHANGES[0], PAUSE, EOF], sink)
    assert finished(after, restore=tmp_path / "edited").is_finished
    assert found_in(sink) == (ALL_EVENTS, {json.dumps([[rule, 7] for rule in range(3)])})


def test_bounded_input_with_an_unkeyed_side_by_side(tmp_path: Path) -> None:
    sink, pipeline = Collect(tmp_path / "out"), hg.Pipeline("p", parallelism=2)
    rules = pipeline.source(hg.FromRows([{"rule": n, "value": n} for n in range(5)]))
    events = pipeline.source(hg.FromRows([{"key": n, "n": n} for n in range(50)]))
    events.connect(rules.broadcast()).process(Told()).sink(sink)
    assert finished(pipeline).is_finished
    told = Counter(row["key"] for row in sink.rows())
    assert told == Counter({**dict.fromkeys(range(50), 1), **dict.fromkeys(range(-5, 0), 2)})


class Told(hg.BroadcastProcessFunction):
    """Every event once; every rule from every subtask."""

    schema = {"key": int}

    def process(self, row: Row, context: hg.ProcessContext) -> list[Row]:
        return [{"key": row["key"]}]

    def process_broadcast(self, row: Row, context: hg.BroadcastContext) -> list[Row]:
        return [{"key": row["rule"] - 5}]


JOINED_EVENT = {"id": int, "key": int}
TABLE = {"key": int, "name": str}
JOINED_EVENTS = [{"id": n, "key": n % 7} for n in range(140)]
ROWS = [{"key": n % 5, "name": f"{n % 5}-{n}"} for n in range(50)]
LAST = {row["key"]: row["name"] for row in ROWS}


def joined(directory: Path, events: list[Any], rows: list[Any], *, options: Any = None, **join: Any) -> hg.Pipeline:
    made: dict[str, Any] = {"parallelism": 2, "restart": hg.FixedDelay(delay="10ms"), **(options or {})}
    made.setdefault("checkpointing", hg.Checkpointing(interval="20ms"))
    pipeline = hg.Pipeline("p", **made)
    table = pipeline.source(ScriptedSource(rows, schema=TABLE, pause_ms=20), name="rows")
    stream = pipeline.source(ScriptedSource(events, schema=JOINED_EVENT, pause_ms=20), name="events")
    stream.join(table.broadcast(), on="key", **join).sink(Collect(directory / "out"))
    return pipeline


def check(directory: Path) -> None:
    found = sorted((row["id"], row["name"]) for row in Collect(directory / "out").rows())
    assert found == [(row["id"], LAST[row["key"]]) for row in JOINED_EVENTS if row["key"] in LAST]


def test_a_lost_worker_changes_nothing_while_records_wait(tmp_path: Path) -> None:
    rows = [ROWS[:20], PAUSE, PAUSE, PAUSE, FailOnce(tmp_path / "failed"), PAUSE, ROWS[20:], PAUSE, EOF]
    events = [JOINED_EVENTS[:50], PAUSE, JOINED_EVENTS[50:], EOF]
    run_killing(joined(tmp_path, events, rows, wait=True), 2)
    check(tmp_path)


@pytest.mark.parametrize("timeout", [None, 0])
@pytest.mark.parametrize(("before", "after"), few([(3, 2), (1, 5), (5, 1)], 1))
def test_what_waits_and_the_table_are_restored_at_another_parallelism(
    tmp_path: Path, before: int, after: int, timeout: Any
) -> None:
    checkpointing = hg.Checkpointing(interval=None, dir=tmp_path / "chk", alignment_timeout=timeout)
    options = {"checkpointing": checkpointing, "parallelism": before}
    with testing.running(
        joined(tmp_path, [JOINED_EVENTS[:50], PAUSE], [ROWS[:20], PAUSE], options=options, wait=True)
    ) as handle:
        taken(handle, lambda: {str(node.node): node.records_in for node in handle.progress.nodes}.get("join", 0) >= 50)
        taken(handle)
    assert not Collect(tmp_path / "out").rows()
    script = [JOINED_EVENTS[:50], PAUSE, JOINED_EVENTS[50:], EOF], [ROWS[:20], PAUSE, ROWS[20:], EOF]
    options = {"checkpointing": checkpointing, "parallelism": after}
    testing.run(joined(tmp_path, *script, options=options, wait=True), timeout_s=300)
    check(tmp_path)


def source() -> tuple[hg.Pipeline, hg.Stream, hg.Stream]:
    pipeline = hg.Pipeline("p")
    events = pipeline.source(hg.FromRows([{**row, "ms": row["id"]} for row in JOINED_EVENTS]), name="events")
    return pipeline, events, pipeline.source(hg.FromRows(ROWS), name="rows")


def test_records_wait_for_a_table_that_ends_and_keep_their_event_time(tmp_path: Path) -> None:
    pipeline, events, rows = source()
    both = events.with_timestamps("ms").join(rows.broadcast(), on="key", how="left", name="with-names")
    both.sink(Collect(tmp_path / "out"))
    testing.run(pipeline, parallelism=2, timeout_s=300)
    found = sorted((row["id"], row["name"]) for row in Collect(tmp_path / "out").rows())
    assert found == [(row["id"], LAST.get(row["key"])) for row in JOINED_EVENTS]
    assert "<- with-names-table, broadcast" in pipeline.describe()
    both.key_by("key").window(hg.Tumbling("70ms"))


def test_a_table_with_changes_loses_the_rows_that_are_deleted(tmp_path: Path) -> None:
    pipeline, events, rows = source()
    gone = rows.map(
        lambda row: {**row, "op": "delete" if row["name"] == "3-48" else "insert"}, {**TABLE, "op": str}
    ).records_as_changes("key")
    events.join(gone.broadcast(), on="key", how="semi").sink(Collect(tmp_path / "out"))
    testing.run(pipeline, timeout_s=300)
    assert {row["key"] for row in Collect(tmp_path / "out").rows()} == {0, 1, 2, 4}


def test_a_table_that_never_ends_is_seen_as_it_is(tmp_path: Path) -> None:
    pipeline = hg.Pipeline("p")
    rate = hg.Generator({"key": hg.Uniform(0, 5)}, rows_per_second=10)
    table = pipeline.source(rate, name="table")
    events = pipeline.source(hg.FromRows(JOINED_EVENTS), name="events")
    events.join(table.broadcast(), on="key", how="anti")
    with pytest.raises(UsageError, match=r"with wait=True records wait .* but its source 'table' never ends"):
        events.join(table.broadcast(), on="key", wait=True)


def test_what_cannot_be_joined_is_refused() -> None:
    _, events, rows = source()
    changes = rows.map(lambda row: row, {**TABLE, "op": str}).records_as_changes("name")
    for call, problem in (
        (lambda: events.join(rows.broadcast(), on="key", how="right"), "must be one of inner, left, semi, anti"),
        (lambda: events.join(rows.broadcast(), on="key", wait=1), "wait= must be True, False or None, not 1"),
        (lambda: events.broadcast().join(rows.broadcast(), on="key"), "both sides of the join are broadcast"),
        (lambda: events.join(changes.broadcast(), on="key"), "the table has changes of rows by 'name', so join it by"),
        (lambda: changes.join(rows.broadcast(), on="key"), "has changes"),
        (lambda: events.join(rows.broadcast(), on="name"), "the stream has no column 'name'"),
    ):
        with pytest.raises(UsageError, match=problem):
            call()


def test_a_table_joins_records_in_a_loop(tmp_path: Path) -> None:
    pipeline, events, rows = source()

    def body(loop: hg.Stream) -> Any:
        found = loop.join(rows.broadcast(), on="key", name="named")
        again = found.filter(lambda row: row["id"] >= 100)
        return again.select(pl.lit(0).cast(pl.Int64).alias("id"), "key", "ms"), found

    with pytest.raises(UsageError, match="but 'select' is in a loop"):
        events.iterate(lambda loop: (loop, loop.join(loop.select("key").broadcast(), on="key", wait=True)))
    events.iterate(body, name="loop").sink(Collect(tmp_path / "out"))
    testing.run(pipeline, parallelism=2, timeout_s=300)
    ids = [row["id"] for row in JOINED_EVENTS if row["key"] in LAST]
    again = [0 for one in ids if one >= 100]
    assert sorted(row["id"] for row in Collect(tmp_path / "out").rows()) == sorted(ids + again)


cloudpickle.register_pickle_by_value(sys.modules[__name__])  # workers do not import tests

Start = Any
RULES = 600


class Numbered(hg.BroadcastProcessFunction):
    """Numbers events by key; tells every rule, with a digest of all before it, from each subtask."""

    schema = {"key": pa.int64(), "id": pa.int64(), "n": pa.int64(), "subtask": pa.int64()}

    def open(self, state: hg.StateHandle) -> None:
        self.count = state.value("count", pa.int64())
        self.rules = state.broadcast("rules", pa.int64(), pa.int64())

    def process(self, row: dict[str, Any], context: hg.ProcessContext) -> Iterator[dict[str, Any]]:
        n = self.count.get(0) + 1
        self.count.put(n)
        yield {"key": row["key"], "id": row["id"], "n": n, "subtask": -1}

    def process_broadcast(self, row: dict[str, Any], context: hg.BroadcastContext) -> Iterator[dict[str, Any]]:
        digest = (self.rules.get(-1, 0) * 31 + row["id"] + 1) % 1_000_003
        self.rules.put(-1, digest)
        self.rules.put(row["id"] % 50, digest)
        yield {"key": -1, "id": row["id"], "n": digest, "subtask": context.subtask_index}


def told(root: Path, parallelism: int, timeout: Any) -> PipelineDefinition:
    pipeline = pipeline_at(root, parallelism=parallelism, interval="100ms", alignment_timeout=timeout)
    rules = replace(generator(RULES, splits=3), rows_per_second=150)
    source = replace(generator(6_000, splits=4), rows_per_second=1_500)
    side = pipeline.source(rules, name="rules").select("id")
    stream = pipeline.source(source, name="events").select("key", "id")
    found = stream.key_by("key").connect(side.broadcast()).process(Numbered(), name="told")
    found.sink(hg.FileSink(root / "rows", "parquet", roll_interval=0), name="rows")
    definition = definition_of(pipeline)
    return replace(definition, config=replace(definition.config, state=RocksState(16 << 20, str(root / "local"))))


@pytest.mark.timeout(900)
@pytest.mark.parametrize("timeout", few([None, 0], 1))
def test_killed_workers_tell_every_rule_once_and_alike(start: Start, tmp_path: Path, timeout: Any) -> None:
    points = (("before-snapshot", 9), ("in-restore", 3), ("after-snapshot-before-ack", 4), ("in-put", 12))
    killed = KilledAt(tmp_path, points)
    run = start(told(tmp_path, 2, timeout), prepare=killed)
    run.wait_checkpoints(2)
    run.kill(0)
    run.wait(lambda: len(killed.missing()) < len(points), "a worker died at a named point")
    run.wait_checkpoints(1)
    run.kill(1)
    assert run.result().is_finished
    rows = read_committed(str(tmp_path / "rows"))
    same(rows.filter(pl.col("subtask") < 0).select("key", "id"), events(generator(6_000, splits=4)).select("key", "id"))
    rules = rows.filter(pl.col("subtask") >= 0)
    assert rules.select("id", "subtask").is_unique().all(), "a subtask told a rule twice"
    assert rules.height == 2 * RULES
    assert rules.group_by("id").agg(pl.col("n").n_unique())["n"].max() == 1, "copies differ"
