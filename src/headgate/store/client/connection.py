"""A process's way to the server of a store: connections, requests, and what becomes of one with a lost answer.

The handshake is that of all connections of ours (``codec.handshake``), carried by two requests. ``Client`` waits for a
server that is away, and looks for a lost answer before anything is repeated. Counterparts: ``server.connections``;
``server.handlers`` knows what became of a request. Source: docs/spec/served-store.md. The token never travels. Never
repeats what may have taken effect: that is its caller's, who knows how.
"""

from __future__ import annotations

import functools
import http.client
import importlib.metadata
import os
import socket
import ssl
from collections.abc import Mapping, Sequence
from pathlib import Path
from urllib.parse import quote

import msgspec

from headgate.codec.handshake import NONCE_BYTES, SECRET_BYTES_MIN, ClientHandshake, Purpose
from headgate.dataclass import dataclass
from headgate.distribution import DISTRIBUTION
from headgate.environment import SYSTEM_ENVIRONMENT, Environment, is_cancelled
from headgate.errors import ProtocolViolation, StorageError, UsageError
from headgate.model.config import SecurityConfig
from headgate.storage.base import Bytes
from headgate.store.addresses import CA_FILE_VARIABLE, TOKEN_FILE_VARIABLE, TOKEN_VARIABLE, ServerAddress
from headgate.store.client.messages import PROTOCOL_VERSION, checksum_of, decode, decode_failure, encode
from headgate.tls import Tls, shut_down

NO_TOKEN = b"no token is needed on this machine"
"""What both know where no token is needed: the same steps, without the proof."""

HELLO, PROVE = "/hello", "/prove"
VERSION_HEADER, RELEASE_HEADER, WANTS_TOKEN_HEADER = "Headgate-Protocol", "Headgate-Release", "Headgate-Wants-Token"
CHECKSUM_HEADER, REQUEST_HEADER = "Headgate-Checksum", "Headgate-Request"


@functools.cache
def release() -> str:
    """Return the release of Headgate that this is, for people."""
    try:
        return importlib.metadata.version(DISTRIBUTION)
    except importlib.metadata.PackageNotFoundError:
        return "of unknown release"


class ServerFacts(msgspec.Struct, frozen=True):
    """What a server says of itself to those that it knows.

    Attributes:
        instance: of its process: another one knows nothing of the requests of this one.
        store: what tells its store from others.
        root: the store's directory, for messages.
    """

    instance: str
    store: str
    root: str


def read_tokens(file: str | None = None) -> list[bytes]:
    """Return the tokens in ``file``, one in each line, or those that the environment says; none: there is none.

    Raises:
        UsageError: the file cannot be read, or a token is too short to be one.
    """
    named = file or os.environ.get(TOKEN_FILE_VARIABLE)
    if named:
        try:
            text = Path(named).expanduser().read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            reason = getattr(error, "strerror", None) or "it is no text"
            raise UsageError(f"the file {named} with the token of the store cannot be read: {reason}") from error
        where = f"the file {named}"
    else:
        text, where = os.environ.get(TOKEN_VARIABLE, ""), f"${TOKEN_VARIABLE}"
    tokens = [line.strip().encode() for line in text.splitlines() if line.strip()]
    if named and not tokens:
        raise UsageError(
            f"{where} has no token of a store in it; put one there, of {SECRET_BYTES_MIN} or more characters"
        )
    if any(len(token) < SECRET_BYTES_MIN for token in tokens):
        raise UsageError(
            f"{where} has a token that is too short; take {SECRET_BYTES_MIN} characters or more that are random, "
            "such as: python -c 'import secrets; print(secrets.token_urlsafe(32))'"
        )
    return tokens


CONNECT_S = 10.0
ANSWER_S = 120.0
"""So long a server may be silent before it is given up: longer than any verb waits for others."""
SILENCE_S = 30
"""The loss of the server's machine is noticed within this time."""


class ConnectionLostError(Exception):
    """There is no answer: what was asked may have been done, or be done later. Expected: not a HeadgateError."""


class UnreachableError(Exception):
    """There is no server now, or it takes nothing now: nothing was done. Expected: not a HeadgateError."""


class RefusedError(Exception):
    """The server, or what is there instead, is none for us, and waiting does not help. Expected: no HeadgateError."""


@dataclass(frozen=True, slots=True)
class Request:
    """What is asked.

    Attributes:
        method, path: as HTTP has them; ``path`` is quoted here.
        parts: the body.
        headers: beside those of every question.
    """

    method: str
    path: str
    parts: Sequence[Bytes] = ()
    headers: Mapping[str, str] | None = None


@dataclass(frozen=True, slots=True)
class Response:
    """What came back."""

    status: int
    data: bytes


