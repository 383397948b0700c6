"""Whether the state in a checkpoint fits a program that was edited (EV1 to EV9, EV13, EV14).

Pure; asked before anything starts. ``judged`` compares the state of one operator: every state has a conversion, and
what it changes is said, or one sentence says why nothing is restored. ``Matching`` finds which node of the program
goes on with what a checkpoint holds under its name.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import TypeAlias

from headgate.dataclass import dataclass
from headgate.errors import NameOperator, Remedy
from headgate.model.lineage import Lineage, Lineages, Location, Moves, NodeKind, Relocation, family, moved
from headgate.model.schema_evolution import NO_RULES, Misfit, OperatorRules, StateRules, changes_in, conversion_of
from headgate.model.state_schema import (
    DeclaredState,
    FunctionParts,
    Reach,
    RecordParts,
    Rule,
    StateIdentity,
    parts_of,
)


@dataclass(frozen=True, slots=True)
class Judged:
    """What becomes of an operator's state. ``refusal``: why nothing is restored; ``changes``: what is converted."""

    refusal: str | None = None
    changes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class _Case:
    """One operator, ``here`` being the checkpoint in words."""

    operator: str
    here: str

    def whole(self, before: str, now: str) -> Judged:
        """Refuse without knowing more."""
        return Judged(
            f"the state of operator '{self.operator}' in {self.here} is [{before}], but this pipeline declares "
            f"[{now}]; restore the old definition, or rename the operator or the pipeline"
        )

    def of_type(self, state: str, old: object, new: object, misfit: Misfit, otherwise: str) -> Judged:
        """Refuse another type."""
        advice = f"{misfit.advice}, or restore" if misfit.advice else "restore"
        return Judged(
            f"state '{state}' of operator '{self.operator}' is {old} in {self.here}, but is declared as {new} now: "
            f"{misfit.why}; {advice} the old declaration, or {otherwise}"
        )


def judged(operator: str, here: str, before: str, now: str, rules: OperatorRules) -> Judged:
    """Compare the identities of an operator's state in a checkpoint and in the program.

    Args:
        here: the checkpoint, in words.
        rules: what the user said about the operator's states.
    """
    case = _Case(operator, here)
    old, new = parts_of(StateIdentity(before)), parts_of(StateIdentity(now))
    if isinstance(old, FunctionParts) and isinstance(new, FunctionParts):
        found = _function(case, old, new, rules)
        if found is None or (found.refusal is not None and rules.is_built_in):
            return case.whole(before, now)
        if old.rule == new.rule or found.refusal is not None:
            return found
        by_rule = _by_rule(case, old.rule, new.rule)
        return case.whole(before, now) if by_rule is None else _beside(found.changes, by_rule)
    if isinstance(old, RecordParts) and isinstance(new, RecordParts) and old.head == new.head:  # EV9
        return _records(case, old, new, rules)
    return case.whole(before, now)


def _records(case: _Case, old: RecordParts, new: RecordParts, rules: OperatorRules) -> Judged:
    found = conversion_of(old.columns, new.columns, dict(rules.states).get(new.section, NO_RULES), fixed=new.keys)
    if isinstance(found, Misfit):
        return case.of_type(new.section, old.columns, new.columns, found, "rename the operator to start it empty")
    changes = (f"operator '{case.operator}': in state '{new.section}', {text}" for text in changes_in(found))
    return _beside(tuple(changes), _lists(case, old.lists, new.lists, rules))


def _function(case: _Case, old: FunctionParts, new: FunctionParts, rules: OperatorRules) -> Judged | None:
    """Return what becomes of a function's states; None: other keys, or nothing that a state could be compared with."""
    if old.keys and new.keys and old.keys != new.keys:
        return None  # EV6, of timers too
    of_keys = _states(case, old.states, new.states, dict(rules.states), sorted(rules.forgotten))
    if of_keys.refusal is not None:
        return of_keys
    if old.keys and not new.keys and not old.states:
        return None  # its timers would be lost
    return _beside(of_keys.changes, _lists(case, old.lists, new.lists, rules))


