"""Programs that read and write topics and were edited between two starts, through the public API."""

from __future__ import annotations

import threading
import uuid
from collections.abc import Sequence
from pathlib import Path

import pytest
from tests.servers.kafka import KafkaBroker

import headgate as hg
from headgate import testing

pytestmark = pytest.mark.xdist_group("kafka")
"""They share a broker."""

PATIENCE_S = 300

CHANGED = threading.Condition()
SEEN: list[bytes] = []


def see(row: dict[str, bytes]) -> bool:
    with CHANGED:
        SEEN.append(row["value"])
        CHANGED.notify_all()
    return True


def write(kafka: KafkaBroker, topic: str, *values: bytes) -> None:
    made = hg.Pipeline(f"write-{uuid.uuid4().hex}")
    rows = made.source(hg.FromRows([{"value": value} for value in values]))
    rows.sink(hg.KafkaSink(kafka.address, topic, value="value", guarantee="at-least-once"))
    testing.run(made)


def reading(kafka: KafkaBroker, topics: Sequence[str]) -> hg.Pipeline:
    made = hg.Pipeline("edited", checkpointing=hg.Checkpointing(interval="1h"))
    records = made.source(hg.Kafka(kafka.address, topics), name="in")
    records.filter(see, name="see").sink(hg.Discard(), name="out")
    return made


def read(kafka: KafkaBroker, root: Path, topics: Sequence[str], count: int) -> list[bytes]:
    """Read ``count`` values, then stop; return them."""
    SEEN.clear()
    with testing.running(reading(kafka, topics), checkpoint_dir=root) as handle:
        with CHANGED:
            assert CHANGED.wait_for(lambda: len(SEEN) >= count, PATIENCE_S)
        handle.stop()
        assert handle.wait(PATIENCE_S) is not None
    return sorted(SEEN)


def test_topics_may_be_added_and_removed_but_not_exchanged(kafka: KafkaBroker, tmp_path: Path) -> None:
    one, two = (kafka.create_topic(f"{name}-{uuid.uuid4().hex}") for name in ("one", "two"))
    write(kafka, one, b"1")
    write(kafka, two, b"2")
    assert read(kafka, tmp_path, [one], 1) == [b"1"]
    with pytest.raises(hg.PipelineFailed, match=f"'in'.*{one}"):
        testing.run(reading(kafka, [two]), checkpoint_dir=tmp_path)
    assert read(kafka, tmp_path, [two, one], 1) == [b"2"]
    write(kafka, one, b"3")
    write(kafka, two, b"4")
    assert read(kafka, tmp_path, [two], 1) == [b"4"]
    assert read(kafka, tmp_path, [one, two], 2) == [b"1", b"3"]  # from its beginning: its positions were dropped
