"""The files of savepoints: the place is looked at, written once, read (docs/spec/savepoints.md).

::

    <path>/savepoint          what it is; put if absent, when everything else is there (SV2)
    <path>/files-<random>/... the parts, as in a pipeline's directory; nothing refers to anything outside (SV3)

Counterparts: ``uploads`` writes the parts, ``protocol.checkpoints.savepoints`` decides when one counts. Never removes
anything but what a try has left that was given up.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterable

from headgate.codec.savepoint import decode_savepoint, encode_savepoint
from headgate.errors import StorageError, UsageError
from headgate.model.places import Place
from headgate.model.savepoint import Savepoint
from headgate.storage.backends import open_storage
from headgate.storage.base import AlreadyExists, NotFound, Storage, refuse_unless_exclusive
from headgate.storage.reading import read_again

NAME = "savepoint"

PUT_TRIES_MAX = 3
"""A put that failed may have taken effect: it is repeated, and finds itself."""

_OF_A_TRY = re.compile(r"files-[0-9a-f]{16}/.+")


class SavepointDirectory:
    """One place, with a savepoint or without."""

    def __init__(self, url: str) -> None:
        """Open it.

        Raises:
            UsageError: nothing can be kept there.
        """
        self._storage: Storage = open_storage(url)
        self.url = url

    def place(self, token: str) -> Place:
        """Return where the files of a new try go (SV4). ``token``: 16 hexadecimal digits, drawn at random.

        Raises:
            UsageError: something else is there.
            StorageError
        """
        paths = self._storage.list("")
        if NAME in paths:
            raise UsageError(f"there is a savepoint at {self.url} already; choose another place")
        others = [path for path in paths if not _OF_A_TRY.fullmatch(path)]
        if others:
            raise UsageError(f"{self.url} is not empty (it has {others[0]}); a savepoint needs a place of its own")
        place = Place(self.url, f"files-{token}")
        refuse_unless_exclusive(self._storage, place.prefix)
        return place

    def write(self, savepoint: Savepoint) -> None:
        """Make it a savepoint: everything that ``savepoint`` refers to is there. May be repeated.

        Raises:
            UsageError: somebody else's is there.
            StorageError: perhaps it is written.
        """
        data = encode_savepoint(savepoint)
        for tries_left in reversed(range(PUT_TRIES_MAX)):
            try:
                self._storage.put_if_absent(NAME, [data])
                break
            except AlreadyExists:
                if self._storage.get(NAME) != data:
                    raise UsageError(f"another savepoint was written at {self.url} meanwhile") from None
                break
            except StorageError as error:
                if not tries_left or not error.is_transient:
                    raise
        with contextlib.suppress(StorageError):  # what other tries of the same stop have left
            self._remove(savepoint.files, {f"{savepoint.files}/{part.path}" for part in savepoint.manifest.parts})

    def give_up(self, place: Place) -> None:
        """Remove what a try has written, unless it became a savepoint.

        Raises:
            StorageError
        """
        with contextlib.suppress(NotFound):
            if self.read().files == place.prefix:
                return
        self._remove(place.prefix, ())

    def read(self) -> Savepoint:
        """Return what the savepoint here is.

        Raises:
            NotFound: there is none.
            CorruptionError, StorageError
        """
        path = f"{self._storage.url.rstrip('/')}/{NAME}"
        return read_again(lambda: decode_savepoint(self._storage.get(NAME), path))

    def _remove(self, prefix: str, needed: Iterable[str]) -> None:
        kept = set(needed)
        for path in self._storage.list(prefix):
            if path not in kept:
                self._storage.delete(path)


def savepoints_below(url: str) -> list[str]:
    """Return the paths below ``url`` at which there are savepoints, itself ('') included; sorted.

    Raises:
        UsageError, StorageError
    """
    return sorted(
        path.removesuffix(NAME).rstrip("/") for path in open_storage(url).list("") if f"/{path}".endswith(f"/{NAME}")
    )
