"""``headgate store serve``: what it refuses. What it does is in ``tests/store/served``."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

from headgate.cli.app import app
from headgate.errors import HeadgateError


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (["--store", "headgate://h:1"], "no directory"),
        (["--store", "postgresql://h/db"], "no directory"),
        (["--key-file", "k"], "belong together"),
        (["--key-file", "k", "--certificate-file", "c", "--no-tls"], "has no use"),
        (["--host", "0.0.0.0", "--token-file", "missing"], "cannot be read"),
        (["--tls", "--key-file", "k", "--certificate-file", "c"], "cannot be used"),
    ],
)
def test_what_a_server_cannot_do_is_refused(
    arguments: list[str], problem: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("HEADGATE_STORE_TOKEN", raising=False)
    monkeypatch.setenv("HEADGATE_STORE", str(tmp_path / "store"))
    found = CliRunner().invoke(app, ["store", "serve", "--port", "0", *arguments])
    said = f"{found.output} {found.exception}"
    assert problem in said
    assert found.exit_code != 0
    assert isinstance(found.exception, HeadgateError | SystemExit)
    assert list(tmp_path.iterdir()) in ([], [tmp_path / "store"])
