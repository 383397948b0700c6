"""Asks the server of a store, and waits for one that is away; a lost answer is looked for before anything is repeated.

Counterparts: ``server.handlers`` knows what became of a question, ``connection`` carries it. Source:
docs/spec/served-store.md. Never repeats what may have taken effect: that is its caller's, who knows how.
"""

from __future__ import annotations

import http.client
import os
from collections.abc import Mapping, Sequence

import msgspec

from headgate.dataclass import dataclass
from headgate.environment import SYSTEM_ENVIRONMENT, Environment, is_cancelled
from headgate.errors import StorageError
from headgate.storage.base import Bytes
from headgate.store.addresses import CA_FILE_VARIABLE, ServerAddress
from headgate.store.client.connection import (
    REQUEST_HEADER,
    ConnectionLostError,
    RefusedError,
    Request,
    Response,
    ServerConnection,
    ServerFacts,
    UnreachableError,
    read_tokens,
)
from headgate.store.client.messages import decode, decode_failure, encode

PATIENCE_S = 30.0
"""How long a question of which nothing has happened yet waits for a server that went."""

OPENING_PATIENCE_S = 10.0
"""How long opening waits for it: the address may be wrong."""

IDLE_S = 30.0
"""A connection that was idle for so long is not used again: the server closes those that are idle for longer."""

IDLE_MAX = 16
"""Connections that wait for the next question."""

PAUSES_S = (0.05, 1.0)
SETTLE = "/settle"


class RequestOutcome(msgspec.Struct, frozen=True):
    """Outcome of a request with a lost answer.

    Attributes:
        is_over: it was carried out, or it never will be; else it is under way.
        status, data: what was answered; 0: never, or it is not known any more.
        is_void: it was not carried out, and never will be.
    """

    is_over: bool
    is_void: bool = False
    status: int = 0
    data: bytes = b""


@dataclass(frozen=True, slots=True)
class _Lost:
    """A question without an answer."""

    name: str
    instance: str


