"""The checkpoints of one pipeline in their storage: the write-once log, the snapshots, the reserved ids.

::

    <pipeline>/life                    who the pipeline is to its sinks, put-if-absent, before all else (lives.md)
    <pipeline>/log/0000000001          Claim or Manifest, put-if-absent: the only authority (docs/spec/recovery.md)
    <pipeline>/log-hint                newest sequence known to exist; best effort, tells a lost entry from none
    <pipeline>/ids/0000000007          this checkpoint id has been used (R7)
    <pipeline>/aside/<restored>-<below>/...   the files of the checkpoints between are kept: a start went back (R51)
    <pipeline>/chk-0000000007/<vertex>-<subtask>.g<generation>    snapshots too large to be inlined

Reads and writes; what they mean is decided by ``protocol.checkpoints.recovery`` and the ``Coordinator``.
"""

from __future__ import annotations

import contextlib
import itertools
import re
import secrets
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import TypeVar

import xxhash

from headgate.codec.life import decode_life, encode_life
from headgate.codec.log_entry import decode_hint, decode_log_entry, encode_hint, encode_log_entry
from headgate.codec.snapshot import STATE_PREFIX, decode_sections
from headgate.codec.state_rows import difference, stored_rows
from headgate.errors import CorruptionError, FencedError, StorageError
from headgate.model.ids import CheckpointId, Generation, SubtaskId
from headgate.model.life import NO_GENERATION, Life
from headgate.model.manifest import Claim, Manifest, StateHandle
from headgate.protocol.checkpoints.lineage import Lineage
from headgate.protocol.checkpoints.recovery import (
    READS_MAX,
    Damage,
    NextClaim,
    ObservedEntry,
    ObservedLog,
    first_checkpoint,
    next_claim,
    replaced_by,
    superseded,
)
from headgate.storage.base import AlreadyExists, Bytes, NotFound, Storage, refuse_unless_exclusive
from headgate.storage.local import sweep_unfinished

"""Of the sections of a snapshot that hold the state of an operator; its name follows."""

CLAIM_TRIES_MAX = 100
"""Each lost race means that another driver claimed a generation; a hundred in a row is a crash loop elsewhere."""

READ_TRIES_MAX = 8
"""An entry may be pruned between the listing and its reading; more often in a row it counts as damage."""

KEEP_ALL = CheckpointId(0)

_NUMBER = re.compile(r"[0-9]{10,}")


_CHECKPOINT_OF = re.compile(r"/chk-(\d+)/")
_ASIDE = re.compile(r"/aside/(\d{10,})-(\d{10,})/")
_WHY = "why"

_T = TypeVar("_T")


class Outcome(Enum):
    """What became of a manifest."""

    WRITTEN = "it is durable"
    FAILED = "it is certainly not there"
    UNKNOWN = "nobody can tell"


