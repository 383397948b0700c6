"""State of checkpoints and savepoints, read without a pipeline: all of it, some of it, damaged, and gone."""

from __future__ import annotations

import os
import pickle  # noqa: TID251 - a trap for whoever unpickles
import shutil
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import polars as pl
import pyarrow as pa
import pytest
from tests.operators.harness import Harness
from tests.runtime.checkpoints.frozen_cases import ARROW, CASES, Holder, Recorded, by_row, made, rows_of
from tests.runtime.state_reader.written import MAX, Part, Written, output, state, tree

import headgate as hg
from headgate.codec.json_files import encode_savepoint
from headgate.codec.loop_log import decode_log
from headgate.codec.snapshot import IN_FLIGHT_PREFIX, LISTS_PREFIX, STATE_PREFIX, UNION_PREFIX, decode_sections
from headgate.connectors.files.publish_log import StagedFile, encode_files
from headgate.errors import CorruptionError, HeadgateError, StorageError, UsageError
from headgate.model.ids import CheckpointId
from headgate.model.manifest import Manifest, Place, Savepoint, SnapshotPart
from headgate.operators.reduction import ReduceSpec
from headgate.runtime.checkpoints.snapshot_writer import SnapshotDestination, SubtaskTarget, write_output
from headgate.state import snapshot
from headgate.state.descriptors import StateKind
from headgate.state.key_hash import hash_columns, key_groups
from headgate.storage.local import LocalStorage
from headgate.storage.urls import open_storage

KEYED = "keyed state(keys key: int64; value s: int64)"
PREFIXES = {"operator-lists": LISTS_PREFIX, "in-flight": IN_FLIGHT_PREFIX}
Reads = list[tuple[str, int]]


def text_of(live: Any) -> str:
    spec = getattr(live, "spec", None)
    return "loop(keys key; columns x)" if hasattr(live, "log") else spec.state_text() if spec is not None else ""


def sections_of(payload: bytes) -> dict[str, memoryview]:
    return decode_sections(payload, "test")


@pytest.mark.parametrize("name", CASES)
def test_every_state_that_can_be_frozen_can_be_looked_at(name: str, tmp_path: Path) -> None:
    live = made(name)
    frozen = live.freeze()
    payload = b"".join(bytes(memoryview(part)) for part in frozen.encode())
    written = Written(tmp_path)
    prefix = PREFIXES.get(name, STATE_PREFIX)
    written.complete(1, {"node": text_of(live)}, [state(frozen, prefix=prefix)])
    catalog = hg.state_catalog(written.path)
    counted = sum(frozen.rows().values())
    assert (
        catalog.filter(pl.col("kind") != "facts")["rows"].sum() + (0 if name != "with-timestamps" else counted)
        == counted
    )
    assert set(catalog["operator"]) == {"node"}
    found = {one: hg.read_state(written.path, "node", one) for one in catalog["state"]}
    assert {one: frame.height for one, frame in found.items()} == dict(
        zip(catalog["state"], catalog["rows"], strict=True)
    )
    if name.startswith("loop-log"):
        log = decode_log(payload, pa.schema([("key", pa.int64()), ("n", pa.int64()), ("ts", pa.int64())]), "test")
        assert (list(found), found["log"].height) == (["log"], log.rows)
        assert catalog["keys"].to_list() == [[] if name.endswith("without-key") else ["key"]]
        if not name.endswith("without-key"):
            some = hg.read_state(written.path, "node", keys=[3, 5])
            assert some.equals(found["log"].filter(pl.col("key").is_in([3, 5])))
        return
    stored = {one: rows_of(data) for one, data in sections_of(payload).items() if data[:4] == ARROW}
    if "with-ttl" in name:  # until when a row lives is told if that is asked for
        at = hg.read_state(written.path, "node", columns=["_expires"])["_expires"].dt.epoch("ms")
        assert sorted(at) == sorted(row.pop("expires_ms") for row in stored["s"])
    shown = [row for frame in found.values() for row in frame.rows()]
    for rows in stored.values():
        for row in rows:
            values = [value for column, value in row.items() if not column.startswith("__")]
            assert any(all(value in one for value in values) for one in shown), (row, shown[:3])


