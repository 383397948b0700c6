"""Pipelines that count at least or at most once: what the verdict allows them, and seeds that draw a mode.

The mode and the branches come from a generator of their own; everything else a seed decides as without a mode. Rules
docs/spec/guarantees.md. Counterpart: ``sim.product.verdict``.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import field, replace

import headgate as hg
from headgate.connectors.base import Sink
from headgate.dataclass import dataclass
from headgate.errors import UsageError
from headgate.model.config import Guarantee
from headgate.sim.product.run import Run
from headgate.sim.product.settings import Graph
from headgate.sim.product.steps import Row
from headgate.sim.product.workloads import WORKLOADS, Branches, Values

LOOPS = frozenset({"circling", "looped"})

Records = Counter[Values]
Rule = Callable[[Records, Records], str | None]
"""Says what is wrong with the records found, where those of a run without failures are wanted."""


@dataclass
class Judge:
    """Judges what was committed by what ``mode`` allows.

    Attributes:
        lost, repeated: records of all sinks that showed an anomaly which is allowed.
        given: how often a user's function was given each record.
        compares: whether there are rules for these sinks; else only what no failure met must be right, and every run
            must end.
    """

    mode: Guarantee
    lost: int = 0
    repeated: int = 0
    given: Counter[int] = field(default_factory=Counter)
    compares: bool = True

    def given_in(self, mode: Guarantee) -> Counter[int]:
        """Return where to count what a start with this mode gives to a user's function."""
        return self.given

    def problem(self, sink: str, found: Records, wanted: Records, *, has_failed: bool) -> str | None:
        """Return what is wrong with a sink, or None. Without a failure nothing is allowed."""
        if (twice := self._given_twice()) and self.mode is Guarantee.AT_MOST_ONCE:
            return twice
        if found == wanted:
            return None
        self.lost += (wanted - found).total()
        self.repeated += (found - wanted).total()
        if not has_failed or self.mode is Guarantee.EXACTLY_ONCE:
            return f"nothing had failed, or {self.mode.value} allows nothing"
        return RULES[self.mode][sink](found, wanted) if self.compares else None

    def _given_twice(self) -> str | None:
        """At most once, a function is given no record twice (GM30)."""
        twice = sorted(n for n, times in self.given.items() if times > 1)
        return f"gave a user's function twice: {twice[:4]}" if twice else None


@dataclass(frozen=True)
class Noted(Branches):
    """Branches after a function that notes what it is given."""

    judge: Judge | None = None

    def build(self, sources: Sequence[hg.Stream], sink_to: Callable[[str], Sink]) -> None:
        assert self.judge is not None
        given = self.judge.given_in(self.judge.mode)

        def note(row: Row) -> bool:
            given[row["n"]] += 1
            return True

        super().build([sources[0].filter(note, name="noted")], sink_to)


def _only(column: int, records: Records) -> dict[Values, list[int]]:
    """Return the numbers in ``column`` by key, ascending."""
    found: dict[Values, list[int]] = {}
    for record, times in records.items():
        found.setdefault(record[:1], []).extend([record[column]] * times)
    return {key: sorted(numbers) for key, numbers in found.items()}


def _more(found: Records, wanted: Records) -> str | None:
    """Nothing is lost, and nothing is made up."""
    if wanted - found:
        return f"lost {sorted(wanted - found)[:4]}"
    made_up = found.keys() - wanted.keys()
    return f"made up {sorted(made_up)[:4]}" if made_up else None


def _fewer(found: Records, wanted: Records) -> str | None:
    """Nothing is repeated or made up."""
    return f"has more: {sorted(found - wanted)[:4]}" if found - wanted else None


def _same(found: Records, wanted: Records) -> str | None:
    """Repeated records change nothing here."""
    return f"lost {sorted(wanted - found)[:4]}, has more: {sorted(found - wanted)[:4]}"


