"""Output that an old checkpoint promised and that was committed since is not promised again."""

from __future__ import annotations

import shutil
import sqlite3
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from tests.testing.staged import ForgettingSink, StagedLedger, StagedSink
from tests.testing.staged import Place as Target

import headgate as hg
from headgate import fault_points
from headgate.codec.snapshot import FINISHED_PREFIX
from headgate.connectors.base import SinkContext
from headgate.connectors.files.file_committer import read_committed
from headgate.connectors.sql.sink import SqlSink
from headgate.connectors.streams.stream_sink import StreamCommitter
from headgate.errors import CorruptionError, NameAnotherPlace, OutputDenied, StorageError, UsageError
from headgate.model.config import DamagedCheckpoint, DeniedOutput, StartConfig
from headgate.model.ids import CheckpointId
from headgate.model.manifest import Committable, Manifest, SubtaskEntry
from headgate.model.plan import PipelineDefinition
from headgate.protocol.checkpoints.commit import CommitPermit
from headgate.protocol.checkpoints.recovery import candidates
from headgate.runtime.checkpoints.log import CheckpointLog
from headgate.runtime.checkpoints.snapshot_writer import SnapshotDestination, SubtaskTarget
from headgate.runtime.driver import restart
from headgate.runtime.driver.restart import NewGeneration, begin_generation
from headgate.runtime.state_reader.lookup import find_checkpoint
from headgate.storage.local import LocalStorage
from headgate.store.store import Store

SCHEMA = pa.schema([("id", pa.int64())])


@dataclass
class Kind:
    """A sink of one kind, and how its output is read."""

    sink: Any
    read: Callable[[], Iterable[int]]

    @property
    def shown(self) -> list[int]:
        return sorted(self.read())


def streams(root: Path) -> Kind:
    def read() -> Iterable[int]:
        with Store.open(root / "store") as store:
            readers = [store.reader("s", segment) for segment in range(store.describe("s").segments_count)]
            return [row["id"] for one in readers for batch in iter(one.read, None) for row in batch.to_pylist()]

    return Kind(hg.StreamSink("s", store=str(root / "store")), read)


def files(root: Path) -> Kind:
    def read() -> Iterable[int]:
        found = read_committed(str(root / "out"))
        return found["id"].to_list() if found.width else []

    return Kind(hg.FileSink(root / "out", roll_interval=0), read)


def delta(root: Path) -> Kind:
    deltalake = pytest.importorskip("deltalake")

    def read() -> Iterable[int]:
        found = pa.table(deltalake.DeltaTable(str(root / "table")).to_pyarrow_table())
        return found["id"].to_pylist()  # type: ignore[no-any-return]

    return Kind(hg.DeltaSink(root / "table", create=True), read)


def sql(root: Path) -> Kind:
    root.mkdir(exist_ok=True)
    path = str(root / "rows.db")
    with sqlite3.connect(path) as database:
        database.execute("create table if not exists rows (id bigint)")

    def read() -> Iterable[int]:
        with sqlite3.connect(path) as database:
            return [number for (number,) in database.execute("select id from rows")]

    return Kind(SqlSink(url=f"sqlite:///{path}", table="rows"), read)


def staged(kind: Any) -> Callable[[Path], Kind]:
    def make(root: Path) -> Kind:
        target = Target(limit_ms=None)
        return Kind(kind(target), lambda: [row["id"] for row in target.shown])

    return make


class Lasting(StagedSink):
    transaction_timeout = None  # type: ignore[assignment]


class Forgetful(ForgettingSink):
    transaction_timeout = None  # type: ignore[assignment]


KINDS: dict[str, Callable[[Path], Kind]] = {
    "streams": streams,
    "files": files,
    "tables of Delta": delta,
    "ledger": staged(StagedLedger),
    "table of SQL": sql,
    "two phases": staged(Lasting),
    "two phases that forget": staged(Forgetful),
}
ALL = pytest.mark.parametrize("kind", KINDS)


