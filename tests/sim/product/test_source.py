"""Pipelines that read files in the machine room: sound code passes, and what was read follows from bytes."""

from __future__ import annotations

from tests.conftest import IS_DEEP

from headgate.connectors.files import line_file
from headgate.connectors.files.line_file import FilePosition
from headgate.sim.product.run import Run
from headgate.sim.product.source import FileInputs

SMOKE = (8, 23, 30, 37, 38, 41) if IS_DEEP else (8, 38)


def test_seeds_that_read_files_pass() -> None:
    """Some grow, and some are killed and renamed."""
    usual = line_file.BLOCK_BYTES
    runs = [Run(seed) for seed in SMOKE]
    assert all(run.files.is_drawn for run in runs)
    assert any(run.settings.grows for run in runs)
    assert [(seed, str(found)) for seed, run in zip(SMOKE, runs, strict=True) if (found := run.run())] == []
    assert usual == line_file.BLOCK_BYTES
    assert len(runs[0].started) > 2
    assert any(not path.endswith(".jsonl") for path in runs[0].files.paths)


def test_a_position_stands_behind_the_rows_of_its_bytes() -> None:
    run = Run(8)
    files = FileInputs(8, run.tasks, run.faults)
    rows = [{"k": 1, "n": n} for n in range(3)]
    files.update([{"s0-0": rows}], grows=False)
    assert files.present([{"s0-0": rows, "s0-1": rows}]) == [{"s0-0": rows}]
    for offset, count in ((0, 0), (17, 1), (33, 1), (34, 2), (51, 3)):
        assert files.rows_read("/input/source0/s0-0.jsonl", FilePosition(offset).encode(), rows) == count
    assert files.split_of("/input/source0/s0-0.jsonl.4") == "s0-0"
