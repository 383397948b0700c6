"""``headgate streams``: what a user sees."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pytest
from tests.store.storing import KEYED, STREAM, drained, keyed
from typer.testing import CliRunner

from headgate.cli import streams
from headgate.cli.line_format import line_blocks
from headgate.cli.streams import app
from headgate.model.pipeline_identity import PipelineIdentity
from headgate.protocol.store.transactions import Status
from headgate.store.store import Store
from headgate.store.transactions import SharedTransaction


@pytest.fixture(autouse=True)
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HEADGATE_STORE", str(tmp_path / "store"))
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setattr(streams, "QUIET_S", 0.001)
    return tmp_path / "store"


def run(*arguments: str, text: str = "", code: int = 0) -> str:
    result = CliRunner().invoke(app, list(arguments), input=text.encode())
    assert result.exit_code == code, result.output
    return result.stdout if code == 0 else result.output


def test_lines_go_in_and_come_out() -> None:
    run("write", "app/log", "--create", text="one\ntwo\r\nthrée\n")
    assert run("read", "app/log") == "one\ntwo\nthrée\n"
    assert run("read", "app/log", "--limit", "2") == "one\ntwo\n"
    assert run("read", "app/log", "--format", "json", "-n", "1") == '{"line": "one"}\n'
    assert run("read", "app/log", "--start", "latest") == ""


def test_a_stream_is_given_a_policy_of_scaling() -> None:  # S79
    run("create", "app/x")
    assert run("scaling", "app/x") == "stream app/x: it is scaled by hand only\n"
    wanted = "stream app/x: 1,000 events a second in a segment, 2 to 8 segments\n"
    assert (
        run("scaling", "app/x", "--events-per-second", "1000", "--min-segments", "2", "--max-segments", "8") == wanted
    )
    assert run("scaling", "app/x") == wanted
    assert "both" in run("scaling", "app/x", "--events-per-second", "1", "--bytes-per-second", "1MB", code=2)
    assert "--off goes with neither" in run("scaling", "app/x", "--off", "--bytes-per-second", "1MB", code=2)
    assert "by hand only" in run("scaling", "app/x", "--off")


def test_columns_are_added_and_widened(root: Path) -> None:  # S76
    run("create", "app/x", "--columns", "k:string,v:int32", "--segments", "1")
    run("write", "app/x", text='{"k":"a","v":1}\n')
    assert run("update", "app/x", "--columns", "v:int64,note:text") == (
        "stream app/x: schema 1, k: large_string, v: int64, note: large_string\n"
    )
    run("update", "app/x", "--columns", "note:text")
    run("write", "app/x", text='{"k":"b","v":1099511627776,"note":"n"}\n')
    assert [json.loads(line) for line in run("read", "app/x").splitlines()] == [
        {"k": "a", "v": 1, "note": None},
        {"k": "b", "v": 1 << 40, "note": "n"},
    ]
    assert json.loads(run("describe", "app/x", "--json"))["schema_version"] == 1
    problem = run("update", "app/x", "--columns", "v:text", code=2)
    assert "stream 'app/x' cannot be updated: column 'v' would change from int64 to large_string" in problem
    run("update", "app/none", "--columns", "v:int", code=2)


def test_json_lines_go_in_and_come_out_with_nulls() -> None:
    run("create", "app/x", "--columns", "k:string,v:int,at:timestamp", "--segments", "1")
    run("write", "app/x", text='{"k":"a","v":1,"at":"2020-01-01T00:00:00"}\n{"k":"b"}\n')
    found = [json.loads(line) for line in run("read", "app/x").splitlines()]
    assert found == [{"k": "a", "v": 1, "at": "2020-01-01T00:00:00"}, {"k": "b", "v": None, "at": None}]
    assert run("read", "app/x", "--format", "text", "-n", "1") == "a\t1\t2020-01-01 00:00:00\n"


@pytest.mark.parametrize("line", ['{"z": 1}', "not json", '{"v": "text"}'])
def test_what_does_not_fit_is_refused_whole(line: str) -> None:
    run("create", "app/x", "--columns", "k:string,v:int")
    message = run("write", "app/x", text=f'{{"k":"a"}}\n{line}\n', code=2)
    assert "Error: input is not JSON lines with the columns k, v" in message
    assert run("read", "app/x") == ""


def test_files_are_written_and_missing_ones_named(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("a\n")
    (tmp_path / "b.txt").write_text("b\n")
    run("write", "log", "--create", str(tmp_path / "a.txt"), str(tmp_path / "b.txt"))
    assert sorted(run("read", "log").split()) == ["a", "b"]
    assert "cannot be read" in run("write", "log", str(tmp_path / "c.txt"), code=2)


def test_following_ends_at_the_seal() -> None:
    run("write", "log", "--create", text="a\n")
    assert run("seal", "log") == "stream log is sealed\n"
    assert run("read", "--follow", "log") == "a\n"
    assert "is sealed" in run("write", "log", text="b\n", code=2)


def test_list_and_describe(root: Path) -> None:
    assert run("list") == f"no streams in {root}\n"
    run("create", "app/x", "--columns", "k:string,t:timestamp", "--routing-key", "k", "--segments", "2")
    run("write", "app/x", text='{"k":"a"}\n')
    table = run("list")
    assert "app/x" in table
    assert "t: timestamp[us]" in table
    facts = json.loads(run("describe", "app/x", "--json"))
    assert (facts["segments"], facts["routing_key"], facts["events"], sum(facts["ends"])) == (2, "k", 1, 1)
    assert json.loads(run("list", "--json", "app")) == facts
    assert "timestamp[us]" in run("describe", "app/x")


def test_many_closed_segments_are_shown_together(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(streams, "CLOSED_SHOWN", 3)
    run("create", "log", "--segments", "1")
    shown = []
    for number in range(2, 6):
        run("write", "log", text="a\n")
        shown.append(run("describe", "log"))
        run("scale", "log", "--segments", str(number))
    assert ["others" in text for text in (*shown, run("describe", "log"))] == [False] * 4 + [True]
    assert "4 others" in run("describe", "log")
    assert len(json.loads(run("describe", "log", "--json"))["ends"]) == 15


def test_prepared_transactions_are_shown_and_can_be_forgotten(root: Path) -> None:
    run("create", "log")
    with Store.open(root) as store:
        transaction = store.transactions.begin("log", owner="p/sink", epoch=3, name="p/sink/checkpoint-1")
        transaction.write(pa.record_batch([pa.array(["x"], pa.large_string())], names=["line"]))
        transaction.prepare()
    assert "p/sink/checkpoint-1" in run("describe", "log")
    assert "prepared transaction" in run("seal", "log", code=2)
    assert "has it" in run("forget", "p/sink", "--yes")
    assert "prepared transaction" in run("seal", "log", code=2), "forgetting removes nothing"
    assert "1 prepared transactions are aborted" in run("forget", "p/sink", "--yes", "--abort-prepared")
    assert "no pipeline has written" in run("forget", "p/sonk", "--yes", code=2)
    run("seal", "log")
    assert "0 problems, 0 notes" in run("check")


def test_delete_asks_and_wants_a_sealed_stream() -> None:
    run("create", "log")
    run("delete", "log", text="n\n", code=1)
    assert "not sealed" in run("delete", "log", "--yes", code=2)
    run("delete", "log", "--yes", "--force")
    assert "does not exist" in run("describe", "log", code=2)


def test_delete_names_who_still_needs_a_stream() -> None:
    run("write", "log", "--create", text="one\n")
    with Store.open() as store:
        store.hold(store.head("log"), holder="billing/in")
    run("seal", "log")
    asked = run("delete", "log", text="y\n", code=2)
    assert "Delete stream log with 1 events, which billing/in still need? [y/N]" in asked
    assert "still needed by 'billing/in'" in run("delete", "log", "--yes", code=2)
    assert run("read", "log") == "one\n"
    run("delete", "log", "--yes", "--force")


def test_check_finds_a_damaged_chunk(root: Path) -> None:
    run("write", "log", "--create", text="a\n")
    (chunk,) = (root / "chunks").rglob("*.chunk")
    data = bytearray(chunk.read_bytes())
    data[100] ^= 1
    chunk.write_bytes(data)
    assert "1 problems" in run("check", code=1)
    assert "0 problems" in run("check", "--quick")
    assert "damaged" in run("read", "log", code=1)


def test_orphans_are_notes_and_can_be_removed(root: Path) -> None:
    run("write", "log", "--create", text="a\n")
    (root / "chunks" / "1" / "appended" / "left.chunk").write_bytes(b"half")
    (root / "chunks" / ".hg-tmp-1-x").write_bytes(b"half")
    assert "0 problems, 1 notes" in run("check")
    assert "2 files removed" in run("check", "--remove-orphans")
    assert "0 problems, 0 notes" in run("check")
    assert run("read", "log") == "a\n"


def test_orphans_are_not_removed_while_somebody_writes(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run("write", "log", "--create", text="a\n")
    left = root / "chunks" / "1" / "appended" / "left.chunk"
    left.write_bytes(b"half")
    with Store.open() as store, store.writer("log", linger=None) as writer:

        def written(_: float) -> None:
            writer.append(pa.record_batch([pa.array(["b"], pa.large_string())], names=["line"]))
            writer.flush()

        monkeypatch.setattr(streams.time, "sleep", written)
        assert "processes write to the store" in run("check", "--remove-orphans", code=2)
    assert left.exists()


def test_names_that_are_no_text_are_told_in_one_sentence() -> None:
    run("create", "log")
    for words in (["describe", "\udcff"], ["write", "log", "--writer-id", "\udcff"], ["groups", "describe", "\udcff"]):
        assert "Error: '\\udcff' is no text" in run(*words, code=2)


def test_create_says_what_is_wrong() -> None:
    run("create", "log")
    assert "exists already" in run("create", "log", code=2)
    run("create", "log", "--if-not-exists")
    assert "name:type" in run("create", "x", "--columns", "a:varchar", code=2)


def test_blocks_are_whole_lines(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("headgate.cli.line_format.BLOCK_BYTES", 5)
    (tmp_path / "x").write_bytes(b"a\nbcdefghijk\n\nl\nm")
    with (tmp_path / "x").open("rb") as file:
        blocks = list(line_blocks(file))
    assert b"".join(blocks) == b"a\nbcdefghijk\n\nl\nm"
    assert all(block.endswith(b"\n") for block in blocks[:-1])


def test_a_file_that_goes_before_it_is_read_is_a_mistake_of_the_user(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "a").write_text("one\n")
    is_file = Path.is_file

    def gone_after(path: Path) -> bool:
        found = is_file(path)
        if path.name == "a":
            path.unlink(missing_ok=True)
        return found

    monkeypatch.setattr(Path, "is_file", gone_after)
    assert "a cannot be read: No such file or directory" in run("write", "x", str(tmp_path / "a"), "--create", code=2)


def test_streams_are_cut_and_truncated(root: Path) -> None:  # S65
    run("write", "app/log", "--create", text="one\n")
    cut = run("cut", "app/log").strip()
    run("write", "app/log", text="two\nthree\n")
    assert run("truncate", "app/log", "--cut", cut, "--yes").startswith(
        "1 events removed; app/log begins at app/log#1@"
    )
    assert run("read", "app/log") == "two\nthree\n"
    assert run("cut", "app/log", "--head").strip() == cut
    assert run("cut", "app/log", "--at", "2001-01-01").strip() == cut
    assert "0 events removed" in run("truncate", "app/log", "--before", "2001-01-01", "--yes")
    assert "is no stream cut" in run("truncate", "app/log", "--cut", "here", code=2)
    assert "say up to where" in run("truncate", "app/log", code=2)
    assert "is of another stream" in run("truncate", "app/other", "--cut", cut, code=2)
    assert "not both" in run("cut", "app/log", "--head", "--at", "2001-01-01", code=2)
    assert json.loads(run("describe", "app/log", "--json"))["events"] == 2


def test_what_is_held_is_shown_and_released(root: Path) -> None:
    run("write", "app/log", "--create", text="one\ntwo\n")
    with Store.open(root) as store:
        store.hold(store.head("app/log"), holder="p/source")
        end = str(store.tail("app/log"))
    assert "p/source" in run("describe", "app/log")
    assert "'p/source' needs the events" in run("truncate", "app/log", "--cut", end, "--yes", code=2)
    assert "holds nothing" in run("release", "app/log", "nobody", code=2)
    run("release", "app/log", "p/source")
    assert "2 events removed" in run("truncate", "app/log", "--cut", end, "--yes")


def test_retention_is_set_shown_and_taken_away() -> None:  # S71
    run("create", "app/log", "--retention-age", "7 days")
    assert run("retention", "app/log") == "stream app/log: events stay for 7 days, 0:00:00\n"
    assert "1,073,741,824 bytes" in run("retention", "app/log", "--retention-size", "1GB")
    assert run("retention", "app/log", "--off") == "stream app/log: events stay\n"
    assert "must look like" in run("retention", "app/log", "--retention-age", "long", code=2)
    assert "--off goes with neither" in run("retention", "app/log", "--off", "--retention-age", "1s", code=2)


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Store]:
    monkeypatch.setenv("HEADGATE_STORE", str(tmp_path / "store"))
    monkeypatch.setenv("COLUMNS", "200")
    with Store.open() as opened:
        opened.create_stream(STREAM, KEYED, segments=3, routing_key="key")
        yield opened


def decided(*arguments: str, code: int = 0, text: str = "") -> str:
    result = CliRunner().invoke(app, ["transactions", *arguments], input=text.encode())
    assert result.exit_code == code, result.output
    return result.stdout if code == 0 else result.output


def begun(store: Store, *rows: tuple[str, int], lease: str = "10 minutes") -> SharedTransaction:
    transaction = store.begin_shared(STREAM, lease=lease)
    with transaction.writer("loader") as writer:
        writer.write(keyed(*rows))
    return transaction


def test_transactions_are_listed_shown_and_decided_by_hand(store: Store) -> None:
    assert decided("list") == "no open or prepared transactions\n"
    opened, prepared = begun(store, ("x", 1)), begun(store, ("y", 2), ("y", 3))
    prepared.prepare()
    listed = decided("list", STREAM)
    for word in (opened.id, prepared.id, "open", "prepared", "lease left"):
        assert word in listed
    facts = {fact["id"]: fact for fact in map(json.loads, decided("list", "--owner", "writers", "--json").splitlines())}
    one = facts[opened.id]
    assert 0 < one["lease_left_ms"] <= one["lease_ms"] == 600_000
    assert one["participants"] == [{"name": "loader", "writes": 1, "events": 1}]
    assert (one["state"], one["events"], one["age_ms"] >= 0) == ("open", 1, True)
    assert facts[prepared.id]["lease_left_ms"] is None
    assert "loader" in decided("show", STREAM, opened.id)
    assert json.loads(decided("show", STREAM, opened.id[:20], "--json"))["id"] == opened.id
    assert "is not prepared: processes may be writing to it" in decided("commit", STREAM, opened.id, "--yes", code=2)
    assert "is aborted" in decided("abort", STREAM, opened.id, text="y\n")
    assert decided("commit", STREAM, prepared.id, code=1, text="n\n")
    assert "is committed: 2 events" in decided("commit", STREAM, prepared.id, "--yes")
    assert "is committed" in decided("commit", STREAM, prepared.id, "--yes")
    assert decided("list") == "no open or prepared transactions\n"
    assert "aborted" in decided("list", "--all")
    assert drained(store) == [("y", 2), ("y", 3)]
    assert "was committed" in decided("abort", STREAM, prepared.id, "--yes", code=1)


def test_what_is_not_there_is_said(store: Store) -> None:
    begun(store), begun(store)
    assert "2 transactions of stream 'app/events' begin with ''" in decided("show", STREAM, "", code=2)
    assert "knows no transaction 'nothing'" in decided("show", STREAM, "nothing", code=2)
    assert "does not exist" in decided("list", "app/none", code=2)


def test_what_a_fenced_owner_left_is_decided_by_hand(store: Store) -> None:
    left = begun(store, ("x", 1))
    store.transactions.fence("writers", 5)
    decided("abort", STREAM, left.id, "--yes")
    assert store.list_transactions(stream=STREAM)[0].status is Status.ABORTED


def test_what_a_pipeline_prepared_is_left_to_it(store: Store) -> None:
    store.pipelines.own("p/sink", PipelineIdentity("life", "/checkpoints", "host", 1))
    transaction = store.transactions.begin(STREAM, owner="p/sink", epoch=1, name="checkpoint-1")
    transaction.write(keyed(("x", 1)))
    transaction.prepare()
    assert "checkpoint-1" in decided("show", STREAM, "checkpoint-1")
    for verb in ("commit", "abort"):
        assert "a pipeline, which decides by itself" in decided(verb, STREAM, "checkpoint-1", "--yes", code=2)
    assert store.list_transactions()[0].status is Status.PREPARED


def test_what_a_task_of_spark_prepared_is_not_committed_by_itself(store: Store) -> None:  # SP9
    for task in ("a", "b"):
        transaction = store.transactions.begin(
            STREAM, owner="spark/query-q", epoch=0, name=f"batch-000000000001/{task}"
        )
        transaction.write(keyed(("x", 1)))
        transaction.prepare()
    told = decided("commit", STREAM, "batch-000000000001/a", "--yes", code=2)
    assert "has the rows of one task of a Spark job" in told
    decided("abort", STREAM, "batch-000000000001/a", "--yes")
    assert [x.status for x in store.list_transactions()] == [Status.ABORTED, Status.PREPARED]


def test_leases_that_are_over_are_looked_at_by_hand(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:  # TX8
    assert decided("expire", STREAM) == f"no lease of stream {STREAM} is over\n"
    left, lease_ms = begun(store, ("x", 1), lease="10 minutes"), 600_000
    at = store._core.clock.wall_ms()
    monkeypatch.setattr(type(store._core.clock), "wall_ms", lambda self: at + 2 * lease_ms)
    assert f"the lease of transaction {left.id} is over: a look in" in decided("expire", STREAM)
    assert "over" in decided("list")
    monkeypatch.setattr(type(store._core.clock), "wall_ms", lambda self: at + 3 * lease_ms)
    assert decided("expire", STREAM) == f"transaction {left.id} is aborted: its lease was over\n"
    assert "aborted, its lease was over" in decided("list", "--all")
