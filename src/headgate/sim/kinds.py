"""What the nodes of simulated graphs do with records: pure functions, used by the live chain and by the plain model.

Every record is ``(origin, number, key, value, event time)``. The origin grows by the name of each operator that the
record passes, and by ``@`` and the name of each loop head that it comes back to.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import TypeAlias

from headgate.model.graph import Node, OutputTag
from headgate.model.ids import NodeName
from headgate.sim.history import Record

WINDOW_MS = 40
"""Width of the tumbling windows of WINDOW nodes."""

OUT_OF_ORDER_MS = 20
"""Records of a split are at most this late."""

Stream: TypeAlias = tuple[NodeName, OutputTag]


class Kind(Enum):
    """What a node does."""

    SOURCE = "source"
    MAP = "map"
    FILTER = "filter"
    COUNT = "count"
    WINDOW = "window"
    SINK = "sink"
    HEAD = "head"
    AGAIN = "again"
    TALLY = "tally"
    VISITS = "visits"
    ROUND_SUM = "round-sum"
    REKEY = "rekey"
    SPLIT = "split"
    HOLD = "hold"
    LOWER = "lower"
    RETURNED = "returned"


@dataclass(frozen=True, slots=True)
class Spec:
    """Configuration of a node.

    Attributes:
        kind: what it does.
        splits: sources: the input.
        diverts: MAP: every fifth record is bad.
        trips_max: AGAIN: how often a record goes round at most, all loops together.
        sends_all: AGAIN: until then every record goes round.
        has_rounds: HEAD of an outermost loop: it counts rounds.
        rounds_max: HEAD with rounds: records that come back with this round are dropped.
        marks_rounds: ROUND_SUM: each subtask emits a record at the end of each round, whatever came.
    """

    kind: Kind
    splits: tuple[tuple[str, tuple[Record, ...]], ...] = ()
    diverts: bool = False
    trips_max: int = 0
    sends_all: bool = False
    has_rounds: bool = False
    rounds_max: int | None = None
    marks_rounds: bool = False


def spec_of(node: Node) -> Spec:
    """Return the node's configuration."""
    assert isinstance(node.spec, Spec)
    return node.spec


def mapped(record: Record, name: str) -> Record:
    """What a MAP called ``name`` makes of ``record``."""
    origin, number, key, value, time = record
    return f"{origin}.{name}", number, key, (value * 31 + 7) % 1009, time


def is_bad(record: Record) -> bool:
    """Whether a diverting MAP refuses ``record``."""
    return record[1] % 5 == 0


def rejected(record: Record, name: str) -> Record:
    """What a MAP called ``name`` diverts instead of ``record``."""
    return f"{record[0]}!{name}", *record[1:]


def passes(record: Record) -> bool:
    """Whether a FILTER keeps ``record``."""
    return (record[1] + record[3]) % 3 != 0


def counted(name: str, key: int, number: int) -> Record:
    """What a COUNT emits for the ``number``-th record of ``key``."""
    return f"#{name}", number, key, number, 0


def summed(name: str, key: int, count: int, total: int) -> Record:
    """What a COUNT emits for ``key`` when its input has ended."""
    return f"={name}", count, key, total, 0


def windowed(name: str, key: int, start_ms: int, count: int) -> Record:
    """What a WINDOW emits for ``key`` and the window that starts at ``start_ms``."""
    return f"w{name}", start_ms, key, count, 0


def window_start(time_ms: int) -> int:
    """Return the start of the window that ``time_ms`` falls into."""
    return time_ms - time_ms % WINDOW_MS


# -- loops ----------------------------------------------------------------------------------------------------------


def trips(record: Record, head: str = "") -> int:
    """How often ``record`` has come back, to ``head`` or to any: every head adds its name to the origin."""
    return record[0].count(f"@{head}")


def came_back(record: Record, head: str) -> Record:
    """What the loop head called ``head`` makes of a record on a feedback channel."""
    return f"{record[0]}@{head}", *record[1:]


def is_dropped(record: Record, head: str, spec: Spec) -> bool:
    """Whether ``head`` drops a record that has come back, for its round (L38)."""
    return spec.rounds_max is not None and trips(record, head) >= spec.rounds_max


def goes_again(record: Record, spec: Spec) -> bool:
    """Whether an AGAIN sends ``record`` round: a pure function of it, so every schedule gives the same multiset.

    What COUNT makes goes round for two numbers per key only, and sums never: every loop comes to its end.
    """
    if is_summary(record) or trips(record) >= spec.trips_max:
        return False
    if spec.sends_all:
        return True
    if record[0].startswith("#"):
        return record[1] in (3, 6)
    return (record[1] * 7 + record[3]) % 4 != 0


def is_summary(record: Record) -> bool:
    """Whether ``record`` was emitted at the end of the input or of a round: nodes in loops pass it by."""
    return record[0][0] in "=%"


def is_timeless(record: Record) -> bool:
    """Whether a WINDOW passes ``record`` by: what the end made of others comes behind the last watermark."""
    return record[0][0] in "=%w"


def round_sum(name: str, head: str, round_: int, key: int, count: int, total: int) -> Record:
    """What a ROUND_SUM emits for ``key`` at the end of ``round_``: a record of that round."""
    return f"r{name}" + f"@{head}" * round_, count, key, total % 10**9, 0


def round_mark(name: str, round_: int, subtask_index: int) -> Record:
    """What a ROUND_SUM emits at the end of ``round_`` whatever came."""
    return f"%{name}", round_, subtask_index, 0, 0


def transformed(spec: Spec, name: str, record: Record) -> list[Record]:
    """What the stateless kinds of loops make of ``record``."""
    origin, number, key, value, time = record
    match spec.kind:
        case Kind.AGAIN:
            return [record] if goes_again(record, spec) else []
        case Kind.REKEY:
            return [(f"{origin}.{name}", number, (key * 3 + 1) % 5, value, time)]
        case Kind.SPLIT:
            other = [(f"{origin}.{name}", number, key, (value * 17 + 3) % 1009, time)]
            return [(f"{origin}.{name}", number, key, value, time), *(other if trips(record) < 2 else [])]
        case Kind.LOWER:
            return [(f"{origin}.{name}", number, key, -1, time)]
        case Kind.RETURNED:
            return [record] if trips(record) else []
        case _:
            return [(f"{origin}.{name}", number, key, value, time)]


STATELESS = frozenset({Kind.AGAIN, Kind.REKEY, Kind.SPLIT, Kind.LOWER, Kind.RETURNED})
"""Kinds that ``transformed`` describes record by record; HOLD too, but it keeps records back for a while."""

KEYED = frozenset({Kind.COUNT, Kind.WINDOW, Kind.TALLY, Kind.VISITS, Kind.ROUND_SUM})
"""Kinds with keyed state."""
