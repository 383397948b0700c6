"""Savepoints that are others with something changed: what is, and that nothing else is."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import polars as pl
import pyarrow as pa
import pytest
from tests.operators.harness import BORN_MS, Harness
from tests.runtime.checkpoints.frozen_cases import CASES, made, rows_of
from tests.runtime.savepoint_writer.test_writer import (
    EVENT_TIMERS,
    ROWS,
    TIMES,
    Expiring,
    Timed,
    full,
    pipeline,
    same,
)
from tests.runtime.state_reader.test_reader import text_of
from tests.runtime.state_reader.written import Part, Written, output, state, tree

import headgate as hg
from headgate.codec.snapshot import IN_FLIGHT_PREFIX, LISTS_PREFIX, STATE_PREFIX, decode_sections
from headgate.environment import SYSTEM_CLOCK
from headgate.errors import CorruptionError, StorageError, UsageError
from headgate.model.ids import NodeName
from headgate.model.manifest import Manifest, SnapshotPart
from headgate.operators.base import RestoredState
from headgate.runtime.checkpoints.savepoints import SavepointDirectory
from headgate.runtime.checkpoints.snapshot_writer import write_output
from headgate.runtime.state_reader.lookup import find_checkpoint
from headgate.storage.local import LocalStorage

FEW = pl.DataFrame({"key": [1, 2], "value": [10, 20]})


class Fewer(hg.ProcessFunction):
    """Has given up a list, and begins a text."""

    schema = {"key": pa.int64()}

    def open(self, state: hg.StateHandle) -> None:
        self.count = state.value("count", pa.int64())
        self.last = state.map("last", pa.string(), pa.int64())
        self.note = state.value("note", pa.string())

    def process(self, row: dict[str, Any], context: hg.ProcessContext) -> None:
        pass


class Without(hg.ProcessFunction):
    """Has given up a list."""

    schema = {"key": pa.int64()}

    def open(self, state: hg.StateHandle) -> None:
        self.count = state.value("count", pa.int64())
        self.last = state.map("last", pa.string(), pa.int64())

    def process(self, row: dict[str, Any], context: hg.ProcessContext) -> None:
        pass


def manifest_of(place: Path) -> Manifest:
    return SavepointDirectory(str(place)).read().manifest


def everything(place: Path) -> dict[tuple[str, str], pl.DataFrame]:
    rows = hg.state_catalog(place).select("operator", "state").rows()
    return {(operator, name): hg.read_state(place, operator, name) for operator, name in rows}


def equal(one: Mapping[tuple[str, str], pl.DataFrame], other: Mapping[tuple[str, str], pl.DataFrame]) -> bool:
    return one.keys() == other.keys() and all(frame.equals(other[name]) for name, frame in one.items())


def test_what_is_replaced_is_other_and_nothing_else(tmp_path: Path) -> None:
    full(tmp_path, tmp_path / "one")
    before, files = everything(tmp_path / "one"), tree(tmp_path / "one")
    written = hg.edit_savepoint(tmp_path / "one", tmp_path / "two").replace("all", "count", FEW).write()
    assert dict(written.rows) == {("all", "count"): 2}
    after = everything(tmp_path / "two")
    assert same(after.pop(("all", "count")), FEW)
    del before["all", "count"]
    assert equal(after, before)
    assert tree(tmp_path / "one") == files, "the source stays as it is"
    one, two = manifest_of(tmp_path / "one"), manifest_of(tmp_path / "two")
    assert (two.checkpoint, two.parallelism, two.state_texts) == (one.checkpoint, one.parallelism, one.state_texts)
    shutil.rmtree(tmp_path / "one")
    assert same(hg.read_state(tmp_path / "two", "all", "ids"), ROWS["ids"])


def test_a_state_is_dropped_with_its_part_of_the_identity(tmp_path: Path) -> None:
    full(tmp_path, tmp_path / "one")
    hg.edit_savepoint(tmp_path / "one", tmp_path / "two").drop("all", "ids").write()
    assert {name for _, name in everything(tmp_path / "two")} >= {"count", "last"}
    assert ("all", "ids") not in everything(tmp_path / "two")
    assert manifest_of(tmp_path / "two").state_texts == pipeline(tmp_path, Without()).definition().plan.state_texts()
    hg.edit_savepoint(tmp_path / "two", tmp_path / "none").drop("all", "count").drop("all", "last").write()
    assert manifest_of(tmp_path / "none").state_texts["all"] == ""


def test_an_identity_that_can_be_read_otherwise_is_not_touched(tmp_path: Path) -> None:
    full(tmp_path, tmp_path / "one")
    directory = SavepointDirectory(str(tmp_path / "one"))
    savepoint = directory.read()
    texts = {**savepoint.manifest.state_texts, "all": savepoint.manifest.state_texts["all"] + "; and more"}
    (tmp_path / "one" / "savepoint").unlink()
    directory.write(replace(savepoint, manifest=replace(savepoint.manifest, state_texts=texts)))
    with pytest.raises(UsageError, match="cannot be told from the savepoint alone; give the pipeline"):
        hg.edit_savepoint(tmp_path / "one", tmp_path / "two").drop("all", "ids").write()


def test_an_operator_is_dropped_with_all_that_is_of_it(tmp_path: Path) -> None:
    full(tmp_path, tmp_path / "one")
    hg.edit_savepoint(tmp_path / "one", tmp_path / "two").drop("all").write()
    assert {operator for operator, _ in everything(tmp_path / "two")} == {"newest"}
    assert "all" not in manifest_of(tmp_path / "two").state_texts


def test_a_pipeline_says_what_the_state_shall_be(tmp_path: Path) -> None:
    full(tmp_path, tmp_path / "one")
    program = pipeline(tmp_path, Fewer())
    edited = hg.edit_savepoint(tmp_path / "one", tmp_path / "no", pipeline=program)
    notes = pl.DataFrame({"key": [3], "value": ["three"]})
    with pytest.raises(
        UsageError, match=r"has the state 'ids', which the pipeline does not declare any more; say drop"
    ):
        edited.replace("all", "note", notes).write()
    edited = hg.edit_savepoint(tmp_path / "one", tmp_path / "two", pipeline=program)
    edited.replace("all", "note", notes).drop("all", "ids").write()
    found = everything(tmp_path / "two")
    assert same(found["all", "count"], ROWS["count"])
    assert same(found["all", "last"], ROWS["last"])
    assert same(found["all", "note"], notes)
    assert manifest_of(tmp_path / "two").state_texts == program.definition().plan.state_texts()


def test_state_gets_another_key(tmp_path: Path) -> None:
    full(tmp_path, tmp_path / "one")
    program = pipeline(tmp_path, Without(), key=("key", "other"))
    count = ROWS["count"].with_columns(other=pl.col("key") % 2)
    edited = hg.edit_savepoint(tmp_path / "one", tmp_path / "no", pipeline=program).drop("all", "ids")
    with pytest.raises(UsageError, match=r"state 'last' .* has the columns \(key: int64, map_key: .* and the pipeline"):
        edited.replace("all", "count", count).write()
    last = ROWS["last"].with_columns(other=pl.col("key") % 2)
    edited = hg.edit_savepoint(tmp_path / "one", tmp_path / "two", pipeline=program).drop("all", "ids")
    edited.replace("all", "count", count).replace("all", "last", last).write()
    found = hg.read_state(tmp_path / "two", "all", "count", keys=[(7, 1)])
    assert found.rows() == [(7, 1, 14)]
    assert manifest_of(tmp_path / "two").state_texts == program.definition().plan.state_texts()
    where = hg.read_state(tmp_path / "two", "all", "last", columns=["_subtask", "_key_group"])
    assert (where["_key_group"] * 3 // 128).cast(pl.Int32).equals(where["_subtask"])


def test_an_operator_begins_anew_with_other_rows(tmp_path: Path) -> None:
    full(tmp_path, tmp_path / "one")
    program = pipeline(tmp_path, Fewer())
    edited = hg.edit_savepoint(tmp_path / "one", tmp_path / "two", pipeline=program).drop("all").drop("all", "ids")
    edited.with_state("all", "count", FEW).write()
    found = {name: rows for (operator, name), rows in everything(tmp_path / "two").items() if operator == "all"}
    assert {name: rows.height for name, rows in found.items()} == {"count": 2, "last": 0, "note": 0}
    assert same(found["count"], FEW)
    assert manifest_of(tmp_path / "two").state_texts == program.definition().plan.state_texts()


def test_an_operator_is_added_to_a_savepoint(tmp_path: Path) -> None:
    full(tmp_path, tmp_path / "one")
    program = pipeline(tmp_path)
    program.source(hg.FromRows([{"key": 1}]), name="more").key_by("key").process(Without(), name="fresh").sink(
        hg.Discard()
    )
    edited = hg.edit_savepoint(tmp_path / "one", tmp_path / "two", pipeline=program).with_state("fresh", "count", FEW)
    with pytest.raises(UsageError, match="no operator 'fresh' in the savepoint"):
        edited.replace("fresh", "last", FEW)
    edited.write()
    assert same(hg.read_state(tmp_path / "two", "fresh", "count"), FEW)
    found = everything(tmp_path / "two")
    assert equal({one: found[one] for one in everything(tmp_path / "one")}, everything(tmp_path / "one"))


def test_timers_are_written_and_changed(tmp_path: Path) -> None:
    program = pipeline(tmp_path, Timed())
    draft = hg.new_savepoint(program, tmp_path / "one").with_state("all", EVENT_TIMERS, TIMES)
    draft.with_state("all", "count", ROWS["count"]).write()
    found = hg.read_state(tmp_path / "one", "all", EVENT_TIMERS)
    assert same(found.select("key", "time_ms"), TIMES)
    later = found.select("key", pl.col("time") + pl.duration(microseconds=1))
    hg.edit_savepoint(tmp_path / "one", tmp_path / "two").replace("all", EVENT_TIMERS, later).write()
    after = hg.read_state(tmp_path / "two", "all", EVENT_TIMERS)
    assert same(after.select("key", "time_ms"), TIMES.with_columns(time_ms=pl.col("time_ms") + 1)), "never early"
    hg.edit_savepoint(tmp_path / "two", tmp_path / "three").drop("all", EVENT_TIMERS).write()
    assert hg.read_state(tmp_path / "three", "all", EVENT_TIMERS).height == 0
    texts = manifest_of(tmp_path / "three").state_texts
    assert texts == manifest_of(tmp_path / "one").state_texts, "timers are no part of the identity"


def restored(place: Path, program: hg.Pipeline) -> Harness:
    """Return the operator ``all`` in one subtask, with what the savepoint has of it."""
    found = find_checkpoint(str(place))
    parts = [part for entry in found.manifest.entries for part in entry.parts if part.section == "state/all"]
    states = [RestoredState(i, len(parts), found.read(found.storage(), part)) for i, part in enumerate(parts)]
    return Harness(cast(Any, program.definition().graph.node(NodeName("all")).spec), states)


def test_timers_that_are_given_fire(tmp_path: Path) -> None:
    program = pipeline(tmp_path, Timed())
    hg.new_savepoint(program, tmp_path / "one").with_state("all", EVENT_TIMERS, TIMES).write()
    run = restored(tmp_path / "one", program)
    run.operator.on_watermark(1_009)
    assert [row["key"] for row in run.out.rows()] == list(range(10))


def test_what_is_given_without_an_expiry_lives_for_its_ttl_from_the_restore(tmp_path: Path) -> None:
    program = pipeline(tmp_path, Expiring())
    rows = pl.DataFrame({"key": [1, 2], "value": [5, 6]})
    hg.new_savepoint(program, tmp_path / "one").with_state("all", "seen", rows).write()
    run = restored(tmp_path / "one", program)
    found = rows_of(decode_sections(run.snapshot().payload, "test")["seen"])
    now_ms = max(BORN_MS + run.now_ms, SYSTEM_CLOCK.wall_ms())
    assert [(row["key0"], row["value"]) for row in found] == [(1, 5), (2, 6)]
    assert all(abs(row["expires_ms"] - now_ms - 7 * 86_400_000) < 60_000 for row in found)


def test_expiries_are_kept_and_in_order(tmp_path: Path) -> None:
    program = pipeline(tmp_path, Expiring())
    rows = pl.DataFrame({"key": [1, 1, 2], "value": [5, 6, 7]})
    hg.new_savepoint(program, tmp_path / "one").with_state("all", "seen", rows).write()
    columns = ["key", "value", "_expires"]
    found = hg.read_state(tmp_path / "one", "all", "seen", columns=columns)
    assert found["_expires"].null_count() == 3, "as if it were written at the restore"
    until = pl.Series([2_000_000, 3_000_000, 1_000_000], dtype=pl.Datetime("us"))
    some = rows.with_columns(_expires=until)
    hg.edit_savepoint(tmp_path / "one", tmp_path / "two").replace("all", "seen", some).write()
    again = hg.read_state(tmp_path / "two", "all", "seen", columns=columns)
    assert same(again, some)
    wrong = some.with_columns(_expires=until.reverse())
    with pytest.raises(UsageError, match="cannot expire before those in front of it; sort by _expires"):
        hg.edit_savepoint(tmp_path / "one", tmp_path / "no").replace("all", "seen", wrong.reverse()).write()


UNWRITABLE = ("with-timestamps", "loop-log", "held-by-a-file-sink", "in-flight", "rocksdb", "broadcast", "async-map")
"""``broadcast`` is the copy of one subtask of several."""


def bytes_in(place: Path) -> list[bytes]:
    """Return the bytes of every part."""
    found = find_checkpoint(str(place))
    parts = [part for entry in found.manifest.entries for part in entry.parts]
    return [bytes(found.read(found.storage(), part)) for part in parts]


def stored_in(place: Path) -> dict[tuple[str, str], Any]:
    """Return what every section of every state has, as it is stored."""
    found = find_checkpoint(str(place))
    parts = [part for entry in found.manifest.entries for part in entry.parts if part.section]
    read = {part.section: decode_sections(found.read(found.storage(), part), "test") for part in parts}
    return {(section, name): rows_of(data) for section, inner in read.items() for name, data in inner.items()}


@pytest.mark.parametrize("name", [name for name in CASES if not name.startswith(UNWRITABLE)])
def test_every_state_is_stored_as_it_was_when_it_is_written_back(tmp_path: Path, name: str) -> None:
    live = made(name)
    written = Written(tmp_path)
    prefix = LISTS_PREFIX if name == "operator-lists" else STATE_PREFIX
    written.complete(1, {"node": text_of(live)}, [state(live.freeze(), prefix=prefix)])
    catalog = hg.state_catalog(written.path).filter(pl.col("kind") != "facts")
    draft = hg.edit_savepoint(written.path, tmp_path / "new")
    for one in catalog["state"]:
        rows = hg.read_state(written.path, "node", one)
        columns = [*rows.columns, *(["_expires"] if "ttl" in name else [])]
        draft.replace("node", one, hg.read_state(written.path, "node", one, columns=columns))
    draft.write()
    assert catalog.height > 0
    assert stored_in(tmp_path / "new") == stored_in(written.path)


def test_what_nobody_can_write_is_refused(tmp_path: Path) -> None:
    written = Written(tmp_path)
    part = Part({}, {"a": b"1"}, [output(b"small")])
    written.complete(1, {"node": "some source"}, [part])
    edited = hg.edit_savepoint(written.path, tmp_path / "no")
    with pytest.raises(UsageError, match="operator 'node' has no state 'committables'; it has none"):
        edited.replace("node", "committables", FEW).write()


@pytest.mark.parametrize("name", ["with-timestamps", "loop-log", "held-by-a-file-sink", "in-flight", "window-buffer"])
def test_what_nobody_names_stays_whatever_it_is(tmp_path: Path, name: str) -> None:
    live = made(name)
    written = Written(tmp_path)
    prefix = IN_FLIGHT_PREFIX if name == "in-flight" else STATE_PREFIX
    written.complete(1, {"node": text_of(live)}, [state(live.freeze(), prefix=prefix)])
    hg.edit_savepoint(written.path, tmp_path / "new").write()
    assert bytes_in(tmp_path / "new") == bytes_in(written.path)
    one, two = find_checkpoint(str(written.path)).manifest, find_checkpoint(str(tmp_path / "new")).manifest
    described = [[(p.section, p.rows, p.key_groups, p.name) for e in m.entries for p in e.parts] for m in (one, two)]
    assert described[0] == described[1]


@pytest.mark.parametrize(
    ("name", "one"), [("held-by-a-file-sink", "records"), ("loop-log", "log"), ("async-map", "requests")]
)
def test_state_that_is_not_of_keys_alone_is_refused(tmp_path: Path, name: str, one: str) -> None:
    live = made(name)
    written = Written(tmp_path)
    written.complete(1, {"node": text_of(live)}, [state(live.freeze())])
    rows = hg.read_state(written.path, "node", one)
    with pytest.raises(UsageError, match="cannot be written from outside: it is of the kind '"):
        hg.edit_savepoint(written.path, tmp_path / "new").replace("node", one, rows).write()


def test_state_in_a_form_of_its_backend_is_not_mixed_with_rows(tmp_path: Path) -> None:
    full(tmp_path, tmp_path / "one")
    directory = SavepointDirectory(str(tmp_path / "one"))
    savepoint = directory.read()
    entries = [
        replace(e, parts=tuple(replace(p, section=p.section.replace("state/all", "own/all")) for p in e.parts))
        for e in savepoint.manifest.entries
    ]
    mixed = [
        replace(e, parts=(*e.parts, *former.parts))
        for e, former in zip(entries, savepoint.manifest.entries, strict=True)
    ]
    (tmp_path / "one" / "savepoint").unlink()
    directory.write(replace(savepoint, manifest=replace(savepoint.manifest, entries=tuple(mixed))))
    with pytest.raises(UsageError, match="'all' is stored there in its backend's own form; take a savepoint"):
        hg.edit_savepoint(tmp_path / "one", tmp_path / "two").replace("all", "count", FEW).write()


def test_what_belongs_to_no_key_is_there_from_the_beginning(tmp_path: Path) -> None:  # TM6
    hg.new_savepoint(pipeline(tmp_path, Timed()), tmp_path / "timed").write()
    hg.new_savepoint(pipeline(tmp_path, Expiring()), tmp_path / "expiring").write()
    timed, expiring = ({name for _, name in stored_in(tmp_path / one)} for one in ("timed", "expiring"))
    assert timed >= {"headgate.timers", EVENT_TIMERS, "headgate.timers.processing_time", "count", "ids", "last"}
    assert {"headgate.ttl", "seen"} <= expiring


def test_output_that_a_checkpoint_promised_stays_promised(tmp_path: Path) -> None:  # WS10, SV26
    written = Written(tmp_path)
    to = LocalStorage(tmp_path)
    large = b"l" * 100_000
    stored = _stored(written, to, large)
    promised = [output(b"small"), replace(output(b""), sink="large", stored=stored), replace(output(b"x"), sink="gone")]
    written.complete(1, {"node": "", "gone": ""}, [Part({}, {"a": b"1"}, promised)])
    hg.edit_savepoint(written.path, tmp_path / "new").drop("gone").write()
    found = find_checkpoint(str(tmp_path / "new"))
    outputs = {c.sink: c for c in found.manifest.committables}
    assert (set(outputs), outputs["out"].payload) == ({"out", "large"}, b"small")
    assert outputs["large"].stored is not None
    shutil.rmtree(written.path)
    assert bytes(found.read(found.storage(), outputs["large"].stored)) == large


def _stored(written: Written, storage: LocalStorage, payload: bytes) -> SnapshotPart:
    from headgate.model.ids import CheckpointId, SubtaskId, VertexId
    from headgate.runtime.checkpoints.snapshot_writer import SnapshotDestination

    to = SnapshotDestination(storage, "p", written.log.generation, 0)
    return write_output(to, SubtaskId(VertexId("node"), 0), CheckpointId(1), 1, payload)


def test_a_final_savepoint_has_input_again_if_its_positions_are_changed(tmp_path: Path) -> None:
    full(tmp_path, tmp_path / "one")
    directory = SavepointDirectory(str(tmp_path / "one"))
    savepoint = directory.read()
    (tmp_path / "one" / "savepoint").unlink()
    directory.write(replace(savepoint, manifest=replace(savepoint.manifest, is_final=True)))
    hg.edit_savepoint(tmp_path / "one", tmp_path / "two").replace("all", "count", FEW).write()
    assert manifest_of(tmp_path / "two").is_final
    program = pipeline(tmp_path)
    positions = pl.DataFrame({"split": ["a"], "position": [b"1"]})
    edited = hg.edit_savepoint(tmp_path / "one", tmp_path / "three", pipeline=program)
    edited.with_state("in", "positions", positions).write()
    assert not manifest_of(tmp_path / "three").is_final
    hg.edit_savepoint(tmp_path / "one", tmp_path / "four").drop("in").write()
    assert not manifest_of(tmp_path / "four").is_final


def test_a_place_that_is_taken_is_refused(tmp_path: Path) -> None:  # SV4
    full(tmp_path, tmp_path / "one")
    before = tree(tmp_path / "one")
    with pytest.raises(UsageError, match=r"there is a savepoint at .* already"):
        full(tmp_path, tmp_path / "one")
    with pytest.raises(UsageError, match=r"there is a savepoint at .* already"):
        hg.edit_savepoint(tmp_path / "one", tmp_path / "one").replace("all", "count", FEW).write()
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "mine.txt").write_text("mine")
    with pytest.raises(UsageError, match="is not empty"):
        full(tmp_path, tmp_path / "other")
    assert tree(tmp_path / "one") == before


def test_a_damaged_source_is_named_and_nothing_is_left(tmp_path: Path) -> None:
    rows = pl.DataFrame({"key": range(40_000), "value": range(40_000)})
    hg.new_savepoint(pipeline(tmp_path), tmp_path / "one").with_state("all", "count", rows).write()
    damaged = next(path for path in (tmp_path / "one").rglob("all-1*") if path.is_file())
    data = bytearray(damaged.read_bytes())
    data[len(data) // 2] ^= 1
    damaged.write_bytes(data)
    with pytest.raises(CorruptionError, match="all-1"):
        hg.edit_savepoint(tmp_path / "one", tmp_path / "two").drop("newest").write()
    assert not any(path.is_file() for path in (tmp_path / "two").rglob("*"))


class Killed(BaseException):
    """Nothing runs after it."""


def killed_at(number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Have the process end at the ``number``-th write: whatever would tidy up does not happen either."""
    writes = [0]

    def counted(call: Callable[..., Any]) -> Callable[..., Any]:
        def wrapped(self: LocalStorage, *arguments: Any) -> Any:
            writes[0] += 1
            if writes[0] >= number:
                raise Killed
            return call(self, *arguments)

        return wrapped

    def dead(self: SavepointDirectory, place: object) -> None:
        raise Killed

    monkeypatch.setattr(LocalStorage, "put", counted(LocalStorage.put))
    monkeypatch.setattr(LocalStorage, "put_if_absent", counted(LocalStorage.put_if_absent))
    monkeypatch.setattr(SavepointDirectory, "give_up", dead)


