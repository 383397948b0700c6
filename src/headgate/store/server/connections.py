"""Connection of a client: a handshake first, then one request after the other, in a thread of its own.

Counterparts: ``client.connection``; ``server``, which has the threads, ``handlers``, which has the answers. Source:
docs/spec/served-store.md. An unknown client gets no answer, and can make no thread read or wait for
much. Never shows a chunk that did not arrive whole and undamaged, and never holds more than a piece in memory.
"""

from __future__ import annotations

import contextlib
import http
import socket
import ssl
from collections.abc import Callable, Iterable, Iterator
from http.server import BaseHTTPRequestHandler
from io import BufferedReader
from typing import Protocol, cast
from urllib.parse import unquote

import xxhash

from headgate.codec.handshake import NONCE_BYTES, Purpose, ServerHandshake
from headgate.errors import ProtocolViolation
from headgate.http_limits import BoundedInput, TooLongError, host_of
from headgate.storage.base import Bytes, Storage
from headgate.store.client.connection import (
    CHECKSUM_HEADER,
    HELLO,
    NO_TOKEN,
    PROVE,
    RELEASE_HEADER,
    REQUEST_HEADER,
    VERSION_HEADER,
    WANTS_TOKEN_HEADER,
    ServerFacts,
    release,
)
from headgate.store.client.messages import PROTOCOL_VERSION, checksum_of, encode
from headgate.store.client.remote_store import ABSENT_HEADER, CHUNK, CHUNK_BYTES_MAX, OFFSET_HEADER, SIZE_HEADER
from headgate.tls import TlsServer, is_loopback, shut_down

PIECE_BYTES = 1 << 20


class ChunkStorage(Storage, Protocol):
    """Where a server keeps chunks: they come piece by piece, and other processes may have written what is read."""

    def put(self, path: str, parts: Iterable[Bytes]) -> None:
        """See ``LocalStorage``."""

    def put_if_absent(self, path: str, parts: Iterable[Bytes]) -> None:
        """See ``LocalStorage``."""

    def make_durable(self, path: str) -> None:
        """See ``LocalStorage``."""


class IncompleteError(Exception):
    """The client went in the middle, or its bytes are others than it sent. Expected: not a HeadgateError.

    ``is_whole``: all bytes came, so that the connection can go on.
    """

    def __init__(self, problem: str, *, is_whole: bool) -> None:
        self.problem = problem
        self.is_whole = is_whole


def arriving(read: Callable[[int], bytes], size_bytes: int, checksum: str) -> Iterator[bytes]:
    """Give the bytes of a body as they come; after the last one they are checked against the checksum.

    Raises:
        IncompleteError
    """
    digest, missing = xxhash.xxh3_64(), size_bytes
    while missing:
        try:
            piece = read(min(missing, PIECE_BYTES))
        except OSError as error:
            raise IncompleteError(f"the client is gone: {error}", is_whole=False) from error
        if not piece:
            raise IncompleteError("the client is gone", is_whole=False)
        digest.update(piece)
        missing -= len(piece)
        yield piece
    # raised from within the storage's `put`, before the file gets its name: nothing is kept
    if digest.hexdigest() != checksum:
        raise IncompleteError("the question was damaged on its way", is_whole=True)


class Range:
    """Bytes of a chunk that are to be sent: read once to tell their checksum, and once more to send them."""

    def __init__(self, storage: ChunkStorage, path: str, offset: int, size_bytes: int | None) -> None:
        """Look at ``size_bytes`` from ``offset`` on, fewer at the end; None: all.

        Raises:
            NotFound, StorageError
        """
        self._storage, self._path, self._offset = storage, path, offset
        digest, self.size_bytes = xxhash.xxh3_64(), 0
        self._only: bytes | None = None
        for piece in self._pieces(size_bytes):
            digest.update(piece)
            self._only = piece if self.size_bytes == 0 else None
            self.size_bytes += len(piece)
        self.checksum = digest.hexdigest()
        # as `Storage.get` does: who reads all of it acts on it, whatever process wrote it
        if size_bytes is None:
            storage.make_durable(path)

    def pieces(self) -> Iterator[bytes]:
        """Give the bytes. If they are others by now, their checksum tells."""
        return iter([self._only]) if self._only is not None else self._pieces(self.size_bytes)

    def _pieces(self, size_bytes: int | None) -> Iterator[bytes]:
        at = 0
        while size_bytes is None or at < size_bytes:
            wanted = PIECE_BYTES if size_bytes is None else min(PIECE_BYTES, size_bytes - at)
            piece = self._storage.get_range(self._path, self._offset + at, wanted)
            if piece:
                yield piece
            at += len(piece)
            if len(piece) < wanted:
                return