@dataclass(frozen=True, slots=True)
class Aside:
    """The checkpoints above ``restored`` and below ``below`` are kept: a start went back behind them. ``why`` names
    the damage."""

    restored: CheckpointId
    below: CheckpointId
    why: str


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
        self._next_sequence = 0
        self._generation = Generation(0)
        self._lineage = Lineage()
        self.problem = ""
        """What storage last said about an append; for messages."""

    @property
    def url(self) -> str:
        """Where it is, for messages."""
        return f"{self._storage.url.rstrip('/')}/{self._pipeline}"

    def observe(self) -> ObservedLog:
        """Read the whole log, damaged entries included.

        Raises:
            StorageError
        """
        for _ in range(READ_TRIES_MAX):
            hint = self._read_hint()  # first: what is appended behind the listing is not lost
            entries = tuple(self._observe_entry(sequence) for sequence in self._numbers("log"))
            if not any(isinstance(e.content, Damage) and e.content.has_vanished for e in entries):
                break  # else it was pruned meanwhile, so there is something newer to be seen
        return ObservedLog(entries, self._newest_id(), hint)

    def _observe_entry(self, sequence: int) -> ObservedEntry:
        path = self._entry_path(sequence)
        try:
            return ObservedEntry(sequence, path, read_again(lambda: decode_log_entry(self._storage.get(path), path)))
        except CorruptionError as error:
            return ObservedEntry(sequence, path, Damage(path, str(error)))
        except NotFound:
            return ObservedEntry(sequence, path, Damage(path, "it vanished while it was read", has_vanished=True))

    def life(self, host: str, wall_ms: int) -> Life:
        """Return who this pipeline is to its sinks; drawn at its very first start, which nothing precedes (LV1).

        Of any number of drivers that come at once, all get the same one. Directories of version 0.1 have none.

        Raises:
            UsageError: the storage does not honour put-if-absent.
            CorruptionError, StorageError
        """
        path = f"{self._pipeline}/life"
        try:
            self._storage.get(path)
        except NotFound:
            refuse_unless_exclusive(self._storage, self._pipeline)
            newest = Generation(next_claim(self.observe()).generation - 1)
            drawn = Life(secrets.token_hex(16), self.url, host, wall_ms, newest)
            with contextlib.suppress(AlreadyExists):
                self._storage.put_if_absent(path, [encode_life(drawn)])
        life = read_again(lambda: decode_life(self._storage.get(path), f"{self._storage.url}/{path}"))
        if life is None:
            raise CorruptionError(f"{self._storage.url}/{path}", 0, "a life", "none")
        return life

    def claim(
        self, owner: str, wall_ms: int, mine: Generation | None = None, above: Generation = NO_GENERATION
    ) -> Claimed:
        """Claim the next generation (C38): from now on no older one completes anything.

        ``mine`` is the generation that this driver claimed before, if any; the new one exceeds ``above``, too (LV4).

        Raises:
            FencedError: another driver has claimed after ``mine``: one that was replaced stops (X9).
            StorageError
        """
        for _ in range(CLAIM_TRIES_MAX):
            log = self.observe()
            newer = None if mine is None else replaced_by(log, mine, owner)
            if mine is not None and newer is not None:
                raise FencedError(f"pipeline {self._pipeline}", mine, newer)
            following = next_claim(log, above)
            entry = encode_log_entry(Claim(following.generation, owner, wall_ms, follows=following.follows))
            try:
                self._storage.put_if_absent(self._entry_path(following.sequence), [entry])
            except AlreadyExists:
                continue
            if self._replaced_after(following.sequence) is not None:
                continue
            first = first_checkpoint(log, self._newest_id())  # looked up behind the claim (R42)
            self._next_sequence, self._generation = following.sequence + 1, following.generation
            self._lineage = Lineage.observed(log)
            self._write_hint(following.sequence)
            with contextlib.suppress(StorageError):  # the next claim tries again
                for passed in superseded(log, following):
                    self._storage.delete(passed.path)
            return Claimed(following, first, log)
        raise StorageError("claim", self.url, f"{CLAIM_TRIES_MAX} other drivers claimed it at the same time")

    def restored(self, retained: Sequence[CheckpointId]) -> None:
        """Have what is appended descend from the newest of ``retained``: what was skipped is not gone back to."""
        self._lineage = self._lineage.of(retained)

    def reserve(self, checkpoint: CheckpointId) -> None:
        """Record that ``checkpoint`` is in use, and forget what is far below it.

        Whoever claims looks at the ids behind its claim, and this looks at the log behind its id: so no two
        generations use the same one (R42).

        Raises:
            FencedError: a newer generation was claimed; the id must not be used.
            StorageError
        """
        with contextlib.suppress(AlreadyExists):
            self._storage.put_if_absent(self._id_path(checkpoint), [b""])
        newer = self.newer_generation()
        if newer is not None:
            raise FencedError(f"pipeline {self._pipeline}", self._generation, newer)
        if checkpoint > 1:
            self._storage.delete(self._id_path(CheckpointId(checkpoint - 1)))

    def append(self, manifest: Manifest, oldest_retained: CheckpointId = KEEP_ALL) -> Outcome:
        """Complete a checkpoint: write its manifest as the next entry, once (C12).

        ``oldest_retained``: once this one is completed, older checkpoints count for nothing.

        Raises:
            FencedError: that entry is the claim of a newer generation.
        """
        path = self._entry_path(self._next_sequence)
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

        That it can be read does not prove that it is durable: only a put that says so does (O11).
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
        self._write_hint(self._next_sequence)
        self._lineage = self._lineage.completed(manifest.checkpoint, self._next_sequence)
        self._next_sequence += 1
        return Outcome.WRITTEN

    def _replaced_after(self, sequence: int) -> Generation | None:
        """After an append: if anything follows, return the generation that wrote last; take ours back if stale (X8).

        A number that was used and pruned looks free to a driver that was stopped meanwhile. What counts stays: then
        another driver has *seen* ours, and perhaps restored from it.
        """
        newest = self._newest_generation(sequence)
        if newest is not None and sequence not in {entry.sequence for entry in self.observe().counted()}:
            self._storage.delete(self._entry_path(sequence))
        return newest

    def _newest_generation(self, sequence: int) -> Generation | None:
        """Return the generation of the newest entry after ``sequence`` that can be read; None if nothing follows."""
        later = [number for number in self._numbers("log") if number > sequence]
        for number in reversed(later):
            path = self._entry_path(number)
            with contextlib.suppress(NotFound, CorruptionError):
                return decode_log_entry(self._storage.get(path), path).generation
        if later:
            raise StorageError("read", self.url, f"nothing after entry {sequence} of the log can be read")
        return None

    def newer_generation(self) -> Generation | None:
        """Return the generation that replaced this one, whatever was pruned (R40), or None. Cheap: one listing.

        Raises:
            StorageError: nobody can tell now.
        """
        newest = self._newest_generation(self._next_sequence - 1)
        return newest if newest is not None and newest > self._generation else None

    def set_aside(self, restored: Manifest, below: CheckpointId, skipped: Sequence[Damage]) -> None:
        """Keep what a start goes back behind, until somebody removes it (R51): snapshots and log entries.

        Repeating it changes nothing.

        Raises:
            StorageError
        """
        name = f"{self._pipeline}/aside/{restored.checkpoint:010d}-{below:010d}"
        counted = self.observe().counted()
        newer = itertools.takewhile(lambda entry: entry.content != restored, counted)
        for entry in newer:
            if not isinstance(entry.content, Claim):
                with contextlib.suppress(AlreadyExists, NotFound):
                    data = self._storage.get(entry.path)
                    self._storage.put_if_absent(f"{name}/log-{entry.sequence:010d}", [data])
        why = "".join(f"{damage.path}: {damage.problem}\n" for damage in skipped)
        with contextlib.suppress(AlreadyExists):
            self._storage.put_if_absent(f"{name}/{_WHY}", [why.encode()])

    def aside(self) -> list[Aside]:
        """Return what was set aside, oldest first.

        Raises:
            StorageError
        """
        paths = [path for path in self._storage.list(f"{self._pipeline}/aside") if path.endswith(f"/{_WHY}")]
        return [Aside(*_range_of(path), self._storage.get(path).decode("utf-8", "replace").strip()) for path in paths]

    def discard_aside(self) -> int:
        """Remove what was set aside; return how many files of checkpoints that were. Snapshots first, reasons last.

        Raises:
            StorageError
        """
        paths = self._storage.list(self._pipeline)
        ranges = _ranges_aside(paths)
        files = [path for path in paths if (found := _CHECKPOINT_OF.search(path)) and _is_within(found, ranges)]
        for path in [*files, *sorted(p for p in paths if "/aside/" in p)]:
            self._storage.delete(path)
        return len(files)

    def verify(self, manifest: Manifest) -> list[Damage]:
        """Read every snapshot file of ``manifest`` and return what is wrong with them (I4)."""
        found = []
        for entry in manifest.entries:
            try:
                self.read(entry.handle)
            except CorruptionError as error:
                found.append(Damage(error.path, str(error)))
            except NotFound as error:
                found.append(Damage(error.path, "the file is missing"))
        return found

    def read(self, handle: StateHandle) -> bytes:
        """Return the payload of a snapshot after checking it.

        Raises:
            CorruptionError, NotFound, StorageError
        """
        return read_snapshot(self._storage, self._pipeline, handle)

    def drop(self, checkpoint: CheckpointId, oldest_retained: CheckpointId) -> None:
        """Remove the snapshots up to a completed checkpoint, and the log entries before the oldest retained one (C31).

        Aborted checkpoints in between may have left files that nobody knows of: they go, too.
        """
        self._delete_snapshots(lambda found: found <= checkpoint)
        self._lineage = self._lineage.dropped(oldest_retained)
        start = self._lineage.start(oldest_retained, 0)
        for sequence in self._numbers("log"):  # ascending: a crash in between leaves no gap
            if sequence < start:
                self._storage.delete(self._entry_path(sequence))

    def sweep(self, keep: Sequence[CheckpointId], below: CheckpointId) -> None:
        """Remove snapshot files of checkpoints below ``below`` that are not kept: leftovers of dead generations."""
        sweep_unfinished(self._storage, self._pipeline)
        kept = {int(c) for c in keep}
        self._delete_snapshots(lambda found: found < below and found not in kept)

    def _delete_snapshots(self, is_garbage: Callable[[int], bool]) -> None:
        paths = self._storage.list(self._pipeline)
        ranges = _ranges_aside(paths)
        for path in paths:
            match = _CHECKPOINT_OF.search(path)
            if match and is_garbage(int(match.group(1))) and not _is_within(match, ranges):  # R51
                self._storage.delete(path)

    def delete(self, handles: Sequence[StateHandle]) -> None:
        """Remove snapshot files that nothing refers to."""
        for handle in handles:
            if handle.path:
                self._storage.delete(f"{self._pipeline}/{handle.path}")

    def _entry_path(self, sequence: int) -> str:
        return f"{self._pipeline}/log/{sequence:010d}"

    def _id_path(self, checkpoint: CheckpointId) -> str:
        return f"{self._pipeline}/ids/{checkpoint:010d}"

    def _numbers(self, directory: str) -> list[int]:
        """Return the numbers that have an object in ``directory``, ascending. Other files there are not ours."""
        prefix = f"{self._pipeline}/{directory}/"
        names = [path.removeprefix(prefix) for path in self._storage.list(prefix.rstrip("/"))]
        return sorted(int(name) for name in names if _NUMBER.fullmatch(name) and f"{int(name):010d}" == name)

    def _newest_id(self) -> CheckpointId:
        return CheckpointId(max(self._numbers("ids"), default=0))

    def _read_hint(self) -> int:
        """Return the hint, 0 if there is none. One read wrongly would tell of an entry that never was (R53)."""
        path = f"{self._pipeline}/log-hint"
        try:
            return read_again(lambda: decode_hint(self._storage.get(path), path))
        except (NotFound, CorruptionError):
            return 0

    def _write_hint(self, sequence: int) -> None:
        try:
            self._storage.put(f"{self._pipeline}/log-hint", [encode_hint(sequence)])
        except StorageError:
            return  # best effort: the log itself decides


