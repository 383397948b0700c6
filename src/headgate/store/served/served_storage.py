"""Chunks that are kept by the server of a store.

Counterparts: ``storage.Storage`` says what it promises, ``serving.chunks`` keeps them. Source: SS7, SS8 and SS9 of
docs/spec/served-store.md.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from headgate.errors import StorageError
from headgate.storage.base import Bytes
from headgate.storage.paths import checked_path
from headgate.store.served.client import Client, question_of
from headgate.store.served.connection import Question
from headgate.store.served.values import decode
from headgate.store.served.verbs import OF_THE_STORAGE, REPEATED_STORAGE_VERBS, STORAGE_SIGNATURES

CHUNK = "/chunk/"
OFFSET_HEADER, SIZE_HEADER, ABSENT_HEADER = "Headgate-Offset", "Headgate-Size", "Headgate-If-Absent"

CHUNK_BYTES_MAX = 1 << 30
"""Nobody sends more at once, and no server takes it: a writer flushes at 32 MiB, so it is one huge append."""


class ServedStorage:
    """The chunks behind a server."""

    def __init__(self, client: Client) -> None:
        self._client = client

    @property
    def url(self) -> str:
        """See ``Storage``."""
        return f"{self._client.url}/chunks"

    @property
    def puts_may_land_late(self) -> bool:
        """A put whose answer was lost may still be under way."""
        return True

    @property
    def is_afar(self) -> bool:
        """See ``Storage``."""
        return True

    def draw_name(self, size_bytes: int) -> str:
        """See ``Storage``."""
        return self._client.around.token(size_bytes).hex()

    def put(self, path: str, parts: Sequence[Bytes]) -> None:
        """See ``Storage``. The same bytes again are the same: an answer that is lost is asked for again."""
        self._client.ask(self._put(path, parts, {}))

    def put_if_absent(self, path: str, parts: Sequence[Bytes]) -> None:
        """See ``Storage``."""
        self._client.ask(self._put(path, parts, {ABSENT_HEADER: "1"}), is_once=True)

    def get(self, path: str) -> bytes:
        """See ``Storage``."""
        return self._client.ask(Question("GET", CHUNK + checked_path(path)))

    def get_range(self, path: str, offset: int, size_bytes: int) -> bytes:
        """See ``Storage``."""
        headers = {OFFSET_HEADER: str(offset), SIZE_HEADER: str(size_bytes)}
        return self._client.ask(Question("GET", CHUNK + checked_path(path), headers=headers))

    def list(self, prefix: str) -> list[str]:
        """See ``Storage``."""
        found: list[str] = self._carry_out("list", prefix)
        return found

    def delete(self, path: str) -> None:
        """See ``Storage``."""
        self._carry_out("delete", path)

    def rename_if_absent(self, source: str, target: str) -> None:
        """See ``Storage``."""
        self._carry_out("rename_if_absent", source, target)

    def sweep_unfinished(self, prefix: str = "") -> int:
        """See ``Storage``."""
        return int(self._carry_out("sweep_unfinished", prefix))

    def _put(self, path: str, parts: Sequence[Bytes], headers: dict[str, str]) -> Question:
        size_bytes = sum(memoryview(part).nbytes for part in parts)
        if size_bytes > CHUNK_BYTES_MAX:
            said = f"{size_bytes:,} bytes at once, and a server takes {CHUNK_BYTES_MAX:,}; append smaller batches"
            raise StorageError("put", f"{self.url}/{path}", said, is_transient=False)
        return Question("PUT", CHUNK + checked_path(path), parts, headers)

    def _carry_out(self, name: str, *arguments: Any) -> Any:
        signature = STORAGE_SIGNATURES[name]
        question = question_of(f"/verb/{OF_THE_STORAGE}/{name}", signature.bound(arguments, {}))
        return decode(self._client.ask(question, is_once=name not in REPEATED_STORAGE_VERBS), signature.gives)
