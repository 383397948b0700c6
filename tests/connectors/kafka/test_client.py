"""The client against a real broker: topics, transactions, security, and what is wrong in one sentence."""

from __future__ import annotations

import base64
import contextlib
import itertools
import json
import socket
import threading
import uuid
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from tests.servers.certificates import certificate_for
from tests.servers.kafka import PASSWORD, USER, KafkaBroker, kafka_broker

from headgate.codec.kafka.messages import (
    EARLIEST,
    LATEST,
    TRANSACTION_COORDINATOR,
    ApiVersion,
    ApiVersionsAnswer,
    DescribeTransactions,
    DescribeTransactionsAnswer,
    FindCoordinator,
    InitProducerId,
    ListGroups,
    ListGroupsAnswer,
    ListTransactions,
    ListTransactionsAnswer,
    MetadataAnswer,
    OffsetFetch,
    OffsetFetchAnswer,
    Produce,
    ProducePartition,
    ProduceTopic,
)
from headgate.codec.kafka.record_encoder import NO_PRODUCER, ProducerState, encode_records
from headgate.codec.kafka.wire import RETRIABLE, ErrorCode, Nested, Parts
from headgate.connectors.kafka import connection as connections
from headgate.connectors.kafka.client import KafkaClient, ProducerIds, probes
from headgate.connectors.kafka.connection import Connection, KafkaSecurity
from headgate.environment import SYSTEM_ENVIRONMENT
from headgate.errors import FencedError, HeadgateError, ProtocolViolation, StorageError, UsageError

pytestmark = pytest.mark.xdist_group("kafka")
"""They share a broker."""

START_MS = 1_764_000_000_000
TIMEOUT_MS = 300_000


def write(
    client: KafkaClient,
    topic: str,
    values: list[bytes],
    partition: int = 0,
    owner: ProducerIds | None = None,
    transactional_id: str | None = None,
    sequence: int = 0,
) -> ErrorCode:
    state = NO_PRODUCER if owner is None else ProducerState(owner.producer_id, owner.producer_epoch, sequence, True)
    times = START_MS + np.arange(len(values), dtype=np.int64)
    (batch,) = encode_records(pa.array(values, pa.binary()), times, producer=state)
    connection = client.open(client.topic(topic).leaders[partition])
    data = (ProduceTopic(topic, (ProducePartition(partition, batch.parts),)),)
    code = ErrorCode.CONCURRENT_TRANSACTIONS
    while code in RETRIABLE:  # on a busy machine the broker may still be ending the former transaction
        answer = connection.ask(Produce(transactional_id, -1, TIMEOUT_MS, data), TIMEOUT_MS)
        code = ErrorCode(answer.responses[0].partition_responses[0].error_code)
    connection.close()
    return code


# -- topics and offsets ------------------------------------------------------------------------------------------------


def test_topics_are_created_and_found(client: KafkaClient) -> None:
    name = f"t-{uuid.uuid4().hex}"
    made = client.create_topic(name, 3, settings={"max.message.bytes": "2000000"})
    assert sorted(made.leaders) == [0, 1, 2]
    assert client.topic(name) == made
    assert client.create_topic(name, 3) == made
    assert client.topics(None)[name] == made
    assert client.setting("max.message.bytes", name) == "2000000"
    assert client.setting("transaction.max.timeout.ms") == "604800000"
    assert client.feature_level("transaction.version") == 2
    assert client.feature_level("nothing.version") == 0


def test_a_topic_of_the_same_name_has_another_id(kafka: KafkaBroker, client: KafkaClient, topic: str) -> None:
    before = client.topic(topic)
    kafka.delete_topic(topic)
    while client.topics([topic]):
        continue
    assert client.create_topic(topic, 1).id != before.id


def test_offsets_are_found_by_time(client: KafkaClient) -> None:
    topic = client.create_topic(f"t-{uuid.uuid4().hex}", 2)
    write(client, topic.name, [b"a", b"b", b"c"])
    assert client.list_offsets(topic, {0: EARLIEST, 1: LATEST}) == {0: 0, 1: 0}
    assert client.list_offsets(topic, {0: LATEST, 1: EARLIEST}) == {0: 3, 1: 0}
    assert client.list_offsets(topic, {0: START_MS + 1, 1: START_MS}) == {0: 1, 1: -1}