def _by_rule(case: _Case, old: Rule | None, new: Rule | None) -> Judged | None:
    """Return what becomes of rows that were kept by another rule: none may be missing (EV18); None: no rows do."""
    if not (isinstance(old, Reach) and isinstance(new, Reach)):
        return None
    name = case.operator
    if new.is_within(old):
        return Judged(changes=(f"operator '{name}' joins rows with {new.words} now, and no longer {old.words}",))
    return Judged(
        f"operator '{name}' joined rows with {old.words} when {case.here} was written, and joins rows with {new.words} "
        "now: partners that it had forgotten would be missing without a word; set the bound back, or, to begin without "
        f"the rows of both sides, give the operator another name, and allow_unclaimed_state=['{name}']"
    )


def _lists(case: _Case, old: Sequence[DeclaredState], new: Sequence[DeclaredState], rules: OperatorRules) -> Judged:
    """Return what becomes of lists that belong to no key: by the same rules (EV11)."""
    return _states(case, old, new, dict(rules.lists), sorted(rules.forgotten_lists))


def _beside(changes: tuple[str, ...], of_lists: Judged) -> Judged:
    return of_lists if of_lists.refusal is not None else Judged(changes=changes + of_lists.changes)


def _states(
    case: _Case,
    old: Sequence[DeclaredState],
    new: Sequence[DeclaredState],
    rules: Mapping[str, StateRules],
    forgotten: Sequence[str],
) -> Judged:
    before = {state.name: state for state in old}
    used: set[str] = set()
    changes: list[str] = []
    for state in new:
        said = rules.get(state.name, NO_RULES)
        # its own name first: the rename may stay in the program after it was done
        former = before.get(state.name) or before.get(said.renamed_from)
        if former is None:
            if not said.starts_empty:  # EV7
                return _added(case, state)
            changes.append(f"state '{state.name}' of operator '{case.operator}' is new: it starts empty")
            continue
        used.add(former.name)
        one = _state(case, former, state, said)
        if one.refusal is not None:
            return one
        changes += one.changes
    for name in before:
        if name not in used and name not in forgotten:
            return _lost(case, before[name])
        if name not in used:
            changes.append(f"state '{name}' of operator '{case.operator}' is left behind")
    return Judged(changes=tuple(changes))


def _state(case: _Case, old: DeclaredState, new: DeclaredState, rules: StateRules) -> Judged:
    otherwise = (
        f"give the new one another name with evolution=Evolution(starts_empty=True) and call forget('{old.name}') to "
        f"leave the old one behind, in a StatefulProcessor deleteIfExists('{old.name}')"
    )
    if old.kind != new.kind:
        before, now = (f"a {one.kind} of {one.type}" for one in (old, new))
        misfit = Misfit(f"a {old.kind} never becomes a {new.kind}")
        return case.of_type(new.name, before, now, misfit, otherwise)
    if old.key_type != new.key_type:  # EV6
        before, now = (f"a map from {one.key_type} to {one.type}" for one in (old, new))
        misfit = Misfit("the keys of a map never change their type")
        return case.of_type(new.name, before, now, misfit, otherwise)
    found = conversion_of(old.type, new.type, rules)
    if isinstance(found, Misfit):
        return case.of_type(new.name, old.type, new.type, found, otherwise)
    texts = [f"state '{old.name}' becomes '{new.name}'"] if old.name != new.name else []
    texts += [f"in state '{new.name}', {text}" for text in changes_in(found)]
    return Judged(changes=tuple(f"operator '{case.operator}': {text}" for text in texts))


def _added(case: _Case, state: DeclaredState) -> Judged:
    return Judged(
        f"state '{state.name}' of operator '{case.operator}' is declared as a {state.kind} of {state.type}, and "
        f"{case.here} has no such state; if it is new, give it evolution=Evolution(starts_empty=True), if it had "
        "another name, Evolution(renamed_from='...')"
    )


def _lost(case: _Case, state: DeclaredState) -> Judged:
    return Judged(
        f"{case.here} holds state '{state.name}' of operator '{case.operator}', a {state.kind} of {state.type}, which "
        "is not declared any more; declare it again, or, if it has another name now, give that one "
        f"evolution=Evolution(renamed_from='{state.name}'), or call forget('{state.name}') to leave it behind, which "
        f"in a StatefulProcessor is deleteIfExists('{state.name}')"
    )


_WORDS = {NodeKind.SOURCE: "source", NodeKind.SINK: "sink", NodeKind.OPERATOR: "operator"}
_DID = {NodeKind.SOURCE: ("read", "reads"), NodeKind.SINK: ("wrote to", "writes to")}

Problem: TypeAlias = tuple[str, Remedy | None]
"""Why a start is refused, and what a user can do about it, if a program can know."""


