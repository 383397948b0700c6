"""Bugs planted in the sources of files; ``tests/mutants/test_files_mutants.py`` has those of rotation."""

from __future__ import annotations

from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any

from tests.mutants.harness import patched
from tests.sim.product.patching import around, both, planted

from headgate.connectors.files.lines import LineFile
from headgate.connectors.files.source import FileReader


def positions_of_files_are_those_of_the_block_before() -> AbstractContextManager[None]:
    def take(call: Any, self: Any) -> Any:
        self.behind = self.offset
        return call(self)

    def position(call: Any, self: Any) -> Any:
        return replace(call(self), offset=getattr(self, "behind", self.offset), tail_bytes=0, head_bytes=0)

    return both(around(LineFile, "_take", take), around(LineFile, "position", position))


def finished_files_have_no_position() -> AbstractContextManager[None]:
    return patched(
        FileReader,
        "positions",
        lambda self: {
            path: file.position().encode() for path, file in self._table.files.items() if not file.is_finished
        },
    )


ALL = planted(globals(), __name__)
