"""Pipelines that follow files in the machine room."""

from __future__ import annotations

from collections import Counter
from typing import Any

from tests.conftest import IS_DEEP
from tests.mutants.harness import around

from headgate.connectors.files import line_file, rotation
from headgate.connectors.files.line_file import FileMovedError, LineFile
from headgate.sim.scenarios.log_files import FollowedRun, Form

SMOKE = (2, 43, 47, 57) if IS_DEEP else (2, 43, 47)


def test_followed_files_are_read_once_whoever_renames_them() -> None:
    done: Counter[str] = Counter()
    forms: Counter[Form] = Counter()
    refusals: list[FileMovedError] = []

    def moved(call: Any, self: Any, status: Any, what: str) -> FileMovedError:
        found: FileMovedError = call(self, status, what)
        refusals.append(found)
        return found

    usual = line_file.BLOCK_BYTES, line_file.HEAD_BYTES, rotation.HEAD_BYTES
    with around(LineFile, "_moved", moved):
        for seed in SMOKE:
            run = FollowedRun(seed)
            assert (seed, run.run()) == (seed, None)
            done.update(run.logs.done)
            forms[run.form] += 1
    assert usual == (line_file.BLOCK_BYTES, line_file.HEAD_BYTES, rotation.HEAD_BYTES)
    assert set(forms) == set(Form)
    assert done.keys() == {"rotated", "removed", "copied", "truncated", "renamed to another series"}
    assert done["rotated"] > 10
    assert any(refusal.is_in_place for refusal in refusals), "somebody truncated a file, and was told so"