class ServerConnection:
    """A connection that both ends know each other on. One thread at a time."""

    def __init__(
        self, address: ServerAddress, token: bytes | None, ca_file: str, around: Environment = SYSTEM_ENVIRONMENT
    ) -> None:
        """Connect and greet.

        Raises:
            UnreachableError, RefusedError
            UsageError: the user's authority cannot be used.
        """
        self._last: http.client.HTTPResponse | None = None
        self._around = around
        context = Tls(SecurityConfig(tls=address.is_tls, ca_file=ca_file)).client(address.host)
        self._http = http.client.HTTPConnection(address.host, address.port)
        self._http.auto_open = 0  # a connection that opened itself would not be greeted
        try:
            self._open(address, token, context)
        except BaseException:
            self.close()
            raise

    def _open(self, address: ServerAddress, token: bytes | None, context: ssl.SSLContext | None) -> None:
        try:
            stream = self._http.sock = self._around.connect(address.host, address.port, CONNECT_S)
            stream.settimeout(CONNECT_S)  # of the greeting, too
            _tune(stream)
            if context is not None:
                stream = self._http.sock = context.wrap_socket(stream, server_hostname=address.host)
            self.facts = self._greet(token, is_tls=address.is_tls)
            stream.settimeout(ANSWER_S)
        except ssl.SSLError as error:
            raise RefusedError(f"no encrypted connection can be made: {error.reason or error}") from error
        except (OSError, http.client.HTTPException, ConnectionLostError) as error:
            raise UnreachableError(_said(error)) from error

    @property
    def is_open(self) -> bool:
        """Whether it is open: a server ends it after some answers."""
        return self._http.sock is not None

    def ask(self, question: Request) -> Response:
        """Ask and wait for the answer.

        Raises:
            ConnectionLostError: there is none; the connection is of no more use.
        """
        try:
            return self._asked(question)
        except BaseException as error:
            self.close()  # an answer may be left on it
            if isinstance(error, (OSError, http.client.HTTPException)):
                raise ConnectionLostError(_said(error)) from error
            raise

    def interrupt(self) -> None:
        """Make a thread that waits for an answer get an error."""
        stream = self._http.sock
        if stream is not None:
            # not closed: that would not wake a thread that waits on it
            shut_down(stream)

    def close(self) -> None:
        """Let go of it."""
        self._http.close()

    def _asked(self, question: Request) -> Response:
        parts = [view for part in question.parts if len(view := memoryview(part).cast("B"))]
        headers = {
            VERSION_HEADER: str(PROTOCOL_VERSION),
            "Content-Length": str(sum(map(len, parts))),
            CHECKSUM_HEADER: checksum_of(*parts),
            **(question.headers or {}),
        }
        self._http.request(question.method, quote(question.path), parts, headers)
        response = self._http.getresponse()
        data = response.read()
        self._last = response
        if response.getheader(CHECKSUM_HEADER) != checksum_of(data):
            raise http.client.HTTPException("the answer was damaged on its way")
        return Response(response.status, data)

    def _greet(self, token: bytes | None, *, is_tls: bool) -> ServerFacts:
        """Show each other that both know the token; without one, the same steps with what everybody knows."""
        nonce = self._around.token(NONCE_BYTES)
        machine = ClientHandshake(token or NO_TOKEN, Purpose.STORE, nonce, is_tls=is_tls)
        if isinstance(self._http.sock, ssl.SSLSocket):
            # the proof is of this certificate, too, so that a machine in between cannot pass it on
            machine.bind(self._http.sock.getpeercert(binary_form=True) or b"")
        told = self._asked(Request("POST", HELLO, [machine.start()], {RELEASE_HEADER: release()}))
        if told.status != http.client.OK:
            raise self._refusal(told, token)
        try:
            proof = machine.receive(told.data)
            answer = self._asked(Request("POST", PROVE, [proof]))
            if answer.status != http.client.OK:
                raise self._refusal(answer, token)
            machine.receive(answer.data[:1])
            return decode(answer.data[1:], ServerFacts)
        except ProtocolViolation as error:
            raise RefusedError("what answers there does not know the token that was given here") from error

    def _refusal(self, answer: Response, token: bytes | None) -> Exception:
        """Return what to raise where the server does not greet."""
        if answer.status == http.client.SERVICE_UNAVAILABLE:
            return UnreachableError(answer.data.decode(errors="replace"))
        wants_token = self._last is not None and self._last.getheader(WANTS_TOKEN_HEADER) is not None
        if answer.status == http.client.FORBIDDEN and token is None and wants_token:
            return RefusedError("it wants a token, and none is given here")
        if answer.status == http.client.FORBIDDEN:
            return RefusedError("it does not know the token that is given here")
        return RefusedError(answer.data.decode(errors="replace") or f"it answers with status {answer.status}")


def _tune(stream: socket.socket) -> None:
    stream.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    stream.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in (("TCP_KEEPIDLE", 10), ("TCP_KEEPINTVL", 5), ("TCP_KEEPCNT", 4)):
        if hasattr(socket, option):
            stream.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), value)
    if hasattr(socket, "TCP_USER_TIMEOUT"):
        stream.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, SILENCE_S * 1_000)


def _said(error: BaseException) -> str:
    if isinstance(error, TimeoutError):
        return "it does not answer"
    return str(getattr(error, "strerror", None) or error) or type(error).__name__


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
        assert self._facts is not None, "to ask is to connect, which sets them"
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
            # a restarted server is another instance, which is fine; another store is not
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
        # a new name for each try: the former one may have been declared void, and is never carried out
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
        assert facts is not None, "an answer came over a connection, and connecting has set them"
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
            # first: whatever happens now, no question is asked before this one is settled
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
            # raised as unreachable, so that `ask` asks again while there is time
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
                # the one that was used last: the older ones are left to become too old
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


def request_of(path: str, value: object = None) -> Request:
    """Return a request with one value as its body."""
    return Request("POST", path, () if value is None else [encode(value)])
