"""Whose the target of a user's sink is: what its classes must keep, and what they are told when they do not."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from tests.connectors.test_two_phase_sink import committer, permit, prepared, rows_in, target_at
from tests.support.sqlite_sinks import SqliteLedgerSink, SqliteSink, connect

import headgate as hg
from headgate.codec.json_files import encode_life
from headgate.model.ids import Generation
from headgate.model.pipeline_identity import OtherSink, Owner, PipelineIdentity
from headgate.testing.sinks.scenarios import check_owner, check_start_over

Kind = Callable[[str], Any]

MINE, OTHER = PipelineIdentity("mine", "/mine", "here", 1), PipelineIdentity("other", "/other", "far", 2)
FORGOTTEN = Owner(None, Generation(3), is_forgotten=True)

each = pytest.mark.parametrize("kind", [SqliteSink, SqliteLedgerSink], ids=["two phases", "ledger"])


def fence_of(life: PipelineIdentity | None, generation: int = 0) -> hg.Fence:
    return hg.Fence("p:out", generation, encode_life(life).decode())


@each
def test_a_target_knows_its_pipeline_again_and_refuses_another_one(tmp_path: Path, kind: Kind) -> None:
    check_owner(target_at(tmp_path / "owner.db", kind))
    check_start_over(target_at(tmp_path / "over.db", kind))
    assert kind("anywhere").has_owner


@each
def test_of_two_pipelines_that_ask_at_once_one_gets_the_target(tmp_path: Path, kind: Kind) -> None:  # LV3
    sink = kind(str(tmp_path / "t.db"))
    claim = sink.claim

    def after_another(fence: hg.Fence) -> None:
        claim(fence_of(OTHER))
        claim(fence)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sink, "claim", after_another)
        assert sink.own("p", "out", MINE) == Owner(OTHER)
    assert sink.own("p", "out", MINE) == Owner(OTHER)


@each
def test_of_many_lives_that_come_at_once_all_hear_of_the_same_one(tmp_path: Path, kind: Kind) -> None:  # LV3
    kind(str(tmp_path / "t.db")).owner("p", "out")  # its tables are there

    def come(number: int) -> Owner:
        owner: Owner = kind(str(tmp_path / "t.db")).own(
            "p", "out", PipelineIdentity(f"{number}", "/somewhere", "far", number)
        )
        return owner

    with ThreadPoolExecutor(8) as pool:
        assert len(set(pool.map(come, range(8)))) == 1


@each
def test_claiming_a_generation_keeps_whose_the_target_is(tmp_path: Path, kind: Kind) -> None:
    sink = kind(str(tmp_path / "t.db"))
    sink.own("p", "out", MINE)
    one = prepared(sink, 1, 7)
    committer(sink, 3, [one]).commit(permit(1, 3), [one])
    assert sink.owner("p", "out") == Owner(MINE, Generation(3))
    assert [row["number"] for row in rows_in(sink.path)] == [7]


@each
def test_a_driver_of_a_former_life_changes_nothing_even_with_the_same_generation(tmp_path: Path, kind: Kind) -> None:
    # whoever was made to forget does not wait for the former driver to end
    sink = kind(str(tmp_path / "t.db"))
    sink.own("p", "out", OTHER)
    one = prepared(sink, 1, 7, generation=2)
    former = committer(sink, 2, [one])
    assert sink.forget_owner("p", "out") == Owner(OTHER, Generation(2))
    assert sink.own("p", "out", MINE).life == MINE
    with pytest.raises(hg.FencedError, match="belongs to the pipeline with its checkpoints in /mine"):
        former.commit(permit(1, 2), [one])
    assert rows_in(sink.path) == []


@each
def test_letting_a_target_forget_twice_is_forgetting_once(tmp_path: Path, kind: Kind) -> None:  # LV4
    sink = kind(str(tmp_path / "t.db"))
    sink.own("p", "out", MINE)
    committer(sink, 4, [])
    assert sink.forget_owner("p", "out").life == MINE
    assert sink.forget_owner("p", "out") == Owner(None, Generation(4), is_forgotten=True)


@each
def test_a_target_fenced_without_a_life_belongs_to_none(tmp_path: Path, kind: Kind) -> None:
    path = str(tmp_path / "t.db")
    with sqlite3.connect(path) as former:
        former.execute("create table owners (owner text primary key, generation integer)")
        former.execute("insert into owners values ('p:out', 3)")
        former.execute("alter table owners add column life text")
    sink = kind(path)
    assert sink.owner("p", "out") == Owner(None, Generation(3))
    assert sink.own("p", "out", MINE).life is None, "what it knows of generation 3 is not from this life"


class ClaimsOnly(hg.LedgerSink):
    """What was written before a target had to say whose it is."""

    def __init__(self, path: str) -> None:
        self.path = path

    def claim(self, fence: hg.Fence) -> None:
        with connect(self.path) as target:
            target.execute("begin immediate")
            row = target.execute("select generation from owners where owner = ?", [fence.owner]).fetchone()
            fence.refuse_if_older_than(row[0] if row else None)
            known = [fence.owner, fence.generation]
            target.execute("insert or replace into owners (owner, generation) values (?, ?)", known)

    published = publish = lambda self, *_: None  # type: ignore[assignment]


class ForgetsLives(ClaimsOnly):
    """Says who claimed it, but not for whom."""

    def claimed(self, owner: str) -> hg.Fence | None:
        with connect(self.path) as target:
            row = target.execute("select owner, generation from owners where owner = ?", [owner]).fetchone()
        return hg.Fence(*row) if row else None

    def all_claimed(self) -> Sequence[hg.Fence]:
        return ()


def test_a_class_that_does_not_say_whose_its_target_is_is_told_what_to_add(tmp_path: Path) -> None:
    sink = ClaimsOnly(str(tmp_path / "t.db"))
    with pytest.raises(hg.UsageError, match=r"ClaimsOnly cannot tell .*: give it a method claimed\(self, owner\)"):
        sink.owner("p", "out")


class ListsNobody(ClaimsOnly):
    """Says who claimed it, but not who else."""

    def claimed(self, owner: str) -> hg.Fence | None:
        return None


def test_a_class_that_does_not_say_who_else_is_there_is_told_what_to_add(tmp_path: Path) -> None:
    sink = ListsNobody(str(tmp_path / "t.db"))
    with pytest.raises(hg.UsageError, match=r"ListsNobody cannot tell .*: give it a method all_claimed\(self\)"):
        sink.owner("p", "out")


class CannotList(SqliteLedgerSink):
    """What a target has that knows its owners by name alone."""

    def all_claimed(self) -> Sequence[hg.Fence]:
        return ()


def test_a_target_that_cannot_list_its_owners_knows_them_one_by_one(tmp_path: Path) -> None:
    assert "former name" in str(check_owner(target_at(tmp_path / "t.db", CannotList)))
    assert check_owner(target_at(tmp_path / "u.db", SqliteLedgerSink)) is None


class KeepsAll(SqliteLedgerSink):
    """What a target lists that keeps every fence it was told: in whatever order."""

    kept: Sequence[hg.Fence] = ()

    def all_claimed(self) -> Sequence[hg.Fence]:
        return self.kept


@pytest.mark.parametrize("order", [1, -1])
def test_of_the_fences_of_an_owner_the_newest_counts_wherever_it_is_listed(tmp_path: Path, order: int) -> None:
    sink = KeepsAll(str(tmp_path / "t.db"))
    sink.kept = [fence_of(OTHER, 2), fence_of(MINE, 3), fence_of(MINE, 10)][::order]
    assert sink.owner("p", "renamed").others == (OtherSink("out", Owner(MINE, Generation(10))),)


@pytest.mark.parametrize(("last", "known"), [(MINE, Owner(MINE, Generation(3))), (None, FORGOTTEN)])
def test_of_equal_fences_of_an_owner_the_last_one_listed_counts(
    tmp_path: Path, last: PipelineIdentity | None, known: Owner
) -> None:
    # forgetting and the life that comes next keep the generation
    sink = KeepsAll(str(tmp_path / "t.db"))
    sink.kept = [fence_of(OTHER, 3), fence_of(last, 3), fence_of(OTHER, 2)]
    assert sink.owner("p", "renamed").others == (OtherSink("out", known),)


def test_a_class_that_does_not_keep_the_life_is_told_so(tmp_path: Path) -> None:
    sink = ForgetsLives(str(tmp_path / "t.db"))
    assert sink.owner("p", "out") == Owner()
    for attempt in (lambda: sink.own("p", "out", MINE), lambda: sink.forget_owner("p", "out")):
        with pytest.raises(hg.UsageError, match=r"ForgetsLives does not keep .*: have claim store fence\.life"):
            attempt()


def test_a_life_that_a_target_cut_off_is_damage(tmp_path: Path) -> None:  # a column of too few characters
    sink = SqliteSink(str(tmp_path / "t.db"))
    sink.own("p", "out", MINE)
    with connect(sink.path) as target:
        target.execute("update owners set life = substr(life, 1, 60)")
    with pytest.raises(hg.CorruptionError, match="the life that the target of sink 'p:out' remembers is damaged"):
        sink.owner("p", "out")


def test_a_target_that_is_away_for_a_moment_is_asked_again(tmp_path: Path) -> None:  # CS5
    sink = SqliteSink(str(tmp_path / "t.db"))

    def locked(*_: object) -> None:
        raise sqlite3.OperationalError("database is locked")

    for name in ("claimed", "claim"):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(sink, name, locked)
            with pytest.raises(hg.StorageError, match="database is locked") as caught:
                sink.own("p", "out", MINE)
            assert caught.value.is_transient
    assert sink.own("p", "out", MINE) == Owner(MINE)


def test_a_fence_without_a_life_goes_by_generation(tmp_path: Path) -> None:  # those of the workers have none
    known = fence_of(MINE, 3)
    hg.Fence("p:out", 3).refuse_if_replaced_by(known)
    known.refuse_if_replaced_by(None)
    known.refuse_if_replaced_by(hg.Fence("p:out", 3))
    known.refuse_if_replaced_by(fence_of(None, 3))
    with pytest.raises(hg.FencedError, match="generation 2 was replaced by generation 3"):
        fence_of(OTHER, 2).refuse_if_replaced_by(known)
    with pytest.raises(hg.FencedError, match="in /mine"):
        fence_of(OTHER, 4).refuse_if_replaced_by(known)


def test_a_target_that_others_claim_meanwhile_is_told_again(tmp_path: Path) -> None:  # LV3
    sink = SqliteSink(str(tmp_path / "t.db"))

    def fenced(fence: hg.Fence) -> None:
        raise hg.FencedError("sink 'p:out'", 0, 1)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sink, "claim", fenced)
        with pytest.raises(hg.StorageError, match="others claim it all the time") as caught:
            sink.own("p", "out", MINE)
    assert caught.value.is_transient
    assert sink.own("p", "out", MINE) == Owner(MINE)
