"""The checkpoint log of one pipeline: read, claim a generation, reserve ids, append manifests.

::

<pipeline>/life                    identity of the pipeline for its sinks, put-if-absent, written first
<pipeline>/lives/<sequence>        its identity since entry <sequence> of the log gave up everything older
<pipeline>/log/0000000001          Claim or Manifest, put-if-absent: the only authority (docs/spec/recovery.md)
<pipeline>/log-hint                newest sequence known to exist; best effort, tells a lost entry from none
<pipeline>/ids/0000000007          this checkpoint id has been used <pipeline>/aside/<above>-<below>/...   files of
checkpoints that a start could not use <pipeline>/targets/, resets/       targets of the sinks, and reset orders
(``sink_registry``) <pipeline>/chk-0000000007/<vertex>-<subtask>.g<generation>    parts too large to be inlined
(snapshot_path)

Reads and writes; the meaning of entries is decided by ``protocol.checkpoints.recovery`` and the ``Coordinator``.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from enum import Enum
from typing import TypeAlias

from headgate.codec.json_files import decode_hint, decode_log_entry, encode_hint, encode_log_entry
from headgate.dataclass import dataclass
from headgate.errors import CorruptionError, FencedError, StorageError, UsageError
from headgate.model.ids import CheckpointId, Generation
from headgate.model.manifest import Claim, LogEntry, Manifest
from headgate.model.pipeline_identity import NO_GENERATION, PipelineIdentity
from headgate.protocol.checkpoints.recovery import (
    Damage,
    NextClaim,
    ObservedEntry,
    ObservedLog,
    RetainedManifests,
    candidates,
    first_checkpoint,
    life_of,
    newest_generation,
    newest_of,
    next_claim,
    replaced_by,
    reset_owner,
    superseded,
    was_given_up,
)
from headgate.runtime.checkpoints.sink_registry import LostOutput, PipelineIdentities, SinkRegistry
from headgate.runtime.checkpoints.snapshot_files import SnapshotFiles
from headgate.storage.base import (
    AlreadyExists,
    NotFound,
    Storage,
    list_numbered,
    number_name,
    read_with_retries,
    refuse_unless_exclusive,
)

READ_TRIES_MAX = 8
"""An entry may be pruned between the listing and its reading; more often in a row it counts as damage."""

_Reading: TypeAlias = Callable[[Callable[[], LogEntry]], LogEntry]


def _read_without_retry(read: Callable[[], LogEntry]) -> LogEntry:
    """Read once: the caller asks again soon, and goes on only with a clear answer."""
    return read()


class LogEntries:
    """Reads ``log/``, ``ids/`` and ``log-hint``."""

    def __init__(self, storage: Storage, pipeline: str) -> None:
        self._storage = storage
        self._pipeline = pipeline

    @property
    def url(self) -> str:
        """Where the pipeline is, for messages."""
        return f"{self._storage.url.rstrip('/')}/{self._pipeline}"

    def observe(self) -> ObservedLog:
        """Read the whole log, damaged entries included.

        Raises:
            StorageError
        """
        for _ in range(READ_TRIES_MAX):
            hint = self._read_hint()  # first: what is appended after the listing is not lost
            entries = tuple(self._observe_entry(sequence) for sequence in self.numbers("log"))
            if not any(isinstance(e.content, Damage) and e.content.has_vanished for e in entries):
                break  # else it was pruned meanwhile, so there is something newer to be seen
        return ObservedLog(entries, self.newest_id(), hint)

    def _observe_entry(self, sequence: int, reading: _Reading = read_with_retries) -> ObservedEntry:
        path = self.path(sequence)
        try:
            return ObservedEntry(sequence, path, reading(lambda: decode_log_entry(self._storage.get(path), path)))
        except CorruptionError as error:
            return ObservedEntry(sequence, path, Damage(path, str(error)))
        except NotFound:
            return ObservedEntry(sequence, path, Damage(path, "it vanished while it was read", has_vanished=True))

    def newest_generation(self, sequence: int, above: Generation = NO_GENERATION) -> Generation | None:
        """Return the newest generation above ``above`` that anything after entry ``sequence`` is of, or None.

        Raises:
            StorageError: unknown for now.
        """
        later: list[ObservedEntry] = []
        for number in reversed([number for number in self.numbers("log") if number > sequence]):
            later.append(self._observe_entry(number, _read_without_retry))
            if isinstance(newest_of(later, above), int):
                break  # older entries tell nothing more
        return self.refuse_damage(newest_of(later, above))

    def refuse_damage(self, newer: Generation | Damage | None) -> Generation | None:
        """Return ``newer``.

        Raises:
            StorageError: it is damage, which may be the entry of a newer driver (R56).
        """
        if isinstance(newer, Damage):
            raise StorageError(
                "read",
                f"{self._storage.url.rstrip('/')}/{newer.path}",
                f"{newer.problem}; perhaps another driver runs pipeline '{self._pipeline}', so this one must not go "
                "on; if no other one runs, stop this one and start it again",
            )
        return newer

    def path(self, sequence: int) -> str:
        """Return where entry ``sequence`` is."""
        return f"{self._pipeline}/log/{number_name(sequence)}"

    def id_path(self, checkpoint: CheckpointId) -> str:
        """Return where the id of ``checkpoint`` is reserved."""
        return f"{self._pipeline}/ids/{number_name(checkpoint)}"

    def numbers(self, directory: str) -> list[int]:
        """Return the numbers that have an object in ``directory``, ascending. Other files there are not ours."""
        return list(list_numbered(self._storage, f"{self._pipeline}/{directory}"))

    def newest_id(self) -> CheckpointId:
        """Return the newest reserved id, 0 if there is none."""
        return CheckpointId(max(self.numbers("ids"), default=0))

    def _read_hint(self) -> int:
        """Return the hint, 0 if there is none. One read wrongly would tell of an entry that never was."""
        path = f"{self._pipeline}/log-hint"
        try:
            return read_with_retries(lambda: decode_hint(self._storage.get(path), path))
        except (NotFound, CorruptionError):
            # without a hint only one thing is not noticed: that the newest entry itself was lost
            return 0

    def write_hint(self, sequence: int) -> None:
        """Note the newest sequence beside the log, best effort."""
        try:
            self._storage.put(f"{self._pipeline}/log-hint", [encode_hint(sequence)])
        except StorageError:
            return  # best effort: the log itself decides


CLAIM_TRIES_MAX = 100
"""Each lost race means that another driver claimed a generation; a hundred in a row is a crash loop elsewhere."""

KEEP_ALL = CheckpointId(0)


class Outcome(Enum):
    """Outcome of writing a manifest."""

    WRITTEN = "it is durable"
    FAILED = "it is certainly not there"
    UNKNOWN = "unknown"


@dataclass(frozen=True, slots=True)
class Claimed:
    """A generation of this driver. ``log`` is what was there before the claim."""

    next: NextClaim
    first_checkpoint: CheckpointId
    log: ObservedLog


class CheckpointLog:
    """Reads and appends the log of one pipeline."""

    def __init__(self, storage: Storage, pipeline: str) -> None:
        self._storage = storage
        self._pipeline = pipeline
        self._entries = LogEntries(storage, pipeline)
        self._identities = PipelineIdentities(storage, pipeline)
        self.files = SnapshotFiles(storage, pipeline)
        """Of the snapshots that manifests refer to."""
        self.lost_output = LostOutput(storage, pipeline)
        """Of output that a target denied."""
        self.sink_registry = SinkRegistry(storage, pipeline)
        """What the sinks write to, and orders to start over."""
        self._next_sequence = 0
        self._generation = Generation(0)
        self._lineage = RetainedManifests()
        self.life_id = ""
        """Of the identity that ``life`` or ``identity_after_reset`` last returned, "" before."""
        self.problem = ""
        """What storage last said about an append; for messages."""

    @property
    def url(self) -> str:
        """Where it is, for messages."""
        return self._entries.url

    @property
    def generation(self) -> Generation:
        """The newest generation that was claimed through this object, 0 before."""
        return self._generation

    def observe(self) -> ObservedLog:
        """Read the whole log, damaged entries included.

        Raises:
            StorageError
        """
        return self._entries.observe()

    def known_identity(self, observed: ObservedLog) -> PipelineIdentity | None:
        """Return the identity of this pipeline for its sinks, None if it was never drawn. Changes nothing.

        Raises:
            CorruptionError, StorageError
        """
        try:
            return self._identities.read(life_of(observed))
        except NotFound:
            return None

    def identity(self, host: str, wall_ms: int) -> PipelineIdentity:
        """Return the identity of this pipeline for its sinks; drawn at its very first start.

        Of any number of drivers that come at once, all get the same one. See ``identity_after_reset``.

        Raises:
            UsageError: the storage does not honour put-if-absent.
            CorruptionError, StorageError
        """
        if not self._identities.exists(0):
            # before anything is written: where a put does not tell who was first, two drivers could hold one generation
            refuse_unless_exclusive(self._storage, self._pipeline)
            self._identities.draw(0, self.url, host, wall_ms)
        # read back, not kept: of several drivers that start at once another one may have been first
        return self._adopt(self._identities.read(0))

    def identities_before(self, number: int) -> list[PipelineIdentity]:
        """Return the identities of this pipeline before identity ``number``.

        Raises:
            CorruptionError, StorageError
        """
        return self._identities.before(number)

    def identity_after_reset(self, number: int, host: str, wall_ms: int) -> PipelineIdentity:
        """Return the identity of this pipeline since entry ``number`` of its log gave up everything older (LV7).

        Raises:
            CorruptionError, StorageError
        """
        if not self._identities.exists(number):
            self._identities.draw(number, self.url, host, wall_ms)
        return self._adopt(self._identities.read(number))

    def _adopt(self, life: PipelineIdentity) -> PipelineIdentity:
        self.life_id = life.id
        return life

    def claim(
        self,
        owner: str,
        wall_ms: int,
        mine: Generation | None = None,
        above: Generation = NO_GENERATION,
        life: int | None = None,
    ) -> Claimed:
        """Claim the next generation (C38): from now on no older one completes anything.

        ``mine`` is the generation that this driver claimed before, if any; the new one exceeds ``above``, too (LV4).
        ``life`` is the identity that the sinks were checked for; None: they were not.

        Raises:
            FencedError: another driver has claimed after ``mine``: one that was replaced stops.
            UsageError: everything was given up after ``mine``.
            StorageError: among others, what may be the entry of another driver cannot be read (R56).
        """

        def following(log: ObservedLog) -> NextClaim:
            if mine is not None and was_given_up(log, mine):  # C74
                raise UsageError(
                    f"pipeline '{self._pipeline}' has ended, and its checkpoints were removed; start it again to begin "
                    "anew"
                )
            if life is not None and life_of(log) != life:
                raise StorageError("claim", self.url, "its checkpoints were removed a moment ago; start it again")
            return next_claim(log, above)

        return self._claim(owner, wall_ms, mine, following)

    def give_up(self, owner: str, wall_ms: int, mine: Generation) -> None:
        """End this life of the pipeline: give up every checkpoint, in one step, and remove their entries (C72).

        From then on none of them is restored, whatever of them is still there. Repeating it is safe.

        Raises:
            FencedError: another driver has claimed after ``mine``: everything is its own.
            StorageError: it may or may not be there; the next claim sees.
        """
        self._claim(owner, wall_ms, mine, lambda log: next_claim(log).ending_life())

    def start_over(self, order: str, wall_ms: int, seen: ObservedLog, above: Generation) -> Claimed:
        """Give up everything in ``seen``, as ``give_up`` does, in a generation above ``above``: ``order`` counts (SO2).

        Raises:
            FencedError: a driver has claimed since.
            StorageError: it may or may not be there; the next start sees.
        """
        self._next_sequence = next_claim(seen).sequence  # damaged entries before it belong to no driver any more
        mine = newest_generation(seen)
        return self._claim(reset_owner(order), wall_ms, mine, lambda log: next_claim(log, above).ending_life(), order)

    def _claim(
        self,
        owner: str,
        wall_ms: int,
        mine: Generation | None,
        next_of: Callable[[ObservedLog], NextClaim],
        order: str | None = None,
    ) -> Claimed:
        for _ in range(CLAIM_TRIES_MAX):
            log = self.observe()
            if mine is not None:
                self._refuse_if_replaced(log, mine, owner)
            following = next_of(log)
            claim = Claim(
                following.generation, owner, wall_ms, follows=following.follows, life=following.life, order=order
            )
            try:
                self._storage.put_if_absent(self._entries.path(following.sequence), [encode_log_entry(claim)])
            except AlreadyExists:
                # another driver took this number: look again, perhaps it replaced this one
                continue
            # A restart's fence: from this entry on no older generation completes anything. Later entries are read all
            # the same, because a number that was used and pruned looks free.
            if self._replaced_after(following.sequence) is None:
                return self._claimed(log, following)
        raise StorageError("claim", self.url, f"{CLAIM_TRIES_MAX} other drivers claimed it at the same time")

    def _refuse_if_replaced(self, log: ObservedLog, mine: Generation, owner: str) -> None:
        newer = self._entries.refuse_damage(replaced_by(log, mine, owner, self._next_sequence))
        if newer is not None:
            raise FencedError(f"pipeline {self._pipeline}", mine, newer)

    def _claimed(self, log: ObservedLog, following: NextClaim) -> Claimed:
        """Go by a claim that is durable and the newest; remove what nothing needs since."""
        assert following.generation > self._generation, "a claim is of a later generation than those before it"
        ids = self._entries.numbers("ids")  # looked up after the claim (R42)
        first = first_checkpoint(log, CheckpointId(max(ids, default=0)))
        # a life that ends keeps none of its checkpoints: their files are garbage from now on
        found = ObservedLog((), log.reserved) if following.ends_life else log
        self._next_sequence, self._generation = following.sequence + 1, following.generation
        self._lineage = RetainedManifests.observed(found, following.life)
        self.files.claimed(following.generation, first, candidates(found))
        self._entries.write_hint(following.sequence)
        with contextlib.suppress(StorageError):  # the next claim tries again
            for passed in superseded(log, following):
                self._storage.delete(passed.path)
            for older in ids[:-1]:  # left by a crash
                self._storage.delete(self._entries.id_path(CheckpointId(older)))
        return Claimed(following, first, log)

    def beside(self) -> list[CheckpointLog]:
        """Return the logs of all other pipelines in the same storage.

        Raises:
            StorageError
        """
        paths = (path.partition("/log/") for path in self._storage.list(""))
        others = {name for name, is_log, _ in paths if is_log and "/" not in name} - {self._pipeline}
        return [CheckpointLog(self._storage, name) for name in sorted(others)]

    def restored(self, retained: Sequence[CheckpointId]) -> None:
        """Have what is appended descend from the newest of ``retained``: what was skipped is not gone back to."""
        self._lineage = self._lineage.of(retained)
        self.files.restored(retained)

    def reserve(self, checkpoint: CheckpointId) -> None:
        """Record that ``checkpoint`` is in use, and forget what is far below it.

        A claim lists the ids after its entry, and this lists the log after its id: so no two
        generations use the same one (R42).

        Raises:
            FencedError: a newer generation was claimed; the id must not be used.
            StorageError
        """
        with contextlib.suppress(AlreadyExists):
            # there already: ours, after an answer that was lost; or of two generations the look below stops the older
            # one
            self._storage.put_if_absent(self._entries.id_path(checkpoint), [b""])
        newer = self.newer_generation()
        if newer is not None:
            raise FencedError(f"pipeline {self._pipeline}", self._generation, newer)
        self.files.began(checkpoint)
        if checkpoint > 1:
            # the newest id alone says what is used up
            self._storage.delete(self._entries.id_path(CheckpointId(checkpoint - 1)))

    def append(self, manifest: Manifest, oldest_retained: CheckpointId = KEEP_ALL) -> Outcome:
        """Complete a checkpoint: write its manifest as the next entry, once (C12).

        ``oldest_retained``: once this one is completed, older checkpoints count for nothing.

        Raises:
            FencedError: that entry is the claim of a newer generation.
        """
        assert self._next_sequence > 0, "a generation is claimed before it completes checkpoints"
        assert manifest.generation == self._generation, "only the generation that claimed the log completes checkpoints"
        path = self._entries.path(self._next_sequence)
        # The durable point of a checkpoint (C12): until this put nothing of it counts, after it all its output is
        # promised.
        data = encode_log_entry(self._lineage.placed(manifest, self._next_sequence, oldest_retained))
        try:
            self._storage.put_if_absent(path, [data])
        except AlreadyExists:
            return self._after_conflict(path, data, manifest)
        except StorageError as error:
            self.problem = str(error)
            return self._look_up(path, data, manifest)
        return self._written(manifest)

    def _look_up(self, path: str, data: bytes, manifest: Manifest) -> Outcome:
        """The write reported an error, perhaps after it took effect: read it back.

        That it can be read does not prove that it is durable: only a put that says so does.
        """
        try:
            self._storage.get(path)
            self._storage.put_if_absent(path, [data])
        except NotFound:
            return Outcome.UNKNOWN if self._storage.puts_may_land_late else Outcome.FAILED
        except AlreadyExists:
            return self._after_conflict(path, data, manifest)
        except StorageError:
            return Outcome.UNKNOWN
        return self._written(manifest)

    def _after_conflict(self, path: str, data: bytes, manifest: Manifest) -> Outcome:
        try:
            found = self._storage.get(path)
            entry = decode_log_entry(found, path)
        except (StorageError, NotFound, CorruptionError):
            return Outcome.UNKNOWN
        if found == data:
            return self._written(manifest)
        if entry.generation == manifest.generation:  # our own earlier write, which had been given up, took effect
            return Outcome.UNKNOWN
        raise FencedError(f"pipeline {self._pipeline}", manifest.generation, entry.generation)

    def _written(self, manifest: Manifest) -> Outcome:
        try:
            newest = self._replaced_after(self._next_sequence)
        except (StorageError, NotFound, CorruptionError):
            return Outcome.UNKNOWN
        if newest is not None:
            raise FencedError(f"pipeline {self._pipeline}", manifest.generation, newest)
        # after the entry: a hint to one that is not there would be taken for a lost one
        self._entries.write_hint(self._next_sequence)
        self._lineage = self._lineage.completed(manifest.checkpoint, self._next_sequence)
        self.files.completed(manifest)
        self._next_sequence += 1
        return Outcome.WRITTEN

    def _replaced_after(self, sequence: int) -> Generation | None:
        """After an append: if anything follows, return the generation that wrote last; take ours back if stale.

        A number that was used and pruned looks free to a driver that was stopped meanwhile. What counts stays: then
        another driver has *seen* ours, and perhaps restored from it.
        """
        newest = self._entries.newest_generation(sequence)
        if newest is not None and sequence not in {entry.sequence for entry in self.observe().counted()}:
            self._storage.delete(self._entries.path(sequence))
        return newest

    def newer_generation(self) -> Generation | None:
        """Return the generation that replaced this one, whatever was pruned (R40), or None. Cheap: one listing.

        Raises:
            StorageError: unknown for now.
        """
        return self._entries.newest_generation(self._next_sequence - 1, self._generation)

    def discard_aside(self) -> int:
        """Remove what was set aside (R51); return how many files of checkpoints that were.

        Raises:
            StorageError
        """
        return self.files.discard_aside(lambda: candidates(self.observe()))

    def drop(self, checkpoint: CheckpointId, oldest_retained: CheckpointId) -> None:
        """Remove the snapshots up to a completed checkpoint, and the log entries before the oldest retained one (C31).

        Aborted checkpoints in between may have left unknown files: they go, too.
        """
        # files first: the newest manifest names where the log starts, so entries before that count for nothing already
        self.files.drop(checkpoint)
        self._lineage = self._lineage.dropped(oldest_retained)
        start = self._lineage.start(oldest_retained, 0)
        for sequence in self._entries.numbers("log"):  # ascending: a crash in between leaves no gap
            if sequence < start:
                self._storage.delete(self._entries.path(sequence))
