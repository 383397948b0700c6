"""``TwoPhaseSink``: users' sinks for targets that can prepare a transaction.

Rules CS5 and CS9 of docs/spec/connectors.md. The user says how the target begins, writes, prepares,
commits and aborts one transaction; names, pending output, recovery and other parallelism are done here. Modelled on
Flink's ``TwoPhaseCommitSinkFunction``, but the driver commits.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Generic, TypeVar

import pyarrow as pa

from headgate.connectors.base import Committer, SealedTransaction, SinkContext, SinkWriter
from headgate.connectors.fenced_sink import (
    Fence,
    FencedSink,
    OutputName,
    in_order,
    owner_of,
    transient,
    with_stored_life,
)
from headgate.errors import CorruptionError, UsageError, gone
from headgate.model.config import Duration
from headgate.model.ids import CheckpointId, Generation
from headgate.model.manifest import Committable
from headgate.protocol.checkpoints.commit import CommitPermit

_VERSION = b"1\n"

Open = TypeVar("Open")
"""What ``begin`` returns: an open transaction of the target, such as a connection."""


class TwoPhaseSink(FencedSink, Generic[Open]):
    """Base class of sinks for a target that can keep output durable and invisible at the same time.

    Workers call ``begin``, ``write``, ``prepare`` and ``close``. The driver calls ``claim``, ``claimed``, ``prepared``,
    ``commit``, ``abort``, ``committed`` and ``forget``. A call may be repeated after it raised, and also after it
    succeeded if the process died before that was recorded. Instances travel to the workers: open a connection, or
    anything else that cannot travel, in ``begin``.

    Attributes:
        transient_errors: exceptions of ``prepare`` and of the calls in the driver after which another try may help.
            All other exceptions, and every exception of ``begin`` and ``write``, fail the pipeline's generation.
        transaction_timeout: the time after which the target itself ends an open or prepared transaction, such as
            ``"15m"``. None: it never does. A pipeline is refused if its checkpoints may take that long. A pipeline that
            was down for longer stops, because ``commit`` reports that output is gone.
    """

    transient_errors: tuple[type[Exception], ...] = (OSError,)
    transaction_timeout: Duration | None = None

    # -- what users write -------------------------------------------------------------------------------------------

    @abstractmethod
    def begin(self, name: str, schema: pa.Schema) -> Open:
        """Begin a transaction; its output is invisible to readers. ``name`` is unique to this call."""

    @abstractmethod
    def write(self, transaction: Open, batch: pa.RecordBatch) -> None:
        """Add records to the transaction."""

    @abstractmethod
    def prepare(self, transaction: Open, name: str, fence: Fence) -> None:
        """Make the transaction durable under ``name``, and keep it invisible.

        From now on a commit must succeed, however late it comes.
        """

    @abstractmethod
    def prepared(self, owner: str) -> Iterable[str]:
        """Return the names of all prepared and open transactions of ``owner``; they begin with ``owner``."""

    @abstractmethod
    def commit(self, names: Sequence[str], fence: Fence) -> None:
        """Make these transactions visible, all at once if the target can do that, otherwise in this order.

        Ignore names that are already committed.

        Raises:
            FencedError: a newer generation has claimed the target. Nothing must be committed then.
            UsageError: a name is neither prepared nor committed. The pipeline then stops, because it would lose output.
        """

    @abstractmethod
    def abort(self, name: str, fence: Fence) -> None:
        """Remove the prepared or open transaction ``name``; do nothing if it does not exist.

        Raises:
            FencedError: a newer generation has claimed the target and may keep the transaction. Nothing must be removed
                then.
        """

    def committed(self, owner: str) -> Iterable[str]:
        """Return the committed names that the target remembers for ``owner``. Override it together with ``forget``.

        The default returns none; the names that the target remembers then grow with every checkpoint.
        """
        return ()

    def forget(self, names: Sequence[str]) -> None:
        """Forget that these names were committed, and nothing else. No retained checkpoint asks for them.

        This is best effort: if it raises, nothing fails, and Headgate calls it again later. Some of ``names`` may
        already be forgotten.
        """

    def close(self, transaction: Open) -> None:
        """Release the resources of a transaction that was abandoned or prepared. The default does nothing."""

    # -- what the runtime calls -------------------------------------------------------------------------------------

    def open(self, context: SinkContext) -> _Writer[Open]:
        return _Writer(self, context)

    def open_committer(self, pipeline: str, node: str, generation: Generation) -> _Committer:
        """See ``connectors.base.Sink``.

        Raises:
            UsageError: only one of ``committed`` and ``forget`` is there.
        """
        kind = _ForgettingCommitter if can_forget(self) else _Committer
        return kind(self, Fence(owner_of(pipeline, node), int(generation)))


def can_forget(sink: TwoPhaseSink[Any]) -> bool:
    """Return whether the target of ``sink`` can forget what was committed.

    Raises:
        UsageError: only one of the two methods that it takes is there.
    """
    kind = type(sink)
    lists, forgets = kind.committed is not TwoPhaseSink.committed, kind.forget is not TwoPhaseSink.forget
    if lists is not forgets:
        there, missing = ("committed", "forget") if lists else ("forget", "committed")
        raise UsageError(
            f"{kind.__name__} has a method {there}, but not {missing}, and would never forget a transaction: give it "
            "both, committed(self, owner) to list what the target remembers, forget(self, names) to remove some of it"
        )
    return lists


class _Writer(SinkWriter, Generic[Open]):
    """Begins a transaction with the first record after a barrier, and seals it at the next one."""

    def __init__(self, sink: TwoPhaseSink[Open], context: SinkContext) -> None:
        self._sink, self._context = sink, context
        self._fence = Fence(owner_of(context.pipeline, context.node), int(context.generation))
        self._next = 0
        self._open: tuple[str, Open] | None = None
        self._sealed: list[_Sealed[Open]] = []

    def write(self, batch: pa.RecordBatch) -> None:
        if batch.num_rows == 0:
            return
        if self._open is None:
            # it counts transactions: which checkpoint will seal this one is not known yet
            self._next += 1
            context = self._context
            name = OutputName(self._fence.owner, self._next, context.subtask_index, int(context.generation))
            self._open = str(name), self._sink.begin(str(name), context.schema)
        self._sink.write(self._open[1], batch)

    def seal(self, checkpoint: CheckpointId) -> _Sealed[Open]:
        sealed = _Sealed(self._sink, self._fence, self._open)
        self._open = None
        # an upload thread prepares them meanwhile; ``close`` releases those that it never came to
        self._sealed = [one for one in self._sealed if not one.is_over]
        self._sealed.append(sealed)
        return sealed

    def close(self) -> None:
        if self._open is not None:
            self._sink.close(self._open[1])
            self._open = None
        for sealed in self._sealed:
            sealed.close()


class _Sealed(SealedTransaction, Generic[Open]):
    """A transaction that takes no more records."""

    def __init__(self, sink: TwoPhaseSink[Open], fence: Fence, transaction: tuple[str, Open] | None) -> None:
        self._sink, self._fence, self._transaction = sink, fence, transaction
        self._payload: bytes | None = None

    @property
    def is_over(self) -> bool:
        """Whether it was prepared, or there is nothing to prepare."""
        return self._transaction is None

    def prepare(self) -> bytes | None:
        if self._transaction is None:
            return self._payload
        name, transaction = self._transaction
        with transient(self._sink.transient_errors, "prepare", name):
            self._sink.prepare(transaction, name, self._fence)
        # kept before anything else: if ``close`` raises, the next call returns it and does not prepare once more
        self._payload = _VERSION + name.encode()
        self.close()
        return self._payload

    def close(self) -> None:
        """Release the transaction."""
        if self._transaction is not None:
            transaction = self._transaction[1]
            # first: a ``close`` that raised is not repeated
            self._transaction = None
            self._sink.close(transaction)


class _Committer(Committer):
    """Decides what was prepared."""

    def __init__(self, sink: TwoPhaseSink[Any], fence: Fence) -> None:
        self._sink, self._fence = sink, fence

    def recover(self, keep: Sequence[Committable]) -> None:
        """See ``Committer``: whatever the parallelism was, only what ``keep`` names stays."""
        kept = {_name_of(committable) for committable in keep}
        with transient(self._sink.transient_errors, "recover", self._fence.owner):
            # a fence without the life that is stored would erase the owner
            self._fence = with_stored_life(self._sink, self._fence)
            self._sink.claim(self._fence)
            # after the claim: older generations add nothing to this list any more
            for name in sorted(self._sink.prepared(self._fence.owner)):
                if name not in kept and self._is_mine(name):
                    self._sink.abort(name, self._fence)

    def _is_mine(self, name: str) -> bool:
        """Whether this generation or an older one of this sink wrote it: an heir's output is not for us to abort."""
        found = OutputName.parse(name)
        return found is not None and found.owner == self._fence.owner and found.generation <= self._fence.generation

    def commit(self, permit: CommitPermit, committables: Sequence[Committable]) -> None:
        names = [_name_of(committable) for committable in in_order(permit, committables)]
        if names:
            with transient(self._sink.transient_errors, "commit", self._fence.owner):
                try:
                    self._sink.commit(names, self._fence)
                except UsageError as error:  # which says that one is neither prepared nor committed
                    # a user who would rather lose this output may go on without it
                    gone(error)
                    raise


