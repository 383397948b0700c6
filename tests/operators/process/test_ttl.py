"""State with a TTL at its edges: declarations, moments of expiry, clocks that were set, snapshots, changed TTLs."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import polars as pl
import pyarrow as pa
import pytest
from tests.operators.harness import BORN_MS, Harness
from tests.operators.process.expiring_functions import FORMS, SCHEMA
from tests.state.backends import EACH, Chosen, choose

import headgate as hg
from headgate.codec.snapshot import decode_sections, encode_sections
from headgate.errors import CorruptionError, UsageError
from headgate.operators.base import OperatorSpec, RestoredState
from headgate.operators.process.connected_process import process_spec
from headgate.operators.specs import state_text
from headgate.state.memory.column_backend import MemoryColumnBackend
from headgate.state.memory.ttl import ExpiringCells
from headgate.state.rocksdb.ttl import ExpiringTables
from headgate.state.ttl import EXPIRES_COLUMN, TTL_SECTION

each = pytest.mark.parametrize("form", sorted(FORMS))


@pytest.fixture(autouse=True, params=EACH)
def _unswept(request: pytest.FixtureRequest) -> Iterator[None]:
    with unswept(), choose(request.param):
        yield


@contextmanager
def unswept() -> Iterator[None]:
    """Nothing is swept: what has expired is there, and must not be seen."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ExpiringCells, "sweep", lambda self: None)
        patch.setattr(MemoryColumnBackend, "_drop_some_that_expired", lambda self: None)
        patch.setattr(ExpiringTables, "sweep", lambda self: iter(()))
        yield


def spec_of(form: str, ttl: hg.TTL | None) -> OperatorSpec:
    return process_spec("node", ("key",), FORMS[form](ttl), SCHEMA)


def harness(form: str, duration: str | None = "10ms", update: Any = "write", states: Any = (), **more: Any) -> Harness:
    spec = spec_of(form, None if duration is None else hg.TTL(duration, update))
    return Harness(spec, states, worker=Chosen.worker, **more)


def do(run: Harness, *operations: str, key: int = 1, m: int = 0, n: int = 7) -> list[str]:
    """Do operations on a key in one batch; return what each of them saw."""
    rows = [{"key": key, "do": one, "m": m, "n": n} for one in operations]
    run.send(pa.RecordBatch.from_pylist(rows, SCHEMA))
    found = [row["seen"] for row in run.out.rows()]
    run.out.batches.clear()
    return found


ALL = ("value get", "list get", "map items")
PUT = ("value put", "list append", "map put")
THERE = ["7", "[7]", "[(0, 7)]"]
GONE = ["None", "[]", "[]"]


def sections_of(state: RestoredState) -> dict[str, memoryview]:
    return dict(decode_sections(state.payload, "test"))


def table_of(state: RestoredState, name: str) -> pa.Table:
    return pa.ipc.open_stream(pa.py_buffer(sections_of(state)[name])).read_all()


# -- declaration ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("duration", ["0s", "-1s", 0, 5, "soon", None, True, timedelta(seconds=-1), "400000d"])
def test_a_duration_that_is_none_is_told(duration: Any) -> None:
    with pytest.raises(UsageError, match="the duration of a TTL"):
        hg.TTL(duration)


def test_what_is_no_update_is_told() -> None:
    with pytest.raises(UsageError, match='updated on "write" or on "read_and_write", not on \'read\''):
        hg.TTL("1h", "read")  # type: ignore[arg-type]


@each
@pytest.mark.parametrize("ttl", ["1h", 5, timedelta(hours=1)])
def test_what_is_no_ttl_is_told_when_the_pipeline_is_built(form: str, ttl: Any) -> None:
    with pytest.raises(UsageError, match=r"operator 'node': the ttl of state 'value' is a TTL\('7d'\), not "):
        spec_of(form, ttl)


@each
def test_a_ttl_is_no_part_of_the_identity_of_state(form: str) -> None:
    ttls = (None, hg.TTL("1h"), hg.TTL(timedelta(days=2), "read_and_write"))
    assert len({state_text(spec_of(form, ttl)) for ttl in ttls}) == 1


