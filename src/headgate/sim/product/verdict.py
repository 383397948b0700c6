"""What must hold when a pipeline has finished: each sink has what it must have, once, and nothing else is left.

``Verdict`` reads the output. ``StoredStates`` reads the state of checkpoints and savepoints. The ``of_``
functions look for what must not be left on disks and in processes (I6); each yields a sentence for every find.
"""

from __future__ import annotations

import random
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import polars as pl

import headgate as hg
from headgate.codec.json_files import decode_log_entry
from headgate.codec.snapshot import POSITIONS_PREFIX, decode_positions
from headgate.connectors.encode import decode
from headgate.connectors.files.file_committer import committed_files
from headgate.connectors.files.publish_log import (
    CLAIMS,
    COMMITTED,
    MERGE_AFTER,
    OWNERS,
    PUBLISHING,
    STAGING,
    decode_files,
)
from headgate.errors import CorruptionError, UsageError
from headgate.model.ids import key_groups_of_subtask
from headgate.model.manifest import Claim, Manifest
from headgate.model.progress import RECORDS_OUT
from headgate.protocol.checkpoints.recovery import candidates
from headgate.runtime.checkpoints.log import CheckpointLog
from headgate.runtime.wire.spill import SpillBudget
from headgate.sim.machine.surroundings import Network
from headgate.sim.machine.tasks import SimProcess, Tasks
from headgate.sim.machine.world import Violation
from headgate.sim.product.fault_injection import Running
from headgate.sim.product.settings import NAME, ROOT, Exactly
from headgate.sim.product.source import POSITION
from headgate.sim.product.steps import Row
from headgate.sim.product.workloads import Branches, Job, Splits, Values
from headgate.storage.urls import open_storage


class Verdict:
    """Reads what is there at the end. Runs in a process of its own, when nothing fails any more."""

    def __init__(self, run: Running) -> None:
        self._run = run
        self._settings, self._history = run.settings, run.history
        self.read: list[list[Row]] = []
        """The rows that the final checkpoint says were read, by source: known when they were checked."""

    def check(self) -> None:
        """Compare what was committed with what must have been.

        Raises:
            Violation
        """
        job = self._settings.job
        final = self._final()
        read = self.read = self._read_inputs(final)
        expected = job.expected(read)
        for sink, columns in job.columns.items():
            found, wanted = self._committed(sink, columns), expected[sink]
            if self._settings.grows:
                found, wanted = _folded(found), _folded(wanted)
            has_failed = self._history.generations_count > 1
            problem = self._settings.judge.problem(sink, found, wanted, has_failed=has_failed)
            if problem is not None:
                raise Violation("I1", f"{sink} {problem}")
        if self._settings.outside is not None:
            self._settings.outside.check([row for rows in read for row in rows], final.checkpoint)

    def _committed(self, sink: str, columns: tuple[str, ...]) -> Counter[Values]:
        files = committed_files(f"sim://{sink}")
        self._history.on_read(sink, files)
        found: Counter[Values] = Counter()
        order = Order(sink)
        for frame in frames_of(sink, [file for file in files if not self._history.is_repeated(file)]):
            rows = frame.select(columns).rows()
            found.update(rows)
            if sink in self._settings.job.rising:
                order.follow(rows)
        return found

    def _final(self) -> Manifest:
        """Return the checkpoint that the pipeline ended with.

        Raises:
            Violation: it is not final.
        """
        final = candidates(CheckpointLog(open_storage(ROOT), NAME).observe())[0]
        if not final.is_final:
            raise Violation("I1", f"the pipeline has finished, and checkpoint {final.checkpoint} is not final")
        return final

    def _read_inputs(self, final: Manifest) -> list[list[Row]]:
        """Return the rows that the final checkpoint says were read, by source.

        Raises:
            Violation: there are others, and no process asked for a drain.
        """
        log = CheckpointLog(open_storage(ROOT), NAME)
        read: list[list[Row]] = []
        for index, splits in enumerate(self._settings.inputs):
            positions = self._rows_read(splits, _positions(log, final, f"source{index}"))
            if not final.is_draining:
                self._check_complete(final.checkpoint, index, positions)
            read.append([row for name, at in positions.items() for row in splits[name][:at]])
            self._check_counted(final, index, len(read[-1]))
        return read

    def _check_counted(self, final: Manifest, source: int, rows_count: int) -> None:
        """Each record is counted once, whatever failed (OM1); one that at most once gave up is not."""
        counted = final.totals.get(f"source{source}", {}).get(RECORDS_OUT, 0)
        is_exact = isinstance(self._settings.judge, Exactly)
        if counted > rows_count or (is_exact and counted < rows_count):
            raise Violation("OM1", f"source{source} read {rows_count} rows and counted {counted}")

    def _rows_read(self, splits: Splits, positions: Mapping[str, bytes]) -> dict[str, int]:
        """Return how many rows of each split were read."""
        files = self._settings.files
        if files is None:
            return {name: POSITION.unpack(at)[0] for name, at in positions.items()}
        found: dict[str, int] = {}
        for path, at in positions.items():
            name = files.split_of(path)
            if name in found:
                raise Violation("I1", f"two files are {name}: {sorted(positions)}")
            found[name] = files.rows_read(path, at, splits[name])
        return found

    def _check_complete(self, checkpoint: int, source: int, positions: Mapping[str, int]) -> None:
        listed = self._run.listed_at.get(checkpoint)
        if listed is None and self._settings.files is not None and self._settings.grows:
            return  # its driver died before it could tell of it: nobody knows what was in the files
        splits = self._settings.inputs[source]
        for name, rows in (listed[source] if listed else {name: splits[name] for name in positions}).items():
            if positions.get(name) != len(rows):
                raise Violation("I1", f"split {name} of {len(rows)} rows was read to {positions.get(name)}")


