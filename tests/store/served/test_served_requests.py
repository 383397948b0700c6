"""What a client asks again, and what it never does: over connections of the test, on a clock of the test."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable

import pytest

from headgate.errors import StorageError, UsageError
from headgate.store.addresses import parse_server_url
from headgate.store.client import connection as asking
from headgate.store.client.connection import (
    REQUEST_HEADER,
    SETTLE,
    Client,
    ConnectionLostError,
    Request,
    RequestOutcome,
    Response,
    ServerFacts,
    UnreachableError,
    request_of,
)
from headgate.store.client.messages import decode, encode, encode_failure

LOST = "the answer is lost"
QUESTION = Request("POST", "/verb", [b"append"])


class Network:
    """The way to a server that answers as the test says; also the clock and the process of its client."""

    def __init__(self) -> None:
        self.facts = ServerFacts("first", "store", "/srv")
        self.steps: list[Response | str] = []
        self.asked: list[Request] = []
        self.made: list[Connection] = []
        self.is_down = False
        self.now_ms = 0
        self.slept: list[float] = []
        self.process_id = 1
        self._tokens = itertools.count()

    def monotonic_ms(self) -> int:
        return self.now_ms

    def sleep(self, seconds: float) -> None:
        self.slept.append(seconds)
        self.now_ms += round(seconds * 1_000)

    def token(self, size_bytes: int) -> bytes:
        return next(self._tokens).to_bytes(size_bytes, "big")

    def lock(self) -> threading.Lock:
        return threading.Lock()

    @property
    def paths(self) -> list[str]:
        return [question.path for question in self.asked]

    def names(self) -> list[str | None]:
        return [(question.headers or {}).get(REQUEST_HEADER) for question in self.asked]


class Connection:
    def __init__(self, address: object, token: bytes | None, ca_file: str, network: Network) -> None:
        if network.is_down:
            raise UnreachableError("it is down")
        self.facts, self.is_open, self._network = network.facts, True, network
        network.made.append(self)

    def ask(self, question: Request) -> Response:
        assert self.is_open
        self._network.asked.append(question)
        step = self._network.steps.pop(0)
        if isinstance(step, str):
            self.is_open = False
            raise ConnectionLostError(step)
        return step

    def close(self) -> None:
        self.is_open = False


@pytest.fixture
def network(monkeypatch: pytest.MonkeyPatch) -> Network:
    monkeypatch.setattr(asking, "ServerConnection", Connection)
    return Network()


@pytest.fixture
def client(network: Network) -> Client:
    return Client(parse_server_url("headgate://h:1"), network)  # type: ignore[arg-type]


def ok(data: bytes = b"done") -> Response:
    return Response(200, data)


def outcome(*, is_over: bool = True, is_void: bool = False, status: int = 0, data: bytes = b"") -> Response:
    return ok(encode(RequestOutcome(is_over, is_void, status, data)))


def test_an_answer_that_was_lost_is_asked_for_and_not_the_question(network: Network, client: Client) -> None:  # SS9
    network.steps = [LOST, outcome(status=200, data=b"done")]
    assert client.ask(QUESTION, is_once=True) == b"done"
    assert [(question.method, question.path) for question in network.asked] == [("POST", "/verb"), ("POST", SETTLE)]
    assert decode(bytes(network.asked[1].parts[0]), str) == network.names()[0]


def test_an_error_that_was_lost_is_raised(network: Network, client: Client) -> None:  # SS9
    failure = encode_failure(UsageError("it is sealed"))
    assert failure is not None
    network.steps = [LOST, outcome(status=422, data=failure)]
    with pytest.raises(UsageError, match="it is sealed"):
        client.ask(QUESTION, is_once=True)


def test_a_question_that_is_void_is_asked_again_under_another_name(network: Network, client: Client) -> None:  # SS9
    network.steps = [LOST, outcome(is_void=True), ok()]
    assert client.ask(QUESTION, is_once=True) == b"done"
    assert network.paths == ["/verb", SETTLE, "/verb"]
    first, _, again = network.names()
    assert None not in (first, again)
    assert first != again
    assert len(network.made) == 2, "the connection that settled it is used again"


def test_a_question_with_an_unknown_outcome_is_its_callers(network: Network, client: Client) -> None:  # SS9
    network.steps = [LOST, outcome()]
    with pytest.raises(StorageError, match="the answer was lost") as unknown:
        client.ask(QUESTION, is_once=True)
    assert unknown.value.is_transient
    assert network.paths == ["/verb", SETTLE]


def test_what_may_be_repeated_is_where_the_outcome_is_unknown(network: Network, client: Client) -> None:  # SS9
    network.steps = [LOST, outcome(), ok()]
    assert client.ask(QUESTION, is_once=True, may_repeat=True) == b"done"
    network.steps = [LOST, outcome(status=200, data=b"known")]
    assert client.ask(QUESTION, is_once=True, may_repeat=True) == b"known"


def test_another_process_of_the_server_knows_nothing_of_a_question(network: Network, client: Client) -> None:  # SS9
    network.steps = [ok()]
    client.ask(QUESTION)
    network.steps = [LOST]
    network.facts = ServerFacts("second", "store", "/srv")
    with pytest.raises(StorageError, match="the answer was lost"):
        client.ask(QUESTION, is_once=True)
    network.steps = [ok()]
    assert client.ask(QUESTION) == b"done"
    assert SETTLE not in network.paths


def test_the_outcome_is_not_asked_of_another_store(network: Network, client: Client) -> None:
    network.steps = [ok()]
    client.ask(QUESTION)
    network.steps = [LOST]
    network.facts = ServerFacts("second", "another store", "/srv")
    with pytest.raises(StorageError, match="the answer was lost"):
        client.ask(QUESTION, is_once=True)
    assert network.slept == [], "waiting does not help"


def test_a_question_under_way_is_waited_for(network: Network, client: Client) -> None:  # SS9
    network.steps = [LOST, outcome(is_over=False), outcome(is_over=False), outcome(status=200, data=b"done")]
    assert client.ask(QUESTION, is_once=True) == b"done"
    assert network.slept == [0.05, 0.1]


def test_what_is_unsettled_is_settled_before_the_next_question(network: Network, client: Client) -> None:  # SS9
    network.steps = [ok()]
    client.ask(QUESTION)
    network.steps = [LOST]
    network.is_down = True
    with pytest.raises(StorageError, match="the answer was lost"):
        client.ask(QUESTION, is_once=True)
    network.is_down = False
    network.asked.clear()
    network.steps = [outcome(), ok(b"1"), ok(b"2")]
    assert [client.ask(QUESTION), client.ask(QUESTION)] == [b"1", b"2"]
    assert network.paths == [SETTLE, "/verb", "/verb"]


def test_what_changes_nothing_is_asked_again_without_a_name(network: Network, client: Client) -> None:  # SS9
    network.steps = [LOST, ok()]
    assert client.ask(QUESTION) == b"done"
    assert network.names() == [None, None]


@pytest.mark.parametrize("status", [403, 412, 503])
def test_a_server_that_did_nothing_is_asked_again(network: Network, client: Client, status: int) -> None:
    network.steps = [Response(status, b"not now"), ok()]
    assert client.ask(QUESTION, is_once=True) == b"done"
    assert len(network.made) == (1 if status == 412 else 2), "one that refuses is left"
    assert network.made[0].is_open == (status == 412)


@pytest.mark.parametrize(("data", "said"), [(b"a mistake", "a mistake"), (b"", "status 500")])
def test_what_a_server_cannot_answer_is_not_asked_again(
    network: Network, client: Client, data: bytes, said: str
) -> None:
    network.steps = [Response(500, data)]
    with pytest.raises(StorageError, match=said) as failed:
        client.ask(QUESTION)
    assert not failed.value.is_transient


def test_a_server_that_is_away_is_waited_for_with_longer_and_longer_pauses(network: Network, client: Client) -> None:
    network.is_down = True
    with pytest.raises(StorageError, match="it is down") as away:
        client.ask(QUESTION)
    assert away.value.is_transient
    assert network.slept == [0.05, 0.1, 0.2, 0.4, 0.8] + [1.0] * 8
    assert network.now_ms < client.patience_s * 1_000
    network.slept, client.patience_s = [], 0.2
    with pytest.raises(StorageError, match="it is down"):
        client.ask(QUESTION)
    assert network.slept == [0.05, 0.1]


def test_a_connection_is_used_again_unless_it_was_idle_for_long(network: Network, client: Client) -> None:
    network.now_ms = 1_000_000
    network.steps = [ok(), ok(), ok()]
    for pause_s in (0, asking.IDLE_S - 1, asking.IDLE_S):
        network.now_ms += round(pause_s * 1_000)
        client.ask(QUESTION)
    assert [made.is_open for made in network.made] == [False, True]


def test_so_many_connections_wait_for_the_next_question(
    network: Network, client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(asking, "IDLE_MAX", 1)
    network.steps = [ok()]
    nested: Callable[[Connection, Request], Response] = Connection.ask

    def ask(self: Connection, question: Request) -> Response:
        """Another thread asks at the same time."""
        if question.path == "/outer":
            network.steps = [ok(), ok()]
            assert client.ask(QUESTION) == b"done"
        return nested(self, question)

    monkeypatch.setattr(Connection, "ask", ask)
    assert client.ask(Request("POST", "/outer")) == b"done"
    assert sorted(made.is_open for made in network.made) == [False, True]


def test_a_closed_client_can_be_asked_again(network: Network, client: Client) -> None:
    network.steps = [ok(), ok()]
    client.ask(QUESTION)
    client.close()
    assert not network.made[0].is_open
    assert client.ask(QUESTION) == b"done"


def test_a_child_makes_connections_of_its_own(network: Network, client: Client) -> None:
    network.steps = [ok(), ok()]
    client.ask(QUESTION)
    network.process_id = 2
    client.ask(QUESTION)
    assert [made.is_open for made in network.made] == [False, True], "what it has of its parent's is closed here"


def test_a_request_has_one_value_or_none() -> None:
    assert request_of("/date").parts == ()
    assert request_of("/settle", "name").parts == [encode("name")]


def test_another_store_in_its_place_is_refused(network: Network, client: Client) -> None:
    network.steps = [ok()]
    client.ask(QUESTION)
    client.close()
    network.facts = ServerFacts("second", "another store", "/srv")
    with pytest.raises(StorageError, match="it serves another store") as refused:
        client.ask(QUESTION)
    assert not refused.value.is_transient
    assert not network.made[-1].is_open
    assert client.facts().store == "store"