# -- when it expires --------------------------------------------------------------------------------------------------


@each
def test_what_was_written_lives_for_its_duration_and_not_a_millisecond_more(form: str) -> None:
    run = harness(form)
    do(run, *PUT)
    run.now_ms += 9
    assert do(run, *ALL) == THERE
    run.now_ms += 1
    assert do(run, *ALL) == GONE
    assert do(run, "value exists", "list count", "map contains", "map get") == ["False", "0", "False", "None"]


@each
def test_one_time_holds_for_all_rows_of_a_call(form: str) -> None:
    run = harness(form)
    do(run, *PUT)
    run.now_ms += 9
    late = run.now_ms + 100
    times = iter([run.now_ms])
    run.context.clock_ms = lambda: next(times, late)  # the clock goes on as soon as it was looked at
    run.operator._time._clock_ms = run.context.clock_ms  # type: ignore[attr-defined]
    assert do(run, *ALL, *ALL) == THERE * 2


class Alarm(hg.ProcessFunction):
    """Has itself called when its value has just expired, and a moment before."""

    schema = {"seen": pa.large_string()}

    def open(self, state: hg.StateHandle) -> None:
        self.value = state.value("value", pa.int64(), ttl=hg.TTL("10ms"))

    def process(self, row: dict[str, Any], context: hg.ProcessContext) -> None:
        self.value.put(row["n"])
        for after in (9, 10):
            context.timers.register_processing_time(context.timers.processing_time_ms + after)

    def on_timer(self, timer: hg.Timer, context: hg.ProcessContext) -> Iterator[dict[str, Any]]:
        yield {"seen": repr(self.value.get())}


class AlarmByBatch(hg.BatchProcessFunction):
    """The same by batch."""

    schema = Alarm.schema
    open = Alarm.open  # type: ignore[assignment]

    def process(self, batch: pl.DataFrame, context: hg.BatchContext) -> None:
        self.value.put(batch["n"])
        for after in (9, 10):
            context.timers.register_processing_time(context.timers.processing_time_ms + after)

    def on_timer(self, timers: hg.FiredTimers, context: hg.BatchContext) -> pl.DataFrame:
        return pl.DataFrame({"seen": [repr(self.value.get()[0])]})


@pytest.mark.parametrize("function", [Alarm(), AlarmByBatch()], ids=["row", "batch"])
def test_a_timer_for_the_moment_of_expiry_finds_nothing(function: Any) -> None:
    run = Harness(process_spec("node", ("key",), function, SCHEMA), worker=Chosen.worker)
    do(run, "value put")
    for ms in (9, 1):
        run.advance(ms)
    assert [row["seen"] for row in run.out.rows()] == ["7", "None"]


@each
def test_writing_counts_also_where_the_value_stays_the_same(form: str) -> None:
    for what in ("value last", "value min", "value put"):
        run = harness(form)
        do(run, "value put")
        run.now_ms += 9
        do(run, what)
        run.now_ms += 9
        assert do(run, "value get") == ["7"]


@each
def test_reading_renews_only_if_that_was_declared(form: str) -> None:
    for update, seen in (("write", GONE), ("read_and_write", THERE)):
        run = harness(form, update=update)
        do(run, *PUT)
        for what in (ALL, ("value exists", "list count", "map get")):
            run.now_ms += 9
            do(run, *what)
        run.now_ms += 9
        assert do(run, *ALL) == seen


@each
def test_elements_and_entries_expire_each_by_itself(form: str) -> None:
    run = harness(form)
    do(run, "list append", "map put", m=1, n=1)
    run.now_ms += 6
    do(run, "list append", "map put", m=2, n=2)
    run.now_ms += 4
    assert do(run, "list get", "map items") == ["[2]", "[(2, 2)]"]
    do(run, "list append", "map put", m=3, n=3)
    run.now_ms += 6
    assert do(run, "list get", "map items") == ["[3]", "[(3, 3)]"]


