"""Hand-made mutants: each breaks one rule of a machine (or of what stands around it), and must be caught (X6).

A mutant is a patch that exists only inside ``with applied(mutant)``. Most are caught by simulated runs; those that a
time-out or a repetition makes good again are caught by a probe: the smallest scenario that shows the broken rule.
A survivor is a missing checker. ``python -m headgate.sim mutants`` prints who caught what.
"""

from __future__ import annotations

import importlib
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeAlias

from headgate.errors import HeadgateError
from headgate.sim.run import run_seed

Patch: TypeAlias = Callable[[object, str, Any], None]
"""``patch(owner, attribute, value)``: set until the end of the ``with`` block."""

SEEDS_MAX = 600
"""Seeds tried when the recorded one does not catch the mutant any more."""

EVENTS_MAX = 30_000
"""A mutant's run that needs more is a hang; sound runs need a tenth."""


@dataclass(frozen=True, slots=True)
class Mutant:
    """One broken rule, in runs whose graphs have loops or have none.

    ``seed``: one that catched it when it was written. ``probe``: raises AssertionError when the rule is broken.
    """

    name: str
    description: str
    rule: str
    apply: Callable[[Patch], None]
    seed: int = 0
    probe: Callable[[], None] | None = None
    loops: bool = False


MUTANTS: dict[str, Mutant] = {}


def mutant(
    name: str,
    rule: str,
    description: str,
    *,
    seed: int = 0,
    probe: Callable[[], None] | None = None,
    loops: bool = False,
) -> Callable[[Callable[[Patch], None]], Callable[[Patch], None]]:
    """Register the decorated patch."""

    def register(apply: Callable[[Patch], None]) -> Callable[[Patch], None]:
        assert name not in MUTANTS
        MUTANTS[name] = Mutant(name, description, rule, apply, seed, probe, loops)
        return apply

    return register


def around(patch: Patch, owner: type, method: str, change: Callable[..., Any]) -> None:
    """Replace ``owner.method`` by ``change(original, self, *arguments)``."""
    original = vars(owner)[method]

    def changed(self: Any, *arguments: Any, **options: Any) -> Any:
        return change(lambda *a, **o: original(self, *a, **o), self, *arguments, **options)

    patch(owner, method, changed)


def without(patch: Patch, owner: type, method: str, kinds: type | tuple[type, ...]) -> None:
    """Drop effects of ``kinds`` from what ``owner.method`` returns."""
    around(patch, owner, method, lambda call, _, *a: [e for e in call(*a) if not isinstance(e, kinds)])


@dataclass(frozen=True, slots=True)
class Catch:
    """How a mutant was caught."""

    by: str
    what: str


@contextmanager
def applied(mutant: Mutant) -> Iterator[None]:
    """Run the block with ``mutant`` in place."""
    undo: list[tuple[object, str, Any, bool]] = []

    def patch(owner: object, attribute: str, value: Any) -> None:
        had = attribute in vars(owner)
        undo.append((owner, attribute, vars(owner).get(attribute), had))
        setattr(owner, attribute, value)

    mutant.apply(patch)
    try:
        yield
    finally:
        for owner, attribute, value, had in reversed(undo):
            if had:
                setattr(owner, attribute, value)
            else:
                delattr(owner, attribute)


def catch(mutant: Mutant) -> Catch | None:
    """Try to catch ``mutant``; None if it survives."""
    with applied(mutant):
        if mutant.probe is not None:
            try:
                mutant.probe()
            except (AssertionError, HeadgateError) as error:
                return Catch("probe", str(error) or "assertion")
            return None
        for seed in (mutant.seed, *range(SEEDS_MAX)):
            violation = run_seed(seed, loops=mutant.loops, events_max=EVENTS_MAX).violation
            if violation is not None:
                return Catch(f"seed {seed}", str(violation).splitlines()[0])
    return None


def all_mutants() -> dict[str, Mutant]:
    """Return every mutant by name."""
    for part in ("subtask", "outer", "drain", "rescale", "lists", "loops", "rounds"):
        importlib.import_module(f"headgate.sim.mutations_{part}")
    return MUTANTS


def print_table() -> int:
    """Print every mutant and what caught it; return the exit code."""
    survivors = 0
    for mutant in all_mutants().values():
        started = time.monotonic()
        caught = catch(mutant)
        survivors += caught is None
        verdict = "SURVIVES" if caught is None else f"{caught.by}: {caught.what}"
        print(f"{mutant.name:34} {mutant.rule:9} {time.monotonic() - started:5.1f} s  {verdict[:120]}", flush=True)
    print(f"{len(MUTANTS)} mutants, {survivors} survive")
    return 1 if survivors else 0
