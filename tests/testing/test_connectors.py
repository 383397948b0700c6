from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pytest

from headgate.connectors.base import SourceContext
from headgate.errors import UsageError
from headgate.testing import EOF, PAUSE, FailOnce, ScriptedSource, check_source
from headgate.testing.connectors import ScriptedFailure

SCHEMA = {"n": pa.int64()}


def test_a_script_passes_the_conformance_kit() -> None:
    source = ScriptedSource(
        [{"n": 1}, [{"n": 2}, {"n": 3}], PAUSE, {"n": 4}, EOF], [{"n": 5}, EOF], schema=SCHEMA, pause_ms=0
    )
    assert sorted(row["n"] for row in check_source(source)) == [1, 2, 3, 4, 5]


def test_it_fails_once_at_the_same_place(tmp_path: Path) -> None:
    source = ScriptedSource([{"n": 1}, FailOnce(tmp_path / "failed"), {"n": 2}, EOF], schema=SCHEMA)
    first = source.open(SourceContext("p", "s", 0, 1, None))
    assert first.poll() is not None
    with pytest.raises(ScriptedFailure, match="split 0 fails at item 1"):
        first.poll()
    second = source.open(SourceContext("p", "s", 0, 1, first.positions()))
    rows = []
    while not second.is_finished():
        batch = second.poll()
        rows += batch.batch.to_pylist() if batch is not None else []
    assert rows == [{"n": 2}]


def test_a_script_without_eof_never_ends() -> None:
    reader = ScriptedSource([{"n": 1}], schema=SCHEMA).open(SourceContext("p", "s", 0, 1, None))
    reader.poll()
    assert reader.poll() is None
    assert not reader.is_finished()


def test_nothing_follows_eof() -> None:
    with pytest.raises(UsageError, match="goes on after EOF"):
        ScriptedSource([EOF, {"n": 1}], schema=SCHEMA)
