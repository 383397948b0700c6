"""Records about sinks beside the checkpoint log.

The pipeline's identity for them, their targets, resets, lost output.

::

<pipeline>/life, lives/<number>        identity of the pipeline, write-once; a reset draws the next one
<pipeline>/targets/<life>-<digest>     all targets of one start, write-once; <life> as in ``lives/``
<pipeline>/resets/<token>              a reset order, write-once; removed when it is carried out
<pipeline>/lost/<output>.json          output that its target denied; for people, never removed

Reads and writes; decisions about ownership and resets are those of ``protocol``.
"""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Callable, Iterable

import xxhash

from headgate.codec.json_files import (
    decode_life,
    decode_order,
    decode_targets,
    encode_life,
    encode_order,
    encode_targets,
)
from headgate.errors import CorruptionError
from headgate.model.manifest import Committable
from headgate.model.pipeline_identity import PipelineIdentity, ResetOrder, Target
from headgate.storage.base import AlreadyExists, NotFound, Storage, number_name, read_with_retries

_NUMBER = re.compile(r"[0-9]{10,}")


class PipelineIdentities:
    """The lives of one pipeline."""

    def __init__(self, storage: Storage, pipeline: str) -> None:
        self._storage = storage
        self._pipeline = pipeline

    def exists(self, number: int) -> bool:
        """Whether life ``number`` was drawn.

        Raises:
            StorageError
        """
        try:
            self._storage.get(self._path(number))
        except NotFound:
            return False
        return True

    def draw(self, number: int, home: str, host: str, wall_ms: int) -> None:
        """Draw identity ``number``, unless another process was quicker.

        Raises:
            StorageError
        """
        drawn = PipelineIdentity(self._storage.draw_name(16), home, host, wall_ms)
        with contextlib.suppress(AlreadyExists):
            self._storage.put_if_absent(self._path(number), [encode_life(drawn)])

    def read(self, number: int) -> PipelineIdentity:
        """Return life ``number``.

        Raises:
            NotFound: it was never drawn.
            CorruptionError, StorageError
        """
        path = self._path(number)
        life = read_with_retries(lambda: decode_life(self._storage.get(path), f"{self._storage.url}/{path}"))
        if life is None:
            raise CorruptionError(f"{self._storage.url}/{path}", 0, "a life", "none")
        return life

    def before(self, number: int) -> list[PipelineIdentity]:
        """Return all lives before life ``number`` that were drawn here.

        Raises:
            CorruptionError, StorageError
        """
        names = [path.rpartition("/")[2] for path in self._storage.list(f"{self._pipeline}/lives")]
        numbers = [0, *sorted(int(name) for name in names if _NUMBER.fullmatch(name))]
        found = []
        for earlier in numbers:
            if earlier < number:
                with contextlib.suppress(NotFound):
                    found.append(self.read(earlier))
        return found

    def _path(self, number: int) -> str:
        return f"{self._pipeline}/lives/{number:010d}" if number else f"{self._pipeline}/life"


_TARGETS_RECORD = re.compile(r"([0-9]{10,})-[0-9a-f]{16}")
_TOKEN = re.compile(r"[0-9a-f]{16}")


class SinkRegistry:
    """The records of one pipeline."""

    def __init__(self, storage: Storage, pipeline: str) -> None:
        self._storage = storage
        self._targets, self._resets = f"{pipeline}/targets", f"{pipeline}/resets"

    def note(self, life: int, targets: tuple[Target, ...]) -> None:
        """Write down what a start of ``life`` writes to. A start with the same sinks finds it there.

        Raises:
            StorageError
        """
        data = encode_targets(targets)
        with contextlib.suppress(AlreadyExists):
            name = f"{number_name(life)}-{xxhash.xxh3_64_hexdigest(data)}"
            self._storage.put_if_absent(f"{self._targets}/{name}", [data])

    def targets(self) -> tuple[Target, ...] | None:
        """Return all targets since the last reset of the pipeline; None if none were ever registered.

        Raises:
            CorruptionError, StorageError
        """
        paths = list(self._records())
        if not paths:
            return None
        found = [read_with_retries(lambda path=path: decode_targets(self._storage.get(path), path)) for path in paths]  # type: ignore[misc]
        return tuple({target.place_key: target for targets in found for target in targets}.values())

    def order(self, token: str) -> ResetOrder | None:
        """Return an order, None when there is none or it was carried out.

        Raises:
            CorruptionError, StorageError
        """
        path = f"{self._resets}/{token}"
        try:
            return read_with_retries(lambda: decode_order(self._storage.get(path), path))
        except NotFound:
            return None

    def orders(self) -> tuple[str, ...]:
        """Return the tokens of all orders, whether they count or not: cheap.

        Raises:
            StorageError
        """
        names = [path.removeprefix(f"{self._resets}/") for path in self._storage.list(self._resets)]
        return tuple(name for name in names if _TOKEN.fullmatch(name))

    def give(self, order: ResetOrder) -> None:
        """Write an order down. It counts for nothing yet.

        Raises:
            StorageError
        """
        with contextlib.suppress(AlreadyExists):  # ours, after a lost answer
            self._storage.put_if_absent(f"{self._resets}/{order.token}", [encode_order(order)])

    def carried_out(self, life: int, token: str) -> None:
        """Remove what lives before ``life`` wrote to, then the order: nothing is left to be done.

        Raises:
            StorageError
        """
        for path, number in self._records().items():
            if number < life:
                self._storage.delete(path)
        # the order last: after a crash in between it is found, and carried out once more
        self.withdraw((token,))

    def withdraw(self, tokens: Iterable[str]) -> None:
        """Remove orders that are carried out, or cannot count any more.

        Raises:
            StorageError
        """
        for token in tokens:
            self._storage.delete(f"{self._resets}/{token}")

    def _records(self) -> dict[str, int]:
        paths = self._storage.list(self._targets)
        found = {path: _TARGETS_RECORD.fullmatch(path.removeprefix(f"{self._targets}/")) for path in paths}
        return {path: int(match[1]) for path, match in found.items() if match is not None}


_LOSS_RECORD = re.compile(r"[0-9]{10,}-[^/]+-[0-9]{5,}-[0-9]{10,}\.json")


class LostOutput:
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
        self._names |= {path for path in paths if _LOSS_RECORD.fullmatch(path.removeprefix(self._prefix))}

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
            # named after the output: a loss that is met again after a restart is recorded once
            self._storage.put_if_absent(path, [json.dumps(said).encode()])
        self._names |= {path}
        return f"{self._storage.url}/{path}"