class Home:
    """A pipeline of one sink, whose runs complete one checkpoint each, with one row: the checkpoint's number."""

    def __init__(self, root: Path, kind: Kind, directory: str = "home") -> None:
        self.kind, self.root = kind, root / directory
        self.definition = self.program("out")
        self.storage = LocalStorage(self.root)
        self.notes: list[str] = []
        self.unclaimed: tuple[str, ...] = ()

    def program(self, *sinks: str) -> PipelineDefinition:
        """Return a pipeline with these sinks: "out" is the one that is looked at."""
        pipeline = hg.Pipeline("p", parallelism=1, checkpointing=hg.Checkpointing(interval=None, dir=self.root))
        rows = pipeline.source(hg.FromRows([{"id": 1}]), name="in")
        for name in sinks:
            rows.sink(self.kind.sink if name == "out" else hg.Discard(), name=name)
        return pipeline.definition()

    def begin(self, place: object = None, past: int | None = None, **config: Any) -> NewGeneration:
        """Begin a generation, at ``place`` if one is named."""
        self.log = CheckpointLog(self.storage, "p")
        start = StartConfig(None if place is None else str(place), None if past is None else CheckpointId(past))
        start = replace(start, allow_unclaimed_state=self.unclaimed)
        definition = replace(self.definition, config=replace(self.definition.config, start=start, **config))
        found = begin_generation(definition, self.log, "test", self.notes.append)
        assert isinstance(found, NewGeneration)
        return found

    def run(
        self, place: object = None, past: int | None = None, *, retained: int = 1, commits: bool = True, **config: Any
    ) -> int:
        """Complete one checkpoint; return its number."""
        begun = self.begin(place, past, **config)
        here = begun.first_checkpoint
        self.log.reserve(here)
        output = self._prepared(begun)
        oldest = [*begun.retained, here][-retained:][0]
        self.log.append(self._manifest(begun, output), oldest)
        if commits:
            begun.commits.commit(CommitPermit(here, begun.generation), output)
        begun.commits.close()
        self.log.drop(CheckpointId(oldest - 1), oldest)
        return here

    def _prepared(self, begun: NewGeneration) -> Sequence[Committable]:
        here = begun.first_checkpoint
        if "out" not in self.definition.plan.state_texts():
            return []
        writer = self.kind.sink.open(SinkContext("p", "out", 0, 1, begun.generation, SCHEMA))
        writer.write(pa.record_batch([[here]], schema=SCHEMA))
        payload = writer.seal(here).prepare()
        return [Committable("out", here, 0, begun.generation, payload)]

    def _manifest(self, begun: NewGeneration, output: Sequence[Committable]) -> Manifest:
        here, by, plan = begun.first_checkpoint, begun.generation, self.definition.plan
        targets = [SubtaskTarget(SnapshotDestination(self.storage, "p", by, 0), s, here) for s in plan.subtasks()]
        for target in targets:
            target.put_bundle({f"{FINISHED_PREFIX}in": b"\x00"})
        entries = [SubtaskEntry(s, t.finish()) for s, t in zip(plan.subtasks(), targets, strict=True)]
        entries[-1] = replace(entries[-1], committables=tuple(output))
        texts = plan.state_texts()
        return Manifest(
            here, by, 1, plan.max_parallelism, tuple(entries), (), texts, origin=begun.origin, left=begun.left
        )

    @property
    def checkpoints(self) -> list[int]:
        return [m.checkpoint for m in reversed(candidates(CheckpointLog(self.storage, "p").observe()))]

    def chk(self, number: int, root: Path | None = None) -> Path:
        return (root or self.root) / "p" / f"chk-{number}"


@pytest.fixture(autouse=True)
def _no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(restart, "RETRY_PAUSES_S", (0.0, 0.0))


def edited(home: Home, number: int, root: Path) -> Path:
    hg.edit_savepoint(home.chk(number), root / "mended").write()
    return root / "mended"


def copied(home: Home, number: int, root: Path) -> Path:
    return home.chk(number, shutil.copytree(home.root, root / f"copy-{number}"))


KEEPING = pytest.mark.parametrize("keep", [edited, copied])
Keep = Callable[[Home, int, Path], Path]


