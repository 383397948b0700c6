"""What ``freeze`` returns: state as it was at a barrier, held until somebody says that it is not needed any more.

Counterpart: ``runtime.checkpoints.uploads``, which encodes it beside processing, perhaps more than once, and releases
it when the snapshot is durable or given up (ST15 of docs/spec/state.md, U6 of docs/spec/subtask.md).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence

from headgate.codec.snapshot import Buffer


class FrozenState(ABC):
    """State as it was at a barrier; later changes of its owner must not show in it.

    ``rows`` and ``encode`` change nothing, so a write that failed can be repeated. They run in an upload thread, and
    so does ``release``.
    """

    def __init__(self) -> None:
        self.is_released = False

    def rows(self) -> Mapping[str, int]:
        """Return how many rows each section of state must have, told from what was frozen, not from its encoding.

        A row is a value, an element, an entry, an accumulator, a record. ``codec.state_rows`` counts those of the
        bytes.
        """
        self._assert_held()
        return self._rows()

    def encode(self) -> Sequence[Buffer]:
        """Return the snapshot's bytes as a list of buffers (``codec.snapshot``); can be repeated until ``release``."""
        self._assert_held()
        return self._encode()

    def release(self) -> None:
        """Give the state up: it is durable, or nobody will write it. The second time nothing happens.

        Afterwards:
            The owner may change what it had frozen; ``encode`` raises, because it would find something else.
        """
        if not self.is_released:
            self._forget()
            self.is_released = True

    def _assert_held(self) -> None:
        if self.is_released:
            raise AssertionError(f"{type(self).__qualname__} was released: it has nothing to encode any more")

    @abstractmethod
    def _rows(self) -> Mapping[str, int]: ...

    @abstractmethod
    def _encode(self) -> Sequence[Buffer]: ...

    @abstractmethod
    def _forget(self) -> None:
        """Drop the references to what was frozen."""
