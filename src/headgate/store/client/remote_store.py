"""A store on a store server: its catalogue, its chunks, its change feed, its check, and how it is opened.

Counterparts: ``catalogue.base`` says what each verb means, ``server.handlers`` carries them out; ``location`` is
given the URL. Source: SS9 of docs/spec/served-store.md.
"""

from __future__ import annotations

import http.client
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import msgspec

from headgate.dataclass import dataclass
from headgate.environment import SYSTEM_ENVIRONMENT, Clock, Environment
from headgate.errors import HeadgateError, StorageError, UsageError
from headgate.model.pipeline_identity import Mine
from headgate.storage.base import Bytes, RequestStorage, Storage, checked_path
from headgate.store.addresses import parse_server_url
from headgate.store.catalogue.base import Audit, Catalogue, Verb
from headgate.store.client import connection as clients
from headgate.store.client.connection import (
    Client,
    ConnectionLostError,
    RefusedError,
    Request,
    ServerConnection,
    UnreachableError,
    request_of,
)
from headgate.store.client.messages import (
    CATALOGUE_SIGNATURES,
    OF_THE_CATALOGUE,
    OF_THE_STORAGE,
    REPEATED_STORAGE_VERBS,
    STORAGE_SIGNATURES,
    Judged,
    Signature,
    UnjudgedError,
    decode,
)
from headgate.store.core import ChangeListener, ServerClock
from headgate.store.fsck import Problem

CHECK = "/check"


class CheckRequest(msgspec.Struct, frozen=True):
    """Who waits for which check; one with an unknown number is begun."""

    number: int
    verify_events: bool


class CheckResult(msgspec.Struct, frozen=True):
    """What a check has found, if it is over."""

    number: int
    is_over: bool
    problems: tuple[Problem, ...] = ()


def check_on_server(client: Client, verify_events: bool) -> list[Problem]:
    """Have the server check its store, and wait for what it finds."""
    number = 0
    while True:
        found = decode(client.ask(request_of(CHECK, CheckRequest(number, verify_events))), CheckResult)
        if found.is_over:
            return list(found.problems)
        number = found.number


NEWS = "/news"
THREAD = "headgate-store-hearing"

_CHANGES_OF_A_PROCESS = 1 << 32


class SeenChanges(msgspec.Struct, frozen=True):
    """The last change that a client has heard of: a number of one process of the server."""

    instance: str = ""
    number: int = -1


class ServerChangeListener(ChangeListener):
    """Asks for news; usable after a fork."""

    def __init__(self, client: Client) -> None:
        self._client = client
        self._begin_in_this_process(0)

    def _begin_in_this_process(self, first: int) -> None:
        super().__init__(THREAD, first, self._client.around)
        self._pid = self._client.around.process_id
        self._connection: ServerConnection | None = None

    def changes(self) -> int:
        self._notice_fork()
        return super().changes()

    def changed_here(self) -> None:
        """Wake the readers of this process, which may have changed something, before the server does."""
        self._notice_fork()
        self.changed()

    def close(self) -> None:
        self._notice_fork()
        super().close()

    def _listen(self) -> bool:
        try:
            connection = self._client.connect()
        except (UnreachableError, RefusedError, HeadgateError):
            return False
        self._hear(connection)
        return True

    def _hear(self, connection: ServerConnection) -> None:
        with self._lock:
            # `close` may have looked for a connection to interrupt before this one was noted
            if self._closing.is_set():
                connection.close()
                return
            self._connection = connection
        seen = SeenChanges()
        try:
            while not self._closing.is_set():
                answer = connection.ask(request_of(NEWS, seen))
                if answer.status != http.client.OK:
                    return
                found = decode(answer.data, SeenChanges)
                if found != seen:
                    self._set_hearing(True)
                seen = found
        except (ConnectionLostError, HeadgateError):
            return
        finally:
            with self._lock:
                self._connection = None
            connection.close()

    def _interrupt(self) -> None:
        with self._lock:
            connection = self._connection
        if connection is not None:
            connection.interrupt()

    def _notice_fork(self) -> None:
        """Listen again in a child: before any lock, the parent may hold one."""
        if self._client.around.process_id != self._pid:
            self._begin_in_this_process(self._number + _CHANGES_OF_A_PROCESS)


DATE, UNTOUCHED = "/date", "/untouched"


