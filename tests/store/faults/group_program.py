"""A writer to a stream, and a reader of a group on it, each for a process of its own.

A reader says in a file what it does, each line when it is done: that it has read events, that it has committed them,
that it was fenced, that it has ended.
"""

from __future__ import annotations

import json
import random
import time
from pathlib import Path

from tests.store.storing import STREAM, keyed

from headgate.errors import FencedError
from headgate.protocol.store.transactions import Status
from headgate.store.reader_groups import GroupReader
from headgate.store.store import Store

GROUP = "readers"
LEASE = "3s"
KEYS, BATCHES, BATCH_EVENTS = 4, 40, 10


def events_of(writer: str) -> list[tuple[str, int]]:
    """All events of a writer, in its order."""
    return [(f"{writer}-{n % KEYS}", n) for n in range(BATCHES * BATCH_EVENTS)]


def write(root: str, name: str, epoch: int) -> None:
    """Append what a former life of this writer has not: every third batch in a transaction."""
    store, events = Store.open(root), events_of(name)
    store.transactions.fence(name, epoch)
    found = store.list_transactions(owner=name)
    prepared = [(STREAM, x.name) for x in found if not x.status.is_terminal]
    if prepared:
        store.commit_transactions(prepared, owner=name, epoch=epoch)
    done = {int(x.name.split(".")[1]) for x in found if x.status is not Status.ABORTED}
    writer, appended = store.writer(STREAM, writer_id=name, epoch=epoch, linger=None), 0
    for number in range(BATCHES):
        batch = keyed(*events[number * BATCH_EVENTS : (number + 1) * BATCH_EVENTS])
        if number % 3 == 2:
            if number not in done:
                transaction = store.transactions.begin(STREAM, owner=name, epoch=epoch, name=f"{name}.{number}.{epoch}")
                transaction.write(batch)
                transaction.prepare()
                time.sleep(0.02)  # not a wait for anything
                store.commit_transactions([(STREAM, f"{name}.{number}.{epoch}")], owner=name, epoch=epoch)
            continue
        appended += 1
        if appended >= writer.next_sequence:
            writer.append(batch, sequence=appended)
            writer.flush()
            time.sleep(0.02)  # not a wait for anything


def read(root: str, name: str, log: Path) -> None:
    """Read until all is read; join anew when it was taken for dead."""
    store, chance = Store.open(root), random.Random(name)
    with log.open("a", encoding="utf-8") as lines:

        def say(what: str, rows: object = None) -> None:
            lines.write(json.dumps([what, time.monotonic_ns(), rows]) + "\n")
            lines.flush()

        life = 0
        while True:
            life += 1
            try:
                reader = store.reader_group(GROUP).join(
                    f"{name}.{life}", lease=LEASE, commit_every=None, busy_at_most=chance.choice((None, "1m"))
                )
                _read(reader, chance, say)
                say("ended")
                return
            except FencedError:
                say("fenced")


def _read(reader: GroupReader, chance: random.Random, say: object) -> None:
    assert callable(say)
    while not reader.has_ended:
        found = reader.read(chance.choice((7, 50)), timeout="500ms")
        rows = [] if found is None else list(zip(*found.batch.to_pydict().values(), strict=True))  # type: ignore[union-attr]
        if rows:
            say("read", rows)
        reader.commit()
        if rows:
            say("committed")
            time.sleep(chance.random() / 50)  # not a wait for anything
    reader.leave()
