"""A stream that each checkpoint cuts at one moment, on Spark: the driver dies behind its hook, then a worker dies."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import polars as pl
import pyarrow as pa
import pytest

from crash.processes import STEP_S, Life, kill
from crash.results import assert_equal
from crash.standing import SPARK_IN_DEEP
from headgate.connectors.files.file_committer import read_committed
from headgate.store.store import Store

pytestmark = [pytest.mark.crash, pytest.mark.timeout(1_800)]

Spec = Callable[..., dict[str, Any]]
Launch = Callable[..., Life]
ROWS = 8_000
FIRST = 1_000_000
"""Numbers in the stream begin here."""


class Producer:
    """Appends numbers until it is told to stop; then the stream is sealed."""

    def __init__(self, root: Path) -> None:
        self._root = root
        with Store.open(root) as store:
            store.create_stream("in", pa.schema({"id": pa.int64()}), segments=3, routing_key="id")
        self.count = 0
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._produce)
        self._thread.start()

    def _produce(self) -> None:
        with Store.open(self._root) as store:
            with store.writer("in") as writer:
                while not self._is_over.wait(0.01):  # the pace: not a wait for anything
                    rows = [{"id": FIRST + self.count + n} for n in range(25)]
                    writer.append(pa.RecordBatch.from_pylist(rows, schema=pa.schema({"id": pa.int64()})))
                    self.count += len(rows)
            store.seal("in")

    def stop(self) -> None:
        self._is_over.set()
        self._thread.join()


@pytest.mark.parametrize("with_spark", SPARK_IN_DEEP)
def test_a_driver_that_dies_between_hook_and_trigger_loses_nothing(
    spec: Spec, launch: Launch, tmp_path: Path, with_spark: bool
) -> None:  # EI1, KP19, SC21
    what = spec("stream_cuts", rows=ROWS, rate=1_000, tolerable_failures=20)
    producer = Producer(tmp_path / "store")
    try:
        marker = tmp_path / "killed"
        life = launch(what, with_spark=with_spark, HEADGATE_KILL_AT=f"before-trigger:3:{marker}")
        assert life.child.exit_code(2 * STEP_S) == -9, life.child.tale("not killed")
        life.child.assert_gone()
        assert marker.exists()
        life = launch(what, with_spark=with_spark)
        life.note("continues from checkpoint")
        kill(life.running()["workers"]["1"])
        life.running()
        life.checkpoint()
    finally:
        producer.stop()
    assert life.result(2 * STEP_S)["is_finished"]
    expected = pl.DataFrame({"id": [*range(ROWS), *range(FIRST, FIRST + producer.count)]})
    assert_equal(read_committed(str(tmp_path / "copied")), expected, "records")
    with Store.open(tmp_path / "store") as store:
        assert [problem for problem in store.fsck() if not problem.is_harmless] == []
