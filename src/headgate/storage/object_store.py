"""Objects in whatever obstore reaches: S3, Google Cloud Storage, Azure, HTTP, and its own local store.

Counterpart: ``storage.Storage``. Source: docs/spec/storage.md.
Never emulates create-if-absent by looking first: it is the store's conditional put.
"""

from __future__ import annotations

import contextlib
import functools
import html
import os
import re
import secrets
from collections.abc import Iterator, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any
from urllib.parse import quote, unquote, urlsplit

import obstore
from obstore import exceptions as problems
from obstore.store import AzureStore, LocalStore, from_url

from headgate.errors import StorageError, UsageError
from headgate.storage.base import (
    NO_SUCH_STORE,
    REFUSALS,
    WRITER,
    AlreadyExists,
    Bytes,
    NotFound,
    Replaced,
    RequestStorage,
    StoredFile,
    Uploads,
    checked_path,
    checked_prefix,
)

_PERMANENT = (
    problems.PermissionDeniedError,
    problems.UnauthenticatedError,
    problems.NotSupportedError,
    problems.UnknownConfigurationKeyError,
    problems.InvalidPathError,
)
_LIST_CHUNK = 1_000

_CODE = re.compile(r"<Code>(.*?)</Code>")
_MESSAGE = re.compile(r"<Message>(.*?)</Message>", re.DOTALL)
_REFUSED = re.compile(r"status code: 40[13]\b")
_OPERATING_SYSTEM = re.compile(r'(?:message|error): "([^"]+)"')
_UNANSWERED = re.compile(r" (https?://[^/\s]+)\S* in .* - HTTP error: (.*)")
_STATUS = re.compile(r" (https?://[^/\s]+)\S* in .* - Server returned non-2xx status code: (\d+[^:\n]*)")
_TIMED_OUT = "kind: Timeout"
"""In what obstore says of a failure: the server's own words, those of this machine, and who was asked."""

_NO_ACCOUNT = "Account must be specified"
_OTHER_REGION = "Received redirect without LOCATION"
_BEYOND = "InvalidRange"
_METADATA_SERVICE = "http://169.254.169.254/"
"""Of a machine in a cloud: asked for credentials that are not in the environment."""

_WITHOUT_ATTRIBUTES = ("file", "http", "https")
RETRY_TIMEOUT = timedelta(minutes=1)
"""So long are requests repeated that got no answer, or that the server is busy; each waits half a minute."""

CREATE_TRIES_MAX = 3
"""A store may answer that an object is there while another request creates or deletes it."""


