"""Checkpoints with moments, as the first release that knew of them wrote them, in ``tests/golden``.

``write`` made them, and ``states.json`` is what that release read of the checkpoints.
"""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import polars as pl
import polars.selectors as cs
import pyarrow as pa
import pytest
from tests.testing.test_moments_in_process import ROWS, SCHEMA, ByBatch, ByRow, latest

import headgate as hg
from headgate.codec.json_files import decode_life, encode_life
from headgate.state.memory import incremental_snapshot
from headgate.state.rocksdb import database_snapshot
from headgate.testing import EOF, PAUSE, ScriptedSource, run, running

GOLDEN = Path(__file__).parents[1] / "golden" / "moments"
BACKENDS = ("memory", "rocksdb")
SOME = 20
NESTED = pa.struct({"at": pa.timestamp("us", "UTC"), "more": pa.list_(pa.timestamp("us", "UTC"))})
WHOLE = pa.schema([*SCHEMA, pa.field("nested", NESTED)])


def backend(state: str) -> hg.Memory | hg.RocksDB:
    if state == "memory":
        return hg.Memory()
    pytest.importorskip("rocksdict")
    return hg.RocksDB(memory="64MB")


def golden(name: str, more: int, state: str | None = None) -> hg.Pipeline:
    """Return the pipeline that keeps moments in every kind of state; without ``more`` rows it does not end."""
    options = {"parallelism": 2, "max_parallelism": 8, "checkpointing": hg.Checkpointing(interval="20ms", retained=1)}
    p = hg.Pipeline(name, state=backend(state or name), **options)
    script: list[Any] = [ROWS[:SOME], *[PAUSE] * 5]
    script += [ROWS[SOME : SOME + more], EOF] if more else []
    rows = p.source(ScriptedSource(script, schema=SCHEMA, pause_ms=10), name="in").with_timestamps("at", name="times")
    keyed = rows.key_by("at", name="keyed")
    days = keyed.window(hg.Tumbling("1d"))
    for name, made in (
        ("rows", keyed.process(ByRow(), name="rows")),
        ("batches", keyed.process(ByBatch(), name="batches")),
        ("sums", keyed.reduce(latest, name="sums")),
        ("merged", days.agg(n=pl.col("n").sum(), first=pl.col("at").min(), name="merged")),
        ("kept", days.agg(n=pl.col("n").median(), first=pl.col("at").first(), name="kept")),
    ):
        made.sink(hg.Discard(), name=f"{name}-out")
    return p


def write(root: Path = GOLDEN) -> None:
    """Write the checkpoints, and what is in them."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(incremental_snapshot, "SIZE_BYTES_MIN", 1)  # in chunks, and in files of RocksDB, however small
        patch.setattr(database_snapshot, "SIZE_BYTES_MIN", 0)
        for state in BACKENDS:
            with running(golden(state, 0), checkpoint_dir=root) as handle:
                while sum(row["value"] for row in rows_of(root / state, "batches", "count")) < SOME:
                    handle.take_checkpoint()
                handle.stop()
                handle.wait(60)
    for state in BACKENDS:
        for what in ("lock", "targets"):
            remove(root / state / what)
        life = decode_life((root / state / "life").read_bytes(), "life")
        assert life is not None
        (root / state / "life").write_bytes(encode_life(replace(life, home=f"/checkpoints/{state}", host="host")))
    found = {state: states_of(root / state) for state in BACKENDS}
    (root / "states.json").write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


def remove(path: Path) -> None:
    """Remove what belongs to the machine."""
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink()


def rows_of(path: Path, node: str, state: str) -> list[Any]:
    """Return the rows of a state as JSON has them, in an order of their own."""
    try:
        frame = hg.read_state(path, node, state)
    except hg.UsageError:  # nothing is completed yet
        return []
    found: list[Any] = json.loads(frame.with_columns(cs.binary().bin.encode("hex")).write_json())
    return sorted(found, key=json.dumps)


def states_of(path: Path) -> dict[str, list[Any]]:
    """Return the rows of all states but those of sources and sinks, and the types of their columns."""
    found = {}
    for node, state in sorted(hg.state_catalog(path).select("operator", "state").rows()):
        if node in ("rows", "batches", "sums", "merged", "kept"):
            types = [f"{name}: {dtype}" for name, dtype in hg.read_state(path, node, state).schema.items()]
            found[f"{node}/{state}"] = [types, *rows_of(path, node, state)]
    return found


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return Path(shutil.copytree(GOLDEN, tmp_path / "golden"))


@pytest.mark.parametrize("state", BACKENDS)
def test_moments_in_checkpoints_are_read_for_ever(root: Path, state: str) -> None:  # OP11, RS11
    backend(state)
    wanted = json.loads((root / "states.json").read_text(encoding="utf-8"))[state]
    assert states_of(root / state) == wanted
    kept = {name: str(rows[0]) for name, rows in wanted.items() if not name.endswith("/meta")}
    assert len(kept) == 8
    assert all("time_zone='UTC'" in types for types in kept.values())


@pytest.mark.parametrize(("name", "state"), [("memory", "memory"), ("rocksdb", "rocksdb"), ("memory", "rocksdb")])
def test_a_pipeline_goes_on_from_moments_that_were_kept(root: Path, tmp_path: Path, name: str, state: str) -> None:
    """Keys, values, lists, maps, windows: none of them is another one (OP11)."""
    run(golden(name, 40, state), timeout_s=60, checkpoint_dir=root)
    run(golden(name, 40), timeout_s=60, checkpoint_dir=tmp_path / "whole")
    found, wanted = states_of(root / name), states_of(tmp_path / "whole" / name)
    assert found == wanted
    assert sum(row["value"] for row in found["batches/count"][1:]) == SOME + 40
