"""The controller of Pravega over gRPC: streams, their segments, transactions by id, and how it is reached.

The few messages that are needed are encoded here by field number, as ``Controller.proto`` of Pravega 0.13 numbers them;
what they leave out has its default. Counterpart: ``segment_store`` carries the events.
"""

from __future__ import annotations

import base64
import dataclasses
import ssl
import struct
from collections.abc import Callable, Mapping, Sequence
from dataclasses import field, replace
from enum import IntEnum
from pathlib import Path
from typing import Any, TypeAlias
from uuid import UUID

from headgate.connectors.secret import is_secret_place, read_secret
from headgate.dataclass import dataclass
from headgate.errors import ProtocolViolation, StorageError, UsageError
from headgate.model.config import check_switches


@dataclasses.dataclass(frozen=True, slots=True)
class PravegaSecurity:
    """How to connect to a Pravega that demands TLS or a login.

    Attributes:
        tls: True connects over TLS, to the controller and to segment stores. Certificates and host names are checked.
        ca_file: the authority that signed the certificates, PEM; "" uses those that the system trusts.
        user: the user's name, for a login with a password; "": the secret is a token, for ``Bearer``.
        secret: where every worker finds the password or token: ``"env:NAME"`` or ``"file:/path"``; "": no login. It
            is read again for each call, so that it may be renewed.
    """

    tls: bool = False
    ca_file: str = ""
    user: str = ""
    secret: str = field(default="", repr=False)

    def __post_init__(self) -> None:
        check_switches("PravegaSecurity: ", tls=self.tls)
        if self.secret and not is_secret_place(self.secret):
            raise UsageError(
                "Pravega security needs secret='env:NAME' or secret='file:/path', which says where the password or "
                "token is found; the secret itself must not be part of a program"
            )
        if self.user and not self.secret:
            raise UsageError("Pravega security with user= needs secret=, which says where the password is found")
        if self.ca_file and not self.tls:
            raise UsageError("Pravega security names an authority and does not use TLS; add tls=True")

    def context(self) -> ssl.SSLContext | None:
        """Return what connections to segment stores are wrapped with, or None without TLS.

        Raises:
            UsageError: the authority cannot be used.
        """
        if not self.tls:
            return None
        try:
            return ssl.create_default_context(cafile=self.ca_file or None)
        except OSError as error:
            raise self._unusable(error) from error

    def authority(self) -> bytes | None:
        """Return the certificates that the controller's may be signed by, PEM; None: those of the package grpcio.

        Raises:
            UsageError: the authority cannot be used.
        """
        path = self.ca_file or ssl.get_default_verify_paths().cafile
        try:
            return None if path is None else Path(path).read_bytes()
        except OSError as error:
            raise self._unusable(error) from error

    def login(self) -> tuple[tuple[str, str], ...]:
        """Return what is sent with each call of the controller.

        Raises:
            UsageError: the secret is not there.
        """
        if not self.secret:
            return ()
        secret = read_secret(self.secret, "Pravega")
        if not self.user:
            return (("authorization", f"Bearer {secret}"),)
        return (("authorization", "Basic " + base64.b64encode(f"{self.user}:{secret}".encode()).decode()),)

    def _unusable(self, error: OSError) -> UsageError:
        why = error.strerror or error
        return UsageError(
            f"Pravega security cannot use {self.ca_file}: {why}; give a readable PEM file on every worker"
        )


NO_SECURITY = PravegaSecurity()


CALL_MS = 30_000
"""How long the controller may take for an answer; a transaction or a scaling may wait for others."""

Cut: TypeAlias = Mapping[int, int]
"""Segment → offset, over all keys."""

REFRESH_MS, AUTOMATIC_MS, CHECKPOINTS_MAX = 3_000, 30_000, 3
"""What reader groups of Pravega's own client have by default."""

_SILENT_MS = 600_000
"""A writer that has noted nothing for so long no longer holds event time back, in streams that are created here."""

_NONE, _READ, _READ_AND_WRITE = 1, 3, 5
"""What a token allows, if the user may; calls that shall give none need no more than the right to read."""

_INTERNAL_ERROR = 3

BY_HAND = 1
"""A reader group whose cuts are released by its user."""

_SERVICE = "/io.pravega.controller.stream.api.grpc.v1.ControllerService/"
_Fields: TypeAlias = "dict[int, list[Any]]"


