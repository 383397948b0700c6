"""``headgate streams groups``: what a user sees."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.store.storing import database_of
from typer.testing import CliRunner

from headgate.cli.streams import app
from headgate.errors import FencedError
from headgate.store.catalogue import tables as t
from headgate.store.reader_groups import CheckpointMarker
from headgate.store.store import Store


@pytest.fixture(autouse=True)
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Store]:
    monkeypatch.setenv("HEADGATE_STORE", str(tmp_path / "store"))
    monkeypatch.setenv("COLUMNS", "200")
    with Store.open() as opened:
        for name in ("app/a", "app/b"):
            run("write", name, "--create", text="".join(f"line {n}\n" for n in range(40)), words=())
        yield opened


def run(*arguments: str, text: str = "", code: int = 0, words: tuple[str, ...] = ("groups",)) -> str:
    result = CliRunner().invoke(app, [*words, *arguments], input=text.encode())
    assert result.exit_code == code, result.output
    return result.stdout if code == 0 else result.output


def facts(name: str = "g") -> dict[str, object]:
    found: dict[str, object] = json.loads(run("describe", name, "--json"))
    return found


def drain(store: Store, name: str = "g") -> None:
    with store.reader_group(name).join("a") as reader:
        while reader.read() is not None:
            pass


def test_a_group_is_made_shown_and_deleted(store: Store) -> None:
    assert run("list") == f"no reader groups in {store.root}\n"
    assert run("list", "--json") == ""
    assert run("create", "g", "app/a", "app/b", "--checkpoints-kept", "2") == "reader group g reads app/a, app/b\n"
    assert "already" in run("create", "g", "app/a", code=2)
    run("create", "g", "app/b", "app/a", "--if-not-exists")
    assert "reads app/a, app/b, not app/a" in run("create", "g", "app/a", "--if-not-exists", code=2)
    reader = store.reader_group("g").join("worker-1")
    reader.read()
    shown = run("describe", "g")
    assert "reader group g: epoch 1, 1 reader" in shown
    assert shown.count("worker-1") == 8
    listed = run("list")
    assert "app/a, app/b" in listed
    assert "in 2 segments" in listed
    assert json.loads(run("list", "--json")) == facts()
    found = facts()
    assert (found["epoch"], found["checkpoints_kept"], found["checkpoints"]) == (1, 2, [])
    assert found["readers"] == {"worker-1": [[name, n] for name in ("app/a", "app/b") for n in range(4)]}
    assert found["unread_bytes"] == sum(size for *_, size in found["unread"])  # type: ignore[misc, attr-defined]
    assert "worker-1" not in run("delete", "g", text="n\n", code=1)
    assert run("delete", "g", text="y\n").endswith("reader group g is deleted\n")
    assert "no reader group 'g'" in run("delete", "g", "--yes", code=2)
    assert "no reader group 'g'" in run("describe", "g", code=2)


def test_a_checkpoint_is_waited_for_and_gone_back_to(store: Store) -> None:
    run("create", "g", "app/a")
    reader = store.reader_group("g").join("a", commit_every=None)
    reader.read(10)
    assert run("checkpoint", "g", "c", "--timeout", "0ms", code=1).endswith("is not passed by a yet\n")
    assert "c (open)" in run("list")
    assert "not passed by a" in run("describe", "g")
    found = json.loads(run("checkpoint", "g", "c", "--timeout", "0ms", "--json", code=1))
    assert found == {"group": "g", "checkpoint": "c", "is_complete": False, "owed_by": ["a"], "cuts": {}}
    assert reader.read() == CheckpointMarker("c")
    reader.read()
    reader.leave()
    told, cut = run("checkpoint", "g", "c").splitlines()
    assert told == "checkpoint c of reader group g is complete"
    assert json.loads(run("checkpoint", "g", "c", "--json"))["cuts"] == {"app/a": cut}
    drain(store)
    assert facts()["unread_bytes"] == 0
    assert "nothing" in run("list")
    late = store.reader_group("g").join("late")
    run("reset", "g", "--checkpoint", "c", text="n\n", code=1)
    asked = run("reset", "g", "--checkpoint", "c", text="y\n")
    assert "to checkpoint c, and stop 1 reader?" in asked
    assert facts()["cuts"] == {"app/a": cut}
    with pytest.raises(FencedError):
        late.read()
    assert "no checkpoint 'd'" in run("forget", "g", "d", code=2)
    assert run("forget", "g", "c") == "checkpoint c of reader group g is forgotten\n"
    assert "no completed checkpoint 'c'" in run("reset", "g", "--checkpoint", "c", "--yes", code=2)


def test_a_group_begins_anew_at_a_place(store: Store) -> None:
    tail = run("cut", "app/a", words=()).strip()
    run("create", "g", "app/a", "app/b", "--cut", tail, "--start", "latest")
    assert facts()["unread_bytes"] == 0
    assert run("reset", "g", "--start", "earliest", "--yes").endswith("the first events of each other stream\n")
    everything = facts()["unread_bytes"]
    assert run("reset", "g", "--cut", tail, "--start", "earliest", "--yes").count(tail) == 1
    assert 0 < int(str(facts()["unread_bytes"])) < int(str(everything))
    assert facts()["epoch"] == 3
    assert "say where to" in run("reset", "g", "--yes", code=2)
    assert "say where to" in run("reset", "g", "--checkpoint", "c", "--start", "latest", code=2)
    assert "no stream cut" in run("reset", "g", "--cut", "nonsense", code=2)


def test_a_group_that_cannot_be_read_is_listed_and_deleted(store: Store) -> None:  # RG24
    run("create", "g", "app/a")
    run("create", "h", "app/b")
    with database_of(store).write() as connection:
        connection.execute(t.reader_groups.update().where(t.reader_groups.c.name == "g").values(state=b"{}"))
    store.delete("app/b", force=True)
    listed = run("list")
    assert "the state of reader group 'g'" in listed
    assert "app/b (deleted)" in listed
    damaged, other = (json.loads(line) for line in run("list", "--json").splitlines())
    assert set(damaged) == {"group", "problem"}
    assert (other["group"], other["streams"], other["cuts"]) == ("h", ["app/b"], {})
    assert "PROBLEM: reader group 'g'" in run("check", words=(), code=1)
    assert "which cannot be read?" in run("delete", "g", text="y\n")
    run("delete", "h", "--yes")
    assert "0 problems" in run("check", words=())


def test_a_group_one_of_whose_streams_was_deleted_says_where_it_is_in_the_others(store: Store) -> None:
    run("create", "g", "app/a", "app/b")
    drain(store)
    store.reader_group("g").join("b")
    cut = str(store.tail("app/a"))
    store.delete("app/b", force=True)
    assert "its stream was deleted" in run("describe", "g")
    assert facts()["cuts"] == {"app/a": cut}
    run("create", "h", "app/a", "--cut", cut)
    assert facts("h")["unread_bytes"] == 0


def test_what_groups_hold_is_mended_by_the_check(store: Store) -> None:
    run("create", "g", "app/a")
    run("release", "app/a", "reader group g", words=())
    assert "is not held from where it reads on" in run("check", words=(), code=1)
    mended, told = run("check", "--repair", words=()).splitlines()
    assert mended == "mended: what reader group 'g' needs of stream 'app/a' is held again"
    assert told.endswith("0 problems, 0 notes")
