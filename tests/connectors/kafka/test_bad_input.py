"""What is wrong around a topic is one sentence of what to do, and nothing is lost: once mended, the run goes on."""

from __future__ import annotations

import contextlib
import json
import os
import re
import subprocess
import uuid
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import polars as pl
import pytest
from tests.servers.kafka import LIMITED_USER, PASSWORD, TWO_PHASE_COMMIT, KafkaBroker, kafka_broker
from tests.servers.kafka import RIGHTS as AUTHORIZER

import headgate as hg
from headgate import testing
from headgate.connectors.kafka import source as sourcing
from headgate.connectors.kafka.client import KafkaClient
from headgate.errors import HeadgateError, PipelineFailed, StorageError, UsageError

pytestmark = pytest.mark.xdist_group("kafka")
"""They share a broker."""

TIMEOUT_S = 300
ROWS = 500


@pytest.fixture
def limited(monkeypatch: pytest.MonkeyPatch) -> hg.KafkaSecurity:
    monkeypatch.setenv("KAFKA_PASSWORD", PASSWORD)
    return hg.KafkaSecurity(mechanism="PLAIN", user=LIMITED_USER, secret="env:KAFKA_PASSWORD")


@pytest.fixture
def prefix() -> str:
    return f"p-{uuid.uuid4().hex}"


def numbers(broker: KafkaBroker, topic: str) -> list[int]:
    return sorted(json.loads(one.value())["number"] for one in broker.committed(topic))


class PipelineToTopic:
    """A pipeline of ``ROWS`` numbers into a topic, which is run as often as it takes."""

    def __init__(self, sink: hg.KafkaSink, directory: Path, text: pl.Expr | None = None) -> None:
        self._sink = sink
        checkpointing = hg.Checkpointing(interval="20ms", dir=directory)
        self.pipeline = hg.Pipeline("p", checkpointing=checkpointing, restart=hg.FixedDelay(attempts=1, delay="10ms"))
        columns = {"number": hg.RowNumber()}
        rows = self.pipeline.source(hg.Generator(columns=columns, rows=ROWS, rows_per_second=ROWS * 2), name="in")
        text = pl.col("number").cast(pl.String) if text is None else text
        self._rows = rows.select("number", text=text)
        self._is_built = False

    def run(self) -> None:
        self.build()
        assert testing.run(self.pipeline, timeout_s=TIMEOUT_S).is_finished

    def build(self) -> None:
        """Name the sink, which is checked."""
        if not self._is_built:
            self._rows.sink(self._sink, name="out")
            self._is_built = True

    def fail(self, problem: str) -> None:
        with pytest.raises(HeadgateError) as found:
            self.run()
        one_sentence(found.value, problem)


def one_sentence(error: Exception, problem: str) -> None:
    text = str(error)
    assert re.search(problem, text), text
    assert "\n" not in text
    assert "Traceback" not in text
    assert "the brokers (" not in text


# -- rights ------------------------------------------------------------------------------------------------------------

RIGHTS = ("WRITE TOPIC", "READ TOPIC", "WRITE TRANSACTIONAL_ID", "READ GROUP")


def allow(broker: KafkaBroker, topic: str, prefix: str, rights: Sequence[str]) -> None:
    for right in rights:
        operation, kind = right.split()
        broker.allow(kind, topic if kind == "TOPIC" else prefix, operation, is_prefix=kind != "TOPIC")