class TransactionState(IntEnum):
    """What the controller knows of a transaction. It forgets those that were decided long ago."""

    UNKNOWN = 0
    OPEN = 1
    COMMITTING = 2
    COMMITTED = 3
    ABORTING = 4
    ABORTED = 5


@dataclass(frozen=True, slots=True)
class SegmentRange:
    """A segment and the part of [0, 1) that its keys have."""

    segment: int
    low: float
    high: float


@dataclass(frozen=True, slots=True)
class OpenedTransaction:
    """A transaction that was just opened, and the segments that its events go to."""

    id: UUID
    ranges: tuple[SegmentRange, ...]


class Release(IntEnum):
    """What the controller answers to a cut that a reader group releases."""

    DONE = 0
    FAILED = 1
    NO_STREAM = 2
    NO_SUBSCRIBER = 3
    GOES_BACK = 4
    OTHER_GENERATION = 5


@dataclass(frozen=True, slots=True)
class ReaderGroup:
    """A reader group as the controller knows it.

    Attributes:
        generation: of its configuration.
        releases_by_hand: streams wait for the cuts that are released in its name.
    """

    scope: str
    name: str
    id: UUID
    generation: int
    releases_by_hand: bool


@dataclass(frozen=True, slots=True)
class StreamName:
    """A stream of a scope."""

    scope: str
    stream: str

    @staticmethod
    def parse(text: str) -> StreamName:
        """Return the parts of ``scope/stream``.

        Raises:
            UsageError
        """
        scope, _, stream = text.partition("/")
        if not scope or not stream or "/" in stream:
            raise UsageError(f"a stream of Pravega is named 'scope/stream', not {text!r}")
        return StreamName(scope, stream)

    def __str__(self) -> str:
        return f"{self.scope}/{self.stream}"

    def segment(self, segment: int) -> str:
        """Return the name that the segment store knows a segment by: its high half is the epoch of its creation."""
        return f"{self}/{segment & 0xFFFFFFFF}.#epoch.{segment >> 32}"

    def transaction_segment(self, segment: int, transaction: UUID) -> str:
        """Return the name of the part of a transaction that will go to ``segment``."""
        return f"{self.segment(segment)}#transaction.{transaction.hex}"


def require_grpc() -> None:
    """Refuse to go on without the package grpcio.

    Raises:
        UsageError
    """
    try:
        import grpc  # noqa: F401
    except ImportError as error:
        raise UsageError("Pravega needs the package grpcio: pip install 'headgate-streams[pravega]'") from error


