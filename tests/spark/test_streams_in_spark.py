"""``format("headgate")`` in a real Spark: DataFrames and streaming queries over streams of the store."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyspark.errors import AnalysisException, SparkRuntimeException
from tests.conftest import IS_DEEP
from tests.docs.documentation import example_with, examples
from tests.spark.support import query_between_streams
from tests.spark.support.filtered_reads import PUSHDOWN, check_every_use, pushing_filters
from tests.spark.support.sessions import patiently, run_to_end, session
from tests.store.served.serving import serving
from tests.store.traffic import Traffic, all_rounds, flowing, per_key

import headgate as hg
from crash.support.processes import TESTS, quick_jvm
from headgate.store.store import Store

pytestmark = [
    pytest.mark.spark,
    pytest.mark.early,
    pytest.mark.xdist_group("session"),
]  # of one process, which keeps its JVM

SCHEMA = pa.schema([("key", pa.string()), ("value", pa.int64()), ("at", pa.timestamp("ms"))])
WAIT_S = 600.0


@pytest.fixture(scope="module")
def spark() -> Iterator[Any]:
    with session(**{"spark.sql.session.timeZone": "America/New_York"}) as made:
        hg.register_streams(made)
        yield made


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    with Store.open(tmp_path / "store") as opened:
        yield opened


def loaded(spark: Any, store: Store, stream: str, **options: Any) -> Any:
    return spark.read.format("headgate").options(store=store.root, **options).load(stream)


def test_a_dataframe_goes_into_a_stream_and_comes_back(spark: Any, store: Store) -> None:  # SP3
    query = "SELECT id, concat('k', id % 7) AS key, timestamp'2026-07-31 12:00:00 UTC' AS at, "
    query += "timestamp_ntz'2026-03-08 02:30:00' AS wall FROM range(10000)"
    frame = spark.sql(query).repartition(3)
    writer = frame.write.format("headgate").options(store=store.root, routing_key="key", segments=3)
    with pytest.raises(AnalysisException, match="is appended to: use mode"):
        writer.mode("overwrite").save("app/ids")
    assert store.list_streams() == []
    writer.mode("append").save("app/ids")
    assert store.describe("app/ids").events_count == 10_000
    found = loaded(spark, store, "app/ids", rows_per_partition=1_000, place="true")
    assert found.rdd.getNumPartitions() >= 11
    assert sorted(row.id for row in found.select("id").collect()) == list(range(10_000))
    times = found.selectExpr("string(at)", "string(wall)").distinct().collect()
    assert [tuple(row) for row in times] == [("2026-07-31 08:00:00", "2026-03-08 02:30:00")], "in New York"
    assert found.dtypes[2:4] == frame.dtypes[2:4] == [("at", "timestamp"), ("wall", "timestamp_ntz")]
    store.create_stream("app/before", pa.schema([("at", pa.timestamp("us")), ("wall", pa.timestamp("us", "UTC"))]))
    frame.select("at", "wall").limit(1).write.format("headgate").option("store", store.root).mode("append").save(
        "app/before"
    )
    (row,) = loaded(spark, store, "app/before").selectExpr("string(at)", "string(wall)").collect()
    assert tuple(row) == ("2026-07-31 12:00:00", "2026-03-07 21:30:00"), "the numbers stay"
    some = loaded(spark, store, "app/ids", rows_per_partition=1_000, keys='["k3"]')
    assert some.count() == sum(1 for number in range(10_000) if number % 7 == 3)
    assert some.rdd.getNumPartitions() < found.rdd.getNumPartitions()
    with pytest.raises(AnalysisException, match=r"column 'key' .* is missing"):
        spark.range(3).write.format("headgate").option("store", store.root).mode("append").save("app/ids")
    with pytest.raises(AnalysisException, match="stream 'app/idz' does not exist"):
        loaded(spark, store, "app/idz")
    before = store.tail("app/ids")
    writer.mode("append").save("app/ids")
    assert loaded(spark, store, "app/ids", start=str(before)).count() == 10_000


def test_filters_of_one_use_of_a_read_leave_the_others_alone(spark: Any, store: Store) -> None:  # SP3
    assert spark.conf.get(PUSHDOWN) == "false", "the registration has left the setting alone"
    frame = spark.range(400).selectExpr("id", "if(id % 3 = 0, NULL, concat('k', id % 7)) AS key")
    frame.write.format("headgate").options(store=store.root, routing_key="key", segments=3).mode("append").save("in")
    threes = [row.id for row in frame.collect() if row.key == "k3"]
    with pushing_filters(spark):
        one, two = ("key = 'k3'", lambda row: row.key == "k3"), ("_segment = 1", lambda row: row._segment == 1)
        check_every_use(lambda: loaded(spark, store, "in", place="true"), spark, one, two)
        events = spark.readStream.format("headgate").options(store=store.root, rows_per_batch=150).load("in")
        some = events.where("key = 'k3'")
        for number, (queried, expected) in enumerate([(some, threes), (events.union(some), [*range(400), *threes])]):
            query = queried.writeStream.format("memory").queryName(f"filtered_{number}").trigger(availableNow=True)
            run_to_end(query)
            assert sorted(row.id for row in spark.table(f"filtered_{number}").collect()) == sorted(expected)


def test_a_write_whose_tasks_fail_leaves_nothing(spark: Any, store: Store) -> None:
    store.create_stream("out", pa.schema([("id", pa.int64())]))
    broken = "SELECT if(id = 9999, CAST(raise_error('this one') AS BIGINT), id) AS id FROM range(0, 10000, 1, 2)"
    writer = spark.sql(broken).write.format("headgate").option("store", store.root).mode("append")
    with pytest.raises(SparkRuntimeException, match="this one"):
        writer.save("out")
    assert store.describe("out").events_count == 0
    store.seal("out")


def test_queries_that_take_what_is_there_go_on_where_they_ended(spark: Any, store: Store, tmp_path: Path) -> None:
    store.create_stream("in", SCHEMA, segments=2, routing_key="key")  # SP4, SP5, SP9
    traffic = Traffic(store, "in")
    for _ in range(2):
        for _ in range(20):
            traffic.append()
        traffic.scale()
        events = spark.readStream.format("headgate").options(store=store.root, rows_per_batch=150).load("in")
        output = events.writeStream.format("headgate").options(store=store.root, routing_key="key", segments=2)
        output = output.option("checkpointLocation", str(tmp_path / "checkpoints")).trigger(availableNow=True)
        run_to_end(output, "out")
    assert per_key(store) == all_rounds(traffic)


def test_the_example_of_the_guide_works_as_it_is_printed(spark: Any, store: Store, tmp_path: Path) -> None:
    items = pa.table({"id": pa.array(range(6)), "item": ["tea", "cake"] * 3}).to_batches()[0]
    for name in ("app/orders", "app/tea"):
        store.create_stream(name, items.schema, routing_key="item")
    with store.writer("app/orders") as writer:
        writer.append(items)
    code = example_with("""orders.where("item = 'tea'").write""")
    code = code.replace('format("headgate")', f'format("headgate").option("store", {store.root!r})')
    names: dict[str, Any] = {"hg": hg, "spark": spark}
    batch, streaming = code.replace("/backup/tea", str(tmp_path / "checkpoints")).split("\n\n")
    exec(batch, names)

    def run() -> None:
        exec(streaming, names)
        names["query"].processAllAvailable()

    patiently(run)
    names["query"].stop()
    assert [store.describe(name).events_count for name in ("app/tea", "app/copy")] == [3, 6]


def test_the_example_of_what_to_do_without_kafka_works_as_it_is_printed(
    spark: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """But for the ends of both: a window of ten seconds is too long for a test."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HEADGATE_STORE", str(tmp_path / "store"))
    query, pipeline = examples("docs/how-to/through-spark.md")
    names: dict[str, Any] = {}
    query = query.replace('format("headgate")', f'format("headgate").option("store", {str(tmp_path / "store")!r})')
    query = query.replace("fill-checkpoints", str(tmp_path / "checkpoints"))  # the JVM began elsewhere
    exec(query.removesuffix("query.awaitTermination()\n"), names)
    try:
        with Store.open(tmp_path / "store") as store:
            until(lambda: any(found.events_count for found in store.list_streams()), "a micro-batch")
    finally:
        names["query"].stop()
    exec(pipeline.removesuffix("p.run()\n"), names)
    assert names["orders"].take(1)[0].keys() == {"customer", "amount", "at"}
    assert names["p"].definition().plan.vertices


