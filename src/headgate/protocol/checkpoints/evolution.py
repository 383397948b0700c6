"""Whether the state of an operator in a checkpoint can become that of the program, which was changed (EV1 to EV9).

Pure; asked before anything starts. Either every state has a conversion, and what it changes is said, or one sentence
refuses. Counterparts: ``protocol.checkpoints.recovery``, which asks for each operator whose state has another identity;
``model.evolution`` for a single state; ``state.evolving``, which converts.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from headgate.model.evolution import NO_RULES, Misfit, OperatorRules, StateRules, changes_in, conversion_of
from headgate.model.identity_parts import DeclaredState, FunctionParts, RecordParts, parts_of
from headgate.model.state_identity import StateIdentity
from headgate.model.zones import gains_zones


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
    if before != now and gains_zones(before, now):  # EV12, whatever state it is
        return Judged(changes=(f"operator '{operator}': times in its state become moments in UTC",))
    case = _Case(operator, here)
    old, new = parts_of(StateIdentity(before)), parts_of(StateIdentity(now))
    if isinstance(old, FunctionParts) and isinstance(new, FunctionParts):
        return _function(case, old, new, rules) or case.whole(before, now)
    if isinstance(old, RecordParts) and isinstance(new, RecordParts) and gains_zones(old.head, new.head):  # EV9
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
    if old.keys and new.keys and not gains_zones(old.keys, new.keys):
        return None  # EV6, of timers too
    of_keys = _states(case, old.states, new.states, dict(rules.states), sorted(rules.forgotten))
    if of_keys.refusal is not None:
        return of_keys
    if old.keys and not new.keys and not old.states:
        return None  # its timers would be lost
    return _beside(of_keys.changes, _lists(case, old.lists, new.lists, rules))


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
    if not gains_zones(str(old.key_type), str(new.key_type)):  # EV6
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
