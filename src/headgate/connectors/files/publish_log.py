"""The names of a file sink, and its log of published files: manifests and intents.

Counterparts: ``file_writer`` writes staged files, ``file_committer`` publishes them and writes this log. Source:
docs/spec/connectors.md, K7, K8 of docs/spec/two-phase-commit.md.

::

  <url>/part-<pipeline>.<sink>-<checkpoint>-<subtask>-<generation>-<number>.jsonl      committed
  <url>/<column>=<value>/...                                                           committed, of a partition
  <url>/_staging/<pipeline>.<sink>/<the same name>.tmp                                 prepared, unless an upload
  <url>/_publishing/<pipeline>.<sink>/<checkpoint>-<digest>.json                       what a commit publishes
  <url>/_committed/<pipeline>.<sink>/<checkpoint>-<digest>.json                        what one commit published
  <url>/_committed/<pipeline>.<sink>/merged-<checkpoint>-<digest>.json                 what many published
  <url>/_claims/<pipeline>.<sink>/<generation>                                         fence
  <url>/_owners/<pipeline>.<sink>/<number>                                             owner (``FileOwner``)

The directory of a partition, ``day=2015-07-15/minute=00%3A01``, has the form that Hive, Spark and DuckDB read. It
stands for the value of a column, which the files below it do not have. Characters are escaped as Spark does (D16).
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from types import MappingProxyType

import msgspec
import polars as pl
import pyarrow as pa
import xxhash

from headgate.codec.decodable import decodable
from headgate.dataclass import dataclass
from headgate.errors import CorruptionError, UsageError
from headgate.model.ids import CheckpointId, Generation
from headgate.storage.base import (
    NAME_CHARS_MAX,
    AlreadyExists,
    Bytes,
    NotFound,
    Storage,
    number_name,
    read_name,
    read_with_retries,
)

NULL = "__HIVE_DEFAULT_PARTITION__"
"""The value of a directory for nulls, and for empty texts, which no directory can have."""

VALUE_BYTES_MAX = 240
"""File systems allow 255 bytes in a name, the name of the column included."""

DIRECTORY = re.compile(r"[A-Za-z0-9][^/\\\x00-\x1f=]*=[^/\\\x00-\x1f]+")
"""A directory of a value. None of the sink's own directories has this form, and none leads elsewhere."""

_ESCAPED = re.compile(r"[\x00-\x1f\x7f\"#%'*/:=?\\{}\[\]^]")
_ESCAPE = re.compile(r"%([0-9A-F]{2})")


def check_partitions(columns: Sequence[str], schema: pa.Schema) -> None:
    """Refuse columns that records cannot be divided by.

    Raises:
        UsageError: one is not there, its values cannot name directories, or no other column is left.
    """
    for name in columns:
        if name not in schema.names:
            raise UsageError(f"FileSink(partition_by=) names '{name}'; the records have {', '.join(schema.names)}")
        if DIRECTORY.fullmatch(f"{name}=x") is None:
            raise UsageError(f"FileSink(partition_by=) names '{name}', which cannot begin the name of a directory")
        kind = schema.field(name).type
        tests = (
            pa.types.is_large_string,
            pa.types.is_string,
            pa.types.is_integer,
            pa.types.is_date,
            pa.types.is_boolean,
        )
        if not any(test(kind) for test in tests):
            raise UsageError(
                f"FileSink(partition_by=) names '{name}' of type {kind}; it takes texts, whole numbers, dates, booleans"
            )
    if columns and len(columns) == len(schema.names):
        raise UsageError("FileSink(partition_by=) names every column, but files need one that is left")


def divided(table: pa.Table, columns: Sequence[str]) -> Iterator[tuple[str, pa.Table]]:
    """Return the directory and the records of each partition, in the order in which they come: always the same.

    Records without one of the columns, which are older than it, belong to its nulls.

    Raises:
        UsageError: a value is too long for the name of a directory.
    """
    frame = pl.DataFrame(table)
    there = [name for name in columns if name in frame.columns]
    places = pl.concat_str(*(_directory(frame, name) for name in columns), separator="/") if columns else pl.lit("")
    found = frame.select(places.alias("place")).to_series()
    rest = table.drop_columns(there)
    groups = pl.DataFrame({"place": found}).with_row_index("row").group_by("place", maintain_order=True).agg("row")
    for place, rows in groups.iter_rows():
        yield place, rest if len(rows) == len(frame) else rest.take(pa.array(rows, pa.uint32()))


