"""Mutants of truncation, holds and retention."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import pytest
from tests.mutants.harness import Mutant, assert_caught, patched
from tests.protocol.store import test_truncation as decisions
from tests.store import test_store_truncation as tests

from headgate.protocol.store import truncation
from headgate.protocol.store.truncation import Move
from headgate.storage.faulty import FaultyStorage
from headgate.storage.local import LocalStorage
from headgate.store import fsck, reader, writer
from headgate.store.appends import Starts
from headgate.store.catalogue import heads, positions
from headgate.store.catalogue import streams as sql_streams
from headgate.store.catalogue.values import AppendFound
from headgate.store.cut_store import CutStore
from headgate.store.cuts import StreamCut
from headgate.store.store import Store

Test = Callable[..., object]


@contextmanager
def a_store(directory: Path) -> Iterator[tuple[Store, FaultyStorage, tests.Clock]]:
    """What the fixtures of the tests make."""
    disk, clock = FaultyStorage(LocalStorage(directory / "store" / "chunks")), tests.Clock()
    with Store.open(directory / "store", storage=disk) as opened:
        store = Store(opened.root, opened._catalogue, disk, clock=clock)
        store.create_stream(tests.STREAM, tests.KEYED, segments=2, routing_key="key")
        yield store, disk, clock


def heads_go_back() -> AbstractContextManager[None]:  # S65
    return patched(truncation, "_forward", lambda cut, extents: dict(cut))


def a_cut_behind_the_end_is_taken() -> AbstractContextManager[None]:  # S65
    real = truncation.truncate

    def truncate(cut: Any, extents: Any, holds: Any, *, anyway: bool) -> Any:
        return real({s: min(p, extents[s].end) for s, p in cut.items() if s in extents}, extents, holds, anyway=anyway)

    return patched(truncation, "truncate", truncate)


def holds_do_not_count_for_retention() -> AbstractContextManager[None]:  # S69, S71
    real = truncation.retain
    return patched(truncation, "retain", lambda cut, extents, holds: real(cut, extents, ()))


def a_segment_that_a_hold_does_not_name_is_free() -> AbstractContextManager[None]:  # S69
    return patched(truncation.Hold, "position", lambda self, segment, extent: self.positions.get(segment, extent.end))


def readers_are_not_told() -> AbstractContextManager[None]:  # S67
    return patched(positions, "_HEAD", positions._HEAD.where(positions.t.segments.c.head_position < 0))


def a_file_that_went_is_taken_for_damage() -> AbstractContextManager[None]:  # S67
    return patched(reader.SegmentReader, "_check_not_truncated", lambda self: None)


def a_missing_file_is_taken_for_truncated() -> AbstractContextManager[None]:  # S67
    def check(self: Any) -> None:
        raise reader.TruncatedError(self.stream.name, self.segment, self.position, self.position + 1)

    return patched(reader.SegmentReader, "_check_not_truncated", check)


def files_are_forgotten_before_they_are_deleted() -> AbstractContextManager[None]:  # S68
    return patched(CutStore, "_delete", lambda self, path: tests.files(self) is not None)


def a_lost_append_is_looked_up_among_chunks_only() -> AbstractContextManager[None]:  # S68
    def found(self: Any, path: str) -> Starts | None:
        return self._catalogue.find_append(path).starts  # type: ignore[no-any-return]

    return patched(writer.StreamWriter, "_found", found)


def garbage_does_not_tell_of_an_append() -> AbstractContextManager[None]:  # S68
    real = positions.recorded_starts
    return patched(positions, "recorded_starts", lambda connection, path: AppendFound(real(connection, path).starts))


def authors_go_with_their_events() -> AbstractContextManager[None]:  # LV9
    return patched(heads, "_remember_author", lambda *_: None)


def dates_are_those_of_the_clock() -> AbstractContextManager[None]:  # S66
    real = positions.assign_positions

    def assign(connection: Any, stream_id: int, parts: Any, now_ms: int) -> Any:
        connection.execute(positions.t.segments.update().values(latest_ms=0))
        return real(connection, stream_id, parts, now_ms)

    return patched(positions, "assign_positions", assign)


def cuts_of_any_stream_fit() -> AbstractContextManager[None]:  # S66
    return patched(StreamCut, "check", lambda self, stream: None)


def a_hold_of_what_is_gone_is_taken() -> AbstractContextManager[None]:  # S69
    real = heads._extents

    def extents(connection: Any, *of: Any) -> Any:
        return {s: truncation.Extent(0, x.end) for s, x in real(connection, *of).items()}

    return patched(heads, "_extents", extents)


def whoever_was_replaced_holds_on() -> AbstractContextManager[None]:  # S69
    return patched(heads, "_newest", lambda *_: None)


def another_life_is_taken_for_an_heir() -> AbstractContextManager[None]:  # SC30
    return patched(truncation.Hold, "is_replaced_by", lambda self, life, epoch: epoch > self.epoch)


def nobody_looks() -> AbstractContextManager[None]:  # S71
    return patched(CutStore, "look_after", lambda self, name: None)


def everybody_looks_all_the_time() -> AbstractContextManager[None]:  # S71
    return patched(CutStore, "look_after", lambda self, name: self.retain(name))


def what_a_look_found_goes_unasked() -> AbstractContextManager[None]:  # S69, S71
    return patched(heads, "retain", lambda connection, stream, cut: heads._move(connection, stream, Move(cut)))


def whoever_moves_last_is_right() -> AbstractContextManager[None]:  # S65, S71
    def retained(connection: Any, stream: Any, cut: Any) -> Move:
        return Move({s: p for s, p in cut.items() if p != heads.extents(connection, stream)[s].head})

    return patched(heads, "_retained", retained)


def any_retention_lets_go() -> AbstractContextManager[None]:  # S71
    return patched(heads, "_policy", lambda connection, stream: stream.retention)


def a_look_goes_by_the_name() -> AbstractContextManager[None]:  # S71
    real = heads.retain

    def retain(connection: Any, stream: Any, cut: Any) -> dict[int, int]:
        return real(connection, sql_streams.find_stream(connection, stream.name, ""), cut)

    return patched(heads, "retain", retain)


def every_look_writes() -> AbstractContextManager[None]:  # S71
    def let_go(self: Any, stream: Any) -> bool:
        return bool(self._catalogue.retain(stream, self._catalogue.retention_cut(stream, self._now_ms())))

    return patched(CutStore, "_let_go", let_go)


def less_than_the_size_stays() -> AbstractContextManager[None]:  # S71
    real = heads._dates
    return patched(heads, "_dates", lambda *a: [date + 1 for date in real(*a)])


def a_chunk_in_part_truncated_is_damage() -> AbstractContextManager[None]:  # S40, S68
    return patched(fsck, "_check_chunk", lambda audit, storage, chunk: fsck_of(storage, chunk))


def fsck_of(storage: Any, chunk: Any) -> list[fsck.Problem]:
    footer = fsck.decode_footer(chunk.path, storage.get(chunk.path))
    return [] if set(footer.parts) == set(chunk.entries) else [fsck.Problem(chunk.path, "disagrees")]


MUTANTS: dict[Mutant, Test] = {
    heads_go_back: tests.test_truncating_again_or_before_the_head_changes_nothing,
    a_cut_behind_the_end_is_taken: tests.test_a_cut_that_names_what_is_not_there_is_refused,
    holds_do_not_count_for_retention: tests.test_old_events_go_by_age_and_what_is_held_stays,
    a_segment_that_a_hold_does_not_name_is_free: (
        decisions.test_of_a_segment_that_a_hold_does_not_name_everything_is_needed
    ),
    readers_are_not_told: tests.test_a_reader_that_is_behind_the_head_is_told_and_skips_nothing,
    a_file_that_went_is_taken_for_damage: tests.test_a_file_that_goes_behind_the_look_of_a_reader_is_no_damage,
    a_missing_file_is_taken_for_truncated: tests.test_a_missing_file_of_events_that_are_there_is_damage,
    files_are_forgotten_before_they_are_deleted: tests.test_a_sweep_that_was_cut_short_goes_on,
    a_lost_append_is_looked_up_among_chunks_only: (
        tests.test_an_append_that_was_truncated_before_its_answer_came_is_not_repeated
    ),
    garbage_does_not_tell_of_an_append: tests.test_the_same_while_its_file_waits_to_be_deleted,
    authors_go_with_their_events: tests.test_who_wrote_what_was_truncated_is_remembered,
    dates_are_those_of_the_clock: tests.test_a_clock_that_goes_back_does_not_take_events_out_of_order,
    cuts_of_any_stream_fit: tests.test_a_cut_of_a_former_stream_is_refused,
    a_hold_of_what_is_gone_is_taken: tests.test_what_was_truncated_cannot_be_held,
    whoever_was_replaced_holds_on: tests.test_whoever_was_replaced_does_not_move_what_its_heir_holds,
    another_life_is_taken_for_an_heir: decisions.test_a_generation_that_was_replaced_holds_nothing,
    nobody_looks: tests.test_writers_and_sinks_look_once_a_minute,
    everybody_looks_all_the_time: tests.test_writers_and_sinks_look_once_a_minute,
    what_a_look_found_goes_unasked: tests.test_what_is_held_since_the_look_stays,
    whoever_moves_last_is_right: tests.test_a_truncation_since_the_look_is_not_taken_back,
    any_retention_lets_go: tests.test_nothing_goes_by_a_retention_that_the_stream_has_no_more,
    a_look_goes_by_the_name: tests.test_a_look_at_a_stream_that_was_deleted_takes_nothing_of_its_namesake,
    every_look_writes: tests.test_a_look_that_finds_nothing_moves_nothing,
    less_than_the_size_stays: tests.test_the_oldest_go_by_size_and_at_least_the_size_stays,
    a_chunk_in_part_truncated_is_damage: tests.test_a_truncated_stream_begins_at_the_cut_and_positions_stay,
}


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.__name__)
def test_mutants_are_caught(mutant: Mutant, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    test = MUTANTS[mutant]
    tries = iter(range(10))

    def run() -> None:
        if test.__module__ == decisions.__name__:
            test()
            return
        with a_store(tmp_path / str(next(tries))) as (store, disk, clock), monkeypatch.context() as patch:
            given = {"store": store, "disk": disk, "clock": clock, "monkeypatch": patch}
            wanted = test.__code__.co_varnames[: test.__code__.co_argcount]  # type: ignore[attr-defined]
            test(**{name: given[name] for name in wanted})

    run.__name__ = test.__name__  # type: ignore[attr-defined]
    assert_caught(mutant, run)
