"""Which pipelines write to a stream of Pravega, which transactions they opened, and which they committed.

All this is a log beside the stream (``side_stream``). Claims are appended only if nothing came since the log was read;
so of two that claim at the same time one reads again. Pravega itself cannot list open transactions by their owner, and
forgets what became of them after a day.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import field
from typing import Any

from headgate.connectors.fenced_sink import Fence
from headgate.connectors.pravega.controller import Controller, StreamName
from headgate.connectors.pravega.side_stream import SideStream
from headgate.dataclass import dataclass
from headgate.environment import Environment
from headgate.errors import StorageError

CLAIMS_MAX = 200
"""So often another process may come first."""

LOG_BYTES_MAX = 64 << 10
"""A longer log is replaced by one record."""


@dataclass(slots=True)
class Known:
    """What the log has of one sink.

    Attributes:
        opened: ids of transactions → generation that opened them, unless it is known that they are decided.
        committed: ids → checkpoint.
    """

    generation: int = -1
    life: str = ""
    opened: dict[str, int] = field(default_factory=dict)
    committed: dict[str, int] = field(default_factory=dict)


class StreamOwner:
    """The log of the sinks in front of one stream. Every call may raise StorageError, and be repeated then."""

    def __init__(self, client: Controller, stream: StreamName, environment: Environment) -> None:
        self._side = SideStream(client, stream, "sinks", environment)
        self._known: dict[str, Known] = {}

    @property
    def name(self) -> str:
        """The name of the stream with the log."""
        return self._side.name

    def known(self, owner: str) -> Known:
        """Return what the log has of a sink now."""
        self._read()
        return self._known.setdefault(owner, Known())

    def fence(self, owner: str) -> Fence | None:
        """Return the fence of a sink, if there is one."""
        found = self.known(owner)
        return None if found.generation < 0 else Fence(owner, found.generation, found.life)

    def fences(self) -> list[Fence]:
        """Return the fences of all sinks."""
        self._read()
        return [fence for owner in list(self._known) if (fence := self.fence(owner)) is not None]

    def refuse_if_replaced(self, fence: Fence) -> None:
        """Raise if a newer generation has claimed the stream.

        Raises:
            FencedError
        """
        fence.refuse_if_older_than(self.known(fence.owner).generation)

    def claim(self, fence: Fence) -> None:
        """Remember ``fence``, in one step with the comparison.

        Raises:
            FencedError: a newer fence is there, or one of another life.
        """
        for _ in range(CLAIMS_MAX):
            known = self.fence(fence.owner)
            fence.refuse_if_replaced_by(known)
            if known == fence:
                return
            record = {"kind": "claim", "owner": fence.owner, "generation": fence.generation, "life": fence.life}
            if self._side.append_if_newest(record):
                return
        raise StorageError("claim", f"stream '{self.name}'", "others claim it all the time")

    def opened(self, fence: Fence, transaction: str) -> None:
        """Remember a transaction that was opened.

        Raises:
            FencedError: a newer generation has claimed the stream, and may not have seen it.
        """
        record = {"kind": "opened", "owner": fence.owner, "generation": fence.generation, "id": transaction}
        self._side.append(record)
        self.refuse_if_replaced(fence)

    def decided(self, owner: str, committed: Mapping[str, int], aborted: Iterable[str] = ()) -> None:
        """Remember what became of transactions. ``committed``: id → checkpoint."""
        record = {"kind": "decided", "owner": owner, "committed": dict(committed), "aborted": list(aborted)}
        if committed or record["aborted"]:
            self._side.append(record)

    def forget(self, owner: str, before: int, kept: Iterable[str]) -> None:
        """Forget what was committed for checkpoints below ``before``, but for ``kept``; keep the log short."""
        known, kept = self.known(owner), set(kept)
        if any(at < before and one not in kept for one, at in known.committed.items()):
            self._side.append({"kind": "forgotten", "owner": owner, "before": before, "kept": sorted(kept)})
        self._read()
        if self._side.length > LOG_BYTES_MAX:
            begin = self._side.read_to
            whole = {name: [one.generation, one.life, one.opened, one.committed] for name, one in self._known.items()}
            if self._side.append_if_newest({"kind": "whole", "owners": whole}):
                self._side.truncate(begin)

    def close(self) -> None:
        """Close the connection."""
        self._side.close()

    def _read(self) -> None:
        for record in self._side.news():
            self._apply(record)

    def _apply(self, record: Mapping[str, Any]) -> None:
        if record["kind"] == "whole":
            self._known = {name: Known(*parts) for name, parts in record["owners"].items()}
            return
        known = self._known.setdefault(record["owner"], Known())
        match record["kind"]:
            case "claim":
                known.generation, known.life = record["generation"], record["life"]
            case "opened":
                known.opened[record["id"]] = record["generation"]
            case "decided":
                known.committed |= record["committed"]
                for one in (*record["committed"], *record["aborted"]):
                    known.opened.pop(one, None)
            case "forgotten":
                kept = set(record["kept"])
                known.committed = {
                    one: at for one, at in known.committed.items() if at >= record["before"] or one in kept
                }