def _range_of(path: str) -> tuple[CheckpointId, CheckpointId]:
    match = _ASIDE.search(path)
    assert match is not None
    return CheckpointId(int(match.group(1))), CheckpointId(int(match.group(2)))


def _ranges_aside(paths: Sequence[str]) -> set[tuple[CheckpointId, CheckpointId]]:
    return {_range_of(path) for path in paths if _ASIDE.search(path)}


def _is_within(match: re.Match[str], ranges: Collection[tuple[int, int]]) -> bool:
    return any(restored < int(match.group(1)) < below for restored, below in ranges)


def write_snapshot(
    storage: Storage,
    pipeline: str,
    subtask: SubtaskId,
    checkpoint: CheckpointId,
    generation: Generation,
    parts: Sequence[Bytes],
    inline_bytes_max: int,
    rows: dict[str, dict[str, int]] | None = None,
) -> StateHandle:
    """Make the snapshot of one subtask durable and return its handle (C13: small ones travel in the manifest).

    ``rows``: how many rows each state in it has, by operator and state.

    Raises:
        StorageError
    """
    digest = xxhash.xxh3_64()
    size = 0
    for part in parts:
        digest.update(part)
        size += len(part)
    if size <= inline_bytes_max:
        return StateHandle(size, digest.intdigest(), "", b"".join(bytes(part) for part in parts), rows)
    name = re.sub(r"[^A-Za-z0-9_.-]", "_", str(subtask.vertex))
    path = f"chk-{checkpoint:010d}/{name}-{subtask.index}.g{generation}"  # unique per generation (C33)
    storage.put(f"{pipeline}/{path}", parts)
    return StateHandle(size, digest.intdigest(), path, rows=rows)


