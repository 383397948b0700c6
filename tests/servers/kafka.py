"""A Kafka broker: one node of Kafka 4.3 without ZooKeeper, in a directory of its own, on loopback.

``scripts/setup.sh servers`` gets the broker. ``make kafka`` starts one to try things with (``main`` below).
"""

from __future__ import annotations

import argparse
import contextlib
import os
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from tests.servers.processes import LOOPBACK, START_S, Port, ServerProcess, answers

VERSION = "4.3.1"
LIBRARIES = Path(__file__).parents[2] / ".cache" / f"kafka-{VERSION}"
"""Where ``scripts/setup.sh servers`` puts the broker."""

ARCHIVE = LIBRARIES / "classes.jsa"
"""What a broker loads, as the JVM maps it into memory: a start takes three fifths of the processor time with it.

A JVM that it does not fit, of another release for example, goes on without it.
"""

FORMATTED = LIBRARIES / "formatted"
"""An empty directory of a broker, of which each one gets a copy: to format one takes a JVM of its own."""

USER, PASSWORD = "headgate", "tests-of-headgate"

PARTITION_END = -191
"""librdkafka's code for the end of a partition, which is no error."""

HEAP_MB = 768

KAFKA = ("-cp", f"{LIBRARIES}/*")

PROPERTIES = """
process.roles=broker,controller
node.id=1
controller.quorum.voters=1@{host}:{controller}
listeners=PLAINTEXT://{host}:{port},SASL://{host}:{sasl},CONTROLLER://{host}:{controller}
advertised.listeners=PLAINTEXT://{host}:{port},SASL://{host}:{sasl}
listener.security.protocol.map=PLAINTEXT:PLAINTEXT,SASL:{sasl_protocol},CONTROLLER:PLAINTEXT
inter.broker.listener.name=PLAINTEXT
controller.listener.names=CONTROLLER
log.dirs={data}
num.partitions=1
auto.create.topics.enable=false
offsets.topic.replication.factor=1
offsets.topic.num.partitions=4
transaction.state.log.replication.factor=1
transaction.state.log.min.isr=1
transaction.state.log.num.partitions=4
share.coordinator.state.topic.replication.factor=1
share.coordinator.state.topic.min.isr=1
share.coordinator.state.topic.num.partitions=1
group.initial.rebalance.delay.ms=0
# a restart after SIGKILL waits for the former session to end; on a busy machine a shorter one ends by itself
broker.session.timeout.ms=6000
broker.heartbeat.interval.ms=500
# no record twice a second that says that nothing happened
metadata.max.idle.interval.ms=0
transaction.abort.timed.out.transaction.cleanup.interval.ms=1000
transaction.max.timeout.ms=604800000
log.cleaner.dedupe.buffer.size=16777216
# compacted soon, where a test asks for it
log.cleaner.backoff.ms=500
# records of tests may be of any time
log.retention.ms=-1
log.message.timestamp.after.max.ms=9223372036854775807
sasl.enabled.mechanisms=PLAIN,SCRAM-SHA-256,SCRAM-SHA-512,OAUTHBEARER
listener.name.sasl.plain.sasl.jaas.config=org.apache.kafka.common.security.plain.PlainLoginModule required \
    user_{user}="{password}";
listener.name.sasl.scram-sha-256.sasl.jaas.config=org.apache.kafka.common.security.scram.ScramLoginModule required;
listener.name.sasl.scram-sha-512.sasl.jaas.config=org.apache.kafka.common.security.scram.ScramLoginModule required;
listener.name.sasl.oauthbearer.sasl.jaas.config=\
    org.apache.kafka.common.security.oauthbearer.OAuthBearerLoginModule required \
    unsecuredLoginStringClaim_sub="{user}";
listener.name.sasl.oauthbearer.sasl.server.callback.handler.class=\
    org.apache.kafka.common.security.oauthbearer.internals.unsecured.OAuthBearerUnsecuredValidatorCallbackHandler
"""

TWO_PHASE_COMMIT = """
transaction.two.phase.commit.enable=true
unstable.api.versions.enable=true
"""
"""Settings with which the broker takes part in two-phase commit: its own opt-in (KIP-939)."""