@pytest.mark.parametrize(
    ("missing", "problem"),
    [
        ("WRITE TOPIC", r"cannot write to partition 0 of topic 't-\w+': .* in Kafka at .*; add an ACL"),
        ("READ TOPIC", r"add an ACL for Read on topic 't-\w+'"),
        ("WRITE TRANSACTIONAL_ID", r"add an ACL for Write on transactional id 'p-\w+:owners:.*'"),
        ("READ GROUP", r"add an ACL for Read on group 'p-\w+:owners.*'"),
    ],
)
def test_a_sink_without_a_right_names_it_and_goes_on_with_it(
    kafka: KafkaBroker,
    topic: str,
    prefix: str,
    limited: hg.KafkaSecurity,
    tmp_path: Path,
    missing: str,
    problem: str,
) -> None:
    allow(kafka, topic, prefix, [right for right in RIGHTS if right != missing])
    pipeline = PipelineToTopic(hg.KafkaSink(kafka.sasl_address, topic, security=limited, prefix=prefix), tmp_path)
    pipeline.fail(problem)
    assert numbers(kafka, topic) == []
    allow(kafka, topic, prefix, [missing])
    pipeline.run()
    assert numbers(kafka, topic) == list(range(ROWS))


def test_a_sink_of_a_topic_that_the_user_must_not_see_names_it(
    kafka: KafkaBroker, topic: str, limited: hg.KafkaSecurity, tmp_path: Path
) -> None:
    sink = hg.KafkaSink(kafka.sasl_address, topic, security=limited)
    PipelineToTopic(sink, tmp_path).fail(rf"operator 'out': cannot see topic '{topic}': the user has no right to it")
    at_least_once = hg.KafkaSink(kafka.sasl_address, topic, security=limited, guarantee="at-least-once")
    kafka.allow("TOPIC", topic, "DESCRIBE")
    PipelineToTopic(at_least_once, tmp_path).fail(r"cannot (begin to )?write.*: .*; add an ACL")


@pytest.mark.long
def test_two_phase_commit_without_its_right_ends_at_the_start(
    prefix: str, limited: hg.KafkaSecurity, tmp_path: Path
) -> None:
    with kafka_broker(AUTHORIZER + TWO_PHASE_COMMIT) as broker:
        broker.create_topic("t")
        allow(broker, "t", prefix, RIGHTS)
        sink = hg.KafkaSink(broker.sasl_address, "t", security=limited, prefix=prefix, two_phase=True)
        right = rf"add an ACL for Write and for TwoPhaseCommit on transactional ids that begin with '{prefix}'$"
        PipelineToTopic(sink, tmp_path).fail(right)  # and not after restarts


def test_rights_that_are_taken_away_meanwhile_lose_nothing(
    kafka: KafkaBroker, topic: str, prefix: str, limited: hg.KafkaSecurity, tmp_path: Path
) -> None:
    allow(kafka, topic, prefix, RIGHTS)
    place = tmp_path / "in"
    place.mkdir()

    def add(number: int) -> None:
        (place / f"{number}.jsonl").write_text(f'{{"number": {number}}}\n')

    pipeline = hg.Pipeline(
        "p",
        checkpointing=hg.Checkpointing(interval="20ms", dir=tmp_path / "checkpoints"),
        restart=hg.FixedDelay(attempts=1, delay="10ms"),
    )
    rows = pipeline.source(hg.JsonLines(place, {"number": int}, follow=True, discovery_interval="20ms"), name="in")
    rows.sink(hg.KafkaSink(kafka.sasl_address, topic, security=limited, prefix=prefix), name="out")
    add(0)
    with testing.running(pipeline) as handle:
        while not numbers(kafka, topic):
            continue
        kafka.deny("TOPIC", topic)
        add(1)
        with pytest.raises(PipelineFailed) as found:
            handle.wait(TIMEOUT_S)
    one_sentence(found.value, r"(?=.*; add an ACL).*topic 't-\w+'")  # a write, or a look at the sink's owner, meets it
    assert numbers(kafka, topic) == [0]
    allow(kafka, topic, prefix, RIGHTS)
    with testing.running(pipeline) as handle:
        while numbers(kafka, topic) != [0, 1]:
            assert not handle.progress.state.has_ended


def read(source: hg.Kafka, directory: Path) -> list[Any]:
    pipeline = hg.Pipeline("r", restart=hg.FixedDelay(attempts=1, delay="10ms"))
    pipeline.source(source, name="in").sink(hg.FileSink(directory / "out"), name="out")
    testing.run(pipeline, timeout_s=TIMEOUT_S, checkpoint_dir=directory / "checkpoints")
    files = [one for one in (directory / "out").iterdir() if one.suffix == ".jsonl"]
    return [json.loads(line) for one in files for line in one.read_text().splitlines()]