class ObjectStorage(RequestStorage):
    """The objects below one URL."""

    def __init__(self, url: str, **options: Any) -> None:
        """Open ``url``; ``options`` go to obstore (credentials come from the environment by default).

        Raises:
            UsageError: obstore does not accept the URL or the options, or the URL has settings.
        """
        self.url = url
        """As it was given."""
        self._has_uploads = not options and urlsplit(url).scheme.lower() in ("s3", "s3a")
        scheme = urlsplit(url).scheme.lower()
        self._has_attributes = scheme not in _WITHOUT_ATTRIBUTES
        options.setdefault("retry_config", {"retry_timeout": RETRY_TIMEOUT})
        if scheme in ("s3", "s3a") and "AWS_COPY_IF_NOT_EXISTS" not in os.environ:
            options.setdefault("copy_if_not_exists", "multipart")  # the upload of a copy, completed only if absent
        try:
            if scheme == "file":
                directory = Path(unquote(urlsplit(url).path))
                self._store: Any = LocalStore(directory, automatic_cleanup=False, mkdir=True)
            else:
                self._store = from_url(_encoded(url), **options)
        except (problems.BaseError, ValueError, OSError) as error:
            said = _first_line(error)
            if _NO_ACCOUNT in said:
                said = "name the storage account in AZURE_STORAGE_ACCOUNT_NAME"
            raise UsageError(f"storage URL {url} is not usable: {said}") from error

    @functools.cached_property
    def uploads(self) -> Uploads | None:  # type: ignore[override]
        """See ``Storage``: of S3, where botocore is installed; it does not know ``options`` of obstore."""
        if not self._has_uploads:
            return None
        try:
            from headgate.storage.multipart import open_uploads
        except ModuleNotFoundError as error:
            if error.name != "botocore":
                raise
            return None
        return open_uploads(self.url, self.draw_name, os.getpid())

    def draw_name(self, size_bytes: int) -> str:
        return secrets.token_hex(size_bytes)

    def put(self, path: str, parts: Sequence[Bytes]) -> None:
        """Write an object durably, replacing what was there, in one request."""
        with self._errors("put", path, is_there=True):
            obstore.put(self._store, checked_path(path), _buffers(parts), mode="overwrite", use_multipart=False)

    def put_if_absent(self, path: str, parts: Sequence[Bytes]) -> None:
        """Write an object durably unless one exists, by conditional put.

        After a StorageError it may be there.

        Raises:
            AlreadyExists
        """
        where, data, writer = checked_path(path), _buffers(parts), secrets.token_hex(8)
        attributes = {WRITER: writer} if self._has_attributes else None
        for _ in range(CREATE_TRIES_MAX):
            with self._errors("put", path, is_there=True):
                try:
                    obstore.put(self._store, where, data, mode="create", use_multipart=False, attributes=attributes)
                except (problems.AlreadyExistsError, problems.PreconditionError):
                    pass
                else:
                    return
            # taken, or our own put with a lost answer, which the library has repeated: the mark tells
            found = self._writer(path)
            if found == writer:  # obstore repeated a request whose answer was lost
                return
            if found is not None:
                raise AlreadyExists(path)
        raise StorageError("put", self._where(path), "it is there, and it is not: other processes change it")

    def _writer(self, path: str) -> str | None:
        """Return what the put of an object drew, "" if that is not known; None: there is no object."""
        if not self._has_attributes:
            return ""
        try:
            with self._errors("look at", path):
                found = obstore.get(self._store, path, options={"head": True}).attributes
        except NotFound:
            return None
        return str(found.get(WRITER, ""))

    def get(self, path: str) -> bytes:
        """Return a whole object.

        Raises:
            NotFound
        """
        with self._errors("get", path):
            return bytes(obstore.get(self._store, checked_path(path)).bytes())

    def get_range(self, path: str, offset: int, size_bytes: int) -> bytes:
        """Return part of an object (shorter at its end), by one request unless it begins after the end.

        Raises:
            NotFound
        """
        with self._errors("get", path):
            where = checked_path(path)
            try:
                if size_bytes > 0:
                    return bytes(obstore.get_range(self._store, where, start=offset, end=offset + size_bytes))
            except problems.GenericError as error:  # what the end of an object is to obstore, among other things
                if _cause(error)[0] not in ("", _BEYOND) or offset < self._size(where):
                    raise
            else:
                self._size(where)  # is it there?
            return b""

    def list(self, prefix: str) -> list[str]:
        """Return the paths below the directory ``prefix``, recursively, sorted."""
        base = checked_prefix(prefix)
        with self._errors("list", prefix):
            try:
                pages = obstore.list(self._store, base or None, chunk_size=_LIST_CHUNK)
                found = [str(meta["path"]) for page in pages for meta in page]
            except FileNotFoundError:
                return []
        return sorted(path for path in found if not base or path.startswith(base + "/"))

    def delete(self, path: str) -> None:
        """Remove an object; missing is fine."""
        with self._errors("delete", path), contextlib.suppress(FileNotFoundError):
            obstore.delete(self._store, checked_path(path))

    def rename_if_absent(self, source: str, target: str) -> None:
        """Move an object: copy it in the store, unless ``target`` is there, then delete it.

        Where the store cannot do that, the bytes pass through this process. Azure says that it will copy, and may do so
        later, when the source would be deleted; so they do there, too.

        Raises:
            NotFound: no ``source``.
            AlreadyExists: ``target`` is taken (``source`` is left).
        """
        with self._errors("rename", source):
            # by itself: further down, "not found" may be about the bucket or the target
            obstore.head(self._store, checked_path(source))
        with self._errors("rename", source, is_there=True):
            if not self._copy_if_absent(source, checked_path(target)):
                self.put_if_absent(target, [self.get(source)])
        self.delete(source)

    def _copy_if_absent(self, source: str, target: str) -> bool:
        """Have the store copy an object; return whether it can, and has done so when it says so.

        Raises:
            AlreadyExists
        """
        if isinstance(self._store, AzureStore):
            return False
        try:
            obstore.copy(self._store, source, target, overwrite=False)
        except problems.AlreadyExistsError:
            raise AlreadyExists(target) from None
        except (problems.NotSupportedError, NotImplementedError):
            return False
        return True

    def sweep_unfinished(self, prefix: str = "") -> int:
        """See ``Storage.sweep_unfinished``: uploads are single requests, whole or not there."""
        return 0

    # -- files of others ------------------------------------------------------------------------------------------

    def files(self, directory: str) -> Sequence[StoredFile]:
        """See ``ReadableStorage``: in pages of a thousand."""
        with self._errors("list", directory):
            try:
                pages = obstore.list(self._store, directory or None, chunk_size=_LIST_CHUNK)
                return [_stored(meta) for page in pages for meta in page]
            except FileNotFoundError:
                return []

    def file(self, path: str) -> StoredFile | None:
        try:
            with self._errors("look at", path):
                return _stored(obstore.head(self._store, path))
        except NotFound:
            return None

    def get_part(self, file: StoredFile, offset: int, size_bytes: int) -> bytes:
        """See ``ReadableStorage``: by If-Match, and by what the answer says of the object."""
        end = min(offset + size_bytes, file.size_bytes)
        if offset >= end:
            return b""
        options: Any = {"range": (offset, end)}
        if file.version:
            options["if_match"] = file.version
        with self._errors("get", file.path):
            try:
                found = obstore.get(self._store, file.path, options=options)
                now = _stored(found.meta)
                is_same = now.version == file.version if file.version else now == file
                if is_same and now.size_bytes == file.size_bytes:
                    data = bytes(found.bytes())
                    if len(data) == end - offset:
                        return data
                    raise OSError(f"the answer has {len(data)} of {end - offset} bytes")
            except problems.PreconditionError:
                pass
        raise Replaced(file.path)

    def _size(self, path: str) -> int:
        return int(obstore.head(self._store, path)["size"])

    def _where(self, path: str) -> str:
        return f"{self.url.rstrip('/')}/{path}"

    @contextlib.contextmanager
    def _errors(self, operation: str, path: str, *, is_there: bool = False) -> Iterator[None]:
        """Raise what obstore raises as one of ours. ``is_there``: "not found" is not said of the object itself."""
        try:
            yield
        except (problems.BaseError, OSError) as error:
            code, cause = _cause(error)
            if isinstance(error, FileNotFoundError) and not is_there and code not in NO_SUCH_STORE:
                raise NotFound(path) from None
            is_refused = code in REFUSALS or _REFUSED.search(str(error)) is not None  # of a list it is but a text
            is_transient = not is_refused and not isinstance(error, _PERMANENT)
            raise StorageError(operation, self._where(path), cause, is_transient=is_transient) from error


