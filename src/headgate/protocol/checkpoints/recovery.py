"""Which checkpoint a new generation starts from (rules R6–R14 of docs/spec/recovery.md).

Pure functions over what was observed in the checkpoint storage: the log of write-once entries and, for the
candidates, whether their files verify. Counterpart: ``runtime.checkpoints.log``, which reads, verifies and claims.
Source: Arroyo's state protocol (state is derived from durable objects), Flink's recovery order.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import TypeAlias

from headgate.dataclass import dataclass
from headgate.errors import LeaveBehind, NameOperator, Remedy, RestoreFiles
from headgate.model.config import DamagedCheckpoint
from headgate.model.ids import CheckpointId, Generation
from headgate.model.manifest import Claim, LogEntry, Manifest
from headgate.model.pipeline_identity import NO_GENERATION
from headgate.model.plan import PipelineDefinition
from headgate.model.schema_evolution import NO_OPERATOR_RULES, OperatorRules
from headgate.model.state_schema import StateIdentity
from headgate.protocol.checkpoints.compatibility import Judged, Matching, judged


@dataclass(frozen=True, slots=True)
class Damage:
    """Damage in the storage: the file and what is wrong with it.

    ``has_vanished``: the file was there a moment ago, so perhaps a cleanup is removing it.
    """

    path: str
    problem: str
    has_vanished: bool = False


@dataclass(frozen=True, slots=True)
class ObservedEntry:
    """One entry of the log as it was found: readable, or damaged."""

    sequence: int
    path: str
    content: LogEntry | Damage


@dataclass(frozen=True, slots=True)
class ObservedLog:
    """The log, ascending by sequence, and the newest reserved checkpoint id.

    ``hint_sequence`` is the newest sequence that a driver noted beside the log (best effort, 0 if none): an entry
    that the hint knows and the log lacks has been lost.
    """

    entries: tuple[ObservedEntry, ...]
    reserved: CheckpointId
    hint_sequence: int = 0

    def counted(self) -> tuple[ObservedEntry, ...]:
        """Return the entries that count, newest first (R41): the newest one, and what each of them follows.

        The others were left by drivers that had been replaced, at numbers that were used and pruned.
        """
        return self._walk()[0]

    def leading_to(self, sequence: int) -> frozenset[int]:
        """Return where the entries are that whatever is at ``sequence`` needs in order to count, itself included."""
        return frozenset(entry.sequence for entry in self._walk(sequence)[0])

    def lost(self) -> tuple[int, ...]:
        """Return the sequences that must have existed and are missing (R9), ascending.

        Only a completed checkpoint lets the entries before it be pruned: a log without any manifest begins at 1.
        """
        return self._walk()[1]

    def _walk(self, newest: int | None = None) -> tuple[tuple[ObservedEntry, ...], tuple[int, ...]]:
        entries = {entry.sequence: entry for entry in self.entries}
        outdated = self._outdated()
        first = self._first(outdated)
        # From the newest back, each entry to the one that it follows. A hint above all entries means that the newest is
        # lost.
        at = max(self.hint_sequence, *entries, 0) if newest is None else newest
        counted: list[ObservedEntry] = []
        lost: list[int] = []
        while at >= first:
            entry = entries.get(at)
            if entry is None:
                lost.append(at)
            elif at not in outdated:
                counted.append(entry)
            at = at - 1 if entry is None or at in outdated else _followed_by(entry)
        return tuple(counted), tuple(reversed(lost))

    def _outdated(self) -> set[int]:
        """Return where a manifest is of an older generation than one before it: that generation was over."""
        found: set[int] = set()
        newest = 0
        for entry in self.entries:
            if isinstance(entry.content, Manifest):
                newest = max(newest, entry.content.generation)
                if entry.content.generation < newest:
                    found.add(entry.sequence)
        return found

    def _first(self, outdated: set[int]) -> int:
        """Return the first sequence that is not pruned, or meant to be."""
        if all(isinstance(entry.content, Claim) for entry in self.entries):
            return 1
        manifests = [e.content for e in self.entries if isinstance(e.content, Manifest) and e.sequence not in outdated]
        start = max((manifest.log_start for manifest in manifests), default=0)
        return min(entry.sequence for entry in self.entries if entry.sequence >= start)


def _followed_by(entry: ObservedEntry) -> int:
    """Return the sequence before ``entry``: the one that it names, else the one that is less by one."""
    content = entry.content
    if isinstance(content, Damage) or content.follows is None:
        return entry.sequence - 1
    return min(content.follows, entry.sequence - 1)


@dataclass(frozen=True, slots=True)
class NextClaim:
    """What a new generation writes: its number, at this sequence of the log (R6), what it follows (R41), its life."""

    sequence: int
    generation: Generation
    follows: int
    life: int = 0

    @property
    def ends_life(self) -> bool:
        """Whether it gives up everything before it (C72)."""
        return self.life == self.sequence

    def ending_life(self) -> NextClaim:
        """Return the claim that gives up everything before it: it follows nothing, so nothing before it counts."""
        return NextClaim(self.sequence, self.generation, 0, self.sequence)


def next_claim(log: ObservedLog, above: Generation = NO_GENERATION) -> NextClaim:
    """Return the claim that follows ``log``. Damaged entries still occupy their numbers.

    Its generation exceeds ``above``, too: what the sinks' targets saw in a former life of the pipeline (LV4).
    """
    sequence = max([log.hint_sequence, *(entry.sequence for entry in log.entries)]) + 1
    read = [(e.sequence, e.content.generation) for e in log.entries if isinstance(e.content, Claim | Manifest)]
    last_sequence, last_generation = max(read, default=(0, 0))
    # Each damaged or lost entry after the last readable one may have been a claim: leave room for it, so that a
    # number is never used twice (R7).
    generation = max(last_generation + sequence - last_sequence, max((above, *(g for _, g in read))) + 1)
    # claims are never followed, so that those that led nowhere can be removed (R43)
    claims = {e.sequence for e in log.counted() if isinstance(e.content, Claim)}
    others = {*log.lost(), *(e.sequence for e in log.counted())} - claims
    follows = max(others, default=0)
    assert follows < sequence, "a claim follows what is in the log (R41)"
    assert generation > above, "a generation is newer than all before it (R7)"
    return NextClaim(sequence, Generation(generation), follows, life_of(log))


def life_of(log: ObservedLog) -> int:
    """Return which life of the pipeline ``log`` is of: where it began, 0 for the first (LV7)."""
    return next((entry.content.life for entry in log.counted() if not isinstance(entry.content, Damage)), 0)


def has_given_up(log: ObservedLog) -> bool:
    """Whether the newest entry gave up everything before it, and no generation has begun since (C72)."""
    return any(_gives_up(entry) for entry in log.counted()[:1])


def was_given_up(log: ObservedLog, mine: Generation) -> bool:
    """Whether everything was given up since generation ``mine``: its run is over, said or not (C74)."""
    return any(_gives_up(entry) and entry.content.generation > mine for entry in log.counted())  # type: ignore[union-attr]


def _gives_up(entry: ObservedEntry) -> bool:
    return isinstance(entry.content, Claim) and entry.content.life == entry.sequence


def first_checkpoint(log: ObservedLog, reserved: CheckpointId) -> CheckpointId:
    """Return the first id of a generation (R7). ``reserved`` is the newest id that was found after its claim (R42)."""
    ids = [e.content.checkpoint for e in log.entries if isinstance(e.content, Manifest)]
    return CheckpointId(max([reserved, log.reserved, *ids]) + 1)


def superseded(log: ObservedLog, claim: NextClaim) -> tuple[ObservedEntry, ...]:
    """Return the entries that nothing needs once ``claim`` is durable, oldest first: claims that led nowhere (R43).

    Older ones, too, that were followed by completed checkpoints before they could be removed.
    """
    needed = log.leading_to(claim.follows)
    led_on = {entry.content.generation for entry in log.entries if isinstance(entry.content, Manifest)}

    def is_idle(entry: ObservedEntry) -> bool:
        # what stands after the one that it follows are claims, or entries that do not count
        if entry.sequence > claim.follows:
            return True
        is_claim = isinstance(entry.content, Claim) and entry.content.generation not in led_on
        return is_claim and entry.sequence not in needed

    return tuple(entry for entry in log.entries if entry.sequence < claim.sequence and is_idle(entry))


def candidates(log: ObservedLog) -> tuple[Manifest, ...]:
    """Return the completed checkpoints, the newest in the log first (R8). Their files still have to be verified."""
    return tuple(entry.content for entry in log.counted() if isinstance(entry.content, Manifest))


def retained(log: ObservedLog, restored: Manifest | None) -> tuple[CheckpointId, ...]:
    """Return the checkpoints that may still be restored once ``restored`` was, oldest first: no newer one (C35)."""
    found = [manifest.checkpoint for manifest in candidates(log)]
    return () if restored is None else tuple(reversed(found[found.index(restored.checkpoint) :]))


@dataclass(frozen=True, slots=True)
class Gap:
    """Checkpoints that a start cannot use (R51): those after ``above`` and before ``below``.

    Their entries in the log are at ``sequences``; ``damages`` says why. An unreadable entry may have been any
    checkpoint between the two.
    """

    above: CheckpointId
    below: CheckpointId
    sequences: tuple[int, ...]
    damages: tuple[Damage, ...]


def gaps(log: ObservedLog, restored: Manifest, below: CheckpointId, skipped: Sequence[Damage] = ()) -> tuple[Gap, ...]:
    """Return the gaps to set aside when a start uses ``restored`` and goes on at ``below``, oldest first (R51).

    There is one gap after ``restored`` if it is not the newest; ``skipped`` says what is wrong there. There is one
    before it wherever an entry is unreadable or lost: otherwise the sweep would remove its snapshots as leftovers of a
    dead generation.
    """
    assert restored.checkpoint < below, "a start goes on after what it restores (R7)"
    end = max(log.hint_sequence, *(entry.sequence for entry in log.entries)) + 1
    at = next(e.sequence for e in log.counted() if e.content == restored)
    usable = [e for e in reversed(log.counted()) if isinstance(e.content, Manifest) and e.sequence <= at]
    bounds = [(0, CheckpointId(0)), *((e.sequence, e.content.checkpoint) for e in usable)]  # type: ignore[union-attr]
    unusable = _unusable_beside(log, {e.sequence for e in usable})
    found: list[Gap] = []
    for (first, above), (last, until) in zip(bounds, [*bounds[1:], (end, below)], strict=True):
        inside = {sequence: damage for sequence, damage in unusable.items() if first < sequence < last}
        if inside:
            damages = tuple(damage for damage in inside.values() if damage is not None)
            if first == at:
                damages = tuple(damage for damage in skipped if not any(damage in gap.damages for gap in found))
            found.append(Gap(above, until, tuple(inside), damages))
    return tuple(found)


def _unusable_beside(log: ObservedLog, usable: Collection[int]) -> dict[int, Damage | None]:
    """Return, by sequence, what was or may have been a checkpoint and is not ``usable``; ascending."""
    found: dict[int, Damage | None] = {sequence: lost_entry(sequence) for sequence in log.lost()}
    for entry in log.counted():
        if entry.sequence not in usable and not isinstance(entry.content, Claim):
            found[entry.sequence] = entry.content if isinstance(entry.content, Damage) else None
    return dict(sorted(found.items()))


def lost_entry(sequence: int) -> Damage:
    """Return what is wrong where an entry must have been and is missing."""
    return Damage(f"log/{sequence:010d}", "the entry is missing")


@dataclass(frozen=True, slots=True)
class StartFresh:
    """There has never been a completed checkpoint: every position starts at its initial configuration (C37)."""


@dataclass(frozen=True, slots=True)
class Restore:
    """Start from ``manifest``.

    ``skipped`` names all damage, newer or older; ``contradicts`` the checkpoints with committed output that will be
    produced again because of it (K18).
    """

    manifest: Manifest
    skipped: tuple[Damage, ...] = ()
    contradicts: tuple[CheckpointId, ...] = ()


@dataclass(frozen=True, slots=True)
class NothingLeft:
    """The newest completed checkpoint is final: all input has been processed and committed."""

    manifest: Manifest


@dataclass(frozen=True, slots=True)
class Refuse:
    """Nothing may start; ``reason`` says what the user can do, and ``remedy`` says it to programs, if to any."""

    reason: str
    remedy: Remedy | None = None


Choice: TypeAlias = StartFresh | Restore | NothingLeft | Refuse


def choose(log: ObservedLog, damage: Mapping[CheckpointId, Sequence[Damage]], policy: DamagedCheckpoint) -> Choice:
    """Choose what to start from (I4).

    ``damage`` holds, for each candidate that was verified, what is wrong with its files (empty: sound). Every
    candidate from the newest down to the first sound one must have been verified.
    """
    skipped = [e.content for e in reversed(log.counted()) if isinstance(e.content, Damage)]
    skipped += [lost_entry(sequence) for sequence in log.lost()]
    passed: list[CheckpointId] = []
    for manifest in candidates(log):
        # a candidate that was not verified is a KeyError here, never taken for sound
        problems = damage[manifest.checkpoint]
        if not problems:
            if policy is DamagedCheckpoint.FAIL and (passed or damage_after(log, manifest)):  # R14
                return Refuse(_describe(skipped) + _going_back(manifest, passed), RestoreFiles())
            if manifest.is_final and not passed:  # R13
                return NothingLeft(manifest)
            return Restore(manifest, tuple(skipped), tuple(passed))  # R10
        skipped += problems
        passed.append(manifest.checkpoint)
    if skipped:  # silently starting empty is forbidden (R11, C36)
        return Refuse(_describe(skipped) + "; no sound checkpoint is left", RestoreFiles())
    return StartFresh()


def damage_after(log: ObservedLog, manifest: Manifest | None) -> tuple[Damage, ...]:
    """Return what is unreadable or lost after ``manifest``, which may have been a newer one; None: anywhere."""
    at = next((e.sequence for e in log.counted() if e.content == manifest), 0)
    unreadable = {e.sequence: e.content for e in log.counted() if isinstance(e.content, Damage)}
    found = unreadable | {sequence: lost_entry(sequence) for sequence in log.lost()}
    return tuple(damage for sequence, damage in sorted(found.items()) if sequence > at)


def _going_back(manifest: Manifest, passed: Sequence[CheckpointId]) -> str:
    """Return what the user can do about damage, and what going back would repeat (K18)."""
    again = "checkpoint " + ", ".join(str(c) for c in passed) if passed else "whatever was completed since"
    return (
        f"; going back to checkpoint {manifest.checkpoint} would produce again the output that {again} committed: "
        "restore those files from a copy, or, to go back, use Pipeline(on_damaged_checkpoint='previous'), which "
        "keeps them aside"
    )


def _describe(skipped: Sequence[Damage]) -> str:
    return "; ".join(f"{d.path}: {d.problem}" for d in skipped)


def incompatibility_with(manifest: Manifest, definition: PipelineDefinition) -> Refuse | None:
    """Return why the state of ``manifest`` does not fit a pipeline, in one sentence, or None if it fits (R12)."""
    problem = matching_of(manifest, definition).problem()  # first: what is missing or unknown may have another name
    if problem is not None:
        return Refuse(*problem)
    return incompatibility(
        manifest,
        definition.plan.state_texts(),
        definition.plan.max_parallelism,
        definition.config.start.allow_unclaimed_state,
        definition.derived_names,
        definition.plan.state_rules(),
    )


def matching_of(manifest: Manifest, definition: PipelineDefinition) -> Matching:
    """Return the nodes of ``manifest`` beside those of a pipeline (EV13)."""
    held, promised = _held(manifest), {committable.sink for committable in manifest.committables}
    kept = {name: "its state" for name, text in manifest.state_texts.items() if text}
    kept |= dict.fromkeys(promised, "output that may not be committed yet")
    kept |= {name: f"{count} records that are not written yet" for name, count in held.items()}
    start = definition.config.start
    return Matching(f"checkpoint {manifest.checkpoint}", manifest.lineages, definition.lineages, kept, start.moved)


def incompatibility(
    manifest: Manifest,
    state_texts: Mapping[str, str],
    max_parallelism: int,
    unclaimed: Collection[str] = (),
    derived: Collection[str] = (),
    rules: Mapping[str, OperatorRules] = MappingProxyType({}),
) -> Refuse | None:
    """Return why the state of ``manifest`` does not fit a plan, in one sentence, or None if it fits (R12).

    The parallelism may differ: state moves with its key group, positions with their split (KG8, R15).

    Args:
        unclaimed: operators that may leave their state unused (SV30).
        derived: operators that the user gave no name (SV31).
        rules: what the user said about state that an older program wrote (EV1).
    """
    here = f"checkpoint {manifest.checkpoint}"
    if manifest.max_parallelism != max_parallelism:
        return Refuse(
            f"{here} was written with max_parallelism {manifest.max_parallelism}, this pipeline has "
            f"{max_parallelism}; set it back, because it decides which key belongs where"
        )
    for name, text in sorted(manifest.state_texts.items()):
        if name in unclaimed and name not in state_texts:
            continue
        if text and name not in state_texts:
            return Refuse(
                f"{here} holds state of operator '{name}', which this pipeline does not have; bring the operator "
                "back under this name, or run under another pipeline name to start without the old state, or, to leave "
                f"its state behind, give allow_unclaimed_state=['{name}'] "
                f"(headgate run --allow-unclaimed-state {name})",
                LeaveBehind(name),
            )
        if text:
            refusal = _judged(name, here, text, state_texts[name], rules).refusal
            if refusal is not None:
                return Refuse(refusal)
    for name, count in sorted(_held(manifest).items()):
        if name not in state_texts and name not in unclaimed:  # D15
            return Refuse(
                f"{here} holds {count} records that sink '{name}' has not written yet, and this pipeline has no such "
                "sink; bring it back under this name and run until it is drained or has written them, or, to give them "
                f"up, give allow_unclaimed_state=['{name}'] (headgate run --allow-unclaimed-state {name})",
                LeaveBehind(name),
            )
    for name, text in sorted(state_texts.items()):
        if text and manifest.state_texts.get(name) == "" and _judged(name, here, "", text, rules).refusal is not None:
            return Refuse(
                f"operator '{name}' has state, and {here} holds none for it; starting it empty would lose what "
                "it should have counted: start over (headgate run PROGRAM --fresh), run under another pipeline name, "
                "or give the operator another name to start it empty"
            )
        if text and name not in manifest.state_texts and name in derived:
            return Refuse(
                f"operator '{name}' has state, and {here} does not know it; if it is new, give it a name of its own "
                "(name=...) to start it empty: a name that is derived changes when operators are added before it",
                NameOperator(name),
            )
    return None


def _judged(name: str, here: str, before: str, now: str, rules: Mapping[str, OperatorRules]) -> Judged:
    """Return what becomes of the state of an operator that may have another identity now."""
    if before == now or _adds_timers(before, now):
        return Judged()
    return judged(name, here, before, now, rules.get(name, NO_OPERATOR_RULES))


def _adds_timers(before: str, now: str) -> bool:
    return StateIdentity(now).adds_timers_to(StateIdentity(before))  # TM6


def unclaimed_hook(manifest: Manifest, known: Collection[str]) -> str | None:
    """Return, as one sentence, which data of a hook no hook of the plan would restore, or None (EI9)."""
    for state in manifest.hooks:
        if state.data is not None and state.hook not in known:
            return (
                f"checkpoint {manifest.checkpoint} holds {len(state.data)} bytes of hook '{state.hook}', which this "
                "pipeline does not have: what the hook stands for would not go back with the pipeline; add the hook "
                f"under this name, or, if that does not matter, say so with pipeline.forget_hook('{state.hook}')"
            )
    return None


def changes(manifest: Manifest, definition: PipelineDefinition) -> list[str]:
    """Return what the user should know about a restore into a pipeline that was edited; it fits."""
    here = f"checkpoint {manifest.checkpoint}"
    state_texts = definition.plan.state_texts()
    new = [name for name, text in state_texts.items() if text and name not in manifest.state_texts]
    said = [f"operator '{name}' is new: it starts empty" for name in sorted(new)]
    rules = definition.plan.state_rules()
    for name, text in sorted(state_texts.items()):
        if name in manifest.state_texts:
            said += _judged(name, here, manifest.state_texts[name], text, rules).changes
    said += matching_of(manifest, definition).changes()
    allowed = {name for name in definition.config.start.allow_unclaimed_state if name not in state_texts}
    held = _held(manifest)
    promised = {committable.sink for committable in manifest.committables}
    for name in sorted(allowed):
        if manifest.state_texts.get(name) or held.get(name):
            said.append(f"the state of operator '{name}' in {here} is left behind")
        if name in promised:
            said.append(f"what {here} promised for sink '{name}', and was not committed yet, is given up")
    return said


def _held(manifest: Manifest) -> dict[str, int]:
    """Return how many records sinks hold back: rows of nodes without a declared state."""
    found: dict[str, int] = {}
    for entry in manifest.entries:
        for name, rows in (entry.rows or {}).items():
            if not manifest.state_texts.get(name):
                found[name] = found.get(name, 0) + sum(rows.values())
    return {name: count for name, count in found.items() if count}


def reset_owner(token: str) -> str:
    """Return the owner of the claim that makes an order count, for people; differs for each order."""
    return f"start over {token}"


def decided_reset(log: ObservedLog) -> str | None:
    """Return the order that the log has made count, unless a start has followed it; None: there is none (SO2, SO9)."""
    if not has_given_up(log):
        return None
    claim = log.counted()[0].content
    return claim.order if isinstance(claim, Claim) else None


def is_reset(log: ObservedLog) -> bool:
    """Whether the newest entry decided a reset, and no generation has begun since (SO2)."""
    return decided_reset(log) is not None


def newest_generation(log: ObservedLog) -> Generation:
    """Return the newest generation that anything in ``log`` is of, 0 if there is none."""
    found = [entry.content.generation for entry in log.counted() if hasattr(entry.content, "generation")]
    return max(found, default=Generation(0))


def replaced_by(log: ObservedLog, mine: Generation, owner: str, since: int) -> Generation | Damage | None:
    """Return the newest generation that another driver than ``owner`` began after ``mine``, or None.

    Ask before a driver claims again: one that was replaced stops. Were it to take over in turn, two drivers would
    replace each other for ever (C38, I5). A claim of its own that it does not know of does not count. A manifest counts
    like a claim, which may have been pruned (R40): a driver knows every generation of its own that has manifests.

    ``since`` is the first sequence that this driver did not write itself. Damage there may be an entry of another
    driver: then the answer is unknown, and the damage is returned (R56).
    """
    newer = (e.content for e in log.counted() if not isinstance(e.content, Damage) and e.content.generation > mine)
    others = [c.generation for c in newer if isinstance(c, Manifest) or c.owner != owner]
    if others:
        return max(others)
    damaged = (entry.content for entry in log.counted() if entry.sequence >= since)
    lost = (lost_entry(sequence) for sequence in log.lost() if sequence >= since)
    return next((found for found in (*damaged, *lost) if isinstance(found, Damage)), None)


def newest_of(later: Sequence[ObservedEntry], above: Generation) -> Generation | Damage | None:
    """Return the newest generation above ``above`` among the entries ``later``; None if there is none.

    If an unreadable entry may be of one, the answer is unknown, and the damage is returned (R56).
    """
    read = [entry.content.generation for entry in later if not isinstance(entry.content, Damage)]
    if any(generation > above for generation in read):
        return max(read)
    return next((entry.content for entry in later if isinstance(entry.content, Damage)), None)


@dataclass(frozen=True, slots=True)
class RetainedManifests:
    """The retained manifests, oldest first: checkpoint and sequence of each. The next one descends from the last."""

    kept: tuple[tuple[CheckpointId, int], ...] = ()
    life: int = 0
    """What the claim of the generation says."""

    @classmethod
    def observed(cls, log: ObservedLog, life: int = 0) -> RetainedManifests:
        """Return every manifest that counts in ``log``."""
        found = ((e.content.checkpoint, e.sequence) for e in log.counted() if isinstance(e.content, Manifest))
        return cls(tuple(reversed(tuple(found))), life)

    def of(self, checkpoints: Iterable[CheckpointId]) -> RetainedManifests:
        """Return only ``checkpoints``: the others are not gone back to (C35)."""
        wanted = set(checkpoints)
        return replace(self, kept=tuple((checkpoint, at) for checkpoint, at in self.kept if checkpoint in wanted))

    def start(self, oldest: CheckpointId, sequence: int) -> int:
        """Return where the log starts if ``oldest`` is the oldest that is kept; ``sequence`` if none is."""
        return min((at for checkpoint, at in self.kept if checkpoint >= oldest), default=sequence)

    def placed(self, manifest: Manifest, sequence: int, oldest: CheckpointId) -> Manifest:
        """Return ``manifest`` as it is written at ``sequence``, when ``oldest`` is the oldest that is kept with it."""
        follows = self.kept[-1][1] if self.kept else 0
        return replace(manifest, follows=follows, log_start=self.start(oldest, sequence), life=self.life)

    def completed(self, checkpoint: CheckpointId, sequence: int) -> RetainedManifests:
        """Return this with one more."""
        assert not self.kept or sequence > self.kept[-1][1], "the log only grows (R6)"
        return replace(self, kept=(*self.kept, (checkpoint, sequence)))

    def dropped(self, oldest: CheckpointId) -> RetainedManifests:
        """Return this without those before ``oldest``."""
        return replace(self, kept=tuple((checkpoint, at) for checkpoint, at in self.kept if checkpoint >= oldest))
