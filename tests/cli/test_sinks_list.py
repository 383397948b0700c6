"""``headgate sinks list``: whose the sinks of a directory are."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.storage.looked import Looked
from typer.testing import CliRunner

from headgate.cli import sinks
from headgate.cli.app import app
from headgate.connectors.files.ownership import FileOwner
from headgate.connectors.files.publish_log import SinkIdentity
from headgate.model.ids import Generation
from headgate.model.pipeline_identity import Life

LIFE = Life("one", "/home/p", "far", 0)


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
    assert lines[20:] == ["p/told-nothing was written to by version 0.1, which did not say from where"]
    assert len(storage.seen) == 2 + 20, "two listings, and each life once"