def frames_of(sink: str, files: Iterable[str]) -> Iterator[pl.DataFrame]:
    """Read files of a sink, one after the other."""
    storage = open_storage(f"sim://{sink}")
    for file in files:
        yield decode("jsonl", storage.get(file))


class Order:
    """The records of one key come in the order in which they were made: its second column rises (I1)."""

    def __init__(self, sink: str) -> None:
        self._sink = sink
        self._last: dict[int, int] = {}

    def follow(self, rows: Sequence[Values]) -> None:
        """Look at the next records.

        Raises:
            Violation: one comes after a later one of its key.
        """
        for key, number, *_ in rows:
            if number <= self._last.get(key, 0):
                raise Violation("I1", f"{self._sink} has number {number} of key {key} behind {self._last[key]}")
            self._last[key] = number


def _positions(log: CheckpointLog, manifest: Manifest, source: str) -> dict[str, bytes]:
    found: dict[str, bytes] = {}
    for entry in manifest.entries:
        for stored in log.files.sections(entry, manifest.place).get(f"{POSITIONS_PREFIX}{source}", ()):
            found |= decode_positions(stored)
    return found


def _folded(records: Counter[Values]) -> Counter[Values]:
    """Add up windows, which a list of splits that grew may have had fire in several parts (``records.summed``)."""
    found: Counter[Values] = Counter()
    counts: Counter[tuple[int, int]] = Counter()
    sums: Counter[tuple[int, int]] = Counter()
    for record, times in records.items():
        if len(record) == 5 and record[-1] == -1:
            k, n, v, t, _ = record
            counts[k, t] += n * times
            sums[k, t] += v * times
        else:
            found[record] += times
    found.update((k, counts[k, t], sums[k, t] % 1009, t, -1) for k, t in counts)
    return found