class _ForgettingCommitter(_Committer):
    """Has the target forget names, which say no checkpoint."""

    knows_outcomes = True
    can_forget = True

    def __init__(self, sink: TwoPhaseSink[Any], fence: Fence) -> None:
        super().__init__(sink, fence)
        self._checkpoints: dict[str, CheckpointId] = {}
        """Of what this generation commits; it has prepared more, which an heir may have committed."""

    def commit(self, permit: CommitPermit, committables: Sequence[Committable]) -> None:
        self._checkpoints |= {_name_of(committable): committable.checkpoint for committable in committables}
        super().commit(permit, committables)

    def denial(self, committable: Committable) -> str:
        """See ``Committer``: such a target lists what it prepared, and what it remembers."""
        name, owner = _name_of(committable), self._fence.owner
        with transient(self._sink.transient_errors, "look up", owner):
            if name in self._sink.prepared(owner) or name in self._sink.committed(owner):
                return ""
        return f"{name} is neither prepared nor known to be committed"

    def forget(self, before: CheckpointId, promised: Callable[[], Sequence[Committable]]) -> None:
        kept = {_name_of(committable) for committable in promised()}
        with transient(self._sink.transient_errors, "forget", self._fence.owner):
            names = [name for name in self._sink.committed(self._fence.owner) if self._is_over(name, before, kept)]
            if names:
                self._sink.forget(sorted(names))
        self._checkpoints = {name: at for name, at in self._checkpoints.items() if at >= before}

    def _is_over(self, name: str, before: CheckpointId, kept: set[str]) -> bool:
        """Whether ``name`` is not needed: what former generations left is in ``kept``, or not needed any more."""
        if name in kept or not self._is_mine(name):
            return False
        found = OutputName.parse(name)
        began_at = found is not None and found.generation < self._fence.generation
        # a name that is not noted stays: this generation prepared it, and an heir may have committed it
        return began_at or self._checkpoints.get(name, before) < before


def _name_of(committable: Committable) -> str:
    payload = committable.payload
    if not payload.startswith(_VERSION):
        where = f"committable of sink '{committable.sink}' for checkpoint {committable.checkpoint}"
        raise CorruptionError(where, 0, "version 1", repr(payload[:2]))
    return payload[len(_VERSION) :].decode()
