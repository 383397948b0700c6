"""Random histories against plain models: of the store, and of transactions that several participants write."""

from __future__ import annotations

import shutil
import tempfile
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    consumes,
    initialize,
    invariant,
    multiple,
    precondition,
    rule,
)
from tests.storage.faulty import Fault, FaultKind, FaultyStorage
from tests.store.storing import KEYED, STREAM, Clock, drain, keyed

from headgate.errors import CorruptionError, FencedError, HeadgateError, StorageError, UsageError
from headgate.storage.local import LocalStorage
from headgate.storage.memory import MemoryStorage
from headgate.store.catalogue.base import Catalogue
from headgate.store.catalogue.sql import memory_catalogue
from headgate.store.maintenance import MAINTENANCE_INTERVAL_MS
from headgate.store.store import Store
from headgate.store.transactions import SharedTransaction, Transaction, TransactionWriter

keys = st.lists(st.sampled_from("abcdef"), min_size=1, max_size=5)
OWNER = "p/sink"


class StoreMachine(RuleBasedStateMachine):
    """Every event carries a number of its own, so that loss, repetition and order are all visible."""

    opened = Bundle("opened")
    prepared = Bundle("prepared")

    @initialize()
    def open(self) -> None:
        self.root = tempfile.mkdtemp()
        self.visible: list[tuple[str, int]] = []  # in the order they became visible
        self.contents: dict[str, list[tuple[str, int]]] = {}
        self.outcome: dict[str, str] = {}
        self.epoch = 1
        self.number = 0
        self._reopen()
        self.store.create_stream(STREAM, KEYED, segments=3, routing_key="key")
        self.writer = self.store.writer(STREAM, linger=None)
        self.waiting: list[tuple[str, int]] = []
        self.positions: dict[int, int] = {}
        self.read: list[tuple[str, int]] = []

    def _reopen(self) -> None:
        self.disk = FaultyStorage(LocalStorage(Path(self.root) / "chunks"))
        self.store = Store.open(self.root, storage=self.disk)

    def _rows(self, names: list[str]) -> list[tuple[str, int]]:
        self.number += len(names)
        return [(name, self.number - i) for i, name in enumerate(reversed(names))][::-1]

    @rule(names=keys)
    def append(self, names: list[str]) -> None:
        rows = self._rows(names)
        self.writer.append(keyed(*rows))
        self.waiting += rows

    @rule(is_full=st.booleans())
    def flush(self, is_full: bool) -> None:
        if is_full and self.waiting:
            self.disk.inject(Fault(FaultKind.NO_SPACE, "put"))
            try:
                self.writer.flush()
                raise AssertionError("acknowledged on a full disk")
            except StorageError:
                return
            finally:
                self.disk.heal()
        self.writer.flush()
        self.visible += self.waiting
        self.waiting = []

    @rule(target=opened, batches=st.lists(keys, max_size=3))
    def begin(self, batches: list[list[str]]) -> tuple[Transaction, int]:
        name = f"t{self.number}-{len(self.contents)}"
        transaction = self.store.transactions.begin(STREAM, owner=OWNER, epoch=self.epoch, name=name)
        rows = []
        for names in batches:
            rows += self._rows(names)
            transaction.write(keyed(*rows[len(rows) - len(names) :]))
        self.contents[name] = rows
        return transaction, self.epoch

    @rule(target=prepared, item=consumes(opened))
    def prepare(self, item: tuple[Transaction, int]) -> object:
        transaction, epoch = item
        try:
            transaction.prepare()
        except FencedError:
            assert epoch < self.epoch
            return multiple()
        except CorruptionError:
            assert self.outcome[transaction.name] == "aborted"
            return multiple()
        assert epoch == self.epoch
        self.outcome.setdefault(transaction.name, "prepared")
        return transaction.name

    @rule(names=st.lists(prepared, min_size=1, max_size=3, unique=True))
    def commit(self, names: list[str]) -> None:
        try:
            self.store.commit_transactions([(STREAM, n) for n in names], owner=OWNER, epoch=self.epoch)
        except CorruptionError:
            assert any(self.outcome[n] == "aborted" for n in names)
            return
        for name in names:
            assert self.outcome[name] != "aborted"
            if self.outcome[name] == "prepared":
                self.outcome[name] = "committed"
                self.visible += self.contents[name]

    @rule(name=prepared)
    def abort(self, name: str) -> None:
        try:
            self.store.transactions.abort(STREAM, name, owner=OWNER, epoch=self.epoch)
        except CorruptionError:
            assert self.outcome[name] == "committed"
            return
        assert self.outcome[name] != "committed"
        self.outcome[name] = "aborted"

    @rule(keep=st.lists(prepared, max_size=2))
    def crash_and_recover(self, keep: list[str]) -> None:
        """The process dies with what it had not flushed; a new generation takes over."""
        self.store.close()
        self._reopen()
        self.writer = self.store.writer(STREAM, linger=None)
        self.waiting = []
        self.epoch += 1
        aborted = self.store.transactions.recover(STREAM, owner=OWNER, epoch=self.epoch, keep=keep)
        undecided = {n for n, outcome in self.outcome.items() if outcome == "prepared"}
        assert set(aborted) == undecided - set(keep)
        self.outcome |= dict.fromkeys(aborted, "aborted")

    @rule(at=st.integers(0, 5), does_split=st.booleans())
    def scale(self, at: int, does_split: bool) -> None:
        """Writers and transactions that are open, prepared or on their way know nothing of it."""
        present = [segment.segment_id for segment in self.store.layout(STREAM).present]
        at %= len(present)
        if does_split and len(present) < 8:
            self.store.split(STREAM, present[at])
        elif at + 1 < len(present):
            self.store.merge(STREAM, present[at : at + 2])

    @rule(segment=st.integers(0, 20), rows_max=st.integers(1, 5))
    def read_on(self, segment: int, rows_max: int) -> None:
        segment %= len(self.store.describe(STREAM).ends)
        reader = self.store.reader(STREAM, segment, self.positions.get(segment))
        batch = reader.read(rows_max)
        if batch is not None:
            self.read += list(zip(*batch.to_pydict().values(), strict=True))
        self.positions[segment] = reader.position

    @invariant()
    def what_is_visible_is_what_was_acknowledged_or_committed(self) -> None:
        found = [row for segment in drain(self.store) for row in segment]
        assert Counter(found) == Counter(self.visible)
        for key in "abcdef":
            order = [n for k, n in found if k == key]
            assert order == [n for k, n in self.visible if k == key]
        assert not Counter(self.read) - Counter(found)  # I2: nothing seen is withdrawn

    def teardown(self) -> None:
        if not hasattr(self, "store"):
            return
        assert [p for p in self.store.fsck() if not p.is_harmless] == []
        self.store.close()
        shutil.rmtree(self.root)


