"""One connection to a Kafka broker: requests go out in order, and their answers come back in the same order.

Blocking calls with a limit of time; ``receive(0)`` only looks. A connection that failed is closed and stays unusable.
Counterpart: the broker's socket server, which answers the requests of one connection one after the other.

A client proves who it is by TLS certificates, and by SASL as PLAIN, SCRAM or OAUTHBEARER. Secrets are never part of
the configuration, which travels in plans: it says where they are found when a connection is made, in the environment or
in a file of the worker. SCRAM: RFC 5802 and 7677; OAUTHBEARER: RFC 7628. What a broker refuses, and waiting does not
help with, becomes one sentence with what to change (``refusal``).
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import re
import select
import socket
import ssl
import struct
from collections import deque
from collections.abc import Generator, Iterable
from dataclasses import dataclass, field
from typing import Any, TypeAlias, TypeVar

import numpy as np

from headgate import __version__
from headgate.codec.kafka.messages import (
    GROUP_COORDINATOR,
    ApiVersions,
    ApiVersionsAnswer,
    SaslAuthenticate,
    SaslHandshake,
)
from headgate.codec.kafka.wire import (
    Answer,
    ErrorCode,
    Parts,
    Request,
    correlation_id_of,
    decode_answer,
    encode_request,
)
from headgate.connectors.secret import is_secret_place, read_secret
from headgate.environment import Environment
from headgate.errors import FencedError, ProtocolViolation, StorageError, UsageError
from headgate.model.config import check_switches
from headgate.tls import shut_down

MECHANISMS = ("PLAIN", "SCRAM-SHA-256", "SCRAM-SHA-512", "OAUTHBEARER")

_ITERATIONS_MAX = 1_000_000
"""Of SCRAM: a broker that asks for more wants to keep the client busy."""

Exchange: TypeAlias = Generator[bytes, bytes, None]
"""Bytes to send and bytes received in turn; ends when the broker's proof, if there is one, was checked."""


@dataclass(frozen=True, slots=True)
class KafkaSecurity:
    """How to connect to brokers that demand TLS or a login.

    Attributes:
        tls: True connects over TLS. The broker's certificate and host name are checked.
        ca_file: the authority that signed the brokers' certificates, PEM; "" uses those that the system trusts.
        certificate_file, key_file: the client's own certificate, PEM, if brokers ask for one.
        mechanism: how to log in by SASL: ``"PLAIN"``, ``"SCRAM-SHA-256"``, ``"SCRAM-SHA-512"``, ``"OAUTHBEARER"``, or
            "" for no login.
        user: the user's name, for PLAIN and SCRAM.
        secret: where every worker finds the password, or the token for OAUTHBEARER: ``"env:NAME"`` or
            ``"file:/path"``. It is read again for each connection, so that a token may be renewed.
    """

    tls: bool = False
    ca_file: str = ""
    certificate_file: str = ""
    key_file: str = ""
    mechanism: str = ""
    user: str = ""
    secret: str = field(default="", repr=False)

    def __post_init__(self) -> None:
        check_switches("KafkaSecurity: ", tls=self.tls)
        if self.mechanism and self.mechanism not in MECHANISMS:
            known = ", ".join(MECHANISMS)
            raise UsageError(f"Kafka security has no mechanism {self.mechanism!r}; choose one of {known}")
        if self.mechanism and not is_secret_place(self.secret):
            raise UsageError(
                "Kafka security needs secret='env:NAME' or secret='file:/path', which says where the password or token "
                "is found; the secret itself must not be part of a program"
            )
        if self.mechanism and self.mechanism != "OAUTHBEARER" and not self.user:
            raise UsageError(f"Kafka security with mechanism {self.mechanism} needs user='...'")
        if not self.tls and (self.ca_file or self.certificate_file or self.key_file):
            raise UsageError("Kafka security names certificates and does not use TLS; add tls=True")

    def context(self) -> ssl.SSLContext | None:
        """Return what connections are wrapped with, or None without TLS.

        Raises:
            UsageError: a certificate cannot be used.
        """
        if not self.tls:
            return None
        try:
            context = ssl.create_default_context(cafile=self.ca_file or None)
            if self.certificate_file:
                context.load_cert_chain(self.certificate_file, self.key_file or None)
        except OSError as error:
            files = ", ".join(one for one in (self.ca_file, self.certificate_file, self.key_file) if one)
            raise UsageError(
                f"Kafka security cannot use {files}: {error.strerror or error}; give readable PEM files on every worker"
            ) from error
        return context

    def exchange(self, nonce: str) -> Exchange:
        """Return the exchange that logs in. ``nonce``: unpredictable text, for SCRAM.

        Raises:
            UsageError: the secret is not there.
        """
        secret = read_secret(self.secret, "Kafka")
        if self.mechanism == "PLAIN":
            return _one_message(b"\0" + self.user.encode() + b"\0" + secret.encode())
        if self.mechanism == "OAUTHBEARER":
            return _bearer(secret)
        return _scram(self.mechanism.removeprefix("SCRAM-").replace("-", "").lower(), self.user, secret, nonce)


