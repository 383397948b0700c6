"""Mutants of the checkpoint log and its storage: who was replaced, what counts, what is durable. Each is caught."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import obstore
import pytest
from tests.mutants.harness import assert_caught, patched
from tests.runtime.checkpoints import test_log_interleavings as interleavings
from tests.runtime.checkpoints import test_log_outcomes as outcomes
from tests.runtime.checkpoints import test_log_takeover as takeover
from tests.runtime.checkpoints import test_log_unreadable as unreadable
from tests.runtime.driver import test_claims_replaced as replaced
from tests.storage import test_backends as backends
from tests.storage import test_power_cut as power

from headgate.errors import FencedError, StorageError
from headgate.model.ids import CheckpointId, Generation
from headgate.model.manifest import Manifest
from headgate.protocol.checkpoints import recovery
from headgate.protocol.checkpoints.recovery import ObservedLog
from headgate.runtime.checkpoints import entries
from headgate.runtime.checkpoints import log as checkpoint_log
from headgate.runtime.checkpoints.entries import LogEntries
from headgate.runtime.checkpoints.log import CheckpointLog, Outcome
from headgate.runtime.driver import claims
from headgate.runtime.driver.coordination import Coordination
from headgate.storage import local
from headgate.storage.base import AlreadyExists
from headgate.storage.faulty import FaultyStorage
from headgate.storage.local import LocalStorage
from headgate.storage.memory import MemoryStorage
from headgate.storage.object_store import ObjectStorage


def an_error_of_the_look_means_that_nobody_follows() -> AbstractContextManager[None]:  # X8
    real = LogEntries.newest_generation

    def look(self: Any, *arguments: Any) -> Any:
        try:
            return real(self, *arguments)
        except StorageError:
            return None

    return patched(LogEntries, "newest_generation", look)


def a_put_that_timed_out_has_failed() -> AbstractContextManager[None]:  # X10, C12
    return patched(ObjectStorage, "puts_may_land_late", False)


def nobody_looks_for_a_newer_generation() -> AbstractContextManager[None]:  # X11, R40
    return patched(CheckpointLog, "newer_generation", lambda self: None)


def one_path_is_looked_at() -> AbstractContextManager[None]:  # R40
    def look(self: Any) -> Any:
        sequence = self._next_sequence
        if sequence not in self._entries.numbers("log"):
            return None
        return self._entries.newest_generation(sequence - 1)

    return patched(CheckpointLog, "newer_generation", look)


def only_claims_tell_who_was_replaced() -> AbstractContextManager[None]:  # R40, X9
    def replaced_by(log: ObservedLog, mine: Generation, owner: str, since: int) -> Generation | None:
        found = [e.content for e in log.entries if isinstance(e.content, recovery.Claim)]
        return max((c.generation for c in found if c.generation > mine and c.owner != owner), default=None)

    return patched(checkpoint_log, "replaced_by", replaced_by)


def what_cannot_be_read_tells_nothing() -> AbstractContextManager[None]:  # R56
    return patched(LogEntries, "told", lambda self, newer: newer if isinstance(newer, int) else None)


def a_driver_doubts_its_own_entries() -> AbstractContextManager[None]:  # R56
    real = checkpoint_log.replaced_by

    def replaced_by(log: ObservedLog, mine: Generation, owner: str, since: int) -> Any:
        return real(log, mine, owner, 0)

    return patched(checkpoint_log, "replaced_by", replaced_by)


def an_entry_that_was_lost_tells_nothing() -> AbstractContextManager[None]:  # R56
    return patched(ObservedLog, "lost", lambda self: ())


def the_newest_entry_that_can_be_read_decides() -> AbstractContextManager[None]:  # R56
    def newest_of(later: Any, above: Generation) -> Generation | None:
        read = [entry.content.generation for entry in later if not isinstance(entry.content, recovery.Damage)]
        return max((generation for generation in read if generation > above), default=None)

    return patched(entries, "newest_of", newest_of)


def damaged_newer_checkpoints_are_retained() -> AbstractContextManager[None]:  # C35
    def retained(log: ObservedLog, restored: Manifest | None) -> tuple[CheckpointId, ...]:
        return tuple(m.checkpoint for m in reversed(recovery.candidates(log)))

    return patched(recovery, "retained", retained)


def an_unexpected_error_means_that_nothing_was_written() -> AbstractContextManager[None]:  # C12
    def append(self: Any, manifest: Manifest, oldest: CheckpointId) -> Outcome:
        try:
            return Outcome(self._log.append(manifest, oldest))
        except FencedError:
            raise
        except Exception:
            return Outcome.FAILED

    return patched(Coordination, "_append", append)


def the_newest_has_the_highest_id() -> AbstractContextManager[None]:  # R8
    def candidates(log: ObservedLog) -> tuple[Manifest, ...]:
        found = [entry.content for entry in log.entries if isinstance(entry.content, Manifest)]
        return tuple(sorted(found, key=lambda m: m.checkpoint, reverse=True))

    return patched(recovery, "candidates", candidates)


def every_entry_counts() -> AbstractContextManager[None]:  # R41
    return patched(ObservedLog, "counted", lambda self: tuple(reversed(self.entries)))


def ids_are_reserved_without_a_look() -> AbstractContextManager[None]:  # R42
    def reserve(self: Any, checkpoint: CheckpointId) -> None:
        try:
            self._storage.put_if_absent(self._entries.id_path(checkpoint), [b""])
        except AlreadyExists:
            return

    return patched(CheckpointLog, "reserve", reserve)


def ids_are_looked_up_before_the_claim() -> AbstractContextManager[None]:  # R42
    def first(log: ObservedLog, reserved: CheckpointId) -> CheckpointId:
        return recovery.first_checkpoint(log, log.reserved)

    return patched(checkpoint_log, "first_checkpoint", first)


def claims_stay() -> AbstractContextManager[None]:  # R43
    return patched(checkpoint_log, "superseded", lambda log, claim: ())


def only_the_newest_claims_are_pruned() -> AbstractContextManager[None]:  # R43
    def behind(log: ObservedLog, claim: Any) -> Any:
        return tuple(entry for entry in log.entries if claim.follows < entry.sequence < claim.sequence)

    return patched(checkpoint_log, "superseded", behind)


def claims_are_pruned_that_others_follow() -> AbstractContextManager[None]:  # R41, R43
    return patched(ObservedLog, "leading_to", lambda self, sequence: frozenset())


def a_claim_does_not_say_what_it_follows() -> AbstractContextManager[None]:  # R41, R43
    real = checkpoint_log.encode_log_entry

    def encode(entry: Any) -> bytes:
        if isinstance(entry, recovery.Claim):
            entry = recovery.Claim(entry.generation, entry.owner, entry.wall_ms)
        return real(entry)

    return patched(checkpoint_log, "encode_log_entry", encode)


def what_can_be_read_is_durable() -> AbstractContextManager[None]:  # O11
    def taken(self: Any, path: str, target: Path) -> None:
        raise AlreadyExists(path)

    return patched(LocalStorage, "_refuse_taken", taken)


def a_hint_is_believed_without_its_checksum() -> AbstractContextManager[None]:  # R53
    return patched(entries, "decode_hint", lambda data, path: int(data.split()[0]))


@contextmanager
def a_look_syncs_nothing() -> Iterator[None]:  # O14
    with patched(local, "sync_what_is_seen", lambda directory: None):
        yield


@contextmanager
def a_look_trusts_what_nobody_synced() -> Iterator[None]:  # O11, O14
    """Without O14, the log must put again instead of reading."""

    def look_up(self: Any, path: str, data: bytes, manifest: Manifest) -> Outcome:
        return Outcome(self._after_conflict(path, data, manifest))

    with a_look_syncs_nothing(), patched(CheckpointLog, "_look_up", look_up):
        yield


def the_hint_is_read_last() -> AbstractContextManager[None]:  # R40
    def observe(self: Any) -> ObservedLog:
        found = tuple(self._observe_entry(sequence) for sequence in self.numbers("log"))
        return ObservedLog(found, self.newest_id(), self._read_hint())

    return patched(LogEntries, "observe", observe)


def every_storage_is_trusted() -> AbstractContextManager[None]:  # O12
    return patched(checkpoint_log, "refuse_unless_exclusive", lambda storage, directory: None)


def an_object_goes_in_parts() -> AbstractContextManager[None]:  # O13
    def put(self: Any, path: str, parts: Any) -> None:
        obstore.put(self._store, path, b"".join(parts), mode="overwrite")

    return patched(ObjectStorage, "put", put)


def a_sweep_that_fails_ends_the_run() -> AbstractContextManager[None]:
    return patched(claims, "tidy_up", lambda call, around, note: call())


def storage() -> FaultyStorage:
    return FaultyStorage(MemoryStorage("mutants"))


def taken_over_unreadably(storage: FaultyStorage) -> None:
    unreadable.test_a_driver_whose_heirs_entries_cannot_be_read_does_not_claim(storage, 1)


def hint_read_wrongly(storage: FaultyStorage) -> None:
    with pytest.MonkeyPatch.context() as patch:
        takeover.test_a_hint_that_was_read_wrongly_loses_no_entry(storage, patch, 1)


WITHOUT_FILES = [
    (an_error_of_the_look_means_that_nobody_follows, outcomes.test_an_error_of_the_look_behind_an_append_is_no_answer),
    (a_put_that_timed_out_has_failed, outcomes.test_a_put_of_an_object_store_that_timed_out_may_still_land),
    (every_storage_is_trusted, outcomes.test_a_storage_that_ignores_the_condition_of_a_put_is_refused),
]

IN_A_LOG = [
    (a_hint_is_believed_without_its_checksum, hint_read_wrongly),
    (nobody_looks_for_a_newer_generation, takeover.test_two_generations_never_get_the_same_id),
    (one_path_is_looked_at, takeover.test_whoever_was_replaced_before_its_first_checkpoint_finds_out),
    (only_claims_tell_who_was_replaced, takeover.test_whoever_was_replaced_before_its_first_checkpoint_finds_out),
    (what_cannot_be_read_tells_nothing, taken_over_unreadably),
    (an_entry_that_was_lost_tells_nothing, unreadable.test_a_driver_whose_heirs_entries_were_lost_does_not_claim),
    (
        a_driver_doubts_its_own_entries,
        unreadable.test_a_driver_whose_own_entry_is_damaged_claims_again_and_recovery_judges_it,
    ),
    (
        the_newest_entry_that_can_be_read_decides,
        unreadable.test_an_unreadable_entry_behind_a_claim_of_ones_own_tells_nobody_anything,
    ),
    (every_entry_counts, takeover.test_a_manifest_at_the_number_of_a_pruned_claim_counts_for_nothing),
    (ids_are_reserved_without_a_look, takeover.test_two_generations_never_get_the_same_id),
    (claims_stay, takeover.test_claims_that_led_nowhere_are_pruned),
    (only_the_newest_claims_are_pruned, takeover.test_a_claim_that_could_not_be_pruned_goes_with_a_later_one),
    (claims_are_pruned_that_others_follow, takeover.test_claims_that_older_entries_follow_stay),
    (a_claim_does_not_say_what_it_follows, takeover.test_claims_that_led_nowhere_are_pruned),
    (
        a_claim_does_not_say_what_it_follows,
        takeover.test_a_manifest_at_the_number_of_a_pruned_claim_counts_for_nothing,
    ),
]

WITH_FILES = [
    (damaged_newer_checkpoints_are_retained, replaced.test_a_damaged_newer_checkpoint_is_not_retained),
    (
        an_unexpected_error_means_that_nothing_was_written,
        replaced.test_an_unexpected_error_while_a_manifest_is_written_leaves_its_outcome_open,
    ),
    (a_sweep_that_fails_ends_the_run, replaced.test_what_cannot_be_swept_now_is_left_and_noted),
    (what_can_be_read_is_durable, power.test_what_exists_already_is_durable),
    (a_look_syncs_nothing, power.test_what_another_process_did_not_sync_is_synced_by_the_first_look),
    (
        a_look_trusts_what_nobody_synced,
        outcomes.test_a_manifest_that_was_not_synced_survives_a_power_cut_or_is_not_written,
    ),
]


def name_of(value: object) -> str:
    return getattr(value, "__name__", "")


@pytest.mark.parametrize(("mutant", "test"), WITHOUT_FILES, ids=name_of)
def test_caught(mutant: Any, test: Any) -> None:
    test()
    assert_caught(mutant, test)


@pytest.mark.parametrize(("mutant", "test"), IN_A_LOG, ids=name_of)
def test_caught_in_a_log(mutant: Any, test: Any) -> None:
    test(storage())
    assert_caught(mutant, test, storage())


@pytest.mark.parametrize(("mutant", "test"), WITH_FILES, ids=name_of)
def test_caught_with_files(mutant: Any, test: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(claims, "RETRY_PAUSES_S", (0.0, 0.0))
    test(tmp_path / "sound")
    assert_caught(mutant, test, tmp_path / "mutant")


def test_sending_an_object_in_parts_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:  # O13
    assert_caught(an_object_goes_in_parts, backends.test_an_object_store_gets_each_object_in_one_request, monkeypatch)


def test_reading_the_hint_last_is_caught() -> None:
    assert_caught(the_hint_is_read_last, interleavings.test_what_is_appended_while_the_log_is_read_is_not_lost)


def test_the_order_of_ids_is_caught() -> None:
    test = takeover.test_the_newest_checkpoint_is_the_newest_in_the_log
    assert_caught(the_newest_has_the_highest_id, test, storage(), 3)


def test_looking_up_ids_too_early_is_caught() -> None:
    test = takeover.test_an_id_reserved_while_another_driver_claims_is_seen_or_refused
    assert_caught(ids_are_looked_up_before_the_claim, test, storage(), 1)


def test_not_looking_before_a_choice_is_caught(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:  # X11
    monkeypatch.setattr(claims, "RETRY_PAUSES_S", (0.0, 0.0))
    test = replaced.test_a_driver_replaced_between_its_claim_and_its_choice_does_not_report_damage
    assert_caught(nobody_looks_for_a_newer_generation, test, tmp_path, 6)
