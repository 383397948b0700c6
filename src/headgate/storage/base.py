"""Object storage as Headgate needs it: whole objects by path, with create-if-absent, and the rules for their names.

One interface over a local directory, any object store that obstore knows, and memory (tests, simulator). Used by
checkpoints, by the chunks of the stream store and by the file sink. Names are checked, also those read from files.
Numbers name log entries, ids, claims and owners. What else is in their directory, in whatever subdirectory, is not
ours (backups, notes, files of a desktop): it counts for nothing, and is left alone. Source: docs/spec/storage.md and
docs/spec/security.md.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterable, Sequence
from typing import Protocol, TypeAlias, TypeVar

from headgate.dataclass import dataclass
from headgate.errors import CorruptionError, StorageError, UsageError

Bytes: TypeAlias = bytes | bytearray | memoryview


class AlreadyExists(Exception):  # noqa: N818 - expected outcome, not a fault
    """``put_if_absent`` or ``rename_if_absent`` found the path taken. Expected: not a HeadgateError."""

    def __init__(self, path: str) -> None:
        super().__init__(path)
        self.path = path


class NotFound(Exception):  # noqa: N818 - expected outcome, not a fault
    """There is no object at the path. Expected: not a HeadgateError."""

    def __init__(self, path: str) -> None:
        super().__init__(path)
        self.path = path


class Replaced(Exception):  # noqa: N818 - expected outcome, not a fault
    """Another object is at the path than the one that was to be read. Expected: not a HeadgateError."""

    def __init__(self, path: str) -> None:
        super().__init__(path)
        self.path = path


@dataclass(frozen=True, slots=True)
class StoredFile:
    """A file or object that others wrote, as a listing shows it.

    Attributes:
        path: its path in its storage; to sources, its URL.
        modified_ms: when it was written, by the clock of the storage.
        version: another text where other content was put in its place; "": the storage has none.
    """

    path: str
    size_bytes: int
    modified_ms: int
    version: str = ""


class ReadableStorage(Protocol):
    """Files that others write, which are never changed, only replaced. Calls block; safe from several threads.

    Paths are as users gave them, with any characters. Raises StorageError when an operation failed.
    """

    def files(self, directory: str) -> Sequence[StoredFile]:
        """Return the complete files below ``directory``, recursively; "": all. Missing directory: empty."""

    def file(self, path: str) -> StoredFile | None:
        """Return the file at ``path``, or None."""

    def get_part(self, file: StoredFile, offset: int, size_bytes: int) -> bytes:
        """Return part of a file (shorter at its end), unless it was replaced since it was listed.

        Raises:
            NotFound, Replaced
        """


@dataclass(frozen=True, slots=True)
class Upload:
    """An upload that has begun.

    Attributes:
        id: what completes or aborts it, in any process.
        mark: a text drawn at random; the object has it once the upload is completed.
    """

    id: str
    mark: str


class Uploads(Protocol):
    """Objects that are uploaded in parts, and do not exist before the upload is completed.

    Parts have numbers from 1, and are repeated under the same number. All but the last have the same size, at least
    ``PART_BYTES_MIN``. Calls block; safe from several threads; raise StorageError when the operation failed.
    """

    def begin(self, path: str) -> Upload:
        """Begin the upload of an object. If the answer is lost, the upload stays open, and ``list`` shows it."""

    def put_part(self, path: str, upload_id: str, number: int, data: Bytes) -> str:
        """Upload a part; return its tag."""

    def complete(self, path: str, upload_id: str, etags: Sequence[str]) -> None:
        """Make the object of these parts, unless there is one.

        Servers differ in what they answer to a repetition, and some say yes before the object is there: look at
        ``mark`` afterwards.

        Raises:
            NotFound: there is no such upload: completed, aborted, or removed by a rule of the bucket.
            AlreadyExists: there is an object at the path.
        """

    def copy_if_absent(self, source: str, target: str, size_bytes: int, mark: str) -> None:
        """Copy an object of that size within the store; the copy has ``mark``.

        Raises:
            NotFound: no ``source``.
            AlreadyExists
        """

    def abort(self, path: str, upload_id: str) -> None:
        """Remove an upload with its parts; missing is fine."""

    def list(self, prefix: str) -> list[tuple[str, str]]:
        """Return path and id of the uploads below the directory ``prefix`` that are neither completed nor aborted.

        MinIO shows none: it lists uploads of one whole name only. So one that is missing here may be there.
        """

    def is_open(self, path: str, upload_id: str) -> bool:
        """Whether there is such an upload, neither completed nor aborted, on servers that list no others, too."""

    def mark(self, path: str) -> str | None:
        """Return the mark of an object, "" for one that was not made by an upload of ours; None: there is none."""


PART_BYTES_MIN = 5 << 20
PARTS_MAX = 10_000
"""Of S3."""


class BasicStorage:
    """What a storage is unless it says otherwise: see ``Storage``."""

    uploads: Uploads | None = None
    """It takes objects whole."""

    puts_may_land_late = False
    """A call that has failed does nothing later."""

    is_afar = False
    """Objects are in this machine's memory, or on its disk."""


