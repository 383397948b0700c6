"""What became of output that its target denied, and that the pipeline goes on without: one record for each (K26).

A record has the identity of the output (K8) in its name, so that whoever meets the same denial again writes nothing.
Counterpart: ``runtime.driver.sink_commits``, which meets them. Records are for people, and never removed.
"""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Callable

from headgate.model.manifest import Committable
from headgate.storage.base import AlreadyExists, Storage

_RECORD = re.compile(r"[0-9]{10,}-[^/]+-[0-9]{5,}-[0-9]{10,}\.json")


class Losses:
    """The losses of one pipeline, beside its checkpoints."""

    def __init__(self, storage: Storage, pipeline: str) -> None:
        """Nothing is read yet."""
        self._storage, self._prefix = storage, f"{pipeline}/lost/"
        self._names: frozenset[str] = frozenset()

    @property
    def count(self) -> int:
        """How many are known: of ``look``, and those that were recorded since."""
        return len(self._names)

    def look(self) -> None:
        """Learn of those that former generations recorded.

        Raises:
            StorageError
        """
        paths = self._storage.list(self._prefix)
        self._names |= {path for path in paths if _RECORD.fullmatch(path.removeprefix(self._prefix))}

    def losing(self, wall_ms: Callable[[], int], note: Callable[[str], None]) -> Callable[[Committable, str], None]:
        """Return what records and tells that output is gone, and why.

        It raises StorageError, and may be repeated.
        """

        def lose(lost: Committable, why: str) -> None:
            where = self._recorded(lost, why, wall_ms())
            note(
                f"LOST: output of checkpoint {lost.checkpoint}, subtask {lost.subtask_index} of sink '{lost.sink}', "
                f"which its target denies: {why}; the pipeline goes on because of on_denied_output='lose', and "
                f"recorded it in {where}"
            )

        return lose

    def _recorded(self, lost: Committable, why: str, wall_ms: int) -> str:
        identity = f"{lost.checkpoint:010d}-{lost.sink}-{lost.subtask_index:05d}-{lost.generation:010d}"
        path = f"{self._prefix}{identity}.json"
        said = {
            "sink": str(lost.sink),
            "checkpoint": int(lost.checkpoint),
            "subtask": int(lost.subtask_index),
            "generation": int(lost.generation),
            "why": why,
            "wall_ms": wall_ms,
        }
        with contextlib.suppress(AlreadyExists):
            self._storage.put_if_absent(path, [json.dumps(said).encode()])
        self._names |= {path}
        return f"{self._storage.url}/{path}"