NO_SECURITY = KafkaSecurity()


class LoginError(Exception):
    """The broker's part of an exchange is wrong: it does not know the password, or it is no broker."""


def _one_message(message: bytes) -> Exchange:
    yield message


def _bearer(token: str) -> Exchange:
    answer = yield f"n,,\x01auth=Bearer {token}\x01\x01".encode()
    if answer:
        yield b"\x01"  # after a failure, which the answer describes, the client has to say one thing more
        raise LoginError(answer.decode(errors="replace"))


def _scram(digest: str, user: str, password: str, nonce: str) -> Exchange:
    name = user.replace("=", "=3D").replace(",", "=2C")
    first = f"n={name},r={nonce}"
    server_first = (yield f"n,,{first}".encode()).decode(errors="replace")
    match = re.fullmatch(r"r=([^,]+),s=([A-Za-z0-9+/=]+),i=([0-9]{1,9})(?:,.*)?", server_first)
    if match is None or not match[1].startswith(nonce) or match[1] == nonce:
        raise LoginError("its answer is no SCRAM")
    iterations = int(match[3])
    if not 4096 <= iterations <= _ITERATIONS_MAX:
        raise LoginError(f"it asks for {iterations} iterations of SCRAM, not for 4096 to {_ITERATIONS_MAX}")
    salted = hashlib.pbkdf2_hmac(digest, password.encode(), base64.b64decode(match[2]), iterations)
    key = _mac(digest, salted, b"Client Key")
    final = f"c={base64.b64encode(b'n,,').decode()},r={match[1]}"
    signed = f"{first},{server_first},{final}".encode()
    signature = _mac(digest, hashlib.new(digest, key).digest(), signed)
    proof = base64.b64encode(bytes(a ^ b for a, b in zip(key, signature, strict=True))).decode()
    server_final = yield f"{final},p={proof}".encode()
    expected = base64.b64encode(_mac(digest, _mac(digest, salted, b"Server Key"), signed))
    if not hmac.compare_digest(server_final.partition(b",")[0], b"v=" + expected):
        raise LoginError("it does not know the password itself")


def _mac(digest: str, key: bytes, message: bytes) -> bytes:
    return hmac.digest(key, message, digest)


_RIGHTS = {
    ErrorCode.TOPIC_AUTHORIZATION_FAILED,
    ErrorCode.GROUP_AUTHORIZATION_FAILED,
    ErrorCode.CLUSTER_AUTHORIZATION_FAILED,
    ErrorCode.TRANSACTIONAL_ID_AUTHORIZATION_FAILED,
}
_FENCED = {ErrorCode.PRODUCER_FENCED, ErrorCode.INVALID_PRODUCER_EPOCH, ErrorCode.TRANSACTION_COORDINATOR_FENCED}
_REMEDIES = {
    ErrorCode.INVALID_RECORD: "in a compacted topic each record needs a key",
    ErrorCode.INVALID_TIMESTAMP: (
        "see message.timestamp.before.max.ms and message.timestamp.after.max.ms of the topic, or write records without "
        "their times"
    ),
}
"""What helps with records that a topic does not take."""


