"""Topics of Avro that a pipeline writes and another one reads, with a schema registry."""

from __future__ import annotations

import datetime as dt
import json
from decimal import Decimal
from pathlib import Path

import pytest
from tests.servers.kafka import KafkaBroker
from tests.servers.schema_registry import schema_registry

import headgate as hg
from headgate import testing

pytestmark = pytest.mark.xdist_group("kafka")
"""They share a broker."""


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