def values_of(path: str) -> dict[str, str | None]:
    """Return what the directories of a file say, as texts."""
    pairs = (part.partition("=") for part in path.split("/")[:-1])
    return {name: None if value == NULL else _plain(value) for name, _, value in pairs}


def is_partition(path: str) -> bool:
    """Whether ``path`` is nothing but directories of values."""
    return all(DIRECTORY.fullmatch(part) is not None and part[-1] not in " ." for part in path.split("/"))


def _directory(frame: pl.DataFrame, name: str) -> pl.Expr:
    """Return the directory of each record for one column."""
    if name not in frame.columns:
        return pl.lit(f"{name}={NULL}")
    texts = frame[name].cast(pl.String)
    escaped = {text: _escaped(name, text) for text in texts.unique().to_list()}
    return pl.lit(texts.replace_strict(list(escaped), list(escaped.values()), return_dtype=pl.String))


def _escaped(name: str, text: str | None) -> str:
    value = _ESCAPED.sub(lambda match: f"%{ord(match[0]):02X}", text or NULL)
    if text == NULL:  # the text, not a null
        value = f"%{ord(value[0]):02X}{value[1:]}"
    if value[-1] in " .":  # some file systems drop them
        value = f"{value[:-1]}%{ord(value[-1]):02X}"
    directory = f"{name}={value}"
    if len(directory.encode()) > VALUE_BYTES_MAX:
        raise UsageError(
            f"FileSink(partition_by=) cannot name a directory '{directory[:60]}...': it has {len(directory.encode())} "
            f"bytes, and at most {VALUE_BYTES_MAX} are possible; partition by a shorter value"
        )
    return directory


def _plain(value: str) -> str:
    return _ESCAPE.sub(lambda match: chr(int(match[1], 16)), value)


STAGING = "_staging"
PUBLISHING = "_publishing"
COMMITTED = "_committed"
CLAIMS = "_claims"
OWNERS = "_owners"
PAYLOAD_VERSION = 1

_UNSAFE = re.compile(r"[^A-Za-z0-9_]")


@dataclass(frozen=True, slots=True)
class StagedFile:
    """One file of a transaction.

    Attributes:
        name: its final path.
        checksum: tells it from others: xxh3-64 of its bytes, in hex; of an upload ``UPLOADED`` and the mark of its
            object.
    """

    name: str
    rows: int
    size_bytes: int
    checksum: str

    @property
    def mark(self) -> str | None:
        """The mark of the object of its upload; None: it was not uploaded in parts."""
        return self.checksum.removeprefix(UPLOADED) if self.checksum.startswith(UPLOADED) else None


UPLOADED = "upload-"


@dataclass(frozen=True, slots=True)
class OpenUpload:
    """What completes the upload of a file: its id, and the tags of its parts."""

    id: str
    etags: tuple[str, ...]