def _encoded(url: str) -> str:
    """Return a URL that means its path as it is written, as a source of files does; obstore would decode it.

    Raises:
        UsageError: it has settings, which obstore would pass over.
    """
    scheme, _, rest = url.partition("://")
    if scheme.lower() in ("http", "https"):
        return url
    if "?" in rest:
        raise UsageError(f"storage URL {url} is not usable: it has a '?'; give settings in the environment")
    root, slash, path = rest.partition("/")
    return f"{scheme}://{root}{slash}{quote(path)}"


def _cause(error: BaseException) -> tuple[str, str]:
    """Return the code of the server's answer, if any, and in one sentence what is wrong."""
    text = str(error)
    code, message = _CODE.search(text), _MESSAGE.search(text)
    if code is not None:
        words = html.unescape(message[1]).strip() if message is not None else "it was refused"
        words = words.partition("\n")[0].rstrip(". ")  # Azure adds the id and the time of the request, a line each
        return code[1], f"{words} ({code[1]})"
    if _METADATA_SERVICE in text:
        return "", "there are no credentials in the environment, and this machine's metadata service gives none"
    if _OTHER_REGION in text:
        return "PermanentRedirect", "the bucket is in another region; name its region in AWS_REGION"
    status = _STATUS.search(text)
    if status is not None:  # as answers to HEAD, and of what stands in between, which have no words
        return "", f"{status[1]} answers {status[2].strip()}"
    unanswered = _UNANSWERED.search(text)
    if unanswered is not None and _TIMED_OUT in text:
        return "", f"{unanswered[1]} gives no answer within the time-out of a request"
    if unanswered is not None:
        reason = (_OPERATING_SYSTEM.findall(text) or [unanswered[2].strip()])[-1]
        return "", f"{unanswered[1]} does not answer: {reason}"
    return "", _first_line(error)


def _stored(meta: Any) -> StoredFile:
    modified_ms = int(meta["last_modified"].timestamp() * 1_000)
    return StoredFile(str(meta["path"]), int(meta["size"]), modified_ms, str(meta["e_tag"] or ""))


def _buffers(parts: Sequence[Bytes]) -> bytes:
    """obstore takes one buffer (or an iterator, which it would upload in parts)."""
    return bytes(parts[0]) if len(parts) == 1 else b"".join(parts)


def _first_line(error: BaseException) -> str:
    text = str(error).strip()
    return text.splitlines()[0] if text else type(error).__name__
