"""What a start may name, as users say it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import headgate as hg
from headgate.errors import UsageError
from headgate.model.config import StartConfig
from headgate.model.definition import PipelineDefinition


def started(monkeypatch: pytest.MonkeyPatch, root: Path, **begins: Any) -> StartConfig:
    """Return what a start hands over."""
    found: list[PipelineDefinition] = []
    monkeypatch.setattr("headgate.spark.session.start_pipeline", lambda definition, **_: found.append(definition))
    pipeline = hg.Pipeline("p", parallelism=1, checkpointing=hg.Checkpointing(dir=root / "checkpoints"))
    pipeline.source(hg.FromRows([{"n": 1}])).sink(hg.Discard())
    pipeline.start(**begins)
    return found[0].config.start


def test_what_a_start_names_reaches_the_driver(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:  # SV20
    assert started(monkeypatch, tmp_path) == StartConfig()
    begins = started(monkeypatch, tmp_path, restore=tmp_path / "taken", allow_unclaimed_state=["sum"])
    assert begins == StartConfig(str(tmp_path / "taken"), None, frozenset({"sum"}))
    assert started(monkeypatch, tmp_path, restore="s3://bucket/taken").restore == "s3://bucket/taken"
    monkeypatch.chdir(tmp_path)
    assert started(monkeypatch, tmp_path, restore="taken").restore == str(tmp_path / "taken")
    own = started(monkeypatch, tmp_path, restore=41, go_back_behind=43)
    assert own == StartConfig(str(tmp_path / "checkpoints" / "p" / "chk-41"), 43)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("begins", "problem"),
    [
        ({"restore": 0}, "restore must be the id of a checkpoint, not 0"),
        ({"restore": "x", "go_back_behind": "17"}, "go_back_behind must be the id of a checkpoint, not '17'"),
        ({"go_back_behind": 17}, "give both"),
        ({"allow_unclaimed_state": "sum"}, "must be a list of names, such as"),
    ],
)
def test_what_makes_no_sense_is_refused(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, begins: dict[str, Any], problem: str
) -> None:
    with pytest.raises(UsageError, match=problem):
        started(monkeypatch, tmp_path, **begins)
