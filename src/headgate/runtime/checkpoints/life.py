"""Who a pipeline is to its sinks: one write-once object for each of its lives (LV1 and LV7 of docs/spec/lives.md).

Life 0 is the first; any other one has the number of the log entry that ended the one before. Counterparts: ``log``,
which says which one it is, ``runtime.driver.lives``, which tells the sinks.
"""

from __future__ import annotations

import contextlib
import re

from headgate.codec.life import decode_life, encode_life
from headgate.errors import CorruptionError
from headgate.model.ids import Generation
from headgate.model.life import Life
from headgate.storage.base import AlreadyExists, NotFound, Storage
from headgate.storage.reading import read_again

_NUMBER = re.compile(r"[0-9]{10,}")


class LifeObjects:
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

    def draw(self, number: int, home: str, host: str, wall_ms: int, newest: Generation) -> None:
        """Draw life ``number``, unless somebody was quicker.

        Raises:
            StorageError
        """
        drawn = Life(self._storage.draw_name(16), home, host, wall_ms, newest)
        with contextlib.suppress(AlreadyExists):
            self._storage.put_if_absent(self._path(number), [encode_life(drawn)])

    def read(self, number: int) -> Life:
        """Return life ``number``.

        Raises:
            NotFound: it was never drawn.
            CorruptionError, StorageError
        """
        path = self._path(number)
        life = read_again(lambda: decode_life(self._storage.get(path), f"{self._storage.url}/{path}"))
        if life is None:
            raise CorruptionError(f"{self._storage.url}/{path}", 0, "a life", "none")
        return life

    def before(self, number: int) -> list[Life]:
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
