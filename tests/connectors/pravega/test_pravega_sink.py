"""The sink: each record once for readers of Pravega, whatever happens to its processes."""

from __future__ import annotations

import json
import time
import uuid
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import polars as pl
import pyarrow as pa
import pytest
from tests.conftest import IS_DEEP
from tests.docs.documentation import examples
from tests.servers.pravega import PravegaServer, read_all
from tests.support.killing import run_killing

import headgate as hg
from headgate.api.foreground import RunRequested, loading_only
from headgate.connectors.base import SinkContext, SinkWriter
from headgate.connectors.fenced_sink import Fence
from headgate.connectors.pravega.controller import StreamName, TransactionState
from headgate.connectors.pravega.sink import PravegaSink, prepared_in
from headgate.connectors.pravega.source import Pravega
from headgate.connectors.pravega.stream_log import StreamOwner
from headgate.environment import SYSTEM_ENVIRONMENT
from headgate.errors import FencedError, StorageError, UsageError
from headgate.model.ids import CheckpointId, Generation
from headgate.testing import Target, check_sink
from headgate.testing.sinks.fake_pipeline import SCHEMA, FakePipeline

pytestmark = pytest.mark.xdist_group("pravega")
"""They share a server."""

PATIENCE_S = 60


class Place:
    """A stream of its own with a sink, and what a reader sees of it."""

    def __init__(self, server: PravegaServer, **options: Any) -> None:
        self.server, self.stream = server, server.create_stream(2)
        self.sink = PravegaSink(server.address, self.stream, key="text", **options)
        self.owner = StreamOwner(server.client, StreamName.parse(self.stream), SYSTEM_ENVIRONMENT)

    def values(self) -> list[str]:
        return read_all(Pravega(self.server.address, self.stream, format="text", end="latest"))

    def read(self) -> list[dict[str, Any]]:
        return [json.loads(one) for one in self.values()]

    def open_transactions(self) -> list[str]:
        self.owner.fences()
        owners = {fence.owner for fence in self.owner.fences()}
        ids = {one for owner in owners for one in self.owner.known(owner).opened}
        name = StreamName.parse(self.stream)
        states = {one: self.server.client.state(name, uuid.UUID(one)) for one in ids}
        return [one for one, state in states.items() if state is TransactionState.OPEN]

    def lose(self) -> None:
        name = StreamName.parse(self.stream)
        for one in self.open_transactions():
            self.server.client.abort(name, uuid.UUID(one))
            while self.server.client.state(name, uuid.UUID(one)) is not TransactionState.ABORTED:
                continue

    @property
    def target(self) -> Target:
        return Target(self.sink, self.read, self.open_transactions, self.lose)


@pytest.fixture
def place(pravega: PravegaServer) -> Iterator[Callable[..., Place]]:
    places: list[Place] = []

    def make(**options: Any) -> Place:
        places.append(Place(pravega, **options))
        return places[-1]

    yield make
    for one in places:
        one.owner.close()


@pytest.mark.timeout(1_200)
def test_the_sink_passes_the_kit(place: Callable[..., Place]) -> None:
    """PV7, PV8."""
    left_out = check_sink(
        lambda: place().target, rescales=((2, 2), (5, 2)) if IS_DEEP else ((5, 2),), overlaps=(2,), rows=(0, 7)
    )
    assert "the order of the output" in left_out[0]


def test_a_pipeline_writes_each_record_once_although_workers_are_killed(
    place: Callable[..., Place], tmp_path: Path
) -> None:
    here = place()
    pipeline = hg.Pipeline(f"p-{uuid.uuid4().hex}", checkpointing=hg.Checkpointing(interval="50ms", dir=tmp_path))
    columns = {"number": hg.RowNumber()}
    rows = pipeline.source(hg.Generator(columns=columns, rows=4_000, rows_per_second=2_000, splits=2), name="in")
    rows.select("number", text=pl.col("number").cast(pl.String)).sink(here.sink, name="out")
    result = run_killing(pipeline, (2, 5), timeout_s=4 * PATIENCE_S, parallelism=2)
    assert result.restarts >= 1
    assert sorted(row["number"] for row in here.read()) == list(range(4_000))
    assert here.open_transactions() == []


def test_a_chain_of_two_pipelines_carries_each_record_once_in_order(
    place: Callable[..., Place], tmp_path: Path
) -> None:
    first, second = place(), place()
    keys, rounds = 20, 100

    def checkpointing(name: str) -> hg.Checkpointing:
        return hg.Checkpointing(interval="50ms", dir=tmp_path / name)

    one = hg.Pipeline(f"p-{uuid.uuid4().hex}", checkpointing=checkpointing("one"))
    rows = one.source(hg.Generator(columns={"number": hg.RowNumber()}, rows=keys * rounds, rows_per_second=1_000))
    rows.select("number", text=(pl.col("number") % keys).cast(pl.String)).sink(first.sink)
    assert run_killing(one, (2, 4), timeout_s=4 * PATIENCE_S, parallelism=2).is_finished
    two = hg.Pipeline(f"p-{uuid.uuid4().hex}", checkpointing=checkpointing("two"))
    source = hg.Pravega(
        first.server.address, first.stream, format="json", schema={"number": int, "text": str}, end="latest"
    )
    two.source(source).sink(second.sink)
    assert run_killing(two, 1, timeout_s=4 * PATIENCE_S, parallelism=2).is_finished
    for found in (first.read(), second.read()):
        assert sorted(row["number"] for row in found) == list(range(keys * rounds))
    by_key: dict[str, list[int]] = defaultdict(list)
    for row in first.read():
        by_key[row["text"]].append(row["number"])
    assert all(len(numbers) == rounds for numbers in by_key.values())


