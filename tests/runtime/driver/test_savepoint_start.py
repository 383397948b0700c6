"""A start from a named savepoint or checkpoint, with real logs and recorded sinks."""

from __future__ import annotations

import shutil
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tests.runtime.checkpoints.writing import write_snapshot
from tests.runtime.running import definition_of, pipeline_at

import headgate as hg
from headgate import fault_points
from headgate.connectors.base import Committer
from headgate.errors import FencedError, StorageError, UsageError
from headgate.model.config import DamagedCheckpoint, StartConfig
from headgate.model.ids import CheckpointId, Generation, SubtaskId
from headgate.model.manifest import Committable, HookState, Manifest, Savepoint, SubtaskEntry
from headgate.model.plan import HookSpec, PipelineDefinition
from headgate.protocol.checkpoints.recovery import candidates
from headgate.runtime.checkpoints import savepoints as named_places
from headgate.runtime.checkpoints.log import CheckpointLog
from headgate.runtime.checkpoints.savepoints import SavepointDirectory
from headgate.runtime.driver.hook_calls import HookCalls
from headgate.runtime.driver.restart import Finished, NewGeneration, begin_generation
from headgate.storage.local import LocalStorage

CALLS: list[tuple[str, list[int]]] = []
TOKEN = "00112233aabbccdd"


class RecordedSink(hg.Discard, Committer):
    """Says what it is asked to decide."""

    def open_committer(self, pipeline: str, node: str, generation: Generation) -> Any:
        return self

    def recover(self, keep: Any) -> None:
        CALLS.append(("recover", [c.checkpoint for c in keep]))

    def commit(self, permit: Any, committables: Any) -> None:
        CALLS.append(("commit", [c.checkpoint for c in committables]))

    def close(self) -> None:
        return


class Home:
    """One pipeline and its checkpoints."""

    def __init__(self, root: Path, name: str = "p", **options: Any) -> None:
        CALLS.clear()
        self.root = root
        pipeline = pipeline_at(root, parallelism=1, name=name, **options)
        pipeline.source(hg.FromRows([{"id": 1}]), name="rows").sink(RecordedSink(), name="out")
        self.definition: PipelineDefinition = definition_of(pipeline)
        self.name = name
        self.storage = LocalStorage(root / "checkpoints")
        self.notes: list[str] = []
        self.log = CheckpointLog(self.storage, name)

    def begin(
        self,
        place: object = None,
        past: int | None = None,
        allow: Iterable[str] = (),
        calls: HookCalls | None = None,
        **changed: Any,
    ) -> NewGeneration:
        CALLS.clear()
        self.notes.clear()
        self.log = CheckpointLog(self.storage, self.name)
        url = None if place is None else str(place)
        start = StartConfig(url, None if past is None else CheckpointId(past), frozenset(allow))
        definition = replace(self.definition, config=replace(self.definition.config, start=start), **changed)
        found = begin_generation(definition, self.log, "test", self.notes.append, None, hooks=calls)
        assert isinstance(found, NewGeneration)
        return found

    def complete(self, checkpoint: int, generation: int, **fields: Any) -> Manifest:
        """Write a checkpoint as the generation at work; its file says who wrote it."""
        plan = self.definition.plan
        entries = tuple(self._entry(self.storage, self.name, s, checkpoint, generation) for s in plan.subtasks())
        texts = plan.state_texts()
        made = Manifest(
            CheckpointId(checkpoint), Generation(generation), 1, plan.max_parallelism, entries, (), texts, **fields
        )
        self.log.reserve(CheckpointId(checkpoint))
        self.log.append(made)
        return made

    def _entry(self, storage: Any, prefix: str, subtask: SubtaskId, checkpoint: int, generation: int) -> SubtaskEntry:
        out = Committable("out", CheckpointId(checkpoint), subtask.index, Generation(generation), b"x")
        state = [f"{self.name} {checkpoint}".encode()]
        at, by = CheckpointId(checkpoint), Generation(generation)
        return SubtaskEntry(subtask, (write_snapshot(storage, prefix, subtask, at, by, state, 0),), (out,))

    def savepoint(
        self,
        path: Path,
        checkpoint: int = 7,
        generation: int = 3,
        drawn: str = "drawn",
        life: str = "",
        is_same_cut: bool = True,
        **fields: Any,
    ) -> Path:
        """Write a savepoint of this pipeline, or of another of its name; ``life`` says which."""
        directory = SavepointDirectory(str(path))
        place = directory.place(TOKEN)
        plan = self.definition.plan
        storage = LocalStorage(path)
        entries = tuple(self._entry(storage, place.prefix, s, checkpoint, generation) for s in plan.subtasks())
        entries = tuple(replace(entry, committables=()) for entry in entries)
        manifest = Manifest(
            CheckpointId(checkpoint),
            Generation(generation),
            1,
            plan.max_parallelism,
            entries,
            (),
            plan.state_texts(),
            **fields,
        )
        directory.write(Savepoint(drawn, self.name, 0, place.prefix, manifest, life, is_same_cut))
        return path

    @property
    def checkpoints(self) -> list[int]:
        return [m.checkpoint for m in reversed(candidates(self.log.observe()))]


