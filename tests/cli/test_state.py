"""``headgate state``: show, write and drop."""

from __future__ import annotations

import json
import shutil
from datetime import date, timedelta
from pathlib import Path
from typing import Any

import polars as pl
import pyarrow as pa
import pytest
from tests.runtime.checkpoints.frozen_cases import made
from tests.runtime.savepoint_writer.test_writer import ROWS, full, same
from tests.runtime.state_reader.test_reader import text_of
from tests.runtime.state_reader.written import Written, state
from typer.testing import CliRunner

import headgate as hg
from headgate.cli import app as cli
from headgate.errors import CorruptionError, UsageError

GOLDEN = Path(__file__).parents[1] / "golden"


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return Path(shutil.copytree(GOLDEN / "checkpoints_1", tmp_path / "checkpoints"))


def shown(*arguments: object) -> str:
    result = CliRunner().invoke(cli.app, ["state", "show", *map(str, arguments)])
    if result.exception is not None:
        raise result.exception
    return result.stdout


def objects(*arguments: object) -> list[dict[str, object]]:
    return [json.loads(line) for line in shown(*arguments, "--json").splitlines()]


def test_what_there_is_is_listed_with_rows_and_bytes(root: Path) -> None:
    text = shown(root / "golden")
    assert text.startswith("checkpoint 5 of pipeline 'golden', triggered 2026-")
    for cells in (["counts", "count", "value", "50"], ["in", "positions", "positions", "3"]):
        assert any(line.split()[: len(cells)] == cells for line in text.splitlines()), cells
    (found,) = objects(root / "golden")
    assert (found["pipeline"], found["checkpoint"], found["parallelism"], found["key_groups"]) == ("golden", 5, 2, 128)
    states = found["states"]
    assert isinstance(states, list)
    assert [s["rows"] for s in states if s["operator"] == "counts"] == [50]
    assert shown("golden", "--dir", root).startswith("checkpoint 5 of pipeline 'golden'")
    older = shown("golden", "--dir", root, "--id", 4)
    assert older.startswith("checkpoint 4 of pipeline 'golden'")
    again = f"Rows of a state: headgate state show golden OPERATOR STATE --dir {root} --id 4"
    assert older.splitlines()[-1] == again  # what is shown next is of the same checkpoint
    assert shown(root / "golden" / "chk-4").startswith("checkpoint 4 of pipeline 'golden'")
    assert shown(GOLDEN / "savepoint_1").startswith(f"the savepoint {GOLDEN / 'savepoint_1'} (pipeline 'golden', ")


def test_names_are_listed_whole_on_a_narrow_terminal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They are typed to see the rows."""
    monkeypatch.setenv("COLUMNS", "80")
    written = Written(tmp_path)
    live = made("timers-by-batch")
    written.complete(1, {"node": text_of(live)}, [state(live.freeze())])
    text = shown(written.path)
    assert {"headgate.timers.event_time", "headgate.timers.processing_time"} <= set(text.split())


def test_a_word_is_a_pipeline_unless_there_is_something_to_look_at_here(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "golden").mkdir()
    monkeypatch.chdir(tmp_path)
    assert shown("golden", "--dir", "checkpoints").startswith("checkpoint 5 of pipeline 'golden'")
    monkeypatch.chdir(root)
    assert shown("golden").startswith("checkpoint 5 of pipeline 'golden'")
    shutil.copytree(GOLDEN / "savepoint_1", tmp_path / "golden", dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)
    assert shown("golden", "--dir", "checkpoints").startswith("the savepoint ")


def test_rows_are_a_table_that_says_what_it_leaves_out(root: Path) -> None:
    lines = shown(root / "golden", "sums").splitlines()
    assert lines[0].split() == ["id", "key", "value", "ts", "_subtask"]
    assert (len(lines), lines[-1]) == (22, "The first 20 of 50 rows; --limit shows more, --where and --key choose.")
    last = shown(GOLDEN / "savepoint_1", "sums").splitlines()[-1]
    assert last == "The first 20 of 50 rows; --limit shows more, --where and --key choose."
    assert len(shown(root / "golden", "sums", "--limit", 0).splitlines()) == 51
    assert len(shown(root / "golden", "windows", "windows", "-n", 100).splitlines()) == 90
    assert shown(root / "golden", "times", "channels").splitlines()[-1] == "It has no rows."
    assert shown(root / "golden", "sums", "--where", "key > 99").splitlines()[-1] == "There are no such rows."


def test_rows_are_chosen_by_key_condition_and_column(root: Path) -> None:
    path = root / "golden"
    everything = objects(path, "sums")
    assert len(everything) == 50
    large = objects(path, "sums", "--where", "value > 12000 and _subtask = 1", "--columns", "key,value")
    assert {tuple(row) for row in large} == {("key", "value")}
    wanted = {int(str(row["key"])) for row in everything if int(str(row["value"])) > 12_000}
    assert 0 < len(large) < len(wanted)
    assert {row["key"] for row in large} <= wanted
    assert [row["key"] for row in objects(path, "counts", "--key", 3, "--key", 5)] in ([3, 5], [5, 3])
    assert objects(path, "counts", "--key", 3, "--where", "key = 5") == []
    assert len(objects(path, "sums", "--limit", 7)) == 7
    both = objects(path, "sums", "--where", "value > 12000 or value <= 12000 or value is null")
    assert both == everything
    assert len(objects(path, "sums", "--where", "true")) == 50
    assert objects(path, "in", "--columns", "split,text")[0] == {"split": "0 of 3", "text": '{"row": 313}'}


class Kept(hg.ProcessFunction):
    """Has a value for each key."""

    def open(self, state: hg.StateHandle) -> None:
        self.value = state.value("value", pa.int64())

    def process(self, row: dict[str, Any], context: hg.ProcessContext) -> None:
        """Nothing is processed."""


def savepoint_of(path: Path, types: list[pa.DataType], keys: list[tuple[Any, ...]]) -> Path:
    """Write a savepoint with the ``keys``, whose columns are called a, b and so on; each value is a key's number."""
    schema = pa.schema([(name, dtype) for name, dtype in zip("ab", types, strict=False)])
    rows = pa.Table.from_pylist([dict(zip(schema.names, key, strict=True)) for key in keys], schema)
    p = hg.Pipeline("p")
    p.source(hg.FromRows(rows)).key_by(*schema.names).process(Kept(), name="kept").sink(hg.Discard())
    hg.new_savepoint(p, str(path)).with_state("kept", "value", rows.append_column("value", [range(len(keys))])).write()
    return path


