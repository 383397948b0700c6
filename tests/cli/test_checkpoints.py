from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

from headgate.cli.app import app
from headgate.codec.log_entry import encode_log_entry
from headgate.errors import CorruptionError, UsageError
from headgate.model.ids import CheckpointId, Generation, SubtaskId, VertexId
from headgate.model.manifest import Manifest, SnapshotDelays, SnapshotPart, SubtaskEntry
from headgate.protocol.checkpoints.recovery import Damage, Gap
from headgate.runtime.checkpoints.log import CheckpointLog
from headgate.storage.urls import open_storage


def manifest(checkpoint: int, is_final: bool = False) -> Manifest:
    rows = None if checkpoint == 1 else {"window": {"windows": 250_000}, "sum": {"accumulators": 0}}
    entry = SubtaskEntry(SubtaskId(VertexId("window"), 0), (SnapshotPart(1_500, 7, inline=b"x", rows=rows),))
    return Manifest(
        CheckpointId(checkpoint),
        Generation(1),
        1,
        128,
        (entry,),
        state_texts={"window": "window(keys a)", "sink": ""},
        is_final=is_final,
        trigger_wall_ms=1_700_000_000_000,
        duration_ms=42,
    )


@pytest.fixture
def root(tmp_path: Path) -> Path:
    log = CheckpointLog(open_storage(str(tmp_path)), "counts")
    log.claim("test", 1_700_000_000_000)
    log.append(manifest(1))
    log.append(manifest(2, is_final=True))
    return tmp_path


def told(*arguments: str) -> str:
    result = CliRunner().invoke(app, ["checkpoints", *arguments], catch_exceptions=False)
    assert result.exit_code == 0
    return result.output


def test_pipelines_are_listed(root: Path) -> None:
    assert told("list", "--dir", str(root)) == "counts\n"
    assert "There are no checkpoints" in told("list", "--dir", str(root / "counts" / "log"))


def test_completed_checkpoints_are_listed_with_duration_and_size(root: Path) -> None:
    text = told("list", "counts", "--dir", str(root))
    assert "2023-11-14 22:13:20.000" in text
    assert "42 ms" in text
    assert "1.5 kB" in text
    assert text.rstrip().endswith("final")