@ALL
@KEEPING
def test_going_back_to_a_copy_commits_nothing_twice_and_loses_nothing(  # SV26, WS10, K20
    tmp_path: Path, kind: str, keep: Keep
) -> None:
    home = Home(tmp_path, KINDS[kind](tmp_path))
    assert home.run() == 1
    place = keep(home, 1, tmp_path)
    assert [home.run(), home.run()] == [2, 3]
    home.begin()  # targets forget
    assert home.run(place, 3, on_denied=DeniedOutput.LOSE) == 5
    assert home.run() == 6
    assert home.kind.shown == [1, 2, 3, 5, 6]
    assert not [note for note in home.notes if "LOST" in note]
    assert list((home.root / "p").glob("lost/*")) == []


@ALL
@KEEPING
def test_what_the_newest_checkpoint_still_promises_is_committed(tmp_path: Path, kind: str, keep: Keep) -> None:  # SV26
    home = Home(tmp_path, KINDS[kind](tmp_path))
    home.run(commits=False)
    place = keep(home, 1, tmp_path)
    killed_at("after-adoption", home, place, 1)
    home.begin()
    assert home.kind.shown == [1]
    home.run()
    home.run(place, home.checkpoints[-1])
    assert home.kind.shown.count(1) == 1


def killed_at(point: str, home: Home, place: Path, past: int | None) -> None:
    """Begin a generation that gets no further than ``point``."""

    def reach(name: str) -> None:
        if name == point:
            raise StorageError("write", "x", "the power went", is_transient=False)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fault_points, "reach", reach)
        with pytest.raises(StorageError):
            home.begin(place, past)


@ALL
def test_a_driver_that_is_killed_around_an_adoption_is_followed_by_one_that_adopts(tmp_path: Path, kind: str) -> None:
    # SV26
    for point in ("after-claim", "after-adoption"):
        root = tmp_path / point
        home = Home(root, KINDS[kind](root))
        home.run()
        place = copied(home, 1, root)
        home.run()
        killed_at(point, home, place, 2)
        home.run(place, 2)
        assert home.kind.shown[:2] == [1, 2]
        assert len(home.kind.shown) == 3


def test_an_old_checkpoint_of_a_log_that_went_on_promises_no_more_when_it_is_changed(tmp_path: Path) -> None:  # WS10
    home = Home(tmp_path, KINDS["streams"](tmp_path))
    for _ in range(3):
        home.run(retained=3)
    place = edited(home, 2, tmp_path)
    assert find_checkpoint(str(place)).manifest.committables == ()
    hg.edit_savepoint(home.chk(3), tmp_path / "newest").write()
    assert [c.checkpoint for c in find_checkpoint(str(tmp_path / "newest")).manifest.committables] == [3]
    hg.edit_savepoint(tmp_path / "newest", tmp_path / "twice").write()
    home.run()
    home.run()
    home.run(tmp_path / "twice", 5)
    assert home.kind.shown == [1, 2, 3, 4, 5, 7]


@pytest.mark.parametrize("kind", ["streams", "files", "two phases that forget"])
@pytest.mark.parametrize("where", ["own", "copy"])
def test_a_checkpoint_that_was_left_with_its_output_undecided_is_not_adopted(  # SV20, SV26
    tmp_path: Path, kind: str, where: str
) -> None:
    home = Home(tmp_path, KINDS[kind](tmp_path))
    home.run(retained=9)
    home.run(retained=9)
    home.run(retained=9, commits=False)
    place = home.chk(3) if where == "own" else copied(home, 3, tmp_path)
    assert home.run(home.chk(2), 3, retained=9) == 5
    before = home.checkpoints
    for _ in range(2):
        with pytest.raises(UsageError) as refused:
            home.begin(place, 5)
        assert isinstance(refused.value.remedy, NameAnotherPlace)
        assert f"pipeline 'p' is not restored from {place}: sink 'out'" in str(refused.value)
        assert "start it without naming anything to go on from checkpoint 5" in str(refused.value)
        assert "--go-back-past 5" in str(refused.value)
    assert home.checkpoints == before
    assert home.run() == 6 or home.checkpoints[-1] > 5
    assert home.kind.shown[:3] == [1, 2, 5]