_SNAPSHOT = re.compile(rf"{NAME}/chk-(\d+)/.+")
_ASIDE = re.compile(rf"{NAME}/aside/(\d+)-(\d+)/(?:why|skipped|log-\d+)")
_BEAT = re.compile(rf"{NAME}/heartbeats/([0-9]{{10}})(-ended)?")
_ENTRY = re.compile(rf"{NAME}/log/\d{{10,}}")
_ID = re.compile(rf"{NAME}/ids/\d{{10,}}")
_RECORD = re.compile(rf"{NAME}/targets/\d{{10,}}-[0-9a-f]{{16}}")
"""What the sinks write to, for who starts over: one for each life and each set of sinks."""

_NOTES = (f"{NAME}/life", f"{NAME}/log-hint")


def of_checkpoints(objects: Mapping[str, bytes], retained: int) -> Iterator[str]:
    """Look at a directory of checkpoints, of which the newest ``retained`` are kept (C31, R7, R43, R51)."""
    entries = {path: entry for path in objects if _ENTRY.fullmatch(path) if (entry := _entry(path, objects[path]))}
    manifests = [entry for entry in entries.values() if isinstance(entry, Manifest)]
    kept = {int(manifest.checkpoint) for manifest in manifests}
    asides = [found for path in objects if (found := _ASIDE.fullmatch(path))]
    passed_over = {c for c in kept if any(int(aside[1]) < c < int(aside[2]) for aside in asides)}
    passed_over = {c for c in passed_over if c > min(kept - passed_over, default=0)}  # entries go from the oldest on
    needed = {f"{NAME}/{path}" for manifest in manifests for path in manifest.files}  # perhaps of an older checkpoint
    if len(kept - passed_over) > retained:
        yield f"the log has {len(kept - passed_over)} manifests, and {retained} are retained"
    writers = {manifest.generation for manifest in manifests}
    unreadable = {_number(path) for path in objects if _ENTRY.fullmatch(path)} - {_number(path) for path in entries}
    claims = {path: entry for path, entry in entries.items() if isinstance(entry, Claim)}
    idle = [claim.generation for path, claim in claims.items() if _number(path) + 1 not in unreadable]
    idle = [generation for generation in sorted(idle) if generation not in writers]
    if len(idle) > 1:
        yield f"the log has claims of generations {idle}, which completed nothing"
    until = max((int(aside[2]) for aside in asides), default=0)  # what is aside may need anything older (SF7)
    beats = [int(found[1]) for path in objects if (found := _BEAT.fullmatch(path))]
    if len(set(beats)) > 1:
        yield f"generations {sorted(set(beats))} have signs of life, or ends, on record"
    ids = [path for path in sorted(objects) if _ID.fullmatch(path)]
    if len(ids) > 1:
        yield f"more than one reserved id is there: {ids}"
    for path in sorted(objects):
        snapshot = _SNAPSHOT.fullmatch(path)
        if snapshot is not None:
            if int(snapshot[1]) not in kept and path not in needed and int(snapshot[1]) >= until:
                yield f"{path} belongs to no checkpoint of the log"
        elif path not in _NOTES and not any(form.fullmatch(path) for form in (_ENTRY, _ID, _ASIDE, _BEAT, _RECORD)):
            yield f"{path} is nothing that anybody needs"


def _number(path: str) -> int:
    return int(path.rsplit("/", 1)[1])


def _entry(path: str, data: bytes) -> Claim | Manifest | None:
    try:
        return decode_log_entry(data, path)
    except CorruptionError:
        return None  # damage that nobody has asked for yet


ASKING = "asking"
"""A thread of a simulated user, who may have begun to ask in the moment in which the process ends."""


def of_process(process: SimProcess, tasks: Tasks, network: Network, budget: SpillBudget | None) -> Iterator[str]:
    """Look at a process with work that is done; ``budget`` is that of a worker's loops."""
    yield from (f"thread {name}" for name in tasks.of(process) if name != ASKING)
    yield from network.of(process)
    if budget is not None and (budget.memory_used_bytes or budget.disk_used_bytes):
        yield f"{budget.memory_used_bytes} bytes of loops in memory and {budget.disk_used_bytes} on disk"


