"""``headgate sinks``: list and forget."""

from __future__ import annotations

from pathlib import Path

import pytest
from examples.sqlite_sink import SqliteSink
from tests.storage.looked import Looked
from typer.testing import CliRunner

import headgate as hg
from headgate.cli import sinks
from headgate.cli.app import app
from headgate.connectors.files.ownership import FileOwner
from headgate.connectors.files.publish_log import SinkIdentity
from headgate.errors import UsageError
from headgate.model.ids import Generation
from headgate.model.pipeline_identity import Owner, PipelineIdentity

LIFE = PipelineIdentity("one", "/home/p", "far", 0)


def test_a_list_of_many_sinks_is_one_look(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:  # LV10
    storage = Looked()
    monkeypatch.setattr(sinks, "open_storage", lambda url: storage)
    for number in range(20):
        FileOwner(storage, SinkIdentity("p", f"out-{number:02}")).own(LIFE)
    FileOwner(storage, SinkIdentity("p", "out-07")).forget()
    storage.put(SinkIdentity("p", "told-nothing").claim(Generation(2)), [b""])
    storage.seen.clear()
    lines = CliRunner().invoke(app, ["sinks", "list", str(tmp_path)]).output.splitlines()
    assert lines[0].startswith("p/out-00 belongs to the checkpoints in /home/p, begun on far at 1970")
    assert lines[7] == "p/out-07 is forgotten"
    assert lines[20:] == ["p/told-nothing was written to without a checkpoint directory"]
    assert len(storage.seen) == 2 + 20, "two listings, and each life once"


PROGRAM = """
import sys
import headgate as hg
from examples.sqlite_sink import SqliteSink
p = hg.Pipeline("p", parallelism=1)
rows = p.source(hg.FromRows([{"number": 1, "text": "a"}]))
rows.sink(SqliteSink(sys.argv[1]), name="out")
rows.sink(hg.Discard(), name="nowhere")
"""


@pytest.fixture
def sink(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> SqliteSink:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "program.py").write_text(PROGRAM)
    return SqliteSink(str(tmp_path / "t.db"))


def forget(sink: SqliteSink, name: str, *, answer: str = "y") -> str:
    """Run the command; return what it says."""
    command = ["sinks", "forget", name, "program.py", "--", sink.path]
    result = CliRunner().invoke(app, command, input=f"{answer}\n")
    return str(result.exception) if isinstance(result.exception, UsageError) else result.output


def test_the_target_of_a_users_sink_is_made_to_forget(sink: SqliteSink) -> None:
    sink.own("p", "out", LIFE)
    sink.claim(hg.Fence("p:out", 7, sink.claimed("p:out").life))  # type: ignore[union-attr]
    assert "begun on far" in forget(sink, "p/out", answer="n")
    assert sink.owner("p", "out").life == LIFE
    assert "p/out is forgotten" in forget(sink, "p/out")
    found = sink.owner("p", "out")
    assert found == Owner(None, found.generation, is_forgotten=True)
    assert found.generation == 7


def test_nothing_is_forgotten_that_nobody_wrote(sink: SqliteSink) -> None:
    assert "no pipeline has written to program.py as 'p/out'" in forget(sink, "p/out")
    assert sink.claimed("p:out") is None


@pytest.mark.parametrize("name", ["p/nowhere", "q/out"])
def test_a_sink_that_is_not_there_is_named_with_those_that_are(sink: SqliteSink, name: str) -> None:
    assert f"program.py has no sink of its own called '{name}'" in forget(sink, name)
    assert "there is 'p/out'" in forget(sink, name)


def test_a_sink_is_found_by_its_former_name(sink: SqliteSink) -> None:  # LV9: which only its target knows
    sink.own("p", "former", LIFE)
    assert "p/former is forgotten" in forget(sink, "p/former")
    assert sink.owner("p", "former").is_forgotten
    assert sink.owner("p", "out").is_unknown