class Controller:
    """A client of the controller. Calls block; each may be repeated.

    Raises:
        StorageError: of every call: the controller does not answer.
    """

    def __init__(self, address: str, security: PravegaSecurity = NO_SECURITY) -> None:
        """Connect with the first call. ``address``: ``host:port``.

        Raises:
            UsageError: the package grpcio is not installed, or a certificate cannot be used.
        """
        require_grpc()
        import grpc

        self.address, self.security, self._grpc = address, security, grpc
        options = [("grpc.max_receive_message_length", 64 << 20), ("grpc.use_local_subchannel_pool", 1)]
        if security.tls:
            trusted = grpc.ssl_channel_credentials(security.authority())
            self._channel = grpc.secure_channel(address, trusted, options)
        else:
            self._channel = grpc.insecure_channel(address, options)

    def close(self) -> None:
        """Close the connection."""
        self._channel.close()

    # -- streams

    def exists(self, stream: StreamName) -> bool:
        """Whether there is such a stream."""
        return bool(_number(self.call("checkStreamExists", _stream(stream)), 1))

    def create_scope(self, scope: str) -> None:
        """Create a scope, unless it is there."""
        status = _number(self.call("createScope", message((1, scope))), 1)
        if status not in (0, 2):
            raise UsageError(f"Pravega at {self.address} does not create scope '{scope}' (answer {status})")

    def create_stream(self, stream: StreamName, segments: int) -> None:
        """Create a stream with a fixed number of segments, unless it is there.

        Raises:
            UsageError: its scope is missing, or its name is none.
        """
        policy = message((1, 0), (4, segments))
        config = message((1, _stream(stream)), (2, policy), (5, _SILENT_MS))
        status = _number(self.call("createStream", config), 1)
        if status == 3:
            raise UsageError(f"Pravega at {self.address} has no scope '{stream.scope}'; create it first")
        if status not in (0, 2):
            raise UsageError(f"Pravega at {self.address} does not create stream '{stream}' (answer {status})")

    def streams(self, scope: str) -> list[str]:
        """Return the names of the streams of a scope, without those that Pravega keeps for itself.

        Raises:
            UsageError: there is no such scope.
        """
        found: list[str] = []
        token = ""
        while True:
            answer = self.call("listStreamsInScope", message((1, message((1, scope))), (2, message((1, token)))))
            if _number(answer, 3):
                raise UsageError(f"Pravega at {self.address} has no scope '{scope}'")
            page = [_text(parse(one), 2) for one in answer.get(1, [])]
            found += [name for name in page if not name.startswith("_")]
            token = _text(parse(answer[2][0]), 1) if 2 in answer else ""
            if not page:
                return sorted(found)

    def head(self, stream: StreamName) -> dict[int, int]:
        """Return the segments in which a stream begins now, and at which offset each."""
        answer = self.call("getSegments", message((1, _stream(stream)), (2, 0)))
        locations = map(parse, answer.get(1, []))
        return {_segment(one[1][0]): _number(one, 2) for one in locations}

    def current(self, stream: StreamName) -> list[SegmentRange]:
        """Return the segments that are written now; none: the stream is sealed."""
        return _ranges(self.call("getCurrentSegments", _stream(stream)).get(1, []))

    def successors(self, stream: StreamName, segment: int) -> dict[int, list[int]]:
        """Return the segments that follow a sealed one, each with all that it follows."""
        request = message((1, _stream(stream)), (2, segment))
        entries = map(parse, self.call("getSegmentsImmediatelyFollowing", request).get(1, []))
        return {_segment(parse(entry[1][0])[1][0]): _numbers(entry, 2) for entry in entries}

    def is_valid(self, stream: StreamName, cut: Cut) -> bool:
        """Whether ``cut`` is a cut of the stream: over all keys, and each key once."""
        return bool(_number(self.call("isStreamCutValid", _cut(stream, cut)), 1))

    def truncate(self, stream: StreamName, cut: Cut) -> None:
        """Remove what is in front of ``cut``."""
        status = _number(self.call("truncateStream", _cut(stream, cut)), 1)
        if status:
            raise StorageError("truncate", f"stream '{stream}'", f"Pravega answers {status}", is_transient=status == 1)

    def place(self, stream: StreamName, segment: int) -> tuple[str, int]:
        """Return host and port of the segment store that has a segment."""
        answer = self.call("getURI", message((1, _stream(stream)), (2, segment)))
        return _text(answer, 1), _number(answer, 2)

    def token(self, stream: StreamName, only_reads: bool) -> str:
        """Return a token for the segment stores of a stream, which lasts for some minutes."""
        request = message((1, stream.scope), (2, stream.stream), (3, _READ if only_reads else _READ_AND_WRITE))
        return _text(self.call("getDelegationToken", request), 1)

    # -- event time

    def note_time(self, stream: StreamName, writer: str, cut: Cut, time_ms: int) -> None:
        """Note that ``writer`` writes nothing earlier than ``time_ms`` beyond ``cut``. It never goes back."""
        request = message((1, writer), (2, _cut(stream, cut)), (3, time_ms))
        if _number(self.call("noteTimestampFromWriter", request), 1) == _INTERNAL_ERROR:
            raise StorageError("note event time in", f"stream '{stream}'", "Pravega answers with an internal error")

    def forget_time(self, stream: StreamName, writer: str) -> None:
        """Let ``writer`` no longer hold event time back; what it noted counts."""
        if _number(self.call("removeWriter", message((1, writer), (2, _stream(stream)))), 1) == _INTERNAL_ERROR:
            raise StorageError("note event time in", f"stream '{stream}'", "Pravega answers with an internal error")

    # -- reader groups

    def group(self, scope: str, name: str) -> ReaderGroup | None:
        """Return a reader group, if it is there."""
        answer = self.call("getReaderGroupConfig", message((1, scope), (2, name)))
        if _number(answer, 2) == 2:
            return None
        self._require_success("look at", f"reader group '{name}'", _number(answer, 2))
        return _group(answer[1][0])

    def create_group(self, stream: StreamName, name: str, id: UUID) -> ReaderGroup:
        """Create a reader group that a stream waits for; return what is there of that name then.

        Raises:
            UsageError: Pravega takes no such name.
        """
        answer = self.call("createReaderGroup", _config(stream, ReaderGroup(stream.scope, name, id, 0, True)))
        if _number(answer, 1) == 3:
            raise UsageError(f"Pravega at {self.address} takes no reader group named '{name}'; give another group=")
        self._require_success("create", f"reader group '{name}'", _number(answer, 1))
        return _group(answer[2][0])

    def update_group(self, stream: StreamName, group: ReaderGroup, *, waits: bool) -> ReaderGroup:
        """Have the stream wait for a group, or not any more, which forgets what the group has released."""
        answer = self.call("updateReaderGroup", _config(stream, replace(group, releases_by_hand=waits)))
        self._require_success("change", f"reader group '{group.name}'", _number(answer, 1))
        return replace(group, generation=_number(answer, 2), releases_by_hand=waits)

    def is_subscribed(self, stream: StreamName, group: ReaderGroup) -> bool:
        """Whether a stream waits for a reader group."""
        answer = self.call("listSubscribers", _stream(stream))
        self._require_success("look at", f"stream '{stream}'", _number(answer, 2))
        return f"{group.scope}/{group.name}".encode() in answer.get(1, [])

    def release(self, stream: StreamName, group: ReaderGroup, cut: Cut) -> Release:
        """Let a stream be truncated up to ``cut``, as far as the group is concerned. It never goes back."""
        subscriber = f"{group.scope}/{group.name}"
        request = message((1, subscriber), (2, group.generation), (3, str(group.id)), (4, _cut(stream, cut)))
        return Release(_number(self.call("updateSubscriberStreamCut", request), 1))

    def _require_success(self, operation: str, what: str, status: int) -> None:
        if status:
            raise StorageError(
                operation, f"{what} of Pravega at {self.address}", f"it answers {status}", is_transient=True
            )

    # -- transactions

    def open_transaction(self, stream: StreamName, lease_ms: int) -> OpenedTransaction:
        """Open a transaction that is aborted ``lease_ms`` after the last ``ping``."""
        answer = self.call("createTransaction", message((1, _stream(stream)), (2, lease_ms)))
        id_fields = parse(answer[1][0])
        parts = [_number(id_fields, at) & 0xFFFFFFFFFFFFFFFF for at in (1, 2)]
        return OpenedTransaction(UUID(int=parts[0] << 64 | parts[1]), tuple(_ranges(answer.get(2, []))))

    def ping(self, stream: StreamName, transaction: UUID, lease_ms: int) -> bool:
        """Keep a transaction open for ``lease_ms`` more. Return False if it is decided, or cannot be kept any more."""
        request = message((1, _stream(stream)), (2, _transaction(transaction)), (3, lease_ms))
        return _number(self.call("pingTransaction", request), 1) == 0

    def commit(self, stream: StreamName, transaction: UUID) -> None:
        """Ask for the commit of a transaction. Ask ``state`` for what becomes of it."""
        self.call("commitTransaction", message((1, _stream(stream)), (2, _transaction(transaction))), may_fail=True)

    def abort(self, stream: StreamName, transaction: UUID) -> None:
        """Ask for a transaction to be aborted."""
        self.call("abortTransaction", message((1, _stream(stream)), (2, _transaction(transaction))), may_fail=True)

    def state(self, stream: StreamName, transaction: UUID) -> TransactionState:
        """Return what is known of a transaction."""
        request = message((1, _stream(stream)), (2, _transaction(transaction)))
        return TransactionState(_number(self.call("checkTransactionState", request), 1))

    def call(self, method: str, request: bytes, *, may_fail: bool = False) -> _Fields:
        """Call a method. ``may_fail``: an answer that says that the call makes no sense (now) is no failure."""
        rpc: Callable[..., bytes] = self._channel.unary_unary(_SERVICE + method)
        code = self._grpc.StatusCode
        try:
            return parse(rpc(request, timeout=CALL_MS / 1000, metadata=self.security.login()))
        except self._grpc.RpcError as error:
            status, detail = error.code(), error.details()
            if may_fail and status in (code.FAILED_PRECONDITION, code.NOT_FOUND):
                return {}
            problem = f"{status.name.lower().replace('_', ' ')}: {detail}"
            if status is code.NOT_FOUND:
                raise UsageError(f"Pravega at {self.address} found no such stream ({method}): {detail}") from error
            if status in (code.UNIMPLEMENTED, code.UNAUTHENTICATED, code.PERMISSION_DENIED, code.INVALID_ARGUMENT):
                raise UsageError(f"Pravega at {self.address} refuses {method}: {problem}") from error
            raise StorageError(method, f"Pravega at {self.address}", problem, is_transient=True) from error