@pytest.mark.parametrize("kind", ["ledger", "two phases"])
def test_a_target_that_cannot_be_asked_is_told_to_commit(tmp_path: Path, kind: str) -> None:  # SV26
    home = Home(tmp_path, KINDS[kind](tmp_path))
    home.run(retained=9)
    home.run(retained=9)
    assert home.run(home.chk(1), 2, retained=9) == 4
    assert home.run(home.chk(2), 4, retained=9) == 6, "what was left is known to the target as long as it is retained"
    assert home.kind.shown == [1, 2, 4, 6]


class Remembering(StagedLedger):
    """Its target never forgets a name."""

    forget = hg.LedgerSink.forget


def test_a_ledger_that_forgets_nothing_is_told_to_publish_whatever_was_left(tmp_path: Path) -> None:  # SV20
    home = Home(tmp_path, staged(Remembering)(tmp_path))
    home.run(retained=9)
    home.run(retained=9)
    place = copied(home, 2, tmp_path)
    assert home.run(home.chk(1), 2) == 4
    assert home.run() == 5
    home.run(place, 5)
    assert home.kind.shown[:4] == [1, 2, 4, 5]


def test_a_savepoint_of_ones_own_life_leaves_what_is_before_it_in_line(tmp_path: Path) -> None:  # SV26
    home = Home(tmp_path, KINDS["streams"](tmp_path))
    home.run()
    place = copied(home, 1, tmp_path)
    home.run()
    home.run()
    hg.edit_savepoint(home.chk(3), tmp_path / "taken").write()
    home.run()
    assert home.run(tmp_path / "taken", 4) == 6
    home.run()
    assert home.run(place, 7) == 9
    assert home.kind.shown == [1, 2, 3, 4, 6, 7, 9]


def test_a_target_that_may_have_forgotten_and_cannot_be_asked_publishes_nothing(tmp_path: Path) -> None:  # SV26, SV20
    home = Home(tmp_path, KINDS["ledger"](tmp_path))
    home.run(retained=9)
    home.run(retained=9)
    place = copied(home, 2, tmp_path)
    assert home.run(home.chk(1), 2) == 4
    home.run()
    home.begin()
    with pytest.raises(UsageError, match="it is no longer known whether the output of checkpoint 2"):
        home.begin(place, 5)
    home.run()
    assert home.kind.shown[:3] == [1, 2, 4]
    assert home.kind.shown.count(2) == 1


def test_a_checkpoint_that_a_start_could_not_use_is_left_too(tmp_path: Path) -> None:  # SV26, R10
    home = Home(tmp_path, KINDS["streams"](tmp_path))
    home.run(retained=9)
    home.run(retained=9, commits=False)
    place = copied(home, 2, tmp_path)
    for part in (home.root / "p" / "chk-0000000002").iterdir():
        part.write_bytes(b"garbage")
    assert home.run(retained=9, on_damaged=DamagedCheckpoint.PREVIOUS) == 3
    home.run()
    with pytest.raises(UsageError, match="is not restored"):
        home.begin(place, 4)
    home.run()
    assert home.kind.shown == [1, 3, 4, 5]


def test_what_another_life_promised_is_asked_for_before_it_is_adopted(tmp_path: Path) -> None:  # SV20, SV26
    """The target has forgotten what the copy asks for, and the new directory knows nothing about it."""
    kind = KINDS["streams"](tmp_path)
    home = Home(tmp_path, kind)
    home.run()
    place = copied(home, 1, tmp_path)
    home.run()
    home.run()
    home.begin()
    with Store.open(tmp_path / "store") as store:
        store.pipelines.forget_owner("p/out")
    other = Home(tmp_path, kind, "another")
    with pytest.raises(UsageError, match="is not restored"):
        other.begin(place)
    assert other.checkpoints == []
    assert other.run(home.chk(3)) > 3
    assert kind.shown[:3] == [1, 2, 3]


@pytest.mark.parametrize("kind", ["ledger", "table of SQL", "two phases that forget"])
def test_an_old_copy_is_not_adopted_elsewhere_when_the_target_has_forgotten(  # SV20, K20
    tmp_path: Path, kind: str
) -> None:
    """The owner was forgotten, and the new directory knows nothing about what its predecessor let targets forget."""
    home = Home(tmp_path, KINDS[kind](tmp_path))
    home.run()
    place = copied(home, 1, tmp_path)
    home.run()
    home.begin()
    home.kind.sink.forget_owner("p", "out")
    other = Home(tmp_path, home.kind, "another")
    for _ in range(2):
        for config in ({}, {"on_denied": DeniedOutput.LOSE}) if "two" not in kind else ({},):
            with pytest.raises(UsageError, match=r"is not restored from .* the checkpoint directory") as refused:
                other.begin(place, **config)
            assert isinstance(refused.value.remedy, NameAnotherPlace)
    assert other.checkpoints == []
    assert home.kind.shown == [1, 2]


