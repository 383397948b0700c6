"""A target in memory that looks at a clock, and sinks for it; each way to break them is one method."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import pyarrow as pa

import headgate as hg
from headgate.connectors.fenced_sink import OutputName
from headgate.connectors.ledger_sink import LedgerOutput
from headgate.testing.sinks.fake_pipeline import Target

LIMIT_MS = 60_000


@dataclass
class Place:
    """What is at the target. It ends what is open or prepared for longer than ``limit_ms`` (None: never)."""

    limit_ms: int | None = LIMIT_MS
    now_ms: int = 0
    opened: dict[str, int] = field(default_factory=dict)
    waiting: dict[str, list[dict[str, Any]]] = field(default_factory=dict)
    prepared: set[str] = field(default_factory=set)
    shown: list[dict[str, Any]] = field(default_factory=list)
    ledger: set[str] = field(default_factory=set)
    owners: dict[str, hg.Fence] = field(default_factory=dict)

    def advance(self, by_ms: int) -> None:
        self.now_ms += by_ms
        if self.limit_ms is not None:
            for name in [name for name, at in self.opened.items() if self.now_ms - at > self.limit_ms]:
                self.drop(name)

    def drop(self, name: str) -> None:
        self.opened.pop(name, None)
        self.waiting.pop(name, None)
        self.prepared.discard(name)

    def refuse_if_replaced(self, fence: hg.Fence) -> None:
        fence.refuse_if_replaced_by(self.owners.get(fence.owner))


class StagedSink(hg.TwoPhaseSink[str]):
    """Two phases, done right."""

    transaction_timeout = "60s"

    def __init__(self, place: Place) -> None:
        self.place = place

    def begin(self, name: str, schema: pa.Schema) -> str:
        self.place.opened[name], self.place.waiting[name] = self.place.now_ms, []
        return name

    def write(self, transaction: str, batch: pa.RecordBatch) -> None:
        if transaction not in self.place.opened:
            raise hg.UsageError(f"transaction {transaction} was ended by the target: it was open for too long")
        self.place.waiting[transaction] += batch.to_pylist()

    def prepare(self, transaction: str, name: str, fence: hg.Fence) -> None:
        self.place.refuse_if_replaced(fence)
        if name not in self.place.opened:
            raise hg.UsageError(f"transaction {name} was ended by the target: it was open for too long")
        self.place.prepared.add(name)

    def claim(self, fence: hg.Fence) -> None:
        self.place.refuse_if_replaced(fence)
        self.place.owners[fence.owner] = fence

    def claimed(self, owner: str) -> hg.Fence | None:
        return self.place.owners.get(owner)

    def all_claimed(self) -> Iterable[hg.Fence]:
        return self.place.owners.values()

    def prepared(self, owner: str) -> Iterable[str]:
        return [name for name in self.place.opened if name.startswith(owner)]

    def commit(self, names: Sequence[str], fence: hg.Fence) -> None:
        self.place.refuse_if_replaced(fence)
        for name in names:
            if name not in self.place.ledger and name not in self.place.prepared:
                self.is_gone(name)
        for name in names:
            if name not in self.place.ledger and name in self.place.prepared:
                self.show(name)

    def is_gone(self, name: str) -> None:
        raise hg.UsageError(f"{name} is not there any more: the target ended it, because nobody decided it for 60 s")

    def show(self, name: str) -> None:
        self.place.shown += self.place.waiting[name]
        self.place.ledger.add(name)
        self.place.drop(name)

    def abort(self, name: str, fence: hg.Fence) -> None:
        self.place.refuse_if_replaced(fence)
        self.place.drop(name)


class ForgettingSink(StagedSink):
    """One that also forgets what nobody asks for."""

    def committed(self, owner: str) -> Iterable[str]:
        return sorted(self.place.ledger)

    def forget(self, names: Sequence[str]) -> None:
        self.place.ledger -= set(names)


class StagedLedger(hg.LedgerSink):
    """A ledger, done right: its target ends nothing, because nothing is open there."""

    def __init__(self, place: Place) -> None:
        self.place = place

    def claim(self, fence: hg.Fence) -> None:
        self.place.refuse_if_replaced(fence)
        self.place.owners[fence.owner] = fence

    def claimed(self, owner: str) -> hg.Fence | None:
        return self.place.owners.get(owner)

    def all_claimed(self) -> Iterable[hg.Fence]:
        return self.place.owners.values()

    def publish(self, outputs: Sequence[LedgerOutput], fence: hg.Fence) -> None:
        self.place.refuse_if_replaced(fence)
        new = [output for output in outputs if output.name not in self.place.ledger]
        rows = [row for output in new for batch in output for row in batch.to_pylist()]
        self.place.shown += rows
        self.place.ledger |= {output.name for output in new}

    def forget(self, owner: str, before: int) -> None:
        mine = [name for name in self.place.ledger if name.startswith(f"{owner}-")]
        self.place.ledger -= {name for name in mine if hg.output_checkpoint(name) < before}


def number_of(name: str) -> int:
    """Return the number in the name of a transaction or an output."""
    found = OutputName.parse(name)
    assert found is not None
    return found.number


def at(kind: Any, limit_ms: int | None = LIMIT_MS) -> Target:
    """A fresh target with such a sink."""
    place = Place(limit_ms)
    return Target(
        kind(place),
        read=lambda: list(place.shown),
        leftovers=lambda: sorted(place.waiting),
        advance_clock=place.advance,
        is_ordered=True,
    )
