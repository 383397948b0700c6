"""The plain recount: one process, one loop, no Headgate. What the pipeline's counts are compared with."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path

LEVELS = "TRACE|DEBUG|INFO|WARN|ERROR|FATAL"
_TAIL = rf"(?: -)?\s+(?P<level>{LEVELS})\s+(?P<rest>.*)$"
_BEGINNINGS = (
    (re.compile(r"^(?P<day>\d\d/\d\d/\d\d) (?P<time>\d\d:\d\d:\d\d)(?:[,.]\d+)?" + _TAIL, re.DOTALL), "%y/%m/%d"),
    (re.compile(r"^(?P<day>\d{6}) (?P<time>\d{6}) \d+(?:[,.]\d+)?" + _TAIL, re.DOTALL), "%y%m%d"),
    (re.compile(r"^(?P<day>\d{4}-\d\d-\d\d)[ T](?P<time>\d\d:\d\d:\d\d)(?:[,.]\d+)?" + _TAIL, re.DOTALL), "%Y-%m-%d"),
)
_SERVICES = (re.compile(r"^\[.*:([\w$]+)@\d+\]"), re.compile(r"^(?:\[[^\]]*\] )?([\w.$]+)(?::| -)"))

Key = tuple[str, str, int]
"""Level, service, start of the window in seconds since 1970."""


@dataclass(frozen=True, slots=True)
class Parsed:
    """A log line."""

    level: str
    service: str
    second: int


@dataclass(slots=True)
class Recount:
    """What the input holds: counted lines by key, lines of other levels, lines that are no log lines."""

    counts: Counter[Key] = field(default_factory=Counter)
    filtered: int = 0
    unparsed: int = 0

    @property
    def lines(self) -> int:
        """All lines."""
        return self.counts.total() + self.filtered + self.unparsed


def parse(line: str) -> Parsed | None:
    """Return what a line says, or None if it is no log line."""
    for pattern, day_format in _BEGINNINGS:
        match = pattern.match(line)
        if match is None:
            continue
        service = next((found.group(1) for p in _SERVICES if (found := p.match(match["rest"]))), None)
        time = match["time"].replace(":", "")
        try:
            moment = datetime.strptime(f"{match['day']} {time}", f"{day_format} %H%M%S").replace(tzinfo=UTC)
        except ValueError:
            return None
        return None if service is None else Parsed(match["level"], service, int(moment.timestamp()))
    return None


def lines_of(path: Path, size_bytes: int | None = None) -> Iterator[str]:
    """Yield the lines of a file, or the whole ones in its first ``size_bytes`` bytes."""
    with path.open("rb") as file:
        data = file.read(-1 if size_bytes is None else size_bytes)
    lines = data.split(b"\n")
    if size_bytes is not None or not lines[-1]:
        lines.pop()
    for line in lines:
        yield line.removesuffix(b"\r").decode("utf-8", "replace")


def recount(lines: Iterable[str], levels: frozenset[str], window_s: int) -> Recount:
    """Count ``lines`` as the pipeline should."""
    result = Recount()
    for line in lines:
        parsed = parse(line)
        if parsed is None:
            result.unparsed += 1
        elif parsed.level not in levels:
            result.filtered += 1
        else:
            result.counts[parsed.level, parsed.service, parsed.second // window_s * window_s] += 1
    return result