def test_killed_half_way_there_is_nothing_to_read_and_a_second_try_works(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program, tries = pipeline(tmp_path), 0
    rows = pl.DataFrame({"key": range(40_000), "value": range(40_000)})
    while not (tmp_path / "new" / "savepoint").exists():
        tries += 1
        with pytest.MonkeyPatch.context() as patch:
            killed_at(tries, patch)
            try:
                hg.new_savepoint(program, tmp_path / "new").with_state("all", "count", rows).write()
            except Killed:
                with pytest.raises(UsageError, match="neither a savepoint nor a checkpoint"):
                    hg.state_catalog(tmp_path / "new")
    assert tries >= 4, "three files, and the one that makes it a savepoint"
    assert same(hg.read_state(tmp_path / "new", "all", "count"), rows)


def test_a_storage_that_fails_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    put_if_absent = LocalStorage.put_if_absent

    def refuse(self: LocalStorage, path: str, parts: Any) -> Any:
        if path == "savepoint":
            raise StorageError("write", path, "no space left", is_transient=False)
        return put_if_absent(self, path, parts)

    with monkeypatch.context() as patch:
        patch.setattr(LocalStorage, "put_if_absent", refuse)
        large = pl.DataFrame({"key": range(40_000), "value": range(40_000)})
        with pytest.raises(StorageError, match="no space left"):
            hg.new_savepoint(pipeline(tmp_path), tmp_path / "new").with_state("all", "count", large).write()
    assert not any(path.is_file() for path in (tmp_path / "new").rglob("*"))
    full(tmp_path, tmp_path / "new")


KILLED = """
import sys, polars as pl
from tests.runtime.savepoint_writer.test_writer import pipeline
from pathlib import Path
import headgate as hg
rows = pl.DataFrame({"key": range(40_000), "value": range(40_000)})
root = Path(sys.argv[1])
hg.new_savepoint(pipeline(root), root / "new").with_state("all", "count", rows).write()
"""


@pytest.mark.long
def test_a_process_that_is_killed_leaves_no_savepoint(tmp_path: Path) -> None:
    root = str(Path(__file__).parents[3])
    environment = {**os.environ, "PYTHONPATH": root, "HEADGATE_KILL_AT": f"before-savepoint:1:{tmp_path / 'marker'}"}
    first, second = (
        subprocess.run([sys.executable, "-c", KILLED, str(tmp_path)], env=environment, cwd=root, check=False).returncode
        for _ in range(2)
    )
    assert (first, second) == (-9, 0)
    assert hg.read_state(tmp_path / "new", "all", "count").height == 40_000