@dataclass(frozen=True, slots=True, order=True)
class SinkIdentity:
    """One sink of one pipeline (K8): nothing in it changes when the pipeline is deployed again."""

    pipeline: str
    node: str

    def __str__(self) -> str:
        return f"{_quoted(self.pipeline)}.{_quoted(self.node)}"

    @classmethod
    def parse(cls, text: str) -> SinkIdentity:
        """Return the identity that ``str`` made this text of."""
        pipeline, _, node = text.partition(".")
        return cls(_unquoted(pipeline), _unquoted(node))

    @property
    def staging(self) -> str:
        """Directory of prepared files."""
        return f"{STAGING}/{self}"

    @property
    def publishing(self) -> str:
        """Directory of intents: what commits that have begun publish."""
        return f"{PUBLISHING}/{self}"

    @property
    def committed(self) -> str:
        """Directory of manifests."""
        return f"{COMMITTED}/{self}"

    @property
    def claims(self) -> str:
        """Directory of claimed generations."""
        return f"{CLAIMS}/{self}"

    @property
    def owners(self) -> str:
        """Directory of what says which life of the pipeline owns this sink."""
        return f"{OWNERS}/{self}"

    def claim(self, generation: Generation) -> str:
        """Return the object that says that ``generation`` owns this sink."""
        return f"{self.claims}/{number_name(generation)}"

    def file_name(
        self,
        prefix: str,
        checkpoint: CheckpointId,
        subtask_index: int,
        generation: Generation,
        number: int,
        suffix: str,
    ) -> str:
        """Return the final path of file ``number`` of a transaction: its whole identity (K8)."""
        return f"{prefix}-{self}-{checkpoint:010d}-{subtask_index:05d}-{generation:010d}-{number:05d}.{suffix}"

    def is_file_name(self, path: str) -> bool:
        """Whether ``path`` is a final path that ``file_name`` made for this sink, in a partition or not.

        In another directory it is of a sink with this name that has its place there.
        """
        partition, _, name = path.rpartition("/")
        if partition and not is_partition(partition):
            return False
        pattern = rf"[A-Za-z0-9][A-Za-z0-9_-]*-{re.escape(str(self))}-\d{{10,}}-\d{{5,}}-\d{{10,}}-\d{{5,}}\.[a-z]+"
        return re.fullmatch(pattern, name) is not None

    def staged(self, name: str) -> str:
        """Return where the file with the final path ``name`` is while it is prepared."""
        return f"{self.staging}/{name}.tmp"


class _Version(msgspec.Struct, frozen=True):
    version: int