class RequestStorage(BasicStorage):
    """A storage that is asked over a network, as a rule: a request that timed out may still be on its way."""

    puts_may_land_late = True
    is_afar = True


class Storage(Protocol):
    """Paths are relative, "/"-separated, without "..". Calls block; safe from several threads.

    Every method raises StorageError when the operation failed (transient: no space, I/O error, time-out). What ``get``
    and ``list`` show is durable, whatever process wrote it.
    """

    @property
    def url(self) -> str:
        """Where this storage is, for messages."""

    @property
    def puts_may_land_late(self) -> bool:
        """Whether a put that reported an error may still take effect after a look that did not find it."""

    @property
    def is_afar(self) -> bool:
        """Whether each request travels, so that several at once take less time than one after the other."""

    @property
    def uploads(self) -> Uploads | None:
        """How it takes objects in parts; None: it does not, or what that needs is not installed."""

    def draw_name(self, size_bytes: int) -> str:
        """Return what nothing else is called, in hexadecimal digits: so many bytes at random."""

    def put(self, path: str, parts: Sequence[Bytes]) -> None:
        """Write an object durably, replacing what was there; readers see all of it or nothing."""

    def put_if_absent(self, path: str, parts: Sequence[Bytes]) -> None:
        """Write an object durably unless one exists.

        Raises:
            AlreadyExists: one exists, and is durable.
        """

    def get(self, path: str) -> bytes:
        """Return a whole object.

        Raises:
            NotFound
        """

    def get_range(self, path: str, offset: int, size_bytes: int) -> bytes:
        """Return part of an object (shorter at its end).

        Raises:
            NotFound
        """

    def list(self, prefix: str) -> list[str]:
        """Return the paths below the directory ``prefix``, recursively, sorted. Missing directory: empty."""

    def delete(self, path: str) -> None:
        """Remove an object; missing is fine."""

    def rename_if_absent(self, source: str, target: str) -> None:
        """Move an object.

        Raises:
            NotFound: no ``source``.
            AlreadyExists: ``target`` is taken (``source`` is left).
        """

    def sweep_unfinished(self, prefix: str = "") -> int:
        """Remove what crashed writers left below ``prefix`` and no listing shows; return how many (I6).

        What is being written stays. Storage where puts leave no leftovers has nothing to remove.
        """


_PROBE = re.compile(r"probe-[0-9a-f]{16}")
PROBES_MAX = 3
"""Another process may take a probe for a leftover and remove it between the two puts: then another one is tried."""


def refuse_unless_exclusive(storage: Storage, directory: str) -> None:
    """Put one object twice: a storage that accepts both does not honour put-if-absent, and cannot be used.

    Raises:
        UsageError: it does not.
        StorageError
    """
    for _ in range(PROBES_MAX):
        # a new name for each try: what an earlier one left must not be taken for an answer
        if _is_exclusive(storage, f"{directory}/probe-{storage.draw_name(8)}"):
            return
    raise UsageError(
        f"storage {storage.url} replaces an object that was to be written only if absent, so two runs could overwrite "
        "each other's checkpoints and output; use a store that honours conditional writes (If-None-Match), or a "
        "directory"
    )


def _is_exclusive(storage: Storage, path: str) -> bool:
    try:
        storage.put_if_absent(path, [b"first\n"])
        storage.put_if_absent(path, [b"second\n"])
    except AlreadyExists:
        return True
    finally:
        with contextlib.suppress(StorageError):  # then a later start sweeps it
            storage.delete(path)
    return False


def is_probe(path: str) -> bool:
    """Whether an object is what ``refuse_unless_exclusive`` left when its process died; any process may remove it."""
    return _PROBE.fullmatch(path.rsplit("/", 1)[-1]) is not None


READS_MAX = 3
"""So often are bytes read that do not fit, before that is believed."""

_T = TypeVar("_T")


def read_with_retries(read: Callable[[], _T]) -> _T:
    """Return what ``read`` returns; repeat it a few times while it says that the bytes are damaged or missing."""
    for _ in range(READS_MAX - 1):
        # a read may have met a file in between, or a bad copy; damage says the same each time
        with contextlib.suppress(CorruptionError, NotFound):
            return read()
    return read()


