"""Savepoints written from frames: new ones, changed ones, and what is refused."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

import polars as pl
import pyarrow as pa
import pytest

import headgate as hg
from headgate.errors import CorruptionError, HeadgateError, StorageError, UsageError
from headgate.runtime.checkpoints.savepoints import SavepointDirectory
from headgate.state import keyed
from headgate.storage.local import LocalStorage

KEYS = list(range(200))
ROWS = {
    "count": pl.DataFrame({"key": KEYS, "value": [key * 2 for key in KEYS]}),
    "ids": pl.DataFrame({"key": [k for k in KEYS for _ in range(3)], "value": list(range(600))}),
    "last": pl.DataFrame({"key": KEYS * 2, "map_key": ["odd"] * 200 + ["even"] * 200, "value": list(range(400))}),
}
TIMES = pl.DataFrame({"key": KEYS, "time_ms": [1_000 + key for key in KEYS]})
EVENT_TIMERS = "headgate.timers.event_time"


class Everything(hg.ProcessFunction):
    """Declares state of every kind."""

    schema = {"key": pa.int64()}

    def open(self, state: hg.StateHandle) -> None:
        self.count = state.value("count", pa.int64())
        self.ids = state.list("ids", pa.int64())
        self.last = state.map("last", pa.string(), pa.int64())

    def process(self, row: dict[str, Any], context: hg.ProcessContext) -> None:
        pass


class Timed(Everything):
    """Is called by timers, too."""

    def on_timer(self, timer: hg.Timer, context: hg.ProcessContext) -> None:
        pass


class Fewer(hg.ProcessFunction):
    """Has given up a list, and begins a text."""

    schema = {"key": pa.int64()}

    def open(self, state: hg.StateHandle) -> None:
        self.count = state.value("count", pa.int64())
        self.last = state.map("last", pa.string(), pa.int64())
        self.note = state.value("note", pa.string())

    def process(self, row: dict[str, Any], context: hg.ProcessContext) -> None:
        pass


class Expiring(hg.ProcessFunction):
    """Remembers for a while."""

    schema = {"key": pa.int64()}

    def open(self, state: hg.StateHandle) -> None:
        self.seen = state.list("seen", pa.int64(), ttl=hg.TTL("7d"))

    def process(self, row: dict[str, Any], context: hg.ProcessContext) -> None:
        pass


def pipeline(
    root: Path, function: hg.ProcessFunction | None = None, *, key: Sequence[str] = ("key",), **options: Any
) -> hg.Pipeline:
    """Return a pipeline with a process function, a reduction and a window."""
    made = hg.Pipeline(
        "p", parallelism=3, checkpointing=hg.Checkpointing(interval="1s", dir=root / "checkpoints"), **options
    )
    rows = made.source(hg.FromRows([{"key": 1, "other": 1, "value": 1.5}]), name="in")
    rows.key_by(*key).process(function or Everything(), name="all").sink(hg.Discard(), name="nowhere")
    rows.key_by("key").reduce(lambda one, other: other, name="newest").sink(hg.Discard(), name="nowhere2")
    return made


def full(root: Path, path: Path, **options: Any) -> hg.WrittenSavepoint:
    """Write a savepoint with all of ``ROWS``."""
    draft = hg.new_savepoint(pipeline(root), path, **options)
    for name, rows in ROWS.items():
        draft.with_state("all", name, rows)
    return draft.write()


def same(found: pl.DataFrame, wanted: pl.DataFrame) -> bool:
    """Whether the rows are the same; those of one key in the same order."""
    assert found.columns == wanted.columns
    assert dict(found.schema) == dict(wanted.schema)
    return found.sort("key", maintain_order=True).equals(wanted.sort("key", maintain_order=True))


def test_what_is_written_is_read(tmp_path: Path) -> None:  # WS1, WS2, WS6
    written = full(tmp_path, tmp_path / "new")
    assert dict(written.rows) == {("all", name): rows.height for name, rows in ROWS.items()}
    for name, rows in ROWS.items():
        assert same(hg.read_state(tmp_path / "new", "all", name), rows)
    savepoint = SavepointDirectory(str(tmp_path / "new")).read()
    texts = pipeline(tmp_path).definition().plan.state_texts()
    assert (savepoint.pipeline, savepoint.manifest.state_texts) == ("p", texts)
    assert savepoint.manifest.parallelism == 3


def test_what_is_read_written_and_read_again_is_equal(tmp_path: Path) -> None:  # WS5
    full(tmp_path, tmp_path / "one", parallelism=2)
    draft = hg.new_savepoint(pipeline(tmp_path), tmp_path / "two", parallelism=5)
    for name in ROWS:
        rows = hg.read_state(tmp_path / "one", "all", name)
        everything = [*rows.columns, "_subtask", "_key_group"]
        draft.with_state("all", name, hg.read_state(tmp_path / "one", "all", name, columns=everything))
    draft.write()
    edited = hg.edit_savepoint(tmp_path / "two", tmp_path / "three")
    for name in ROWS:
        edited.replace("all", name, hg.read_state(tmp_path / "two", "all", name))
    edited.write()
    for name, rows in ROWS.items():
        assert same(hg.read_state(tmp_path / "two", "all", name), rows)
        assert hg.read_state(tmp_path / "three", "all", name).equals(hg.read_state(tmp_path / "two", "all", name))