def by_value(root: Path, *, parts: int = 8, numbers: int = 400) -> Written:
    """Return a checkpoint of one subtask whose state is cut into ``parts`` parts."""
    live = by_row(StateKind.VALUE)
    rows = [{"key": i, "n": 7 * i + 1, "ts": 0} for i in range(numbers)]
    live.run.send(pa.RecordBatch.from_pylist(rows, pa.schema([(c, pa.int64()) for c in ("key", "n", "ts")])))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(snapshot, "RANGE_BYTES_MIN", 1)
        patch.setattr(snapshot, "RANGES_MAX", parts)
        written = Written(root)
        written.complete(1, {"node": live.spec.state_text()}, [state(live.freeze())])
    return written


def group_of(key: int) -> int:
    batch = pa.record_batch([pa.array([key], pa.int64())], names=["key"])
    return int(key_groups(hash_columns(batch, ["key"]), MAX)[0])


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> Reads:
    """What is read of files of snapshots: path and offset."""
    seen: Reads = []
    get_range = LocalStorage.get_range

    def counted(self: LocalStorage, path: str, offset: int, size_bytes: int) -> bytes:
        seen.append((path, offset))
        return get_range(self, path, offset, size_bytes)

    monkeypatch.setattr(LocalStorage, "get_range", counted)
    return seen


def test_rows_are_those_of_the_keys(tmp_path: Path) -> None:
    path = by_value(tmp_path).path
    everything = hg.read_state(path, "node")
    assert everything.columns == ["key", "value"]
    assert sorted(everything.rows()) == [(i, 7 * i + 1) for i in range(400)]
    assert sorted(hg.read_state(path, "node", "s", keys=[5, 3, 5, 4_000]).rows()) == [(3, 22), (5, 36)]
    assert hg.read_state(path, "node", keys=[]).height == 0
    some = hg.read_state(path, "node", key_groups=[0, 9], columns=["key", "_key_group", "_subtask"])
    assert sorted(some["key"]) == [i for i in range(400) if group_of(i) in (0, 9)]
    assert (set(some["_key_group"]), set(some["_subtask"])) == ({0, 9}, {0})
    both = hg.read_state(path, "node", keys=range(40), key_groups=[group_of(7)])
    assert sorted(both["key"]) == [i for i in range(40) if group_of(i) == group_of(7)]
    assert hg.read_state(path, "node", columns=["value", "key"], keys=[3]).rows() == [(22, 3)]


def test_only_the_parts_that_can_hold_a_key_are_read(tmp_path: Path, reads: Reads) -> None:
    path = by_value(tmp_path).path
    hg.read_state(path, "node")
    everything = len(reads)
    assert hg.read_state(path, "node", keys=[3]).height == 1
    of_one = len(reads) - everything
    beside = 3  # the flags of the subtask; and a small part, for the names of its states and for their columns
    assert (everything, of_one) == (beside + 8, beside + 1)
    assert hg.read_state(path, "node", keys=[]).height == 0
    assert len(reads) == everything + of_one + beside


def test_large_parts_are_listed_by_their_headers(tmp_path: Path, reads: Reads, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headgate.runtime.state_reader.lookup.WHOLE_BYTES", 30)
    written = by_value(tmp_path)
    sizes = {part.offset: part.size_bytes for part in written.complete_parts()}
    (row,) = hg.state_catalog(written.path).rows(named=True)
    assert (row["rows"], row["columns"], row["keys"]) == (400, "key: int64, value: int64", ["key"])
    assert 0 < row["size_bytes"] < sum(sizes.values())
    assert len(reads) == 1 + 2 * (len(sizes) - 1) + 1, "flags, two pieces of each header, and the smallest part"


def flip(path: Path, at: int) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)