@each
def test_an_entry_that_is_written_again_expires_behind_the_others(form: str) -> None:
    run = harness(form)
    do(run, "map put", m=1)
    run.now_ms += 1
    do(run, "map put", m=2)
    run.now_ms += 1
    do(run, "map put", m=1, n=9)
    run.now_ms += 9
    assert do(run, "map items") == ["[(1, 9)]"]


@each
def test_what_was_renewed_by_reading_is_not_renewed_for_what_comes_later(form: str) -> None:
    run = harness(form, update="read_and_write")
    do(run, "list append", n=1)
    run.now_ms += 5
    do(run, "list get")
    run.now_ms += 5
    do(run, "list append", n=2)
    frozen = [run.snapshot()]
    at = dict(zip(*(table_of(frozen[0], "list")[name].to_pylist() for name in ("value", EXPIRES_COLUMN)), strict=True))
    assert at == {1: BORN_MS + 1_015, 2: BORN_MS + 1_020}


@each
def test_rounds_are_for_keys_of_which_anything_lives(form: str) -> None:
    run = harness(form)
    do(run, "value put", key=1)
    run.now_ms += 6
    do(run, "map put", key=2)
    run.now_ms += 4
    run.operator.on_round(1)
    assert [row["key"] for row in run.out.rows()] == [2]


# -- clocks -----------------------------------------------------------------------------------------------------------


@each
@pytest.mark.parametrize(("shift_ms", "seen"), [(-1_000_000, THERE), (0, THERE), (3, THERE), (4, GONE), (10**12, GONE)])
def test_a_date_that_steps_between_two_starts_brings_nothing_back(form: str, shift_ms: int, seen: list[str]) -> None:
    run = harness(form)
    do(run, *PUT)
    run.now_ms += 6
    again = harness(form, states=[run.snapshot()], begun_ms=run.now_ms + shift_ms)
    assert do(again, *ALL) == seen
    again.now_ms += 4
    assert do(again, *ALL) == GONE


@each
def test_on_a_machine_whose_date_is_behind_what_is_written_lives_as_long(form: str) -> None:
    run = harness(form)
    do(run, *PUT)
    run.now_ms += 20
    again = harness(form, states=[run.snapshot()], begun_ms=0)
    do(again, *PUT)
    again.now_ms += 9
    assert do(again, *ALL) == THERE
    last = harness(form, states=[again.snapshot()], begun_ms=0)
    assert do(last, *ALL) == THERE
    last.now_ms += 1
    assert do(last, *ALL) == GONE


@each
def test_the_latest_of_the_former_subtasks_says_what_time_it_is(form: str) -> None:
    runs = [harness(form, subtask=(i, 2), begun_ms=100 * i) for i in range(2)]
    states = [run.snapshot() for run in runs]
    for found in (states, states[::-1]):
        again = harness(form, states=found, begun_ms=0)
        meta = json.loads(bytes(sections_of(again.snapshot())[TTL_SECTION]))
        assert meta == {"version": 1, "ms": BORN_MS + 100}


# -- snapshots and changed declarations -------------------------------------------------------------------------------


@each
def test_a_snapshot_has_the_expiry_of_what_lives_and_nothing_else(form: str) -> None:
    run = harness(form)
    do(run, *PUT, key=1)
    run.now_ms += 6
    do(run, *PUT, key=2)
    run.now_ms += 4
    frozen = run.operator.freeze()
    assert frozen is not None
    run.now_ms += 100
    do(run, *ALL, key=2)  # it is gone meanwhile; the snapshot is of the barrier
    assert frozen.rows() == {"value": 1, "list": 1, "map": 1}
    first, second = (b"".join(bytes(memoryview(part)) for part in frozen.encode()) for _ in range(2))
    assert first == second
    state = RestoredState(0, 1, memoryview(first))
    expires = BORN_MS + 1_016
    assert table_of(state, "value").to_pylist() == [{"key0": 2, "value": 7, "expires_ms": expires}]
    assert table_of(state, "list").to_pylist() == [{"key0": 2, "value": 7, "expires_ms": expires}]
    assert table_of(state, "map").to_pylist() == [{"key0": 2, "map_key": 0, "value": 7, "expires_ms": expires}]


