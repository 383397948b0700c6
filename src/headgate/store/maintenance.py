"""What is due for the streams of a store: old events, expired leases, and scaling by their policies.

Counterparts: ``store.Store``; writers and committed transactions call ``look_after``, so a stream that is not written
costs nothing. Source: S65 to S71 and S79 to S81 of docs/spec/stream-store.md, TX8 of docs/spec/shared-transactions.md.
Heads move in the catalogue, then files go that nothing can read any more; each step may be cut short, and the next
truncation of the stream goes on where it was left.
"""

from __future__ import annotations

import logging

from headgate.errors import HeadgateError, StorageError
from headgate.protocol.store.layouts import Plan, scaling_by_policy
from headgate.store.chunks import delete_quietly
from headgate.store.core import StoreCore
from headgate.store.streams import StreamInfo
from headgate.store.transactions import remove_leftovers

SWEEP_PARTS_MAX = 2_000
"""A sweep keeps other writers of the catalogue waiting for so many rows."""

MAINTENANCE_INTERVAL_MS = 60_000
"""So often a process that writes to a stream looks what may go."""

_log = logging.getLogger("headgate")


class Maintenance:
    """Does what is due for streams, of one store in one process."""

    def __init__(self, core: StoreCore) -> None:
        self._core = core
        self._due_ms: dict[str, int] = {}

    def look_after(self, name: str) -> None:
        """Do what ``retain`` and ``autoscale`` do, unless this process has just done so. It never takes long.

        It never fails: what cannot be removed now is removed by a later look.
        """
        now_ms = self._core.clock.monotonic_ms()
        if now_ms < self._due_ms.get(name, now_ms):
            return
        # before the look: one that fails is not repeated by every append
        self._due_ms[name] = now_ms + MAINTENANCE_INTERVAL_MS
        try:
            stream = self._core.catalogue.find_stream(name)
        except HeadgateError as error:
            _log.warning("stream '%s' could not be looked at: %s; trying again in a minute", name, error)
            return
        self._look_at(stream)

    def _look_at(self, stream: StreamInfo) -> None:
        """Do what is due for a stream, and never fail."""
        self._retain_in_passing(stream)
        self._autoscale_in_passing(stream)
        self.expire_in_passing(stream)

    def _retain_in_passing(self, stream: StreamInfo) -> None:
        if stream.retention is None:
            return
        try:
            self.retain(stream)
            if not self._tidy_some(stream):
                self._due_ms[stream.name] = self._core.clock.monotonic_ms()  # the next one goes on
        except HeadgateError as error:
            what = f"old events of stream '{stream.name}' could not be removed"
            _log.warning("%s: %s; trying again in a minute", what, error)

    def retain(self, stream: StreamInfo) -> bool:
        """Move heads as far as the retention says; return whether any moved. Others wait for the move only."""
        cut = self._core.catalogue.retention_cut(stream, self._core.clock.wall_ms())
        return bool(cut and self._core.catalogue.retain(stream, cut))

    def tidy(self, stream: StreamInfo) -> None:
        """Forget parts before the heads and delete the files that hold nothing else."""
        while not self._tidy_some(stream):
            pass

    def _tidy_some(self, stream: StreamInfo) -> bool:
        """Forget parts before the heads and delete the files that hold nothing else; return whether that is all.

        A file that cannot be deleted now is tried again by the next truncation.
        """
        found = self._core.catalogue.sweep(stream, SWEEP_PARTS_MAX)
        # files before their records: one that cannot be deleted is listed by the next sweep again
        gone = [path for path in found.garbage if self._delete(path)]
        if gone:
            self._core.catalogue.swept(gone)
        return found.is_done

    def _delete(self, path: str) -> bool:
        try:
            self._core.storage.delete(path)
        except StorageError:
            return False
        return True

    def _autoscale_in_passing(self, stream: StreamInfo) -> None:
        try:
            if stream.scaling is not None:
                self.autoscale(stream)
        except HeadgateError as error:
            _log.warning("stream '%s' could not be scaled: %s; looking again in a minute", stream.name, error)

    def autoscale(self, stream: StreamInfo) -> bool:
        """Scale a stream as its policy says; return whether its segments have changed."""
        now_ms = self._core.clock.wall_ms()
        observed = self._core.catalogue.observe(stream, now_ms)
        if observed is None or stream.scaling is None:
            return False
        plan = scaling_by_policy(stream.scaling, observed)
        return isinstance(plan, Plan) and self._core.catalogue.autoscale(stream, plan, now_ms)

    def expire_in_passing(self, stream: StreamInfo) -> None:
        """Look at leases, and never fail."""
        if self._core.catalogue.is_untouched:
            return  # looking at a store that may not be written to
        try:
            self.expire(stream)
        except HeadgateError as error:
            _log.warning("leases of stream '%s' could not be looked at: %s; trying again later", stream.name, error)

    def expire(self, stream: StreamInfo) -> list[str]:
        """Abort the open transactions of a stream that outlived their lease; return their names."""
        now_ms = self._core.clock.wall_ms()
        if stream.lease_due_ms is None or now_ms < stream.lease_due_ms:
            return []
        expired = self._core.catalogue.expire_shared(stream, now_ms)
        for found in expired:
            _log.warning("transaction '%s' of stream '%s' was aborted: its lease was over", found.name, stream.name)
            delete_quietly(self._core.storage, found.orphans)
            remove_leftovers(self._core, stream.stream_id, found.owner, found.name)
        return [found.name for found in expired]