def refusal(home: Home, *named: Any, **options: Any) -> str:
    """Return with which sentence a start is refused."""
    with pytest.raises(UsageError) as refused:
        home.begin(*named, **options)
    return str(refused.value)


def files(root: Path) -> dict[str, bytes]:
    return {str(p.relative_to(root)): p.read_bytes() for p in sorted(root.rglob("*")) if p.is_file()}


def test_a_first_start_adopts_a_savepoint_and_leaves_it_as_it_is(tmp_path: Path) -> None:  # SV5
    place = Home(tmp_path / "a", "a").savepoint(tmp_path / "taken")
    before = files(place)
    home = Home(tmp_path / "b", "b")
    found = home.begin(place)
    assert found.restored is not None
    assert found.restored.place is not None
    assert (found.restored.place.url, found.restored.origin) == (str(place), found.origin)
    assert CALLS == [("recover", [])]
    assert home.notes[0].startswith(f"restored from the savepoint {place}")
    assert files(place) == before


def test_ids_go_on_above_what_is_restored(tmp_path: Path) -> None:
    place = Home(tmp_path / "a").savepoint(tmp_path / "taken", checkpoint=7, generation=3)
    found = Home(tmp_path / "b").begin(place)
    assert found.restored is not None
    assert (found.generation, found.restored.checkpoint, found.first_checkpoint) == (4, 8, 9)


class Recorded(hg.CoordinatorHook):
    """Notes with what it goes back."""

    def __init__(self) -> None:
        self.restored: list[tuple[int, bytes | None]] = []

    def trigger(self, checkpoint_id: int) -> None:
        return None

    def restore(self, checkpoint_id: int, data: bytes | None) -> None:
        self.restored.append((checkpoint_id, data))

    def reset(self) -> None:
        self.restored.clear()


def goes_back_to(home: Home, *named: Any) -> list[tuple[int, bytes | None]]:
    """Begin with a hook named 'shop'; return with what it goes back."""
    hook = Recorded()
    spec = HookSpec("shop", hook, 60_000)
    calls = HookCalls((spec,))
    home.begin(*named, calls=calls, hooks=(spec,))
    calls.close()
    return hook.restored


def test_a_hook_goes_back_to_the_checkpoint_that_it_was_called_for(tmp_path: Path) -> None:
    """What is restored by name gets an id of this pipeline, of which no hook has ever heard."""
    home = Home(tmp_path / "a", retained=9)
    home.begin()
    for checkpoint in (1, 2, 3):
        home.complete(checkpoint, 1, hooks=(HookState("shop", b"at %d" % checkpoint),))
    assert goes_back_to(home) == [(3, b"at 3")]
    assert goes_back_to(home, home.root / "checkpoints" / "p" / "chk-2", 3) == [(2, b"at 2")]
    assert home.checkpoints == [1, 2, 3, 4]
    assert goes_back_to(home) == [(2, b"at 2")], "and at every restart behind it"
    assert goes_back_to(Home(tmp_path / "b"), home.root / "checkpoints" / "p") == [(2, b"at 2")], "whatever way it came"
    home.complete(5, 4, hooks=(HookState("shop", b"at 5"),))
    assert goes_back_to(home) == [(5, b"at 5")]


