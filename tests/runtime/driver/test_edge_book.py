"""Edges as workers measured their two ends: sums of what flows and waits, shares of whoever is worst."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from tests.web.shop import definition

from headgate.model.ids import NodeName
from headgate.model.metrics import CLOCK_S, EDGE, NODE, Sample, Samples
from headgate.model.plan import Plan
from headgate.model.progress import EdgeProgress
from headgate.runtime.driver.progress import EdgeTotals

PLAN = definition(Path("/nowhere")).plan
AT = next(edge.index for edge in PLAN.edges if edge.from_node == NodeName("key-by"))


def report(clock_s: float, **measured: float) -> Samples:
    samples = [Sample(name, ((EDGE, str(AT)),), value) for name, value in measured.items()]
    return Samples([Sample(CLOCK_S, (), clock_s), Sample("records", ((NODE, "key-by"),), 1_000_000), *samples])


def found(book: EdgeTotals) -> EdgeProgress:
    return book.edges()[AT]


def test_edges_are_added_up_over_their_subtasks() -> None:  # OM14
    book = EdgeTotals(PLAN)
    book.begin()
    assert book.edges() == (), "nobody has reported"
    for worker, busy_ms, held_ms, fill in ((0, 900, 50, 0.25), (1, 100, 800, 0.75)):
        start = {"records": 100, "busy_ms": 10_000, "held_back_ms": 10_000, "fill": 1.0, "queued_bytes": 7_000}
        book.add(worker, report(100.0 + worker, **start))
        end = {"records": 300, "busy_ms": 10_000 + 2 * busy_ms, "held_back_ms": 10_000 + 2 * held_ms, "fill": fill}
        book.add(worker, report(102.0 + worker, **end, queued_batches=1, queued_bytes=100))
    wanted = EdgeProgress(AT, NodeName("key-by"), NodeName("latest"), 200.0, 0.9, 0.8, 2, 200, 0.75)
    assert replace(found(book), busy=round(found(book).busy, 9)) == wanted
    assert [edge.edge for edge in book.edges()] == [edge.index for edge in PLAN.edges]


def test_a_restart_begins_with_nothing() -> None:  # OM14
    book = EdgeTotals(PLAN)
    book.begin()
    book.add(0, report(1.0, records=100, queued_bytes=5))
    book.begin()
    assert book.edges() == ()
    book.add(0, report(9.0, records=100))
    assert (found(book).records_per_second, found(book).queued_bytes) == (0.0, 0), "one report tells no rate"


def test_a_plan_without_edges_has_none() -> None:
    book = EdgeTotals(Plan((), (), 1, 1))
    book.begin()
    book.add(0, report(1.0, records=1))
    assert book.edges() == ()
