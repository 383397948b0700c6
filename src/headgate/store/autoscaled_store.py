"""Streams that are scaled by their policy: the part of a store about who looks and who acts.

Counterpart: ``store.Store``, which is all of this too; ``catalogue.autoscaling``. ``protocol.store.autoscaling``
decides. Source: S79 to S81 of docs/spec/stream-store.md.
"""

from __future__ import annotations

import logging

from headgate.errors import HeadgateError
from headgate.protocol.store.autoscaling import decide
from headgate.protocol.store.layouts import Plan
from headgate.store.scaled_store import ScaledStore
from headgate.store.scaling import Scaling, scaling_policy_of
from headgate.store.streams import StreamInfo

_log = logging.getLogger("headgate")


class AutoscaledStore(ScaledStore):
    """The part of a store that scales streams by their policies."""

    def set_scaling(self, name: str, scaling: Scaling | None) -> StreamInfo:  # S79
        """Set how a stream is scaled automatically, from the next look on. None: only by hand.

        Raises:
            UsageError: there is no such stream, or the policy is impossible.
        """
        return self._catalogue.set_scaling(name, scaling_policy_of(scaling))

    def autoscale(self, name: str) -> bool:  # S81
        """Scale a stream now as its policy says. Return whether its segments have changed.

        Writers and sinks do this by themselves, once a minute.

        Raises:
            UsageError: there is no such stream.
        """
        return self._autoscale(self._catalogue.find_stream(name))

    def _look_at(self, stream: StreamInfo) -> None:
        """See ``CutStore``: whoever makes events visible looks, so a stream to which nobody writes costs nothing."""
        super()._look_at(stream)
        try:
            if stream.scaling is not None:
                self._autoscale(stream)
        except HeadgateError as error:
            _log.warning("stream '%s' could not be scaled: %s; looking again in a minute", stream.name, error)

    def _autoscale(self, stream: StreamInfo) -> bool:
        now_ms = self._now_ms()
        observed = self._catalogue.observe(stream, now_ms)
        if observed is None or stream.scaling is None:
            return False
        plan = decide(stream.scaling, observed)
        return isinstance(plan, Plan) and self._catalogue.autoscale(stream, plan, now_ms)
