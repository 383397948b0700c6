"""The page of a pipeline on Spark: seen by the command's own address, and stopped by its token."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
import urllib.request
from pathlib import Path
from typing import Any

import psutil
import pytest

pytestmark = pytest.mark.spark

PATIENCE_S = 240
PROGRAM = """
import headgate as hg

p = hg.Pipeline("endless", parallelism=2, checkpointing=hg.Checkpointing(interval="200ms", dir="checkpoints"))
rows = p.source(hg.Generator({"k": hg.Choice(("a", "b"))}, rows_per_second=2_000), name="made")
rows.key_by("k").reduce(lambda a, b: b, name="latest").sink(hg.Discard(), name="gone")
"""


def test_a_page_shows_a_pipeline_and_stops_it(tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(PROGRAM)
    command = [sys.executable, "-m", "headgate.cli.app", "run", "--json", "--ui", "0", "program.py"]
    environment = os.environ | {"HEADGATE_UI_TOKEN": "sesame", "HEADGATE_LOG_DIR": str(tmp_path / "logs")}
    with subprocess.Popen(command, cwd=tmp_path, env=environment, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            first = json.loads(process.stdout.readline())
            address = re.findall(r"http://[^ ]+", first["text"])[0]
            shown = until_running(address)
            assert [node["name"] for node in shown["graph"]["nodes"]] == ["made", "key-by", "latest", "gone"]
            assert shown["rates"][-1][0] > 0
            assert [worker["worker"] for worker in shown["progress"]["workers"]] == [0, 1]
            assert {worker["pid"] for worker in shown["progress"]["workers"]} <= set(psutil.pids())
            until_aligned(address, {"latest[0]", "latest[1]"})
            assert {"worker-0", "worker-1"} <= set(called(address, "api/logs")["logs"])
            assert called(address, "api/ask/stop", b"{}") == {"answer": "it stops"}
            events = [json.loads(line) for line in process.stdout]
            assert process.wait(PATIENCE_S) == 0
            assert events[-1]["outcome"] == "stopped"
        finally:
            process.kill()


def until_aligned(address: str, subtasks: set[str]) -> None:
    """Wait until some checkpoint says of each of ``subtasks`` that it waited. One of them names those that did most."""
    deadline, found = time.monotonic() + PATIENCE_S, set[str]()
    while not subtasks <= found:
        assert time.monotonic() < deadline, found
        aligned = [one["checkpoint"] for one in called(address, "api/state")["checkpoints"] if one["longest"]]
        for checkpoint in aligned:
            found |= {one["subtask"] for one in called(address, f"api/alignment/{checkpoint}")["subtasks"]}


def until_running(address: str) -> dict[str, Any]:
    deadline = time.monotonic() + PATIENCE_S
    while time.monotonic() < deadline:
        shown = called(address, "api/state")
        nodes = (shown["progress"] or {}).get("nodes", [])
        if any(one["longest"] for one in shown["checkpoints"]) and any(
            node["records_out_per_second"] > 0 for node in nodes
        ):
            return shown
        time.sleep(0.2)
    raise AssertionError("the pipeline never ran")


def called(address: str, path: str, body: bytes | None = None) -> dict[str, Any]:
    request = urllib.request.Request(address + path, body, {"Authorization": "Bearer sesame"})
    with urllib.request.urlopen(request, timeout=60) as answer:
        found: dict[str, Any] = json.load(answer)
        return found
