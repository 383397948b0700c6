"""The note of where a pipeline has its checkpoints is its user's alone (SE1)."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from headgate.api.pipeline_registry import remember_pipeline


def test_where_the_checkpoints_are_is_noted_for_the_user_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    for root in ("one", "two"):
        (tmp_path / root / "p" / "log").mkdir(parents=True)
    before = os.umask(0)
    try:
        assert remember_pipeline("p", str(tmp_path / "one")) == []
        assert remember_pipeline("p", str(tmp_path / "two")) == [str(tmp_path / "one")]
        assert remember_pipeline("p", str(tmp_path / "one")) == [str(tmp_path / "two")], "again"
    finally:
        os.umask(before)
    (tmp_path / "state" / "headgate" / "pipelines" / "p" / "a directory").mkdir()
    assert remember_pipeline("p", str(tmp_path / "one")) == [str(tmp_path / "two")], "what cannot be read is left out"
    made = list((tmp_path / "state").rglob("*"))
    modes = {stat.S_IMODE(path.stat().st_mode) for path in made if path.is_file()}
    assert modes == {0o600}
    assert stat.S_IMODE((tmp_path / "state" / "headgate").stat().st_mode) == 0o700
