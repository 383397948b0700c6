"""State with a TTL in checkpoints, as it is shown to people: what lived at the barrier, and until when."""

from __future__ import annotations

import json
from datetime import datetime, timedelta
from pathlib import Path

import pyarrow as pa
import pytest
from tests.cli.test_state import shown
from tests.operators.harness import Harness
from tests.operators.process.expiring_functions import FORMS, SCHEMA
from tests.operators.process.test_ttl import PUT, do
from tests.runtime.state_reader.written import Written, state

import headgate as hg
from headgate.errors import UsageError
from headgate.operators.catalog import process_spec
from headgate.operators.reduction import ReduceSpec

TTL = hg.TTL("10ms")
NOW = datetime(2023, 11, 14, 22, 13, 20) + timedelta(seconds=1)  # what a harness says when it begins


def with_ttl(root: Path, form: str, *, ttl: hg.TTL | None = TTL, key: str = "key") -> Written:
    """Return a checkpoint in which the state of key 1 has expired, and that of key 2 lives for 4 ms."""
    schema = SCHEMA.set(0, SCHEMA.field(0).with_name(key))
    spec = process_spec("node", (key,), FORMS[form](ttl), schema)
    run = Harness(spec)
    if key == "key":
        do(run, *PUT, key=1)
        run.now_ms += 6
        do(run, *PUT, key=2)
        run.now_ms += 4
    frozen = run.operator.freeze()
    assert frozen is not None
    written = Written(root)
    written.complete(1, {"node": spec.state_text()}, [state(frozen)])  # type: ignore[attr-defined]
    return written


@pytest.mark.parametrize("form", sorted(FORMS))
def test_what_had_expired_is_not_shown_and_until_when_the_rest_lives_is_if_asked(tmp_path: Path, form: str) -> None:
    path = with_ttl(tmp_path, form).path
    rows = hg.state_catalog(path).filter(state="map").rows(named=True)
    assert [(row["kind"], row["rows"], row["columns"]) for row in rows] == [
        ("map", 1, "key: int64, map_key: int64, value: int64")
    ]
    assert hg.read_state(path, "node", "value").rows() == [(2, 7)]
    assert hg.read_state(path, "node", "list", columns=["value", "_expires"]).rows() == [
        (7, NOW + timedelta(milliseconds=16))
    ]
    assert hg.read_state(path, "node", "map", keys=[1]).rows() == []


def test_without_a_ttl_there_is_no_such_column(tmp_path: Path) -> None:
    path = with_ttl(tmp_path, "row", ttl=None).path
    assert hg.read_state(path, "node", "value").rows() == [(1, 7), (2, 7)]
    with pytest.raises(UsageError, match="has no column '_expires'; it has key, value, _subtask, _key_group"):
        hg.read_state(path, "node", "value", columns=["_expires"])


def test_a_key_that_is_called_as_the_expiry_keeps_its_position(tmp_path: Path) -> None:
    for ttl, name in ((hg.TTL("10ms"), "key0"), (None, "_expires")):
        path = with_ttl(tmp_path / name, "row", ttl=ttl, key="_expires").path
        assert hg.read_state(path, "node", "value").columns == [name, "value"]


def test_the_command_line_chooses_rows_by_their_expiry(tmp_path: Path) -> None:
    path = str(with_ttl(tmp_path, "batch").path)
    asked = ("node", "value", "--columns", "key,_expires", "--json")
    found = [json.loads(line) for line in shown(path, *asked).splitlines()]
    assert [row["key"] for row in found] == [2]
    assert "22:13:21.016" in found[0]["_expires"]
    early = "_expires < TIMESTAMP '2023-11-14 22:13:21.016'"
    assert shown(path, *asked, "--where", early) == ""


def test_a_column_of_records_that_is_called_as_the_expiry_is_a_column(tmp_path: Path) -> None:
    schema = pa.schema([("key", pa.int64()), ("expires_ms", pa.int64())])
    spec = ReduceSpec(("key",), lambda total, row: row, schema)
    run = Harness(spec)
    run.send(pa.record_batch([[1], [5]], schema))
    frozen = run.operator.freeze()
    assert frozen is not None
    written = Written(tmp_path)
    written.complete(1, {"node": spec.state_text()}, [state(frozen)])
    assert hg.read_state(written.path, "node").to_dicts() == [{"key": 1, "value": {"expires_ms": 5}}]
