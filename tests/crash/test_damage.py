"""Damaged checkpoints and failing storage: named, survived, never half restored (F9, F10, F11; I4)."""

from __future__ import annotations

import errno
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from crash.processes import Life
from crash.results import assert_clean, assert_standard, expected_standard, read_stream
from headgate.runtime.checkpoints.log import CheckpointLog
from headgate.storage.urls import open_storage

pytestmark = [pytest.mark.spark, pytest.mark.crash, pytest.mark.timeout(1_800)]

Spec = Callable[..., dict[str, Any]]
Run = Callable[[dict[str, Any]], Life]


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-7])


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 0x10
    path.write_bytes(data)


def newest_snapshot(root: Path, name: str) -> Path:
    """Return a file of the newest checkpoint."""
    directory = sorted((root / "checkpoints" / name).glob("chk-*"))[-1]
    return sorted(directory.iterdir())[0]


def newest_manifest(root: Path, name: str) -> Path:
    return sorted((root / "checkpoints" / name / "log").iterdir())[-1]


def run_and_stop(run: Run, what: dict[str, Any]) -> list[str]:
    """Run until another checkpoint, stop; return the notes."""
    life = run(what)
    life.running()
    life.checkpoint(2)
    life.child.send({"stop": what["name"]})
    life.result()
    return [e["text"] for e in life.seen("note")]


DAMAGES = [
    (truncate, newest_snapshot),
    (flip, newest_snapshot),
    (Path.unlink, newest_snapshot),
    (flip, newest_manifest),
    (truncate, newest_manifest),
    (Path.unlink, newest_manifest),
]


def test_each_damage_is_named_and_the_checkpoint_before_it_used(spec: Spec, run: Run, tmp_path: Path) -> None:
    """The user chose to go back: the default is to stop."""
    what = spec("standard", rows=60_000, rate=12_000, inline_bytes_max=0, interval="100ms", on_damaged="previous")
    run_and_stop(run, what)
    for damage, find in DAMAGES:
        victim = find(tmp_path, what["name"])
        damage(victim)
        notes = run_and_stop(run, what)
        named = [n for n in notes if "cannot be used: " in n and victim.name in n]
        assert named, (damage, victim, notes)
        assert any("continues from checkpoint" in n for n in notes), notes
    life = run(what)
    assert life.result()["is_finished"]
    log = CheckpointLog(open_storage(str(tmp_path / "checkpoints")), what["name"])
    assert log.files.aside()
    log.discard_aside()  # what was gone back past is kept until somebody removes it (R51)
    # What the damaged checkpoints had committed comes again (K18), but nothing is lost and nothing is half restored.
    found = read_stream(tmp_path / "store", "out/rows")
    expected = expected_standard(60_000)["rows"]
    assert expected.join(found, on=expected.columns, how="anti").is_empty()
    assert found.join(expected, on=expected.columns, how="anti").is_empty()
    assert_clean(tmp_path)


def test_a_pipeline_whose_every_checkpoint_is_damaged_does_not_start(spec: Spec, run: Run, tmp_path: Path) -> None:
    what = spec("standard", rows=60_000, inline_bytes_max=0)
    run_and_stop(run, what)
    victims = [p for d in (tmp_path / "checkpoints" / what["name"]).glob("chk-*") for p in d.iterdir()]
    for victim in victims:
        flip(victim)
    before = read_stream(tmp_path / "store", "out/rows")
    life = run(what)
    error = life.failed()
    assert error["is_usage"] is False or "cannot be restored" in error["error"]
    assert "no sound checkpoint is left" in error["error"]
    assert any(victim.name in error["error"] for victim in victims)
    assert read_stream(tmp_path / "store", "out/rows").equals(before)


def fail_while(control: Path, part: str, operations: list[str], number: int, until_seen: Callable[[], Any]) -> None:
    """Let storage fail until the pipeline has reported it."""
    control.write_text(json.dumps({"errno": number, "part": part, "operations": operations}))
    try:
        until_seen()
    finally:
        control.unlink()


def test_storage_that_fails_for_a_while_is_reported_and_costs_nothing(
    spec: Spec, run: Run, tmp_path: Path, storage_fault: Path
) -> None:
    what = spec("standard", rows=60_000, inline_bytes_max=0, gate=None)
    life = run(what)
    running = life.running()
    life.checkpoint()
    no_space = "No space left on device"
    fail_while(storage_fault, "/chk-", ["put"], errno.ENOSPC, lambda: life.note(no_space))
    life.checkpoint(2)
    fail_while(storage_fault, "_staging", ["put"], errno.ENOSPC, lambda: life.note(no_space))
    life.checkpoint(2)
    fail_while(storage_fault, "/log/", ["put_if_absent", "get"], errno.EIO, lambda: life.note("Input/output error"))
    life.checkpoint(2)
    everything = ["put", "put_if_absent", "get", "list", "rename_if_absent"]
    # but not what sinks write to: a commit that fails is repeated, and no checkpoint fails meanwhile
    fail_while(storage_fault, str(tmp_path / "checkpoints"), everything, errno.EIO, life.restart)
    life.running(after=running["generation"])
    assert life.result()["is_finished"]
    assert_standard(tmp_path, 60_000)
    assert_clean(tmp_path)