def _stream(stream: StreamName) -> bytes:
    return message((1, stream.scope), (2, stream.stream), (3, _NONE))


def _transaction(id: UUID) -> bytes:
    high, low = struct.unpack(">qq", id.bytes)
    return message((1, high), (2, low))


def _cut(stream: StreamName, cut: Cut) -> bytes:
    return message((1, _stream(stream)), *((2, message((1, segment), (2, at))) for segment, at in cut.items()))


def _config(stream: StreamName, group: ReaderGroup) -> bytes:
    return message(
        (1, group.scope), (2, group.name), (3, REFRESH_MS), (4, AUTOMATIC_MS), (5, CHECKPOINTS_MAX),
        (6, BY_HAND if group.releases_by_hand else 0), (7, group.generation), (8, str(group.id)),
        (9, _cut(stream, {})),
    )  # fmt: skip


def _group(config: bytes) -> ReaderGroup:
    fields = parse(config)
    by_hand = _number(fields, 6) == BY_HAND
    return ReaderGroup(_text(fields, 1), _text(fields, 2), UUID(_text(fields, 8)), _number(fields, 7), by_hand)


def _segment(segment_id: bytes) -> int:
    return _number(parse(segment_id), 2)


def _ranges(found: Sequence[bytes]) -> list[SegmentRange]:
    parsed = map(parse, found)
    return [
        SegmentRange(_segment(one[1][0]), float(one.get(2, [0.0])[0]), float(one.get(3, [0.0])[0])) for one in parsed
    ]