def test_spark_reads_and_writes_the_streams_of_a_served_store(spark: Any, tmp_path: Path) -> None:
    """Driver and workers know nothing of the store but its URL."""
    frame = spark.range(0, 2_000, 1, 2).selectExpr("id", "concat('k', id % 7) AS key")
    with serving(tmp_path / "served") as server, Store.open(server.address.url) as store:
        writer = frame.write.format("headgate").options(store=store.root, routing_key="key", segments=2)
        for total in (2_000, 4_000):
            writer.mode("append").save("in")
            events = spark.readStream.format("headgate").options(store=store.root, rows_per_batch=1_500).load("in")
            output = events.writeStream.format("headgate").options(store=store.root, routing_key="key")
            output = output.option("checkpointLocation", str(tmp_path / "checkpoints")).trigger(availableNow=True)
            run_to_end(output, "out")
            found = loaded(spark, store, "out", rows_per_partition=500)
            assert sorted(row.id for row in found.select("id").collect()) == sorted([*range(2_000)] * (total // 2_000))
        assert [problem for problem in store.fsck() if not problem.is_harmless] == []


class Driver:
    """A process of its own with a streaming query, and what it has started."""

    def __init__(self, store: Store, checkpoints: Path, log: Path) -> None:
        command = [sys.executable, query_between_streams.__file__, store.root, str(checkpoints)]
        environment = {**os.environ, **quick_jvm(), "PYSPARK_PYTHON": sys.executable, "PYTHONPATH": str(TESTS.parent)}
        with log.open("ab") as file:
            self._process = subprocess.Popen(command, stdout=file, stderr=file, env=environment, start_new_session=True)

    def kill(self) -> None:
        """End the driver, its JVM and its tasks at once."""
        os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()

    def check(self) -> None:
        assert self._process.poll() is None, "the query has failed: see its log"


def wait(driver: Driver, condition: Callable[[], bool], what: str) -> None:
    def is_over() -> bool:
        driver.check()
        return condition()

    until(is_over, what)


def until(condition: Callable[[], bool], what: str) -> None:
    end = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < end, what
        time.sleep(0.05)


@pytest.mark.deep
@pytest.mark.crash
@pytest.mark.timeout(900)
def test_a_query_between_streams_is_exactly_once_when_its_driver_is_killed(store: Store, tmp_path: Path) -> None:
    store.create_stream("in", SCHEMA, segments=2, routing_key="key")  # SP5, SP9
    store.create_stream("out", SCHEMA, segments=2, routing_key="key")
    is_over, dice = threading.Event(), random.Random(11)

    def written() -> int:
        return store.describe("out").events_count

    checkpoints, log = tmp_path / "checkpoints", tmp_path / "query.log"
    with flowing(store, is_over, "in", "out", rounds=20, most=25) as traffic:
        for _ in range(3 if IS_DEEP else 1):
            driver = Driver(store, checkpoints, log)
            try:
                before = written()
                wait(driver, lambda before=before: written() > before, f"progress of the query; see {log}")
                time.sleep(dice.random())  # the moment of the kill: not a wait for anything
            finally:
                driver.kill()
        is_over.set()
    driver = Driver(store, checkpoints, log)
    try:
        total = sum(map(len, all_rounds(traffic).values()))
        wait(driver, lambda: written() >= total, f"all {total} events; see {log}")
    finally:
        driver.kill()
    assert per_key(store) == all_rounds(traffic)
