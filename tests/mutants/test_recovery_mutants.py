"""Planted bugs of restarts: the checkpoint that is chosen, ownership, rescaling, savepoints, takeover, reset.

Each is a patch of the product, a run of the simulator, and a seed that finds it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import pytest
from tests.conftest import few
from tests.mutants.harness import Mutant, all_of, around, patched, skipped
from tests.mutants.seeds import EVENTS_MAX, Finder, assert_found, found_by, plain

from headgate.codec.snapshot import stored_file
from headgate.model.ids import Generation
from headgate.model.manifest import Manifest
from headgate.model.pipeline_identity import PipelineIdentity
from headgate.model.plan import PipelineDefinition
from headgate.protocol.checkpoints import recovery
from headgate.protocol.checkpoints.commit import CommitQueue
from headgate.protocol.checkpoints.recovery import NextClaim
from headgate.protocol.checkpoints.restore_selection import Adopt, GoOn, Named
from headgate.protocol.supervision import standby
from headgate.protocol.supervision.standby import Standby
from headgate.runtime.checkpoints.log import CheckpointLog
from headgate.runtime.checkpoints.restore import RestoredSnapshots
from headgate.runtime.driver import restart, savepoint_start, supervisor_host
from headgate.runtime.driver.reset import Reset
from headgate.runtime.state_reader import lookup
from headgate.runtime.state_reader.reader import Selection
from headgate.sim.product import verdict
from headgate.sim.product.run import Run
from headgate.sim.scenarios.upgrades import ChangingCodeRun, GoingBackRun


def the_second_newest_checkpoint_is_restored() -> AbstractContextManager[None]:
    found = restart.recovery.candidates

    def older(log: Any) -> Any:
        all_found = found(log)
        return all_found[1:] or all_found

    return patched(restart.recovery, "candidates", older)


def positions_are_forgotten_at_a_restore() -> AbstractContextManager[None]:
    return patched(RestoredSnapshots, "positions", lambda self, node: None)


def a_life_is_drawn_at_every_start() -> AbstractContextManager[None]:
    def life(original: Any, self: Any, host: str, wall_ms: int) -> PipelineIdentity:
        found: PipelineIdentity = original(self, host, wall_ms)
        return dataclasses.replace(found, id=f"{wall_ms:032x}")

    return around(CheckpointLog, "identity", life)


def a_stranger_goes_on() -> AbstractContextManager[None]:
    return all_of(skipped(restart.ownership, "objection"), skipped(restart.ownership, "may_own", True))


def a_start_without_a_sound_checkpoint_is_fresh() -> AbstractContextManager[None]:
    def choose(call: Any, *arguments: Any) -> Any:
        found = call(*arguments)
        return recovery.StartFresh() if isinstance(found, recovery.Refuse) else found

    return around(recovery, "choose", choose)


def the_state_of_one_former_subtask_is_dropped() -> AbstractContextManager[None]:
    def states(call: Any, self: Any, *arguments: Any) -> Any:
        found = call(self, *arguments)
        return found[:-1] if len(found) > 1 else found

    return around(RestoredSnapshots, "states", states)


def the_positions_of_one_former_subtask_are_dropped() -> AbstractContextManager[None]:
    def positions(call: Any, self: Any, node: str) -> Any:
        found = call(self, node)
        return dict(list(found.items())[:-1]) if found and len(found) > 1 else found

    return around(RestoredSnapshots, "positions", positions)


def everybody_is_restored_as_finished() -> AbstractContextManager[None]:
    return skipped(RestoredSnapshots, "is_finished", True)


def after_a_rescale_nobody_is_sent_the_state_of_others() -> AbstractContextManager[None]:
    def restored(call: Any, manifest: Any, plan: Any, worker: Any) -> Any:
        return [one for one in call(manifest, plan, worker) if one.index == int(worker)]

    return around(supervisor_host, "parts_for_worker", restored)


def keyed_state_is_kept_by_everybody() -> AbstractContextManager[None]:
    from headgate.state import backend

    return patched(backend, "owned_rows", lambda batch, *a: batch)


def files_go_before_the_log_is_given_up() -> AbstractContextManager[None]:  # C72
    def give_up(call: Any, self: CheckpointLog, *arguments: Any) -> None:
        self.files.restored(())
        self.files.sweep()
        call(self, *arguments)

    return around(CheckpointLog, "give_up", give_up)


def what_was_given_up_is_followed() -> AbstractContextManager[None]:  # C72
    def ending(self: NextClaim) -> NextClaim:
        return NextClaim(self.sequence, self.generation, self.follows, self.sequence)

    return patched(NextClaim, "ending_life", ending)


FILES = Manifest.files.fget  # type: ignore[attr-defined]


def a_checkpoint_needs_only_what_was_written_for_it() -> AbstractContextManager[None]:  # SF4
    def files(self: Manifest) -> frozenset[str]:
        found = {path: stored_file(path) for path in FILES(self)}
        return frozenset(path for path, of in found.items() if of is None or of.checkpoint == self.checkpoint)

    return patched(Manifest, "files", property(files))


INCOMPATIBILITY = recovery.incompatibility


def state_of_any_operator_that_is_gone_is_left_behind() -> AbstractContextManager[None]:  # SV30
    def fits(manifest: Manifest, definition: PipelineDefinition) -> recovery.Refuse | None:
        plan = definition.plan
        names, derived = manifest.state_texts, definition.derived_names
        return INCOMPATIBILITY(manifest, plan.state_texts(), plan.max_parallelism, names, derived)

    return patched(recovery, "incompatibility_with", fits)


def output_goes_before_it_is_decided() -> AbstractContextManager[None]:  # SO2
    def carry_out(call: Any, self: Reset, plan: Any) -> None:
        for found in plan.targets:
            early = PipelineIdentity("early", plan.home, "here", 0)
            found.sink.start_over("p", found.target.sink, Generation(99), early, lambda owner: True)
        call(self, plan)

    return around(Reset, "carry_out", carry_out)


def nobody_finishes_what_was_begun() -> AbstractContextManager[None]:  # SO3
    nobody = classmethod(lambda cls, root, pipeline: False)
    return all_of(patched(Reset, "is_unfinished", nobody), skipped(Reset, "finish", False))


def a_savepoint_does_not_wait_for_its_output() -> AbstractContextManager[None]:  # SV2
    return patched(CommitQueue, "has_confirmed", lambda self, checkpoint: True)


DECIDE = savepoint_start.decide_named


def every_start_adopts_what_it_names() -> AbstractContextManager[None]:  # SV24
    def decide(log: Any, life: str, named: Named) -> Any:
        found = DECIDE(log, life, named)
        return Adopt() if isinstance(found, GoOn) else found

    return patched(savepoint_start, "decide_named", decide)


@contextmanager
def a_driver_beats_once() -> Iterator[None]:
    """SB1."""
    real = standby.HeartbeatTimer.beat

    def beat(self, now_ms, generation, course):  # type: ignore[no-untyped-def]
        return None if self._count else real(self, now_ms, generation, course)

    with patched(standby.HeartbeatTimer, "beat", beat):
        yield


@contextmanager
def a_standby_waits_for_nobody() -> Iterator[None]:
    """SB6: it takes over from a driver that is alive."""
    with around(Standby, "__init__", lambda call, self: call(self, 0)):
        yield


@contextmanager
def parts_are_left_out() -> Iterator[None]:
    """A part is skipped although it has some of the key groups."""
    real = Selection.may_be_in

    def may_be_in(self: Selection, piece: Any) -> bool:
        return real(self, piece) and (self.groups is None or piece.key_groups.first == 0)

    with patched(Selection, "may_be_in", may_be_in):
        yield


@contextmanager
def an_older_checkpoint_is_the_newest() -> Iterator[None]:
    real = lookup.candidates
    with patched(lookup, "candidates", lambda observed: list(reversed(real(observed)))):
        yield


def read_states(seed: int) -> object:
    """Run ``seed``, whose end reads the state of its checkpoints."""
    with patched(verdict, "RATE", 1.0):
        return Run(seed).run()


def going_back(seed: int) -> object:
    return GoingBackRun(seed, events_max=EVENTS_MAX).run()


def changing_code(seed: int) -> object:
    return ChangingCodeRun(seed, events_max=EVENTS_MAX).run()


MUTANTS: list[tuple[Mutant, Finder, int]] = [
    (the_second_newest_checkpoint_is_restored, plain, 0),
    (positions_are_forgotten_at_a_restore, plain, 49),
    (a_life_is_drawn_at_every_start, plain, 49),
    (a_stranger_goes_on, plain, 45),
    (a_start_without_a_sound_checkpoint_is_fresh, plain, 120),
    (the_state_of_one_former_subtask_is_dropped, plain, 9),
    (the_positions_of_one_former_subtask_are_dropped, plain, 6),
    (everybody_is_restored_as_finished, plain, 19),
    (after_a_rescale_nobody_is_sent_the_state_of_others, plain, 49),
    (keyed_state_is_kept_by_everybody, plain, 98),
    (files_go_before_the_log_is_given_up, found_by("cancellation"), 4),
    (what_was_given_up_is_followed, found_by("cancellation"), 3),
    (a_checkpoint_needs_only_what_was_written_for_it, going_back, 1),
    (state_of_any_operator_that_is_gone_is_left_behind, changing_code, 22),
    (output_goes_before_it_is_decided, found_by("reset"), 1),
    (nobody_finishes_what_was_begun, found_by("reset"), 18),
    (a_savepoint_does_not_wait_for_its_output, found_by("savepoints"), 6),
    (every_start_adopts_what_it_names, found_by("savepoints"), 5),
    (a_driver_beats_once, found_by("standby"), 62),
    (a_standby_waits_for_nobody, found_by("standby"), 13),
    (an_older_checkpoint_is_the_newest, read_states, 8),
    (parts_are_left_out, read_states, 0),
]


@pytest.mark.parametrize(("mutant", "run", "seed"), few(MUTANTS, 7), ids=[mutant.__name__ for mutant, _, _ in MUTANTS])
def test_a_planted_bug_of_recovery_is_found(mutant: Mutant, run: Finder, seed: int) -> None:
    assert_found(mutant, run, seed)
