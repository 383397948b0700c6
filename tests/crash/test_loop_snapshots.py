"""What a checkpoint of a loop holds: the state, and of what circulates each record once, nothing else (loops.md §4)."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from tests.conftest import few

from crash.processes import STEP_S, Life, kill, until
from headgate.codec.loop_log import decode_log
from headgate.model.manifest import Manifest
from headgate.runtime.checkpoints.log import CheckpointLog
from headgate.storage.base import NotFound
from headgate.storage.urls import open_storage

pytestmark = [pytest.mark.spark, pytest.mark.crash, pytest.mark.timeout(1_800)]

ROWS = 5_000
TEXT_BYTES = 100
SCHEMA = pa.schema({"id": pa.int64(), "text": pa.large_string()})
INDEX_BYTES_MAX = 8_000
"""Header, schema and the counts of 128 key groups, in the logs of both heads."""


class Contents:
    """The newest checkpoint: bytes of state, bytes and records of the loop's log."""

    def __init__(self, root: Path, name: str) -> None:
        log = CheckpointLog(open_storage(str(root / "checkpoints")), name)
        manifests = [e.content for e in log.observe().entries if isinstance(e.content, Manifest)]
        newest = max(manifests, key=lambda manifest: manifest.checkpoint)
        self.checkpoint = newest.checkpoint
        self.state_bytes = self.log_bytes = self.log_rows = 0
        for entry in newest.entries:
            sections = log.files.sections(entry)
            self.state_bytes += sum(len(part) for part in sections.get("state/remember", ()))
            self.state_bytes += sum(part.size_bytes for part in entry.parts if part.section == "files/remember")
            for part in sections.get("state/loop", ()):
                self.log_bytes += len(part)
                self.log_rows += decode_log(part, SCHEMA, "the newest checkpoint").rows


def newest(root: Path, name: str, after: int = 0) -> Contents:
    """Return the contents of the first checkpoint found above ``after``."""

    def look() -> Contents | None:
        try:
            found = Contents(root, name)
        except (NotFound, ValueError):  # pruned while it was read, or not there yet
            return None
        return found if found.checkpoint > after else None

    found: Contents = until(look, f"a checkpoint above {after}")
    return found


@pytest.mark.parametrize("circulating", few([40, 0], 1))
def test_a_checkpoint_holds_the_state_and_only_what_circulates(
    spec: Callable[..., dict[str, Any]], run: Callable[[dict[str, Any]], Life], tmp_path: Path, circulating: int
) -> None:
    what = spec("remember", rows=ROWS, rate=5_000, circulating=circulating, interval="100ms")
    life = run(what)
    running = life.running()
    read = ROWS - 4  # the source holds the last record of each split back

    def is_full() -> bool:
        return newest(tmp_path, what["name"]).state_bytes >= read * TEXT_BYTES

    until(is_full, "everything in state", STEP_S)
    after = 0
    for number in range(10):
        if number == 5:
            kill(running["workers"]["0"])
            life.restart()
        found = newest(tmp_path, what["name"], after)
        after = found.checkpoint
        assert found.log_rows == circulating, (number, found.checkpoint)  # it never rests, so it is in transit
        assert found.log_bytes <= INDEX_BYTES_MAX + circulating * (TEXT_BYTES + 40) * 2
        assert read * TEXT_BYTES <= found.state_bytes <= 2 * read * (TEXT_BYTES + 60), "what was replaced is bounded"
    life.child.send({"stop": what["name"]})
    assert not life.result()["is_finished"]
