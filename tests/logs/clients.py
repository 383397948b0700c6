"""Clients of a stream, each in a process that may be killed, stopped and replaced at any moment.

Counterpart: ``faults`` starts and harms them, ``history`` keeps what they have done. Source:
docs/spec/log-histories.md. Each value is there once: a life never repeats what a former one sent.
"""

from __future__ import annotations

import contextlib
import os
import random
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import pyarrow as pa
from tests.logs import bugs
from tests.logs.history import Outcome, Place, Poll, Recorder, Seek, Send

from headgate import fault_points
from headgate.errors import FencedError, StorageError, UsageError
from headgate.protocol.store.transactions import Status
from headgate.store.reader_groups import GroupEvents, GroupReader
from headgate.store.store import Store
from headgate.store.transactions import Transaction
from headgate.store.writer import Appended

STREAM, GROUP = "app/events", "members"
SCHEMA = pa.schema([pa.field("key", pa.string()), pa.field("value", pa.string())])
Result = TypeVar("Result")
KEYS = 3
LEASE = "2s"
ENOUGH, FULL, DATE = "enough", "full", "date"
"""Files beside the logs: clients come to their end; no chunk can be written; the date is so many ms ahead."""


@dataclass(frozen=True, slots=True)
class Orders:
    """What a process is told when it is started."""

    root: str
    logs: str
    client: str
    life: int
    kill_at: str = ""
    """See ``headgate.fault_points``."""
    environment: tuple[tuple[str, str], ...] = ()
    bug: str = ""
    """The name of one of ``bugs``, which is planted in it."""


class Client:
    """One life."""

    def __init__(self, orders: Orders, store: Store) -> None:
        self.name, self.life = orders.client, orders.life
        self.logs = Path(orders.logs)
        self.store = store
        self.recorder = Recorder(self.logs, orders.client, orders.life)
        self.chance = random.Random(f"{orders.client}.{orders.life}")
        self._sent = 0

    @property
    def goes_on(self) -> bool:
        """Whether nobody has told it to come to its end."""
        return not (self.logs / ENOUGH).exists()

    def rests(self) -> None:
        """Leave the machine to others."""
        time.sleep(self.chance.random() / 25)  # the pace: not a wait for anything

    def sends(self, *, of_one_key: bool = False) -> list[Send]:
        """Return events that nobody has sent before."""
        only = self.chance.randrange(KEYS)
        found = []
        for _ in range(self.chance.randint(1, 6)):
            self._sent += 1
            key = only if of_one_key else self.chance.randrange(KEYS)
            found.append(Send(f"{self.name}-k{key}", f"{self.recorder.process}-{self._sent}"))
        return found


def batch_of(sends: Sequence[Send]) -> pa.RecordBatch:
    return pa.record_batch([[x.key for x in sends], [x.value for x in sends]], schema=SCHEMA)


def insistently(act: Callable[[], Result]) -> Result:
    """Repeat what fails for a while: a full disk, a server that is away. Every act here may be repeated."""
    while True:
        try:
            return act()
        except StorageError as error:
            if not error.is_transient:
                raise
            time.sleep(0.05)  # the pace: not a wait for anything


# -- who writes --------------------------------------------------------------------------------------------------------


def appends(me: Client) -> None:
    """Append numbered batches; what a former life was not told the numbers of this one tell."""
    writer = insistently(lambda: me.store.writer(STREAM, writer_id=me.name, epoch=me.life, linger=None))
    me.recorder.opens(writer.next_sequence)
    for process, number, begin in me.recorder.unanswered():
        is_there = begin["sequence"] < me.recorder.next_began_with(process)
        me.recorder.resolve(process, number, Outcome.OK if is_there else Outcome.FAILED)
    while me.goes_on:
        begun = []
        for _ in range(me.chance.randint(1, 3)):  # those of one flush
            of_one_key = me.chance.random() < 0.5
            sends = me.sends(of_one_key=of_one_key)
            number = me.recorder.begin(sends, sequence=writer.next_sequence)
            begun.append((number, of_one_key, writer.append(batch_of(sends))))
        insistently(writer.flush)
        for number, of_one_key, future in begun:
            me.recorder.end(number, places=_places(future.result(0)) if of_one_key else None)
        me.rests()


def _places(appended: Appended) -> list[Place]:
    return [Place(x.segment, x.start + n) for x in appended.ranges for n in range(x.events_count)]


