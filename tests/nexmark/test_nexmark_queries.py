"""Each query against DuckDB over the same events, in Python and in SQL."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from typing import Any

import duckdb
import pytest
from tests.nexmark.oracles import database, expected_rows, found_rows
from tests.support.killing import run_killing
from tests.support.unreported import seldom_reported

import headgate as hg
from headgate.errors import UsageError
from headgate.nexmark.events import Kind, Nexmark
from headgate.nexmark.queries import QUERIES, Tables, query
from headgate.testing import Collect

EVENTS, TPS = 6_000, 200
source = partial(Nexmark, events=EVENTS, tps=TPS, batch_rows=1_024)

FORMS = [*QUERIES, *(f"{name}-sql" for name in QUERIES)]
PATIENCE_S = 900
"""For all queries in one run, on a machine that does much else."""


@cache
def events() -> duckdb.DuckDBPyConnection:
    return database(source)


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], list[tuple[Any, ...]]]:
    """The results of all queries, of one run in which a worker is killed."""
    pipeline = hg.Pipeline("nexmark", parallelism=2, checkpointing=hg.Checkpointing(interval="1s"))
    tables = Tables(pipeline, source)
    sinks, keys = {}, {}
    for name in FORMS:
        sinks[name] = Collect(tmp_path_factory.mktemp(name))
        found, is_sql = query(name.removesuffix("-sql")), name.endswith("-sql")
        stream = tables.sql(found.sql) if is_sql else found.build(tables)
        keys[name] = stream._change_keys
        stream.sink(sinks[name], name=name)
    with seldom_reported():
        run_killing(pipeline, 1, timeout_s=PATIENCE_S)

    return lambda name: found_rows(name.removesuffix("-sql"), sinks[name].rows(), keys[name])


@pytest.mark.xdist_group("nexmark")  # one run of all queries
@pytest.mark.parametrize("name", FORMS)
def test_results_are_those_of_duckdb(name: str, results: Callable[[str], list[tuple[Any, ...]]]) -> None:
    assert results(name) == expected_rows(name.removesuffix("-sql"), events())


def test_a_table_is_read_only_where_a_query_uses_it() -> None:
    pipeline = hg.Pipeline("one")
    made: list[Kind] = []

    def recorded(kind: Kind) -> Nexmark:
        made.append(kind)
        return source(kind)

    query("q0").build(Tables(pipeline, recorded))
    assert made == ["bid"]


def test_an_unknown_query_is_refused() -> None:
    with pytest.raises(UsageError, match="there is no query 'q99'; there are q0, q1"):
        query("q99")
