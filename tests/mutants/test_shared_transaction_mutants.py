"""Mutants of transactions that several processes write: of what is decided, and of how the store carries it out."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa
from hypothesis import Phase, settings
from hypothesis.stateful import run_state_machine_as_test
from tests.mutants.harness import Mutant, assert_caught, patched
from tests.protocol.store import test_shared_decisions as decisions
from tests.store import test_shared_transaction_machine as histories
from tests.store import test_shared_transactions as stored

from headgate.protocol.store import shared_transactions as machine
from headgate.protocol.store.shared_transactions import Abort, Apply, Commit, Done, Expire, Leave, Participant
from headgate.protocol.store.transactions import RefuseUnknown, Status
from headgate.store import shared_transaction, transaction_writer, transactional_store
from headgate.store.catalogue import outcomes, shared, streams
from headgate.store.catalogue import tables as t
from headgate.store.catalogue import transactions as recording
from headgate.store.chunks import delete_quietly
from headgate.store.store import Store
from headgate.store.transaction_writer import TransactionWriter


def whatever_is_flushed_is_recorded() -> AbstractContextManager[None]:  # TX3
    def on_write(request: Any, record: Any) -> Any:
        answer = real(request, record)
        return Apply() if isinstance(answer, Done) and record.status is Status.OPEN else answer

    real = machine._on_write
    return patched(machine, "_on_write", on_write)


def any_life_writes() -> AbstractContextManager[None]:  # TX4
    def on_write(request: Any, record: Any) -> Any:
        known = record.participant or Participant("", 0)
        return real(request, replace(record, participant=replace(known, token=request.token)))

    real = machine._on_write
    return patched(machine, "_on_write", on_write)


def what_was_recorded_before_an_abort_is_a_success() -> AbstractContextManager[None]:  # TX10
    def on_write(request: Any, record: Any) -> Any:
        known = record.participant
        return Done() if known is not None and request.last <= known.sequence else real(request, record)

    real = machine._on_write
    return patched(machine, "_on_write", on_write)


@contextmanager
def a_refused_flush_takes_its_file_along() -> Iterator[None]:  # TX3
    real = TransactionWriter._finish

    def finish(self: Any) -> None:
        flush = self._on_its_way
        try:
            real(self)
        except Exception as error:
            if self._failure is error:
                delete_quietly(self._around.storage, [flush.path])
            raise

    with patched(TransactionWriter, "_finish", finish):
        yield


def one_look_is_enough() -> AbstractContextManager[None]:  # TX8
    def look(record: Any, now_ms: int) -> Any:
        return Leave() if isinstance(real(record, now_ms), Leave) and record.suspected_ms is None else Expire()

    real = machine.look
    return patched(machine, "look", look)


def what_was_noted_stays_noted() -> AbstractContextManager[None]:  # TX8
    def renew(connection: Any, wanted: Any, now_ms: int) -> Any:
        row = shared._row(connection, wanted.stream.stream_id, wanted.name)
        transaction_id = real(connection, wanted, now_ms)
        shared._set(connection, transaction_id, suspected_ms=row.suspected_ms)
        return transaction_id

    real = shared._renew
    return patched(shared, "_renew", renew)


def nothing_renews_a_lease() -> AbstractContextManager[None]:  # TX7
    def renew(connection: Any, wanted: Any, now_ms: int) -> Any:
        return shared._row(connection, wanted.stream.stream_id, wanted.name).transaction_id

    return patched(shared, "_renew", renew)


@contextmanager
def what_is_prepared_keeps_its_lease() -> Iterator[None]:  # TX9
    real, real_look = recording.set_status, machine.look

    def set_status(connection: Any, stream: Any, name: str, status: Status, now_ms: int) -> int:
        due = sa.select(t.shared_transactions.c.transaction_id, t.shared_transactions.c.due_ms)
        before = connection.execute(due).all()
        transaction_id = real(connection, stream, name, status, now_ms)
        for number, due_ms in before:
            if number == transaction_id and status is Status.PREPARED:
                shared._set(connection, transaction_id, due_ms=due_ms)
        return transaction_id

    def look(record: Any, now_ms: int) -> Any:
        return real_look(replace(record, status=Status.OPEN), now_ms)

    with patched(shared, "set_status", set_status), patched(machine, "look", look):
        yield


def _of_unknown(verb: type) -> AbstractContextManager[None]:
    def decide(request: Any, record: Any, epoch: int, fence: int) -> Any:
        answer = real(request, record, epoch, fence)
        return Done() if isinstance(answer, RefuseUnknown) and isinstance(request, verb) else answer

    real = machine.decide
    return patched(machine, "decide", decide)


def what_is_forgotten_was_aborted() -> AbstractContextManager[None]:  # TX11
    return _of_unknown(Abort)


def what_is_forgotten_was_committed() -> AbstractContextManager[None]:  # TX11
    return _of_unknown(Commit)


def what_is_open_is_forgotten() -> AbstractContextManager[None]:  # TX11
    return patched(
        outcomes,
        "_decided",
        lambda owner: (t.transactions.c.owner == owner, t.transactions.c.status != Status.PREPARED.value),
    )


@contextmanager
def the_last_flush_comes_first() -> Iterator[None]:  # TX5
    real = shared._hide

    def hide(connection: Any, wanted: Any, transaction_id: int, chunk: Any) -> None:
        real(connection, wanted, transaction_id, chunk)
        hidden = t.prepared_parts
        mine = hidden.c.transaction_id == transaction_id
        least, most = connection.execute(
            sa.select(sa.func.min(hidden.c.number), sa.func.max(hidden.c.number)).where(mine)
        ).one()
        connection.execute(hidden.update().where(mine, hidden.c.number == most).values(number=min(least, 0) - 1))

    with patched(shared, "_hide", hide):
        yield


def participants_route_by_the_layout_of_now() -> AbstractContextManager[None]:  # TX12
    def find(connection: Any, present: Any, name: str, where: str) -> Any:
        return replace(real(connection, present, name, where), stream=present)

    real = shared.find
    return patched(shared, "find", find)


def an_open_transaction_keeps_nothing_from_being_sealed() -> AbstractContextManager[None]:  # TX12
    def names_of(connection: Any, stream_id: int, status: Status) -> list[str]:
        return [] if status is Status.OPEN else real(connection, stream_id, status)

    real = streams._names_of
    return patched(streams, "_names_of", names_of)


def nobody_is_fenced() -> AbstractContextManager[None]:  # TX13
    return patched(shared, "fence_of", lambda connection, owner: 0)


@contextmanager
def recovering_leaves_what_is_open() -> Iterator[None]:  # TX13
    def drop(connection: Any, stream: Any, name: str, now_ms: int) -> Any:
        status = sa.select(t.transactions.c.status).where(t.transactions.c.name == name)
        return () if connection.scalar(status) == Status.OPEN.value else real(connection, stream, name, now_ms)

    real = recording.drop
    with patched(recording, "drop", drop):
        yield


@contextmanager
def the_end_takes_what_is_recorded() -> Iterator[None]:  # TX6
    def take(around: Any, stream_id: int, owner: str, name: str) -> None:
        base = transaction_writer.directory_of(stream_id, owner, name)
        delete_quietly(around.storage, around.storage.list(base))

    with patched(shared_transaction, "sweep", take):
        yield


def what_the_dead_left_stays() -> AbstractContextManager[None]:  # TX6
    return patched(shared_transaction, "sweep", lambda *_: None)


def only_one_who_writes_looks_at_leases() -> AbstractContextManager[None]:  # TX8
    return patched(transactional_store.TransactionalStore, "_opened", lambda self, found: _unlooked(self, found))


def _unlooked(store: Any, found: Any) -> Any:
    return shared_transaction.SharedTransaction(store._around(), found)


OF_THE_STORE: dict[Mutant, Callable[..., None]] = {
    whatever_is_flushed_is_recorded: stored.test_a_flush_whose_answer_was_lost_is_recorded_once,
    any_life_writes: stored.test_a_participant_that_is_opened_elsewhere_is_refused,
    a_refused_flush_takes_its_file_along: stored.test_a_refused_flush_leaves_the_file_of_its_first_try,
    one_look_is_enough: stored.test_signs_of_life_renew_the_lease,
    what_was_noted_stays_noted: stored.test_signs_of_life_renew_the_lease,
    nothing_renews_a_lease: stored.test_signs_of_life_renew_the_lease,
    what_is_prepared_keeps_its_lease: stored.test_what_is_prepared_never_expires,
    what_is_forgotten_was_aborted: stored.test_of_a_forgotten_outcome_nobody_says_committed,
    what_is_forgotten_was_committed: stored.test_of_a_forgotten_outcome_nobody_says_committed,
    what_is_open_is_forgotten: stored.test_an_open_transaction_is_not_forgotten,
    the_last_flush_comes_first: stored.test_events_are_in_the_order_in_which_they_were_flushed,
    participants_route_by_the_layout_of_now: stored.test_a_transaction_goes_on_when_its_stream_is_scaled,
    an_open_transaction_keeps_nothing_from_being_sealed: stored.test_a_stream_with_an_open_transaction_is_not_sealed,
    nobody_is_fenced: stored.test_a_newer_epoch_of_the_owner_fences_all_participants,
    recovering_leaves_what_is_open: stored.test_recovering_aborts_what_older_epochs_have_open,
    the_end_takes_what_is_recorded: stored.test_files_of_those_who_died_go_with_the_end,
    what_the_dead_left_stays: stored.test_files_of_those_who_died_go_with_the_end,
    only_one_who_writes_looks_at_leases: stored.test_whoever_uses_the_store_next_aborts_what_nobody_writes,
}


@pytest.mark.parametrize("mutant", OF_THE_STORE, ids=lambda mutant: mutant.__name__)
def test_mutants_of_the_store_are_caught(mutant: Mutant, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    test, clock = OF_THE_STORE[mutant], stored.Clock()

    def run() -> None:
        with Store.open(tmp_path / "store") as opened, monkeypatch.context() as patch:
            store = stored.another(opened, clock)
            store.create_stream(stored.STREAM, stored.KEYED, segments=3, routing_key="key")
            given = {"store": store, "clock": clock, "monkeypatch": patch}
            wanted = test.__code__.co_varnames[: test.__code__.co_argcount]  # type: ignore[attr-defined]
            test(**{name: given[name] for name in wanted})

    run.__name__ = test.__name__  # type: ignore[attr-defined]
    assert_caught(mutant, run)


def a_late_write_is_a_success() -> None:
    decisions.test_what_was_written_before_an_abort_is_no_success()


def dates_that_jump() -> None:
    decisions.test_a_date_that_is_set_back_ends_nothing()
    decisions.test_a_lease_ends_with_two_looks()


def test_mutants_of_what_is_decided_are_caught() -> None:
    assert_caught(what_was_recorded_before_an_abort_is_a_success, a_late_write_is_a_success)
    with patched(decisions, "look", decisions.look):
        assert_caught(_looking_once, dates_that_jump)


def _looking_once() -> AbstractContextManager[None]:  # TX8
    return patched(decisions, "look", lambda record, now_ms: Expire() if now_ms >= record.due_ms else Leave())


BY_HISTORIES = (any_life_writes,)


@pytest.mark.long
@pytest.mark.parametrize("mutant", BY_HISTORIES, ids=lambda mutant: mutant.__name__)
def test_histories_find_them_too(mutant: Mutant) -> None:
    def run() -> None:
        drawn = settings(max_examples=200, stateful_step_count=40, phases=[Phase.generate], database=None)
        run_state_machine_as_test(histories.SharedTransactionMachine, settings=drawn)

    with patched_seed():
        assert_caught(mutant, run)


@contextmanager
def patched_seed() -> Iterator[None]:
    """What is drawn, and so what is found, is the same in every run."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(histories.SharedTransactionMachine, "_hypothesis_internal_use_seed", 0, raising=False)
        yield