def right_to(kind: int, key: str) -> str:
    """Return the right that the user of a coordinator needs."""
    if kind == GROUP_COORDINATOR:
        return f"Read on group '{key}'"
    return f"Write on transactional id '{key}'"


def refusal(what: str, brokers: str, code: ErrorCode, message: str | None = None, right: str = "") -> Exception:
    """Return the error that says why brokers do not do ``what``, for codes with which waiting does not help.

    ``right``: the one that the user needs for it, if ``what`` does not say so.
    """
    reason = f"{code.name}: {message}" if message else code.name
    if code in _RIGHTS:
        acl = f"an ACL for {right}" if right else "an ACL"
        return UsageError(f"cannot {what}: the user has no right to it in Kafka at {brokers} ({reason}); add {acl}")
    if code in _FENCED:
        return FencedError(f"cannot {what}: a newer producer took it over ({reason})")
    if code is ErrorCode.INVALID_PRODUCER_ID_MAPPING:
        why = f"the brokers have forgotten its transactional id, see transactional.id.expiration.ms ({reason})"
        return StorageError(what, f"in Kafka at {brokers}", why, False)
    if code in (ErrorCode.UNKNOWN_TOPIC_ID, ErrorCode.INCONSISTENT_TOPIC_ID):
        return UsageError(f"cannot {what}: the topic was deleted, and perhaps created again ({reason})")
    if code is ErrorCode.INVALID_TOPIC_EXCEPTION:
        return UsageError(f"cannot {what}: that is no name of a topic ({reason})")
    if code is ErrorCode.UNKNOWN_TOPIC_OR_PARTITION:
        return UsageError(f"cannot {what}: Kafka at {brokers} has no such topic or partition; create it first")
    if code in _REMEDIES:
        return UsageError(f"cannot {what}: Kafka at {brokers} does not take a record ({reason}); {_REMEDIES[code]}")
    return StorageError(what, f"in Kafka at {brokers}", reason, False)


ANSWER_BYTES_MAX = 512 << 20
"""The longest answer: bounds what a length can make the client allocate. Fetches ask for far less."""

SEND_MS = 30_000
"""How long a broker may leave the bytes of a request in the network."""

LARGE_BYTES = 64 << 10
"""A piece of a request with so many bytes is sent from where it stands."""

SMALL_ANSWER_BYTES_MAX = 1 << 20
"""The longest answer before the broker is known."""

_LENGTH = struct.Struct(">i")
_A = TypeVar("_A", bound=Answer)