LIMITED_USER = "limited"
"""A user without rights, with ``PASSWORD`` and mechanism PLAIN, at brokers with ``RIGHTS``."""

RIGHTS = f"""
authorizer.class.name=org.apache.kafka.metadata.authorizer.StandardAuthorizer
super.users=User:ANONYMOUS;User:{USER}
listener.name.sasl.plain.sasl.jaas.config=org.apache.kafka.common.security.plain.PlainLoginModule required \\
    user_{USER}="{PASSWORD}" user_{LIMITED_USER}="{PASSWORD}";
"""
"""Settings with which users need rights, but for ``USER`` and those without a login."""

LOG4J = """
rootLogger.level=WARN
rootLogger.appenderRefs=stdout
rootLogger.appenderRef.stdout.ref=STDOUT
appender.console.type=Console
appender.console.name=STDOUT
appender.console.layout.type=PatternLayout
appender.console.layout.pattern=[%d] %p %m (%c)%n
"""


class KafkaBroker:
    """A broker that is its own controller.

    Attributes:
        address: ``host:port`` of the listener without security.
        sasl_address: ``host:port`` of the listener that demands SASL as ``USER`` with ``PASSWORD``; over TLS if a
            ``tls`` key store was given.
        data: where its topics are.
        is_measured: compile for speed, which makes the start slower by half.
        jvm: another option of the JVM.
    """

    def __init__(
        self,
        directory: Path,
        host: str = LOOPBACK,
        settings: str = "",
        tls: Path | None = None,
        *,
        data: Path | None = None,
        is_measured: bool = False,
        jvm: str = f"-XX:SharedArchiveFile={ARCHIVE}",
    ) -> None:
        self._ports = [Port(host) for _ in range(3)]
        port, sasl, controller = (place.number for place in self._ports)
        self.address, self.sasl_address = f"{host}:{port}", f"{host}:{sasl}"
        self._properties, self.data = directory / "server.properties", data or directory / "data"
        text = PROPERTIES.format(
            host=host, port=port, sasl=sasl, controller=controller, data=self.data, user=USER, password=PASSWORD,
            sasl_protocol="SASL_SSL" if tls else "SASL_PLAINTEXT",
        )  # fmt: skip
        if tls is not None:
            text += f"listener.name.sasl.ssl.keystore.type=PEM\nlistener.name.sasl.ssl.keystore.location={tls}\n"
        self._properties.write_text(text + settings)
        (directory / "log4j2.properties").write_text(LOG4J)
        make_formatted()
        shutil.copytree(FORMATTED, self.data, dirs_exist_ok=True)
        command = [
            java(), jvm, "-Xlog:disable", f"-Xmx{HEAP_MB}m", "-XX:+UseSerialGC",
            *(() if is_measured else ("-XX:TieredStopAtLevel=1",)),
            f"-Dlog4j2.configurationFile={directory / 'log4j2.properties'}",
            *KAFKA, "kafka.Kafka", str(self._properties),
        ]  # fmt: skip
        self.log = directory / "log"
        self._process = ServerProcess(command, self.log, lambda: self._is_ready(port, host))
        try:
            self._process.start()
        except BaseException:
            self.end()
            raise

    def _is_ready(self, port: int, host: str) -> bool:
        if not answers(port, host):
            return False
        try:
            return bool(self.admin().list_topics(timeout=1).brokers)  # one look: not a wait for anything
        except Exception:
            return False

    def admin(self) -> Any:
        """Return librdkafka's client for administrators."""
        from confluent_kafka.admin import AdminClient

        return AdminClient({"bootstrap.servers": self.address, "log_level": 0})

    def create_topic(self, name: str, partitions: int = 1, config: Mapping[str, str] | None = None) -> str:
        """Create a topic; return its name once the broker knows it: it answers before that."""
        from confluent_kafka.admin import NewTopic

        topic = NewTopic(name, partitions, 1, config=dict(config or {}))
        admin = self.admin()
        for asked in admin.create_topics([topic]).values():
            asked.result(START_S)
        while name not in admin.list_topics(timeout=START_S).topics:
            continue
        return name

    def put(self, topic: str, records: Iterable[Mapping[str, Any]], **settings: object) -> None:
        """Have librdkafka write records, each given as the arguments of its ``produce``, in their order."""
        from confluent_kafka import Producer

        # or what a broker refuses at first, because it does not lead a new topic yet, comes after the rest
        settings = {"enable.idempotence": True, "max.in.flight": 1, "log_level": 0} | settings
        producer = Producer({"bootstrap.servers": self.address, **settings})
        for record in records:
            producer.produce(topic, **record)
            producer.poll(0)
        assert producer.flush(START_S) == 0

    def committed(self, topic: str) -> list[Any]:
        """Return what librdkafka reads of a topic: the messages of transactions that are committed by now."""
        from confluent_kafka import Consumer, TopicPartition

        settings = {"bootstrap.servers": self.address, "group.id": "none", "isolation.level": "read_committed"}
        consumer = Consumer({**settings, "enable.partition.eof": True, "fetch.wait.max.ms": 5, "log_level": 0})
        left = set(consumer.list_topics(topic, START_S).topics[topic].partitions)
        consumer.assign([TopicPartition(topic, part, 0) for part in left])
        found = []
        while left:
            message = consumer.poll(START_S)
            assert message is not None, "the broker does not answer"
            if (error := message.error()) is None:
                found.append(message)
            else:
                assert error.code() == PARTITION_END, error
                left.discard(message.partition())
        consumer.close()
        return found

    def delete_topic(self, name: str) -> None:
        """Delete a topic."""
        admin = self.admin()
        for asked in admin.delete_topics([name]).values():
            asked.result(START_S)

    def add_partitions(self, topic: str, count: int) -> None:
        """Have a topic ``count`` partitions; return once the broker knows them."""
        from confluent_kafka.admin import NewPartitions

        admin = self.admin()
        for asked in admin.create_partitions([NewPartitions(topic, count)]).values():
            asked.result(START_S)
        while len(admin.list_topics(topic, timeout=START_S).topics[topic].partitions) < count:
            continue

    def allow(self, kind: str, name: str, operation: str, *, is_prefix: bool = False) -> None:
        """Give ``LIMITED_USER`` a right, such as ``"TOPIC", "orders", "READ"``; return once it has it."""
        from confluent_kafka import admin as api

        pattern = api.ResourcePatternType.PREFIXED if is_prefix else api.ResourcePatternType.LITERAL
        may = api.AclPermissionType.ALLOW
        right = (api.ResourceType[kind], name, pattern, f"User:{LIMITED_USER}", "*", api.AclOperation[operation], may)
        admin = self.admin()
        for asked in admin.create_acls([api.AclBinding(*right)]).values():
            asked.result(START_S)
        while not admin.describe_acls(api.AclBindingFilter(*right)).result(START_S):
            continue

    def deny(self, kind: str, name: str) -> None:
        """Take all rights to something away again."""
        from confluent_kafka import admin as api

        anything = (api.AclOperation.ANY, api.AclPermissionType.ANY)
        rights = api.AclBindingFilter(api.ResourceType[kind], name, api.ResourcePatternType.ANY, None, None, *anything)
        admin = self.admin()
        for asked in admin.delete_acls([rights]).values():
            asked.result(START_S)
        while admin.describe_acls(rights).result(START_S):
            continue

    @property
    def pid(self) -> int:
        """Of the process that runs."""
        return self._process.pid

    def kill(self) -> None:
        """End it by SIGKILL, unless it has ended."""
        self.stop(signal.SIGKILL)

    def stop(self, how: signal.Signals) -> None:
        """End it by a signal."""
        self._process.end(how)

    def wait(self) -> None:
        """Wait until it ends by itself."""
        self._process.wait()

    def pause(self) -> None:
        """Stop the process: connections stay, and get no answers."""
        self._process.send(signal.SIGSTOP)

    def resume(self) -> None:
        """Let the process go on."""
        self._process.send(signal.SIGCONT)

    def start(self) -> None:
        """Start it again with the data it has."""
        self._process.start()

    def end(self) -> None:
        """End it for good."""
        self._process.end(signal.SIGKILL)
        for place in self._ports:
            place.close()


