"""Storage that notes how it is looked at: what costs time where it is far away is counted, not timed."""

from __future__ import annotations

from headgate.storage.memory import MemoryStorage


class Looked(MemoryStorage):
    """Notes what is listed and read."""

    def __init__(self) -> None:
        super().__init__("looked")
        self.seen: list[str] = []

    def list(self, prefix: str) -> list[str]:
        self.seen.append(prefix)
        return super().list(prefix)

    def get(self, path: str) -> bytes:
        self.seen.append(path)
        return super().get(path)