def test_a_savepoint_takes_the_data_of_hooks_along(tmp_path: Path) -> None:  # SV3
    place = Home(tmp_path / "a").savepoint(tmp_path / "taken", hooks=(HookState("shop", b"at 7"),))
    assert goes_back_to(Home(tmp_path / "b"), place) == [(7, b"at 7")]
    assert "holds 4 bytes of hook 'shop', which this pipeline does not have" in refusal(Home(tmp_path / "c"), place)


def test_a_second_start_goes_on_from_the_pipelines_own_checkpoint(tmp_path: Path) -> None:  # SV24
    place = Home(tmp_path / "a").savepoint(tmp_path / "taken")
    home = Home(tmp_path / "b")
    for expected in (8, 8):  # it died before it completed a checkpoint of its own
        found = home.begin(place)
        assert found.restored is not None
        assert found.restored.checkpoint == expected
    home.complete(9, found.generation, origin=found.origin)
    for named in (place, None, place):
        found = home.begin(named)
        assert found.restored is not None
        assert (found.restored.checkpoint, found.restored.place) == (9, None)
        assert found.origin is not None
    assert home.checkpoints == [8, 9]


def test_what_was_restored_may_be_removed_later(tmp_path: Path) -> None:  # SV24
    place = Home(tmp_path / "a").savepoint(tmp_path / "taken")
    home = Home(tmp_path / "b")
    found = home.begin(place)
    moved = shutil.move(place, tmp_path / "gone")
    assert "no sound checkpoint is left" in refusal(home, place), "nothing of its own yet"
    assert "no sound checkpoint is left" in refusal(home)
    shutil.move(moved, place)
    found = home.begin(place)
    home.complete(9, found.generation, origin=found.origin)
    shutil.rmtree(place)
    found = home.begin(place)
    assert found.restored is not None
    assert found.restored.checkpoint == 9
    assert not place.exists()


def test_what_was_restored_may_be_damaged_or_out_of_reach_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:  # SV24
    place = Home(tmp_path / "a").savepoint(tmp_path / "taken")
    home = Home(tmp_path / "b")
    found = home.begin(place)
    home.complete(9, found.generation, origin=found.origin)

    def unreachable(url: str) -> Any:
        raise StorageError("list", url, "the network is down", is_transient=False)

    with monkeypatch.context() as patch:
        patch.setattr(named_places, "SavepointDirectory", unreachable)
        assert home.begin(place).restored is not None
        with pytest.raises(StorageError, match="the network is down"):
            Home(tmp_path / "c").begin(place)
    (place / "savepoint").write_bytes(b"garbage")
    assert home.begin(place).restored is not None
    assert "cannot be restored" in refusal(Home(tmp_path / "c"), place)
    assert files(tmp_path / "c") == {}


def test_a_start_that_dies_before_it_has_adopted_adopts_again(tmp_path: Path) -> None:
    place = Home(tmp_path / "a").savepoint(tmp_path / "taken")
    for point, known in (("after-claim", []), ("after-adoption", [8])):
        home = Home(tmp_path / point)

        def die() -> None:
            raise StorageError("write", "x", "the power went", is_transient=False)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(fault_points, "reach", lambda name, point=point: die() if name == point else None)
            with pytest.raises(StorageError):
                home.begin(place)
        assert home.checkpoints == known
        found = home.begin(place)
        assert found.restored is not None
        assert found.restored.checkpoint == 8


def test_a_damaged_savepoint_is_refused_before_anything_is_written(tmp_path: Path) -> None:  # SV20
    place = Home(tmp_path / "a").savepoint(tmp_path / "taken")
    (part,) = list(place.glob("files-*/*/rows*"))[:1]
    sound = part.read_bytes()
    home = Home(tmp_path / "b")
    before = files(tmp_path / "b")
    part.write_bytes(b"garbage")
    assert "cannot be read and is not restored" in refusal(home, place)
    part.write_bytes(sound)
    (place / "savepoint").write_bytes((place / "savepoint").read_bytes()[:-9])
    assert f"{place} cannot be restored" in refusal(home, place)
    assert files(tmp_path / "b") == before
    assert "neither a savepoint nor a completed checkpoint" in refusal(home, tmp_path / "nowhere")
    assert not (tmp_path / "nowhere").exists()