def test_a_damaged_entry_is_listed_by_name(root: Path) -> None:
    newest = sorted((root / "counts" / "log").iterdir())[-1]
    data = bytearray(newest.read_bytes())
    data[len(data) // 2] ^= 1
    newest.write_bytes(data)
    text = told("list", "counts", "--dir", str(root))
    assert f"counts/log/{newest.name} cannot be used" in text
    assert "final" not in text
    with pytest.raises(CorruptionError, match="the newest checkpoint is not known; name one by its id: there is 1"):
        told("show", "counts", "--dir", str(root))  # RS2
    assert "checkpoint: 1\n" in told("show", "counts", "1", "--dir", str(root))


def test_what_a_replaced_driver_left_is_listed_as_such_and_is_never_the_newest(root: Path) -> None:  # R41
    storage = open_storage(str(root))
    log = CheckpointLog(storage, "counts")
    heir = log.claim("heir", 0).next.generation
    log.append(replace(manifest(3), generation=heir), CheckpointId(3))
    log.drop(CheckpointId(2), CheckpointId(3))
    storage.put("counts/log/0000000003", [encode_log_entry(replace(manifest(9), follows=2, log_start=2))])
    text = told("list", "counts", "--dir", str(root))
    assert text.count("left behind") == 1
    assert "missing" not in text
    assert "checkpoint: 3\n" in told("show", "counts", "--dir", str(root))
    entries = json.loads(told("list", "counts", "--json", "--dir", str(root)))
    assert [(e["checkpoint"], e["counts"]) for e in entries] == [(9, False), (3, True)]


def test_one_checkpoint_is_shown_with_its_subtasks(root: Path) -> None:
    text = told("show", "counts", "1", "--dir", str(root))
    assert "checkpoint: 1\n" in text
    assert "window[0]" in text
    assert "state of window: window(keys a)" in text
    assert "checkpoint: 2\n" in told("show", "counts", "--dir", str(root))


def test_the_rows_of_each_state_are_shown_per_subtask(root: Path) -> None:
    text = told("show", "counts", "2", "--dir", str(root))
    assert "250,000" in text.split("window[0]")[1].split("\n")[0]
    assert "rows of window/windows: 250,000 (window[0] 250,000)\n" in text
    assert "rows of sum/accumulators: 0 (window[0] 0)\n" in text
    (subtask,) = json.loads(told("show", "counts", "--dir", str(root), "--json"))["subtasks"]
    assert subtask["rows"] == {"window": {"windows": 250_000}, "sum": {"accumulators": 0}}
    assert "1.5 kB  ?  " in told("show", "counts", "1", "--dir", str(root)), "version 0.1 did not record them"


def test_show_prints_delays_and_bytes_in_flight(root: Path) -> None:  # UA19
    assert "in flight" not in told("show", "counts", "--dir", str(root)), "nobody measured"
    parts = (SnapshotPart(10, 7), SnapshotPart(2_500, 7, inline=b"x", section="in-flight/window", name="way"))
    entry = SubtaskEntry(SubtaskId(VertexId("window"), 0), parts, (), SnapshotDelays(1_200, 34))
    log = CheckpointLog(open_storage(str(root)), "timed")
    log.claim("test", 1_700_000_000_000)
    log.append(replace(manifest(3), entries=(entry,)))
    row = told("show", "timed", "--dir", str(root)).split("window[0]")[2].split("\n")[0]
    assert row.split() == ["1.2", "s", "34", "ms", "2.5", "kB"]
    (subtask,) = json.loads(told("show", "timed", "--dir", str(root), "--json"))["subtasks"]
    assert (subtask["start_delay_ms"], subtask["alignment_ms"], subtask["in_flight_bytes"]) == (1_200, 34, 2_500)


def test_json_is_for_programs(root: Path) -> None:
    entries = json.loads(told("list", "counts", "--dir", str(root), "--json"))
    assert [entry["kind"] for entry in entries] == ["claim", "checkpoint", "checkpoint"]
    assert json.loads(told("show", "counts", "--dir", str(root), "--json"))["subtasks"][0]["size_bytes"] == 1_500


def test_what_is_not_there_is_said(root: Path) -> None:
    with pytest.raises(UsageError, match="the pipelines in this directory are: counts"):
        told("list", "other", "--dir", str(root))
    with pytest.raises(UsageError, match="has no checkpoint 9; there is 1, 2"):
        told("show", "counts", "9", "--dir", str(root))


def test_what_is_kept_aside_is_listed_and_removed(root: Path) -> None:  # R51
    log = CheckpointLog(open_storage(str(root)), "counts")
    damages = (Damage("chk-0000000002/window-0.g1", "torn"),)
    log.files.set_aside(log.observe(), [Gap(CheckpointId(1), CheckpointId(3), (3,), damages)])
    (root / "counts/chk-0000000002").mkdir()
    (root / "counts/chk-0000000002/window-0.g1").write_bytes(b"torn")
    listed = CliRunner().invoke(app, ["checkpoints", "list", "counts", "--dir", str(root)]).output
    assert "kept aside: what came after checkpoint 1 and before 3: chk-0000000002/window-0.g1: torn" in listed
    done = CliRunner().invoke(app, ["checkpoints", "discard", "counts", "--dir", str(root), "--yes"])
    assert "1 files removed" in done.output
    assert not (root / "counts/chk-0000000002").exists()
    again = CliRunner().invoke(app, ["checkpoints", "discard", "counts", "--dir", str(root), "--yes"])
    assert "Nothing is kept aside" in again.output