def files_of(written: Written) -> list[Path]:
    return sorted(path for path in written.path.rglob("*") if path.is_file() and "chk-" in str(path))


def test_what_is_read_is_verified_and_the_rest_is_left_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headgate.runtime.state_reader.lookup.WHOLE_BYTES", 30)
    written = by_value(tmp_path)
    (file,) = files_of(written)
    parts = [part for part in written.complete_parts() if part.section]
    smallest = min(parts, key=lambda part: part.size_bytes)
    hurt = next(part for part in parts if part is not smallest)
    assert hurt.key_groups is not None
    flip(file, hurt.offset + hurt.size_bytes - 20)
    in_it = range(hurt.key_groups.first, hurt.key_groups.first + hurt.key_groups.count)
    sound = [key for key in range(400) if group_of(key) not in in_it]
    assert sorted(hg.read_state(written.path, "node", keys=sound)["key"]) == sound
    for wanted in ({"key_groups": [in_it[0]]}, {}):
        with pytest.raises(CorruptionError, match=rf"{file.name} is damaged at byte {hurt.offset}: expected checksum"):
            hg.read_state(written.path, "node", **wanted)
    assert hg.state_catalog(written.path)["rows"].to_list() == [400], "rows are as the manifest says"
    flip(file, hurt.offset + 30)
    with pytest.raises(CorruptionError, match="a header of"):
        hg.state_catalog(written.path)


@pytest.mark.parametrize("change", [lambda p: p.write_bytes(p.read_bytes()[:-3]), lambda p: p.unlink()])
def test_a_file_that_is_cut_or_missing_is_named(tmp_path: Path, change: Callable[[Path], Any]) -> None:
    written = by_value(tmp_path)
    (file,) = files_of(written)
    change(file)
    with pytest.raises(CorruptionError, match=file.name) as caught:
        hg.read_state(written.path, "node")
    assert "\n" not in str(caught.value)


def test_what_retention_removes_meanwhile_is_one_sentence(tmp_path: Path) -> None:
    written = by_value(tmp_path)
    batches = hg.read_state_batches(written.path, "node")
    assert next(batches).num_rows
    by_value(tmp_path / "other")
    live = by_row(StateKind.VALUE)
    written.complete(2, {"node": KEYED}, [state(live.freeze())])
    written.log.drop(CheckpointId(1), CheckpointId(2))
    with pytest.raises(
        StorageError, match=r"cannot read checkpoint 1 of pipeline 'p': its files were removed meanwhile"
    ):
        list(batches)
    assert hg.read_state(written.path, "node").height == 0, "the newest one is another now"


def test_the_newest_one_is_read_unless_another_is_named(tmp_path: Path) -> None:
    written = Written(tmp_path)
    live = made("reduce")
    for checkpoint in (1, 2):
        written.complete(
            checkpoint,
            {"node": "keyed state(keys key: int64; value accumulators: struct<x: int64>)"},
            [state(live.freeze())],
        )
    assert written.path.name == "p"
    first = by_value(tmp_path / "older")
    keep = CheckpointId(1)
    for path in (first.path, f"{first.path}/", first.path / "chk-1", first.path / "chk-0000000001"):
        assert hg.read_state(path, "node").height == 400
    assert hg.read_state(first.path, "node", id=keep).height == 400
    for path, options in (
        (first.path, {"id": 2}),
        (first.path / "chk-1", {"id": 2}),
        (first.path / "chk-3", {}),
        (tmp_path / "nowhere", {}),
        (tmp_path, {}),
        (first.path / "log", {}),
    ):
        with pytest.raises(UsageError):
            hg.state_catalog(path, **options)
    with pytest.raises(UsageError, match=r"; below it are the checkpoints of p$"):
        hg.state_catalog(tmp_path)
    assert not (tmp_path / "nowhere").exists()


