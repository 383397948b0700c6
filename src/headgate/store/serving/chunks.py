"""Bytes of chunks on their way into the server's directory and out of it, a piece at a time.

Counterpart: ``served.served_storage``. Source: SS7 and SS8 of docs/spec/served-store.md. Never shows a chunk that did
not arrive whole and undamaged, and never holds more than a piece in memory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Protocol

import xxhash

from headgate.storage.base import Bytes, Storage

PIECE_BYTES = 1 << 20


class ChunkStorage(Storage, Protocol):
    """Where a server keeps chunks: they come piece by piece, and somebody else may have written what is read."""

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
        super().__init__(problem, is_whole)
        self.problem = problem
        self.is_whole = is_whole


def arriving(read: Callable[[int], bytes], size_bytes: int, checksum: str) -> Iterator[bytes]:
    """Give the bytes of a body as they come; whoever takes them all knows that they are what was sent.

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
