"""What every frozen state must do, whoever makes it: one conformance test for each kind of state there is."""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Iterator, Sequence
from inspect import isabstract
from zlib import crc32

import pytest
from tests.conftest import IS_DEEP
from tests.runtime.checkpoints.frozen_cases import CASES, At, ByBatch, ByRow, Holder, Log, joined, lines_of, made, small

import headgate
from headgate.codec.snapshot import decode_sections, section_views
from headgate.codec.snapshot_rows import stored_rows
from headgate.errors import StorageError
from headgate.operators.aggregation.over_aggregates import OverOperator, OverSpec
from headgate.operators.aggregation.running_aggregate import RunningAggregateOperator, RunningAggregateSpec
from headgate.operators.async_map import AsyncMapSpec
from headgate.operators.base import Operator
from headgate.operators.deduplication import DeduplicateOperator, DeduplicateSpec
from headgate.operators.joins.broadcast_join import BroadcastJoinSpec
from headgate.operators.joins.changing_join import ChangingJoinOperator, ChangingJoinSpec
from headgate.operators.joins.stream_joins import AsOfJoinOperator, PairJoinOperator, StreamJoinSpec, WindowJoinOperator
from headgate.operators.loop_head import LoopHeadSpec
from headgate.operators.process.batch_process import BatchProcessOperator
from headgate.operators.process.connected_process import (
    BatchBroadcastOperator,
    BatchBroadcastProcessSpec,
    BatchCoProcessOperator,
    BatchCoProcessSpec,
    BroadcastOperator,
    BroadcastProcessSpec,
    CoProcessOperator,
    CoProcessSpec,
)
from headgate.operators.process.key_process import KeyFunctionOperator, KeyFunctionSpec
from headgate.operators.process.row_process import ProcessOperator
from headgate.operators.specs import StatefulSpec
from headgate.operators.top_rows import (
    ChangingTopOperator,
    ChangingTopSpec,
    TopOperator,
    TopSpec,
    WindowTopOperator,
    WindowTopSpec,
)
from headgate.operators.windows.session_windows import SessionMergeOperator, SessionMergeSpec
from headgate.operators.windows.triggered_windows import TriggeredWindowOperator, TriggeredWindowSpec
from headgate.operators.windows.window_trigger import CommandedWindowOperator, CommandedWindowSpec
from headgate.runtime.savepoint_writer.rows import WrittenRows
from headgate.state import vectors as vectors_module
from headgate.state.descriptors import StateKind
from headgate.state.snapshot import FrozenState

BY_COLUMN: tuple[type[Operator], ...] = (
    *(DeduplicateOperator, RunningAggregateOperator, SessionMergeOperator, TriggeredWindowOperator),
    CommandedWindowOperator,
    *(AsOfJoinOperator, ChangingJoinOperator, PairJoinOperator, WindowJoinOperator, TopOperator, WindowTopOperator),
    *(ChangingTopOperator, OverOperator),
)
"""They have the states of functions by batch."""

SPECS_BY_COLUMN = (
    *(DeduplicateSpec, RunningAggregateSpec, SessionMergeSpec, TriggeredWindowSpec),
    CommandedWindowSpec,
    *(StreamJoinSpec, ChangingJoinSpec, TopSpec, WindowTopSpec),
    *(ChangingTopSpec, OverSpec),
)

each = pytest.mark.parametrize("name", CASES)


@pytest.fixture(autouse=True)
def _small() -> Iterator[None]:
    with small():
        yield


@each
def test_encoding_twice_gives_the_same_bytes(name: str) -> None:
    live = made(name)
    frozen = live.freeze()
    first = joined(frozen.encode())
    live.change()
    assert joined(frozen.encode()) == first
    assert live.contents(first)


def some_lines(name: str, frozen: FrozenState) -> Sequence[int]:
    """Return a third of the lines, or all where ``IS_DEEP``: states that share code have other thirds of it."""
    lines = list(lines_of(frozen.encode))
    return lines if IS_DEEP else lines[crc32(name.encode()) % 3 :: 3]


@each
def test_encoding_after_a_failure_at_any_line_gives_the_same_bytes(name: str) -> None:
    def fail() -> None:
        raise StorageError("encode", "x", "injected")

    live = made(name)
    frozen = live.freeze()
    expected = joined(frozen.encode())
    for number in some_lines(name, frozen):
        with pytest.raises(StorageError, match="injected"):
            At(number, fail).run(frozen.encode)
        live.change()
        assert joined(frozen.encode()) == expected, f"after a failure at line {number}"


@each
def test_encoding_while_processing_goes_on_gives_what_was_there_at_the_barrier(name: str) -> None:
    live = made(name)
    frozen = live.freeze()
    expected, rows = joined(frozen.encode()), dict(frozen.rows())

    def process() -> None:
        live.change()
        live.freeze().release()
        live.change()

    for number in some_lines(name, frozen):
        assert joined(At(number, process).run(frozen.encode)) == expected, f"processing at line {number}"
    assert frozen.rows() == rows


