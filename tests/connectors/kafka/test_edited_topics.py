"""What changes between two starts: programs that read and write topics, topics, and consumer groups."""

from __future__ import annotations

import threading
import uuid
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from tests.servers.kafka import KafkaBroker

import headgate as hg
from headgate import testing
from headgate.connectors.kafka.client import KafkaClient

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
    return run(reading(kafka, topics), root, count)


def run(pipeline: hg.Pipeline, root: Path, count: int, **begins: Any) -> list[bytes]:
    """Read ``count`` values, then stop; return them."""
    SEEN.clear()
    with testing.running(pipeline, checkpoint_dir=root, **begins) as handle:
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


def in_group(kafka: KafkaBroker, topic: str) -> hg.Pipeline:
    made = hg.Pipeline("grouped", checkpointing=hg.Checkpointing(interval="1h"))
    source = hg.Kafka(kafka.address, topic, group=topic, start="committed")
    made.source(source, name="in").filter(see, name="see").sink(hg.Discard(), name="out")
    return made


def committed(client: KafkaClient, topic: str) -> int:
    return client.committed_offsets(topic, topic, [0])[0][0]


def test_a_group_has_the_last_checkpoint_and_its_reset_by_others_changes_nothing(
    kafka: KafkaBroker, client: KafkaClient, topic: str, tmp_path: Path
) -> None:
    write(kafka, topic, b"1", b"2")
    assert run(in_group(kafka, topic), tmp_path, 2) == [b"1", b"2"]
    assert committed(client, topic) == 2  # the only checkpoint was that of the stop
    client.commit_offsets(topic, topic, {0: 0})
    write(kafka, topic, b"3")
    assert run(in_group(kafka, topic), tmp_path, 1) == [b"3"]
    assert committed(client, topic) == 3


def through(kafka: KafkaBroker, reads: str, writes: str) -> hg.Pipeline:
    made = hg.Pipeline("through", checkpointing=hg.Checkpointing(interval="1h"), restart=hg.NoRestart())
    records = made.source(hg.Kafka(kafka.address, reads), name="in").filter(see, name="see")
    records.select("value").sink(hg.KafkaSink(kafka.address, writes, value="value"), name="out")
    return made


def written(kafka: KafkaBroker, topic: str) -> list[bytes]:
    made = hg.Pipeline(f"read-{uuid.uuid4().hex}")
    made.source(hg.Kafka(kafka.address, topic, end="latest"), name="in").filter(see).sink(hg.Discard())
    SEEN.clear()
    testing.run(made)
    return sorted(SEEN)


def test_a_sink_goes_on_in_another_topic_once_the_program_says_so(
    kafka: KafkaBroker, topic: str, tmp_path: Path
) -> None:
    one, two = (kafka.create_topic(f"{name}-{uuid.uuid4().hex}") for name in ("one", "two"))
    write(kafka, topic, b"1")
    run(through(kafka, topic, one), tmp_path, 1)
    write(kafka, topic, b"2")
    with pytest.raises(hg.PipelineFailed, match=rf"'out' wrote to kafka:{one} when .*moved="):
        testing.run(through(kafka, topic, two), checkpoint_dir=tmp_path)
    run(through(kafka, topic, two), tmp_path, 1, moved={f"kafka:{one}": f"kafka:{two}"})
    assert (written(kafka, one), written(kafka, two)) == ([b"1"], [b"2"])


def test_two_pipelines_of_one_name_do_not_write_to_one_topic(kafka: KafkaBroker, topic: str, tmp_path: Path) -> None:
    target = kafka.create_topic(f"target-{uuid.uuid4().hex}")
    write(kafka, topic, b"1")
    run(through(kafka, topic, target), tmp_path / "here", 1)
    with pytest.raises(hg.PipelineFailed, match=r"belongs to the pipeline of the same name .*/here/through"):
        testing.run(through(kafka, topic, target), checkpoint_dir=tmp_path / "there")
    assert written(kafka, target) == [b"1"]