def test_state_that_does_not_fit_is_refused_before_anything_is_written(tmp_path: Path) -> None:  # SV20, SV30
    place = Home(tmp_path / "a").savepoint(tmp_path / "taken")
    home = Home(tmp_path / "b", max_parallelism=16)
    assert "max_parallelism" in refusal(home, place)
    assert files(tmp_path / "b") == {}


def test_going_back_is_refused_unless_the_newest_checkpoint_is_named(tmp_path: Path) -> None:  # SV25
    home = Home(tmp_path)
    home.begin()
    place = home.savepoint(tmp_path / "taken", checkpoint=1, generation=1, life=home.log.life_id)
    home.complete(1, 1)
    home.complete(2, 1)
    said = refusal(home, place)
    assert "its newest checkpoint is 2, and what checkpoint 2 committed would be produced again" in said
    assert "--go-back-past 2" in said
    found = home.begin(place, 2)
    assert found.restored is not None
    assert (found.restored.checkpoint, found.first_checkpoint) == (3, 4)
    assert CALLS == [("recover", [])], "what checkpoint 2 promised is aborted, and produced again"
    assert any("output that checkpoint 2 committed will be produced again" in note for note in home.notes)
    for _ in range(2):  # whoever repeats the command goes on
        found = home.begin(place, 2)
        assert found.restored is not None
        assert found.restored.checkpoint == 3


def test_where_it_stopped_a_pipeline_is_restored_and_nothing_is_to_be_removed(tmp_path: Path) -> None:  # SV25
    home = Home(tmp_path)
    home.begin()
    life = home.log.life_id
    home.complete(1, 1)
    place = home.savepoint(tmp_path / "taken", checkpoint=1, generation=1, life=life)
    edited = home.savepoint(tmp_path / "edited", checkpoint=1, generation=1, drawn="another", life=life)
    for named, expected in ((place, 2), (place, 2), (edited, 3), (edited, 3)):
        found = home.begin(named)
        assert found.restored is not None
        assert found.restored.checkpoint == expected
        assert CALLS == [("recover", [])]
        assert not any("again" in note for note in home.notes)
    home.complete(found.first_checkpoint, found.generation, origin=found.origin)
    assert "what checkpoints 2 to 4 committed would be produced again" in refusal(home, place)
    assert home.begin(edited).restored == candidates(home.log.observe())[0], "the command that is repeated goes on"


def test_a_pipeline_that_another_one_went_on_from_is_not_named_for_removal(tmp_path: Path) -> None:  # SV25, K18
    """What a target has of a pipeline that does not descend from what is named may all be good."""
    home = Home(tmp_path)
    place = home.savepoint(tmp_path / "taken", life="another life")
    home.begin()
    home.complete(9, 1)
    assert "not known to descend" in refusal(home, place)
    home.begin(place, 9)
    (note,) = [note for note in home.notes if note.startswith("going back")]
    assert "compare before you remove any" in note


def test_at_most_once_never_goes_back(tmp_path: Path) -> None:  # SV25
    home = Home(tmp_path)
    home.definition = replace(
        home.definition,
        config=replace(
            home.definition.config,
            checkpoints=hg.Checkpointing(dir=tmp_path / "checkpoints", mode="at_most_once").to_config(),
        ),
    )
    place = home.savepoint(tmp_path / "taken", checkpoint=1, generation=1)
    home.begin()
    home.complete(2, 1)
    assert "at_most_once" in refusal(home, place, 2)


