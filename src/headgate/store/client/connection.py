"""One connection to the server of a store: a handshake first, then requests go there and responses come back.

The handshake is that of all connections of ours (``codec.handshake``), carried by two requests. Counterpart:
``server.connections``. Source: docs/spec/served-store.md. The token never travels. Never repeats
a request: that is for ``requests``, which knows what may be repeated.
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
from headgate.environment import SYSTEM_ENVIRONMENT, Environment
from headgate.errors import ProtocolViolation, UsageError
from headgate.model.config import SecurityConfig
from headgate.storage.base import Bytes
from headgate.store.addresses import TOKEN_FILE_VARIABLE, TOKEN_VARIABLE, ServerAddress
from headgate.store.client.messages import PROTOCOL_VERSION, checksum_of, decode
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