def newest_entry(written: Written) -> Path:
    return sorted((written.path / "log").iterdir())[-1]


@pytest.mark.parametrize("change", [lambda p: flip(p, 120), lambda p: p.unlink()])
def test_an_older_checkpoint_is_never_shown_as_the_newest(tmp_path: Path, change: Callable[[Path], Any]) -> None:
    written = Written(tmp_path)
    live = made("by-row-value")
    for checkpoint in (1, 2):
        manifest = Manifest(CheckpointId(checkpoint), written.log.generation, 1, MAX, ())
        written.log.append(manifest, CheckpointId(1))
    del live
    change(newest_entry(written))
    with pytest.raises(CorruptionError, match="the newest checkpoint is not known; name one by its id: there is 1"):
        hg.state_catalog(written.path)
    assert hg.state_catalog(written.path, id=1).height == 0
    with pytest.raises(UsageError, match="has no checkpoint 2"):
        hg.state_catalog(written.path, id=2)


def test_looking_changes_nothing(tmp_path: Path) -> None:
    written = by_value(tmp_path)
    before = tree(tmp_path)
    hg.state_catalog(written.path)
    hg.read_state(written.path, "node", keys=[1])
    with pytest.raises(UsageError):
        hg.read_state(written.path, "node", "nothing")
    with pytest.raises(UsageError):
        hg.state_catalog(tmp_path / "q")
    assert tree(tmp_path) == before


def test_a_directory_that_may_only_be_read_can_be_looked_at(tmp_path: Path) -> None:
    written = by_value(tmp_path)
    directories = [tmp_path, *(path for path in tmp_path.rglob("*") if path.is_dir())]
    for path in directories:
        path.chmod(0o500)
    try:
        assert hg.read_state(written.path, "node").height == 400
    finally:
        for path in directories:
            path.chmod(0o700)


def test_a_savepoint_that_was_moved_can_be_looked_at(tmp_path: Path) -> None:
    written = by_value(tmp_path)
    place = tmp_path / "taken"
    shutil.copytree(written.path, place / "files-0123456789abcdef")
    manifest = written.newest()
    (place / "savepoint").write_bytes(encode_savepoint(Savepoint("drawn", "p", 1, "files-0123456789abcdef", manifest)))
    shutil.rmtree(written.path)
    moved = Path(shutil.move(place, tmp_path / "moved"))
    before = tree(moved)
    assert hg.read_state(moved, "node", keys=[3]).rows() == [(3, 22)]
    assert hg.read_state(moved, "node", id=1).height == 400
    with pytest.raises(UsageError, match="is a savepoint of checkpoint 1, not 2"):
        hg.read_state(moved, "node", id=2)
    assert tree(moved) == before
    (file,) = (moved / "files-0123456789abcdef").glob("chk-*/*")
    file.unlink()
    with pytest.raises(CorruptionError, match=rf"{file.name} is damaged at byte 0: expected a file of the savepoint"):
        hg.read_state(moved, "node")


class Trap:
    """Leaves a trace when it is unpickled."""

    def __init__(self, trace: Path) -> None:
        self._trace = trace

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self._trace),)


def test_nothing_is_unpickled(tmp_path: Path) -> None:
    trap = pickle.dumps(Trap(tmp_path / "trace"))
    written = Written(tmp_path)
    part = Part(positions={"split": trap, "text": b"line 7"}, committables=[output(trap), output(b"1\nname")])
    written.complete(1, {"node": "a source of somebody"}, [part])
    positions = hg.read_state(written.path, "node")
    assert positions.columns == ["split", "position", "text", "_subtask"]
    assert positions.rows() == [("split", trap, None, 0), ("text", b"line 7", "line 7", 0)]
    found = hg.read_state(written.path, "out")
    assert sorted(found.select("payload", "text").rows(), key=str) == sorted(
        [(trap, None), (b"1\nname", "name")], key=str
    )
    assert not (tmp_path / "trace").exists()


