"""Bugs planted in the base classes of users' sinks; seeds of ``sim.kinds.custom`` find them.

``tests/mutants/test_own_sinks_mutants.py`` has those that need a driver that is replaced at one very moment.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import replace
from typing import Any

from tests.mutants.harness import Mutant, patched
from tests.sim.product.patching import around, skipped

from headgate.connectors.custom import ledger, two_phase
from headgate.connectors.custom.fence import Fence, OutputName
from headgate.connectors.custom.output import LedgerOutput
from headgate.connectors.custom.pieces import PieceBuffer
from headgate.errors import UsageError
from headgate.model.ids import CheckpointId
from headgate.runtime.driver import sink_commits
from headgate.sim.kinds.own_connectors import PublishingSink


def recovery_aborts_nothing() -> AbstractContextManager[None]:  # CS3, K6
    return skipped(two_phase._Committer, "_is_mine", False)


def recovery_aborts_what_is_kept() -> AbstractContextManager[None]:  # CS3
    return around(two_phase._Committer, "recover", lambda call, self, keep: call(self, []))


def recovery_aborts_what_other_sinks_prepared() -> AbstractContextManager[None]:  # CS2
    return patched(two_phase._Committer, "_is_mine", lambda self, name: OutputName.parse(name) is not None)


def recovery_aborts_only_its_own_generation() -> AbstractContextManager[None]:  # K6
    def is_mine(call: Any, self: Any, name: str) -> bool:
        found = OutputName.parse(name)
        return bool(call(self, name)) and found is not None and found.generation == self._fence.generation

    return around(two_phase._Committer, "_is_mine", is_mine)


def older_generations_are_not_refused() -> AbstractContextManager[None]:  # K14
    return skipped(Fence, "refuse_if_older_than")


def names_are_the_same_in_every_generation() -> AbstractContextManager[None]:  # CS2, K8
    def open_(call: Any, self: Any, context: Any) -> Any:
        writer = call(self, context)
        writer._context = replace(context, generation=0)
        return writer

    return around(two_phase.TwoPhaseSink, "open", open_)


def names_are_the_same_in_all_subtasks() -> AbstractContextManager[None]:  # CS2, K8
    return around(
        two_phase.TwoPhaseSink, "open", lambda call, self, context: call(self, replace(context, subtask_index=0))
    )


def a_ledger_names_all_subtasks_alike() -> AbstractContextManager[None]:  # CS2, CS6
    return around(ledger.LedgerSink, "open", lambda call, self, context: call(self, replace(context, subtask_index=0)))


def a_transaction_goes_on_behind_its_barrier() -> AbstractContextManager[None]:  # CS4
    def seal(call: Any, self: Any, checkpoint: CheckpointId) -> Any:
        transaction = self._open
        sealed = call(self, checkpoint)
        self._open = transaction
        return sealed

    return around(two_phase._Writer, "seal", seal)


def a_ledger_keeps_what_was_sealed() -> AbstractContextManager[None]:  # CS4
    def seal(call: Any, self: Any, checkpoint: CheckpointId) -> Any:
        batches = self._batches
        sealed = call(self, checkpoint)
        self._batches = list(batches)
        return sealed

    return around(ledger._Writer, "seal", seal)


def a_prepared_transaction_whose_answer_was_lost_is_forgotten() -> AbstractContextManager[None]:  # CS5, K3
    def prepare(call: Any, self: Any) -> Any:
        try:
            return call(self)
        except Exception:
            self._transaction = None
            raise

    return around(two_phase._Sealed, "prepare", prepare)


def only_the_checkpoint_of_the_permit_is_committed() -> AbstractContextManager[None]:  # K7, K19
    def commit(call: Any, self: Any, permit: Any, committables: Any) -> None:
        call(self, permit, [c for c in committables if c.checkpoint == permit.checkpoint])

    return around(two_phase._Committer, "commit", commit)


def a_ledger_publishes_the_first_of_several() -> AbstractContextManager[None]:  # B4
    return around(
        ledger._Committer, "commit", lambda call, self, permit, committables: call(self, permit, committables[:1])
    )


def the_newest_is_committed_first() -> AbstractContextManager[None]:  # K2
    def in_order(call: Any, permit: Any, committables: Any) -> Any:
        return call(permit, committables)[::-1]

    return around(ledger, "in_order", in_order)


def a_ledger_forgets_what_may_still_be_asked_for() -> AbstractContextManager[None]:  # CS6, K20
    return around(
        ledger._ForgettingCommitter, "forget", lambda call, self, before: call(self, CheckpointId(before + 1_000))
    )


def two_phases_forget_what_may_still_be_asked_for() -> AbstractContextManager[None]:  # CS24, K20
    def forget(call: Any, self: Any, before: CheckpointId, promised: Any) -> None:
        call(self, CheckpointId(before + 1_000), [])

    return around(two_phase._ForgettingCommitter, "forget_all_but", forget)


def a_ledger_is_not_asked() -> AbstractContextManager[None]:  # CS6
    """Harmless: see ``HARMLESS``."""
    return patched(PublishingSink, "published", lambda self, names: set())


def what_may_pass_is_final() -> AbstractContextManager[None]:  # CS5
    return patched(two_phase.TwoPhaseSink, "open_committer", _impatient(two_phase.TwoPhaseSink.open_committer))


def _impatient(call: Any) -> Any:
    def open_committer(self: Any, *arguments: Any) -> Any:
        committer = call(self, *arguments)
        committer._sink = _Impatient(self)
        return committer

    return open_committer


class _Impatient:
    """A sink that calls nothing transient."""

    transient_errors = ()

    def __init__(self, sink: Any) -> None:
        self._sink = sink

    def __getattr__(self, name: str) -> Any:
        return getattr(self._sink, name)


HARMLESS: dict[Mutant, str] = {
    a_ledger_is_not_asked: "it is asked to save work: publishing looks for the name in the same transaction",
}
"""Bugs that no seed can find, and why they do no harm."""


def a_ledger_publishes_the_first_piece() -> AbstractContextManager[None]:  # CS8
    def batches(self: LedgerOutput) -> Iterator[Any]:
        if self._whole is not None:
            yield from self._batches(self._whole)
        for piece in self._committable.pieces[:1]:
            yield from self._batches(self._read(piece))

    return patched(LedgerOutput, "__iter__", batches)


def a_piece_begins_with_the_last_one() -> AbstractContextManager[None]:  # SF13
    def close_piece(call: Any, self: Any) -> None:
        kept = list(self._open)
        call(self)
        self._open = kept[-1:]

    return around(PieceBuffer, "_close_piece", close_piece)


def what_a_target_denies_is_passed_over() -> AbstractContextManager[None]:  # K5, CS9
    @contextmanager
    def denials(sink: str, checkpoint: int) -> Iterator[None]:
        with suppress(UsageError):
            yield

    return patched(sink_commits, "_denials", denials)


ALL: dict[Mutant, int] = {
    a_ledger_publishes_the_first_piece: 8,
    a_piece_begins_with_the_last_one: 8,
    what_a_target_denies_is_passed_over: 13,
    recovery_aborts_nothing: 8,
    recovery_aborts_what_is_kept: 13,
    recovery_aborts_what_other_sinks_prepared: 6,
    recovery_aborts_only_its_own_generation: 8,
    older_generations_are_not_refused: 36,
    names_are_the_same_in_every_generation: 13,
    names_are_the_same_in_all_subtasks: 8,
    a_ledger_names_all_subtasks_alike: 8,
    a_transaction_goes_on_behind_its_barrier: 8,
    a_ledger_keeps_what_was_sealed: 8,
    a_prepared_transaction_whose_answer_was_lost_is_forgotten: 36,
    only_the_checkpoint_of_the_permit_is_committed: 6,
    a_ledger_publishes_the_first_of_several: 8,
    the_newest_is_committed_first: 25,
    a_ledger_forgets_what_may_still_be_asked_for: 12,
    two_phases_forget_what_may_still_be_asked_for: 6,
    what_may_pass_is_final: 18,
}
"""Each with a seed that finds it."""