def read_snapshot(storage: Storage, pipeline: str, handle: StateHandle) -> bytes:
    """Return the payload of ``handle`` after checking its size, its checksum, and the rows of each state (R30).

    A read that does not fit is repeated: one bad read is not damage (R50).

    Raises:
        CorruptionError, NotFound, StorageError
    """
    return read_again(lambda: _read_once(storage, pipeline, handle))


def read_again(read: Callable[[], _T]) -> _T:
    """Return what ``read`` returns; repeat it a few times while it says that the bytes are damaged or missing (R50)."""
    for _ in range(READS_MAX - 1):
        with contextlib.suppress(CorruptionError, NotFound):
            return read()
    return read()


def _read_once(storage: Storage, pipeline: str, handle: StateHandle) -> bytes:
    where = f"{pipeline}/{handle.path}" if handle.path else "an inlined snapshot"
    data = storage.get(where) if handle.path else handle.inline
    if len(data) != handle.size_bytes:
        raise CorruptionError(where, len(data), f"{handle.size_bytes} bytes", f"{len(data)} bytes")
    found = xxhash.xxh3_64_intdigest(data)
    if found != handle.checksum:
        raise CorruptionError(where, 0, f"checksum {handle.checksum:016x}", f"{found:016x}")
    if handle.rows:
        _check_rows(data, handle.rows, where)
    return data


def _check_rows(data: bytes, rows: Mapping[str, Mapping[str, int]], where: str) -> None:
    sections = decode_sections(data, where)
    for node, recorded in rows.items():
        state = sections.get(f"{STATE_PREFIX}{node}")
        inner = {} if state is None else decode_sections(state, f"{where}, state of '{node}'")
        problem = difference(recorded, stored_rows(inner, where))
        if problem is not None:
            expected, found = problem
            raise CorruptionError(where, 0, f"{expected} of operator '{node}', as its manifest says", found)
