"""Objects as files of HDFS, through hdfs-native: no JVM in this process.

Counterpart: ``storage.Storage``. Source: docs/spec/storage.md.
Never shows a file that is not complete and durable: data goes to a hidden temporary file, is synced, closed, and gets
its name by a rename. Never takes an error of a rename for its outcome: the client may have asked twice.
"""

from __future__ import annotations

import contextlib
import os
import queue
import re
import secrets
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any, TypeVar

from hdfs_native import Client, WriteOptions

from headgate import fault_points
from headgate.errors import StorageError, UsageError
from headgate.storage.base import (
    TEMP_PREFIX,
    AlreadyExists,
    Bytes,
    NotFound,
    Replaced,
    RequestStorage,
    StoredFile,
    checked_path,
    checked_prefix,
)

RPC_S = 60.0
"""So long may the NameNode take for an answer; the client itself would wait for ever."""

DATA_S = 180.0
"""So long may a read, or a write of ``PART_BYTES``, take, with what the client does about DataNodes that are gone."""

PART_BYTES = 4 << 20

UNFINISHED_MS = 3_600_000
"""A temporary file older than this has no writer any more. If it has, its write fails, and is repeated."""

TRIES_MAX = 5
"""A concurrent delete may remove the directory just made while it is empty; more than a few times is a bug."""

SETTINGS = {
    "dfs.client.failover.max.attempts": "5",
    "dfs.client.failover.sleep.base.millis": "500",
    "dfs.client.failover.sleep.max.millis": "2000",
}
"""A NameNode that refuses connections is asked again for some seconds; by default it would be for minutes."""

_URL = re.compile(r"(hdfs|viewfs)://([^/]*)(.*)", re.IGNORECASE | re.DOTALL)
_REMOTE = re.compile(r'(?:Fatal)?RPCError\("([^"]*)", "(.*)', re.DOTALL)
_KERBEROS = re.compile(r'GSSAPIError\(GssMajorCodes \{.*?\}, \d+, "(.*)"\)', re.DOTALL)
_CLIENTS = re.compile(r'\w+\("(.*)', re.DOTALL)
_PERMANENT = (
    "AccessControlException",
    "AuthorizationException",
    "InvalidPathException",
    "InvalidToken",
    "ParentNotDirectoryException",
    "UnresolvedPathException",
    "InvalidArgument",
    "InvalidPath",
    "NoGssapi",
    "NoSASLMechanism",
    "SASLError",
    "UnsupportedErasureCodingPolicy",
    "UnsupportedFeature",
)

_T = TypeVar("_T")
_used_by: set[int] = set()
"""The process that has a client, and those that were forked from it."""


