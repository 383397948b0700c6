"""Time zones in the texts of types: moments, and the local times that they were before (EV12).

Counterparts: ``codec.zones``, which tells the same by Arrow types; ``model.evolution`` and
``protocol.checkpoints.evolution``, which ask.
"""

from __future__ import annotations

import re

LOCAL_TIME, MOMENT = "timestamp[us]", "timestamp[us, tz=UTC]"
"""How Arrow writes both types."""


def gains_zone(old: str, new: str) -> bool:
    """Whether the type ``old`` was a local time and ``new`` is the moment of the same microseconds."""
    return (old, new) == (LOCAL_TIME, MOMENT)


def gains_zones(old: str, new: str) -> bool:
    """Whether the text ``old`` is ``new`` but for moments that were local times."""
    either = f"(?:{re.escape(MOMENT)}|{re.escape(LOCAL_TIME)})"
    return re.fullmatch(either.join(map(re.escape, new.split(MOMENT))), old) is not None
