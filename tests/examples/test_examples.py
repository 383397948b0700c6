"""Every example is a program that ``headgate run`` can load; a new one has to be added here with its arguments."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from headgate.cli.options import load_pipeline
from headgate.store.store import Store
from headgate.store.streams import TEXT_SCHEMA

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
KNOWN = {
    "acknowledge_messages.py",
    "changing_rules.py",
    "connected_components.py",
    "first_payments.py",
    "log_errors.py",
    "online_learning.py",
    "own_sinks.py",
    "pagerank.py",
    "publish_files.py",
    "reachability.py",
    "row_functions.py",
    "shop_audit.py",
    "shortest_paths.py",
    "silence_alerts.py",
    "sql_sink.py",
    "stateful_processor.py",
    "totals_from_history.py",
    "windowed_counts.py",
}


def arguments(example: str, tmp_path: Path) -> list[str]:
    if example == "row_functions.py":
        (tmp_path / "payments.txt").write_text('{"user": "ann", "amount": 3}\n', encoding="utf-8")
        return [str(tmp_path / "payments.txt")]
    if example == "publish_files.py":
        return [str(tmp_path / "published")]
    if example == "shop_audit.py":
        return [str(tmp_path / "shop.db")]
    if example == "log_errors.py":
        with Store.open(str(tmp_path / "store")) as store:
            store.create_stream("app/logs", TEXT_SCHEMA)
        return ["--store", str(tmp_path / "store")]
    return []


def test_every_example_is_known() -> None:
    assert {path.name for path in EXAMPLES.glob("*.py")} == KNOWN


@pytest.mark.parametrize("example", sorted(KNOWN))
def test_every_example_builds_its_plan(example: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", sys.argv)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setenv("PYTHONPATH", "")
    pipeline = load_pipeline(str(EXAMPLES / example), arguments(example, tmp_path))
    assert pipeline.describe().startswith(f"pipeline {pipeline.name}: ")