def _numbered(is_allowed: Callable[[int, int], bool]) -> Rule:
    """Each key's records have the numbers from 1 on, once each; how many there may be."""

    def rule(found: Records, wanted: Records) -> str | None:
        have, need = _only(1, found), _only(1, wanted)
        for key in have.keys() | need.keys():
            numbers, count = have.get(key, []), len(need.get(key, []))
            if numbers != list(range(1, len(numbers) + 1)) or not is_allowed(len(numbers), count):
                return f"key {key} has the numbers {numbers[:8]}…{numbers[-2:]}, wanted are {count}"
        return None

    return rule


def _summed(is_allowed: Callable[[int, int], bool]) -> Rule:
    """Counts and sums of each key over all its windows."""

    def rule(found: Records, wanted: Records) -> str | None:
        for column in (1, 2):
            have, need = _only(column, found), _only(column, wanted)
            for key in have.keys() | need.keys():
                if not is_allowed(sum(have.get(key, [])), sum(need.get(key, []))):
                    return f"key {key} adds up to {sum(have.get(key, []))}, not {sum(need.get(key, []))}"
        return None

    return rule


def _brought_home(found: Records, wanted: Records) -> str | None:
    """Every record comes home; how often it was counted on its way is another matter."""
    have, need = {record[1] for record in found}, {record[1] for record in wanted}
    return None if have == need else f"of {sorted(need - have)[:4]} none came home"


def _least(have: int, need: int) -> bool:
    return have >= need


def _most(have: int, need: int) -> bool:
    return have <= need


RULES: Mapping[Guarantee, Mapping[str, Rule]] = {
    Guarantee.AT_LEAST_ONCE: {
        "mapped": _more,
        "looped": _more,
        "once": _same,
        "reduced": _numbered(_least),
        "numbered": _numbered(_least),
        "windowed": _summed(_least),
        "circling": _brought_home,
    },
    Guarantee.AT_MOST_ONCE: {
        "mapped": _fewer,
        "once": _fewer,
        "reduced": _numbered(_most),
        "numbered": _numbered(_most),
        "windowed": _summed(_most),
    },
}


GRAPHS_RATE = 0.3
"""Of the seeds that have a graph, so many keep it, where their mode is possible for it."""


def keeps_graph(run: Run, rng: random.Random, rate: float) -> bool:
    """Whether a run keeps its graph, if it has one and what was drawn is possible for it."""
    if not isinstance(run.settings.job, Graph) or rng.random() >= rate:
        return False
    try:
        run.definition()
    except UsageError:
        return False
    return True


def draw_mode(run: Run, seed: int, mode: Guarantee | None = None) -> Judge:
    """Have ``run`` be of a mode, the seed's own or ``mode``, with branches that have rules."""
    rng = random.Random(f"mode of seed {seed}")
    drawn = rng.choice((Guarantee.AT_LEAST_ONCE, Guarantee.AT_MOST_ONCE))
    mode = mode or drawn
    settings = run.settings
    judge = settings.judge = Judge(mode)
    settings.checkpointing = replace(settings.checkpointing, mode=mode.value)
    if mode is Guarantee.AT_MOST_ONCE:  # GM35
        settings.on_damaged = None
    if keeps_graph(run, random.Random(f"graph of seed {seed}"), GRAPHS_RATE):  # of which no rule says what is too much
        judge.compares = False
        return judge
    workloads = [w for w in WORKLOADS if mode is not Guarantee.AT_MOST_ONCE or w.name not in LOOPS]
    settings.job = Noted(tuple(rng.sample(workloads, rng.choice((1, 2, 3)))), judge=judge)
    settings.inputs = settings.inputs[:1]
    settings.fix_input()
    return judge


class GuaranteeRun(Run):
    """A run in the mode that its seed draws."""

    IS_PLAIN = True

    def _draw(self) -> None:
        self.judge = draw_mode(self, self.seed)