def java() -> str:
    """Return the command of the Java that Spark would use, too."""
    home = os.environ.get("JAVA_HOME")
    return f"{home}/bin/java" if home else "java"


def missing() -> str | None:
    """Return why there can be no broker on this machine, or None."""
    if shutil.which(java()) is None:
        return "there is no Java for a Kafka broker"
    if not any(LIBRARIES.glob("kafka_*.jar")):
        return "there is no Kafka broker on this machine (scripts/setup.sh servers gets one, with Maven)"
    return None


def make_formatted() -> None:
    """Format a directory for brokers, once on a machine."""
    if FORMATTED.exists():
        return
    with tempfile.TemporaryDirectory(prefix="headgate-kafka-", dir=LIBRARIES) as directory:
        properties, data = Path(directory) / "server.properties", Path(directory) / "data"
        ports = {"host": LOOPBACK, "port": 1, "sasl": 2, "controller": 3}
        login = {"user": USER, "password": PASSWORD, "sasl_protocol": "SASL_PLAINTEXT"}
        properties.write_text(PROPERTIES.format(data=data, **ports, **login))
        scram = [f"{name}=[name={USER},password={PASSWORD}]" for name in ("SCRAM-SHA-256", "SCRAM-SHA-512")]
        tool = [java(), *KAFKA, "kafka.tools.StorageTool", "format", "-t", "AAAAAAAAQACAAAAAAAAAAQ"]
        tool += ["-c", str(properties), *(part for one in scram for part in ("--add-scram", one))]
        formatted = subprocess.run(tool, capture_output=True, text=True)
        if formatted.returncode:
            raise RuntimeError(f"no directory for brokers can be formatted: {formatted.stdout}{formatted.stderr}")
        with contextlib.suppress(OSError):  # another process was faster
            data.rename(FORMATTED)