@pytest.mark.parametrize("commits", [True, False])
def test_a_table_of_sql_knows_of_the_newest_output_after_its_owner_was_forgotten(tmp_path: Path, commits: bool) -> None:
    home = Home(tmp_path, KINDS["table of SQL"](tmp_path))
    assert [home.run(), home.run()] == [1, 2]
    assert home.run(commits=commits) == 3
    place = copied(home, 3, tmp_path)
    home.kind.sink.forget_owner("p", "out")
    other = Home(tmp_path, home.kind, "another")
    assert other.run(place) == 5
    assert home.kind.shown == [1, 2, 3, 5]


def test_what_a_forgotten_life_published_is_known_below_what_another_let_forget(tmp_path: Path) -> None:
    """Numbers of checkpoints begin at 1 again, and the ledger has the name."""
    home = Home(tmp_path, KINDS["table of SQL"](tmp_path))
    for _ in range(4):
        home.run()
    home.kind.sink.forget_owner("p", "out")
    other = Home(tmp_path, home.kind, "another")
    assert other.run() == 1
    place = copied(other, 1, tmp_path)
    home.kind.sink.forget_owner("p", "out")
    assert Home(tmp_path, home.kind, "third").run(place) == 3
    assert home.kind.shown == [1, 1, 2, 3, 3, 4]


def test_a_ledger_that_was_never_claimed_is_told_to_publish(tmp_path: Path) -> None:  # SV20
    """The target is another one, as empty as it was made."""
    home = Home(tmp_path, KINDS["ledger"](tmp_path))
    home.run()
    empty = KINDS["ledger"](tmp_path)
    other = Home(tmp_path, empty, "another")
    killed_at("after-claim", other, home.chk(1), None)
    assert other.run(home.chk(1)) == 3
    assert empty.shown == [1, 3]


def test_a_cleaned_log_of_delta_knows_what_a_former_life_committed(tmp_path: Path) -> None:  # K7
    deltalake = pytest.importorskip("deltalake")
    kind = KINDS["tables of Delta"](tmp_path)
    directories = ["home", "another", "third"]
    home = Home(tmp_path, kind)
    for _ in range(3):
        last = home.run()
    for directory in directories[1:]:
        place = home.chk(last)
        table = deltalake.DeltaTable(str(tmp_path / "table"))
        table.optimize.compact()
        table.create_checkpoint()
        for entry in (tmp_path / "table" / "_delta_log").glob("*.json"):
            if int(entry.stem) < table.version():
                entry.unlink()
        kind.sink.forget_owner("p", "out")
        home = Home(tmp_path, kind, directory)
        last = home.run(place)
    assert kind.shown == [1, 2, 3, 5, 7]


def test_numbers_of_another_life_say_nothing_about_ones_own(tmp_path: Path) -> None:  # SV26
    """What the copy promised was aborted by the life that the target belongs to now."""
    kind = KINDS["streams"](tmp_path)
    home = Home(tmp_path, kind)
    home.run(commits=False)
    place = copied(home, 1, tmp_path)
    with Store.open(tmp_path / "store") as store:
        store.pipelines.forget_owner("p/out")
    other = Home(tmp_path, kind, "another")
    newest = [other.run() for _ in range(3)][-1]
    before = other.checkpoints
    with pytest.raises(UsageError, match="is not restored"):
        other.begin(place, newest)
    assert other.checkpoints == before
    assert other.begin(place, newest, on_denied=DeniedOutput.LOSE).restored is not None
    assert any("LOST" in note for note in other.notes), "then it is lost, and said"


