"""Kafka's topics beside Flink SQL and Structured Streaming: ratios and targets, and what is written to topics."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow.compute as pc
import pytest
from bench.kafka import COPY, TOPICS, judged, measured, values
from bench.peers import install, kafka_flink
from bench.peers.measure import NotInstalled

from bench import kafka

DELAYS = {"visible_ms_p50": 150.0, "visible_ms_p99": 300.0}


def rate(per_s: float) -> dict[str, Any]:
    """Return what a system measured."""
    return {"records_per_s": per_s, "records_per_cpu_s": per_s / 2}


def found(headgate: list[float], streaming: list[float], flink: list[float]) -> dict[str, list[dict[str, Any]]]:
    """Return the same rates for each topic."""
    systems = {"headgate": headgate, "streaming": streaming, "flink": flink}
    return {f"{name}/{one}": [rate(r) for r in systems[one]] for name in (*TOPICS, COPY) for one in systems}


def test_each_turn_is_compared_with_its_better_peer() -> None:
    result = judged(found([8e6, 9e6, 4e6], [1e6, 3e6, 1e6], [2e6, 1e6, 2e6]), DELAYS)
    assert result.figures["ratio_raw"] == 3.0
    assert result.figures["ratio_raw_per_cpu_s"] == 3.0
    assert result.figures["raw/headgate/records_per_cpu_s"] == 4_000_000
    verdicts = {name: result.verdict(name) for name in result.targets}
    assert verdicts["ratio_raw"] == "missed"
    assert verdicts["ratio_copy"] == verdicts["raw/headgate/records_per_cpu_s"] == verdicts["visible_ms_p99"] == "met"


def test_records_that_are_visible_late_miss_their_target() -> None:
    late = DELAYS | {"visible_ms_p99": 601.0}
    assert judged(found([8e6], [1e6], [1e6]), late).verdict("visible_ms_p99") == "missed"


def test_without_peers_only_the_ratios_are_skipped() -> None:
    own = {key: turns for key, turns in found([8e6], [], []).items() if key.endswith("/headgate")}
    result = judged(own, DELAYS)
    skipped = {name for name in result.targets if result.verdict(name) == "skipped"}
    assert skipped == {name for name in result.targets if name.startswith("ratio_")}
    assert result.met


class RecordingBroker:
    """Notes which topics exist."""

    address = "127.0.0.1:1"

    def __init__(self) -> None:
        self.topics: list[str] = []
        self.deleted: list[str] = []

    def create_topic(self, name: str, partitions: int) -> str:
        assert name not in self.topics
        self.topics.append(name)
        return name

    def delete_topic(self, name: str) -> None:
        self.deleted.append(name)


def test_systems_take_turns_and_each_copies_to_a_topic_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []
    broker: Any = RecordingBroker()

    def mine(address: str, *arguments: str) -> dict[str, Any]:
        calls.append(f"headgate {arguments[1]}")
        return rate(8e6)

    def streaming(address: str, topic: str, target: str | None, records: int) -> dict[str, Any]:
        assert target is None or target == broker.topics[-1]
        calls.append(f"streaming {topic}")
        return rate(1e6)

    def flink(address: str, topic: str, target: str | None, records: int) -> NotInstalled:
        return NotInstalled("no Flink")

    monkeypatch.setattr(kafka, "fill", lambda *arguments: None)
    monkeypatch.setattr(kafka, "mine", mine)
    monkeypatch.setattr(kafka, "PEERS", {"streaming": streaming, "flink": flink})
    result = measured(broker, 10, 5, 2)
    once = [one for topic in (*TOPICS, "raw") for one in (f"headgate {topic}-long", f"streaming {topic}")]
    assert calls == ["headgate raw", *once * 2]  # a copy before all warms the broker up
    assert broker.topics == broker.deleted
    assert len(broker.topics) == 7
    assert {key: len(turns) for key, turns in result.items()} == {
        f"{name}/{one}": 2 for name in (*TOPICS, COPY) for one in ("headgate", "streaming")
    }


@pytest.mark.parametrize("kind", TOPICS)
def test_each_record_has_100_bytes(kind: str) -> None:
    column = values(kind)
    assert pc.unique(pc.binary_length(column)).to_pylist() == [100]
    if kind != "raw":
        assert list(json.loads(column[7].as_py())) == ["id", "user", "amount", "note"]
        assert json.loads(column[7].as_py())["id"] == 7


def test_flink_reads_json_as_columns_and_copies_bytes() -> None:
    assert "'format' = 'json'" in kafka_flink.source_sql("b:1", "zstd")
    assert "`value` BYTES" in kafka_flink.source_sql("b:1", "raw-long")
    assert "blackhole" in kafka_flink.sink_sql("b:1", "raw", None)
    assert "'exactly-once'" in kafka_flink.sink_sql("b:1", "raw", "target")


def test_flink_gets_zstd_with_its_connector(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(install, "CONNECTORS", tmp_path / "connectors")
    monkeypatch.setattr(install, "KAFKA_ENVIRONMENT", tmp_path)
    for jar in ("broker/zstd-jni-1.jar", "connectors/other.jar"):
        (tmp_path / jar).parent.mkdir(exist_ok=True)
        (tmp_path / jar).touch()
    assert install.flink_connector() == []
    (tmp_path / "connectors/flink-sql-connector-kafka-5.jar").touch()
    assert [jar.name for jar in install.flink_connector()] == ["flink-sql-connector-kafka-5.jar", "zstd-jni-1.jar"]