@pytest.mark.parametrize(
    ("types", "keys", "said"),
    [
        ([pa.large_binary()], [(b"\xff\x00",), (b"abc",), (b"",)], ["ff00", "616263", ""]),
        ([pa.large_string()], [("a,b",), ("",), ("-x",), ("e\u0301\n",)], ["a,b", "", "-x", "e\u0301\n"]),
        ([pa.large_string(), pa.int32()], [("a,b", 1), ("", -1), ('"', 2)], ['"a,b",1', ",-1", '",2']),
        ([pa.large_string(), pa.large_string()], [("a,b", "c"), ("a", "b,c")], ['"a,b",c', 'a,"b,c"']),
        ([pa.large_string(), pa.int32()], [("a", 1), ('"q"', 2), ('b"c', 3)], ['"a","1"', '"""q""",2', 'b"c,3']),
        ([pa.int32(), pa.large_string()], [(1, "a\nb"), (2, "a"), (3, "c\n")], ["1,a\nb", '2,"a"', '3,"c\n"']),
        ([pa.float64(), pa.bool_()], [(0.0, True), (1e300, False)], ["-0.0,True", "1e+300,False"]),
        ([pa.date32(), pa.uint64()], [(date(2026, 1, 2), 2**64 - 1)], [f"2026-01-02,{2**64 - 1}"]),
    ],
)
def test_a_key_is_given_as_it_is_shown(
    tmp_path: Path, types: list[pa.DataType], keys: list[tuple[Any, ...]], said: list[str]
) -> None:
    path = savepoint_of(tmp_path / "savepoint", types, keys)
    for number, text in enumerate(said):
        assert [row["value"] for row in objects(path, "kept", f"--key={text}")] == [number], text


@pytest.mark.parametrize(
    ("types", "key", "text", "way"),
    [
        ([pa.large_binary()], (b"abc",), "abc", r"\(a: large_binary\): bytes are hexadecimal digits"),
        ([pa.large_string(), pa.int64()], ("a", 1), "a,b,1", 'one with a comma is "a,b"'),
        ([pa.large_string(), pa.int64()], ("a", 1), "a", "2 values are needed, with commas between them"),
        ([pa.large_string(), pa.int64()], ("a", 1), "a,b\nc,1", "2 values are needed, with commas between them"),
        ([pa.duration("us")], (timedelta(seconds=90),), "0:01:30", "give --where \"column = INTERVAL '90 seconds'\""),
    ],
)
def test_what_is_no_key_is_told_with_the_way_to_give_one(
    tmp_path: Path, types: list[pa.DataType], key: tuple[Any, ...], text: str, way: str
) -> None:
    path = savepoint_of(tmp_path / "savepoint", types, [key])
    with pytest.raises(UsageError, match=way):
        shown(path, "kept", f"--key={text}")
    if "INTERVAL" in way:
        assert len(objects(path, "kept", "--where", "a = INTERVAL '90 seconds'")) == 1


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["golden", "sums", "--where", "value >"], "--where 'value >' is no condition over the columns"),
        (["golden", "sums", "--where", "value"], "neither true nor false"),
        (["golden", "sums", "--where", "value = MAX(value)"], "whose result depends on other records"),
        (["golden", "sums", "--where", "COUNT(*) > 1"], "whose result depends on other records"),
        (
            ["golden", "sums", "--where", "SUM(value) OVER (PARTITION BY key) > 1"],
            "whose result depends on other records",
        ),
        (["golden", "sums", "--where", "price > 1"], "has no column 'price'; it has id, key, value, ts, _subtask"),
        (["golden", "sums", "--columns", "key,price"], "has no column 'price'"),
        (["golden", "counts", "--key", "x"], r"--key 'x' is no key of operator 'counts' \(key: int64\)"),
        (["golden", "in", "--key", "x"], "has no key to choose rows by"),
        (["golden", "summ"], "the operators with state are counts, in, sums, times, windows"),
        (["golden", "sums", "x"], "operator 'sums' has no state 'x'"),
        (["golden", "--where", "key = 1"], "name its operator"),
        (["golden", "--id", "3"], "has no checkpoint 3 in .*; there is 4, 5"),
        (["silver"], "neither a savepoint nor a checkpoint at .*/silver; .*; beside it are the checkpoints of golden"),
        ([""], "the path is empty; give the path of a savepoint"),
    ],
)
def test_what_cannot_be_shown_is_one_sentence(root: Path, arguments: list[str], sentence: str) -> None:
    with pytest.raises(UsageError, match=sentence) as caught:
        shown(*arguments, "--dir", root)
    assert "\n" not in str(caught.value)
    assert not (root / "silver").exists()