def test_a_transaction_that_was_aborted_stops_the_pipeline(place: Callable[..., Place]) -> None:
    """PV9."""
    here = place()
    pipeline = FakePipeline(here.target, 6, "it was down for too long")
    run = pipeline.start(2)
    prepared = pipeline.prepare(run)
    pipeline.complete(prepared)
    here.lose()
    with pytest.raises(
        UsageError, match=r"events .* are lost: Pravega aborted transaction .* transaction_timeout"
    ) as e:
        pipeline.start(2)
    assert e.value.is_output_gone
    committable = prepared.committables[0]
    committer = here.sink.open_committer("kit", "sink", Generation(9))
    assert "are lost" in committer.denial(committable)
    committer.close()
    assert prepared_in(committable).stream == here.stream


def write_and_seal(writer: SinkWriter, rows: pa.RecordBatch) -> None:
    writer.write(rows)
    writer.seal(CheckpointId(1))


def test_a_writer_whose_transaction_is_gone_says_why(place: Callable[..., Place]) -> None:
    here = place()
    writer = here.sink.open(SinkContext("kit", "sink", 0, 1, Generation(1), SCHEMA))
    rows = pa.RecordBatch.from_pylist([{"number": 1, "text": "1"}], schema=SCHEMA)
    here.owner.claim(Fence("kit:sink", 1))
    writer.write(rows)
    here.lose()
    with pytest.raises(StorageError, match="was aborted or is gone"):
        write_and_seal(writer, rows)
    writer.close()


def test_a_replaced_writer_begins_no_transaction(place: Callable[..., Place]) -> None:
    here = place()
    here.owner.claim(Fence("kit:sink", 2))
    writer = here.sink.open(SinkContext("kit", "sink", 0, 1, Generation(1), SCHEMA))
    with pytest.raises(FencedError):
        writer.write(pa.RecordBatch.from_pylist([{"number": 1, "text": "1"}], schema=SCHEMA))
    writer.close()


def test_transactions_are_kept_open_past_their_lease(place: Callable[..., Place]) -> None:
    here = place(transaction_timeout="10s")
    pipeline = FakePipeline(here.target, 6, "it waits")
    run = pipeline.start(2)
    prepared = pipeline.prepare(run)
    ends = time.monotonic() + 15
    while time.monotonic() < ends:
        assert here.open_transactions(), "pinged while it is prepared"
    pipeline.complete(prepared)
    pipeline.start(2)
    assert len(here.read()) == 6


def test_an_old_outcome_is_known_after_pravega_forgot_it(place: Callable[..., Place]) -> None:
    here = place()
    here.owner.claim(Fence("kit:sink", 1, "life"))
    for number in range(2_000 if IS_DEEP else 700):
        here.owner.decided("kit:sink", {str(uuid.UUID(int=number)): number})
    here.owner.forget("kit:sink", 690, [str(uuid.UUID(int=5))])
    again = StreamOwner(here.server.client, StreamName.parse(here.stream), SYSTEM_ENVIRONMENT)
    known = again.known("kit:sink")
    assert (known.generation, known.life) == (1, "life")
    assert sorted(known.committed.values())[:2] == [5, 690]
    again.close()


def test_events_without_a_key_and_events_that_cannot_be(place: Callable[..., Place], pravega: PravegaServer) -> None:
    stream = pravega.create_stream(4)
    sink = PravegaSink(pravega.address, stream, key="key", value="value")
    schema = pa.schema([("key", pa.large_string()), ("value", pa.large_binary())])
    sink.check(schema)
    writer = sink.open(SinkContext("p", "s", 0, 1, Generation(1), schema))
    rows = [{"key": None if n % 2 else f"k{n}", "value": b"%d" % n} for n in range(10)]
    writer.write(pa.RecordBatch.from_pylist(rows, schema=schema))
    with pytest.raises(UsageError, match="is null in a record"):
        writer.write(pa.RecordBatch.from_pylist([{"key": "k", "value": None}], schema=schema))
    with pytest.raises(UsageError, match="too long for Pravega"):
        writer.write(pa.RecordBatch.from_pylist([{"key": "k", "value": b"x" * (9 << 20)}], schema=schema))
    writer.write(pa.RecordBatch.from_pylist([{"key": "k", "value": b"x" * (7 << 20)}], schema=schema))
    sealed = writer.seal(CheckpointId(1))
    assert sealed.prepare() is not None
    writer.close()
    with pytest.raises(UsageError, match="routing keys of Pravega are text"):
        sink.check(pa.schema([("key", pa.large_binary()), ("value", pa.large_binary())]))
    with pytest.raises(UsageError, match="has no stream"):
        PravegaSink(pravega.address, f"{stream}-x", value="value").check(schema)
    missing = PravegaSink(pravega.address, f"made-{uuid.uuid4().hex[:8]}/events", create=3)
    missing.make_target(schema)
    missing.make_target(schema)
    assert len(pravega.client.current(missing.name)) == 3


def programs() -> list[str]:
    """Return the examples of the page that are whole."""
    return [code for code in examples("docs/how-to/pravega.md") if "hg.Pipeline(" in code]


@pytest.mark.parametrize("number", [0, 1])
def test_the_programs_of_the_page_are_built(
    pravega: PravegaServer, number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    pravega.client.create_scope("shop")
    pravega.client.create_stream(StreamName("shop", "orders"), 1)
    code = programs()[number].replace("localhost:9090", pravega.address)
    names: dict[str, Any] = {"hg": hg}
    try:
        with loading_only():
            exec(code, names)
    except RunRequested:
        assert number == 0
    names["p"].definition()
