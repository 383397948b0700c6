"""Lineage of a node, by which it is found again in an edited program: where it reads or writes, what is upstream.

A manifest holds it for every node that could get the state, positions or output of another one. Made by
``api.lineage``; compared by ``protocol.checkpoints.compatibility``.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from enum import Enum
from typing import TypeAlias

from headgate.dataclass import dataclass

_MAGIC = re.compile(r"[*?\[]")
_NUMBER = re.compile(r"-\d+(?=-|$)")


@dataclass(frozen=True, slots=True)
class Location:
    """A file, directory, glob, URL or stream (``<store>#<stream>``) that a source reads or a sink writes to.

    Attributes:
        name: as the program says it, made absolute.
        real: the same without symbolic links.
    """

    name: str
    real: str

    @property
    def text(self) -> str:
        """For people."""
        place, _, stream = self.name.partition("#")
        return f"stream {stream} in {place}" if stream else place

    def is_same(self, other: Location) -> bool:
        """Whether both are one place, however it is spelled."""
        return self.name == other.name or self.real == other.real

    def is_related(self, other: Location) -> bool:
        """Whether one of them contains the other, or may: globs count as the directory that they begin in."""
        return any(
            is_within(base(one), base(two)) or is_within(base(two), base(one))
            for one, two in ((self.name, other.name), (self.real, other.real))
        )


Moves: TypeAlias = tuple[tuple[str, str], ...]
"""What the user said: what was at the first place is at the second one now (EV15)."""


class NodeKind(Enum):
    """What a node keeps in a checkpoint."""

    SOURCE = "source"
    SINK = "sink"
    OPERATOR = "operator"


@dataclass(frozen=True, slots=True)
class Lineage:
    """How one node stood in its program.

    Attributes:
        kind: what it keeps.
        is_derived: it has no name of its own.
        locations: what it reads or writes; () where it does not say.
        sources: names of the sources upstream, sorted; of a source (): it is one.
        digest: of what it does and of everything upstream, with the code of functions and the attributes of objects.
    """

    kind: NodeKind
    is_derived: bool = False
    locations: tuple[Location, ...] = ()
    sources: tuple[str, ...] = ()
    digest: str = ""


Lineages: TypeAlias = Mapping[str, Lineage]


def family(name: str) -> str:
    """Return what derived names of one kind have in common: ``reduce`` of ``reduce-2``."""
    return _NUMBER.sub("", name)


def base(place: str) -> str:
    """Return ``place``, of a glob the directory that it begins in."""
    magic = _MAGIC.search(place)
    return place if magic is None or "://" in place else place[: place.rfind("/", 0, magic.start())] or "/"


def is_within(place: str, other: str) -> bool:
    """Whether ``place`` is ``other`` or something below it."""
    return place == other or place.startswith((f"{other.rstrip('/')}/", f"{other}#"))


def moved(place: str, moves: Moves) -> str:
    """Return where ``place`` is now, by the longest of ``moves`` that it is part of."""
    found = [(before, now) for before, now in moves if is_within(place, before)]
    if not found:
        return place
    before, now = max(found, key=lambda move: len(move[0]))
    return now.rstrip("/") + place[len(before.rstrip("/")) :]


@dataclass(frozen=True, slots=True)
class Relocation:
    """What a source read when the restored checkpoint was taken, where that is not what it reads now."""

    before: tuple[Location, ...]
    now: tuple[Location, ...]
    moves: Moves = ()

    def of(self, path: str) -> str:
        """Return the name that ``path``, which was read before, has now; ``path`` where no other one is known."""
        for former in self.before:
            root = base(former.name)
            if not is_within(path, root):
                continue
            if any(location.name == former.name for location in self.now):
                return path
            rest = path[len(root.rstrip("/")) :]
            for way in (moved(path, self.moves), path, base(former.real).rstrip("/") + rest):
                for location in self.now:
                    for begin in (base(location.name), base(location.real)):
                        if is_within(way, begin):
                            return base(location.name).rstrip("/") + way[len(begin.rstrip("/")) :]
        return path