def test_offsets_of_groups_are_committed(client: KafkaClient, topic: str) -> None:
    group = uuid.uuid4().hex
    assert client.committed_offsets(group, topic, [0]) == {}
    client.commit_offsets(group, topic, {0: 7})
    assert client.committed_offsets(group, topic, [0]) == {0: (7, "")}


# -- transactions ------------------------------------------------------------------------------------------------------


def test_a_transaction_is_committed_by_another_process_and_again(
    client: KafkaClient, kafka: KafkaBroker, topic: str
) -> None:
    """What a sink needs: prepared by one client, committed by another, and once more when nothing is known."""
    name, group = f"sink-{uuid.uuid4().hex}", uuid.uuid4().hex
    first = client.take_over(name, TIMEOUT_MS)
    assert write(client, topic, [b"a"], 0, first, name) is ErrorCode.NONE
    client.commit_in_transaction(name, first, group, topic, {0: (0, "pipeline/out/3")})
    described = client.describe_transaction(name)
    assert described is not None
    assert (described.transaction_state, described.producer_id) == ("Ongoing", first.producer_id)
    assert [part.topic for part in described.topics if part.topic == topic] == [topic]
    assert client.list_offsets(client.topic(topic), {0: LATEST}) == {0: 0}
    assert name in [one.transactional_id for one in client.list_transactions("sink-")]
    client.close()

    other = KafkaClient([kafka.address], patience_ms=TIMEOUT_MS)
    ended = other.end_transaction(name, first, commit=True)
    assert ended.code is ErrorCode.NONE
    assert ended.following == ProducerIds(first.producer_id, first.producer_epoch + 1)
    assert other.end_transaction(name, first, commit=True) == ended
    assert other.end_transaction(name, first, commit=False).code is ErrorCode.INVALID_TXN_STATE
    while other.list_offsets(other.topic(topic), {0: LATEST}) == {0: 0}:  # the marker of the transaction may come later
        continue
    assert other.committed_offsets(group, topic, [0]) == {0: (0, "pipeline/out/3")}
    assert write(other, topic, [b"late"], 0, first, name, 1) is ErrorCode.INVALID_PRODUCER_EPOCH
    assert write(other, topic, [b"next"], 0, ended.following, name) is ErrorCode.NONE
    assert other.end_transaction(name, ended.following, commit=False).code is ErrorCode.NONE
    other.close()


def test_taking_over_fences_and_aborts(client: KafkaClient, topic: str) -> None:
    name = uuid.uuid4().hex
    first = client.take_over(name, TIMEOUT_MS)
    assert write(client, topic, [b"a"], 0, first, name) is ErrorCode.NONE
    second = client.take_over(name, TIMEOUT_MS)
    assert second.producer_epoch > first.producer_epoch
    assert client.end_transaction(name, first, commit=True).code in (
        ErrorCode.PRODUCER_FENCED,
        ErrorCode.INVALID_PRODUCER_EPOCH,
    )
    with pytest.raises(FencedError, match="a newer producer took it over"):
        client.commit_in_transaction(name, first, "g", topic, {0: (0, "")})
    assert client.describe_transaction(uuid.uuid4().hex) is None


