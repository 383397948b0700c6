"""Files that are added to a fixed list between two starts of the same command, on Spark."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from crash.processes import Life
from headgate.connectors.files.file_committer import read_committed

pytestmark = pytest.mark.spark

LONG = 3_000

Spec = Callable[..., dict[str, Any]]
Run = Callable[[dict[str, Any]], Life]


def write(root: Path, name: str, count: int) -> None:
    (root / "in").mkdir(exist_ok=True)
    padding = "x" * 10_000 if count == LONG else ""
    rows = ({"file": name, "number": number, "padding": padding} for number in range(count))
    (root / "in" / f"{name}.json").write_text("".join(json.dumps(row) + "\n" for row in rows))


@pytest.mark.parametrize("added", ["a0", "c"])
def test_a_file_that_was_added_before_the_same_command_is_read_and_no_other_is_lost(
    spec: Spec, run: Run, tmp_path: Path, added: str
) -> None:  # T10
    write(tmp_path, "a", 10)
    write(tmp_path, "b", LONG)
    what = spec("listed-files", slow=True)
    life = run(what)
    life.running()
    for _ in range(3):
        life.checkpoint()
    life.child.send({"stop": what["name"]})
    assert not life.result()["is_finished"]
    before = read_committed(str(tmp_path / "rows"))
    assert before.filter(file="a").height == 10
    assert before.height < 10 + LONG
    write(tmp_path, added, 20)
    last = run({**what, "slow": False})
    last.note("continues from checkpoint")
    assert last.result()["is_finished"]
    found = sorted(read_committed(str(tmp_path / "rows")).select("file", "number").rows())
    assert found == sorted((name, n) for name, count in (("a", 10), ("b", LONG), (added, 20)) for n in range(count))
