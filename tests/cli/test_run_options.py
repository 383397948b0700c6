"""Options of ``headgate run`` that need no run."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from headgate.cli.options import set_log_directory
from headgate.errors import UsageError
from headgate.spark.worker_logs import log_directory


@pytest.mark.parametrize("is_local", [True, False])
def test_logs_are_where_the_option_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_local: bool) -> None:
    monkeypatch.setenv("HEADGATE_LOG_DIR", "/elsewhere")
    monkeypatch.chdir(tmp_path)
    set_log_directory(None)
    assert os.environ["HEADGATE_LOG_DIR"] == "/elsewhere"
    set_log_directory("logs")
    monkeypatch.chdir("/")
    assert log_directory(is_local=is_local) == tmp_path / "logs"


def test_a_file_is_no_directory_of_logs(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for wrong in (str(tmp_path / "file"), ""):
        with pytest.raises(UsageError, match="--log-dir must be a directory"):
            set_log_directory(wrong)