def test_prepared_output_says_what_it_is(tmp_path: Path) -> None:
    written = Written(tmp_path)
    files = encode_files([StagedFile("part-1.jsonl", 3, 40, "ab")])
    to = SnapshotDestination(open_storage(str(tmp_path)), "p", written.log.generation, 0)
    owner = by_row(StateKind.VALUE)
    subtask = written.complete(1, {}, [state(owner.freeze())]).entries[0].subtask
    stored = write_output(to, subtask, CheckpointId(2), 1, files)
    large = output(b"")
    written.complete(
        2, {}, [Part(committables=[type(large)("out", large.checkpoint, 0, large.generation, b"", stored)])]
    )
    (row,) = hg.read_state(written.path, "out", "committables").rows(named=True)
    assert (row["checkpoint"], row["generation"], row["payload"], row["_subtask"]) == (1, 1, files, 0)
    assert "part-1.jsonl" in row["text"]
    pieces = (SnapshotPart(70_000, 0, "chk-1/a.o1"), SnapshotPart(30_000, 0, "chk-1/a.o2"))
    listed = replace(output(b"2\np:out-1-0-1\n2"), pieces=pieces)
    written.complete(3, {}, [Part(committables=[listed])])
    (row,) = hg.read_state(written.path, "out", "committables").rows(named=True)
    assert row["text"] == "p:out-1-0-1"
    catalog = hg.state_catalog(written.path).rows(named=True)
    assert [each["size_bytes"] for each in catalog if each["operator"] == "out"] == [100_000 + len(listed.payload)]


def test_lists_of_an_operator_are_beside_its_keyed_state(tmp_path: Path) -> None:
    live, lists = made("by-row-value"), made("operator-lists")
    written = Written(tmp_path)
    parts = {
        (STATE_PREFIX, "node"): live.freeze(),
        (LISTS_PREFIX, "node"): lists.freeze(),
        (UNION_PREFIX, "node"): lists.freeze(),
    }
    written.complete(1, {"node": KEYED}, [Part(parts)])
    catalog = hg.state_catalog(written.path)
    assert catalog.select("state", "kind").rows() == [
        ("numbers", "operator list"),
        ("numbers", "operator union"),
        ("s", "value"),
        ("texts", "operator list"),
        ("texts", "operator union"),
    ]


def test_records_in_flight_are_shown_as_such(tmp_path: Path) -> None:
    recorded = Recorded()
    recorded.change()
    written = Written(tmp_path)
    written.complete(1, {}, [state(recorded.freeze(), "v", IN_FLIGHT_PREFIX)], vertex="v")
    (row,) = hg.state_catalog(written.path).rows(named=True)
    assert (row["operator"], row["state"], row["kind"], row["rows"]) == ("v", "in-flight/u", "in flight", 24)
    found = hg.read_state(written.path, "v")
    assert found.columns == ["key", "n", "ts", "_from_subtask", "_subtask"]
    assert found.group_by("_from_subtask").agg(n=pl.len(), low=pl.col("n").min()).sort("_from_subtask").rows() == [
        (0, 12, 24),
        (1, 12, 12),
    ]


@pytest.mark.parametrize("name", ["timers-by-row", "timers-by-batch"])
def test_timers_are_shown_beside_the_states_that_were_declared(tmp_path: Path, name: str) -> None:
    written = Written(tmp_path)
    live = made(name)
    written.complete(1, {"node": text_of(live)}, [state(live.freeze())])
    kinds = {row["state"]: (row["kind"], row["keys"]) for row in hg.state_catalog(written.path).rows(named=True)}
    kept = {f"headgate.timers.{kind}_time": (f"{kind}-time timers", ["key"]) for kind in ("event", "processing")}
    declared = {"s": ("value", ["key"])} if name == "timers-by-batch" else {}
    assert kinds == {"headgate.timers": ("facts", []), **kept, **declared}
    timers = hg.read_state(written.path, "node", "headgate.timers.event_time")
    assert timers.columns == ["key", "time_ms", "time"]
    key = timers["key"][0]
    assert hg.read_state(written.path, "node", "headgate.timers.event_time", keys=[key]).equals(
        timers.filter(pl.col("key") == key)
    )
    if declared:
        assert hg.read_state(written.path, "node").columns == ["key", "value"]  # no name is needed


