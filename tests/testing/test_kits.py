"""The kits must be able to fail: each broken source or sink is caught."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from tests.testing.staged import StagedSink, at

from headgate.connectors.base import (
    CheckpointMarker,
    Committer,
    CoordinatorHook,
    SealedTransaction,
    SinkContext,
    SinkWriter,
    Source,
    SourceBatch,
    SourceContext,
    SourceReader,
)
from headgate.connectors.files.file_committer import FileCommitter
from headgate.connectors.files.file_sink import FileSink
from headgate.connectors.files.publish_log import SinkIdentity
from headgate.connectors.memory import FromRows
from headgate.errors import UsageError
from headgate.model.ids import CheckpointId, Generation
from headgate.model.manifest import Committable
from headgate.model.pipeline_identity import Owner, PipelineIdentity
from headgate.protocol.checkpoints.commit import CommitPermit
from headgate.storage.urls import open_storage
from headgate.testing import Collect, Target, check_sink, check_source, source_kit
from headgate.testing.sinks.scenarios import KillPoint, check_kill, check_lost_answers, check_owner


class ForgetsPositions(FromRows):
    def open(self, context: SourceContext) -> SourceReader:
        return super().open(SourceContext("p", "s", context.subtask_index, context.parallelism, None))


class SkipsARow(FromRows):
    def open(self, context: SourceContext) -> SourceReader:
        positions = {k: bytes([v[0] + 1]) + v[1:] for k, v in (context.positions or {}).items()}
        return super().open(SourceContext("p", "s", context.subtask_index, context.parallelism, positions or None))


class ReadsTwice(FromRows):
    def open(self, context: SourceContext) -> SourceReader:
        return super().open(SourceContext("p", "s", 0, 1, context.positions))


@pytest.mark.parametrize(
    ("source", "message"),
    [
        (ForgetsPositions, "delivered again"),
        (SkipsARow, "lost"),
        (ReadsTwice, "delivered again|not ended|own one split"),
    ],
)
def test_broken_sources_are_caught(source: type[FromRows], message: str) -> None:
    with pytest.raises(AssertionError, match=message):
        check_source(source([{"n": n} for n in range(9)], batch_rows=2))


class TellsEachEndByItself(FromRows):
    """As a stream does: that a split has ended is not in its position, and takes a poll of its own."""

    opens_count = 0

    def open(self, context: SourceContext) -> SourceReader:
        self.opens_count += 1
        reader = super().open(context)
        ended: set[str] = reader._ended  # type: ignore[attr-defined]
        poll, to_tell = reader.poll, sorted(ended)
        ended.clear()

        def tell_first() -> SourceBatch | None:
            if not to_tell:
                return poll()
            split = to_tell.pop(0)
            ended.add(split)
            return SourceBatch(split, pa.RecordBatch.from_pylist([], schema=self.schema()), is_split_finished=True)

        reader.poll = tell_first  # type: ignore[method-assign]
        return reader


def test_a_source_that_tells_each_end_by_itself_comes_to_its_end() -> None:
    rows = [{"n": n} for n in range(9)]
    assert len(check_source(TellsEachEndByItself(rows, splits=3, batch_rows=2))) == 9


def test_every_poll_that_changes_something_is_restarted_behind() -> None:
    source = TellsEachEndByItself([{"n": n} for n in range(9)], splits=3, batch_rows=2)
    source_kit._run(source, 1, lambda _: True, 100, if_changed=True)
    assert source.opens_count == 1 + 6, "each split takes two polls with records"


class NoOpRecover(FileCommitter):
    def recover(self, keep: Sequence[Committable]) -> None:
        return


class AbortsEverything(FileCommitter):
    def recover(self, keep: Sequence[Committable]) -> None:
        super().recover(())


class SkipsOlderIds(FileCommitter):
    newest: dict[str, int] = {}

    def commit(self, permit: CommitPermit, committables: Sequence[Committable]) -> None:
        url = self._storage.url
        if committables and permit.checkpoint > self.newest.get(url, 0):
            super().commit(permit, committables)
            self.newest[url] = permit.checkpoint


class IgnoresWhatIsMissing(FileCommitter):
    def _check_content(self, file: Any) -> None:
        return


class CommitsNothing(FileCommitter):
    def commit(self, permit: CommitPermit, committables: Sequence[Committable]) -> None:
        return


class RefusesNothing(FileCommitter):
    """An empty commit is an error."""

    def commit(self, permit: CommitPermit, committables: Sequence[Committable]) -> None:
        if not committables:
            raise UsageError("there is nothing to commit")
        super().commit(permit, committables)


class BrokenSink(FileSink):
    def __init__(self, url: Path, committer: type[FileCommitter]) -> None:
        super().__init__(url, roll_interval=0)
        self._committer = committer

    def open_committer(self, pipeline: str, node: str, generation: Generation) -> Committer:
        return self._committer(open_storage(self.url), SinkIdentity(pipeline, node), generation)


BROKEN = [NoOpRecover, AbortsEverything, SkipsOlderIds, IgnoresWhatIsMissing, CommitsNothing, RefusesNothing]


@pytest.mark.parametrize("committer", BROKEN)
def test_broken_sinks_are_caught(tmp_path: Path, committer: type[FileCommitter]) -> None:
    places = iter(range(10_000))

    def fresh() -> Target:
        url = f"memory://{tmp_path}/{next(places)}"
        storage = open_storage(url)

        def read() -> list[dict[str, Any]]:
            import polars as pl

            names = [name for name in storage.list("") if not name.startswith("_")]
            return [row for name in names for row in pl.read_ndjson(storage.get(name)).to_dicts()]

        def lose() -> None:
            for path in storage.list("_staging"):
                storage.delete(path)

        return Target(BrokenSink(url, committer), read, lambda: storage.list("_staging"), lose)

    with pytest.raises(AssertionError):
        check_sink(fresh, rescales=[(2, 2)], overlaps=[1], rows=[4])


class ForgetsItsOwner(Collect):
    def own(self, pipeline: str, node: str, life: PipelineIdentity) -> Owner:
        super().own(pipeline, node, life)
        return Owner(life)


class SharesItsOwner(Collect):
    def owner(self, pipeline: str, node: str) -> Owner:
        return super().owner(pipeline, "sink")


@pytest.mark.parametrize(
    ("sink", "message"), [(ForgetsItsOwner, "takes a second life"), (SharesItsOwner, "another sink has the same owner")]
)
def test_sinks_with_a_bad_memory_are_caught(tmp_path: Path, sink: type[Collect], message: str) -> None:  # LV3
    made = sink(tmp_path)
    with pytest.raises(AssertionError, match=message):
        check_owner(Target(made, made.rows))


def test_collect_reads_what_was_committed(tmp_path: Path) -> None:
    for point in KillPoint:
        sink = Collect(tmp_path / point.name)
        check_kill(Target(sink, sink.rows), point, 1, 2, 2, 3)


class SaysSomethingElse(Collect):
    """A sink whose writer takes a repeated ``prepare`` for another one."""

    def open(self, context: SinkContext) -> SinkWriter:
        writer = super().open(context)
        seal = writer.seal

        def sealed(checkpoint: CheckpointId) -> SealedTransaction:
            found = seal(checkpoint)
            answers = itertools.count()
            prepare = found.prepare

            def again() -> bytes | None:
                payload = prepare()
                return payload if payload is None or next(answers) == 0 else payload + b" "

            found.prepare = again  # type: ignore[method-assign]
            return found

        writer.seal = sealed  # type: ignore[method-assign]
        return writer


def test_a_sink_that_answers_a_repeated_call_otherwise_is_caught(tmp_path: Path) -> None:
    sink = SaysSomethingElse(tmp_path / "out")
    with pytest.raises(AssertionError, match="prepare said something else when it was repeated"):
        check_lost_answers(Target(sink, sink.rows))


class Marks(CoordinatorHook):
    """Appends markers to the lists that ``Marked`` reads."""

    def __init__(self, splits: dict[str, list[int]], at: dict[str, int]) -> None:
        self.splits, self.at = splits, at

    def trigger(self, checkpoint_id: int) -> None:
        for name, items in self.splits.items():
            items.insert(self.at[name] + 2, -checkpoint_id)

    def restore(self, checkpoint_id: int, data: bytes | None) -> None:
        """Markers that were met lie before every position."""

    def reset(self) -> None:
        for items in self.splits.values():
            items[:] = [item for item in items if item >= 0]


class Marked(Source):
    """Reads lists of numbers that markers, which are negative, come into. Positions count numbers."""

    def __init__(self, problem: str = "") -> None:
        self.items = {"a": list(range(20)), "b": list(range(20, 29))}
        self.at = dict.fromkeys(self.items, 0)
        self.problem = problem

    def schema(self) -> pa.Schema:
        return pa.schema({"n": pa.int64()})

    def identity(self) -> str:
        return "lists"

    def coordinator_hook(self) -> CoordinatorHook:
        return Marks(self.items, self.at)

    def without_hook(self) -> Marked:
        return self

    def open(self, context: SourceContext) -> MarkedReader:
        mine = [name for i, name in enumerate(self.items) if i % context.parallelism == context.subtask_index]
        positions = context.positions
        if positions and self.problem == "newest":  # wherever it has ever been
            positions = {name: b"%d" % at for name, at in self.at.items()}
        return MarkedReader(self, mine, positions or {})


class MarkedReader:
    def __init__(self, source: Marked, names: list[str], positions: dict[str, bytes]) -> None:
        self.source = source
        self.at = {name: int(positions.get(name, b"0")) for name in names}
        self.still: set[str] = set()
        self.source.at.update(self.at)

    def splits(self) -> Sequence[str]:
        self.source.at.update(self.at)
        return [name for name, at in self.at.items() if at < len(self.source.items[name]) or name in self.still]

    def poll(self) -> SourceBatch | CheckpointMarker | None:
        for name in self.splits():
            if name in self.still:
                continue
            item = self.source.items[name][self.at[name]]
            if item < 0 and self.source.problem != "in front":
                self.at[name] += 1
            if item < 0:
                self.still |= set() if self.source.problem == "goes on" else {name}
                found = 1 if self.source.problem == "wrong id" else -item
                return CheckpointMarker(name, found)
            self.at[name] += 1
            self.source.at.update(self.at)
            return SourceBatch(name, pa.RecordBatch.from_pylist([{"n": item}], self.source.schema()))
        return None

    def read_on(self, splits: Sequence[str]) -> None:
        self.still -= set(splits)
        if self.source.problem == "moves":
            self.at = {name: at + 1 for name, at in self.at.items()}

    def is_finished(self) -> bool:
        return not self.splits()

    def positions(self) -> dict[str, bytes]:
        return {name: b"%d" % at for name, at in self.at.items()}

    def wakeup_ms(self) -> int:
        return 0

    def close(self) -> None:
        pass


def test_the_kit_reads_a_source_that_sets_its_own_barrier() -> None:  # EI33
    assert len(check_source(Marked())) == 29


def test_that_a_source_has_no_markers_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    check_source(FromRows([{"n": 1}]))
    assert capsys.readouterr().out == "left out: markers: the source brings no hook\n"
    check_source(Marked())
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize(
    ("problem", "message"),
    [
        ("goes on", "read on past its marker|went on past the marker"),
        ("wrong id", "was met, and 2 was to be"),
        ("in front", "was to be"),
        ("moves", r"read_on\(\) moved the positions"),
        ("newest", "parallelism 1, restart after every marker: lost"),  # it knows one place to go on
    ],
)
def test_the_kit_refuses_sources_that_set_their_barrier_wrongly(problem: str, message: str) -> None:  # EI33
    with pytest.raises(AssertionError, match=message):
        check_source(Marked(problem))


NEVER_FORGETS = "forgetting: the sink has nothing that forgets"
NEVER_REMOVES = "remove output: the sink has no method remove_output, so a pipeline with it cannot start over"
SAYS_LITTLE = [
    "the order of the output: Target(is_ordered=...) is not given",
    "what is left behind: Target(leftovers=...) is not given",
    NEVER_FORGETS,
    "lost prepared: Target(lose_prepared=...) is not given",
    "lost prepared in recovery: Target(lose_prepared=...) is not given",
    "taken away: Target(take=...) is not given",
    NEVER_REMOVES,
    "outages: Target(advance_clock=...) is not given",
]


def quickly(fresh: Callable[[], Target]) -> list[str]:
    return check_sink(fresh, rescales=[(2, 1)], overlaps=[2], rows=[6])


def says_little() -> Target:
    made = at(StagedSink)
    return Target(made.sink, made.read)


def test_what_the_kit_left_out_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    assert quickly(says_little) == SAYS_LITTLE
    assert capsys.readouterr().out == "".join(f"left out: {one}\n" for one in SAYS_LITTLE)


def test_what_a_target_says_is_not_left_out() -> None:
    def fresh() -> Target:
        made = at(StagedSink)
        assert isinstance(made.sink, StagedSink)
        place = made.sink.place

        def lose() -> None:
            for name in list(place.opened):
                place.drop(name)

        return replace(made, lose_prepared=lose, take=place.shown.clear)

    assert quickly(fresh) == [NEVER_FORGETS, NEVER_REMOVES]
