"""What ``freeze`` returns: state as it was at a barrier, held until somebody says that it is not needed any more.

Counterparts: ``runtime.checkpoints.uploads``, which has it write itself beside processing, perhaps more than once, and
releases it when the snapshot is durable or given up (ST15 of docs/spec/state.md, U6 of docs/spec/subtask.md);
``runtime.checkpoints.targets``, which it writes itself to (SF5).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from headgate.codec.snapshot import Buffer
from headgate.model.manifest import KeyGroups, SnapshotPart


@dataclass(frozen=True, slots=True)
class OwnedKeys:
    """The keys of a subtask: the key groups that it owns, of ``max_parallelism``."""

    groups: KeyGroups
    max_parallelism: int


class SnapshotTarget(Protocol):
    """Where the state of one operator goes. The order of its parts is kept."""

    @property
    def keys(self) -> OwnedKeys | None:
        """Whose keys these are, for state that is cut by key group; None: write it in one part."""

    def put(
        self,
        chunks: Iterable[Buffer],
        rows: Mapping[str, int] | None,
        key_groups: KeyGroups | None = None,
        name: str = "",
    ) -> SnapshotPart:
        """Write one part; return the reference, to be shared once a checkpoint with it is completed.

        Args:
            chunks: its bytes.
            rows: of each section of state in it; None if its bytes do not tell.
            key_groups: all of its keys are in these; None: everybody who restores needs it.
            name: for the operator itself.

        Raises:
            StorageError
        """

    def share(self, part: SnapshotPart) -> None:
        """Refer to a part that may be shared, instead of writing it again (SF6, SF15)."""

    @property
    def files(self) -> Mapping[str, SnapshotPart] | None:
        """Files of this state that may be shared, by name (SF15).

        None: the state must be portable, in parts that every backend reads, as in a savepoint.
        """

    def put_file(self, name: str, chunks: Iterable[Buffer], key_groups: KeyGroups | None = None) -> SnapshotPart:
        """Write one file of a backend, apart from everything else, so that it can go when nobody needs it.

        Args:
            name: no other file of this state is called so.
            chunks: its bytes.
            key_groups: all of its keys are in these; None: in those of the subtask.

        Raises:
            StorageError
        """

    def describe_files(self, chunks: Iterable[Buffer], rows: Mapping[str, int], name: str = "") -> SnapshotPart:
        """Write what the files of this snapshot are.

        Args:
            chunks: for whoever opens them.
            rows: of each state in them. Nobody else counts them before they are restored (U7).
            name: of the description, if releases that know only nameless ones cannot read it (SF16).

        Raises:
            StorageError
        """


class FrozenState(ABC):
    """State as it was at a barrier; later changes of its owner must not show in it.

    ``rows`` and ``write_to`` change nothing, so a write that failed can be repeated. They run in an upload thread, and
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

    def write_to(self, target: SnapshotTarget) -> None:
        """Write the state, in as many parts as it likes (SF12); can be repeated until ``release``.

        Raises:
            StorageError
        """
        self._assert_held()
        self._write(target)

    def release(self) -> None:
        """Give the state up: it is durable, or nobody will write it. The second time nothing happens.

        Afterwards:
            The owner may change what it had frozen; ``write_to`` raises, because it would find something else.
        """
        if not self.is_released:
            self._forget()
            self.is_released = True

    def _assert_held(self) -> None:
        if self.is_released:
            raise AssertionError(f"{type(self).__qualname__} was released: it has nothing to write any more")

    @abstractmethod
    def _rows(self) -> Mapping[str, int]: ...

    def _write(self, target: SnapshotTarget) -> None:
        """Write one part that everybody restores; state that is cut by key group writes more."""
        target.put(self._encode(), self._rows())

    @abstractmethod
    def _encode(self) -> Sequence[Buffer]:
        """Return the whole state as a container of ``codec.snapshot``."""

    @abstractmethod
    def _forget(self) -> None:
        """Drop the references to what was frozen."""
