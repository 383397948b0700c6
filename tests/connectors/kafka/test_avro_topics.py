"""Topics of Avro that a pipeline writes and another one reads, with a schema registry."""

from __future__ import annotations

import datetime as dt
import io
import json
from collections.abc import Callable
from decimal import Decimal
from pathlib import Path
from typing import Any

import fastavro
import pytest
from tests.servers.kafka import KafkaBroker
from tests.servers.schema_registry import schema_registry

import headgate as hg
from headgate import testing
from headgate.connectors.files.file_committer import read_committed
from headgate.connectors.kafka.schemas.schema_registry import RegistryClient
from headgate.errors import HeadgateError

pytestmark = pytest.mark.xdist_group("kafka")
"""They share a broker."""

PATIENCE_S = 300


def test_what_a_pipeline_writes_as_avro_another_one_reads(kafka: KafkaBroker, topic: str, tmp_path: Path) -> None:
    at = dt.datetime(2026, 1, 1, tzinfo=dt.UTC)
    rows = [
        {"id": n, "name": f"n{n}" if n % 3 else None, "at": at + n * dt.timedelta.resolution, "price": Decimal(n) / 4}
        for n in range(100)
    ]
    with schema_registry() as registry:
        writing = hg.Pipeline("writing")
        sink = hg.KafkaSink(kafka.address, topic, format="avro", key="name", registry=registry.url)
        writing.source(hg.FromRows(rows)).sink(sink)
        testing.run(writing)
        reading = hg.Pipeline("reading")
        source = hg.Kafka(kafka.address, topic, format="avro", end="latest", registry=registry.url)
        reading.source(source).sink(hg.FileSink(tmp_path / "out"))
        testing.run(reading)
    found = [json.loads(line) for file in (tmp_path / "out").glob("*.jsonl") for line in file.open()]
    same = [(one["id"], one["name"], dt.datetime.fromisoformat(one["at"]), Decimal(one["price"])) for one in found]
    assert sorted(same) == [(row["id"], row["name"], row["at"], row["price"]) for row in rows]


OLD = {"type": "record", "name": "r", "fields": [{"name": "id", "type": "int"}]}
NEW = {
    "type": "record",
    "name": "r",
    "fields": [{"name": "note", "type": "string"}, {"name": "id", "type": "int"}],
}