TEMP_PREFIX = ".hg-tmp-"
"""Names that begin so are unfinished writes: never listed, never readable, harmless when left by a crash."""

PATH_CHARS_MAX = 900
"""Object stores allow 1,024 bytes; the rest is for the prefix of the storage itself."""

BARE_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.~-]*")
"""The names that Headgate itself gives to files: none is hidden, leads elsewhere, or has other characters."""

NAME_CHARS_MAX = 255


def read_name(name: str, where: str, form: re.Pattern[str] = BARE_NAME) -> str:
    """Return ``name``, which the file ``where`` says: only now may it be joined to a directory.

    Raises:
        CorruptionError: it is not the bare name of a file, or not of this ``form``.
    """
    if len(name) > NAME_CHARS_MAX or BARE_NAME.fullmatch(name) is None or form.fullmatch(name) is None:
        raise CorruptionError(where, 0, "the bare name of a file", f"{name[:NAME_CHARS_MAX]!a}")
    return name


def read_path(path: str, where: str) -> str:
    """Return the object path ``path``, which the file ``where`` says.

    Raises:
        CorruptionError: it is not relative, or leads elsewhere; see ``checked_path``.
    """
    try:
        return checked_path(path)
    except UsageError as error:
        raise CorruptionError(where, 0, "the path of a file", f"{path[:NAME_CHARS_MAX]!a}") from error


def checked_path(path: str) -> str:
    """Return ``path`` when it is relative, "/"-separated and free of surprises.

    Raises:
        UsageError: it is empty, absolute, too long, or a component is empty, ".", ".." or a temporary name.
    """
    problem = ""
    if not path or len(path) > PATH_CHARS_MAX:
        problem = f"it must have 1 to {PATH_CHARS_MAX} characters"
    elif "\\" in path or "\0" in path:
        problem = "it must not contain a backslash or NUL"
    else:
        for part in path.split("/"):
            if part in ("", ".", ".."):
                problem = "its components must not be empty, '.' or '..'"
            elif part.startswith(TEMP_PREFIX):
                problem = f"components beginning with {TEMP_PREFIX} are reserved for unfinished writes"
    if problem:
        raise UsageError(f"object path {path!r} is not usable: {problem}")
    return path


def checked_prefix(prefix: str) -> str:
    """Return ``prefix`` without slashes at its ends; "" means everything."""
    stripped = prefix.strip("/")
    return checked_path(stripped) if stripped else ""


_NUMBER = re.compile(r"[0-9]{10,}")


def number_name(number: int) -> str:
    """Return the name of object ``number``: names sort as numbers do."""
    return f"{number:010d}"


def list_numbered(storage: Storage, directory: str) -> dict[int, str]:
    """Return the paths of the numbered objects in ``directory``, ascending.

    Raises:
        StorageError
    """
    return _numbered(storage.list(directory), directory)


def list_numbered_below(storage: Storage, directory: str) -> dict[str, dict[int, str]]:
    """Return the same of every directory in ``directory``, by its name; those with nothing of ours are left out.

    Raises:
        StorageError
    """
    paths: dict[str, list[str]] = {}
    for path in storage.list(directory):
        name, slash, _ = path.removeprefix(f"{directory}/").partition("/")
        if slash:
            paths.setdefault(name, []).append(path)
    found = {name: _numbered(below, f"{directory}/{name}") for name, below in paths.items()}
    return {name: numbers for name, numbers in found.items() if numbers}


def _numbered(paths: Iterable[str], directory: str) -> dict[int, str]:
    names = {path: path.removeprefix(f"{directory}/") for path in paths}
    found = {int(name): path for path, name in names.items() if _NUMBER.fullmatch(name)}
    # a number has one spelling: "00000000001" is not ours, and must not take the place of "0000000001"
    return {number: path for number, path in sorted(found.items()) if names[path] == number_name(number)}


NO_SUCH_STORE = ("NoSuchBucket", "ContainerNotFound", "InvalidBucketName", "XAdminUserNotFound", "AccountNotFound")
REFUSALS = (
    *NO_SUCH_STORE,
    "AccessDenied",
    "AllAccessDisabled",
    "AuthorizationHeaderMalformed",
    "EntityTooLarge",
    "ExpiredToken",
    "InvalidAccessKeyId",
    "InvalidRequest",
    "InvalidToken",
    "KeyTooLongError",
    "MethodNotAllowed",
    "NotImplemented",
    "PermanentRedirect",
    "RequestTimeTooSkewed",
    "SignatureDoesNotMatch",
)
"""Codes of answers that repeating the request does not change."""

WRITER = "headgate"
"""Attribute of an object that was put if absent or uploaded in parts: a text drawn at random for that."""