def test_a_cluster_that_names_no_broker_yet_is_asked_again(
    client: KafkaClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As one does that was restarted: it is no cluster without transactions."""
    name, ask, seen = uuid.uuid4().hex, Connection.ask, []
    client.take_over(name, TIMEOUT_MS)

    def asked(self: Connection, request: Any, timeout_ms: int) -> Any:
        answer = ask(self, request, timeout_ms)
        if isinstance(answer, MetadataAnswer) and not seen:
            seen.append(answer)
            return replace(answer, brokers=())
        return answer

    monkeypatch.setattr(Connection, "ask", asked)
    assert [one.transactional_id for one in client.list_transactions(name)] == [name]
    assert seen


def test_a_topic_that_has_no_partitions_yet_is_asked_for_again(
    client: KafkaClient, topic: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As one that is being created: else a source would begin without its partitions."""
    ask = Connection.ask
    seen: list[MetadataAnswer] = []

    def asked(self: Connection, request: Any, timeout_ms: int) -> Any:
        answer = ask(self, request, timeout_ms)
        if isinstance(answer, MetadataAnswer) and answer.topics and not seen:
            seen.append(answer)
            return replace(answer, topics=tuple(replace(one, partitions=()) for one in answer.topics))
        return answer

    monkeypatch.setattr(Connection, "ask", asked)
    assert len(client.topics([topic])[topic].leaders) >= 1
    assert seen


SPELLS = [range(begin, end) for begin, end in ((0, 1), (0, 2), (0, 3), (0, 7), (1, 3), (1, 6), (2, 3))]


@pytest.mark.parametrize("spell", SPELLS, ids=str)
@pytest.mark.parametrize("lists_groups", [False, True], ids=["transactions", "groups"])
def test_coordinators_that_are_not_loaded_are_asked_again(
    client: KafkaClient, topic: str, monkeypatch: pytest.MonkeyPatch, spell: range, lists_groups: bool
) -> None:
    """They list nothing, without an error: after a start of the broker, and while they move. What is asked when: see
    ``spell``."""
    name, ask, numbers = uuid.uuid4().hex, Connection.ask, itertools.count()
    client.take_over(name, TIMEOUT_MS)
    client.commit_offsets(name, topic, {0: 1})
    no = ErrorCode.NOT_COORDINATOR

    def asked(self: Connection, request: Any, timeout_ms: int) -> Any:
        answer = ask(self, request, timeout_ms)
        listing = (ListGroups, ListTransactions, OffsetFetch, DescribeTransactions)
        if not isinstance(request, listing) or next(numbers) not in spell:
            return answer
        match answer:
            case ListGroupsAnswer():
                return replace(answer, groups=())
            case ListTransactionsAnswer():
                return replace(answer, transaction_states=())
            case OffsetFetchAnswer():
                return replace(answer, groups=tuple(replace(one, error_code=no) for one in answer.groups))
        states = tuple(replace(one, error_code=no) for one in answer.transaction_states)
        return replace(answer, transaction_states=states)

    monkeypatch.setattr(Connection, "ask", asked)
    if lists_groups:
        assert client.list_groups(name) == [name]
    else:
        assert [one.transactional_id for one in client.list_transactions(name)] == [name]
    assert next(numbers) >= spell.stop


@pytest.mark.parametrize("is_known", [True, False])
def test_coordinators_are_probed_with_no_more_keys_than_their_partitions_need(
    client: KafkaClient, monkeypatch: pytest.MonkeyPatch, is_known: bool
) -> None:
    """480 where their topic is not to be seen: of 4 of a broker of tests, 7 keys are in all of them."""
    name, ask, counts = uuid.uuid4().hex, Connection.ask, set[int]()
    client.take_over(name, TIMEOUT_MS)

    def asked(self: Connection, request: Any, timeout_ms: int) -> Any:
        if isinstance(request, FindCoordinator):
            counts.add(len(request.coordinator_keys))
        answer = ask(self, request, timeout_ms)
        return answer if is_known or not isinstance(answer, MetadataAnswer) else replace(answer, topics=())

    monkeypatch.setattr(Connection, "ask", asked)
    assert [one.transactional_id for one in client.list_transactions(name)] == [name]
    assert counts == {7 if is_known else 959}


def test_keys_to_probe_with_lie_in_all_partitions_of_coordinators() -> None:
    for prefix in ("headgate:p/out:", "", "\u00e9" * 40, "zzzzzz"):
        for count in (1, 4, 50, 480, 2_000):
            assert len({coordinator_partition(key, count) for key in probes(prefix, count)}) == count


def coordinator_partition(key: str, count: int) -> int:
    """Return the partition as brokers do: by the hash of Java's strings."""
    code = 0
    for unit in memoryview(key.encode("utf-16-le")).cast("H"):
        code = (code * 31 + unit) & 0xFFFFFFFF
    return (code & 0x7FFFFFFF) % count


def test_a_commit_is_waited_for_until_it_is_visible(
    client: KafkaClient, topic: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    names, ask, states = [uuid.uuid4().hex for _ in range(3)], Connection.ask, ["PrepareCommit"] * 2
    for name in names[:2]:
        producer = client.take_over(name, TIMEOUT_MS)
        assert write(client, topic, [b"a"], 0, producer, name) is ErrorCode.NONE
        assert client.end_transaction(name, producer, commit=True).code is ErrorCode.NONE

    def asked(self: Connection, request: Any, timeout_ms: int) -> Any:
        answer = ask(self, request, timeout_ms)
        if not isinstance(answer, DescribeTransactionsAnswer) or not states:
            return answer
        state = states.pop()
        found = tuple(replace(one, transaction_state=state) for one in answer.transaction_states)
        return replace(answer, transaction_states=found)

    monkeypatch.setattr(Connection, "ask", asked)
    client.wait_for_markers(names)  # one of which Kafka does not know any more
    assert not states
    assert client.list_offsets(client.topic(topic), {0: LATEST}) == client.list_offsets(
        client.topic(topic), {0: LATEST}, 0
    )
    states += ["PrepareCommit"] * 1_000
    client.patience_ms = 1
    with pytest.raises(StorageError, match=r"cannot make records visible .* is committed, and its partitions do not"):
        client.wait_for_markers(names)


def committed_again(client: KafkaClient, name: str, producer: ProducerIds) -> ErrorCode:
    return client.end_transaction(name, producer, commit=True).code


def state_of(client: KafkaClient, name: str) -> tuple[str, ProducerIds]:
    found = client.describe_transaction(name)
    assert found is not None
    return found.transaction_state, ProducerIds(found.producer_id, found.producer_epoch)


def after(producer: ProducerIds) -> ProducerIds:
    return ProducerIds(producer.producer_id, producer.producer_epoch + 1)


def test_a_commit_that_is_repeated_tells_how_the_transaction_ended(client: KafkaClient, topic: str) -> None:
    """As long as the id is not used again; afterwards every former pair is only fenced."""
    name = uuid.uuid4().hex
    first = client.take_over(name, TIMEOUT_MS)
    assert committed_again(client, name, first) is ErrorCode.INVALID_TXN_STATE  # nothing was written
    assert write(client, topic, [b"a"], 0, first, name) is ErrorCode.NONE
    ended = client.end_transaction(name, first, commit=True)
    assert ended.code is ErrorCode.NONE
    second = ended.following
    assert committed_again(client, name, first) is ErrorCode.NONE
    assert write(client, topic, [b"b"], 0, second, name) is ErrorCode.NONE
    assert committed_again(client, name, first) is ErrorCode.PRODUCER_FENCED
    assert state_of(client, name) == ("Ongoing", second)
    third = client.end_transaction(name, second, commit=False).following
    assert committed_again(client, name, second) is ErrorCode.INVALID_TXN_STATE
    assert committed_again(client, name, first) is ErrorCode.PRODUCER_FENCED
    assert third == after(second)
    assert committed_again(client, uuid.uuid4().hex, first) is ErrorCode.INVALID_PRODUCER_ID_MAPPING


def test_a_transaction_that_timed_out_is_not_committed(client: KafkaClient, topic: str) -> None:
    name = uuid.uuid4().hex
    owner = client.take_over(name, 1_000)
    write(client, topic, [b"a"], 0, owner, name)
    while state_of(client, name)[0] != "CompleteAbort":
        continue
    assert state_of(client, name) == ("CompleteAbort", after(owner))
    assert committed_again(client, name, owner) is ErrorCode.INVALID_TXN_STATE
    assert write(client, topic, [b"b"], 0, owner, name, 1) is ErrorCode.INVALID_PRODUCER_EPOCH


@pytest.mark.deep  # 32,766 answers of the broker
@pytest.mark.early
@pytest.mark.timeout(1_800)
def test_epochs_that_are_used_up_go_on_with_another_producer_id(client: KafkaClient, topic: str) -> None:
    name = uuid.uuid4().hex
    owner = client.take_over(name, TIMEOUT_MS)
    connection = client._coordinator(TRANSACTION_COORDINATOR, name)
    while (left := 32_766 - owner.producer_epoch) > 0:
        count = min(left, 50)
        for ahead in range(count):  # each one raises the epoch
            connection.send(InitProducerId(name, TIMEOUT_MS, owner.producer_id, owner.producer_epoch + ahead))
        for _ in range(count):
            answer = connection.receive(TIMEOUT_MS)
            if answer.error_code == 0:
                owner = ProducerIds(answer.producer_id, answer.producer_epoch)
    assert write(client, topic, [b"a"], 0, owner, name) is ErrorCode.NONE
    ended = client.end_transaction(name, owner, commit=True)
    assert ended.code is ErrorCode.NONE
    assert ended.following.producer_epoch == 0
    assert ended.following.producer_id != owner.producer_id
    assert client.end_transaction(name, owner, commit=True) == ended
    assert client.end_transaction(name, owner, commit=False).code is ErrorCode.INVALID_TXN_STATE
    assert write(client, topic, [b"b"], 0, ended.following, name) is ErrorCode.NONE
    assert client.end_transaction(name, ended.following, commit=True).following == after(ended.following)


def test_two_phase_commit_needs_brokers_that_take_part(client: KafkaClient) -> None:
    with pytest.raises(UsageError, match=r"does not take part in two-phase commit: set transaction.two.phase"):
        client.take_over(uuid.uuid4().hex, TIMEOUT_MS, has_no_timeout=True)


# -- security ----------------------------------------------------------------------------------------------------------


def token(subject: str) -> str:
    def part(content: dict[str, object]) -> str:
        return base64.urlsafe_b64encode(json.dumps(content).encode()).rstrip(b"=").decode()

    now = SYSTEM_ENVIRONMENT.wall_ms() // 1000
    return f"{part({'alg': 'none'})}.{part({'sub': subject, 'iat': now, 'exp': now + 3_600})}."


LOGINS = [
    KafkaSecurity(mechanism="PLAIN", user=USER, secret="env:SECRET"),
    KafkaSecurity(mechanism="SCRAM-SHA-256", user=USER, secret="env:SECRET"),
    KafkaSecurity(mechanism="SCRAM-SHA-512", user=USER, secret="env:SECRET"),
    KafkaSecurity(mechanism="OAUTHBEARER", secret="env:SECRET"),
]


@pytest.mark.parametrize("security", LOGINS, ids=lambda one: one.mechanism)
def test_clients_log_in(
    connect: Callable[..., Connection], security: KafkaSecurity, monkeypatch: pytest.MonkeyPatch
) -> None:
    is_token = security.mechanism == "OAUTHBEARER"
    monkeypatch.setenv("SECRET", token(USER) if is_token else PASSWORD)
    assert connect(security).capabilities.api_keys
    monkeypatch.setenv("SECRET", "wrong")
    with pytest.raises(UsageError, match=r"does not log .* in: ") as caught:
        connect(security)
    assert "wrong" not in str(caught.value)
    monkeypatch.delenv("SECRET")
    with pytest.raises(UsageError, match="set the environment variable SECRET on every worker"):
        connect(security)


def test_secrets_may_be_in_files(connect: Callable[..., Connection], tmp_path: Path) -> None:
    path = tmp_path / "password"
    security = KafkaSecurity(mechanism="PLAIN", user=USER, secret=f"file:{path}")
    with pytest.raises(UsageError, match=r"cannot be read from .*password: No such file"):
        connect(security)
    path.write_text(f"{PASSWORD}\n")
    assert connect(security).capabilities.api_keys


def test_a_mechanism_that_the_broker_lacks_is_named(
    kafka: KafkaBroker, connect: Callable[..., Connection], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SECRET", PASSWORD)
    security = KafkaSecurity(mechanism="PLAIN", user=USER, secret="env:SECRET")
    object.__setattr__(security, "mechanism", "GSSAPI")
    with pytest.raises(UsageError, match=r"does not take mechanism GSSAPI; it has: PLAIN, "):
        connect(security)


@pytest.mark.long
def test_tls_checks_who_the_broker_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    keys, certificate = certificate_for(tmp_path, "127.0.0.1")
    monkeypatch.setenv("SECRET", PASSWORD)
    with kafka_broker(tls=keys) as broker:
        trusting = KafkaSecurity(tls=True, ca_file=str(certificate), mechanism="PLAIN", user=USER, secret="env:SECRET")
        client = KafkaClient([broker.sasl_address], trusting, patience_ms=TIMEOUT_MS)
        assert client.create_topic("t", 1).leaders == {0: 1}
        write(client, "t", [bytes(900_000)])  # more than what the system takes at once
        client.close()
        wary = KafkaSecurity(tls=True, mechanism="PLAIN", user=USER, secret="env:SECRET")
        with pytest.raises(UsageError, match=r"is not trusted: .*; give the authority that signed it as ca_file"):
            KafkaClient([broker.sasl_address], wary).topics(None)


# -- without a broker --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"mechanism": "PLAN", "secret": "env:A"}, "no mechanism 'PLAN'; choose one of PLAIN, SCRAM-SHA-256"),
        ({"mechanism": "PLAIN", "user": "u", "secret": "hunter2"}, "needs secret='env:NAME' or secret='file:/path'"),
        ({"mechanism": "PLAIN", "secret": "env:A"}, "with mechanism PLAIN needs user="),
        ({"ca_file": "/x.pem"}, "add tls=True"),
    ],
)
def test_security_that_cannot_work_is_refused(options: dict[str, str], problem: str) -> None:
    with pytest.raises(UsageError, match=problem) as caught:
        KafkaSecurity(**options)  # type: ignore[arg-type]
    assert "hunter2" not in str(caught.value)


def test_certificates_that_are_not_there_are_named(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"cannot use .*/ca.pem: No such file"):
        KafkaSecurity(tls=True, ca_file=str(tmp_path / "ca.pem")).context()


def test_secrets_are_in_no_text() -> None:
    assert "SECRET" not in repr(LOGINS[0])


@pytest.mark.parametrize("text", ["", "host", ":9092", "host:", "host:0", "host:70000", "host:x"])
def test_what_is_no_address_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match="write it as host:port"):
        KafkaClient([text])