def transacts(me: Client) -> None:
    """Write transactions, some of several parts, some of which are aborted, some of which are committed in one step."""
    insistently(lambda: me.store.transactions.fence(me.name, me.life))
    _settle(me)
    count = 0
    while me.goes_on:
        names = [f"{me.name}.{me.life}.{count + n}" for n in range(me.chance.randint(1, 2))]
        count += len(names)
        parts = {name: me.sends() for name in names}
        number = me.recorder.begin([send for sends in parts.values() for send in sends], names=names)
        for name, sends in parts.items():
            transaction = insistently(lambda name=name: _begun(me, name))  # type: ignore[misc]
            for send in sends:
                transaction.write(batch_of([send]))
            insistently(transaction.prepare)
        me.rests()
        _decide(me, names, number)


def _begun(me: Client, name: str) -> Transaction:
    return me.store.transactions.begin(STREAM, owner=me.name, epoch=me.life, name=name)


def _decide(me: Client, names: Sequence[str], number: int) -> None:
    if me.chance.random() < 0.25:
        for name in names:
            insistently(lambda name=name: _abort(me, name))  # type: ignore[misc]
        me.recorder.end(number, Outcome.FAILED)
        return
    me.recorder.shows(number)
    insistently(lambda: _commit(me, names))
    me.recorder.end(number)


def _commit(me: Client, names: Sequence[str]) -> None:
    me.store.commit_transactions([(STREAM, name) for name in names], owner=me.name, epoch=me.life)


def _abort(me: Client, name: str) -> None:
    me.store.transactions.abort(STREAM, name, owner=me.name, epoch=me.life)


def _settle(me: Client) -> None:
    """Decide what former lives left, all of an operation alike; say what became of the rest."""
    recorded = {x.name: x.status for x in insistently(lambda: me.store.list_transactions(owner=me.name))}
    for process, number, begin in me.recorder.unanswered():
        statuses = {recorded.get(name) for name in begin["names"]}
        if statuses == {Status.PREPARED} and me.chance.random() < 0.5:
            me.recorder.shows_of(process, number)
            insistently(lambda begin=begin: _commit(me, begin["names"]))  # type: ignore[misc]
            statuses = {Status.COMMITTED}
        if statuses != {Status.COMMITTED}:
            for name in begin["names"]:
                insistently(lambda name=name: _abort(me, name))  # type: ignore[misc]
        me.recorder.resolve(process, number, Outcome.OK if statuses == {Status.COMMITTED} else Outcome.FAILED)


def shares(me: Client) -> None:
    """Begin transactions that others write as well; commit them, abort them, or leave them to their lease."""
    while me.goes_on:
        with contextlib.suppress(FencedError, UsageError):  # its lease is over
            transaction = insistently(lambda: me.store.begin_shared(STREAM, lease=LEASE, owner=me.name))
            _writes_to(me, transaction.id)
            me.rests()
            match me.chance.choice(("commit", "commit", "prepare", "abort", "leave")):
                case "commit" | "prepare" as how:
                    if how == "prepare":
                        insistently(transaction.prepare)
                    me.recorder.of_transaction(transaction.id, "asked")
                    insistently(transaction.commit)
                    me.recorder.of_transaction(transaction.id, "committed")
                case "abort":
                    insistently(transaction.abort)


def takes_part(me: Client) -> None:
    """Write to whichever shared transaction is open."""
    while me.goes_on:
        known = insistently(lambda: me.store.list_transactions(stream=STREAM))
        found = [x.name for x in known if x.status is Status.OPEN]
        if found:
            with contextlib.suppress(FencedError, UsageError):
                _writes_to(me, me.chance.choice(found))
        me.rests()


def _writes_to(me: Client, transaction: str) -> None:
    writer = insistently(lambda: me.store.transaction(STREAM, transaction).writer(me.name))
    for _ in range(me.chance.randint(1, 2)):
        sends = me.sends()
        number = me.recorder.begin(sends, transaction=transaction)
        writer.write(batch_of(sends))
        insistently(writer.flush)
        me.recorder.end(number)


# -- who reads ---------------------------------------------------------------------------------------------------------


def observes(me: Client) -> None:
    """Read all segments in turn, a few events at a time, and begin again somewhere now and then."""
    readers = {}
    while me.goes_on:
        segment = me.chance.randrange(len(insistently(lambda: me.store.layout(STREAM)).segments))
        seeks = segment not in readers or me.chance.random() < 0.05
        if seeks:
            begin = me.chance.randint(0, readers[segment].position) if segment in readers else 0
            readers[segment] = insistently(lambda: me.store.reader(STREAM, segment, begin))  # noqa: B023
        reader, most = readers[segment], me.chance.choice((2, 9, 1_000))
        at, number = reader.position, me.recorder.begin()
        batch = insistently(lambda: reader.read(most))  # noqa: B023
        poll = poll_of(segment, at, batch, is_end=batch is None or batch.num_rows < most)
        me.recorder.has_read(number, [Seek(segment), poll] if seeks else [poll])
        me.recorder.end(number)
        if me.chance.random() < 0.2:
            me.rests()