class HdfsStorage(RequestStorage):
    """The files below one directory of HDFS. It may be missing: the first put makes it."""

    def __init__(self, url: str) -> None:
        """Look at ``url`` and at Hadoop's configuration; nothing is asked of a server yet.

        Raises:
            UsageError: the URL, or Hadoop's configuration for it, is not usable.
        """
        found = _URL.fullmatch(url)
        assert found is not None, url
        self.url = url
        """As it was given."""
        scheme, self._authority, path = found.groups()
        self._server = f"{scheme.lower()}://{self._authority}"
        self._root = "/" + path.strip("/")
        if "@" in self._authority:
            raise UsageError(
                f"storage URL {url} names a user, which HDFS does not take from there; set HADOOP_USER_NAME, or log in "
                "with Kerberos (kinit)"
            )
        if ":" in path or any(part in ("", ".", "..") for part in self._root.split("/")[1:] if self._root != "/"):
            raise UsageError(
                f"storage URL {url} is not usable: HDFS has no paths with ':', '//', '.' or '..'; write "
                "hdfs://namenode:port/path"
            )
        self._client = self._opened()

    def draw_name(self, size_bytes: int) -> str:
        return secrets.token_hex(size_bytes)

    def put(self, path: str, parts: Iterable[Bytes]) -> None:
        """Write an object durably, replacing what was there. After an error either content may be there."""
        with self._errors("put", path), self._written(self._at(path), parts) as temp:
            fault_points.reach("in-put")
            self._move(temp, path, overwrite=True)

    def put_if_absent(self, path: str, parts: Iterable[Bytes]) -> None:
        """Write an object durably unless one exists. After a StorageError it may be there.

        Raises:
            AlreadyExists
        """
        with self._errors("put", path):
            # saves writing the data; the rename decides
            if self._status(self._at(path)) is not None:
                raise AlreadyExists(path)
            with self._written(self._at(path), parts) as temp:
                fault_points.reach("in-put-if-absent")
                self._move(temp, path, overwrite=False)

    def get(self, path: str) -> bytes:
        """Return a whole object.

        Raises:
            NotFound
        """
        with self._errors("get", path):
            reader = self._ask(RPC_S, lambda client: client.read(self._at(path)))
            return self._read(path, reader, 0, len(reader))

    def get_range(self, path: str, offset: int, size_bytes: int) -> bytes:
        """Return part of an object (shorter at its end).

        Raises:
            NotFound
        """
        with self._errors("get", path):
            reader = self._ask(RPC_S, lambda client: client.read(self._at(path)))
            return self._read(path, reader, offset, min(size_bytes, len(reader) - offset))

    def _read(self, path: str, reader: Any, offset: int, size_bytes: int) -> bytes:
        pieces: list[bytes] = []
        end = offset + size_bytes
        while offset < end:
            size = min(PART_BYTES, end - offset)
            pieces.append(self._within(DATA_S, partial(reader.read_range, offset, size)))
            if len(pieces[-1]) != size:  # its last block is not yet known to be whole
                raise StorageError("get", self._place(path), f"{len(pieces[-1])} bytes came instead of {size}")
            offset += size
        return pieces[0] if len(pieces) == 1 else b"".join(pieces)

    def list(self, prefix: str) -> list[str]:
        """Return the paths below the directory ``prefix``, recursively, sorted."""
        with self._errors("list", prefix):
            paths = self._files(prefix)
        return sorted(path for path in paths if not path.rpartition("/")[2].startswith(TEMP_PREFIX))

    def _files(self, prefix: str) -> dict[str, int]:
        """Return all files below a directory, with temporary ones, and when each was last written."""
        base = checked_prefix(prefix)
        found = self._walk(self._at(base) if base else self._root)
        return {self._relative(status): status.modification_time for status in found}

    def _walk(self, top: str) -> Iterator[Any]:
        """Yield the status of each file below a directory."""
        directories = [top]
        while directories:
            directory = directories.pop()
            with contextlib.suppress(FileNotFoundError):  # or removed meanwhile
                for status in self._ask(RPC_S, partial(_listed, place=directory)):
                    if status.isdir:
                        directories.append(status.path)
                    elif status.path != directory:
                        yield status

    def _relative(self, status: Any) -> str:
        top = "" if self._root == "/" else self._root
        return str(status.path.removeprefix(f"{top}/"))

    def delete(self, path: str) -> None:
        """Remove an object and the directories that became empty; missing is fine."""
        place = self._at(path)
        with self._errors("delete", path):
            while place != self._root:
                try:
                    if not self._ask(RPC_S, partial(_deleted, place=place)):
                        return
                except RuntimeError as error:
                    if _told(error)[0] == "PathIsNotEmptyDirectoryException":
                        return
                    raise
                place = place.rpartition("/")[0] or "/"

    def rename_if_absent(self, source: str, target: str) -> None:
        """Move an object.

        Raises:
            NotFound: no ``source``.
            AlreadyExists: ``target`` is taken (``source`` is left).
        """
        with self._errors("rename", source):
            self._move(self._at(source), target, overwrite=False)

    def sweep_unfinished(self, prefix: str = "") -> int:
        """Remove temporary files below ``prefix`` that are too old to have a writer; return how many."""
        count = 0
        with self._errors("sweep", prefix):
            temps = {
                path: written
                for path, written in self._files(prefix).items()
                if path.rpartition("/")[2].startswith(TEMP_PREFIX)
            }
            now = self._now_ms() if temps else 0
            for path, written in temps.items():
                if now - written > UNFINISHED_MS:
                    count += self._ask(RPC_S, partial(_deleted, place=self._below(path)))
        return count

    def _now_ms(self) -> int:
        """Return the time of the NameNode, which is the one that files have."""
        with self._written(self._below("now"), []) as temp:
            status = self._status(temp)
            return 0 if status is None else int(status.modification_time)

    @contextlib.contextmanager
    def _written(self, place: str, parts: Iterable[Bytes]) -> Iterator[str]:
        """Yield a durable temporary file beside ``place``; it is gone afterwards, whatever happens."""
        temp = f"{place.rpartition('/')[0]}/{TEMP_PREFIX}{secrets.token_hex(8)}"
        try:
            options = WriteOptions(overwrite=True)  # the name is ours alone: a second request replaces the first
            file = self._ask(RPC_S, lambda client: client.create(temp, options))
            is_empty = True
            for part in parts:
                view = memoryview(part).cast("B")
                for at in range(0, len(view), PART_BYTES):
                    is_empty = False
                    self._within(DATA_S, partial(file.write, view[at : at + PART_BYTES]))
            if not is_empty:
                self._within(DATA_S, file.hsync)
            self._within(DATA_S, file.close)
            yield temp
        finally:
            with contextlib.suppress(Exception):  # then it is swept
                self._ask(RPC_S, partial(_deleted, place=temp))

    def _move(self, source: str, path: str, *, overwrite: bool) -> None:
        """Rename a file; where that fails, find out whether it has its new name all the same.

        A request is sent again when its answer was lost, so "exists" or "not found" may be about our own success.
        """
        target = self._at(path)
        before = self._status(source)
        if before is None or before.isdir:
            raise FileNotFoundError(source)
        for _ in range(TRIES_MAX):
            try:
                self._ask(RPC_S, lambda client: client.rename(source, target, overwrite=overwrite))
                return
            except Exception as error:
                is_gone = self._status(source) is None  # before the target: the request may still be under way
                there = self._status(target)
                if there is not None and not is_gone:
                    is_gone = self._status(source) is None
                if is_gone:  # nothing but the rename takes it away
                    if there is not None and _identity(there) == _identity(before):
                        return
                    if there is not None and not overwrite:
                        raise AlreadyExists(path) from None
                    raise StorageError(
                        "rename", self._place(path), "neither the file nor its new name is there"
                    ) from error
                if there is not None and not overwrite:
                    raise AlreadyExists(path) from None
                if not isinstance(error, FileNotFoundError):
                    raise
            self._ask(
                RPC_S,
                lambda client: client.mkdirs(target.rpartition("/")[0] or "/", permission=0o755, create_parent=True),
            )
        raise StorageError("rename", self._place(path), "its directory is removed again and again")

    # -- files of others ------------------------------------------------------------------------------------------

    def files(self, directory: str) -> Sequence[StoredFile]:
        """See ``ReadableStorage``. A file that shows no bytes is empty, or still being written: it is left out."""
        with self._errors("list", directory):
            found = self._walk(self._below(directory) if directory else self._root)
            return [self._stored(status) for status in found if status.length]

    def file(self, path: str) -> StoredFile | None:
        with self._errors("look at", path):
            status = self._status(self._below(path))
        return None if status is None or status.isdir else self._stored(status)

    def get_part(self, file: StoredFile, offset: int, size_bytes: int) -> bytes:
        """See ``ReadableStorage``: what the NameNode says of the file afterwards was so while it was read."""
        place = self._below(file.path)
        with self._errors("get", file.path):
            reader = self._ask(RPC_S, lambda client: client.read(place))
            end = min(offset + size_bytes, file.size_bytes)
            data = self._read(file.path, reader, offset, end - offset) if len(reader) >= end > offset else b""
            status = self._status(place)
        if status is None:
            raise NotFound(file.path)
        if self._stored(status) != file:
            raise Replaced(file.path)
        return data

    def _stored(self, status: Any) -> StoredFile:
        return StoredFile(self._relative(status), int(status.length), int(status.modification_time))

    def _status(self, place: str) -> Any:
        try:
            return self._ask(RPC_S, lambda client: client.get_file_info(place))
        except FileNotFoundError:
            return None

    def _at(self, path: str) -> str:
        if ":" in checked_path(path):
            raise UsageError(f"object path {path!r} is not usable: HDFS has no names with ':'")
        return self._below(path)

    def _below(self, path: str) -> str:
        return f"{self._root.rstrip('/')}/{path}"

    def _place(self, path: str) -> str:
        return f"{self.url.rstrip('/')}/{path}"

    def _ask(self, seconds: float, call: Callable[[Client], _T]) -> _T:
        client = self._client
        try:
            return self._within(seconds, lambda: call(client))
        except TimeoutError:
            # other threads may have timed out with it, too: it is replaced once
            if client is self._client:  # its connection may be to a machine that is gone
                self._client = self._opened()
            raise

    def _opened(self) -> Client:
        _used_by.add(os.getpid())
        try:
            return Client(self._server if self._authority else f"{self._server}/", SETTINGS)
        except Exception as error:
            raise UsageError(
                f"storage URL {self.url} is not usable ({_told(error)[1]}); write hdfs://namenode:port/path, or let "
                "HADOOP_CONF_DIR name a directory with core-site.xml and hdfs-site.xml for it, in the driver and on "
                "every worker"
            ) from error

    def _within(self, seconds: float, call: Callable[[], _T]) -> _T:
        """Return what ``call`` returns or raise what it raises, or TimeoutError; then it goes on by itself."""
        if len(_used_by | {os.getpid()}) > 1:  # the library's threads and connections stayed with the parent
            raise StorageError(
                "use",
                self.url,
                "this process was forked from one that uses HDFS; start it afresh (multiprocessing: 'spawn')",
                is_transient=False,
            )
        outcome: queue.SimpleQueue[tuple[_T | None, BaseException | None]] = queue.SimpleQueue()

        def run() -> None:
            try:
                outcome.put((call(), None))
            except BaseException as error:  # a panic of the client, too, which is no Exception
                outcome.put((None, error))

        threading.Thread(target=run, name="headgate-hdfs", daemon=True).start()
        try:
            value, error = outcome.get(timeout=seconds)
        except queue.Empty:
            raise TimeoutError(f"no answer within {seconds:.0f} s") from None
        if error is None:
            return value  # type: ignore[return-value]
        if isinstance(error, Exception):
            raise error
        raise RuntimeError(f"InternalError({error})") from error

    @contextlib.contextmanager
    def _errors(self, operation: str, path: str) -> Iterator[None]:
        try:
            yield
        except FileNotFoundError as error:
            if operation in ("get", "rename"):
                raise NotFound(path) from None
            raise StorageError(operation, self._place(path), _told(error)[1]) from error
        except (OSError, RuntimeError, ValueError) as error:
            kind, text = _told(error)
            if operation == "get" and text.endswith("(is not a directory)"):
                raise NotFound(path) from None
            is_transient = kind not in _PERMANENT and not isinstance(error, (PermissionError, UnicodeError))
            raise StorageError(operation, self._place(path), text, is_transient=is_transient) from error