class _Payload(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    version: int
    files: list[StagedFile]
    uploads: dict[str, OpenUpload] = {}


def digest(parts: Sequence[Bytes]) -> str:
    """Return the checksum of a file's bytes."""
    state = xxhash.xxh3_64()
    for part in parts:
        state.update(part)
    return state.hexdigest()


def encode_files(files: Sequence[StagedFile], uploads: Mapping[str, OpenUpload] = MappingProxyType({})) -> bytes:
    """Return a list of files as the payload of a committable or the content of a manifest: checksum, JSON.

    ``uploads``: what completes them, by the names of the files; manifests do not have it.
    """
    body = msgspec.json.encode(_Payload(PAYLOAD_VERSION, list(files), dict(uploads)))
    return digest([body]).encode() + b"\n" + body


def decode_files(where: str, data: bytes) -> list[StagedFile]:
    """Return the files that ``encode_files`` listed.

    Raises:
        CorruptionError: ``data``, which came from ``where``, is damaged or of an unknown version, or lists what is not
            the name of a file in the sink's directory or in one of a partition.
    """
    return _decoded(where, data).files


def decode_uploads(where: str, data: bytes) -> dict[str, OpenUpload]:
    """Return what completes the uploads of a committable, by the names of their files.

    Raises:
        CorruptionError: as for ``decode_files``.
    """
    return _decoded(where, data).uploads


def _decoded(where: str, data: bytes) -> _Payload:
    found, _, body = data.partition(b"\n")
    if found.decode("ascii", "replace") != digest([body]):
        raise CorruptionError(where, 0, f"checksum {digest([body])}", repr(found[:32]))
    try:
        # by itself: another version may have other fields, and is to be named as what it is
        version = msgspec.json.decode(body, type=decodable(_Version)).version
        if version != PAYLOAD_VERSION:
            # the body begins after 16 digits and a line feed
            raise CorruptionError(where, 17, f"version {PAYLOAD_VERSION}", f"version {version}")
        payload = msgspec.json.decode(body, type=decodable(_Payload))
    except msgspec.DecodeError as error:
        raise CorruptionError(where, 17, "the fields of this version", str(error)) from error
    for file in payload.files:
        partition, _, name = file.name.rpartition("/")
        read_name(name, where)
        if partition and not is_partition(partition):
            raise CorruptionError(where, 0, "the directories of a partition", f"{partition[:NAME_CHARS_MAX]!a}")
    return payload


def _quoted(name: str) -> str:
    """Return ``name`` with everything but letters, digits and "_" escaped, so that no two names clash."""
    return _UNSAFE.sub(lambda match: "".join(f"~{byte:02x}" for byte in match[0].encode()), name)


def _unquoted(name: str) -> str:
    data = re.sub(rb"~([0-9a-f]{2})", lambda match: bytes([int(match[1], 16)]), name.encode())
    return data.decode("utf-8", "replace")


MERGE_AFTER = 256
"""Manifests of single commits before they are merged, so that their number stays small."""

MANIFEST_FILES_MAX = 20_000
"""Files in one merged manifest, about 3 MB of it: a merge never rewrites more than that."""

LIST_TRIES_MAX = 8
"""A reader may meet a merge between listing and reading; more often in a row is damage."""

_MERGED = "merged-"
_PATH = re.compile(rf"(?:{COMMITTED}|{PUBLISHING})/[^/]+/(?:{_MERGED})?([0-9]{{10,}})-[0-9a-f]{{16}}\.json")


class Ledger:
    """Manifests and intents of one sink. Both have the form ``<checkpoint>-<digest>.json`` and list files.

    The checkpoint in a name is at least that of every file listed there.
    """

    def __init__(self, storage: Storage, identity: SinkIdentity) -> None:
        self._storage, self._identity = storage, identity
        self._unmerged_count: int | None = None

    def listed(self, files: Sequence[StagedFile], oldest: CheckpointId) -> set[StagedFile]:
        """Return those of ``files`` that a manifest lists (K7). None of them is older than ``oldest``."""
        return set(files) & _read_all(self._storage, self._identity.committed, oldest)

    def intended(self) -> dict[str, list[StagedFile]]:
        """Return what commits that were begun decided to publish, by intent."""
        found: dict[str, list[StagedFile]] = {}
        for path in _manifests(self._storage, self._identity.publishing):
            with contextlib.suppress(NotFound):  # its commit ended in an older generation
                found[path] = read_manifest(self._storage, path)
        return found

    def intend(self, checkpoint: CheckpointId, files: Sequence[StagedFile]) -> str:
        """Decide durably that ``files``, all of them prepared, are published; return the intent."""
        path, content = self._named(self._identity.publishing, f"{checkpoint:010d}", files)
        with contextlib.suppress(AlreadyExists):
            self._storage.put_if_absent(path, [content])
        return path

    def withdraw(self, intents: Collection[str]) -> None:
        """Forget intents."""
        for path in intents:
            self._storage.delete(path)

    def add(self, checkpoint: CheckpointId, files: Sequence[StagedFile]) -> None:
        """List ``files`` in one manifest. Its name contains its content's digest: a repeated commit finds it there."""
        path, content = self._named(self._identity.committed, f"{checkpoint:010d}", files)
        with contextlib.suppress(AlreadyExists):
            self._storage.put_if_absent(path, [content])
        # the directory is listed once, and counted along from then on
        if self._unmerged_count is None:
            self._unmerged_count = len(_unmerged(_manifests(self._storage, self._identity.committed)))
        else:
            self._unmerged_count += 1
        if self._unmerged_count >= MERGE_AFTER:
            self._unmerged_count = None  # looked at again: a merge may be cut short
            with contextlib.suppress(NotFound):  # a committer about to be fenced merges too
                self._merge()

    def published(self) -> set[StagedFile]:
        """Return everything that the manifests list, whether it is still there or not."""
        return _read_all(self._storage, self._identity.committed, CheckpointId(0))

    def empty(self, check: Callable[[], None]) -> None:
        """Delete every file that a manifest lists, then the manifest: cut short, the next call finds it there.

        ``check`` raises when a newer generation publishes here; what that one lists is never read after it. Several may
        do it at once: a manifest that is gone was emptied by another one, or merged by a slow commit; the next round
        looks for others.
        """
        is_whole = False
        while not is_whole:
            paths = _manifests(self._storage, self._identity.committed)
            check()
            is_whole = all(self._is_emptied(path) for path in paths)

    def _is_emptied(self, path: str) -> bool:
        """Delete what a manifest lists, and the manifest; return whether it was there."""
        try:
            files = read_manifest(self._storage, path)
        except NotFound:
            return False
        for name in (*(file.name for file in files), path):
            self._storage.delete(name)
        return True

    def _merge(self) -> None:
        """Move what single manifests list into the newest merged one, or into new ones when it is full.

        A crash half-way leaves files listed twice, which readers do not mind.
        """
        paths = _manifests(self._storage, self._identity.committed)
        sources = _unmerged(paths)
        if not sources:
            return
        files: dict[str, StagedFile] = {}
        newest = _merged(paths)[-1:]
        if newest:
            before = read_manifest(self._storage, newest[0])
            if len(before) < MANIFEST_FILES_MAX:
                sources = newest + sources
        for path in sources:
            files |= {file.name: file for file in read_manifest(self._storage, path)}
        # the greatest: a reader that leaves out manifests below its checkpoint must not leave out this one
        last = f"{_MERGED}{max(_number(path) for path in sources):010d}"
        listed = list(files.values())
        written: set[str] = set()
        for start in range(0, len(listed), MANIFEST_FILES_MAX):
            part = listed[start : start + MANIFEST_FILES_MAX]
            path, content = self._named(self._identity.committed, last, part)
            with contextlib.suppress(AlreadyExists):
                self._storage.put_if_absent(path, [content])
            written.add(path)
        # only now: at each moment a reader finds every file in one manifest at least
        for path in sources:
            if path not in written:  # one that held all of this already
                self._storage.delete(path)

    def _named(self, directory: str, number: str, files: Sequence[StagedFile]) -> tuple[str, bytes]:
        content = encode_files(files)
        return f"{directory}/{number}-{digest([content])}.json", content


def read_manifest(storage: Storage, path: str) -> list[StagedFile]:
    """Return the files that one manifest or intent lists.

    Raises:
        NotFound
        CorruptionError
    """
    return read_with_retries(lambda: decode_files(f"{storage.url}/{path}", storage.get(path)))


def all_listed(storage: Storage) -> set[str]:
    """Return the names in all manifests of all sinks: those of each commit all at once."""
    return {file.name for file in _read_all(storage, COMMITTED, CheckpointId(0))}


def _read_all(storage: Storage, directory: str, oldest: CheckpointId) -> set[StagedFile]:
    """Read all manifests below ``directory`` that may list files of ``oldest`` or newer, as they are at one moment.

    A merge writes the merged manifest before it deletes others: a reader that sees no new one missed nothing.
    """
    for _ in range(LIST_TRIES_MAX):
        paths = [path for path in _manifests(storage, directory) if _number(path) >= oldest]
        with contextlib.suppress(NotFound):  # merged meanwhile
            found = {file for path in paths for file in read_manifest(storage, path)}
            again = [path for path in _manifests(storage, directory) if _number(path) >= oldest]
            # a manifest was merged between listing and reading if there is another merged one: read again
            if _merged(again) == _merged(paths):
                return found
    raise CorruptionError(f"{storage.url}/{directory}", 0, "manifests that can be read", "names without objects")


def _manifests(storage: Storage, directory: str) -> list[str]:
    """Return the manifests below ``directory``, oldest first; what others left there is none."""
    paths = [path for path in storage.list(directory) if _PATH.fullmatch(path) is not None]
    return sorted(paths, key=lambda path: (_number(path), path))


def _number(path: str) -> int:
    match = _PATH.fullmatch(path)
    assert match is not None, "only what ``_manifests`` lists has a number"
    return int(match[1])


def _unmerged(paths: Sequence[str]) -> list[str]:
    return [path for path in paths if not path.rsplit("/", 1)[1].startswith(_MERGED)]


def _merged(paths: Sequence[str]) -> list[str]:
    return [path for path in paths if path.rsplit("/", 1)[1].startswith(_MERGED)]
