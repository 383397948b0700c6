"""``map_async`` as users write it: what it makes, and what it refuses."""

from __future__ import annotations

from typing import Any

import pyarrow as pa
import pytest

import headgate as hg

ROWS = [{"x": 1, "k": "a"}]


async def same(row: dict[str, Any]) -> Any:
    return row


def made() -> tuple[hg.Pipeline, hg.Stream]:
    pipeline = hg.Pipeline("p")
    return pipeline, pipeline.source(hg.FromRows(ROWS))


def test_it_keeps_or_declares_the_schema_and_stands_in_a_vertex_of_its_own() -> None:
    pipeline, rows = made()
    one = rows.map_async(same)
    assert one.schema == rows.schema
    other = one.key_by("k").map_async(same, {"y": int}, name="ask")
    assert other.schema == pa.schema([("y", pa.int64())])
    assert isinstance(other, hg.Stream)
    other.sink(hg.Discard())
    vertices = pipeline.definition().plan.vertices
    assert [[str(n.name) for n in v.nodes] for v in vertices] == [
        ["source"],
        ["map-async"],
        ["key-by"],
        ["ask"],
        ["sink"],
    ]


def test_event_time_goes_through() -> None:
    rows = hg.Pipeline("p").source(hg.FromRows([{"k": 1, "t": 5}])).with_timestamps("t")
    rows.map_async(same).key_by("k").window(hg.Tumbling("1s"))


def test_bound_methods_partial_functions_and_objects_that_are_called_are_taken() -> None:
    from functools import partial

    class Ask:
        async def __call__(self, row: dict[str, Any]) -> Any:
            return row

        async def method(self, row: dict[str, Any]) -> Any:
            return row

    async def given(more: int, row: dict[str, Any]) -> Any:
        return row

    for function in (Ask(), Ask().method, partial(given, 1)):
        made()[1].map_async(function)


class NoCall(hg.AsyncFunction):
    pass


class Ordinary(hg.AsyncFunction):
    def call(self, row: dict[str, Any]) -> Any:  # type: ignore[override]
        return row


class Opened:
    def open(self) -> None: ...

    async def __call__(self, row: dict[str, Any]) -> Any:
        return row


async def yielding(row: dict[str, Any]) -> Any:
    yield row


@pytest.mark.parametrize(
    ("function", "problem"),
    [
        (lambda row: row, "needs an 'async def' function of a row .* for an ordinary function use map"),
        (7, "needs an 'async def' function"),
        (NoCall(), "NoCall has no method 'async def call"),
        (NoCall, r"give an instance, such as NoCall\(\), not the class"),
        (Ordinary(), "Ordinary.call must be an 'async def'"),
        (Opened(), "Opened.open would never be called; derive the class from headgate.AsyncFunction"),
        (yielding, "must return a list of dicts instead of yielding them"),
    ],
)
def test_what_is_no_async_function_is_refused(function: Any, problem: str) -> None:
    with pytest.raises(hg.UsageError, match=f"operator 'map-async': .*{problem}"):
        made()[1].map_async(function)


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"limit": 0}, "limit must be a number from 1 on, not 0"),
        ({"limit": True}, "limit must be a number from 1 on"),
        ({"retries": -1}, "retries must be a number from 0 on"),
        ({"timeout": 0}, "timeout must be positive"),
        ({"on_timeout": 5}, "on_timeout must be an ordinary function"),
        ({"on_timeout": same}, "on_timeout must be an ordinary function"),
        ({"retry_if": "ConnectionError"}, "retry_if must be an ordinary function"),
        ({"capacity": 7}, "capacity"),
    ],
)
def test_wrong_options_are_refused(options: dict[str, Any], problem: str) -> None:
    with pytest.raises(hg.UsageError, match=problem):
        made()[1].map_async(same, **options)


def test_it_is_refused_in_a_loop_and_taken_after_one() -> None:
    _, rows = made()
    with pytest.raises(hg.UsageError, match="cannot be in the body of loop 'iterate'"):
        rows.iterate(lambda loop: (loop.map_async(same), loop))
    rows.iterate(lambda loop: (loop.filter(lambda row: False), loop)).map_async(same)