# -- Protocol Buffers: fields by number, in the four forms that the messages have


def message(*fields: tuple[int, int | float | str | bytes]) -> bytes:
    """Return a message: numbers of fields and their values, in this order."""
    out = bytearray()
    for number, value in fields:
        if isinstance(value, float):
            out += _varint(number << 3 | 1) + struct.pack("<d", value)
        elif isinstance(value, int):
            out += _varint(number << 3) + _varint(value & 0xFFFFFFFFFFFFFFFF)
        else:
            data = value.encode() if isinstance(value, str) else value
            out += _varint(number << 3 | 2) + _varint(len(data)) + data
    return bytes(out)


def _varint(value: int) -> bytes:
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)


def parse(data: bytes) -> _Fields:
    """Return the values of each field.

    Raises:
        ProtocolViolation
    """
    found: _Fields = {}
    at = 0
    try:
        while at < len(data):
            tag, at = _read_varint(data, at)
            match tag & 7:
                case 0:
                    value, at = _read_varint(data, at)
                    found.setdefault(tag >> 3, []).append(value - (1 << 64) if value >> 63 else value)
                case 1:
                    found.setdefault(tag >> 3, []).append(struct.unpack_from("<d", data, at)[0])
                    at += 8
                case 2:
                    size, at = _read_varint(data, at)
                    found.setdefault(tag >> 3, []).append(data[at : at + size])
                    at += size
                    if at > len(data):
                        raise IndexError
                case 5:
                    at += 4
                case other:
                    raise ProtocolViolation("controller of Pravega", f"a field of wire type {other}")
    except (IndexError, struct.error) as error:
        raise ProtocolViolation("controller of Pravega", "a message that is cut off") from error
    return found


def _read_varint(data: bytes, at: int) -> tuple[int, int]:
    value, shift = 0, 0
    while True:
        byte = data[at]
        at += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, at
        shift += 7


def _number(fields: _Fields, number: int) -> int:
    return int(fields[number][0]) if number in fields else 0


def _numbers(fields: _Fields, number: int) -> list[int]:
    """Return the numbers of a repeated field, which are packed."""
    found: list[int] = []
    for one in fields.get(number, []):
        if isinstance(one, int):
            found.append(one)
            continue
        at = 0
        while at < len(one):
            value, at = _read_varint(one, at)
            found.append(value)
    return found


def _text(fields: _Fields, number: int) -> str:
    return fields[number][0].decode() if number in fields else ""