def test_an_older_checkpoint_is_chosen_by_hand(tmp_path: Path) -> None:  # SV25, SF4
    home = Home(tmp_path)
    home.begin()
    home.complete(1, 1)
    older = home.complete(2, 1)
    home.complete(3, 1)
    own = tmp_path / "checkpoints" / "p"
    assert "its newest checkpoint is 3" in refusal(home, own / "chk-2")
    found = home.begin(own / "chk-2", 3)
    assert found.restored is not None
    assert (found.restored.checkpoint, found.restored.place) == (4, None)
    assert found.restored.files == older.files
    assert CALLS == [("recover", [])], (
        "what it promised was committed before 3 was completed; what 3 promised is aborted"
    )
    home.complete(5, found.generation, origin=found.origin)
    home.complete(6, found.generation, origin=found.origin)
    home.log.drop(CheckpointId(3), CheckpointId(4))
    assert all((own / path).exists() for path in older.files), "the checkpoint that was restored from them needs them"
    home.log.drop(CheckpointId(4), CheckpointId(5))
    assert not any((own / path).exists() for path in older.files)
    found = home.begin(own / "chk-2", 3)
    assert found.restored is not None
    assert found.restored.checkpoint == 6, "although checkpoint 2 is gone"
    (tmp_path / "link").symlink_to(tmp_path / "checkpoints")
    assert home.begin(own).restored == found.restored
    for named in (own / "chk-6", tmp_path / "link" / "p" / "chk-6"):
        again = home.begin(named).restored
        assert again is not None
        assert (again.checkpoint, again.committables) == (7, found.restored.committables), "nothing is gone back past"
        assert CALLS[0] == ("recover", [6]), "it is promised still"
    assert "neither" in refusal(home, own / "chk-77", 6)


def test_output_promised_by_another_pipeline_is_left_to_it(tmp_path: Path) -> None:  # SV26
    first = Home(tmp_path / "a", "a")
    first.begin()
    first.complete(1, 1)
    before = files(tmp_path / "a")
    second = Home(tmp_path / "b", "b")
    found = second.begin(tmp_path / "a" / "checkpoints" / "a")
    assert found.restored is not None
    assert (found.restored.checkpoint, found.restored.committables) == (2, ())
    assert CALLS == [("recover", [])]
    assert any("committed by pipeline 'a', not by this one" in note for note in second.notes)
    assert files(tmp_path / "a") == before
    first.complete(2, 1)
    for named in ("a", "a"):  # the newest of a pipeline that goes on
        assert second.begin(tmp_path / "a" / "checkpoints" / named).restored == found.restored


@pytest.mark.parametrize("is_lost", [False, True])
def test_an_older_checkpoint_is_never_restored_as_the_newest(tmp_path: Path, is_lost: bool) -> None:  # SV20
    first = Home(tmp_path / "a", "a")
    first.begin()
    first.complete(1, 1)
    first.complete(2, 1)
    place = tmp_path / "a" / "checkpoints" / "a"
    went_on = Home(tmp_path / "b", "b")
    went_on.begin(place)
    newest = sorted((place / "log").iterdir())[-1]
    newest.unlink() if is_lost else newest.write_bytes(b"garbage")
    home = Home(tmp_path / "c", "c")
    said = refusal(home, place)
    assert said.startswith(f"{place} cannot be restored: ")
    assert newest.name in said
    assert "the newest checkpoint is not known; name one by its id: there is 1" in said
    assert files(tmp_path / "c") == {}, "nothing is written"
    found = went_on.begin(place)  # SV24: it needs nothing of that place any more
    assert found.restored is not None
    assert found.restored.checkpoint == 3
    found = home.begin(place / "chk-1")
    assert found.restored is not None
    assert found.restored.checkpoint == 2


def test_damage_at_its_own_newest_checkpoint_is_judged_as_without_a_name(tmp_path: Path) -> None:  # SV24, R14, SV20
    home = Home(tmp_path)
    home.begin()
    home.complete(1, 1)
    home.complete(2, 1)
    place = tmp_path / "checkpoints" / "p"
    sorted((place / "log").iterdir())[-1].write_bytes(b"garbage")

    def with_policy(policy: DamagedCheckpoint) -> None:
        config = replace(home.definition.config, on_damaged=policy)
        home.definition = replace(home.definition, config=config)

    with_policy(DamagedCheckpoint.FAIL)
    assert "use Pipeline(on_damaged_checkpoint='previous')" in refusal(home, place)
    with_policy(DamagedCheckpoint.PREVIOUS)
    found = home.begin(place)
    assert found.restored is not None
    assert found.restored.checkpoint == 1