def test_a_key_that_arrow_would_round_is_none(tmp_path: Path) -> None:
    written = by_value(tmp_path)
    assert hg.read_state(written.path, "node", keys=[3.0]).rows() == [(3, 22)]
    with pytest.raises(UsageError, match=r"a key of operator 'node' is \(key: int64\): .* cannot hold float 3.5"):
        hg.read_state(written.path, "node", keys=[3.5])


@pytest.mark.parametrize("path", ["p", "p/chk-5", "p/below"])
def test_a_directory_that_may_not_be_looked_at_is_told(path: str, tmp_path: Path, monkeypatch: Any) -> None:
    """Tests may run as root, who may look everywhere."""

    def refused(self: Path) -> bool:
        raise PermissionError(13, "Permission denied", str(self))

    monkeypatch.setattr(Path, "is_dir", refused)
    with pytest.raises(StorageError, match=rf"cannot look at {tmp_path / path}: Permission denied"):
        hg.state_catalog(tmp_path / path)


@pytest.mark.parametrize("path", [None, 5, ""])
def test_what_is_no_path_is_said(path: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "log").mkdir()  # where the test stands there would be a pipeline
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UsageError, match=r"path must be a path or URL|the path is empty; give the path of a savepoint"):
        hg.state_catalog(path)


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"operator": "nodes"}, r"holds nothing of an operator 'nodes'; the operators with state are node, out"),
        ({"operator": "node"}, r"operator 'node' has several states: numbers, s, texts; name one"),
        ({"operator": "node", "state": "t"}, r"has no state 't' in checkpoint 1 of pipeline 'p'; it has numbers, s, t"),
        (
            {"operator": "node", "state": "s", "columns": ["v"]},
            r"has no column 'v'; it has key, value, _subtask, _key_",
        ),
        ({"operator": "node", "state": "s", "columns": "key"}, r"columns must be a list of names, such as"),
        ({"operator": "node", "state": "s", "columns": []}, r"columns must be a list of names"),
        ({"operator": "node", "state": "s", "keys": ["a"]}, r"a key of operator 'node' is \(key: int64\)"),
        ({"operator": "node", "state": "s", "keys": [None]}, r"a key of operator 'node' is \(key: int64\), not"),
        ({"operator": "node", "state": "s", "keys": [2**70]}, r"a key of operator 'node' is \(key: int64\)"),
        ({"operator": "node", "state": "s", "key_groups": [128]}, r"there are the key groups 0 to 127, but 128 is"),
        ({"operator": "node", "state": "s", "key_groups": ["3"]}, r"there are the key groups 0 to 127, but '3' is"),
        ({"operator": "node", "state": "s", "key_groups": 3}, r"key_groups must be a list, such as \[3\], not 3"),
        ({"operator": "node", "state": "s", "keys": 3}, r"keys must be a list, such as \[3\], not 3"),
        ({"operator": "node", "state": "s", "keys": "ab"}, r"keys must be a list, such as \['ab'\]"),
        (
            {"operator": "node", "state": "s", "keys": [1.5]},
            r"a key of operator 'node' is \(key: int64\): .* cannot hold float 1.5",
        ),
        ({"operator": "node", "state": "s", "columns": 3}, r"columns must be a list of names, such as"),
        ({"operator": None}, r"operator must be a name, not None; state_catalog\(path\) lists what there is"),
        ({"operator": "node", "state": 5}, r"state must be a name, not 5"),
        ({"operator": "node", "id": "1"}, r"id must be the number of a checkpoint, not '1'"),
        ({"operator": "node", "id": True}, r"id must be the number of a checkpoint, not True"),
        (
            {"operator": "node", "state": "texts", "keys": [1]},
            r"'texts' of operator 'node' has no key to choose rows by",
        ),
    ],
)
def test_what_is_not_there_is_said(tmp_path: Path, options: dict[str, Any], sentence: str) -> None:
    written = Written(tmp_path)
    parts = {
        (STATE_PREFIX, "node"): made("by-row-value").freeze(),
        (LISTS_PREFIX, "node"): made("operator-lists").freeze(),
    }
    written.complete(1, {"node": KEYED}, [Part(parts, committables=[output(b"x")])])
    with pytest.raises(UsageError, match=sentence) as caught:
        hg.read_state_batches(written.path, **options)
    assert "\n" not in str(caught.value)