def make_archive() -> None:
    """Have a broker write down at its end what it has loaded, once on a machine."""
    if ARCHIVE.exists():
        return
    with tempfile.TemporaryDirectory(prefix="headgate-kafka-", dir=LIBRARIES) as directory:
        made = Path(directory) / ARCHIVE.name
        broker = KafkaBroker(Path(directory), jvm=f"-XX:ArchiveClassesAtExit={made}")
        try:
            broker.stop(signal.SIGTERM)
            made.replace(ARCHIVE)
        finally:
            broker.end()


@contextmanager
def kafka_broker(
    settings: str = "", tls: Path | None = None, host: str = LOOPBACK, data: Path | None = None
) -> Iterator[KafkaBroker]:
    """Give a broker, or skip the test that asks for one. ``settings``: lines that count more than those of tests."""
    if (problem := missing()) is not None:
        pytest.skip(problem)
    pytest.importorskip("confluent_kafka", reason="confluent-kafka is not installed (pip install -e '.[dev]')")
    make_archive()
    directory = Path(tempfile.mkdtemp(prefix="headgate-kafka-"))
    try:
        broker = KafkaBroker(directory, host, settings, tls, data=data)
        try:
            yield broker
        finally:
            broker.end()
    finally:
        shutil.rmtree(directory, ignore_errors=True)


def main() -> None:
    """Run a broker until it is interrupted; print its address."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--topic", action="append", default=[], help="create this topic, with 4 partitions")
    topics = parser.parse_args().topic
    if (problem := missing()) is not None:
        raise SystemExit(f"Error: {problem}.")
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    begun = time.monotonic()
    with contextlib.suppress(KeyboardInterrupt), kafka_broker("auto.create.topics.enable=true\n") as broker:
        for topic in topics:
            broker.create_topic(topic, 4)
        print(f"Kafka {VERSION} listens on {broker.address} (started in {time.monotonic() - begun:.1f} s).")
        print(f"Data and log: {broker.data.parent}. Press Ctrl-C to end it and delete them.", flush=True)
        signal.pause()


if __name__ == "__main__":
    main()