def test_a_checkpoint_of_the_same_name_is_restored_with_what_it_promised(tmp_path: Path) -> None:  # SV26
    first = Home(tmp_path / "a")
    first.begin()
    first.complete(1, 1)
    second = Home(tmp_path / "b")
    second.begin(tmp_path / "a" / "checkpoints" / "p" / "chk-1")
    assert CALLS == [("recover", [1]), ("commit", [1])]


def test_a_removed_operator_is_left_behind_by_name(tmp_path: Path) -> None:  # SV30
    home = Home(tmp_path)
    home.begin()
    texts = {**home.definition.plan.state_texts(), "sum": "int by user"}
    home.complete(1, 1)
    manifest = replace(home.complete(2, 1), state_texts=texts)
    odd = Committable("old", CheckpointId(3), 0, Generation(1), b"x")
    home.log.append(replace(manifest, checkpoint=CheckpointId(3), carried=(odd,)))
    assert "--allow-unclaimed-state sum" in refusal(home)
    found = home.begin(None, None, ["sum", "old"])
    assert found.restored is not None
    assert CALLS[0] == ("recover", [2])
    assert "the state of operator 'sum' in checkpoint 3 is left behind" in home.notes
    assert any("promised for sink 'old'" in note for note in home.notes)


def test_an_added_operator_with_a_name_starts_empty(tmp_path: Path) -> None:  # SV31
    home = Home(tmp_path)
    home.begin()
    manifest = home.complete(1, 1)
    home.log.append(replace(manifest, checkpoint=CheckpointId(2), state_texts={"out": ""}))
    found = home.begin()
    assert found.restored is not None
    assert "operator 'rows' is new: it starts empty" in home.notes
    assert "does not know it" in refusal(home, derived_names=frozenset({"rows"}))


def test_a_replaced_driver_adopts_nothing(tmp_path: Path) -> None:
    place = Home(tmp_path / "a").savepoint(tmp_path / "taken")
    home = Home(tmp_path / "b")
    other = Home(tmp_path / "b")

    def overtaken(name: str) -> None:
        if name == "after-claim":
            patch.undo()
            other.begin(place)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fault_points, "reach", overtaken)
        with pytest.raises(FencedError):
            home.begin(place)
    assert other.checkpoints == [8]


def test_a_savepoint_of_a_finished_pipeline_is_finished(tmp_path: Path) -> None:  # R13
    first = Home(tmp_path / "a")
    place = first.savepoint(tmp_path / "taken")
    directory = SavepointDirectory(str(place))
    made = directory.read()
    (place / "savepoint").unlink()
    directory.write(replace(made, manifest=replace(made.manifest, is_final=True)))
    home = Home(tmp_path / "b")
    start = StartConfig(str(place))
    definition = replace(home.definition, config=replace(home.definition.config, start=start))
    for _ in range(2):
        assert isinstance(begin_generation(definition, CheckpointLog(home.storage, "p"), "test", print), Finished)


def test_a_restore_in_another_directory_meets_the_owner_of_the_sink(tmp_path: Path) -> None:
    sink = hg.FileSink(tmp_path / "out")

    def to_files(root: Path) -> Home:
        home = Home(root)
        pipeline = pipeline_at(root, parallelism=1)
        pipeline.source(hg.FromRows([{"id": 1}]), name="rows").sink(sink, name="out")
        home.definition = definition_of(pipeline)
        return home

    first = to_files(tmp_path / "a")
    found = first.begin()
    place = first.savepoint(tmp_path / "taken", checkpoint=3, generation=found.generation)
    second = to_files(tmp_path / "b")
    assert "run the pipeline with that checkpoint directory" in refusal(second, place)
    assert second.checkpoints == []
    sink.target("p", "out").forget()
    found = second.begin(place)
    assert found.restored is not None
    assert found.generation > 1
    assert "run the pipeline with that checkpoint directory" in refusal(first), "the former one is fenced"


def test_ones_own_files_are_ones_own_by_whatever_link(tmp_path: Path) -> None:  # SF4
    home = Home(tmp_path)
    home.begin()
    older = home.complete(1, 1)
    home.complete(2, 1)
    (tmp_path / "link").symlink_to(tmp_path / "checkpoints")
    found = home.begin(tmp_path / "link" / "p" / "chk-1", 2)
    assert found.restored is not None
    assert (found.restored.place, found.restored.files) == (None, older.files)
