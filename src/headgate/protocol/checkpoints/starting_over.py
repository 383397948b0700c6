"""What the log says of an order to start over (docs/spec/starting-over.md).

Pure functions over the log. Counterpart: ``runtime.driver.starting_over`` carries it out.
"""

from __future__ import annotations

from headgate.model.ids import Generation
from headgate.model.manifest import Claim
from headgate.protocol.checkpoints.recovery import ObservedLog, has_given_up


def claimant(token: str) -> str:
    """Return the owner of the claim that makes an order count, for people; differs for each order."""
    return f"start over {token}"


def decided(log: ObservedLog) -> str | None:
    """Return the order that the log has made count, unless a start has followed it; None: there is none (SO2, SO9)."""
    if not has_given_up(log):
        return None
    claim = log.counted()[0].content
    return claim.order if isinstance(claim, Claim) else None


def has_started_over(log: ObservedLog) -> bool:
    """Whether the newest entry made an order count, and nobody has begun anew (SO2)."""
    return decided(log) is not None


def newest_generation(log: ObservedLog) -> Generation:
    """Return the newest generation that anything in ``log`` is of, 0 if there is none."""
    found = [entry.content.generation for entry in log.counted() if hasattr(entry.content, "generation")]
    return max(found, default=Generation(0))
