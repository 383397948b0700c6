"""When a reader of a group is taken for dead: it has not said for its lease that it lives. Pure decisions.

Counterpart: every process that uses a group watches the others with one of these, by its own clock, so that no two
clocks are compared; ``reader_group`` decides whether the reader was silent all the time. Source: RG13 of
docs/spec/reader-groups.md.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from headgate.protocol.store.reader_group import Member, Silent

LOOKS_PER_LEASE = 4
"""A watcher that was stopped itself has seen nothing meanwhile: between two looks, a quarter of a lease counts."""


@dataclass(slots=True)
class _Heard:
    token: str
    beats: int
    silence_ms: int = 0


@dataclass(slots=True)
class Watch:
    """What one process has heard of the readers of a group."""

    _heard: dict[str, _Heard] = field(default_factory=dict)
    _looked_ms: int = 0

    def look(self, readers: Mapping[str, Member], now_ms: int) -> list[Silent]:
        """Return who has been silent for its lease, by name.

        Args:
            readers: as they are now.
            now_ms: a clock that only goes forward.
        """
        passed_ms, self._looked_ms = max(0, now_ms - self._looked_ms), now_ms
        self._heard = {name: heard for name, heard in self._heard.items() if name in readers}
        return [
            Silent(name, readers[name].token, readers[name].beats)
            for name in sorted(readers)
            if self._silence_ms(name, readers[name], passed_ms) >= readers[name].lease_ms
        ]

    def _silence_ms(self, name: str, member: Member, passed_ms: int) -> int:
        heard = self._heard.get(name)
        if heard is None or (heard.token, heard.beats) != (member.token, member.beats):
            self._heard[name] = _Heard(member.token, member.beats)
            return 0
        heard.silence_ms += min(passed_ms, member.lease_ms // LOOKS_PER_LEASE)
        return heard.silence_ms