class Client:
    """One process's way to a server; safe from several threads, and usable again after a fork."""

    def __init__(self, address: ServerAddress, around: Environment = SYSTEM_ENVIRONMENT) -> None:
        self.address = address
        self.around = around
        self.patience_s = OPENING_PATIENCE_S
        self._facts: ServerFacts | None = None
        self._begin_in_this_process()

    def _begin_in_this_process(self) -> None:
        self._pid = self.around.process_id
        self._lock = self.around.lock()
        self._idle: list[tuple[int, ServerConnection]] = []
        self._unsettled: list[_Lost] = []

    @property
    def url(self) -> str:
        """The store's name."""
        return self.address.url

    def facts(self) -> ServerFacts:
        """Return what the server says of itself; connect if that was not done before.

        Raises:
            StorageError: it cannot be reached, or does not let us in.
        """
        if self._facts is None:
            self.ask(Request("POST", "/date"))
        assert self._facts is not None
        return self._facts

    def ask(self, question: Request, *, is_once: bool = False, may_repeat: bool = False) -> bytes:
        """Return the answer; wait for a server that is away.

        Args:
            question: what to ask.
            is_once: it may take effect, which the caller must know of before it is asked again.
            may_repeat: it has the same effect when asked twice, so it is where the outcome is unknown.

        Raises:
            StorageError: the server cannot be reached, or, of what ``is_once``, the outcome is unknown.
            Exception: what the verb raised there.
        """
        self._notice_fork()
        around, pause_s = self.around, PAUSES_S[0]
        deadline_ms = around.monotonic_ms() + self.patience_s * 1_000
        while True:
            try:
                return self._result_of(self._asked(question, is_once, may_repeat, deadline_ms))
            except UnreachableError as error:
                if is_cancelled() or around.monotonic_ms() + pause_s * 1_000 >= deadline_ms:
                    raise StorageError("reach", self.url, str(error)) from error
            except RefusedError as error:
                raise StorageError("use", self.url, str(error), is_transient=False) from error
            around.sleep(pause_s)
            pause_s = min(2 * pause_s, PAUSES_S[1])

    def connect(self) -> ServerConnection:
        """Return a new connection; its user closes it.

        Raises:
            UnreachableError, RefusedError
        """
        token, ca_file = next(iter(read_tokens()), None), os.environ.get(CA_FILE_VARIABLE, "")
        made = ServerConnection(self.address, token, ca_file, self.around)
        with self._lock:
            known = self._facts
            if known is None or known.store == made.facts.store:
                self._facts = made.facts
                return made
        made.close()
        raise RefusedError("it serves another store than when this one was opened; open it again")

    def close(self) -> None:
        """Let go of the connections; another question makes new ones."""
        self._notice_fork()
        with self._lock:
            idle, self._idle = self._idle, []
        for _, connection in idle:
            connection.close()

    def _asked(self, question: Request, is_once: bool, may_repeat: bool, deadline_ms: float) -> Response:
        connection = self._connection_without_unsettled()
        name = self.around.token(16).hex()
        named = {**(question.headers or {}), REQUEST_HEADER: name} if is_once else question.headers
        try:
            answer = connection.ask(Request(question.method, question.path, question.parts, named))
        except ConnectionLostError as error:
            if not is_once:
                raise UnreachableError(str(error)) from error
            return self._outcome(_Lost(name, connection.facts.instance), may_repeat, deadline_ms, error)
        if answer.status in (http.client.FORBIDDEN, http.client.SERVICE_UNAVAILABLE):
            connection.close()  # another one may be taken
        else:
            self._put_back(connection)
        return answer

    def _result_of(self, answer: Response) -> bytes:
        """Return what was asked for; raise what was raised there."""
        facts = self._facts
        assert facts is not None
        match answer.status:
            case http.client.OK:
                return answer.data
            case http.client.UNPROCESSABLE_ENTITY:
                raise decode_failure(answer.data, facts.root, self.url)
            case http.client.SERVICE_UNAVAILABLE | http.client.PRECONDITION_FAILED:  # nothing was done
                raise UnreachableError(answer.data.decode(errors="replace"))
            case http.client.FORBIDDEN:
                raise UnreachableError("it does not know the token of this connection any more")
        said = answer.data.decode(errors="replace")
        raise StorageError("use", self.url, said or f"status {answer.status}", is_transient=False)

    def _outcome(self, lost: _Lost, may_repeat: bool, deadline_ms: float, cause: Exception) -> Response:
        """Return the answer that was lost.

        Raises:
            UnreachableError: it was not carried out, and never will be; or it ``may_repeat``, and is over.
            StorageError: the outcome is unknown.
        """
        with self._lock:
            self._unsettled.append(lost)
        pause_s = PAUSES_S[0]
        while self.around.monotonic_ms() < deadline_ms and not is_cancelled():
            try:
                connection = self._taken()
                settled = self._settled(connection, lost)
                self._put_back(connection)
            except UnreachableError:
                self.around.sleep(pause_s)
                pause_s = min(2 * pause_s, PAUSES_S[1])
                continue
            except RefusedError:
                break
            if settled.is_void or (may_repeat and not settled.status):
                raise UnreachableError(str(cause)) from cause
            if settled.status:
                return Response(settled.status, settled.data)
            break
        raise StorageError("ask", self.url, f"the answer was lost: {cause}") from cause

    def _connection_without_unsettled(self) -> ServerConnection:
        """Return a connection to a server that is done with questions without an answer.

        Else a caller that looks for its effect would find nothing, and see it come afterwards.
        """
        connection = self._taken()
        with self._lock:
            unsettled = list(self._unsettled)
        for lost in unsettled:
            self._settled(connection, lost)
        return connection

    def _settled(self, connection: ServerConnection, lost: _Lost) -> RequestOutcome:
        if connection.facts.instance != lost.instance:
            found = RequestOutcome(is_over=True)  # its process has ended, with all that it had begun
        else:
            try:
                answer = connection.ask(Request("POST", SETTLE, [encode(lost.name)]))
                found = decode(self._result_of(answer), RequestOutcome)
            except ConnectionLostError as error:
                raise UnreachableError(str(error)) from error
            except BaseException:
                connection.close()
                raise
            if not found.is_over:
                connection.close()
                raise UnreachableError("it is still busy with what was asked before")
        with self._lock:
            self._unsettled = [one for one in self._unsettled if one != lost]
        return found

    def _taken(self) -> ServerConnection:
        """Return an idle connection."""
        old: list[ServerConnection] = []
        with self._lock:
            while self._idle:
                since_ms, connection = self._idle.pop()
                if self.around.monotonic_ms() - since_ms < IDLE_S * 1_000:
                    return connection
                old.append(connection)
        for connection in old:
            connection.close()
        return self.connect()

    def _put_back(self, connection: ServerConnection) -> None:
        with self._lock:
            if connection.is_open and len(self._idle) < IDLE_MAX:
                self._idle.append((self.around.monotonic_ms(), connection))
                return
        connection.close()

    def _notice_fork(self) -> None:
        """Make new connections and locks in a child: before any lock, the parent may hold one."""
        if self.around.process_id != self._pid:
            inherited = self._idle
            self._begin_in_this_process()
            for _, connection in inherited:
                connection.close()  # of this process: the parent's own goes on


def request_of(path: str, value: object = None, headers: Mapping[str, str] | None = None) -> Request:
    """Return a request with one value as its body."""
    parts: Sequence[Bytes] = () if value is None else [encode(value)]
    return Request("POST", path, parts, headers)