StoreMachine.TestCase.settings = settings(max_examples=15, stateful_step_count=25)
TestStoreMachine = StoreMachine.TestCase
pytest.mark.long(TestStoreMachine)


LEASES_MS = (200, 1_000, 60_000)
Row = tuple[str, int]
VERBS = ("join_shared", "write_shared", "ping_shared", "decide_shared")
faults = st.sampled_from(("none", "none", "none", "before", "after"))


class Lossy:
    """A catalogue whose next verb of a shared transaction fails before its effect, or behind it."""

    def __init__(self, behind: Catalogue) -> None:
        self._behind = behind
        self.fault = "none"

    def __getattr__(self, verb: str) -> Any:
        found = getattr(self._behind, verb)
        return (lambda *args: self._run(verb, found, args)) if verb in VERBS else found

    def _run(self, verb: str, call: Callable[..., Any], args: tuple[Any, ...]) -> Any:
        fault, self.fault = self.fault, "none"
        if fault == "before":
            raise StorageError(verb, "catalogue", "lost")
        answer = call(*args)
        if fault == "after":
            raise StorageError(verb, "catalogue", "lost")
        return answer


@dataclass
class Model:
    """What must be recorded of a transaction."""

    transaction: SharedTransaction
    lease_ms: int
    due_ms: int
    status: str = "open"
    suspected_ms: int | None = None
    rows: list[Row] = field(default_factory=list)
    sequences: dict[str, int] = field(default_factory=dict)
    lives: dict[str, object] = field(default_factory=dict)

    def live(self, now_ms: int) -> None:
        self.due_ms, self.suspected_ms = now_ms + self.lease_ms, None

    def look(self, now_ms: int) -> None:
        if self.status != "open" or now_ms < self.due_ms:
            return
        if self.suspected_ms is None:
            self.suspected_ms = now_ms
        elif now_ms - self.suspected_ms >= self.lease_ms // 2:
            self.status = "aborted"


@dataclass
class Writing:
    """A writer, and what must be on its way with it."""

    model: Model
    name: str
    writer: TransactionWriter
    next: int
    taken: int
    buffer: list[Row] = field(default_factory=list)
    way: tuple[int, int, list[Row]] | None = None
    is_over: bool = False


