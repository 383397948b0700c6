"""What a pipeline writes to, and orders to start over, beside its checkpoints (docs/spec/starting-over.md).

::

    <pipeline>/targets/<life>-<digest>     all targets of one start, write-once; <life> as in ``lives/``
    <pipeline>/resets/<token>              an order to start over, write-once; removed when it is carried out

Reads and writes; what an order means, ``protocol.checkpoints.starting_over`` decides.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterable

import xxhash

from headgate.codec.targets import decode_order, decode_targets, encode_order, encode_targets
from headgate.model.targets import ResetOrder, Target
from headgate.storage.base import AlreadyExists, NotFound, Storage
from headgate.storage.numbered import number_name
from headgate.storage.reading import read_again

_RECORD = re.compile(r"([0-9]{10,})-[0-9a-f]{16}")
_TOKEN = re.compile(r"[0-9a-f]{16}")


class Records:
    """The records of one pipeline."""

    def __init__(self, storage: Storage, pipeline: str) -> None:
        self._storage = storage
        self._targets, self._resets = f"{pipeline}/targets", f"{pipeline}/resets"

    def note(self, life: int, targets: tuple[Target, ...]) -> None:
        """Write down what a start of ``life`` writes to (SO1). A start with the same sinks finds it there.

        Raises:
            StorageError
        """
        data = encode_targets(targets)
        with contextlib.suppress(AlreadyExists):
            name = f"{number_name(life)}-{xxhash.xxh3_64_hexdigest(data)}"
            self._storage.put_if_absent(f"{self._targets}/{name}", [data])

    def targets(self) -> tuple[Target, ...] | None:
        """Return all that was ever written to since the pipeline last started over; None when nobody wrote that down.

        Raises:
            CorruptionError, StorageError
        """
        paths = list(self._records())
        if not paths:
            return None
        found = [read_again(lambda path=path: decode_targets(self._storage.get(path), path)) for path in paths]  # type: ignore[misc]
        return tuple({target.place_key: target for targets in found for target in targets}.values())

    def order(self, token: str) -> ResetOrder | None:
        """Return an order, None when there is none or it was carried out.

        Raises:
            CorruptionError, StorageError
        """
        path = f"{self._resets}/{token}"
        try:
            return read_again(lambda: decode_order(self._storage.get(path), path))
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
        with contextlib.suppress(AlreadyExists):  # ours, whose answer was lost
            self._storage.put_if_absent(f"{self._resets}/{order.token}", [encode_order(order)])

    def carried_out(self, life: int, token: str) -> None:
        """Remove what lives before ``life`` wrote to, then the order: nothing is left to be done (SO7).

        Raises:
            StorageError
        """
        for path, number in self._records().items():
            if number < life:
                self._storage.delete(path)
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
        found = {path: _RECORD.fullmatch(path.removeprefix(f"{self._targets}/")) for path in paths}
        return {path: int(match[1]) for path, match in found.items() if match is not None}