@each
def test_without_a_ttl_a_snapshot_is_what_it_was(form: str) -> None:
    run = harness(form, duration=None)
    do(run, *PUT)
    state = run.snapshot()
    assert sections_of(state).keys() == {"value", "list", "map"}
    assert table_of(state, "map").column_names == ["key0", "map_key", "value"]


@each
def test_what_was_written_before_there_was_a_ttl_counts_as_written_at_the_restore(form: str) -> None:
    run = harness(form, duration=None)
    do(run, *PUT)
    run.now_ms += 10**9
    again = harness(form, states=[run.snapshot()], begun_ms=run.now_ms)
    again.now_ms += 9
    assert do(again, *ALL) == THERE
    again.now_ms += 1
    assert do(again, *ALL) == GONE


@each
def test_a_ttl_that_goes_leaves_what_lived_at_the_barrier_for_ever(form: str) -> None:
    run = harness(form)
    do(run, *PUT, key=1)
    run.now_ms += 6
    do(run, *PUT, key=2)
    run.now_ms += 4
    again = harness(form, duration=None, states=[run.snapshot()], begun_ms=run.now_ms)
    again.now_ms += 10**12
    assert do(again, *ALL, key=1) == GONE
    assert do(again, *ALL, key=2) == THERE


@each
def test_a_shorter_ttl_counts_from_the_restore_and_a_longer_one_from_the_next_write(form: str) -> None:
    run = harness(form, duration="100ms")
    do(run, *PUT)
    states = [run.snapshot()]
    shorter = harness(form, duration="10ms", states=states, begun_ms=run.now_ms)
    shorter.now_ms += 9
    assert do(shorter, *ALL) == THERE
    shorter.now_ms += 1
    assert do(shorter, *ALL) == GONE
    longer = harness(form, duration="1000ms", states=states, begun_ms=run.now_ms)
    do(longer, *PUT, key=2)
    longer.now_ms += 100
    assert do(longer, *ALL) == GONE
    assert do(longer, *ALL, key=2) == THERE


@each
def test_each_form_restores_what_the_other_wrote_also_what_was_renewed(form: str) -> None:
    other = next(one for one in FORMS if one != form)
    run = harness(form, update="read_and_write")
    do(run, *PUT)
    run.now_ms += 8
    do(run, *ALL)
    again = harness(other, update="read_and_write", states=[run.snapshot()], begun_ms=run.now_ms + 9)
    assert do(again, *ALL) == THERE


@each
@pytest.mark.parametrize("column", ["value", "expires_ms"])
def test_columns_that_nobody_knows_are_refused(form: str, column: str) -> None:
    run = harness(form)
    do(run, *PUT)
    sections = sections_of(run.snapshot())
    table = table_of(run.snapshot(), "value")
    other = table.set_column(table.column_names.index(column), column, pa.array(["x"] * table.num_rows))
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, other.schema) as writer:
        writer.write_table(other)
    payload = b"".join(
        bytes(b) for b in encode_sections({**{k: [v] for k, v in sections.items()}, "value": [sink.getvalue()]})
    )
    with pytest.raises(CorruptionError, match=r"state 'value'.*expected columns"):
        harness(form, states=[RestoredState(0, 1, memoryview(payload))])


@each
def test_expiry_of_an_unknown_version_is_refused(form: str) -> None:
    sections = sections_of(harness(form).snapshot())
    about = json.dumps({"version": 2, "ms": 0}).encode()
    payload = b"".join(bytes(b) for b in encode_sections({k: [v] for k, v in {**sections, TTL_SECTION: about}.items()}))
    with pytest.raises(CorruptionError, match="expiry of version 1"):
        harness(form, states=[RestoredState(0, 1, memoryview(payload))])