def test_a_schema_that_comes_while_the_registry_is_away_loses_nothing(
    kafka: KafkaBroker, topic: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The records wait for it, over restarts too."""
    asks = RegistryClient.__init__

    def hastily(self: RegistryClient, registry: Any, environment: Any, patience_ms: int = 0) -> None:
        asks(self, registry, environment, patience_ms)

    monkeypatch.setattr(RegistryClient, "__init__", hastily)
    restart = hg.FixedDelay(delay="50ms")
    pipeline = hg.Pipeline("evolving", checkpointing=hg.Checkpointing(interval="50ms", dir=tmp_path), restart=restart)
    with schema_registry() as registry:
        first = registry.register(f"{topic}-value", OLD)
        put(kafka, topic, frame(first) + b"\x02")
        source = hg.Kafka(kafka.address, topic, format="avro", registry=registry.url, schema=json.dumps(OLD))
        pipeline.source(source, name="in").sink(hg.FileSink(tmp_path / "out", roll_interval=0), name="out")
        with testing.running(pipeline) as handle:
            until(handle, lambda: ids(tmp_path / "out") == [1])
            second = registry.register(f"{topic}-value", NEW)
            registry.failures = 1_000_000
            put(kafka, topic, frame(second) + b"\x02x\x04", frame(first) + b"\x06")
            until(handle, lambda: handle.progress.restarts > 1)
            assert ids(tmp_path / "out") == [1]
            registry.failures = 0
            until(handle, lambda: ids(tmp_path / "out") == [1, 2, 3])


def test_a_sink_names_a_registry_that_is_down_and_goes_on_with_it(
    kafka: KafkaBroker, topic: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("headgate.connectors.kafka.schemas.schema_registry.PAUSE_MS_MIN", 1_000_000)
    checkpointing = hg.Checkpointing(dir=tmp_path)
    pipeline = hg.Pipeline("p", checkpointing=checkpointing, restart=hg.FixedDelay(attempts=1, delay="10ms"))
    with schema_registry() as registry:
        port = registry.url
    sink = hg.KafkaSink(kafka.address, topic, format="avro", registry=port)
    pipeline.source(hg.FromRows([{"id": 1}])).sink(sink, name="out")
    with pytest.raises(HeadgateError, match=rf"cannot ask the schema registry at {port}/subjects/.*refused") as found:
        testing.run(pipeline, timeout_s=PATIENCE_S)
    assert "\n" not in str(found.value)


def frame(number: int) -> bytes:
    return b"\0" + number.to_bytes(4, "big")


def put(broker: KafkaBroker, topic: str, *values: bytes | None) -> None:
    broker.put(topic, ({"value": value, "partition": 0} for value in values))


def ids(directory: Path) -> list[int]:
    rows = read_committed(str(directory)).to_dicts() if directory.exists() else []
    return sorted(row["id"] for row in rows)


def until(handle: Any, condition: Callable[[], bool]) -> None:
    while not condition():
        assert not handle.progress.state.has_ended


def table(**types: Any) -> dict[str, Any]:
    """Return the schema of Debezium's envelopes of a table with these columns."""
    row = {"type": "record", "name": "Value", "fields": [{"name": name, "type": of} for name, of in types.items()]}
    fields = [{"name": "before", "type": ["null", row]}, {"name": "after", "type": ["null", "Value"]}]
    return {"type": "record", "name": "Envelope", "fields": [*fields, {"name": "op", "type": "string"}]}


def test_a_table_that_is_altered_while_it_is_read_goes_on(kafka: KafkaBroker, topic: str, tmp_path: Path) -> None:
    """Tombstones are left out, and what is no change goes to the dead letters, with its place."""
    old, new = table(id="int"), table(note="string", id="int")
    pipeline = hg.Pipeline(
        "altered",
        checkpointing=hg.Checkpointing(interval="50ms", dir=tmp_path / "checkpoints"),
        bad_records=hg.DeadLetter(hg.FileSink(tmp_path / "bad", roll_interval=0)),
    )
    with schema_registry() as registry:
        number = registry.register(f"{topic}-value", old)
        put(kafka, topic, envelope(number, old, "c", None, {"id": 1}), b"?")
        source = hg.Kafka(kafka.address, topic, format="debezium-avro", registry=registry.url)
        changes = pipeline.source(source, name="in").records_as_changes("id")
        changes.sink(hg.FileSink(tmp_path / "out", roll_interval=0), name="out")
        with testing.running(pipeline) as handle:
            until(handle, lambda: ids(tmp_path / "out") == [1])
            number = registry.register(f"{topic}-value", new)
            row = {"note": "n", "id": 2}
            put(kafka, topic, envelope(number, new, "c", None, row), envelope(number, new, "d", row, None), None)
            put(kafka, topic, envelope(number, new, "u", None, {"note": "n", "id": 3}))
            until(handle, lambda: ids(tmp_path / "out") == [1, 2, 2, 3])
            until(handle, lambda: (tmp_path / "bad").exists() and len(read_committed(str(tmp_path / "bad"))) == 1)
    found = read_committed(str(tmp_path / "out")).sort("id", "op").to_dicts()
    assert [(row["id"], row["op"]) for row in found] == [
        (1, "insert"),
        (2, "delete"),
        (2, "insert"),
        (3, "update_after"),
    ]
    assert read_committed(str(tmp_path / "bad"))["position"].to_list() == [f"topic {topic} partition 0 offset 1"]


def envelope(number: int, schema: dict[str, Any], op: str, before: Any, after: Any) -> bytes:
    out = io.BytesIO()
    fastavro.schemaless_writer(out, fastavro.parse_schema(schema), {"before": before, "after": after, "op": op})
    return frame(number) + out.getvalue()
