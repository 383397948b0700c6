"""What an outside observer of a pipeline sees, and what must never be seen (I1 to I10).

Reads what reaches the disks and what users are shown, never a machine. Each check says what it rejects.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import field

from headgate.codec.json_files import decode_log_entry
from headgate.codec.snapshot import stored_file
from headgate.connectors.files.publish_log import COMMITTED, decode_files
from headgate.dataclass import dataclass
from headgate.errors import CorruptionError
from headgate.model.manifest import Claim, Committable, Manifest
from headgate.sim.machine.world import Violation

_ORDER = re.compile(r"[^/]+/resets/([^/]+)")
_ENTRY = re.compile(r"[^/]+/log/(\d{10,})")
_SNAPSHOT = re.compile(r"[^/]+/chk-(\d+)/")
"""The file of a snapshot: its checkpoint."""
_FILE = re.compile(r"part-.*-(\d{10})-\d{5}-(\d{10})-\d{5}\.[a-z]+")
"""A committed file: the checkpoint that sealed it, and its generation."""


@dataclass(slots=True)
class Written:
    """A manifest that reached the log. ``is_late``: when it did, a newer generation was claimed already."""

    manifest: Manifest
    is_late: bool
    files: dict[str, frozenset[str]]
    """What it promises and no manifest before it did, by sink."""


@dataclass(slots=True)
class History:
    """Everything seen so far.

    Attributes:
        retained: completed checkpoints that must stay.
        on_manifest: called with each manifest that is written, and what it promises.
        files_of: what committables promise, by sink; files, unless said otherwise.
    """

    retained: int
    on_manifest: Callable[[Manifest, Mapping[str, frozenset[str]]], None] = lambda manifest, files: None
    files_of: Callable[[Sequence[Committable]], dict[str, frozenset[str]]] = lambda committables: files_of(committables)
    written: dict[tuple[int, int], Written] = field(default_factory=dict)
    """By checkpoint and generation."""
    completed: dict[int, int] = field(default_factory=dict)
    """Checkpoints that users were notified of, with their generations."""
    standing: list[int] = field(default_factory=list)
    """Those of them that nothing has gone back to before."""
    went_back: list[tuple[int, int]] = field(default_factory=list)
    """Generation, and the checkpoint that it restored after others that were damaged."""
    damaged: set[int] = field(default_factory=set)
    may_go_back: set[tuple[int, int]] = field(default_factory=set)
    """Checkpoints that users go back to by hand, each with the newest one that they leave for it (SV25)."""
    copies: dict[int, int] = field(default_factory=dict)
    """Checkpoints that are in the log once more, under another id, because a user went back to them."""
    given_up: dict[str, tuple[int, int]] = field(default_factory=dict)
    """Entries of the log that gave up all checkpoints before them: their generation, and the newest of those (C72)."""
    steps: list[int] = field(default_factory=list)
    """Generations of the entries of the log that had the pipeline start over (SO2)."""
    emptied: int = 0
    """The step after which all targets are empty; 0: none."""
    finding: Violation | None = None
    """What was wrong first."""
    shared_count: int = 0
    """Parts of checkpoints that are files of checkpoints before them."""
    seen: dict[str, frozenset[str]] = field(default_factory=dict)
    """What readers of each sink have seen."""
    _log: dict[str, Claim | Manifest] = field(default_factory=dict)
    _ordered: dict[str, int] = field(default_factory=dict)
    """For each order to start over, the newest generation when it was written: nothing before it is looked at."""
    _completed_at_claim: dict[int, tuple[int, ...]] = field(default_factory=dict)
    _promised: dict[str, set[str]] = field(default_factory=dict)
    _published: dict[str, dict[str, bytes]] = field(default_factory=dict)
    _listed: dict[str, dict[str, frozenset[str]]] = field(default_factory=dict)
    """What each manifest of each sink lists."""
    _rounds: dict[tuple[str, str], int] = field(default_factory=dict)
    _owners: dict[int, str] = field(default_factory=dict)
    """Who claimed each generation."""
    _ran: set[str] = field(default_factory=set)
    _replaced: set[str] = field(default_factory=set)

    @property
    def generations_count(self) -> int:
        """How many were claimed; more than one began after a failure, or when a user started the pipeline again."""
        return len(self._owners)

    def fail(self, invariant: str, problem: str) -> None:
        """Remember the first finding: the process that did it must not notice, and may not hide it."""
        self.finding = self.finding or Violation(invariant, problem)

    # -- what reaches the disks -------------------------------------------------------------------------------------

    def on_checkpoints_disk(self, path: str, data: bytes | None, there: Iterable[str] = ()) -> None:
        """Something of the checkpoints changed. ``there``: all that is on this disk."""
        if _ENTRY.fullmatch(path):
            self._log.pop(path, None)
            if data is not None:
                newest = max((_number(other) for other in there if _ENTRY.fullmatch(other)), default=0)
                self._log_written(path, data, was_pruned=newest > _number(path))
        elif data is not None and (found := _ORDER.fullmatch(path)):
            self._ordered.setdefault(found.group(1), self.newest_generation())
        elif data is None and (found := _SNAPSHOT.match(path)):
            checkpoint = int(found.group(1))
            for needed in {checkpoint, self.copies.get(checkpoint, checkpoint)}.intersection(self.standing):
                newer = {other for other, _ in self.written if other > needed}
                if len(newer) < self.retained:
                    self.fail("I4", f"{path} is removed, and checkpoint {needed} may still be restored")

    def _log_written(self, path: str, data: bytes, *, was_pruned: bool) -> None:
        try:
            entry = decode_log_entry(data, path)
        except CorruptionError as error:
            self.fail("I4", f"the log holds what nobody can read: {error}")
            return
        if isinstance(entry, Claim):
            if was_pruned:
                return  # its driver slept since it looked: it is not the newest, and will be taken back
            if entry.order is None:
                self._gives_up(path, entry)
            else:
                self._starts_over(path, entry)
            self._completed_at_claim.setdefault(entry.generation, tuple(self.standing))
            self._claimed(entry)
        else:
            is_late = any(other.generation > entry.generation for other in self._log.values())
            former = self._former(entry)
            if former is None:
                self._check_whole(entry)
            elif not is_late:
                self._went_back_to(former, entry)
            own: dict[str, frozenset[str]] = {}
            for sink, names in self.files_of(entry.committables).items():
                promised = self._promised.setdefault(sink, set())
                own[sink] = names - promised
                promised.update(names)
            self.written[entry.checkpoint, entry.generation] = Written(entry, is_late, own)
            self.on_manifest(entry, own)
        self._log[path] = entry

    def _claimed(self, claim: Claim) -> None:
        if any(other.generation >= claim.generation for other in self._log.values()):
            return  # it will be taken back: its driver slept through what came since
        if claim.owner in self._replaced:
            self.fail("I5", f"{claim.owner} was replaced, and claims generation {claim.generation}")
        if claim.order is None and self.steps:
            self.on_emptied("SO3", f"generation {claim.generation} is claimed")
        self._owners[claim.generation] = claim.owner
        self._replaced |= self._ran - {claim.owner}

    def _gives_up(self, path: str, claim: Claim) -> None:
        """A claim that ends a life of the pipeline: what it gives up has kept all its promises (C71)."""
        is_stale = any(other.generation >= claim.generation for other in self._log.values())
        if is_stale or _number(path) != claim.life:
            return
        newest = max(self.completed, default=0)
        hidden = self.hidden_until(newest)
        if hidden:
            self.fail("I1", f"generation {claim.generation} gives up {newest}, and {hidden[:3]} is not visible")
        self.given_up[path] = claim.generation, newest
        self.standing.clear()

    def _starts_over(self, path: str, claim: Claim) -> None:
        """A claim that has the pipeline start over: what was promised is promised no more, and all output goes."""
        is_stale = any(other.generation >= claim.generation for other in self._log.values())
        if is_stale or _number(path) != claim.life:
            self.fail("SO2", f"{path} has the pipeline start over, and is not the newest entry")
        seen = self._ordered.get(claim.order or "", 0)
        since = [generation for generation, owner in self._owners.items() if generation > seen and owner != claim.owner]
        if since:
            self.fail("SO2", f"{path} gives up generations {since}, which nobody looked at")
        self.given_up[path] = claim.generation, max((written for written, _ in self.written), default=0)
        self.standing.clear()
        self.steps.append(claim.generation)

    def on_emptied(self, rule: str, moment: str) -> None:
        """All targets must be empty of what was written before the newest step, and stay so."""
        step = self.steps[-1]
        left = sorted(name for files in self._published.values() for name in files if generation_of(name) < step)
        if left and self.emptied < step:
            self.fail(rule, f"{moment}, and of what was written before generation {step} there is {left[:3]}")
        self.emptied = step

    def _is_to_go(self, name: str) -> bool:
        """Whether a file was written before the pipeline started over."""
        return bool(self.steps) and generation_of(name) < self.steps[-1]

    def _former(self, manifest: Manifest) -> int | None:
        """Return the older checkpoint of this pipeline that a start has written to the log once more."""
        origin = manifest.origin
        old = None if origin is None or manifest.place is not None else self.manifest(origin.checkpoint)
        if old is None or _taken(manifest) != _taken(old):
            return None
        return None if old.checkpoint == manifest.checkpoint else int(old.checkpoint)

    def _went_back_to(self, former: int, manifest: Manifest) -> None:
        """A start went back by hand: only to what was named.

        And only to before the newest checkpoint that was named.
        """
        newest = max((checkpoint for (checkpoint, _), one in self.written.items() if not one.is_late), default=0)
        if (former, newest) not in self.may_go_back:
            self.fail("SV25", f"generation {manifest.generation} goes back from {newest} to {former}, and nobody asked")
        self.went_back.append((manifest.generation, former))
        self.copies[former] = manifest.checkpoint
        self.standing = [*(one for one in self.standing if one <= former), manifest.checkpoint]

    def _check_whole(self, manifest: Manifest) -> None:
        """Every subtask is in it once, each with a snapshot that was written for it, or for a checkpoint before it."""
        found: dict[str, list[int]] = {}
        for entry in manifest.entries:
            found.setdefault(entry.subtask.vertex, []).append(entry.subtask.index)
            for part in entry.parts if manifest.place is None else ():
                wrote = stored_file(part.path)
                of = None if wrote is None else (wrote.checkpoint, wrote.generation)
                self.shared_count += of in self.written
                if of not in (None, (manifest.checkpoint, manifest.generation)) and of not in self.written:
                    self.fail("I8", f"checkpoint {manifest.checkpoint} of generation {manifest.generation} has {wrote}")
        for vertex, indexes in found.items():
            if indexes != list(range(manifest.parallelism)):
                self.fail("I4", f"checkpoint {manifest.checkpoint} has the subtasks {indexes} of {vertex}")

    def on_sink_disk(self, sink: str, path: str, data: bytes | None) -> None:
        """Something of a sink changed."""
        if path.startswith(f"{COMMITTED}/"):
            listed = self._listed.setdefault(sink, {})
            known = frozenset().union(*listed.values())
            before = listed.pop(path, frozenset())
            if data is not None:
                listed[path] = frozenset(file.name for file in decode_files(path, data))
            gone = before.difference(*listed.values())  # a merge lists them elsewhere first
            gone = frozenset(name for name in gone if not self._is_to_go(name))
            if gone:
                self.fail("I2", f"{sink} withdraws {sorted(gone)}, which it listed in {path}")
            for name in sorted(listed.get(path, frozenset()) - self._promised.get(sink, set())):
                self.fail("I1", f"{sink} commits {name}, which no completed checkpoint promises")
            for name in sorted(listed.get(path, frozenset()) - known):
                is_there = name in self._published.get(sink, {})  # a manifest may come late, when its files are gone
                if self.emptied and is_there and generation_of(name) < self.emptied:
                    self.fail("SO5", f"{sink} commits {name}, of before generation {self.emptied}, which started over")
                if self._is_aborted(name):
                    self.fail("SV25", f"{sink} commits {name}, which somebody has gone back past")
        elif _FILE.fullmatch(path):
            published = self._published.setdefault(sink, {}).get(path)
            if data is None and (self._is_to_go(path) or self._may_be_taken_back(sink, path)):
                del self._published[sink][path]
                return
            if data is None or (published is not None and published != data):
                self.fail("I2", f"{sink} {'removes' if data is None else 'changes'} {path}, which was published")
            self._published[sink][path] = data or b""

    def _may_be_taken_back(self, sink: str, name: str) -> bool:
        """Whether a start may go back to before the checkpoint of a published file that no process lists."""
        found = _FILE.fullmatch(name)
        assert found is not None
        is_listed = any(name in names for names in self._listed.get(sink, {}).values())
        sealed = int(found.group(1))
        is_left = any(former < sealed for former in self.copies)  # SV25
        return not is_listed and (is_left or any(checkpoint <= sealed for checkpoint in self.damaged))

    def _is_aborted(self, name: str) -> bool:
        """Whether a user went back by hand to before the checkpoint of a file, and has completed others since."""
        found = _FILE.fullmatch(name)
        assert found is not None
        sealed, generation = int(found.group(1)), int(found.group(2))
        return any(
            generation < newer and sealed > former and any(its >= newer for its in self.completed.values())
            for newer, former in self.went_back
            if former in self.copies
        )

    def hidden_until(self, checkpoint: int) -> list[str]:
        """Return what completed checkpoints up to this one promised, and no process can see yet."""
        found: list[str] = []
        for (completed, generation), one in self.written.items():
            if self.steps and generation < self.steps[-1]:
                continue
            if completed <= checkpoint and self.completed.get(completed) == generation and not one.is_late:
                for sink, names in one.files.items():
                    shown = frozenset().union(*self._listed.get(sink, {}).values())
                    found += sorted(names - shown)
        return found

    def manifest(self, checkpoint: int) -> Manifest | None:
        """Return a checkpoint that users were notified of, or that only its log knows; None if there is none."""
        found = [one.manifest for (written, _), one in self.written.items() if written == checkpoint]
        return found[-1] if found else None

    def newest_generation(self) -> int:
        """Return the newest one that was claimed."""
        return max(self._owners, default=0)

    # -- what users are told ----------------------------------------------------------------------------------------

    def on_completed(self, checkpoint: int) -> None:
        """A driver says that a checkpoint is completed."""
        found = [one for (written, _), one in self.written.items() if written == checkpoint]
        if not found:
            self.fail("I4", f"checkpoint {checkpoint} is said to be completed and is not in the log")
            return
        if checkpoint in self.completed or len(found) > 1:
            self.fail("I7", f"checkpoint {checkpoint} is completed twice")
        generation = found[0].manifest.generation
        if found[0].is_late:
            self.fail("I8", f"checkpoint {checkpoint} completed when generation {generation} was replaced")
        for other, its_generation in self.completed.items():
            if its_generation != generation and (other < checkpoint) != (its_generation < generation):
                self.fail(
                    "I7", f"checkpoint {checkpoint} of generation {generation} against {other} of {its_generation}"
                )
            if its_generation == generation and other > checkpoint:
                self.fail("I7", f"checkpoint {checkpoint} completes after {other}")
        self.completed[checkpoint] = generation
        if not self.steps or generation > self.steps[-1]:  # its driver may be told late
            self.standing.append(checkpoint)
        self._ran |= {owner for claimed, owner in self._owners.items() if claimed == generation}

    def on_restored(self, generation: int, checkpoint: int) -> None:
        """A driver says what a generation continues from."""
        known = self._completed_at_claim.get(generation)
        if known is None:
            self.fail("I7", f"generation {generation} was never claimed")
            return
        if checkpoint <= max((newest for by, newest in self.given_up.values() if by <= generation), default=0):
            self.fail("I4", f"generation {generation} restores {checkpoint}, which was given up")
        newer = [one for one in known if one > checkpoint and one in self.standing]
        if newer and not self.damaged:
            self.fail("I4", f"generation {generation} restores {checkpoint}, and {newer} were completed")
        if newer and not self.damaged.intersection(newer):
            self.fail("I4", f"generation {generation} goes back past {newer}, of which none is damaged")
        if newer or any(one > checkpoint for one in self.damaged):
            self.went_back.append((generation, checkpoint))
            self.standing = [one for one in self.standing if one <= checkpoint]

    def on_round(self, process: str, loop: str, number: int) -> None:
        """A user's function is informed that a round has ended."""
        last = self._rounds.get((process, loop))
        if last is not None and number > last + 1:
            self.fail("I7", f"{loop} leaves rounds out between {last} and {number}")
        self._rounds[process, loop] = number

    # -- what readers see -------------------------------------------------------------------------------------------

    def on_read(self, sink: str, files: Sequence[str]) -> None:
        """A user listed what is committed."""
        now = frozenset(files)
        gone = {name for name in self.seen.get(sink, frozenset()) - now if not self._is_to_go(name)}
        if gone:
            self.fail("I2", f"{sink} showed {sorted(gone)} before, and does not any more")
        for (checkpoint, generation), one in self.written.items():
            if self.steps and generation < self.steps[-1]:
                continue
            shown = one.files.get(sink, frozenset()) & now
            if shown and shown != one.files[sink] and checkpoint in self.completed:
                self.fail("I3", f"{sink} shows a part of checkpoint {checkpoint}: {sorted(shown)}")
        self.seen[sink] = now

    def is_repeated(self, file: str) -> bool:
        """Whether a committed file holds what was produced again, because a start went back to before damage (K18)."""
        found = _FILE.fullmatch(file)
        assert found is not None, file
        return self.is_taken_back(int(found.group(1)), int(found.group(2)))

    def is_taken_back(self, checkpoint: int, generation: int) -> bool:
        """Whether a start went back to before what a generation had for a checkpoint, because of damage."""
        return any(generation < newer and checkpoint > restored for newer, restored in self.went_back)


def _number(path: str) -> int:
    """Return the number of an entry of the log."""
    return int(path.rpartition("/")[2])


def sealed_by(file: str) -> int:
    """Return the checkpoint that a committed file was sealed by."""
    found = _FILE.fullmatch(file)
    assert found is not None, file
    return int(found.group(1))


def generation_of(file: str) -> int:
    """Return the generation that wrote a file."""
    found = _FILE.fullmatch(file)
    assert found is not None, file
    return int(found.group(2))


def files_of(committables: Sequence[Committable]) -> dict[str, frozenset[str]]:
    """Return what committables of file sinks promise, by sink."""
    found: dict[str, set[str]] = {}
    for committable in committables:
        names = (file.name for file in decode_files("a manifest", committable.payload))
        found.setdefault(committable.sink, set()).update(names)
    return {sink: frozenset(names) for sink, names in found.items()}


def _taken(manifest: Manifest) -> tuple[object, ...]:
    """Return when a checkpoint was taken and what is in it, but for what it promises: less of that is left later."""
    return manifest.trigger_wall_ms, manifest.duration_ms, tuple(entry.parts for entry in manifest.entries)