def of_sink(objects: Mapping[str, bytes]) -> Iterator[str]:
    """Look at a directory of committed files: everything is decided, and listed."""
    rooms = Counter(path.split("/", 1)[0] for path in objects if "/" in path)
    for room in (STAGING, PUBLISHING):
        if rooms.pop(room, 0):
            yield f"undecided output is there: {sorted(p for p in objects if p.startswith(f'{room}/'))[:3]}"
    for room in (CLAIMS, OWNERS):
        if rooms.pop(room, 0) > 1:
            yield f"more than one object is there: {sorted(p for p in objects if p.startswith(f'{room}/'))[:3]}"
    manifests = [path for path in objects if path.startswith(f"{COMMITTED}/")]
    if rooms.pop(COMMITTED, 0) > MERGE_AFTER + 1:
        yield f"there are {len(manifests)} manifests of what was committed"
    if rooms:
        yield f"nobody needs what is in {sorted(rooms)}"
    listed = {file.name for path in manifests for file in decode_files(path, objects[path])}
    for path in sorted(objects):
        if "/" not in path and path not in listed:
            yield f"{path} was published, and nobody lists it"


RATE = 0.3
"""A user reads the state of so many seeds."""

KEYS_MAX = 3
SUBTASK, GROUP = "_subtask", "_key_group"

Expected = Callable[[Sequence[Row]], Counter[Values]]


def _per_key(rows: Sequence[Row]) -> Counter[Values]:
    return Counter(Counter(row["k"] for row in rows).items())


MODEL: dict[str, tuple[tuple[str, str | None, Expected], ...]] = {
    "numbered": (
        ("number", "count", _per_key),
        ("number", "kept", lambda rows: Counter((row["k"], row["n"]) for row in rows)),
    ),
    "once": (("first", "seen", lambda rows: Counter((row["k"], row["n"], row["v"]) for row in rows)),),
    "kept-by-row": (("by-row", "is_odd", lambda rows: Counter((k, n % 2 == 1) for k, n in _per_key(rows))),),
}
"""By workload: an operator, its state, and what must be in it for the rows that were read."""


