"""Where the file sink keeps what: names, the payload of its committables, and manifests.

Counterpart: ``sink`` writes staged files, ``commit`` publishes them. Source: rules D1–D4, D11 of
docs/spec/connectors.md, K6–K8 of docs/spec/two-phase-commit.md.

::

    <url>/part-<pipeline>.<sink>-<checkpoint>-<subtask>-<generation>-<number>.jsonl       committed
    <url>/_staging/<pipeline>.<sink>/<the same name>.tmp                                   prepared
    <url>/_publishing/<pipeline>.<sink>/<checkpoint>-<digest>.json                         what a commit publishes
    <url>/_committed/<pipeline>.<sink>/<checkpoint>-<digest>.json                          what one commit published
    <url>/_committed/<pipeline>.<sink>/merged-<checkpoint>-<digest>.json                   what many published
    <url>/_claims/<pipeline>.<sink>/<generation>                                           fence
    <url>/_owners/<pipeline>.<sink>/<number>                                               whose it is (``owner``)
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

import msgspec
import xxhash

from headgate.errors import CorruptionError
from headgate.model.ids import CheckpointId, Generation
from headgate.storage.base import Bytes
from headgate.storage.numbered import number_name
from headgate.storage.paths import read_name

STAGING = "_staging"
PUBLISHING = "_publishing"
COMMITTED = "_committed"
CLAIMS = "_claims"
OWNERS = "_owners"
PAYLOAD_VERSION = 1

_UNSAFE = re.compile(r"[^A-Za-z0-9_]")


@dataclass(frozen=True, slots=True)
class StagedFile:
    """One file of a transaction. ``name`` is its final path; ``checksum`` is xxh3-64 of its bytes, in hex."""

    name: str
    rows: int
    size_bytes: int
    checksum: str


@dataclass(frozen=True, slots=True, order=True)
class SinkIdentity:
    """One sink of one pipeline (K8): nothing in it changes when the pipeline is deployed again."""

    pipeline: str
    node: str

    def __str__(self) -> str:
        return f"{_quoted(self.pipeline)}.{_quoted(self.node)}"

    @classmethod
    def parse(cls, text: str) -> SinkIdentity:
        """Return the identity whose text this is."""
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

    def staged(self, name: str) -> str:
        """Return where the file with the final path ``name`` is while it is prepared."""
        return f"{self.staging}/{name}.tmp"


class _Version(msgspec.Struct, frozen=True):
    version: int


class _Payload(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    version: int
    files: list[StagedFile]


def digest(parts: Sequence[Bytes]) -> str:
    """Return the checksum of a file's bytes."""
    state = xxhash.xxh3_64()
    for part in parts:
        state.update(part)
    return state.hexdigest()


def encode_files(files: Sequence[StagedFile]) -> bytes:
    """Return a list of files as the payload of a committable or the content of a manifest: checksum, JSON."""
    body = msgspec.json.encode(_Payload(PAYLOAD_VERSION, list(files)))
    return digest([body]).encode() + b"\n" + body


def decode_files(where: str, data: bytes) -> list[StagedFile]:
    """Return the files that ``encode_files`` listed.

    Raises:
        CorruptionError: ``data``, which came from ``where``, is damaged or of an unknown version, or lists what is not
            the name of a file in the sink's directory.
    """
    found, _, body = data.partition(b"\n")
    if found.decode("ascii", "replace") != digest([body]):
        raise CorruptionError(where, 0, f"checksum {digest([body])}", repr(found[:32]))
    try:
        version = msgspec.json.decode(body, type=_Version).version
        if version != PAYLOAD_VERSION:
            raise CorruptionError(where, 17, f"version {PAYLOAD_VERSION}", f"version {version}")
        files = msgspec.json.decode(body, type=_Payload).files
    except msgspec.DecodeError as error:
        raise CorruptionError(where, 17, "the fields of this version", str(error)) from error
    for file in files:
        read_name(file.name, where)
    return files


def _quoted(name: str) -> str:
    """Return ``name`` with everything but letters, digits and "_" escaped, so that no two names clash (D1)."""
    return _UNSAFE.sub(lambda match: "".join(f"~{byte:02x}" for byte in match[0].encode()), name)


def _unquoted(name: str) -> str:
    data = re.sub(rb"~([0-9a-f]{2})", lambda match: bytes([int(match[1], 16)]), name.encode())
    return data.decode("utf-8", "replace")