@dataclass(frozen=True, slots=True)
class Matching:
    """The nodes of a checkpoint and of a program, by name.

    Attributes:
        here: the checkpoint, in words.
        before: of the checkpoint.
        now: of the program.
        kept: what is kept there of nodes, in words; a sink that is not in it keeps nothing.
        moves: what its user moved (EV15).
    """

    here: str
    before: Lineages
    now: Lineages
    kept: Mapping[str, str]
    moves: Moves = ()

    def problem(self) -> Problem | None:
        """Return why a node may be the wrong one; sources first, because they identify all other nodes."""
        kinds = list(_WORDS)
        shared = sorted(self.before.keys() & self.now.keys(), key=lambda name: (kinds.index(self._kind(name)), name))
        for name in shared:
            before, now = self.before[name], self.now[name]
            if before.kind is not now.kind or (now.kind is NodeKind.SINK and name not in self.kept):
                continue  # EV16
            found = self._misplaced(name) or (self._mistaken(name) if now.is_derived else None)
            if found is not None:
                return found
        return None

    def _kind(self, name: str) -> NodeKind:
        return self.now[name].kind

    # -- places -----------------------------------------------------------------------------------------------------

    def relocation(self, name: str) -> Relocation | None:
        """Return what source ``name`` read, where that is not all that it reads now (EV17)."""
        before, now = self.before.get(name), self.now.get(name)
        if before is None or now is None or before.locations == now.locations:
            return None
        return Relocation(before.locations, now.locations, self.moves)

    def changes(self) -> Iterator[str]:
        """Yield what the user should know about places that are other ones now."""
        for name in sorted(self.before.keys() & self.now.keys()):
            before, now = self.before[name], self.now[name]
            if before.kind is now.kind and before.kind in _DID:
                gone = self._only(before.locations, now.locations)
                new = [location for location in now.locations if not self._stands_for(before.locations, location)]
                _, does = _DID[now.kind]
                what = f"{_WORDS[now.kind]} '{name}'"
                if gone and new:
                    yield f"{what} {does} {_texts(new)} from now on, and no longer {_texts(gone)}"
                elif gone:
                    yield f"{what} no longer {does} {_texts(gone)}"

    def _only(self, before: Collection[Location], now: Collection[Location]) -> list[Location]:
        return [location for location in before if not any(self.is_now(location, other) for other in now)]

    def _stands_for(self, before: Collection[Location], now: Location) -> bool:
        return any(self.is_now(location, now) for location in before)

    def is_now(self, before: Location, now: Location) -> bool:
        """Whether ``now`` is what was called ``before``, or a part of it, or it is a part of ``now``."""
        there = Location(moved(before.name, self.moves), moved(before.real, self.moves))
        return before.is_related(now) or there.is_related(now)

    def is_same(self, before: Location, now: Location) -> bool:
        """Whether ``now`` is the very place that was called ``before``."""
        there = Location(moved(before.name, self.moves), moved(before.real, self.moves))
        return before.is_same(now) or there.is_same(now)

    def _misplaced(self, name: str) -> Problem | None:
        """Return why a source or sink must not go on at another place."""
        before, now = self.before[name], self.now[name]
        if not before.locations or not now.locations:
            return None
        gone = self._only(before.locations, now.locations)
        new = [location for location in now.locations if not self._stands_for(before.locations, location)]
        if now.kind is NodeKind.SINK and not all(self._stands_for_same(before, location) for location in now.locations):
            gone, new = list(before.locations), list(now.locations)
        # one that only reads more, or only less, is still the same
        if not gone or not new:
            return None
        twin = self._twin_at(name, new) if now.is_derived else None
        if twin is not None:
            return self._swapped(name, twin)
        did, does = _DID[now.kind]
        what = f"{_WORDS[now.kind]} '{name}'"
        is_sink = now.kind is NodeKind.SINK
        kept = f"{self.here}, which holds {self.kept[name]}," if is_sink else self.here
        old, target = gone[0].name.partition("#")[0], new[0].name.partition("#")[0]
        if is_sink and old == target:
            return None  # streams of one store: what was promised is committed to the stream that it was written to
        move = (
            f"if it is the same at another place now, say so with moved={{{old!r}: {target!r}}} "
            f"(headgate run --moved '{old}={target}')"
        )
        if not is_sink:
            other = f"to read {_texts(new)} from the beginning, give the source another name"
        else:
            other = (
                f"else let it write to {_texts(gone)} again, or, to give up what is held, give it another name, and "
                f"allow_unclaimed_state=['{name}']"
            )
        return (
            f"{what} {did} {_texts(gone)} when {kept} was written, and {does} {_texts(new)} now; {move}; {other}",
            None,
        )

    def _stands_for_same(self, before: Lineage, now: Location) -> bool:
        return any(self.is_same(location, now) for location in before.locations)

    def _twin_at(self, name: str, new: Collection[Location]) -> str | None:
        for twin, before in self._twins(name, self.before):
            if any(self.is_same(location, place) for location in before.locations for place in new):
                return twin
        return None

    # -- derived names ----------------------------------------------------------------------------------------------

    def _twins(self, name: str, nodes: Lineages) -> list[tuple[str, Lineage]]:
        """Return the other unnamed nodes of the kind of ``name``."""
        mine = family(name)
        return [
            (other, lineage)
            for other, lineage in sorted(nodes.items())
            if other != name and lineage.is_derived and family(other) == mine
        ]

    def _mistaken(self, name: str) -> Problem | None:
        """Return why the unnamed node ``name`` may not be the one that it was."""
        before, now = self.before[name], self.now[name]
        if not before.is_derived:
            return None
        first = _places if now.kind is NodeKind.SOURCE or (before.locations and now.locations) else _sources
        olds = [(twin, other) for twin, other in self._twins(name, self.before) if first(self, other, now)]
        news = [(twin, other) for twin, other in self._twins(name, self.now) if first(self, before, other)]
        if not first(self, before, now):
            return self._swapped(name, olds[0][0]) if olds else self._unlike(name)
        if self._is_equal(before, now) or not (olds or news):
            return None
        like = next((twin for twin, other in olds if self._is_equal(other, now)), None)
        if like is not None:
            return self._swapped(name, like)
        # It was edited, if all others that could be meant are what they were: then none of them is in its place.
        is_alone = all(
            twin in self.before and twin in self.now and self._is_equal(self.before[twin], self.now[twin])
            for twin in {twin for twin, _ in (*olds, *news)}
        )
        return None if is_alone else self._unlike(name)

    def _is_equal(self, before: Lineage, now: Lineage) -> bool:
        return (
            (before.digest, before.sources) == (now.digest, now.sources)
            and (len(before.locations) == len(now.locations) or not before.locations)
            and all(self.is_same(one, two) for one, two in zip(before.locations, now.locations, strict=False))
        )

    def _swapped(self, name: str, twin: str) -> Problem:
        now = self.now[name]
        word = _WORDS[now.kind]
        rule = f"{word}s without names of their own are numbered in the order of the program"
        todo = f"give this {word} the name that it had (name='{twin}'), and each of the others its own, or put the "
        if now.locations and self.before[name].locations and now.kind in _DID:
            did, does = _DID[now.kind]
            was = f"{did} {_texts(self.before[name].locations)} when {self.here} was written, and {does} "
            fact = f"{was}{_texts(now.locations)} now, as '{twin}' did"
        else:
            fact = f"is what '{twin}' was when {self.here} was written"
        return f"{word} '{name}' {fact}: {rule}; {todo}program back in order", NameOperator(name)

    def _unlike(self, name: str) -> Problem:
        word = _WORDS[self.now[name].kind]
        names = [name, *(twin for twin, _ in self._twins(name, self.before))]
        several = f", and there were several ({', '.join(repr(one) for one in sorted(names))})" if names[1:] else ""
        return (
            f"{word} '{name}' has no name of its own, and is not what '{name}' was when {self.here} was written"
            f"{several}, so it cannot be told whose state it goes on with; if it is the same, give it that name "
            f"(name='{name}'), if not, another one",
            NameOperator(name),
        )


def _places(matching: Matching, before: Lineage, now: Lineage) -> bool:
    """Whether they may read or write the same; what does not say what that is always may."""
    if not before.locations or not now.locations:
        return not before.locations and not now.locations
    return any(matching.is_now(one, two) for one in before.locations for two in now.locations)


def _sources(matching: Matching, before: Lineage, now: Lineage) -> bool:
    return not {*before.sources}.isdisjoint(now.sources) or before.sources == now.sources


def _texts(locations: Collection[Location]) -> str:
    return ", ".join(location.text for location in locations)