def put(broker: KafkaBroker, topic: str, *values: bytes) -> None:
    broker.put(topic, ({"value": value} for value in values))


def test_a_source_without_a_right_names_it_and_goes_on_with_it(
    kafka: KafkaBroker, topic: str, limited: hg.KafkaSecurity, tmp_path: Path
) -> None:
    put(kafka, topic, b"a", b"b")
    source = hg.Kafka(kafka.sasl_address, topic, format="text", end="latest", security=limited, group="none-given")
    with pytest.raises(UsageError) as unseen:
        read(source, tmp_path)
    one_sentence(unseen.value, rf"operator 'in': cannot see topic '{topic}': the user has no right to it")
    kafka.allow("TOPIC", topic, "DESCRIBE")
    with pytest.raises(PipelineFailed) as unread:
        read(source, tmp_path)
    one_sentence(unread.value, rf"cannot read partition 0 of topic '{topic}': the user has no right to it")
    kafka.allow("TOPIC", topic, "READ")
    assert [row["value"] for row in read(source, tmp_path)] == ["a", "b"]  # the group is only for monitoring


def test_a_source_that_begins_at_a_group_needs_the_right_to_it(
    kafka: KafkaBroker, topic: str, limited: hg.KafkaSecurity, tmp_path: Path
) -> None:
    put(kafka, topic, b"a")
    kafka.allow("TOPIC", topic, "READ")
    options: dict[str, Any] = {"format": "text", "end": "latest", "start": "committed", "security": limited}
    source = hg.Kafka(kafka.sasl_address, topic, group=f"g-{topic}", **options)
    with pytest.raises(PipelineFailed) as found:
        read(source, tmp_path)
    one_sentence(found.value, rf"cannot use group 'g-{topic}': .*; add an ACL for Read on group 'g-{topic}'")
    kafka.allow("GROUP", f"g-{topic}", "READ")
    assert [row["value"] for row in read(source, tmp_path)] == ["a"]


# -- brokers and logins ------------------------------------------------------------------------------------------------


class HastySink(hg.KafkaSink):
    """A sink that waits for brokers for a moment only, if they are not to be reached."""

    def client(self) -> KafkaClient:
        client = super().client()
        client.patience_ms = sourcing.LOOK_MS
        return client


Where = Callable[[KafkaBroker], str]
WRONG: list[tuple[Where, dict[str, Any], str]] = [
    (lambda broker: "127.0.0.1:1", {}, r"Kafka at 127.*Connection refused; check the addresses of the brokers"),
    (lambda broker: "kafka.invalid:9092", {}, r"kafka.invalid:9092: .*; check the addresses of the brokers"),
    (
        lambda broker: broker.address,
        {"topic": "missing"},
        r"operator '\w+': Kafka at .* has no topic 'missing'; create",
    ),
    (lambda broker: broker.address, {"topic": "a b"}, r"operator '\w+': cannot have a topic 'a b': that is no name"),
    (lambda broker: broker.sasl_address, {}, r"if it demands TLS or a login there, give security"),
    (lambda broker: broker.address, {"security": hg.KafkaSecurity(tls=True)}, r"if there is no TLS, leave tls out"),
    (
        lambda broker: broker.sasl_address,
        {"security": hg.KafkaSecurity(mechanism="PLAIN", user="limited", secret="env:WRONG")},
        r"broker 127.* does not log user 'limited' in: Authentication failed: Invalid username or password",
    ),
    (
        lambda broker: broker.address,
        {"security": hg.KafkaSecurity(mechanism="PLAIN", user="limited", secret="env:WRONG")},
        r"does not take mechanism PLAIN; it takes no login there: leave mechanism out, or name another port",
    ),
]


