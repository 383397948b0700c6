"""Two kept pipelines in a row over streams that are scaled; their workers and drivers are killed (GS5, S72)."""

# Rules: F3

from __future__ import annotations

import os
import random
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pyarrow as pa
import pytest
from tests.store.traffic import SCHEMA, all_rounds, flowing, per_key, rows_of

from crash.support.chains import PROGRAM, Chain
from crash.support.processes import STARTED_S, until
from crash.support.results import assert_clean
from crash.support.standing import MINUTES
from headgate.store.store import Store

COUNTED = pa.schema([pa.field("key", pa.string()), pa.field("value", pa.int64()), pa.field("count", pa.int64())])

pytestmark = [pytest.mark.crash, pytest.mark.timeout(1_800 + 120 * MINUTES)]

WITH_SPARK = [
    pytest.param(False, id="processes"),
    pytest.param(
        True,
        id="spark",
        marks=[
            pytest.mark.spark,
            pytest.mark.skipif("HEADGATE_TEST_MINUTES" not in os.environ, reason="make kill-chain runs it"),
        ],
    ),
]


@pytest.fixture
def chain(tmp_path: Path) -> Iterator[Callable[..., Chain]]:
    chains: list[Chain] = []

    def make(*, with_spark: bool) -> Chain:
        chains.append(Chain(tmp_path, PROGRAM, with_spark=with_spark))
        return chains[-1]

    yield make
    for one in chains:
        one.close()


@pytest.mark.parametrize("with_spark", WITH_SPARK)
def test_a_chain_is_exactly_once_from_end_to_end_whoever_is_killed(
    chain: Callable[..., Chain],
    with_spark: bool,
    dice: random.Random,
    tmp_path: Path,
    record_property: Callable[[str, object], None],
) -> None:
    is_over = threading.Event()
    with Store.open(tmp_path / "store") as store:
        for name in ("in", "middle"):
            store.create_stream(name, SCHEMA if name == "in" else COUNTED, segments=2, routing_key="key")
        links = chain(with_spark=with_spark)
        links.start("first", "in", "middle", store.root)
        links.start("second", "middle", "out", store.root)
        with flowing(store, is_over, "in", "middle", "out", rounds=40) as traffic:
            links.checkpoint(STARTED_S)
            begun_s, told = time.monotonic(), list[str]()
            while not links.is_time_up(begun_s, len(told)):
                before = traffic.scaled_count
                threading.Event().wait(dice.uniform(0.0, 1.0))  # the fault's time: not a wait for anything
                told.append(links.strike(dice))
                print(f"{len(told)}: {told[-1]} killed, after {traffic.rounds_count} rounds, {before} scalings")
                links.checkpoint(STARTED_S)
                until(lambda: traffic.scaled_count > before, "a stream to be scaled", STARTED_S)  # noqa: B023
            is_over.set()
        ends = {"first": "in", "second": "middle"}
        for link, stream in zip(links.links, ends.values(), strict=True):
            store.seal(stream)
            assert link.exit_code(STARTED_S) == 0, links.tale()
            link.assert_gone()
        record_property("kills", f"{len(told)} strikes, {traffic.rounds_count} rounds, {traffic.scaled_count} scalings")
        for stream in ("middle", "out"):
            assert per_key(store, stream) == all_rounds(traffic), stream
            wrong = [row for row in rows_of(store, stream) if row["count"] != int(str(row["value"])) + 1]
            assert wrong == [], f"what was counted for {stream} was counted in another order, or more than once"
        assert store.reader_group("chain").unread_bytes() == 0
    assert_clean(tmp_path)