def poll_of(segment: int, at: int, batch: pa.RecordBatch | None, *, is_end: bool) -> Poll:
    """Return what a read from position ``at`` on has returned."""
    values = [] if batch is None else batch.column("value").to_pylist()
    return Poll(segment, tuple(enumerate(values, at)), at + len(values) if is_end else None)


def joins(me: Client) -> None:
    """Read as a member of a group until all is read; leave and join now and then, and when it was taken for dead."""
    count = 0
    while True:
        count += 1
        name = f"{me.recorder.process}.{count}"
        with contextlib.suppress(FencedError):
            busy = me.chance.choice((None, "10s"))  # whoever is killed keeps its share for so long
            member = insistently(lambda: _joined(me, name, busy))  # noqa: B023
            if _processes(me, member, me.chance.randint(5, 60)):
                return


def _joined(me: Client, name: str, busy: str | None) -> GroupReader:
    return me.store.reader_group(GROUP).join(name, lease=LEASE, commit_every=None, busy_at_most=busy, takes_over=True)


def _processes(me: Client, member: GroupReader, reads: int) -> bool:
    """Read and commit so often, then leave; return whether all is read."""
    while not member.has_ended and (reads > 0 or not me.goes_on):
        reads -= 1
        number = me.recorder.begin(group=GROUP)
        tries: list[int] = []
        try:
            found = insistently(lambda: member.read(me.chance.choice((3, 20)), timeout="300ms"))
            if isinstance(found, GroupEvents):
                poll = poll_of(found.segment, found.position, found.batch, is_end=False)
                me.recorder.has_read(number, [Seek(found.segment), poll])
            insistently(lambda: (tries.append(number), member.commit()))  # noqa: B023
        except FencedError:  # refused; a try before it may have taken effect without an answer
            me.recorder.end(number, Outcome.FAILED if len(tries) < 2 else Outcome.UNKNOWN)
            raise
        me.recorder.end(number)
        if me.chance.random() < 0.3:
            me.rests()
    insistently(member.leave)
    return member.has_ended


ROLES: dict[str, Callable[[Client], None]] = {
    "append": appends,
    "transact": transacts,
    "share": shares,
    "participate": takes_part,
    "observe": observes,
    "member": joins,
}
"""What a client does, by how its name begins."""


# -- the process -------------------------------------------------------------------------------------------------------


def run(orders: Orders) -> None:
    """Live, in a process of its own."""
    os.environ.update(orders.environment)
    if orders.kill_at:
        os.environ[fault_points.VARIABLE] = orders.kill_at
    logs = Path(orders.logs)
    _obey(logs)
    if orders.bug:
        bugs.PLANTED[orders.bug]()
    role = ROLES[orders.client.rstrip("0123456789")]
    with contextlib.suppress(FencedError), insistently(lambda: Store.open(orders.root)) as store:
        role(Client(orders, store))  # fenced: another life has taken its place


def _obey(logs: Path) -> None:
    """Have the disk be full, and the date be another one, for as long as files say so."""
    from headgate.environment import SystemClock
    from headgate.storage.local import LocalStorage, storage_error

    put, wall_ms = LocalStorage.put, SystemClock.wall_ms

    def failing_put(self: LocalStorage, path: str, parts: object) -> None:
        if (logs / FULL).exists():
            raise storage_error("put", path, OSError(28, "No space left on device"))
        put(self, path, parts)  # type: ignore[arg-type]

    def moved_ms(self: SystemClock) -> int:
        with contextlib.suppress(OSError, ValueError):
            return wall_ms(self) + int((logs / DATE).read_text())
        return wall_ms(self)

    LocalStorage.put = failing_put  # type: ignore[method-assign]
    SystemClock.wall_ms = moved_ms  # type: ignore[method-assign]


def everything(store: Store, recorder: Recorder) -> None:
    """Read all segments to their end, when nobody else does anything any more."""
    for segment in range(len(store.describe(STREAM).ends)):
        reader = store.reader(STREAM, segment, 0)
        for _ in _batches(recorder, segment, reader.position, lambda reader=reader: reader.read()):  # type: ignore[misc]
            pass


def _batches(
    recorder: Recorder, segment: int, at: int, read: Callable[[], pa.RecordBatch | None]
) -> Iterator[pa.RecordBatch]:
    while True:
        number = recorder.begin()
        batch = read()
        recorder.has_read(number, [poll_of(segment, at, batch, is_end=batch is None)])
        recorder.end(number)
        if batch is None:
            return
        at += batch.num_rows
        yield batch