HANDSHAKE_TIMEOUT_S = 10.0
"""So long a newcomer may take until it is known."""

IDLE_S = 90.0
"""So long a known client may be silent between two questions, or two pieces of one."""

TLS_HANDSHAKE = b"\x16"
"""First byte of every TLS connection, and of no request."""

HANDSHAKE_BYTES_MAX = 4_096
"""Of all that a newcomer says until it is known."""

HEAD_BYTES_MAX = 16 << 10
"""Of the first lines of a question of a known client."""

BODY_BYTES_MAX = 64 << 20
"""Of a question, but for a chunk. Names of files are the longest: a million of them."""


class RefusalError(Exception):
    """A question that is not answered, and ends its connection: ``status`` and one sentence."""

    def __init__(self, status: int, text: str) -> None:
        super().__init__(status, text)
        self.status = status
        self.text = text


class ConnectionServer(Protocol):
    """What all connections of a server share: ``desk.ServerDesk``."""

    @property
    def facts(self) -> ServerFacts:
        """Facts about the server for authenticated clients."""

    @property
    def tls(self) -> TlsServer | None:
        """TLS of the listener."""

    @property
    def allows_plain_loopback(self) -> bool:
        """Whether clients on this machine may do without TLS, as on every loopback connection of ours."""

    @property
    def is_closing(self) -> bool:
        """Whether the server is closing: no request is answered any more."""

    def tokens(self) -> list[bytes]:
        """Return the tokens that are right now; none: every process on this machine may ask."""

    def token(self, size_bytes: int) -> bytes:
        """Return random bytes for a secret."""

    def came(self, connection: Connection) -> None:
        """Register a connection before its client is authenticated."""

    def greeted(self, connection: Connection) -> None:
        """Its client is known from now on."""

    def went(self, connection: Connection) -> None:
        """It is gone."""

    def refused(self) -> None:
        """Count a refused connection or request."""

    def answer(self, path: str, name: str | None, data: bytes) -> tuple[int, bytes]:
        """Return status and answer to a question; ``name`` is that of one that may change something."""

    def take_chunk(self, path: str, name: str | None, parts: Iterable[bytes], *, if_absent: bool) -> tuple[int, bytes]:
        """Take a chunk as it comes."""

    def give_chunk(self, path: str, offset: int, size_bytes: int | None) -> Range | tuple[int, bytes]:
        """Return what to give of a chunk, or an answer instead."""


