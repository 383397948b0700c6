"""The store against a plain model: random histories of writers, transactions, fences, crashes and readers."""

from __future__ import annotations

import shutil
import tempfile
from collections import Counter
from pathlib import Path

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
    rule,
)
from tests.storage.faulty import Fault, FaultKind, FaultyStorage
from tests.store.storing import KEYED, STREAM, drain, keyed

from headgate.errors import CorruptionError, FencedError, StorageError
from headgate.storage.local import LocalStorage
from headgate.store.store import Store
from headgate.store.transactions import Transaction

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