MAY_PASS = [problem for _, _, problem in WRONG if "; check" in problem or problem.startswith("if ")]
"""Problems that are looked at again for a while."""


@pytest.mark.parametrize(("where", "options", "problem"), WRONG, ids=[f"{number}" for number in range(len(WRONG))])
def test_wrong_brokers_topics_and_logins_are_named_before_anything_starts(
    kafka: KafkaBroker,
    topic: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    where: Where,
    options: dict[str, Any],
    problem: str,
) -> None:
    monkeypatch.setenv("WRONG", "guessed")
    if problem in MAY_PASS:
        monkeypatch.setattr(sourcing, "LOOK_MS", 1_000)
    brokers, options = where(kafka), {"topic": topic, **options}
    PipelineToTopic(HastySink(brokers, **options), tmp_path).fail(problem)
    with pytest.raises((UsageError, StorageError)) as found:
        read(hg.Kafka(brokers, options.pop("topic"), end="latest", **options), tmp_path)
    one_sentence(found.value, problem)
    assert not (tmp_path / "out").exists()


# -- schemas -----------------------------------------------------------------------------------------------------------

SCHEMA = json.dumps({"type": "record", "name": "r", "fields": [{"name": "id", "type": "int"}]})


def test_a_schema_id_that_the_registry_lacks_is_a_bad_record(
    kafka: KafkaBroker, topic: str, registry: Any, tmp_path: Path
) -> None:
    number = registry.register(f"{topic}-value", SCHEMA)
    put(kafka, topic, b"\0" + number.to_bytes(4, "big") + b"\x02", b"\0\0\0\0\x63\x02")
    source = hg.Kafka(kafka.address, topic, format="avro", registry=registry.url, end="latest")
    with pytest.raises(PipelineFailed) as found:
        read(source, tmp_path)
    one_sentence(
        found.value,
        rf"operator 'in' refused a record at .*{topic}.*1: its schema, id 99, is not in the registry; .*DeadLetter",
    )
    while registry.register("other", SCHEMA) < 99:
        continue
    assert [row["id"] for row in read(source, tmp_path)] == [1, 1]


def test_a_registry_that_is_down_is_named_before_anything_starts(
    kafka: KafkaBroker, topic: str, registry: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sourcing, "LOOK_MS", 200)
    registry.end()
    with pytest.raises(StorageError) as found:
        read(hg.Kafka(kafka.address, topic, format="avro", registry=registry.url, end="latest"), tmp_path)
    one_sentence(found.value, rf"cannot ask the schema registry at {registry.url}/subjects/{topic}-value.*refused")


# -- records that are too large ----------------------------------------------------------------------------------------

LARGE_AT = 300
LARGE = pl.when(pl.col("number") == LARGE_AT).then(pl.lit("x" * 3_000)).otherwise(pl.col("number").cast(pl.String))


def raise_limit(broker: KafkaBroker, topic: str, limit: int) -> None:
    from confluent_kafka.admin import AlterConfigOpType, ConfigEntry, ConfigResource, ResourceType

    entry = ConfigEntry("max.message.bytes", f"{limit}", incremental_operation=AlterConfigOpType.SET)
    admin = broker.admin()
    (asked,) = admin.incremental_alter_configs(
        [ConfigResource(ResourceType.TOPIC, topic, incremental_configs=[entry])]
    ).values()
    asked.result(TIMEOUT_S)


@pytest.mark.parametrize("compression", ["none", "zstd"])
def test_a_record_that_is_too_large_is_named_and_written_once_the_topic_takes_it(
    kafka: KafkaBroker, tmp_path: Path, compression: Any
) -> None:
    topic = kafka.create_topic(f"t-{uuid.uuid4().hex}", config={"max.message.bytes": "2000"})
    sink = hg.KafkaSink(kafka.address, topic, compression=compression, prefix=topic)
    pipeline = PipelineToTopic(sink, tmp_path, LARGE)
    pipeline.fail(
        rf"topic '{topic}' takes no record as large as the one that begins with '{{\"number\":{LARGE_AT},.*': it has "
        r"3,\d\d\d bytes, and at most 2,000 are taken; raise max.message.bytes of the topic, or leave such records out"
    )
    assert LARGE_AT not in numbers(kafka, topic)
    raise_limit(kafka, topic, 10_000)
    pipeline.run()
    assert numbers(kafka, topic) == list(range(ROWS))


