"""The entries of one pipeline's checkpoint log, and the numbers beside them: read as they are, damage included.

Counterpart: ``log``, which appends and claims. What an entry means, ``protocol.checkpoints.recovery`` decides.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

from headgate.codec.log_entry import decode_hint, decode_log_entry, encode_hint
from headgate.errors import CorruptionError, StorageError
from headgate.model.ids import CheckpointId, Generation
from headgate.model.life import NO_GENERATION
from headgate.model.manifest import LogEntry
from headgate.protocol.checkpoints.recovery import Damage, ObservedEntry, ObservedLog
from headgate.protocol.checkpoints.replacement import newest_of
from headgate.storage.base import NotFound, Storage
from headgate.storage.numbered import number_name, numbered
from headgate.storage.reading import read_again

READ_TRIES_MAX = 8
"""An entry may be pruned between the listing and its reading; more often in a row it counts as damage."""

_Reading: TypeAlias = Callable[[Callable[[], LogEntry]], LogEntry]


def _read_once(read: Callable[[], LogEntry]) -> LogEntry:
    """Who asks again soon, and goes on only when it can tell, need not read again now."""
    return read()


class LogEntries:
    """Reads ``log/``, ``ids/`` and ``log-hint``."""

    def __init__(self, storage: Storage, pipeline: str) -> None:
        self._storage = storage
        self._pipeline = pipeline

    @property
    def url(self) -> str:
        """Where the pipeline is, for messages."""
        return f"{self._storage.url.rstrip('/')}/{self._pipeline}"

    def observe(self) -> ObservedLog:
        """Read the whole log, damaged entries included.

        Raises:
            StorageError
        """
        for _ in range(READ_TRIES_MAX):
            hint = self._read_hint()  # first: what is appended behind the listing is not lost
            entries = tuple(self._observe_entry(sequence) for sequence in self.numbers("log"))
            if not any(isinstance(e.content, Damage) and e.content.has_vanished for e in entries):
                break  # else it was pruned meanwhile, so there is something newer to be seen
        return ObservedLog(entries, self.newest_id(), hint)

    def _observe_entry(self, sequence: int, reading: _Reading = read_again) -> ObservedEntry:
        path = self.path(sequence)
        try:
            return ObservedEntry(sequence, path, reading(lambda: decode_log_entry(self._storage.get(path), path)))
        except CorruptionError as error:
            return ObservedEntry(sequence, path, Damage(path, str(error)))
        except NotFound:
            return ObservedEntry(sequence, path, Damage(path, "it vanished while it was read", has_vanished=True))

    def newest_generation(self, sequence: int, above: Generation = NO_GENERATION) -> Generation | None:
        """Return the newest generation above ``above`` that anything after entry ``sequence`` is of, or None.

        Raises:
            StorageError: nobody can tell now.
        """
        later: list[ObservedEntry] = []
        for number in reversed([number for number in self.numbers("log") if number > sequence]):
            later.append(self._observe_entry(number, _read_once))
            if isinstance(newest_of(later, above), int):
                break  # older entries tell nothing more
        return self.told(newest_of(later, above))

    def told(self, newer: Generation | Damage | None) -> Generation | None:
        """Return ``newer``.

        Raises:
            StorageError: it is damage, which may be the entry of a newer driver (R56).
        """
        if isinstance(newer, Damage):
            raise StorageError(
                "read",
                f"{self._storage.url.rstrip('/')}/{newer.path}",
                f"{newer.problem}; perhaps another driver runs pipeline '{self._pipeline}', so this one must not go "
                "on; if no other one runs, stop this one and start it again",
            )
        return newer

    def path(self, sequence: int) -> str:
        """Return where entry ``sequence`` is."""
        return f"{self._pipeline}/log/{number_name(sequence)}"

    def id_path(self, checkpoint: CheckpointId) -> str:
        """Return where the id of ``checkpoint`` is reserved."""
        return f"{self._pipeline}/ids/{number_name(checkpoint)}"

    def numbers(self, directory: str) -> list[int]:
        """Return the numbers that have an object in ``directory``, ascending. Other files there are not ours (O25)."""
        return list(numbered(self._storage, f"{self._pipeline}/{directory}"))

    def newest_id(self) -> CheckpointId:
        """Return the newest reserved id, 0 if there is none."""
        return CheckpointId(max(self.numbers("ids"), default=0))

    def _read_hint(self) -> int:
        """Return the hint, 0 if there is none. One read wrongly would tell of an entry that never was (R53)."""
        path = f"{self._pipeline}/log-hint"
        try:
            return read_again(lambda: decode_hint(self._storage.get(path), path))
        except (NotFound, CorruptionError):
            return 0

    def write_hint(self, sequence: int) -> None:
        """Note the newest sequence beside the log, best effort."""
        try:
            self._storage.put(f"{self._pipeline}/log-hint", [encode_hint(sequence)])
        except StorageError:
            return  # best effort: the log itself decides