def test_what_cannot_be_asked_for_is_not_adopted(tmp_path: Path) -> None:  # SV20
    """A target that is out of reach for good, or what a checkpoint had prepared and nobody can read."""
    kind = KINDS["streams"](tmp_path)
    home = Home(tmp_path, kind)
    home.run(retained=9)
    home.run(retained=9)
    assert home.run(home.chk(1), 2, retained=9) == 4
    before = home.checkpoints
    for error in (StorageError("list", "db", "no rights", is_transient=False), CorruptionError("x", 0, "a", "b")):

        def refuse(self: object, committable: Committable, error: Exception = error) -> str:
            raise error

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(StreamCommitter, "denial", refuse)
            with pytest.raises(UsageError, match="sink 'out'"):
                home.begin(home.chk(2), 4)
        assert home.checkpoints == before
    home.run(home.chk(2), 4)
    assert kind.shown[:3] == [1, 2, 4]


def test_a_sentence_about_denied_output_names_all_ways_back() -> None:  # SV25, K5
    assert "--go-back-past 7" in str(OutputDenied("out", 7, "it is gone"))


def test_a_log_whose_newest_entry_cannot_be_read_is_not_gone_back_in(tmp_path: Path) -> None:  # SV25
    home = Home(tmp_path, KINDS["ledger"](tmp_path))
    home.run(retained=9)
    place = copied(home, 1, tmp_path)
    home.run(retained=9)
    newest = max((home.root / "p" / "log").iterdir())
    sound = newest.read_bytes()
    newest.write_bytes(b"torn")
    with pytest.raises(UsageError, match="its own log cannot be read"):
        home.begin(place, 1)
    newest.write_bytes(sound)
    home.run(place, 2)
    assert home.kind.shown[:2] == [1, 2]


def without_the_sink(home: Home) -> None:
    """Complete a checkpoint of a program whose user has given up the sink and what it had promised."""
    whole, home.definition, home.unclaimed = home.definition, home.program("other"), ("out",)
    home.run(retained=9)
    home.definition, home.unclaimed = whole, ()


def given_up_by_a_start(home: Home, root: Path) -> None:
    without_the_sink(home)
    home.run(retained=9)


def given_up_in_a_savepoint(home: Home, root: Path) -> None:
    draft = hg.edit_savepoint(home.chk(2), root / "smaller")
    draft.drop("out")
    draft.write()
    home.run(root / "smaller", home.checkpoints[-1], retained=9)


@pytest.mark.parametrize("kind", ["files", "streams", "ledger"])
@pytest.mark.parametrize("given_up", [given_up_by_a_start, given_up_in_a_savepoint])
def test_output_of_a_sink_that_was_given_up_and_is_back_is_asked_for(  # SV26, SV30, WS10
    tmp_path: Path, kind: str, given_up: Callable[[Home, Path], None]
) -> None:
    """Nobody had committed it: going back to the checkpoint that promised it either shows it or is refused."""
    home = Home(tmp_path, KINDS[kind](tmp_path))
    home.definition = home.program("out", "other")
    home.run(retained=9)
    home.run(retained=9, commits=False)
    place = home.chk(2)
    given_up(home, tmp_path)
    assert 2 not in home.kind.shown
    if kind != "ledger":  # it had prepared the row, and its next generation has aborted that
        with pytest.raises(UsageError, match="is not restored from"):
            home.begin(place, home.checkpoints[-1])
        return
    restored = home.begin(place, home.checkpoints[-1]).restored
    assert restored is not None
    assert [c.checkpoint for c in restored.committables] == [2]
    assert 2 in home.kind.shown


def test_a_sink_that_is_given_up_leaves_the_checkpoint_in_line(tmp_path: Path) -> None:  # SV26, SV30, R57
    """Otherwise damage would go back further than it must, and repeat what other sinks have committed."""
    home = Home(tmp_path, KINDS["files"](tmp_path))
    home.definition = home.program("out", "other")
    home.run(retained=9)
    home.run(retained=9, commits=False)
    without_the_sink(home)
    for part in (home.root / "p" / "chk-0000000003").iterdir():
        part.write_bytes(b"garbage")
    restored = home.begin(on_damaged=DamagedCheckpoint.PREVIOUS).restored
    assert restored is not None
    assert restored.checkpoint == 2
    assert home.kind.shown == [1, 2]
