"""Functions of two keyed streams in pipelines: exactly once, by the lower watermark (docs/guide/two-streams.md)."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.killing import run_killing
from tests.operators.process.test_connected_process import Balance, BatchBalance, model
from tests.runtime.running import taken

import headgate as hg
from headgate import testing
from headgate.errors import UsageError
from headgate.model.graph import MAIN_INPUT
from headgate.operators.process.connected_process import RIGHT_INPUT
from headgate.testing import EOF, PAUSE, Collect, FailOnce, ScriptedSource

Row = dict[str, Any]
LEFT = {"customer": str, "amount": int}
RIGHT = {"n": int, "payer": str}
ORDERS = [{"customer": f"k{n % 5}", "amount": n} for n in range(60)]
PAYMENTS = [{"n": n, "payer": f"k{n % 6}"} for n in range(60)]


@pytest.mark.parametrize(
    ("function", "state"), [(Balance(), hg.Memory()), (BatchBalance(), hg.RocksDB()), (BatchBalance(), hg.Memory())]
)
def test_lost_workers_change_nothing(tmp_path: Path, function: Any, state: Any) -> None:
    sink, options = Collect(tmp_path / "out"), {"pause_ms": 20}
    failing = FailOnce(tmp_path / "failed")
    pipeline = hg.Pipeline("p", parallelism=2, state=state, checkpointing=hg.Checkpointing(interval="20ms"))
    orders = pipeline.source(
        ScriptedSource([ORDERS[:30], PAUSE, PAUSE, ORDERS[30:], EOF], schema=LEFT, **options), name="orders"
    )
    payments = pipeline.source(
        ScriptedSource([PAYMENTS[:30], PAUSE, PAUSE, failing, PAYMENTS[30:], EOF], schema=RIGHT, **options), name="paid"
    )
    both = orders.key_by("customer").connect(payments.key_by("payer"))
    both.process(function, name="balance").sink(sink)
    run_killing(pipeline, 1)
    rows = [tuple(row.values()) for row in sink.rows()]
    expected = model(
        [(MAIN_INPUT, row["customer"], row["amount"]) for row in ORDERS]
        + [(RIGHT_INPUT, row["payer"], row["n"]) for row in PAYMENTS]
    )
    assert len(rows) == sum(map(len, expected.values()))
    ends = sorted(row for row in rows if row[1] == "end")
    assert ends == sorted(of_key[-1] for of_key in expected.values())


class Firing(hg.CoProcessFunction):
    """Tells when event time has reached 50."""

    schema = {"key": int, "ms": int}

    def process_left(self, row: Row, context: hg.ProcessContext) -> None:
        context.timers.register_event_time(50)

    def process_right(self, row: Row, context: hg.ProcessContext) -> None:
        self.process_left(row, context)

    def on_timer(self, timer: hg.Timer, context: hg.ProcessContext) -> Iterator[Row]:
        yield {"key": context.key, "ms": timer.time_ms}


@pytest.mark.parametrize(("latest", "has_both"), [(40, True), (60, True), (60, False)])
def test_timers_fire_by_the_lower_watermark(tmp_path: Path, latest: int, has_both: bool) -> None:
    sink, pipeline = Collect(tmp_path / "out"), hg.Pipeline("p", checkpointing=hg.Checkpointing(interval="10ms"))
    script = [[{"key": n, "ms": n}] for n in (0, 100)]
    left = pipeline.source(ScriptedSource([*script, PAUSE], schema={"key": int, "ms": int}, pause_ms=20))
    times = [[{"key": 7, "at": n}] for n in (0, latest)]
    other = pipeline.source(ScriptedSource([*times, PAUSE], schema={"key": int, "at": int}, pause_ms=20))
    other = other.with_timestamps("at") if has_both else other
    both = left.with_timestamps("ms").key_by("key").connect(other.key_by("key")).process(Firing())
    both.sink(sink)
    with testing.running(pipeline) as handle:
        if latest == 60 and has_both:
            deadline = time.monotonic() + 300
            while len(sink.rows()) < 3:
                taken(handle)
                assert time.monotonic() < deadline, "event time was held back"
            return
        for _ in range(5):
            taken(handle)
        assert not sink.rows()


def test_event_time_goes_on_if_both_streams_have_it() -> None:
    class Same(hg.CoProcessFunction):
        side_outputs = {"at": {"key": int, "at": int}}

    pipeline = hg.Pipeline("p")
    rows = pipeline.source(hg.FromRows([{"key": 1, "ms": 1}]))
    others = pipeline.source(hg.FromRows([{"key": 1, "at": 1}]))
    left, right = rows.with_timestamps("ms").key_by("key"), others.with_timestamps("at").key_by("key")
    both = left.connect(right).process(Same())
    both.key_by("key").window(hg.Tumbling("1s"))
    both.side_output("at").key_by("key").window(hg.Tumbling("1s"))
    for one in (left.connect(others.key_by("key")), rows.key_by("key").connect(right)):
        with pytest.raises(UsageError, match="needs event times"):
            one.process(Same()).key_by("key").window(hg.Tumbling("1s"))


def test_a_stream_may_be_connected_with_itself(tmp_path: Path) -> None:
    class Both(hg.CoProcessFunction):
        schema = {"key": int, "n": int, "side": str}

        def process_left(self, row: Row, context: hg.ProcessContext) -> list[Row]:
            return [{**row, "side": "left"}]

        def process_right(self, row: Row, context: hg.ProcessContext) -> list[Row]:
            return [{**row, "side": "right"}]

    pipeline, sink = hg.Pipeline("p"), Collect(tmp_path / "out")
    rows = pipeline.source(hg.FromRows([{"key": n % 3, "n": n} for n in range(9)])).key_by("key")
    rows.connect(rows).process(Both()).sink(sink)
    testing.run(pipeline, parallelism=2, timeout_s=300)
    assert sorted((row["n"], row["side"]) for row in sink.rows()) == [
        (n, side) for n in range(9) for side in ("left", "right")
    ]


def test_a_null_key_is_a_bad_record_on_both_sides(tmp_path: Path) -> None:
    bad = Collect(tmp_path / "bad")
    pipeline = hg.Pipeline("p", bad_records=hg.DeadLetter(bad))
    orders = pipeline.source(ScriptedSource([[*ORDERS[:3], {"customer": None, "amount": 1}], EOF], schema=LEFT))
    payments = pipeline.source(ScriptedSource([[*PAYMENTS[:3], {"n": 1, "payer": None}], EOF], schema=RIGHT))
    both = orders.key_by("customer").connect(payments.key_by("payer")).process(Balance(), name="balance")
    both.sink(Collect(tmp_path / "out"))
    testing.run(pipeline, timeout_s=300)
    assert len(bad.rows()) == 2
    assert len(Collect(tmp_path / "out").rows()) == 9


def test_functions_and_streams_that_do_not_fit_are_refused() -> None:
    pipeline = hg.Pipeline("p")
    rows = pipeline.source(hg.FromRows([{"key": 1, "name": "a"}]))
    one, two = rows.key_by("key"), rows.key_by("key", "name")
    with pytest.raises(UsageError, match=r"equally many key columns, but their keys are \(key\) and \(key, name\)"):
        one.connect(two).process(hg.CoProcessFunction())
    with pytest.raises(UsageError, match="'key' is int64 and 'name' is"):
        one.connect(rows.key_by("name")).process(hg.CoProcessFunction())
    with pytest.raises(UsageError, match="is a function of two keyed streams; connect them"):
        one.process(Balance())

    class Foreign(hg.CoProcessFunction):
        def process_element1(self, row: Row, context: Any) -> None: ...

    with pytest.raises(UsageError, match="the method is called process_left"):
        one.connect(one).process(Foreign())
    with pytest.raises(UsageError, match="CoProcessFunction is needed for two keyed streams"):
        one.connect(one).process(hg.BroadcastProcessFunction())