def _listed(client: Client, place: str) -> list[Any]:
    return list(client.list_status(place))


def _deleted(client: Client, place: str) -> bool:
    return bool(client.delete(place, recursive=False))


def _identity(status: Any) -> tuple[int, int, str]:
    """Return what a file keeps when it is renamed, and two files hardly share."""
    return status.length, status.modification_time, status.owner


def _told(error: Exception) -> tuple[str, str]:
    r"""Return the kind of an error of the client, and one line of text.

    The client gives ``RPCError("org.apache.hadoop.ipc.StandbyException", "text\n\tat a.java...")`` as one text.
    """
    text = str(error) or type(error).__name__
    if found := _KERBEROS.match(text):  # it passes: tickets are renewed, and a KDC comes back
        why = found.group(1)
        if "No credentials" in why or "expired" in why:
            problem = "the Kerberos ticket has expired" if "expired" in why else "there is no Kerberos ticket"
            return "Kerberos", (
                f"{problem}; run kinit for the cache that KRB5CCNAME names, or set "
                "KRB5_CLIENT_KTNAME to a keytab, from which tickets are taken and renewed"
            )
        return "Kerberos", f"Kerberos does not let this process log in ({why})"
    if "Failed to load libgssapi" in text:
        return "NoGssapi", "Kerberos needs the system's GSSAPI library; install it (on Debian libgssapi-krb5-2)"
    if found := _REMOTE.match(text):
        kind, text = found.group(1).rpartition(".")[2].rpartition("$")[2], found.group(2)
    elif found := _CLIENTS.match(text):
        kind, text = text.partition("(")[0], found.group(1)
    else:
        kind = type(error).__name__
    line = text.replace("\\n", "\n").partition("\n")[0].partition(": [DatanodeInfo")[0].removesuffix('")')
    return kind, f"{kind}: {line}" if found is not None else line