class Connection(BaseHTTPRequestHandler):
    """A client's connection; ``server`` is a ``Desk``."""

    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    wbufsize = -1
    timeout = HANDSHAKE_TIMEOUT_S
    is_busy = False

    @property
    def desk(self) -> ConnectionServer:
        """The server."""
        return cast(ConnectionServer, self.server)

    def setup(self) -> None:
        """Begin; TLS in this thread, so that other connections do not wait."""
        self._machine: ServerHandshake | None = None
        self._token = b""
        self._is_known = False
        self._tls = self.desk.tls
        self.desk.came(self)
        try:
            if self._tls is not None:
                self._begin_tls(self._tls)
            super().setup()
            self._input = BoundedInput(self.rfile, HANDSHAKE_BYTES_MAX)
            self.rfile = cast(BufferedReader, self._input)
        except BaseException:
            # `finish` is not called for a connection that could not begin, and it was counted
            self._leave()
            raise

    def _begin_tls(self, tls: TlsServer) -> None:
        """Encrypt from the first read on, unless the client's first byte says that it does not.

        It is answered in plain words then.
        """
        self.request.settimeout(HANDSHAKE_TIMEOUT_S)
        if self.request.recv(1, socket.MSG_PEEK) != TLS_HANDSHAKE:
            self._tls = None
            return
        self.request = tls.context.wrap_socket(self.request, server_side=True, do_handshake_on_connect=False)

    def finish(self) -> None:
        """End."""
        with contextlib.suppress(OSError, ValueError):
            super().finish()
        self._leave()

    def _leave(self) -> None:
        self.desk.went(self)
        if isinstance(self.request, ssl.SSLSocket):
            self.request.close()  # the server closes the bytes below it only

    def handle_one_request(self) -> None:
        """Answer a question, or end a connection that says more than it may."""
        if self._is_known:
            self._input.left = HEAD_BYTES_MAX
        self.requestline, self.request_version, self.command = "", self.protocol_version, ""
        try:
            super().handle_one_request()
        except TooLongError:
            self.send_error(http.HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE, "this is more than the server reads")
            self.wfile.flush()

    def interrupt(self) -> None:
        """End it from another thread; nothing more is read from it or written to it."""
        shut_down(self.request)

    def do_GET(self) -> None:
        """Answer a question for bytes."""
        self._serve(self._give)

    def do_PUT(self) -> None:
        """Take bytes."""
        self._serve(self._take)

    def do_POST(self) -> None:
        """Answer any other question."""
        self._serve(self._answer)

    def send_error(self, code: int, message: str | None = None, explain: str | None = None) -> None:
        """Say that this is none of our questions, and end."""
        self.desk.refused()
        self._reply(code, (message or "").encode(errors="replace"), ends=True)

    def log_message(self, format: str, *arguments: object) -> None:
        """Say nothing: the server counts."""

    def version_string(self) -> str:
        """What answers say of who gives them."""
        return "headgate"

    def _serve(self, work: Callable[[str], None]) -> None:
        self.is_busy = True
        if self._is_known:
            self._input.left = None
        try:
            self._work(work)
            self.wfile.flush()
        finally:
            self.is_busy = False

    def _work(self, work: Callable[[str], None]) -> None:
        try:
            if self.desk.is_closing:
                raise RefusalError(http.HTTPStatus.SERVICE_UNAVAILABLE, "the server is ending")
            self._check_head()
            work(unquote(self.path))
        except RefusalError as refusal:
            self.desk.refused()
            self._reply(refusal.status, refusal.text.encode(), ends=True)
        except IncompleteError as incomplete:
            self._reply(http.HTTPStatus.PRECONDITION_FAILED, incomplete.problem.encode(), ends=not incomplete.is_whole)

    def _check_head(self) -> None:
        is_here = self.desk.allows_plain_loopback and is_loopback(self.client_address[0].removeprefix("::ffff:"))
        if self.desk.tls is not None and self._tls is None and not is_here:
            raise RefusalError(
                http.HTTPStatus.UPGRADE_REQUIRED,
                "it takes encrypted connections only: open it as headgate://HOST:PORT, or as https://HOST:PORT on its "
                "own machine",
            )
        told = self.headers.get(VERSION_HEADER)
        if told != str(PROTOCOL_VERSION):
            theirs = self.headers.get(RELEASE_HEADER, "")[:40]
            raise RefusalError(
                http.HTTPStatus.CONFLICT,
                f"the server is Headgate {release()} and speaks version {PROTOCOL_VERSION} of the stores' protocol, "
                f"this is Headgate {theirs} and speaks version {(told or '')[:10]}; use the same release on both sides",
            )
        if not self._is_known and unquote(self.path) not in (HELLO, PROVE):
            raise RefusalError(http.HTTPStatus.UNAUTHORIZED, "greet first")
        # with each question: a token that was taken away ends the connections that came with it
        if self._is_known and self._token not in (self.desk.tokens() or [NO_TOKEN]):
            raise RefusalError(http.HTTPStatus.FORBIDDEN, "the token of this connection is not right any more")

    def _answer(self, path: str) -> None:
        if path == HELLO:
            self._reply(*self._hello(self._body(HANDSHAKE_BYTES_MAX)))
        elif path == PROVE:
            self._reply(*self._prove(self._body(HANDSHAKE_BYTES_MAX)))
        else:
            self._reply(*self.desk.answer(path, self._name(), self._body(BODY_BYTES_MAX)))

    def _hello(self, first: bytes) -> tuple[int, bytes]:
        """Answer the first message with the token that its client knows."""
        tokens, tls = self.desk.tokens(), self._tls
        if not tokens and not is_loopback(host_of(self.headers.get("Host", ""))):
            raise RefusalError(http.HTTPStatus.FORBIDDEN, "this server is for this machine, called by its own name")
        for token in tokens or [NO_TOKEN]:
            nonce = self.desk.token(NONCE_BYTES)
            machine = ServerHandshake(token, Purpose.STORE, nonce, is_tls=tls is not None)
            if tls is not None:
                machine.bind(tls.certificate)
            with contextlib.suppress(ProtocolViolation):
                answer = machine.receive(first)
                self._machine, self._token = machine, token
                return http.HTTPStatus.OK, answer
        raise RefusalError(http.HTTPStatus.FORBIDDEN, "the token is not right")

    def _prove(self, proof: bytes) -> tuple[int, bytes]:
        # one try for each greeting: another guess takes another one
        machine, self._machine = self._machine, None
        try:
            if machine is None:
                raise RefusalError(http.HTTPStatus.FORBIDDEN, "greet first")
            accepted = machine.receive(proof)
        except ProtocolViolation as error:
            raise RefusalError(http.HTTPStatus.FORBIDDEN, "the token is not right") from error
        self._is_known = True
        self.connection.settimeout(IDLE_S)
        self.desk.greeted(self)
        return http.HTTPStatus.OK, accepted + encode(self.desk.facts)

    def _take(self, path: str) -> None:
        size_bytes = self._size(CHUNK_BYTES_MAX)
        parts = arriving(self._read, size_bytes, self._checksum())
        is_whole = True
        try:
            chunk, if_absent = self._chunk(path), self.headers.get(ABSENT_HEADER) is not None
            status, data = self.desk.take_chunk(chunk, self._name(), parts, if_absent=if_absent)
        except IncompleteError as incomplete:
            is_whole = incomplete.is_whole
            raise
        finally:
            if is_whole:  # a client that still sends would not hear the answer
                for _ in parts:
                    pass
        self._reply(status, data)

    def _give(self, path: str) -> None:
        self._body(0)
        chunk = self._chunk(path)
        offset, size_bytes = self._number(OFFSET_HEADER), self._number(SIZE_HEADER)
        found = self.desk.give_chunk(chunk, offset or 0, size_bytes)
        if not isinstance(found, Range):
            self._reply(*found)
            return
        self._head(http.HTTPStatus.OK, found.size_bytes, found.checksum)
        left = found.size_bytes
        for piece in found.pieces():  # an error ends the connection
            self.wfile.write(piece[:left])
            left -= len(piece)
        if left > 0:
            self.close_connection = True  # the client sees that bytes are missing

    def _chunk(self, path: str) -> str:
        if not path.startswith(CHUNK):
            raise RefusalError(http.HTTPStatus.BAD_REQUEST, "there is no such question")
        return path.removeprefix(CHUNK)

    def _name(self) -> str | None:
        name = self.headers.get(REQUEST_HEADER)
        return None if name is None else name[:64]

    def _number(self, header: str) -> int | None:
        told = self.headers.get(header)
        if told is None:
            return None
        if not (told.isascii() and told.isdigit() and len(told) <= 18):
            raise RefusalError(http.HTTPStatus.BAD_REQUEST, f"{header} is no number")
        return int(told)

    def _size(self, most: int) -> int:
        size_bytes = self._number("Content-Length")
        if size_bytes is None or self.headers.get("Transfer-Encoding") is not None:
            raise RefusalError(http.HTTPStatus.LENGTH_REQUIRED, "say how long the question is")
        if size_bytes > most:
            said = f"the question has {size_bytes:,} bytes, and the server takes {most:,}"
            raise RefusalError(http.HTTPStatus.REQUEST_ENTITY_TOO_LARGE, said)
        return size_bytes

    def _checksum(self) -> str:
        return self.headers.get(CHECKSUM_HEADER, "")

    def _body(self, most: int) -> bytes:
        return b"".join(arriving(self._read, self._size(most), self._checksum()))

    def _read(self, size_bytes: int) -> bytes:
        return self.rfile.read1(size_bytes)

    def _reply(self, status: int, data: bytes, *, ends: bool = False) -> None:
        self.close_connection = self.close_connection or ends
        self._head(status, len(data), checksum_of(data))
        self.wfile.write(data)

    def _head(self, status: int, size_bytes: int, checksum: str) -> None:
        self.send_response_only(status)
        self.send_header("Content-Length", str(size_bytes))
        self.send_header(CHECKSUM_HEADER, checksum)
        if not self._is_known and self.desk.tokens():
            self.send_header(WANTS_TOKEN_HEADER, "1")
        if self.close_connection:
            self.send_header("Connection", "close")
        self.end_headers()