def test_exit_codes_are_those_of_other_commands(
    root: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for path in (root / "golden").glob("chk-*/sums-0*"):
        path.write_bytes(path.read_bytes()[:-1])
    codes = []
    for arguments in (["sums"], ["summ"], ["counts"]):
        monkeypatch.setattr("sys.argv", ["headgate", "state", "show", str(root / "golden"), *arguments])
        with pytest.raises(SystemExit) as caught:
            cli.main()
        codes.append(caught.value.code)
    assert codes == [1, 2, 0]
    assert "sums-0.g1 is damaged at byte" in capsys.readouterr().err
    with pytest.raises(CorruptionError):
        shown(root / "golden", "sums")


FEW = pl.DataFrame({"key": [1, 2], "value": [10, 20]})
PROGRAM = """
import headgate as hg
p = hg.Pipeline("p", parallelism=3)
rows = p.source(hg.FromRows([{"key": 1, "other": 1, "value": 1.5}]), name="in")
rows.key_by("key").reduce(lambda one, other: other, name="newest").sink(hg.Discard())
"""


def told(*arguments: object) -> str:
    result = CliRunner().invoke(cli.app, ["state", *map(str, arguments)])
    if result.exception is not None:
        raise result.exception
    return result.stdout


@pytest.mark.parametrize("end", ["parquet", "arrow", "jsonl"])
def test_rows_of_a_file_become_a_state(tmp_path: Path, end: str) -> None:
    full(tmp_path, tmp_path / "one")
    file = tmp_path / f"rows.{end}"
    {"parquet": FEW.write_parquet, "arrow": FEW.write_ipc, "jsonl": FEW.write_ndjson}[end](file)
    said = told("write", tmp_path / "one", "all", "count", file, "--to", tmp_path / "two")
    assert said.splitlines() == [
        f"savepoint {tmp_path / 'two'} is complete",
        "state 'count' of operator 'all' has 2 rows",
    ]
    assert same(hg.read_state(tmp_path / "two", "all", "count"), FEW)
    assert same(hg.read_state(tmp_path / "two", "all", "ids"), ROWS["ids"])
    with pytest.raises(UsageError, match="there is a savepoint at"):
        told("write", tmp_path / "one", "all", "count", file, "--to", tmp_path / "two")


def test_a_state_and_an_operator_are_dropped(tmp_path: Path) -> None:
    full(tmp_path, tmp_path / "one")
    told("drop", tmp_path / "one", "all", "ids", "--to", tmp_path / "two")
    assert set(hg.state_catalog(tmp_path / "two")["state"]) == {"count", "last", "accumulators"}
    told("drop", tmp_path / "two", "all", "--to", tmp_path / "three")
    assert set(hg.state_catalog(tmp_path / "three")["operator"]) == {"newest"}


def test_a_program_declares_what_the_state_shall_be(tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(PROGRAM)
    full(tmp_path, tmp_path / "one")
    rows = pl.DataFrame({"key": [1], "value": [{"other": 2, "value": 2.5}]})
    rows.write_parquet(tmp_path / "rows.parquet")
    arguments = ["newest", "accumulators", tmp_path / "rows.parquet", "--program", tmp_path / "program.py"]
    told("write", tmp_path / "one", *arguments, "--to", tmp_path / "two")
    assert same(hg.read_state(tmp_path / "two", "newest"), rows)


def test_files_that_are_no_rows_are_told(tmp_path: Path) -> None:
    full(tmp_path, tmp_path / "one")
    for name, said in (("rows.csv", "is no file of rows with types"), ("rows.parquet", "cannot be read")):
        (tmp_path / name).write_text("nonsense")
        with pytest.raises(UsageError, match=said):
            told("write", tmp_path / "one", "all", "count", tmp_path / name, "--to", tmp_path / "two")
    assert not (tmp_path / "two").exists()
