"""NEXMark: the events of an online auction, and the queries that engines are compared by.

Counterpart: ``headgate nexmark``, ``docs/guide/nexmark.md``. Names are imported when they are first used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from headgate.public_names import PublicNames

PUBLIC_NAMES = {
    "headgate.nexmark.events": "Nexmark",
    "headgate.nexmark.queries": "QUERIES Query Tables",
}

_names = PublicNames(__name__, PUBLIC_NAMES)

if TYPE_CHECKING:
    from headgate.nexmark.events import Nexmark as Nexmark
    from headgate.nexmark.queries import QUERIES as QUERIES
    from headgate.nexmark.queries import Query as Query
    from headgate.nexmark.queries import Tables as Tables
else:
    __all__ = _names.all


def __getattr__(name: str) -> Any:
    return _names.load(name)
