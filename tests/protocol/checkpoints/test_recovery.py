"""Which checkpoint a new generation starts from (docs/spec/recovery.md).

Whether a driver was replaced, or reset (R40, R56 of docs/spec/recovery.md, docs/spec/starting-over.md).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.protocol.making import cp, gen, inline_part, sub

from headgate.errors import LeaveBehind, NameOperator, RestoreFiles
from headgate.model.config import DamagedCheckpoint
from headgate.model.ids import CheckpointId
from headgate.model.manifest import Claim, Committable, HookState, LogEntry, Manifest, SnapshotPart, SubtaskEntry
from headgate.protocol.checkpoints import recovery
from headgate.protocol.checkpoints.recovery import (
    Damage,
    NextClaim,
    NothingLeft,
    ObservedEntry,
    ObservedLog,
    Refuse,
    Restore,
    StartFresh,
    candidates,
    choose,
    first_checkpoint,
    gaps,
    incompatibility,
    is_reset,
    lost_entry,
    newest_of,
    next_claim,
    replaced_by,
    reset_owner,
    retained,
)
from headgate.runtime.checkpoints.log import CheckpointLog
from headgate.state.descriptors import KeyColumns, StateDescriptor, StateKind, state_identity
from headgate.storage.memory import MemoryStorage

COUNT = StateDescriptor("timers)", StateKind.VALUE, pa.int64())
PREVIOUS, FAIL = DamagedCheckpoint.PREVIOUS, DamagedCheckpoint.FAIL
TORN = Damage("log/x", "torn")
SOUND: Sequence[Damage] = ()


def claim(generation: int) -> Claim:
    return Claim(gen(generation), "host:1", 0)


def manifest(checkpoint: int, generation: int = 1, *, is_final: bool = False, **texts: str) -> Manifest:
    entries = (SubtaskEntry(sub("a"), inline_part()),)
    return Manifest(cp(checkpoint), gen(generation), 2, 128, entries, state_texts=texts, is_final=is_final)


def log(entries: dict[int, LogEntry | Damage], reserved: int = 0, hint: int = 0) -> ObservedLog:
    observed = tuple(ObservedEntry(s, f"log/{s}", content) for s, content in sorted(entries.items()))
    return ObservedLog(observed, cp(reserved), hint)


def damage_of(**problems: str) -> dict[CheckpointId, Sequence[Damage]]:
    """``c5="torn"`` damages checkpoint 5; "" leaves it sound."""
    return {cp(int(k[1:])): [Damage(f"chk-{k[1:]}", text)] if text else [] for k, text in problems.items()}


# -- the claim ------------------------------------------------------------------------------------------------------


def test_the_first_claim_of_a_pipeline() -> None:  # R6
    assert next_claim(log({})) == NextClaim(1, gen(1), 0)
    assert first_checkpoint(log({}), cp(0)) == 1


def test_a_claim_follows_the_newest_entry() -> None:  # R6
    observed = log({1: claim(4), 2: manifest(4, 4), 3: manifest(6, 4)})
    assert next_claim(observed) == NextClaim(4, gen(5), 3)


def test_ids_continue_above_every_completed_one_even_if_none_is_reserved() -> None:  # R7
    observed = log({1: claim(1), 2: manifest(9)}, reserved=7)
    assert first_checkpoint(observed, cp(0)) == 10
    assert first_checkpoint(observed, cp(11)) == 12


@pytest.mark.parametrize(
    ("entries", "hint", "expected"),
    [
        ({1: claim(1), 2: TORN}, 0, NextClaim(3, gen(3), 2)),
        ({1: claim(1), 3: TORN}, 0, NextClaim(4, gen(4), 3)),
        ({1: TORN, 2: claim(2), 3: manifest(5, 2)}, 0, NextClaim(4, gen(3), 3)),
        ({1: claim(1)}, 3, NextClaim(4, gen(4), 3)),
        ({}, 50, NextClaim(51, gen(51), 50)),
    ],
)
def test_what_cannot_be_read_may_have_been_a_claim(
    entries: dict[int, LogEntry | Damage], hint: int, expected: NextClaim
) -> None:  # R7
    assert next_claim(log(entries, hint=hint)) == expected


# -- lost entries ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("entries", "hint", "lost"),
    [
        ({}, 0, ()),
        ({1: claim(1), 2: manifest(1)}, 2, ()),
        ({7: manifest(4), 8: claim(2)}, 8, ()),  # the entries before it were pruned
        ({3: claim(1), 4: manifest(4)}, 4, ()),  # a crash in the middle of pruning
        ({1: claim(1), 3: manifest(4)}, 3, (2,)),
        ({1: claim(1)}, 3, (2, 3)),
        ({}, 2, (1, 2)),
        ({3: claim(3)}, 3, (1, 2)),  # nothing may be pruned before a checkpoint has completed
    ],
)
def test_entries_that_must_have_existed_are_missed(
    entries: dict[int, LogEntry | Damage], hint: int, lost: tuple[int, ...]
) -> None:  # R9
    assert log(entries, hint=hint).lost() == lost


# -- the choice -----------------------------------------------------------------------------------------------------


def test_a_pipeline_that_never_completed_a_checkpoint_starts_fresh() -> None:  # C37
    assert choose(log({}), {}, PREVIOUS) == StartFresh()
    assert choose(log({1: claim(1), 2: claim(2)}, reserved=3), {}, PREVIOUS) == StartFresh()


def test_candidates_come_newest_first() -> None:  # R8
    observed = log({1: claim(1), 2: manifest(1), 3: TORN, 4: manifest(3)})
    assert candidates(observed) == (manifest(3), manifest(1))


def test_the_newest_completed_checkpoint_is_restored() -> None:  # R10
    observed = log({1: claim(1), 2: manifest(1), 3: manifest(2), 4: claim(2)})
    assert choose(observed, damage_of(c2=""), PREVIOUS) == Restore(manifest(2))


def test_a_damaged_checkpoint_is_named_and_the_one_before_it_used() -> None:  # R10, C36, K18
    observed = log({1: claim(1), 2: manifest(1), 3: manifest(2)})
    assert choose(observed, damage_of(c2="bit flipped", c1=""), PREVIOUS) == Restore(
        manifest(1), skipped=(Damage("chk-2", "bit flipped"),), contradicts=(cp(2),)
    )


def test_a_damaged_checkpoint_is_refused_if_configured_so() -> None:  # R14
    observed = log({1: claim(1), 2: manifest(1), 3: manifest(2)})
    choice = choose(observed, damage_of(c2="bit flipped", c1=""), FAIL)
    assert isinstance(choice, Refuse)
    assert choice.reason.startswith(
        "chk-2: bit flipped; going back to checkpoint 1 would produce again the output that "
    )
    assert "checkpoint 2 committed" in choice.reason
    assert "on_damaged_checkpoint='previous'" in choice.reason
    assert choice.remedy == RestoreFiles()


def test_damage_older_than_the_newest_sound_checkpoint_stops_nothing() -> None:  # R14: nothing would be repeated
    observed = log({1: claim(1), 2: TORN, 3: manifest(1), 4: manifest(2)})
    assert choose(observed, damage_of(c2=""), FAIL) == Restore(manifest(2), skipped=(TORN,))


def test_a_damaged_final_checkpoint_is_refused_if_configured_so() -> None:  # R14
    observed = log({1: claim(1), 2: manifest(1), 3: manifest(2, is_final=True)})
    assert isinstance(choose(observed, damage_of(c2="torn", c1=""), FAIL), Refuse)


def test_a_damaged_or_lost_entry_is_named_or_refused() -> None:  # R9, R14
    observed = log({1: claim(1), 2: manifest(1), 4: TORN})
    lost = Damage("log/0000000003", "the entry is missing")
    assert choose(observed, damage_of(c1=""), PREVIOUS) == Restore(manifest(1), skipped=(TORN, lost))
    choice = choose(observed, damage_of(c1=""), FAIL)
    assert isinstance(choice, Refuse)
    assert choice.reason.startswith("log/x: torn; log/0000000003: the entry is missing; going back to checkpoint 1 ")
    assert "whatever was completed since" in choice.reason


def test_a_pipeline_never_starts_fresh_over_damage() -> None:  # R11, C36
    observed = log({1: claim(1), 2: manifest(1)})
    assert choose(observed, damage_of(c1="torn"), PREVIOUS) == Refuse(
        "chk-1: torn; no sound checkpoint is left", RestoreFiles()
    )


def test_a_lost_log_is_refused_at_the_second_try_too() -> None:  # R11
    lost = log({}, hint=3)
    assert isinstance(choose(lost, {}, PREVIOUS), Refuse)
    following = next_claim(lost)
    entry = Claim(following.generation, "host:2", 0, follows=following.follows)
    again = log({following.sequence: entry}, hint=following.sequence)
    assert isinstance(choose(again, {}, PREVIOUS), Refuse)


def test_after_the_final_checkpoint_there_is_nothing_to_do() -> None:  # R13
    final = manifest(2, is_final=True)
    assert choose(log({1: claim(1), 2: final, 3: claim(2)}), damage_of(c2=""), PREVIOUS) == NothingLeft(final)


def test_a_damaged_final_checkpoint_falls_back_to_the_one_before() -> None:  # R13
    observed = log({1: claim(1), 2: manifest(1), 3: manifest(2, is_final=True)})
    choice = choose(observed, damage_of(c2="torn", c1=""), PREVIOUS)
    assert choice == Restore(manifest(1), (Damage("chk-2", "torn"),), (cp(2),))


@pytest.mark.long
@settings(max_examples=300)
@given(st.data())
def test_whatever_is_damaged_nothing_is_repeated_and_nothing_forgotten(data: st.DataObject) -> None:  # R7, R10, R11
    """A true history of claims and manifests; then entries vanish, are torn, snapshots rot. Then the next claim."""
    history: list[LogEntry] = []
    generation = checkpoint = 0
    for kind in ["claim", *data.draw(st.lists(st.sampled_from(["claim", "manifest", "manifest"]), max_size=12))]:
        if kind == "claim":
            generation += 1
            history.append(claim(generation))
        else:
            checkpoint += data.draw(st.integers(1, 2))
            history.append(manifest(checkpoint, generation))
    entries: dict[int, LogEntry | Damage] = {}
    for sequence, content in enumerate(history, start=1):
        fate = data.draw(st.sampled_from(["kept", "kept", "kept", "torn", "lost"]))
        if fate != "lost":
            entries[sequence] = content if fate == "kept" else TORN
    observed = log(entries, reserved=checkpoint, hint=len(history))
    found = [m.checkpoint for m in candidates(observed)]
    rotten = {c: data.draw(st.booleans()) for c in found}
    damage = {c: [Damage(f"chk-{c}", "torn")] if rotten[c] else [] for c in found}

    choice = choose(observed, damage, PREVIOUS)
    sound = [c for c in found if not rotten[c]]
    if isinstance(choice, Restore):
        assert choice.manifest.checkpoint == max(sound), "never older than the newest sound one"
        assert choice.contradicts == tuple(c for c in found if c > max(sound))
        start = next(q for q, content in entries.items() if content == choice.manifest)
        is_newer_gone = any(entries.get(q, TORN) == TORN for q in range(start + 1, len(history) + 1))
        assert choice.skipped or not (is_newer_gone or choice.contradicts), "what was newer is named"
        kept = gaps(observed, choice.manifest, cp(checkpoint + 1), choice.skipped)
        torn = {c.checkpoint for q, c in enumerate(history, 1) if isinstance(c, Manifest) and entries.get(q) == TORN}
        assert all(any(gap.above < c < gap.below for gap in kept) for c in torn), "who repairs it finds its snapshots"
        assert not any(gap.above < c < gap.below for gap in kept for c in retained(observed, choice.manifest))
    else:
        assert not sound
        assert isinstance(choice, Refuse) or checkpoint == 0, "never fresh when a checkpoint had completed"

    following = next_claim(observed)
    assert following.sequence == len(history) + 1
    assert following.generation > generation, "a number is never used twice"
    assert first_checkpoint(observed, cp(0)) > checkpoint


# -- compatibility --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("texts", "max_parallelism", "problem"),
    [
        ({"sum": "int by user"}, 128, None),
        ({"sum": "int by user", "plain": ""}, 128, None),
        ({"sum": "int by user"}, 64, "max_parallelism 128, this pipeline has 64"),
        ({}, 128, "state of operator 'sum', which this pipeline does not have"),
        ({"sum": "float by user"}, 128, r"the state of operator 'sum' in checkpoint 5 is \[int by user\]"),
    ],
)
def test_state_that_does_not_fit_is_refused_in_one_sentence(
    texts: dict[str, str], max_parallelism: int, problem: str | None
) -> None:  # R12
    found = incompatibility(manifest(5, sum="int by user"), texts, max_parallelism)
    if problem is None:
        assert found is None
    else:
        assert found is not None
        with pytest.raises(ValueError, match=problem):
            raise ValueError(found.reason)


def test_data_of_a_hook_that_is_gone_is_named() -> None:  # EI9
    holding = replace(manifest(5), hooks=(HookState("silent", None), HookState("shop", b"1234")))
    found = recovery.unclaimed_hook(holding, {"other"})
    assert found is not None
    assert found.startswith("checkpoint 5 holds 4 bytes of hook 'shop', which this pipeline does not have")
    assert recovery.unclaimed_hook(holding, {"shop"}) is None, "what returned nothing leaves nothing behind"
    assert recovery.unclaimed_hook(manifest(5), ()) is None


def test_an_operator_that_gained_state_under_its_old_name_is_refused() -> None:  # R12
    found = incompatibility(manifest(5, step=""), {"step": "reduce by user"}, 128)
    assert found is not None


ODD_NAME = "operator state(list odd; name: int64)"
"""What stands between names is in this one: nobody can tell the lists, and yet timers may be added."""


@pytest.mark.parametrize("others", ["", "operator state(list a: int64)", ODD_NAME])
def test_a_function_without_state_may_be_given_timers_later(others: str) -> None:  # TM6
    keys = KeyColumns(("user", "part"), (pa.int64(), pa.large_string()))
    timers = "; ".join(text for text in (state_identity(keys, [], has_timers=True), others) if text)
    assert incompatibility(manifest(5, step=others), {"step": timers}, 128) is None
    for before in ("", "operator state(list b: int64)", state_identity(keys, [COUNT])):
        if before != others:
            assert incompatibility(manifest(5, step=before), {"step": timers}, 128) is not None
    assert incompatibility(manifest(5, step=timers), {"step": others}, 128) is not None, "its timers would be lost"
    counted = "; ".join(text for text in (state_identity(keys, [COUNT], has_timers=True), others) if text)
    assert incompatibility(manifest(5, step=others), {"step": counted}, 128) is not None, "that is more than timers"


def test_an_added_operator_without_a_name_is_refused() -> None:  # SV31
    texts = {"sum": "int by user", "reduce-2": "int by key"}
    found = incompatibility(manifest(5, sum="int by user"), texts, 128, derived={"reduce-2"})
    assert found is not None
    assert (
        "operator 'reduce-2' has state, and checkpoint 5 does not know it; if it is new, give it a name" in found.reason
    )
    assert found.remedy == NameOperator("reduce-2")
    assert incompatibility(manifest(5, sum="int by user"), texts, 128, derived={"sum"}) is None, "the user named it"


def test_state_without_an_operator_is_refused_unless_it_is_named() -> None:  # SV30
    found = incompatibility(manifest(5, sum="int by user"), {}, 128)
    assert found is not None
    assert "headgate run --allow-unclaimed-state sum" in found.reason
    assert found.remedy == LeaveBehind("sum")
    assert incompatibility(manifest(5, sum="int by user"), {}, 128, unclaimed={"sum"}) is None
    changed = incompatibility(manifest(5, sum="int by user"), {"sum": "float by user"}, 128, unclaimed={"sum"})
    assert changed is not None, "what is there must fit"


# -- claims that led nowhere -------------------------------------------------------------------------------------------


def test_claims_that_led_nowhere_are_superseded() -> None:  # R43
    entries: dict[int, LogEntry | Damage] = {
        1: claim(1),
        2: claim(2),
        3: replace(claim(3), follows=1),
        4: manifest(4, 3),
        5: manifest(5, 3),
        6: claim(4),
    }
    observed = log(entries)
    found = recovery.superseded(observed, NextClaim(8, gen(6), 5))
    assert [entry.sequence for entry in found] == [2, 6], "not what the checkpoints were written by"
    assert recovery.superseded(observed, NextClaim(6, gen(4), 5)) == found[:1], "the claim itself stays"


# -- what the user is told of a restore that fits ---------------------------------------------------------------------


def parts(**rows: int) -> tuple[SnapshotPart, ...]:
    """Return the parts of a snapshot with so many rows of each node."""
    return tuple(replace(part, rows={name: {"": count} for name, count in rows.items()}) for part in inline_part())


def program(names: dict[str, str], *allowed: str) -> Any:
    """Return a pipeline with state of these names, which may leave state behind."""
    plan = SimpleNamespace(state_texts=lambda: names, state_rules=dict)
    start = SimpleNamespace(allow_unclaimed_state=allowed, moved={})
    return SimpleNamespace(plan=plan, config=SimpleNamespace(start=start), lineages={})


def test_users_are_told_what_is_new_and_what_is_left_behind() -> None:  # SV30, SV31
    held = SubtaskEntry(sub("a"), parts(file=2), (Committable("out", cp(4), 0, gen(1), b""),))
    restored = replace(manifest(5, sum="int by user", none=""), entries=(held,))
    texts = {"counts": "int by user", "plain": ""}
    assert recovery.changes(restored, program(texts, "file", "none", "out", "sum")) == [
        "operator 'counts' is new: it starts empty",
        "the state of operator 'file' in checkpoint 5 is left behind",
        "what checkpoint 5 promised for sink 'out', and was not committed yet, is given up",
        "the state of operator 'sum' in checkpoint 5 is left behind",
    ]
    assert recovery.changes(restored, program({"sum": "int by user"}, "sum")) == [], "it is there"


def test_what_sinks_hold_back_is_kept_for_them() -> None:  # EV16
    entries = (SubtaskEntry(sub("a"), parts(file=2, sum=1)), SubtaskEntry(sub("b"), parts(file=3)))
    restored = replace(manifest(5, sum="int by user"), entries=entries)
    kept = {"sum": "its state", "file": "5 records that are not written yet"}
    assert recovery.matching_of(restored, program({})).kept == kept


OWN = {1: claim(1), 2: manifest(1), 3: manifest(2)}
"""What a driver of generation 1, "host:1", has written: whatever is at 4 or behind it may be another one's."""