class StoredStates:
    """Reads what is there at the end, in a process of its own, when nothing fails any more."""

    def __init__(self, seed: int) -> None:
        self._rng = random.Random(f"who reads the state of seed {seed}")
        self.is_drawn = self._rng.random() < RATE
        self.states_count = self.rows_count = self.compared_count = 0

    def check(self, job: Job, read: Sequence[Sequence[Row]], *, is_exact: bool) -> None:
        """Read every retained checkpoint; compare the final one with what follows from the rows that were read.

        Raises:
            Violation
        """
        if not self.is_drawn:
            return
        path = f"{ROOT}/{NAME}"
        final, *older = candidates(CheckpointLog(open_storage(ROOT), NAME).observe())
        self.look(path, final)
        for manifest in older:
            named_by_path = self._rng.random() < 0.5
            at = f"{path}/chk-{manifest.checkpoint}" if named_by_path else path
            self.look(at, manifest, None if named_by_path else manifest.checkpoint)
        self._err(path)
        if is_exact and isinstance(job, Branches):
            for workload in job.workloads:
                for operator, state, expected in MODEL.get(workload.name, ()):
                    self._compare(path, operator, state, expected(read[0]))

    def look(self, path: str, manifest: Manifest, id: int | None = None) -> None:
        """Read every state of one checkpoint or savepoint."""
        catalog = hg.state_catalog(path, id=id)
        for entry in catalog.iter_rows(named=True):
            operator, state = entry["operator"], entry["state"]
            more = [SUBTASK, *([GROUP] if entry["keys"] else [])]
            whole = hg.read_state(path, operator, state, id=id)
            self.states_count += 1
            self.rows_count += whole.height
            what = f"state '{state}' of '{operator}' in checkpoint {manifest.checkpoint}"
            _require(entry["rows"] in (None, whole.height), f"{what} has {whole.height} rows, not {entry['rows']}")
            columns = [*whole.columns, *(name for name in more if name not in whole.columns)]
            placed = hg.read_state(path, operator, state, id=id, columns=columns)
            _require(_rows(placed.select(whole.columns)) == _rows(whole), f"{what} differs when columns are chosen")
            if entry["keys"]:
                _require(_is_owned(placed, manifest), f"{what} has rows with a subtask that does not own their key")
                self._choose(path, entry, id, whole, what, manifest.max_parallelism)

    def _choose(
        self, path: str, entry: dict[str, Any], id: int | None, whole: pl.DataFrame, what: str, groups_count: int
    ) -> None:
        """Read it again in two halves of its key groups, and some keys of it."""
        operator, state = entry["operator"], entry["state"]
        groups = list(range(groups_count))
        self._rng.shuffle(groups)
        half = groups_count // 2
        parts = [
            hg.read_state(path, operator, state, id=id, key_groups=some) for some in (groups[:half], groups[half:])
        ]
        _require(_rows(parts[0]) + _rows(parts[1]) == _rows(whole), f"{what} is not what its key groups have")
        keys = whole.select(entry["keys"]).unique(maintain_order=True).rows()
        if any(value is None for key in keys for value in key):
            return  # nobody can ask for a key that is null
        chosen = self._rng.sample(keys, min(len(keys), KEYS_MAX))
        asked = [key if len(key) > 1 else key[0] for key in chosen]
        batches = list(hg.read_state_batches(path, operator, state, id=id, keys=asked))
        found = sum((_rows(pl.DataFrame(batch)) for batch in batches), Counter[str]())
        is_asked = pl.Series([key in chosen for key in whole.select(entry["keys"]).rows()], dtype=pl.Boolean)
        _require(found == _rows(whole.filter(is_asked)), f"{what} has other rows of {asked} when these are asked for")

    def _compare(self, path: str, operator: str, state: str | None, wanted: Counter[Values]) -> None:
        found = Counter(hg.read_state(path, operator, state).rows())
        self.compared_count += 1
        lost, more = sorted((wanted - found).elements()), sorted((found - wanted).elements())
        _require(found == wanted, f"'{state}' of '{operator}' lacks {lost[:4]} and has {more[:4]} more")

    def _err(self, path: str) -> None:
        """Ask for what is not there."""
        mistakes: list[Callable[[], object]] = [
            lambda: hg.read_state(path, "nobody"),
            lambda: hg.state_catalog(path, id=1_000_000),
            lambda: hg.state_catalog(f"{ROOT}/nowhere"),
            lambda: hg.state_catalog(""),
            lambda: hg.read_state(path, "source0", "nothing"),
            lambda: hg.read_state(path, "source0", columns=["nothing"]),
            lambda: hg.read_state(path, "source0", keys=[1]),
        ]
        try:
            self._rng.choice(mistakes)()
        except UsageError:
            return
        raise Violation("state", "somebody was shown what is not there")


def _rows(frame: pl.DataFrame) -> Counter[str]:
    """Return its rows, to be compared: values may be lists, which nothing can be counted by, and NaN."""
    return Counter(map(repr, frame.rows()))


def _is_owned(placed: pl.DataFrame, manifest: Manifest) -> bool:
    """Whether each row was with the subtask that owned the group of its key."""
    owned = [
        key_groups_of_subtask(subtask, manifest.max_parallelism, manifest.parallelism)
        for subtask in range(manifest.parallelism)
    ]
    return all(group in owned[subtask] for subtask, group in placed.select(SUBTASK, GROUP).iter_rows())


def _require(holds: bool, problem: str) -> None:
    if not holds:
        raise Violation("state", problem)
