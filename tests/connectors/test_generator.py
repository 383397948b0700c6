""""""

from __future__ import annotations

import math

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pyspark import cloudpickle
from tests.connectors.source_reading import context, read_all, read_over_subtasks
from tests.support.clocks import HandClock

from headgate.connectors.base import SourceContext, SplitPosition
from headgate.connectors.generator import Choice, Generator, GeneratorReader, RowNumber, Uniform
from headgate.errors import CorruptionError, UsageError
from headgate.testing.source_kit import check_source


def small(**options: object) -> Generator:
    defaults: dict[str, object] = {"rows": 100, "pool_rows": 16, "batch_rows": 7, "time": "deterministic"}
    columns = {"n": RowNumber(), "key": Uniform(-5, 5), "word": Choice(("a", "b"))}
    return Generator(**{"columns": columns, **defaults, **options})  # type: ignore[arg-type]


@pytest.mark.long
def test_it_passes_the_conformance_kit() -> None:
    rows = check_source(small(), parallelisms=(1, 2))
    assert [row["n"] for row in rows] == list(range(100))
    assert all(-5 <= row["key"] < 5 for row in rows)


@pytest.mark.parametrize("splits", [1, 3, 8])
def test_records_do_not_depend_on_splits_or_subtasks(splits: int) -> None:
    expected = read_over_subtasks(small(splits=1), 1)
    for parallelism in (1, 2, 5):
        found = read_over_subtasks(small(splits=splits), parallelism)
        assert sorted(found, key=lambda row: row["n"]) == expected


def test_values_are_frozen() -> None:
    rows = read_over_subtasks(small(rows=6), 1)
    assert [(row["key"], row["word"]) for row in rows] == FROZEN
    assert [row["ts"].microsecond for row in rows] == [1_000 * n for n in range(6)]


FROZEN = [(-4, "b"), (3, "a"), (0, "a"), (1, "a"), (1, "b"), (-2, "b")]


@given(st.integers(0, 20), st.integers(1, 3), st.integers(1, 3))
def test_splits_of_the_first_start_survive_another_parallelism(polls: int, before: int, after: int) -> None:
    source = small()
    rows, positions = [], {}
    for index in range(before):
        reader = source.open(context(index, before))
        for _ in range(polls):
            batch = reader.poll()
            rows += batch.batch.to_pylist() if batch is not None else []
        positions |= reader.positions()
    for index in range(after):
        rows += read_all(source.open(context(index, after, positions)))[0]
    assert sorted(row["n"] for row in rows) == list(range(100))


def test_the_rate_is_that_of_all_subtasks_together_and_missed_input_is_limited() -> None:
    clock = HandClock()
    source = small(rows=None, rows_per_second=1_000, batch_rows=64)
    readers = [GeneratorReader(source, context(index, 2), clock) for index in range(2)]
    delivered = [0, 0]
    for _ in range(1_000):
        clock.advance(2)
        for index, reader in enumerate(readers):
            batch = reader.poll()
            delivered[index] += 0 if batch is None else batch.batch.num_rows
    assert delivered == [pytest.approx(1_000, abs=4)] * 2
    assert 0 < readers[0].wakeup_ms() <= 5
    clock.advance(3_600_000)
    burst = sum(batch.batch.num_rows for _ in range(100) if (batch := readers[0].poll()) is not None)
    assert burst == 500


def test_processing_time_is_when_the_record_was_made() -> None:
    reader = GeneratorReader(Generator(rows=10, pool_rows=8, batch_rows=8), context(), HandClock(date_ms=12_345))
    rows = read_all(reader)[0]
    assert {row["ts"].timestamp() if row["ts"].tzinfo else row["ts"].microsecond for row in rows} == {345_000}
    assert list(rows[0]) == ["key", "value", "ts"]


def test_no_poll_copies_a_column() -> None:
    reader = Generator(timestamp=None, pool_rows=1_024, batch_rows=256).open(context())
    first, second = reader.poll(), reader.poll()
    assert first is not None
    assert second is not None
    assert second.batch.column(0).buffers()[1].address == first.batch.column(0).buffers()[1].address


def test_wrong_use_is_refused() -> None:
    for options, message in (
        ({"splits": 0}, r"Generator\(splits=0\) must be positive"),
        ({"splits": 1.5}, r"Generator\(splits=1.5\) must be positive, a whole number"),
        ({"rows": -1}, "must not be negative"),
        ({"rows": "5"}, r"Generator\(rows='5'\) must not be negative, and a whole number"),
        ({"rows": True}, "must not be negative, and a whole number"),
        *(({"rows_per_second": rate}, "must be positive") for rate in (0, "5", True, math.nan, math.inf)),
        ({"time": "now"}, "must be 'processing' or 'deterministic'"),
        ({"timestamp": "key"}, "two columns 'key'"),
        ({"columns": {}, "timestamp": None}, "no column"),
        ({"columns": {"x": Uniform(3, 3)}}, "is empty"),
        ({"columns": {"x": Choice(())}}, "at least one value"),
        (
            {"columns": {"x": ["a", "b"]}},
            r"column 'x' must be Uniform\(...\), Choice\(...\) or RowNumber",
        ),
    ):
        with pytest.raises(UsageError, match=message):
            small(**options).schema()
    with pytest.raises(CorruptionError):
        small().open(context(positions={"garbage": b""}))
    with pytest.raises(CorruptionError):
        small().open(context(positions={"0 of 1": b"short"}))


def test_identity_changes_with_the_values_and_not_with_the_rate() -> None:
    assert small().identity() == small(rows_per_second=5, rows=7).identity()
    assert len({small().identity(), small(seed=1).identity(), small(pool_rows=17).identity()}) == 3


def test_it_travels() -> None:
    copy = cloudpickle.loads(cloudpickle.dumps(small()))
    assert copy.schema() == pa.schema(
        [("n", pa.int64()), ("key", pa.int64()), ("word", pa.large_string()), ("ts", pa.timestamp("us"))]
    )


def test_progress_is_the_records_delivered_of_those_that_there_will_be() -> None:
    reader = Generator({"n": RowNumber()}, rows=10, splits=2, batch_rows=3).open(context())
    reader.poll()
    assert reader.progress() == {"0 of 2": SplitPosition(3, 5), "1 of 2": SplitPosition(0, 5)}
    endless = Generator({"n": RowNumber()}, splits=1, batch_rows=3).open(context())
    assert endless.progress() == {"0 of 1": SplitPosition(0)}, "what has no end has no lag"


@pytest.mark.parametrize("step_ms", [3_600_000, -3_600_000])
def test_setting_the_date_changes_neither_the_pace_nor_the_times_of_records(step_ms: int) -> None:
    source = Generator(rows_per_second=1_000, pool_rows=64, batch_rows=64)
    clock = HandClock(passed_ms=77, date_ms=1_700_000_000_000)
    reader = GeneratorReader(source, SourceContext("p", "source", 0, 1, None), clock)
    made = []
    for _ in range(100):
        clock.advance(20, date_step_ms=step_ms)
        batch = reader.poll()
        assert batch is not None
        made.append((batch.batch.num_rows, int(batch.batch["ts"].cast(pa.int64())[0].as_py()) // 1_000))
    assert made == [(20, 1_700_000_000_000 + 20 * turn) for turn in range(1, 101)]