@each
def test_rows_are_counted_at_the_barrier_and_in_the_bytes(name: str) -> None:
    live = made(name)
    frozen = live.freeze()
    live.change()
    parts = frozen.encode()
    found = stored_rows(section_views(parts), "here")
    assert stored_rows(decode_sections(joined(parts), "here"), "here").items() >= found.items()
    assert sum(frozen.rows().values()) > 0
    for state, rows in frozen.rows().items():
        assert rows == found[state]


@each
def test_a_released_state_is_never_encoded_and_a_second_release_is_nothing(name: str) -> None:
    live, twin = made(name), made(name)
    frozen = live.freeze()
    twin.freeze().release()
    before = joined(frozen.encode())
    frozen.release()
    frozen.release()
    for call in (frozen.encode, frozen.rows):
        with pytest.raises(AssertionError, match="was released"):
            call()
    for _ in range(3):
        live.change()
        twin.change()
    frozen.release()
    live.change()
    twin.change()
    assert not live.is_holding()
    after = live.contents(joined(live.freeze().encode()))
    assert after == twin.contents(joined(twin.freeze().encode()))
    assert after != live.contents(before)


@each
def test_a_state_that_nobody_releases_is_given_up_with_its_last_reference(name: str) -> None:
    live = made(name)
    frozen = live.freeze()
    live.change()
    del frozen
    live.change()
    assert not live.is_holding()


@each
def test_of_several_pending_snapshots_each_stays_as_it_was_until_its_own_release(name: str) -> None:
    for order in [(0, 1, 2), (2, 1, 0), (1, 2, 0)]:
        live = made(name)
        pending: list[tuple[FrozenState, bytes]] = []
        for _ in range(3):
            frozen = live.freeze()
            pending.append((frozen, joined(frozen.encode())))
            live.change()
        for index in order:
            for frozen, expected in pending:
                if not frozen.is_released:
                    assert joined(frozen.encode()) == expected
            pending[index][0].release()
            live.change()
        live.change()
        assert not live.is_holding()


def subclasses(of: type) -> set[type]:
    return {of, *(found for child in of.__subclasses__() for found in subclasses(child))}


def test_every_state_that_can_be_frozen_is_in_the_conformance_test() -> None:
    specs: set[type] = set()
    for module in pkgutil.walk_packages(headgate.__path__, "headgate."):
        if "__main__" in module.name:
            continue
        found = importlib.import_module(module.name)
        specs |= {one for one in vars(found).values() if isinstance(one, type) and hasattr(one, "state_text")}
    ours = {c for c in subclasses(FrozenState) if c.__module__.startswith("headgate.") and not isabstract(c)}
    assert KeyFunctionOperator.freeze is ProcessOperator.freeze, "it has the state of a function by row"
    ours -= {WrittenRows}  # of no operator: what a user gave, and nobody changes
    lives = [make() for make in CASES.values()]
    holders = [live for live in lives if isinstance(live, Holder)]
    assert {type(live.freeze()) for live in lives} == ours
    operators = {c for c in subclasses(Operator) if c.__module__.startswith("headgate.")}
    bases = {base for c in operators for base in c.__bases__}
    assert BroadcastOperator.freeze is ProcessOperator.freeze
    assert BatchBroadcastOperator.freeze is BatchProcessOperator.freeze
    keyed_as = {
        KeyFunctionOperator: ProcessOperator,
        BroadcastOperator: ProcessOperator,
        BatchBroadcastOperator: BatchProcessOperator,
        CoProcessOperator: ProcessOperator,
        BatchCoProcessOperator: BatchProcessOperator,
    }
    keyed_as |= dict.fromkeys(BY_COLUMN, BatchProcessOperator)
    leaves = {keyed_as.get(c, c) for c in operators - bases}
    stateful = {c for c in leaves if c.freeze is not Operator.freeze}
    assert {type(live.operator) for live in lives if hasattr(live, "operator")} == stateful
    of_others = {LoopHeadSpec, KeyFunctionSpec, BroadcastProcessSpec, BatchBroadcastProcessSpec}
    of_others |= {CoProcessSpec, BatchCoProcessSpec, AsyncMapSpec, BroadcastJoinSpec, *SPECS_BY_COLUMN}
    assert {type(live.spec) for live in holders} | of_others == {
        one
        for one in specs
        if one is not StatefulSpec and not isabstract(one) and one.__module__.startswith("headgate.operators")
    }
    functions = [getattr(live.spec, "function", None) for live in holders]
    assert {f.kind for f in functions if isinstance(f, ByRow)} == set(StateKind)
    vectors = {c for c in vars(vectors_module).values() if isinstance(c, type) and hasattr(c, "has_garbage")}
    made_of = {
        type(vectors_module.make_vector(d.type)) for live in holders for d in getattr(live.spec, "descriptors", ())
    }
    assert made_of == vectors - {vectors_module.Vector}
    by_batch = {(f.kind, str(f.dtype)) for f in functions if isinstance(f, ByBatch)}
    assert len(by_batch) == len(StateKind) * len(made_of)
    assert any(isinstance(live, Log) for live in lives)