@pytest.mark.parametrize(
    ("later", "hint", "expected"),
    [
        ({}, 0, None),
        ({}, 3, None),
        ({4: claim(2)}, 0, None),  # of the same owner
        ({4: manifest(3, 2)}, 0, gen(2)),
        ({4: TORN}, 0, TORN),
        ({4: claim(2), 5: TORN}, 0, TORN),
        ({4: TORN, 5: manifest(3, 2)}, 0, gen(2)),
        ({4: manifest(3, 2), 5: TORN}, 0, gen(2)),
        ({}, 4, lost_entry(4)),
        ({5: claim(2)}, 0, lost_entry(4)),
        ({3: TORN}, 0, None),  # its own, which recovery judges
        ({2: TORN, 4: TORN}, 0, TORN),
    ],
)
def test_a_driver_knows_whether_it_was_replaced_or_that_it_cannot_know(  # R56
    later: dict[int, LogEntry | Damage], hint: int, expected: object
) -> None:
    assert replaced_by(log({**OWN, **later}, hint=hint), gen(1), "host:1", 4) == expected


def test_another_owners_claim_tells() -> None:  # R40
    assert replaced_by(log({**OWN, 4: claim(2)}), gen(1), "another:1", 4) == 2


@pytest.mark.parametrize(
    ("later", "above", "expected"),
    [
        ({}, 1, None),
        ({4: claim(1)}, 1, None),
        ({4: claim(2), 5: TORN}, 1, gen(2)),
        ({4: claim(1), 5: TORN}, 1, TORN),
        ({4: TORN}, 0, TORN),
    ],
)
def test_what_follows_tells_of_a_newer_generation_or_that_nobody_can_tell(  # R56
    later: dict[int, LogEntry | Damage], above: int, expected: object
) -> None:
    assert newest_of(log(later).entries, gen(above)) == expected