def test_keys_of_several_columns_are_tuples(tmp_path: Path) -> None:
    schema = pa.schema([("n", pa.int64()), ("name", pa.large_string()), ("part", pa.float64())])
    run = Harness(ReduceSpec(("name", "part"), lambda total, row: row, schema))
    rows: Sequence[dict[str, Any]] = [{"n": i, "name": f"ä{i % 10}", "part": i / 4 - 2} for i in range(100)]
    run.send(pa.RecordBatch.from_pylist(list(rows), schema))
    frozen = run.operator.freeze()
    assert frozen is not None
    written = Written(tmp_path)
    text = ReduceSpec(("name", "part"), lambda total, row: row, schema).state_text()
    written.complete(1, {"node": text}, [state(frozen)])
    assert hg.state_catalog(written.path)["keys"].to_list() == [["name", "part"]]
    found = hg.read_state(written.path, "node", keys=[("ä3", 13 / 4 - 2), ("ä8", -0.0), ("ä4", 13 / 4 - 2)])
    assert sorted(found["value"].struct.field("n")) == [8, 13], "the key of neither column alone, and one zero"
    with pytest.raises(UsageError, match=r"is \(name: large_string, part: double\), not"):
        hg.read_state(written.path, "node", keys=["ä3"])


def test_a_checkpoint_that_was_restored_by_name_is_read_where_its_files_are(tmp_path: Path) -> None:
    other = by_value(tmp_path / "other")
    written = Written(tmp_path / "mine")
    place = Place(str(tmp_path / "other"), "p")
    written.log.append(replace(other.newest(), generation=written.log.generation, place=place))
    assert hg.read_state(written.path, "node", keys=[3]).rows() == [(3, 22)]
    shutil.rmtree(tmp_path / "other")
    with pytest.raises(
        CorruptionError, match=r"expected the files of checkpoint 1 of pipeline 'p', found no directory"
    ):
        hg.read_state(written.path, "node")


@pytest.mark.parametrize("data", [b"SQLite format 3\x00", ARROW + b"\x00", b"HGSNAP\r\n", b""])
def test_what_only_a_backend_understands_is_bytes(tmp_path: Path, data: bytes) -> None:
    written = Written(tmp_path)
    to = SnapshotDestination(open_storage(str(tmp_path)), "p", written.log.generation, 0)
    manifest = written.complete(1, {"node": KEYED}, [Part()])
    target = SubtaskTarget(to, manifest.entries[0].subtask, CheckpointId(2))
    target.put("state/node", [data], None, None, "000012.sst")
    entries = (replace(manifest.entries[0], parts=target.finish()),)
    written.log.append(replace(manifest, checkpoint=CheckpointId(2), entries=entries))
    if data in (b"SQLite format 3\x00", b""):
        (row,) = hg.state_catalog(written.path).rows(named=True)
        assert (row["state"], row["kind"], row["rows"], row["size_bytes"]) == ("000012.sst", "bytes", None, len(data))
        assert hg.read_state(written.path, "node").rows() == [(data, 0)]
    else:  # it begins as something that it is not
        with pytest.raises(CorruptionError):
            hg.state_catalog(written.path)