def test_no_brokers_are_refused() -> None:
    with pytest.raises(UsageError, match="no Kafka brokers are given"):
        KafkaClient([])


def test_brokers_that_are_not_there_are_named() -> None:
    client = KafkaClient(["127.0.0.1:1"], patience_ms=1)
    with pytest.raises(StorageError, match=r"127\.0\.0\.1:1: Connection refused"):
        client.topics(None)


ANSWERS = [
    (b"HTTP/1.1 400 Bad Request\r\n\r\n", StorageError, "it does not speak Kafka's protocol as expected: an answer of"),
    (b"", StorageError, "the broker ended the connection"),
    (b"\0\0\0\x0a" + b"\0\0\0\x63" + bytes(6), ProtocolViolation, "answered request 99 where request 1 was next"),
    (b"\0\0\0\x08" + b"\0\0\0\x01" + b"\0\0\xff\x01", ProtocolViolation, "malformed at byte"),
]


@pytest.mark.parametrize(("answer", "kind", "problem"), ANSWERS)
def test_what_is_no_broker_is_one_clear_error(answer: bytes, kind: type[HeadgateError], problem: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        thread = threading.Thread(target=answer_once, args=(server, answer))
        thread.start()
        host, port = server.getsockname()
        with pytest.raises(kind, match=problem):
            Connection(
                host, port, KafkaSecurity(), client_id="t", environment=SYSTEM_ENVIRONMENT, timeout_ms=TIMEOUT_MS
            )
        thread.join()


def answer_once(server: socket.socket, answer: bytes) -> None:
    peer, _ = server.accept()
    with peer, contextlib.suppress(OSError):  # the client ends the connection as soon as it has seen enough
        peer.recv(1_000)
        peer.sendall(answer)
        peer.shutdown(socket.SHUT_WR)
        peer.recv(1_000)


def test_a_broker_that_takes_no_bytes_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "SEND_MS", 100)
    answer = ApiVersionsAnswer(0, tuple(ApiVersion(key, 0, 20) for key in range(100)))
    parts: Parts = [b"\0\0\0\1"]
    Nested(ApiVersionsAnswer).write(parts, answer, 3, True)
    data = b"".join(parts)
    with socket.create_server(("127.0.0.1", 0)) as server:
        is_over = threading.Event()

        def hang() -> None:
            peer, _ = server.accept()
            with peer:
                peer.recv(1_000)
                peer.sendall(len(data).to_bytes(4, "big") + data)
                is_over.wait()

        thread = threading.Thread(target=hang)
        thread.start()
        host, port = server.getsockname()
        connection = Connection(
            host, port, KafkaSecurity(), client_id="t", environment=SYSTEM_ENVIRONMENT, timeout_ms=TIMEOUT_MS
        )
        request = Produce(None, -1, 1, (ProduceTopic("t", (ProducePartition(0, bytes(50_000_000)),)),))
        with pytest.raises(StorageError, match="it has taken no bytes for 100 ms"):
            connection.send(request)
        assert connection.is_closed
        is_over.set()
        thread.join()