ORDER = Claim(gen(2), "anybody", 0, follows=0, life=2, order="5eed")


def test_a_claim_that_names_an_order_makes_it_count() -> None:  # SO2, SO9
    found = log({1: Claim(gen(1), "a driver", 0), 2: ORDER})
    assert recovery.decided_reset(found) == "5eed"
    assert is_reset(found)


def test_a_reset_names_its_order_in_the_log() -> None:  # SO2, SO9
    written = CheckpointLog(MemoryStorage(), "p")
    written.claim("a driver", 0)
    written.start_over("5eed", 0, written.observe(), gen(7))
    assert recovery.decided_reset(written.observe()) == "5eed"
    written.claim("a driver", 0)
    assert recovery.decided_reset(written.observe()) is None


def test_an_order_is_over_once_somebody_claimed() -> None:  # SO2
    later = Claim(gen(3), "a driver", 0, follows=2, life=2)
    assert recovery.decided_reset(log({2: ORDER, 3: later})) is None


@pytest.mark.parametrize("owner", ["a driver", reset_owner("5eed")])
def test_the_name_of_whoever_claims_orders_nothing(owner: str) -> None:  # SO9
    given_up = Claim(gen(2), owner, 0, follows=0, life=2)
    assert recovery.decided_reset(log({1: Claim(gen(1), "a driver", 0), 2: given_up})) is None


def test_a_claim_that_gives_nothing_up_orders_nothing() -> None:  # SO9
    assert recovery.decided_reset(log({1: Claim(gen(1), "a driver", 0, order="5eed")})) is None