PLACES = 5
"""At so many places each file is damaged."""


def everything(path: Path) -> dict[tuple[str, str], pl.DataFrame]:
    catalog = hg.state_catalog(path)
    return {(o, s): hg.read_state(path, o, s) for o, s in catalog.select("operator", "state").rows()}


def same(found: dict[tuple[str, str], pl.DataFrame], expected: dict[tuple[str, str], pl.DataFrame]) -> bool:
    return found.keys() == expected.keys() and all(found[one].equals(expected[one]) for one in found)


def flipped(data: bytes, at: int) -> bytes:
    return data[:at] + bytes([data[at] ^ 0x10]) + data[at + 1 :]


@pytest.mark.parametrize("kind", [StateKind.VALUE, StateKind.MAP])
@pytest.mark.parametrize("change", [flipped, lambda data, at: data[:at]], ids=["flipped", "cut"])
def test_damage_anywhere_is_one_sentence_or_does_not_matter(
    tmp_path: Path, kind: StateKind, change: Callable[[bytes, int], bytes]
) -> None:
    written = Written(tmp_path)
    complete(written, by_row(kind), 1)
    path = written.path
    expected = everything(path)
    told: list[HeadgateError] = []
    for file in sorted(path.rglob("*")):
        data = file.read_bytes() if file.is_file() else b""
        for at in range(0, len(data), max(1, len(data) // PLACES + 1)):
            file.write_bytes(change(data, at))
            try:
                assert same(everything(path), expected), f"{file} at {at}: other rows are shown"
            except HeadgateError as error:
                told.append(error)
        if data:
            file.write_bytes(data)
    assert len([error for error in told if isinstance(error, CorruptionError)]) > PLACES
    assert not [error for error in told if "\n" in str(error)]


class Striking:
    """Completes the next checkpoint, and removes the one before it, at the ``number``-th look at the storage."""

    def __init__(self, written: Written, live: Holder, number: int) -> None:
        self._written, self._live, self._number = written, live, number
        self.looks = 0

    def __call__(self) -> None:
        self.looks += 1
        if self.looks == self._number:
            complete(self._written, self._live, 2)
            self._written.log.drop(CheckpointId(1), CheckpointId(2))


def complete(written: Written, live: Holder, checkpoint: int) -> None:
    live.change()
    written.complete(checkpoint, {"node": live.spec.state_text()}, [state(live.freeze())])


def test_whenever_retention_strikes_it_is_rows_of_one_checkpoint_or_one_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    outcomes: list[object] = []
    number = 1
    while True:
        live, written = by_row(StateKind.VALUE), Written(tmp_path / str(number))
        complete(written, live, 1)
        first = sorted(hg.read_state(written.path, "node").rows())
        strike = Striking(written, live, number)
        with monkeypatch.context() as patch:
            for name in ("get", "get_range", "list"):
                patch.setattr(LocalStorage, name, struck(getattr(LocalStorage, name), strike))
            found = rows_or_why_not(written.path)
        if strike.looks < number:
            break
        second = sorted(hg.read_state(written.path, "node").rows())
        assert first != second
        outcomes.append("newest" if found == second else found)
        number += 1
    sentence = "cannot read checkpoint 1 of pipeline 'p': its files were removed meanwhile"
    assert outcomes[0] == "newest", "before it was chosen"
    assert all(one == "newest" or str(one).startswith(sentence) for one in outcomes), outcomes
    assert outcomes[-1] != "newest", "behind that"


def rows_or_why_not(path: Path) -> object:
    try:
        return sorted(hg.read_state(path, "node").rows())
    except StorageError as error:
        return str(error)


def struck(method: Callable[..., Any], strike: Striking) -> Callable[..., Any]:
    def look(self: LocalStorage, *arguments: Any) -> Any:
        strike()
        return method(self, *arguments)

    return look