class RemoteCatalogue(Catalogue):
    """A catalogue on a store server."""

    def __init__(self, client: Client) -> None:
        self._client = client
        self._change_listener = ServerChangeListener(client)

    @property
    def path(self) -> str:
        return self._client.url

    @property
    def is_untouched(self) -> bool:
        return decode(self._client.ask(request_of(UNTOUCHED)), bool)

    def close(self) -> None:
        self._change_listener.close()
        self._client.close()

    def changes(self) -> int:
        return self._change_listener.changes()

    def date_ms(self) -> int:
        """Return the server's date, in milliseconds since 1970.

        Raises:
            StorageError: it cannot be reached.
        """
        return decode(self._client.ask(request_of(DATE)), int)

    def audit(self) -> AbstractContextManager[Audit]:
        """Refused: only the server itself has this view.

        Raises:
            UsageError
        """
        raise UsageError(f"the store at {self.path} is checked by its server: headgate streams check, or Store.fsck")

    def check(self, *, verify_events: bool) -> list[Problem]:
        """Have the server check its store, and wait for what it finds."""
        return check_on_server(self._client, verify_events)

    def carry_out(self, verb: Verb, arguments: tuple[Any, ...], named: Mapping[str, Any]) -> Any:
        """See ``Catalogue``. Of owners that only the caller can judge, the server asks, one by one."""
        signature = CATALOGUE_SIGNATURES[verb.name]
        given = signature.bound(arguments, named)
        if not signature.judge:
            return self._ask(verb, signature, given)
        is_mine: Mine = given[signature.judge]
        judged: Judged = []
        while True:
            try:
                return self._ask(verb, signature, {**given, signature.judge: judged})
            except UnjudgedError as unjudged:
                judged = [*judged, (unjudged.owner, is_mine(unjudged.owner))]

    def _ask(self, verb: Verb, signature: Signature, given: Mapping[str, Any]) -> Any:
        request = request_of(f"/verb/{OF_THE_CATALOGUE}/{verb.name}", given)
        try:
            data = self._client.ask(request, is_once=not verb.is_reading, may_repeat=verb.is_repeatable)
            return decode(data, signature.gives)
        finally:
            if not verb.is_reading:
                # also after an error: with a lost answer it may have taken effect
                self._change_listener.changed_here()


CHUNK = "/chunk/"
OFFSET_HEADER, SIZE_HEADER, ABSENT_HEADER = "Headgate-Offset", "Headgate-Size", "Headgate-If-Absent"

CHUNK_BYTES_MAX = 1 << 30
"""The largest request body: a writer flushes at 32 MiB, so it is one huge append."""


class RemoteStorage(RequestStorage):
    """The chunks of a store on a store server. See ``Storage``."""

    def __init__(self, client: Client) -> None:
        self._client = client

    @property
    def url(self) -> str:
        return f"{self._client.url}/chunks"

    def draw_name(self, size_bytes: int) -> str:
        return self._client.around.token(size_bytes).hex()

    def put(self, path: str, parts: Sequence[Bytes]) -> None:
        """See ``Storage``. The same bytes again are the same: an answer that is lost is asked for again."""
        self._client.ask(self._put(path, parts, {}))

    def put_if_absent(self, path: str, parts: Sequence[Bytes]) -> None:
        self._client.ask(self._put(path, parts, {ABSENT_HEADER: "1"}), is_once=True)

    def get(self, path: str) -> bytes:
        return self._client.ask(Request("GET", CHUNK + checked_path(path)))

    def get_range(self, path: str, offset: int, size_bytes: int) -> bytes:
        headers = {OFFSET_HEADER: str(offset), SIZE_HEADER: str(size_bytes)}
        return self._client.ask(Request("GET", CHUNK + checked_path(path), headers=headers))

    def list(self, prefix: str) -> list[str]:
        found: list[str] = self._carry_out("list", prefix)
        return found

    def delete(self, path: str) -> None:
        self._carry_out("delete", path)

    def rename_if_absent(self, source: str, target: str) -> None:
        self._carry_out("rename_if_absent", source, target)

    def sweep_unfinished(self, prefix: str = "") -> int:
        return int(self._carry_out("sweep_unfinished", prefix))

    def _put(self, path: str, parts: Sequence[Bytes], headers: dict[str, str]) -> Request:
        size_bytes = sum(memoryview(part).nbytes for part in parts)
        if size_bytes > CHUNK_BYTES_MAX:
            said = f"{size_bytes:,} bytes at once, and a server takes {CHUNK_BYTES_MAX:,}; append smaller batches"
            raise StorageError("put", f"{self.url}/{path}", said, is_transient=False)
        return Request("PUT", CHUNK + checked_path(path), parts, headers)

    def _carry_out(self, name: str, *arguments: Any) -> Any:
        signature = STORAGE_SIGNATURES[name]
        question = request_of(f"/verb/{OF_THE_STORAGE}/{name}", signature.bound(arguments, {}))
        return decode(self._client.ask(question, is_once=name not in REPEATED_STORAGE_VERBS), signature.gives)


@dataclass(frozen=True, slots=True)
class RemoteStore:
    """The parts of a store on a store server."""

    catalogue: Catalogue
    storage: Storage
    clock: Clock

    def close(self) -> None:
        """Let go of the connections."""
        self.catalogue.close()


def open_remote_store(url: str, around: Environment = SYSTEM_ENVIRONMENT) -> RemoteStore:
    """Return the store on the server at ``url``.

    Raises:
        UsageError: the server does not let us in, or is none.
        StorageError: it cannot be reached.
    """
    client = Client(parse_server_url(url), around)
    try:
        client.facts()
    except StorageError as error:
        if error.is_transient:
            raise
        raise UsageError(f"stream store at {url} cannot be opened: {error.cause}") from error
    client.patience_s = clients.PATIENCE_S
    catalogue = RemoteCatalogue(client)
    return RemoteStore(catalogue, RemoteStorage(client), ServerClock(catalogue.date_ms, around))
