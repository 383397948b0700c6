from __future__ import annotations

import copy
import threading

import pyarrow as pa
import pytest
from tests.operators.harness import Recorder

from headgate.errors import UsageError
from headgate.operators.base import OperatorContext
from headgate.operators.loop_head import LoopHeadOperator, LoopHeadSpec

PLAIN = pa.schema([("n", pa.int64())])
COUNTED = pa.schema([("n", pa.int64()), ("round", pa.int64())])


def rows(schema: pa.Schema, *values: dict[str, int | None]) -> pa.RecordBatch:
    return pa.RecordBatch.from_pylist(list(values), schema=schema)


def counted(max_rounds: int | None = None) -> LoopHeadOperator:
    return LoopHeadSpec((), COUNTED, "round", max_rounds).build()


def test_records_enter_in_round_0() -> None:
    assert counted().entering(rows(PLAIN, {"n": 7}, {"n": 8})).to_pylist() == [
        {"n": 7, "round": 0},
        {"n": 8, "round": 0},
    ]


def test_records_come_back_one_round_later_and_the_highest_round_is_known() -> None:
    batch, highest = counted().returning(rows(COUNTED, {"n": 7, "round": 0}, {"n": 8, "round": 4}))
    assert batch.to_pylist() == [{"n": 7, "round": 1}, {"n": 8, "round": 5}]
    assert highest == 5
    assert counted().highest_round(batch) == 5


def test_a_record_that_had_its_last_round_is_dropped() -> None:
    batch, highest = counted(3).returning(rows(COUNTED, {"n": 7, "round": 1}, {"n": 8, "round": 2}))
    assert batch.to_pylist() == [{"n": 7, "round": 2}]
    assert highest == 2


def test_when_all_had_their_last_round_nothing_remains() -> None:
    batch, highest = counted(1).returning(rows(COUNTED, {"n": 7, "round": 0}))
    assert (batch.num_rows, batch.schema, highest) == (0, COUNTED, -1)


def test_the_round_column_need_not_be_the_last_to_come_back_as_it_was() -> None:
    batch, _ = counted().returning(rows(COUNTED, {"n": 7, "round": 0}))
    assert batch.schema.equals(COUNTED)


def test_without_rounds_records_pass_unchanged() -> None:
    head = LoopHeadSpec((), PLAIN).build()
    batch = rows(PLAIN, {"n": 7})
    assert head.entering(batch) is batch
    returned, highest = head.returning(batch)
    assert returned is batch
    assert (highest, head.highest_round(batch)) == (-1, -1)


def test_process_emits_what_enters_and_forward_what_came_back() -> None:
    head, output = counted(), Recorder()
    head.output = output
    head.process(rows(PLAIN, {"n": 7}))
    head.forward(rows(COUNTED, {"n": 7, "round": 1}))
    assert output.rows() == [{"n": 7, "round": 0}, {"n": 7, "round": 1}]


def test_a_round_that_the_body_made_null_is_refused() -> None:
    head = counted()
    head.context = OperatorContext("p", "iterate", 0, 1, 128, lambda: 0)
    with pytest.raises(UsageError, match="'iterate': a record came back without a round"):
        head.returning(rows(COUNTED, {"n": 7, "round": None}))


def test_the_identity_of_the_state_names_key_columns_and_rounds() -> None:
    assert LoopHeadSpec((), PLAIN).state_text() == "loop(columns n: int64; log 1)"
    keyed = LoopHeadSpec(("n",), COUNTED, "round", max_rounds=3)
    assert keyed.state_text() == "loop(keys n; columns n: int64, round: int64; round column round; log 1)"


def test_the_callback_stays_in_the_driver() -> None:
    spec = LoopHeadSpec(("n",), COUNTED, "round", 3, lambda _: threading.Event().set())
    assert copy.copy(spec) == LoopHeadSpec(("n",), COUNTED, "round", 3)