class Connection:
    """A connection that is ready: versions are known, and the client is logged in.

    Attributes:
        address: the broker, for errors.
        peer: its host and port.
        capabilities: what the broker answered to the first request.

    Raises:
        StorageError: the broker cannot be reached, or ends the connection.
        UsageError: it refuses the login, or is no broker that can be used.
    """

    def __init__(
        self,
        host: str,
        port: int,
        security: KafkaSecurity,
        *,
        client_id: str,
        environment: Environment,
        timeout_ms: int,
    ) -> None:
        self.address, self.peer = f"{host}:{port}", (host, port)
        self._client_id, self._environment = client_id, environment
        self._sent: deque[tuple[int, Request[Any], int]] = deque()
        self._next_id = 0
        self._versions: dict[int, tuple[int, int]] = {}
        self._in, self._in_filled = _space(_LENGTH.size), 0
        self._is_length = True
        self._is_proven = False
        """Whether it has answered more than what brokers tell every client."""
        self._answer_bytes_max = SMALL_ANSWER_BYTES_MAX
        self._socket = self._connect(host, port, security.context(), timeout_ms)
        try:
            self.capabilities = self._learn_versions(timeout_ms)
            if security.mechanism:
                self._log_in(security, timeout_ms)
        except BaseException:
            self.close()
            raise
        self._answer_bytes_max = ANSWER_BYTES_MAX

    def ask(self, request: Request[_A], timeout_ms: int) -> _A:
        """Send ``request`` and return its answer. Nothing else may be in flight.

        Raises:
            StorageError: no answer in time; the connection is closed, because the answer may still come.
        """
        self.send(request)
        answer = self.receive(timeout_ms)
        if answer is None:
            raise self._failed(f"no answer to {type(request).__name__} within {timeout_ms} ms")
        return answer  # type: ignore[no-any-return]

    def send(self, request: Request[Any]) -> None:
        """Send ``request``; ``receive`` returns its answer in its turn."""
        version = self.version_of(request)
        self._next_id = (self._next_id + 1) & 0x7FFFFFFF
        pieces = _joined(encode_request(request, version, self._next_id, self._client_id))
        self._sent.append((self._next_id, request, version))
        for piece in pieces:
            self._send(memoryview(piece))

    @property
    def in_flight(self) -> int:
        """How many answers have not come yet."""
        return len(self._sent)

    def receive(self, timeout_ms: int) -> Any:
        """Return the next answer, or None if it has not come as a whole within ``timeout_ms``.

        Raises:
            StorageError: the connection is lost.
            ProtocolViolation: the answer is malformed, or belongs to another request.
        """
        assert self._sent, "nothing was asked"
        data = self._next_message(timeout_ms)
        if data is None:
            return None
        correlation_id, request, version = self._sent.popleft()
        try:
            if (found := correlation_id_of(data)) != correlation_id:
                problem = f"{self.address} answered request {found} where request {correlation_id} was next"
                raise ProtocolViolation("Kafka", problem)
            self._is_proven = request.KEY != ApiVersions.KEY
            return decode_answer(request, version, data)
        except ProtocolViolation:
            self.close()
            raise

    def version_of(self, request: Request[Any]) -> int:
        """Return the version of ``request`` that both sides have.

        Raises:
            UsageError: there is none.
        """
        if not self._versions:
            return request.VERSIONS[0]
        low, high = self._versions.get(request.KEY, (0, -1))
        for version in request.VERSIONS:
            if low <= version <= high:
                return version
        wanted = " or ".join(map(str, request.VERSIONS))
        raise UsageError(
            f"the Kafka broker {self.address} does not have request {type(request).__name__} in version {wanted}: "
            "brokers of release 3.6 or newer are supported"
        )

    def fileno(self) -> int:
        """Return the number to wait with for something to receive."""
        return self._socket.fileno()

    @property
    def is_closed(self) -> bool:
        """Whether it cannot be used any more."""
        return self._socket.fileno() < 0

    def interrupt(self) -> None:
        """End the connection from another thread: whatever waits for it fails."""
        shut_down(self._socket)

    def close(self) -> None:
        """Release the socket."""
        self._socket.close()

    def _connect(self, host: str, port: int, context: ssl.SSLContext | None, timeout_ms: int) -> socket.socket:
        try:
            plain: socket.socket = self._environment.connect(host, port, timeout_ms / 1000)
        except OSError as error:
            raise StorageError("reach", f"Kafka at {self.address}", _reason(error)) from error
        try:
            plain.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            stream = plain if context is None else context.wrap_socket(plain, server_hostname=host)
            stream.setblocking(False)
        except ssl.SSLCertVerificationError as error:
            plain.close()
            raise UsageError(
                f"the certificate of the Kafka broker {self.address} is not trusted: {error.verify_message}; give the "
                "authority that signed it as ca_file"
            ) from error
        except OSError as error:
            plain.close()
            reason = f"{_reason(error)}; if there is no TLS, leave tls out"
            raise StorageError("reach", f"Kafka at {self.address} over TLS", reason) from error
        return stream

    def _learn_versions(self, timeout_ms: int) -> ApiVersionsAnswer:
        answer = self.ask(ApiVersions("headgate", __version__), timeout_ms)
        if answer.error_code:
            raise StorageError("use", f"Kafka at {self.address}", ErrorCode(answer.error_code).name, False)
        self._versions = {one.api_key: (one.min_version, one.max_version) for one in answer.api_keys}
        return answer

    def _log_in(self, security: KafkaSecurity, timeout_ms: int) -> None:
        chosen = self.ask(SaslHandshake(security.mechanism), timeout_ms)
        if chosen.error_code:
            there = ", ".join(chosen.mechanisms)
            remedy = (
                f"it has: {there}" if there else "it takes no login there: leave mechanism out, or name another port"
            )
            raise UsageError(f"the Kafka broker {self.address} does not take mechanism {security.mechanism}; {remedy}")
        exchange = security.exchange(self._environment.token(18).hex())
        try:
            message = next(exchange)
            while True:
                answer = self.ask(SaslAuthenticate(message), timeout_ms)
                if answer.error_code:
                    raise LoginError(answer.error_message or ErrorCode(answer.error_code).name)
                message = exchange.send(bytes(answer.auth_bytes))
        except StopIteration:
            return
        except LoginError as error:
            who = f"user '{security.user}'" if security.user else "the client"
            raise UsageError(f"the Kafka broker {self.address} does not log {who} in: {error}") from error

    def _send(self, view: memoryview) -> None:
        deadline_ms = self._environment.monotonic_ms() + SEND_MS
        while view:
            try:
                view = view[self._socket.send(view) :]
                deadline_ms = self._environment.monotonic_ms() + SEND_MS
                continue
            except (BlockingIOError, ssl.SSLWantWriteError):
                self._wait(select.POLLOUT, SEND_MS)
            except ssl.SSLWantReadError:
                self._wait(select.POLLIN, SEND_MS)
            except OSError as error:
                raise self._failed(_reason(error)) from error
            if self._environment.monotonic_ms() >= deadline_ms:
                raise self._failed(f"it has taken no bytes for {SEND_MS} ms")

    def _next_message(self, timeout_ms: int) -> memoryview | None:
        """Return the next message whole, or None; what has come of it is kept."""
        deadline_ms = self._environment.monotonic_ms() + timeout_ms
        while True:
            if self._in_filled == len(self._in):
                data, self._in_filled = self._in, 0
                if not self._is_length:
                    self._in, self._is_length = _space(_LENGTH.size), True
                    return data
                (size,) = _LENGTH.unpack(data)
                if not _LENGTH.size <= size <= self._answer_bytes_max:
                    what = f"an answer of {size} bytes was announced, not of {_LENGTH.size} to {self._answer_bytes_max}"
                    raise self._failed(f"it does not speak Kafka's protocol as expected: {what}", is_transient=False)
                self._in, self._is_length = _space(size), False
            try:
                count = self._socket.recv_into(self._in[self._in_filled :])
            except (BlockingIOError, ssl.SSLWantReadError, ssl.SSLWantWriteError):
                left_ms = deadline_ms - self._environment.monotonic_ms()
                if left_ms <= 0:
                    return None
                self._wait(select.POLLIN, left_ms)
                continue
            except OSError as error:
                raise self._failed(_reason(error)) from error
            if count == 0:
                raise self._failed(self._why_ended())
            self._in_filled += count

    def _why_ended(self) -> str:
        if self._is_proven:
            return "the broker ended the connection"
        return "the broker ended the connection; if it demands TLS or a login there, give security"

    def _wait(self, event: int, timeout_ms: int) -> None:
        poll = select.poll()
        poll.register(self._socket, event)
        poll.poll(timeout_ms)

    def _failed(self, reason: str, is_transient: bool = True) -> StorageError:
        self.close()
        return StorageError("talk to", f"Kafka at {self.address}", reason, is_transient)


def wait_any(connections: Iterable[Connection], timeout_ms: int) -> None:
    """Wait until one of them may have something to receive; call ``receive(0)`` on each before."""
    poll = select.poll()
    for connection in connections:
        poll.register(connection.fileno(), select.POLLIN)
    poll.poll(timeout_ms)


def _joined(parts: Parts) -> Parts:
    """Return the same bytes in few pieces, without copying the large ones."""
    found: Parts = []
    small: Parts = []
    for part in parts:
        if len(part) < LARGE_BYTES:
            small.append(part)
            continue
        found += [b"".join(small), part]
        small = []
    return [*found, b"".join(small)]


def _space(size: int) -> memoryview:
    """Return memory that is not cleared first."""
    return np.empty(size, np.uint8).data


def _reason(error: OSError) -> str:
    if isinstance(error, TimeoutError):
        return "no answer in time"
    return error.strerror or str(error) or type(error).__name__