class SharedTransactionMachine(RuleBasedStateMachine):
    """Every event carries a number of its own, so that loss, repetition and order are all visible."""

    begun = Bundle("begun")
    writers = Bundle("writers")

    @initialize()
    def open(self) -> None:
        self.clock = Clock()
        behind, chunks = memory_catalogue("memory"), MemoryStorage()
        self.lossy = Lossy(behind)
        self.store = Store("memory", cast(Catalogue, self.lossy), chunks, clock=self.clock)
        self.store.create_stream(STREAM, KEYED, segments=2, routing_key="key")
        self.visible: list[Row] = []
        self.models: list[Model] = []
        self.number = 0
        self.look_due_ms = self.clock.monotonic_ms()

    # -- what happens ------------------------------------------------------------------------------------------------

    @precondition(lambda self: len([model for model in self.models if model.status == "open"]) < 2)
    @rule(target=begun, lease_ms=st.sampled_from(LEASES_MS))
    def begin(self, lease_ms: int) -> Model:
        self._look()
        transaction = self.store.begin_shared(STREAM, lease=f"{lease_ms}ms")
        self.models.append(Model(transaction, lease_ms, self.clock.wall_ms() + lease_ms))
        return self.models[-1]

    @rule(target=writers, model=begun, name=st.sampled_from("ab"), fault=faults)
    def join(self, model: Model, name: str, fault: str) -> object:
        """A participant comes, or comes again, in another process; an answer that was lost costs it another try."""
        other = Store("memory", self.store._core.catalogue, self.store._core.storage, clock=self.clock)
        if model.status != "forgotten":  # whoever asks for what is not there is told so, and looks at nothing else
            self._look()
        writer = None
        for tried in (fault, "none"):
            self.lossy.fault = tried
            with suppress(StorageError):
                try:
                    writer = other.transaction(STREAM, model.transaction.id).writer(name)
                    break
                except FencedError:
                    assert model.status in ("prepared", "committed", "aborted")
                    break
                except UsageError:
                    assert model.status == "forgotten"
                    break
        self.lossy.fault = "none"
        if writer is None:
            assert model.status != "open"
            return multiple()
        assert model.status == "open"
        model.live(self.clock.wall_ms())
        last = model.sequences.setdefault(name, 0)
        assert writer.next_sequence == last + 1
        model.lives[name] = writer
        return Writing(model, name, writer, last + 1, last)

    @rule(
        writing=writers,
        keys=st.lists(st.sampled_from("xyz"), max_size=3),
        back=st.sampled_from((0, 0, 0, 1, 2)),
        flushes=st.booleans(),
        fault=faults,
    )
    def write(self, writing: Writing, keys: list[str], back: int, flushes: bool, fault: str) -> None:
        """Perhaps again what was written before, and perhaps it is flushed at once."""
        if writing.is_over:
            return
        sequence = writing.next - back
        rows = [(key, self._next()) for key in keys]
        if sequence < 1:
            return
        writing.writer._heard_ms = self.clock.monotonic_ms()  # when it pings is told by other tests
        writing.writer.write(keyed(*rows), sequence=sequence)
        if back == 0:
            writing.buffer += rows
            writing.next += 1
        if flushes:
            self._flush_it(writing, fault)

    @rule(writing=writers, fault=faults)
    def flush(self, writing: Writing, fault: str) -> None:
        if not writing.is_over:
            self._flush_it(writing, fault)

    def _flush_it(self, writing: Writing, fault: str) -> None:
        self.lossy.fault = fault
        expected = self._flush(writing, fault)
        try:
            writing.writer.flush()
            found = "done"
        except StorageError:
            found = "lost"
        except FencedError:
            found = "fenced"
        except UsageError:
            found = "unknown"
        self.lossy.fault = "none"
        assert found == expected
        writing.is_over = found in ("fenced", "unknown")

    @rule(model=begun, verb=st.sampled_from(("ping", "ping", "prepare", "commit", "abort")), fault=faults)
    def decide(self, model: Model, verb: str, fault: str) -> None:
        self.lossy.fault = fault
        expected = "lost" if fault == "before" else self._decide(model, verb)
        if fault == "after" and expected == "done":
            expected = "lost"
        try:
            getattr(model.transaction, verb)()
            found = "done"
        except StorageError:
            found = "lost"
        except FencedError:
            found = "fenced"
        except UsageError:
            found = "unknown"
        self.lossy.fault = "none"
        assert found == expected
        if verb == "commit" and found == "done":
            self._look_once_a_minute()

    @rule(ms=st.sampled_from((0, 50, 100, 500, 1_000, 30_000)))
    def wait(self, ms: int) -> None:
        self.clock.now_ms += ms

    @rule()
    def look(self) -> None:
        self._look()
        self.store.expire_transactions(STREAM)

    @rule(model=begun)
    def forget(self, model: Model) -> None:
        self.store.transactions.forget_outcomes([model.transaction.id], owner="writers", epoch=0)
        if model.status in ("committed", "aborted"):
            model.status = "forgotten"

    @rule(at=st.integers(0, 3), does_split=st.booleans())
    def scale(self, at: int, does_split: bool) -> None:
        present = [segment.segment_id for segment in self.store.layout(STREAM).present]
        at %= len(present)
        if does_split and len(present) < 6:
            self.store.split(STREAM, present[at])
        elif at + 1 < len(present):
            self.store.merge(STREAM, present[at : at + 2])

    # -- the model ---------------------------------------------------------------------------------------------------

    def _next(self) -> int:
        self.number += 1
        return self.number

    def _look(self) -> None:
        for model in self.models:
            model.look(self.clock.wall_ms())

    def _look_once_a_minute(self) -> None:
        """Whoever makes events visible looks at leases, too (S71)."""
        if self.clock.monotonic_ms() >= self.look_due_ms:
            self.look_due_ms = self.clock.monotonic_ms() + MAINTENANCE_INTERVAL_MS
            self._look()

    def _flush(self, writing: Writing, fault: str) -> str:
        """Have what is on its way recorded, then what is buffered."""
        is_first = True
        if writing.way is None and writing.taken == writing.next - 1:
            if self.clock.monotonic_ms() == writing.writer._heard_ms:
                return "done"
            answer = "lost" if fault == "before" else self._decide(writing.model, "ping")
            return "lost" if fault == "after" and answer == "done" else answer
        while writing.way is not None or writing.taken < writing.next - 1:
            if writing.way is None:
                writing.way = (writing.taken + 1, writing.next - 1, writing.buffer)
                writing.taken, writing.buffer = writing.next - 1, []
            fails = fault if is_first else "none"
            is_first = False
            if fails == "before":
                return "lost"
            answer = self._record(writing)
            if answer != "done":
                return answer
            if fails == "after":
                return "lost"
            writing.way = None
        return "done"

    def _record(self, writing: Writing) -> str:
        model, way = writing.model, writing.way
        assert way is not None
        if model.status == "forgotten":
            return "unknown"
        if model.status == "aborted" or model.lives[writing.name] is not writing.writer:
            return "fenced"
        if model.sequences[writing.name] >= way[1]:
            return "done"
        if model.status != "open":
            return "fenced"
        model.sequences[writing.name] = way[1]
        model.rows += way[2]
        model.live(self.clock.wall_ms())
        return "done"

    def _decide(self, model: Model, verb: str) -> str:
        if model.status == "forgotten":
            return "unknown"
        allowed = {
            "ping": {"open", "prepared", "committed"},
            "prepare": {"open", "prepared", "committed"},
            "commit": {"open", "prepared", "committed"},
            "abort": {"open", "prepared", "aborted"},
        }
        if model.status not in allowed[verb]:
            return "fenced"
        if verb == "ping" and model.status == "open":
            model.live(self.clock.wall_ms())
        if verb == "prepare" and model.status == "open":
            model.status = "prepared"
        if verb == "commit" and model.status != "committed":
            model.status = "committed"
            self.visible += model.rows
        if verb == "abort":
            model.status = "aborted"
        return "done"

    # -- what must hold ----------------------------------------------------------------------------------------------

    @invariant()
    def what_is_visible_was_committed_whole_and_in_order(self) -> None:
        found = [row for segment in drain(self.store) for row in segment]
        assert sorted(found) == sorted(self.visible)
        for key in "xyz":
            assert [n for k, n in found if k == key] == [n for k, n in self.visible if k == key]
        recorded = {info.name: info for info in self.store.list_transactions()}
        for model in self.models:
            info = recorded.get(model.transaction.id)
            assert (info.status.value if info else "forgotten") == model.status
            if info is not None and model.status != "aborted":
                assert info.events_count == len(model.rows)
            if info is not None:
                assert (info.due_ms is not None) == (model.status == "open")

    def teardown(self) -> None:
        if not hasattr(self, "store"):
            return
        self.lossy.fault = "none"
        for model in self.models:
            with suppress(HeadgateError):
                model.transaction.abort()
        assert [p for p in self.store.fsck() if not p.is_harmless] == []
        self.store.collect_orphans()
        assert self.store.fsck() == []


SharedTransactionMachine.TestCase.settings = settings(max_examples=25, stateful_step_count=40)
TestSharedTransactions = SharedTransactionMachine.TestCase
pytest.mark.long(TestSharedTransactions)