def test_a_record_with_a_key_is_named_by_it(kafka: KafkaBroker, tmp_path: Path) -> None:
    topic = kafka.create_topic(f"t-{uuid.uuid4().hex}", config={"max.message.bytes": "2000"})
    sink = hg.KafkaSink(kafka.address, topic, key="text", prefix=topic, guarantee="at-least-once")
    PipelineToTopic(sink, tmp_path, LARGE).fail(
        rf"topic '{topic}' takes no record as large as the one with key 'xxxx*'"
    )


def test_each_topic_of_a_sink_has_its_own_limit(kafka: KafkaBroker, tmp_path: Path) -> None:
    topic = kafka.create_topic(f"t-{uuid.uuid4().hex}")
    small = kafka.create_topic(f"t-{uuid.uuid4().hex}", config={"max.message.bytes": "2000"})
    sink = hg.KafkaSink(kafka.address, topic, topic_column="text", prefix=topic)
    pipeline = PipelineToTopic(sink, tmp_path, pl.when(pl.col("number") % 2 == 0).then(pl.lit(small)))
    pipeline.run()
    assert numbers(kafka, small) == list(range(0, ROWS, 2))
    assert numbers(kafka, topic) == list(range(1, ROWS, 2))


def test_a_batch_that_the_user_could_not_know_to_be_too_large_says_which_right_helps(
    kafka: KafkaBroker, prefix: str, limited: hg.KafkaSecurity, tmp_path: Path
) -> None:
    topic = kafka.create_topic(f"t-{uuid.uuid4().hex}", config={"max.message.bytes": "150"})
    allow(kafka, topic, prefix, RIGHTS)
    pipeline = PipelineToTopic(hg.KafkaSink(kafka.sasl_address, topic, security=limited, prefix=prefix), tmp_path)
    pipeline.fail(r"it takes no batch of .* bytes; raise .* or add an ACL for DescribeConfigs on it")
    kafka.allow("TOPIC", topic, "DESCRIBE_CONFIGS")
    pipeline.run()
    assert numbers(kafka, topic) == list(range(ROWS))


# -- a full disk -------------------------------------------------------------------------------------------------------

SMALL_DISK = """
log.segment.bytes=1048576
log.index.size.max.bytes=4096
metadata.log.segment.bytes=8388608
"""


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 64 MB."""
    place = tmp_path / "disk"
    place.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64m", "tmpfs", str(place)], capture_output=True)
    if mounted.returncode:
        pytest.skip(f"no small file system can be mounted here: {mounted.stderr.decode().strip()}")
    yield place
    subprocess.run(["umount", "-l", str(place)], check=True)


@pytest.mark.crash
def test_a_broker_with_a_full_disk_is_waited_for(disk: Path, tmp_path: Path) -> None:
    """Such a broker ends itself; with space and started again, it gets what was not acknowledged."""
    with kafka_broker(SMALL_DISK, data=disk) as broker:
        broker.create_topic("t")
        pipeline = PipelineToTopic(hg.KafkaSink(broker.address, "t"), tmp_path / "checkpoints", pl.lit("x" * 3_000))
        pipeline.build()
        with testing.running(pipeline.pipeline) as handle:
            while not numbers(broker, "t"):
                continue
            ballast = disk / "ballast"
            with ballast.open("wb") as file, contextlib.suppress(OSError):
                while True:
                    os.write(file.fileno(), bytes(1 << 16))
            broker.wait()
            ballast.unlink()
            broker.kill()
            broker.start()
            result = handle.wait(TIMEOUT_S)
        assert result is not None
        assert result.is_finished
        assert numbers(broker, "t") == list(range(ROWS))
