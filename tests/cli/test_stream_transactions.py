"""``headgate streams transactions``: what a user sees and may decide."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.store.storing import KEYED, STREAM, drained, keyed
from typer.testing import CliRunner

from headgate.cli.streams import app
from headgate.model.pipeline_identity import PipelineIdentity
from headgate.protocol.store.transactions import Status
from headgate.store.store import Store
from headgate.store.transactions import SharedTransaction


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Store]:
    monkeypatch.setenv("HEADGATE_STORE", str(tmp_path / "store"))
    monkeypatch.setenv("COLUMNS", "200")
    with Store.open() as opened:
        opened.create_stream(STREAM, KEYED, segments=3, routing_key="key")
        yield opened


def run(*arguments: str, code: int = 0, text: str = "") -> str:
    result = CliRunner().invoke(app, ["transactions", *arguments], input=text.encode())
    assert result.exit_code == code, result.output
    return result.stdout if code == 0 else result.output


def begun(store: Store, *rows: tuple[str, int], lease: str = "10 minutes") -> SharedTransaction:
    transaction = store.begin_shared(STREAM, lease=lease)
    with transaction.writer("loader") as writer:
        writer.write(keyed(*rows))
    return transaction


def test_transactions_are_listed_shown_and_decided_by_hand(store: Store) -> None:
    assert run("list") == "no open or prepared transactions\n"
    opened, prepared = begun(store, ("x", 1)), begun(store, ("y", 2), ("y", 3))
    prepared.prepare()
    listed = run("list", STREAM)
    for word in (opened.id, prepared.id, "open", "prepared", "lease left"):
        assert word in listed
    facts = {fact["id"]: fact for fact in map(json.loads, run("list", "--owner", "writers", "--json").splitlines())}
    one = facts[opened.id]
    assert 0 < one["lease_left_ms"] <= one["lease_ms"] == 600_000
    assert one["participants"] == [{"name": "loader", "writes": 1, "events": 1}]
    assert (one["state"], one["events"], one["age_ms"] >= 0) == ("open", 1, True)
    assert facts[prepared.id]["lease_left_ms"] is None
    assert "loader" in run("show", STREAM, opened.id)
    assert json.loads(run("show", STREAM, opened.id[:20], "--json"))["id"] == opened.id
    assert "is not prepared: processes may be writing to it" in run("commit", STREAM, opened.id, "--yes", code=2)
    assert "is aborted" in run("abort", STREAM, opened.id, text="y\n")
    assert run("commit", STREAM, prepared.id, code=1, text="n\n")
    assert "is committed: 2 events" in run("commit", STREAM, prepared.id, "--yes")
    assert "is committed" in run("commit", STREAM, prepared.id, "--yes")
    assert run("list") == "no open or prepared transactions\n"
    assert "aborted" in run("list", "--all")
    assert drained(store) == [("y", 2), ("y", 3)]
    assert "was committed" in run("abort", STREAM, prepared.id, "--yes", code=1)


def test_what_is_not_there_is_said(store: Store) -> None:
    begun(store), begun(store)
    assert "2 transactions of stream 'app/events' begin with ''" in run("show", STREAM, "", code=2)
    assert "knows no transaction 'nothing'" in run("show", STREAM, "nothing", code=2)
    assert "does not exist" in run("list", "app/none", code=2)


def test_what_a_fenced_owner_left_is_decided_by_hand(store: Store) -> None:
    left = begun(store, ("x", 1))
    store.transactions.fence("writers", 5)
    run("abort", STREAM, left.id, "--yes")
    assert store.list_transactions(stream=STREAM)[0].status is Status.ABORTED


def test_what_a_pipeline_prepared_is_left_to_it(store: Store) -> None:
    store.pipelines.own("p/sink", PipelineIdentity("life", "/checkpoints", "host", 1))
    transaction = store.transactions.begin(STREAM, owner="p/sink", epoch=1, name="checkpoint-1")
    transaction.write(keyed(("x", 1)))
    transaction.prepare()
    assert "checkpoint-1" in run("show", STREAM, "checkpoint-1")
    for verb in ("commit", "abort"):
        assert "a pipeline, which decides by itself" in run(verb, STREAM, "checkpoint-1", "--yes", code=2)
    assert store.list_transactions()[0].status is Status.PREPARED


def test_what_a_task_of_spark_prepared_is_not_committed_by_itself(store: Store) -> None:  # SP9
    for task in ("a", "b"):
        transaction = store.transactions.begin(
            STREAM, owner="spark/query-q", epoch=0, name=f"batch-000000000001/{task}"
        )
        transaction.write(keyed(("x", 1)))
        transaction.prepare()
    told = run("commit", STREAM, "batch-000000000001/a", "--yes", code=2)
    assert "has the rows of one task of a Spark job" in told
    run("abort", STREAM, "batch-000000000001/a", "--yes")
    assert [x.status for x in store.list_transactions()] == [Status.ABORTED, Status.PREPARED]


def test_leases_that_are_over_are_looked_at_by_hand(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:  # TX8
    assert run("expire", STREAM) == f"no lease of stream {STREAM} is over\n"
    left, lease_ms = begun(store, ("x", 1), lease="10 minutes"), 600_000
    at = store._core.clock.wall_ms()
    monkeypatch.setattr(type(store._core.clock), "wall_ms", lambda self: at + 2 * lease_ms)
    assert f"the lease of transaction {left.id} is over: a look in" in run("expire", STREAM)
    assert "over" in run("list")
    monkeypatch.setattr(type(store._core.clock), "wall_ms", lambda self: at + 3 * lease_ms)
    assert run("expire", STREAM) == f"transaction {left.id} is aborted: its lease was over\n"
    assert "aborted, its lease was over" in run("list", "--all")
